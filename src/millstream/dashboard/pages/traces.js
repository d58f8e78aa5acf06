// What was recorded about messages: of one trace, of one key, or everything that failed.

import { empty, field, h, heading, pill, refusal, replace } from "../dom.js";
import { get, part } from "../api.js";
import { doing } from "../dialogs.js";
import { table } from "../tables.js";
import { many, plain, when } from "../words.js";

export const title = "Traces";
const bad = new Set(["rejected", "dead_lettered", "expired", "evicted"]), odd = new Set(["nacked", "timeout", "returned"]);

export async function show(place, words, query) {
  const inputs = { trace_id: h("input", { value: query.get("trace_id") || "", spellcheck: "false" }), topic: h("input", { value: query.get("topic") || "", list: "jump-topics", autocomplete: "off" }), key: h("input", { value: query.get("key") || "" }) };
  const failures = h("input", { type: "checkbox", checked: query.get("failures_only") === "true" });
  const found = h("div"), search = h("button", { class: "main", type: "submit" }, "Search"), more = h("button", { type: "button" }, "Look further");
  let rows = [], after = "", wanted = null;
  const draw = () => replace(found, table([
    { title: "Time", cell: (row) => when(row.time_ms, { milliseconds: true }) },
    { title: "What", cell: (row) => pill(plain(row.kind), bad.has(row.kind) ? "bad" : odd.has(row.kind) ? "warn" : "") },
    { title: "Message", cell: (row) => (row.id ? h("a", { href: `#/message/${row.id}`, class: "mono" }, row.id) : many(row.messages, "message")) },
    { title: "Topic", name: true, cell: (row) => h("a", { href: `#/topic/${part(row.topic)}` }, row.topic) },
    { title: "Group", cell: (row) => row.group || "–" },
    { title: "Error", wrap: true, cell: (row) => h("span", { class: "clip", title: row.error }, row.error || row.note) },
  ], rows, { caption: "What was recorded", empty: after ? empty("Nothing so far", "Not all records are looked through yet.") : empty("Nothing is recorded", "Failures always are; successes are sampled.") }), after ? h("div", { class: "tools after" }, more) : null);
  const look = async () => {
    const what = wanted;
    const page = await get("/traces", { ...what, after, limit: 100 });
    if (what !== wanted) return;  // somebody looks for something else by now
    rows = rows.concat(page.events);
    after = page.after;
    draw();
  };
  const begin = doing(search, async () => {
    rows = [];
    after = "";
    wanted = { trace_id: inputs.trace_id.value.trim(), topic: inputs.topic.value.trim(), key: inputs.key.value, failures_only: failures.checked };
    history.replaceState(null, "", `#/traces?${new URLSearchParams(Object.entries(wanted).filter((pair) => pair[1]))}`);
    // What was found before is not what was asked for now.
    try { await look(); } catch (error) { wanted = null; replace(found, refusal(error)); }
  });
  more.onclick = doing(more, look);
  replace(place, heading("Traces", { crumbs: [["Messages", "#/messages"]] }), h("p", { class: "lead" }, "What happened to messages, the newest first: of a trace, of a key of a topic, or everything that failed."),
    h("form", { class: "card", onsubmit: begin }, h("div", { class: "fields" }, field("Trace id", inputs.trace_id), field("Topic", inputs.topic), field("Key", inputs.key), field("Only failures", failures)), h("div", { class: "tools after" }, search)), h("div", { class: "section" }, found));
  await begin();
}
