// Looking through a topic without consuming anything.

import { empty, field, h, heading, refusal, replace } from "../dom.js";
import { get, part } from "../api.js";
import { doing, toast } from "../dialogs.js";
import { table } from "../tables.js";
import { ago, bytes, keyed } from "../words.js";

export const title = "Messages";
const most = 1000;

export async function show(place, words, query) {
  const text = (name, placeholder = "") => h("input", { value: query.get(name) || "", placeholder, autocomplete: "off", spellcheck: "false" });
  const whole = (name) => h("input", { type: "number", min: 0, value: query.get(name) || "" });
  const time = (name) => h("input", { type: "datetime-local", step: 1, value: query.get(name) || "" });
  const inputs = { topic: text("topic", "orders"), key: text("key"), header: text("header", "name=value"), text: text("text", "part of the value"), from: time("from"), until: time("until"), partition: whole("partition"), offset: whole("offset") };
  inputs.topic.required = true;
  inputs.topic.setAttribute("list", "jump-topics");
  const found = h("div"), search = h("button", { class: "main", type: "submit" }, "Search"), more = h("button", { type: "button" }, "Look further");
  const follow = h("button", { type: "button", "aria-pressed": "false" }, "Follow");
  let rows = [], after = "", following = null, wanted = null;

  const draw = () => replace(found, !wanted ? null : table([
    { title: "Message", cell: (row) => h("a", { href: `#/message/${row.id}`, class: "mono" }, row.id) },
    { title: "Stored", cell: (row) => ago(row.append_time_ms) },
    { title: "Partition", num: true, cell: (row) => row.partition },
    { title: "Offset", num: true, cell: (row) => row.offset },
    { title: "Key", name: true, cell: (row) => keyed(row) },
    { title: "Size", num: true, cell: (row) => bytes(row.size) },
    { title: "Value", wrap: true, cell: (row) => (row.value === null ? h("span", { class: "soft" }, "deletion marker") : h("code", { class: "clip" }, row.encoding === "base64" ? `base64: ${row.value}` : row.value)) },
  ], rows, { caption: "Messages", empty: following ? empty("Waiting for messages", "What is published from now on appears here.") : after ? empty("Nothing so far", "The topic is not looked through to its end yet.") : empty("No message matches") }),
  after && !following ? h("div", { class: "tools after" }, more, h("span", { class: "soft" }, rows.length ? "There may be more." : "")) : null);

  // As the fields have it now: what is typed later is another search.
  const asked = () => {
    const moment = (input) => (input.value ? new Date(input.value).getTime() : "");
    return { path: `/topics/${part(inputs.topic.value.trim())}/messages`, newest_first: inputs.offset.value === "" && !inputs.from.value, query: { key: inputs.key.value, header: inputs.header.value, text: inputs.text.value, partition: inputs.partition.value, offset: inputs.offset.value, from_ms: moment(inputs.from), until_ms: moment(inputs.until), limit: 50, value_bytes: 400, encoding: "text" } };
  };
  const ask = (what, more) => get(what.path, { ...what.query, ...more });
  const look = async () => {
    const what = wanted;
    const page = await ask(what, { newest_first: what.newest_first, after });
    if (what !== wanted) return;  // somebody looks for something else by now
    rows = rows.concat(page.messages);
    after = page.after;
    draw();
  };
  const stop = () => { following = null; follow.setAttribute("aria-pressed", "false"); follow.textContent = "Follow"; };
  const begin = doing(search, async () => {
    stop();
    rows = [];
    after = "";
    const what = wanted = asked();
    const kept = Object.entries(inputs).map(([name, input]) => [name, input.value]).filter((pair) => pair[1]);
    history.replaceState(null, "", `#/messages?${new URLSearchParams(kept)}`);
    // What was found before is not what was asked for now.
    try { await look(); } catch (error) { if (what === wanted) { wanted = null; replace(found, refusal(error)); } }
  });
  // New messages as they come, the newest on top, for as long as this page is there.
  follow.onclick = doing(follow, async () => {
    if (following) { stop(); draw(); return; }
    if (!inputs.topic.reportValidity()) return;
    const run = asked();
    let tail = (await ask(run, { from_ms: Date.now(), until_ms: "", offset: "", limit: 1 })).tail;
    following = wanted = run;
    follow.setAttribute("aria-pressed", "true");
    follow.textContent = "Stop following";
    rows = [];
    draw();
    (async () => {
      while (following === run && found.isConnected) {
        const page = await ask(run, { from_ms: "", until_ms: "", offset: "", after: tail, wait_ms: 4000 });
        tail = page.tail || page.after || tail;
        if (following === run && page.messages.length) { rows = [...page.messages.reverse(), ...rows].slice(0, most); draw(); }
      }
    })().catch((error) => {
      if (following !== run || !found.isConnected) return;
      stop();
      draw();
      toast(`Following has ended: ${error.message}`, { kind: "bad" });
    });
  });
  more.onclick = doing(more, look);
  replace(place, heading("Messages", { actions: h("a", { class: "button", href: "#/traces?failures_only=true" }, "Failures of all topics") }), h("p", { class: "lead" }, "Search a topic by key, header, text or time. Nothing is consumed."),
    h("form", { class: "card", onsubmit: begin }, h("div", { class: "fields" }, field("Topic", inputs.topic), field("Key", inputs.key), field("Header", inputs.header), field("Text", inputs.text), field("Stored from", inputs.from), field("Stored before", inputs.until), field("Partition", inputs.partition), field("From offset", inputs.offset)), h("div", { class: "tools after" }, search, follow)), h("div", { class: "section" }, found));
  if (inputs.topic.value) await begin();
}
