// One dead letter: why it died, what it says, and sending it again, mended if need be.

import { empty, facts, field, h, heading, lead, pill, replace, section } from "../dom.js";
import { get, part, post } from "../api.js";
import { button, doing } from "../dialogs.js";
import { over, planned, watch } from "../replays.js";
import { table } from "../tables.js";
import { ago, bytes, duration, headersOf, keyed, number, plain, pretty, priorities, when } from "../words.js";

export const title = "Dead letter";

export async function show(place, [id], query, again) {
  const letter = await get(`/dead-letters/${part(id)}`, { encoding: "text" });
  const alive = await listed(letter);
  const purge = button("Purge", async () => { await post("/dead-letters/purge", { ids: [id] }); lead(place, "#/letters"); }, {
    look: "danger", done: "The dead letter was purged.",
    ask: { title: "Purge this dead letter?", text: "It is removed for good and cannot be replayed any more.", action: "Purge" },
  });
  replace(place, heading(letter.error.split("\n")[0] || "A message without an error", { crumbs: [["Dead letters", "#/letters"], [letter.original_topic, `#/letters?topic=${part(letter.original_topic)}`]], actions: alive ? purge : [] }),
    h("p", { class: "lead" }, pill(plain(letter.reason), "bad"), " in group ", h("a", { href: `#/queue/${part(letter.original_topic)}/${part(letter.group)}` }, `${letter.original_topic} / ${letter.group}`), ", ", ago(letter.dead_ms), ", after ", `${number(letter.deliveries)} ${letter.deliveries === 1 ? "delivery" : "deliveries"}.`),
    alive ? null : h("div", { class: "notice plain" }, "This letter was replayed or purged; it is shown from what is still stored."),
    h("div", { class: "columns" },
      h("div", {},
        h("section", { class: "card" }, h("h2", {}, "What went wrong"), h("pre", { tabindex: 0, "aria-label": "Error" }, letter.error || "No error was given.")),
        section("Attempts", attempts(letter)),
        section("Message", h("div", { class: "card" }, facts([
          ["Passport", h("a", { href: `#/message/${letter.original_id}`, class: "mono" }, letter.original_id)],
          ["Place", `partition ${letter.original_partition}, offset ${number(letter.original_offset)}`],
          ["Made", when(letter.timestamp_ms)],
          ["Died", when(letter.dead_ms)],
          ["Kept until", letter.kept_until_ms ? [when(letter.kept_until_ms), " (", ago(letter.kept_until_ms), ")"] : null],
          ["Key", letter.key === null ? null : keyed(letter)],
          ["Priority", letter.priority === 2 ? null : priorities[letter.priority]],
          ["Size", bytes(letter.size)],
        ])))),
      mend(id, letter, alive, again)));
}

// Whether it is among the dead letters still.  Thousands may have died in the same moment, and pages may be short.
async function listed(letter) {
  let page = { after: "" };
  do {
    page = await get("/dead-letters", { topic: letter.original_topic, group: letter.group, reason: letter.reason, since_ms: letter.dead_ms, until_ms: letter.dead_ms + 1, limit: 1000, value_bytes: 0, after: page.after });
    if (page.letters.some((one) => one.id === letter.id)) return true;
  } while (page.after);
  return false;
}

function attempts(letter) {
  const ended = (row) => pill({ nack: "failed", reject: "rejected", timeout: "timed out" }[row.kind] || row.kind, row.kind === "reject" ? "bad" : "warn");
  return table([
    { title: "Delivered", cell: (row) => [when(row.delivered_ms), h("div", { class: "soft" }, row.consumer ? `to ${row.consumer}` : "")] },
    { title: "Ended", cell: (row) => [ended(row), h("div", { class: "soft" }, `after ${duration(row.ended_ms - row.delivered_ms)}`)] },
    { title: "Error", wrap: true, cell: (row) => h("span", { class: "clip", title: row.reason }, row.reason || "–") },
  ], letter.attempts, { caption: "Attempts", empty: empty("No attempt is recorded") });
}

