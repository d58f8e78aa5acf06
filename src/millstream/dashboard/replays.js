// Replays of dead letters: what one would do, how far one is, and ending one.

import { facts, field, h, meter, pill, replace } from "./dom.js";
import { get, part, post, remove } from "./api.js";
import { button, doing, open } from "./dialogs.js";
import { table } from "./tables.js";
import { ago, bytes, duration, many, number, rate as perSecond } from "./words.js";

export const over = (replay) => !["running", "paused"].includes(replay.status);

// What would happen, in words.
export function planned(plan) {
  const targets = Object.entries(plan.targets);
  return [
    facts([
      ["Would be sent", `${many(plan.total, "message")}, ${bytes(plan.bytes)}`],
      ["To", targets.length ? targets.map(([name, count]) => h("div", {}, h("b", {}, name), ` ${number(count)}`)) : "nowhere"],
      ["Would take", plan.duration_ms ? duration(plan.duration_ms) : null],
      ["Cannot be sent", plan.stuck ? pill(many(plan.stuck, "letter"), "warn") : null],
    ]),
    plan.warnings.map((text) => h("div", { class: "notice" }, text)),
  ];
}

// Asks how, shows what would happen, and begins.
export function planReplay(selection, again) {
  open("Replay dead letters", (close) => {
    const target = h("input", { placeholder: "where each came from", list: "jump-topics", autocomplete: "off" });
    const speed = h("input", { type: "number", min: 0, step: "any", placeholder: "as fast as possible" });
    const plan = h("div", { role: "status", class: "card", style: "margin-top:14px" });
    const body = (dry_run) => ({ ...selection, ...(target.value.trim() ? { target: target.value.trim() } : {}), ...(speed.value ? { rate: Number(speed.value) } : {}), dry_run });
    const look = h("button", { type: "button" }, "Dry run");
    const start = h("button", { class: "main", type: "submit" }, "Replay");
    let asked = 0;
    look.onclick = doing(look, async () => {
      const turn = (asked += 1), answer = await post("/dead-letters/replays", body(true));
      if (turn === asked) replace(plan, h("h3", { style: "margin-bottom:8px" }, "What would happen"), planned(answer.plan));
    });
    for (const input of [target, speed]) input.addEventListener("change", () => look.onclick());
    queueMicrotask(() => look.onclick());
    const begin = doing(start, async () => { const { replay } = await post("/dead-letters/replays", body(false)); close(); await again(); return replay; }, (replay) => `Replay of ${many(replay.total, "message")} has begun.`);
    return h("form", { onsubmit: begin }, h("div", { class: "fields" }, field("To topic", target), field("Messages per second", speed)), plan, h("div", { class: "tools end" }, look, h("button", { type: "button", onclick: close }, "Cancel"), start));
  });
}

// One replay while it runs, redrawn every second; resolves to its report.
export async function watch(id, place) {
  for (;;) {
    const replay = await get(`/dead-letters/replays/${part(id)}`);
    replace(place, running(replay, () => {}));
    if (over(replay) || !place.isConnected) return replay;
    await new Promise((resolve) => setTimeout(resolve, 700));
  }
}

function running(replay, refresh) {
  const done = replay.replayed + replay.failed;
  const kind = { completed: "good", failed: "bad", aborted: "warn", paused: "warn" }[replay.status] || "main";
  return h("div", { class: "card", style: "margin:12px 0" }, h("div", { class: "tools" }, pill(replay.status, kind), h("b", {}, `${number(done)} of ${number(replay.total)}`), h("span", { class: "soft" }, [replay.target ? `to ${replay.target}` : "to where they came from", replay.rate ? `at ${perSecond(replay.rate)}` : "", replay.failed ? `${number(replay.failed)} failed` : "", replay.reason].filter(Boolean).join(", ")), h("span", { class: "grow" }), over(replay) ? null : abort(replay, refresh)), meter(replay.total ? done / replay.total : 1, `Replay: ${done} of ${replay.total}`));
}

function abort(replay, refresh) {
  return button("Abort", async () => { const ended = await remove(`/dead-letters/replays/${part(replay.id)}`); await refresh(); return ended; }, {
    look: "danger small",
    ask: { title: "Abort the replay?", text: "What was sent stays sent. The rest stays among the dead letters, and can be replayed later.", action: "Abort the replay" },
    done: (ended) => `The replay was aborted: ${number(ended.replayed)} were sent, ${number(ended.total - ended.replayed)} stay.`,
  });
}

// What runs, as cards on top; what is over, as a table.  While something runs it is asked for every second.
export function replays(again) {
  const box = h("div", { "aria-live": "polite" }), past = h("div");
  let timer = null;
  const refresh = async () => {
    const all = await get("/dead-letters/replays", { limit: 50 }).catch((error) => { if (error.status === 403) return []; throw error; });  // of all topics, which not everybody sees
    const busy = all.filter((one) => !over(one));
    replace(box, busy.map((one) => running(one, refresh)));
    replace(past, table([
      { title: "Began", cell: (row) => ago(row.created_ms), wide: true },
      { title: "Status", cell: (row) => [pill(row.status, { completed: "good", failed: "bad", aborted: "warn" }[row.status] || ""), row.reason ? h("span", { class: "soft" }, ` ${row.reason}`) : null] },
      { title: "To", name: true, cell: (row) => row.target || "where they came from" },
      { title: "Sent", num: true, cell: (row) => `${number(row.replayed)} of ${number(row.total)}` },
      { title: "Failed", num: true, cell: (row) => number(row.failed) },
      { title: "Died again", num: true, cell: (row) => (row.relapsed ? pill(number(row.relapsed), "warn") : "0") },
      { title: "Took", num: true, cell: (row) => (row.finished_ms ? duration(row.finished_ms - row.created_ms) : "–") },
    ], all.filter(over), { caption: "Replays that are over", empty: "Nothing was replayed yet." }));
    clearTimeout(timer);
    if (busy.length) timer = setTimeout(async () => { if (box.isConnected && !(await refresh().catch(() => 1))) again(); }, 1000);  // what fails comes with the next refresh of the page
    return busy.length;
  };
  return { box, past, refresh };
}
