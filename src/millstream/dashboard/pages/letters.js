// The workbench for messages that died: find, understand, mend, send again.

import { empty, field, h, heading, pill, replace, section } from "../dom.js";
import { get, part, post } from "../api.js";
import { button, confirm, doing } from "../dialogs.js";
import { planReplay, replays } from "../replays.js";
import { table } from "../tables.js";
import { ago, keyed, many, number, plain, short } from "../words.js";

export const title = "Dead letters";
const limit = 50;

export async function show(place, words, query, again) {
  const filter = Object.fromEntries(["topic", "group", "reason", "error", "key"].map((name) => [name, query.get(name) || ""]).filter((pair) => pair[1]));
  const inputs = Object.fromEntries(["topic", "group", "error", "key"].map((name) => [name, h("input", { value: filter[name] || "", autocomplete: "off", placeholder: { topic: "orders.#", error: "part of the error" }[name] || "", list: name === "topic" ? "jump-topics" : null })]));
  const [reasons, errors, found, scope, amount] = [h("div"), h("div"), h("div"), h("span", { class: "soft", role: "status" }), h("span", { class: "soft" })];
  const chosen = new Set();
  let rows = [], after = "", counted = { total: 0, by_reason: {}, by_error: {} };
  const filtered = Object.keys(filter).length > 0;
  const go = (changes) => { location.hash = `#/letters?${new URLSearchParams(Object.entries({ ...filter, ...changes }).filter((pair) => pair[1]))}`; };
  const apply = (event) => { event.preventDefault(); go(Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value.trim()]))); };
  const selection = () => (chosen.size ? { ids: [...chosen] } : filtered ? { filter } : { everything: true });
  const purge = button("Purge…", async () => {
    const doomed = selection();
    const { total } = await post("/dead-letters/purge", { ...doomed, dry_run: true });
    if (!place.isConnected || !(await confirm({ title: `Purge ${many(total, "dead letter")}?`, text: "They are removed for good and cannot be replayed any more.", action: `Purge ${number(total)}`, typed: total > 10 ? String(total) : "" }))) return null;
    const done = await post("/dead-letters/purge", doomed);
    await again();
    return done.total;
  }, { look: "danger", done: (total) => `${many(total, "dead letter was", "dead letters were")} purged.` });
  const replay = h("button", { class: "main", type: "button", onclick: () => planReplay(selection(), again) }, "Replay…");
  const progress = replays(again);

  const say = () => {
    scope.textContent = chosen.size ? `${number(chosen.size)} chosen` : filtered ? `all ${number(counted.total)} that match` : `all ${number(counted.total)}`;
    amount.textContent = `${number(rows.length)} of ${number(counted.total)} shown`;
    replay.disabled = purge.disabled = !counted.total;
  };
  const draw = () => {
    const tick = (row) => h("input", { type: "checkbox", checked: chosen.has(row.id), "aria-label": `Choose ${row.id}`, onchange: (event) => { if (event.target.checked) chosen.add(row.id); else chosen.delete(row.id); event.target.closest("tr").classList.toggle("chosen", event.target.checked); say(); } });
    replace(found, table([
      { title: "", label: "Choose", cell: tick },
      { title: "Died", cell: (row) => ago(row.dead_ms), sort: (row) => row.dead_ms },
      { title: "Topic / group", name: true, cell: (row) => [h("a", { href: `#/topic/${part(row.original_topic)}` }, row.original_topic), h("span", { class: "soft" }, ` / ${row.group}`)], sort: (row) => row.original_topic },
      { title: "Reason", cell: (row) => pill(plain(row.reason), "bad"), sort: (row) => row.reason },
      { title: "Error", wrap: true, cell: (row) => h("a", { href: `#/letter/${row.id}`, class: "clip", title: row.error }, row.error || "no error was given") },
      { title: "Tries", num: true, cell: (row) => number(row.deliveries), sort: (row) => row.deliveries },
      { title: "Key", name: true, cell: (row) => keyed(row) },
      { title: "", act: true, cell: (row) => h("a", { class: "button small", href: `#/letter/${row.id}`, "aria-label": `Open dead letter ${row.id}` }, "Open") },
    ], rows, { key: "letters", sorted: { index: 1, down: true }, caption: "Dead letters", mark: (row) => chosen.has(row.id), empty: after ? empty("Nothing so far", "Not all dead letters are looked through yet.") : filtered ? empty("No dead letter matches", h("a", { href: "#/letters" }, "Show all of them")) : empty("No dead letters", "Every message was handled, or is still being tried.") }),
    after ? h("div", { class: "tools after" }, more, amount) : null);
    say();
  };
  const read = (from, size) => get("/dead-letters", { ...filter, limit: size, after: from, encoding: "text" });
  const load = async () => { const page = await read(after, limit); rows = rows.concat(page.letters); after = page.after; draw(); };
  const more = h("button", { type: "button" }, "Show more");
  more.onclick = doing(more, load);
  const chips = (counts, name, text, kept) => Object.entries(counts).sort((a, b) => b[1] - a[1]).slice(0, kept).map(([value, amount]) => h("button", { type: "button", "aria-pressed": String(filter[name] === value), onclick: () => go({ [name]: filter[name] === value ? "" : value }) }, text(value), " ", h("b", {}, short(amount))));
  const count = async () => {
    counted = await get("/dead-letters/statistics", filter);
    replace(reasons, counted.total ? h("div", { class: "chips", role: "group", "aria-label": "Reasons" }, h("span", { class: "soft" }, "Reason"), chips(counted.by_reason, "reason", plain, 8)) : null);
    const named = Object.keys(counted.by_error).length;
    replace(errors, named > 1 || filter.error ? h("div", { class: "chips", role: "group", "aria-label": "Errors" }, h("span", { class: "soft" }, "Error"), chips(counted.by_error, "error", clipped, 5)) : null);
    say();
  };
  replace(place, heading("Dead letters", { actions: [scope, replay, purge] }), h("p", { class: "lead" }, "Messages that a group has given up on. See why, mend the cause, then replay them."),
    progress.box, reasons, errors, h("form", { class: "tools", onsubmit: apply }, Object.entries(inputs).map(([name, input]) => field(name[0].toUpperCase() + name.slice(1), input)), h("div", { class: "tools", style: "align-self:end;margin:0" }, h("button", { type: "submit" }, "Filter"), filtered ? h("a", { href: "#/letters" }, "Clear") : null)), found, section("Replays", progress.past));
  try {
    await Promise.all([load(), count(), progress.refresh()]);
  } catch (error) {
    if (error.status !== 403 || filter.topic) throw error;
    replace(found, h("div", { class: "notice plain" }, "This key does not show the dead letters of all topics. Filter by a topic that it covers."));
    return null;
  }
  return async () => {
    await Promise.all([count(), progress.refresh()]);
    const idle = () => rows.length <= limit && !chosen.size;
    if (!idle()) return;
    const page = await read("", limit);
    if (idle()) { rows = page.letters; after = page.after; draw(); }
  };
}

function clipped(text) { const line = text.split("\n")[0]; return line.length > 60 ? `${line.slice(0, 60)}…` : line; }