// The value and the headers, to be changed before it is sent again.
function mend(id, letter, alive, again) {
  const binary = letter.encoding === "base64";
  const value = h("textarea", { spellcheck: "false", value: letter.value === null ? "" : binary ? letter.value : pretty(letter.value), style: "min-height:240px", disabled: !alive, "aria-describedby": "value-hint" });
  const before = value.value;  // as the field has it, which writes every end of a line in one way
  const ends = /\r\n/.test(letter.value) && !/(^|[^\r])\n|\r(?!\n)/.test(letter.value) && !reads(letter.value) ? "\r\n" : "\n";
  const isJson = !binary && before !== "" && reads(before);
  const typed = Object.entries(letter.headers).flatMap(([name, values]) => [values].flat().map((one) => `${name}: ${one}`)).join("\n");
  const headers = h("textarea", { spellcheck: "false", value: typed, style: "min-height:70px", placeholder: "name: value, one per line", disabled: !alive });
  const lines = headers.value;
  const target = h("input", { placeholder: letter.original_topic, list: "jump-topics", autocomplete: "off", disabled: !alive });
  const [hint, outcome] = [h("span", { id: "value-hint", class: "soft" }), h("div", { role: "status" })];
  const look = h("button", { type: "button" }, "Dry run"), send = h("button", { class: "main", type: "submit" }, "Replay"), reset = h("button", { type: "button", class: "quiet" }, "As it was");
  const changed = () => value.value !== before || headers.value !== lines;
  const check = () => {
    const broken = isJson && !reads(value.value);
    value.setAttribute("aria-invalid", String(broken));
    hint.textContent = broken ? "It was JSON, and is not any more." : binary ? "Not text; shown as base64." : changed() ? "Changed. The dead letter itself stays as it is; what is sent is different." : isJson ? "JSON, shown with line breaks; sent exactly as it was unless you change it." : "";
    reset.disabled = !changed();
    send.textContent = changed() ? "Replay with changes" : "Replay";
  };
  value.addEventListener("input", check);
  headers.addEventListener("input", check);
  reset.onclick = () => { value.value = before; headers.value = lines; check(); };
  const body = (dry_run) => ({ ids: [id], dry_run, ...(target.value.trim() ? { target: target.value.trim() } : {}), edit: { ...(value.value === before ? {} : { value: value.value.replaceAll("\n", ends), encoding: binary ? "base64" : "text" }), ...headerChanges(lines, headers.value) } });
  look.onclick = doing(look, async () => { replace(outcome, h("div", { class: "card", style: "margin-top:14px" }, h("h3", { style: "margin-bottom:8px" }, "What would happen"), planned((await post("/dead-letters/replays", body(true))).plan))); });
  const begin = doing(send, async () => {
    const { replay } = await post("/dead-letters/replays", body(false));
    const report = await watch(replay.id, outcome);
    if (report.status === "completed" && !report.failed) await again();
    return report;
  }, (report) => (report.replayed ? `The message was sent again to ${target.value.trim() || letter.original_topic}.` : over(report) ? `It was not sent: ${report.failures[0]?.reason || report.reason || `the replay is ${report.status}`}.` : "The replay goes on."));
  check();
  return h("form", { class: "card", onsubmit: begin }, h("h2", {}, "Mend and send again"), field("Value", value, { wide: true }), h("div", { class: "hint" }, hint), field("Headers", headers, { wide: true }), h("div", { class: "fields", style: "margin-top:12px" }, field("To topic", target)), alive ? h("div", { class: "tools after" }, send, look, reset) : null, outcome);
}

function reads(text) { try { JSON.parse(text); return /^\s*[[{]/.test(text); } catch { return false; } }

function headerChanges(before, now) {
  if (before === now) return {};
  const was = headersOf(before), is = headersOf(now);
  const changed = Object.entries(is).filter(([name, value]) => String(was[name]) !== String(value));
  for (const [name, value] of changed) if (Array.isArray(value) || Array.isArray(was[name])) throw new Error(`The header ${name} is there several times, which can only be left as it is or removed.`);
  return { set_headers: Object.fromEntries(changed), remove_headers: Object.keys(was).filter((name) => !(name in is)) };
}
