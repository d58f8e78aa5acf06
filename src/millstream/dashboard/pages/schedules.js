// What will happen: scheduled messages on a line of time, and what repeats.

import { empty, field, h, heading, pill, replace, section } from "../dom.js";
import { everything, get, part, patch, post, put, remove } from "../api.js";
import { button, doing, open } from "../dialogs.js";
import { along } from "../plots.js";
import { table } from "../tables.js";
import { ago, bytes, count, keyed, localInput, many, number, short, when } from "../words.js";

export const title = "Schedules";
const limit = 1000, shown = 100, bars = 72;

export async function show(place, words, query, again) {
  const [line, list, recurring] = [h("section", { class: "card timeline", "aria-label": "Timeline" }), h("div"), h("div")];
  const statistics = await everything("/schedules/statistics");
  const topic = query.get("topic") || statistics.find((one) => one.pending)?.topic || statistics[0]?.topic || "";
  const names = statistics.map((one) => one.topic);
  if (topic && !names.includes(topic)) names.unshift(topic);
  const select = h("select", { "aria-label": "Topic", onchange: (event) => { location.hash = `#/schedules?topic=${part(event.target.value)}`; } }, names.map((name) => h("option", { value: name, selected: name === topic }, `${name} (${short(statistics.find((one) => one.topic === name)?.pending || 0)})`)));
  const refresh = async () => {
    if (topic) {
      const { schedules: rows } = await get(`/topics/${part(topic)}/schedules`, { limit });
      replace(line, timeline(rows));
      replace(list, table([
        { title: "Due", cell: (row) => [when(row.due_ms), " ", h("span", { class: "soft" }, ago(row.due_ms))] },
        { title: "Message", cell: (row) => h("a", { href: `#/message/${row.id}`, class: "mono" }, row.id) },
        { title: "Key", name: true, wide: true, cell: (row) => keyed(row) },
        { title: "Size", num: true, cell: (row) => bytes(row.size_bytes) },
        { title: "", act: true, cell: (row) => [move(row, refresh), " ", cancel(row, refresh)] },
      ], rows.slice(0, shown), { caption: "Scheduled messages", empty: empty("Nothing is pending for this topic") }), rows.length > shown ? h("p", { class: "soft" }, `The next ${shown} of ${rows.length === limit ? "more than " : ""}${number(rows.length)}.`) : null);
    }
    replace(recurring, table([
      { title: "Name", name: true, cell: (row) => row.name, sort: (row) => row.name },
      { title: "Topic", name: true, cell: (row) => h("a", { href: `#/topic/${part(row.topic)}` }, row.topic), sort: (row) => row.topic },
      { title: "When", cell: (row) => [h("code", {}, row.cron), " ", h("span", { class: "soft" }, row.timezone)] },
      { title: "Next", cell: (row) => (row.paused ? pill("paused", "warn") : ago(row.next_ms)), sort: (row) => row.next_ms },
      { title: "Last", cell: (row) => ago(row.last_ms), sort: (row) => row.last_ms },
      { title: "Published", num: true, cell: (row) => count(row.published), sort: (row) => row.published },
      { title: "", act: true, cell: (row) => [pause(row, refresh), " ", end(row, refresh)] },
    ], await everything("/recurring"), { key: "recurring", pages: "recurring", caption: "Recurring schedules", empty: empty("No recurring schedules") }));
  };
  replace(place, heading("Schedules", { actions: names.length ? select : [] }), h("p", { class: "lead" }, "Messages that are delivered at or after their time, never before."),
    topic ? [line, section("Next", list)] : h("div", { class: "card" }, empty("Nothing is scheduled", "Publish a message with a delay, and it appears here.")),
    section("Recurring", recurring, { actions: h("button", { type: "button", onclick: () => create(again) }, "New recurring schedule") }));
  await refresh();
  return refresh;
}

function timeline(rows) {
  if (!rows.length) return empty("Nothing is pending");
  const now = Date.now(), until = Math.max(...rows.map((row) => row.due_ms), now + 60000);
  const buckets = new Array(bars).fill(0);
  for (const row of rows) buckets[Math.min(bars - 1, Math.max(0, Math.floor(((row.due_ms - now) / (until - now)) * bars)))] += 1;
  const most = Math.max(...buckets), width = 100 / bars;
  const svg = h("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" }, h("title", {}, `${many(rows.length, "message")} due between now and ${new Date(until).toLocaleString("sv")}`),
    buckets.map((amount, index) => (amount ? h("rect", { x: index * width + width * 0.12, width: width * 0.76, y: 100 - (amount / most) * 94, height: (amount / most) * 94, fill: "var(--one)" }, h("title", {}, `${many(amount, "message")} around ${new Date(now + ((index + 0.5) / bars) * (until - now)).toLocaleString("sv")}`)) : null)));
  return [h("header", { class: "tools" }, h("h2", {}, rows.length === limit ? `The next ${number(limit)} messages` : many(rows.length, "message")), h("span", { class: "soft" }, "the next one ", ago(rows[0].due_ms))), h("div", { class: "graph" }, h("div", { class: "area" }, svg), along(now, until, "now"))];
}

function cancel(row, refresh) {
  return button("Cancel", async () => { await remove(`/schedules/${part(row.id)}`); await refresh(); }, { look: "danger small", done: `Message ${row.id} was cancelled.`, ask: { title: "Cancel this message?", text: `${row.id} will not be delivered. This cannot be undone.`, action: "Cancel the message" } });
}

function move(row, refresh) {
  return h("button", { type: "button", class: "small", onclick: () => open("Move a scheduled message", (close) => {
    const at = h("input", { type: "datetime-local", step: 1, required: true, value: localInput(row.due_ms) });
    const save = h("button", { class: "main", type: "submit" }, "Move");
    const set = async (ms) => { await patch(`/schedules/${part(row.id)}`, { deliver_at_ms: ms }); await refresh(); };
    const work = doing(save, async () => { const ms = new Date(at.value).getTime(); await set(ms); close(); return ms; }, (ms) => ({ text: `The message is due on ${new Date(ms).toLocaleString("sv")} now.`, undo: async () => { await set(row.due_ms); return "The message is due when it was before."; } }));
    return h("form", { onsubmit: work }, h("p", { class: "soft mono" }, row.id), field("Deliver at (your local time)", at), h("div", { class: "tools end" }, h("button", { type: "button", onclick: close }, "Keep it"), save));
  }) }, "Move");
}

function pause(row, refresh) {
  const set = async (wanted) => { await post(`/recurring/${part(row.name)}/${wanted ? "pause" : "resume"}`); await refresh(); return wanted; };
  const said = (now) => (now ? `${row.name} is paused.` : `${row.name} goes on.`);
  return button(row.paused ? "Resume" : "Pause", () => set(!row.paused), { look: "small", done: (now) => ({ text: said(now), undo: async () => said(await set(!now)) }) });
}

function end(row, refresh) {
  return button("Delete", async () => { await remove(`/recurring/${part(row.name)}`); await refresh(); }, { look: "danger small", done: `${row.name} was deleted.`, ask: { title: `Delete ${row.name}?`, text: `Nothing is published to ${row.topic} by it any more. What was published stays.`, action: "Delete" } });
}

function create(again) {
  open("New recurring schedule", (close) => {
    const input = (placeholder, more = {}) => h("input", { placeholder, required: true, autocomplete: "off", spellcheck: "false", ...more });
    const [name, topic, cron, zone] = [input("nightly-report"), input("reports", { list: "jump-topics" }), input("0 3 * * *"), input("UTC", { value: Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC" })];
    const value = h("textarea", { spellcheck: "false" }), save = h("button", { class: "main", type: "submit" }, "Create");
    const work = doing(save, async () => {
      const made = await put(`/recurring/${part(name.value.trim())}`, { topic: topic.value.trim(), cron: cron.value.trim(), timezone: zone.value.trim(), value: value.value, encoding: "text" });
      close();
      await again();
      return made;
    }, (made) => `${made.name} publishes to ${made.topic}, next on ${new Date(made.next_ms).toLocaleString("sv")}.`);
    return h("form", { onsubmit: work }, h("div", { class: "fields" }, field("Name", name), field("Topic", topic), field("Cron", cron, { hint: "minute hour day month weekday" }), field("Time zone", zone), field("Value", value, { wide: true })), h("div", { class: "tools end" }, h("button", { type: "button", onclick: close }, "Cancel"), save));
  });
}
