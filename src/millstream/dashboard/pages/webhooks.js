// Webhooks: where messages are sent, and how that goes.

import { empty, facts, field, h, heading, pill, replace } from "../dom.js";
import { everything, part, post, remove } from "../api.js";
import { button, doing, open } from "../dialogs.js";
import { table } from "../tables.js";
import { ago, count, duration } from "../words.js";

export const title = "Webhooks";

export async function show(place, words, query, again) {
  const list = h("div");
  const refresh = async () => replace(list, table([
    { title: "URL", wrap: true, wide: true, cell: (row) => [h("b", { title: row.id }, row.url), h("div", {}, h("a", { href: `#/queue/${part(row.topic)}/${part(row.group)}` }, `${row.topic} / ${row.group}`))], sort: (row) => row.url },
    { title: "State", cell: (row) => pill(row.state, { active: "good", failing: "bad", paused: "warn" }[row.state] || ""), sort: (row) => row.state },
    { title: "Delivered", num: true, cell: (row) => count(row.delivered), sort: (row) => row.delivered },
    { title: "Failed", num: true, cell: (row) => count(row.failed), sort: (row) => row.failed },
    { title: "Dead", num: true, cell: (row) => (row.dead ? h("a", { href: `#/letters?topic=${part(row.topic)}&group=${part(row.group)}` }, count(row.dead)) : count(0)), sort: (row) => row.dead },
    { title: "Last success", cell: (row) => ago(row.last_delivery_ms), sort: (row) => row.last_delivery_ms },
    { title: "Last error", wrap: true, cell: (row) => h("span", { class: "clip", title: row.last_error }, row.paused_reason || row.last_error || "–") },
    { title: "", act: true, cell: (row) => [probe(row), " ", toggle(row, refresh), " ", drop(row, refresh)] },
  ], await everything("/webhooks"), { key: "webhooks", pages: "webhooks", caption: "Webhooks", empty: empty("No webhooks", "A service that only speaks HTTP can get messages too.") }));
  replace(place, heading("Webhooks", { actions: h("button", { class: "main", type: "button", onclick: () => create(again) }, "New webhook") }), h("p", { class: "lead" }, "Messages of a queue group, delivered by signed HTTP requests."), list);
  await refresh();
  return refresh;
}

function probe(row) {
  return button("Test", () => post(`/webhooks/${part(row.id)}/test`), { look: "small", done: (outcome) => (outcome.delivered ? `${row.url} answered ${outcome.status} within ${duration(outcome.took_ms)}.` : `${row.url} did not take it: ${outcome.error || `it answered ${outcome.status}`}.`) });
}

function toggle(row, refresh) {
  const set = async (wanted) => { await post(`/webhooks/${part(row.id)}/${wanted ? "pause" : "resume"}`); await refresh(); return wanted; };
  const said = (now) => (now ? `The webhook to ${row.url} is paused.` : `The webhook to ${row.url} goes on.`);
  const paused = row.state === "paused";
  return button(paused ? "Resume" : "Pause", () => set(!paused), { look: "small", done: (now) => ({ text: said(now), undo: async () => said(await set(!now)) }) });
}

function drop(row, refresh) {
  return button("Delete", async () => { await remove(`/webhooks/${part(row.id)}`); await refresh(); }, { look: "danger small", done: `The webhook to ${row.url} was deleted.`, ask: { title: "Delete this webhook?", text: `${row.url} gets no more messages. The queue group stays, with what is in it.`, action: "Delete" } });
}

function create(again) {
  open("New webhook", (close) => {
    const topic = h("input", { required: true, list: "jump-topics", autocomplete: "off" }), group = h("input", { value: "default", required: true });
    const url = h("input", { type: "url", required: true, placeholder: "https://example.com/hook" });
    const save = h("button", { class: "main", type: "submit" }, "Create"), leave = h("button", { type: "button", onclick: close }, "Cancel"), secret = h("div", { role: "status" });
    const work = doing(save, async () => {
      const made = await post("/webhooks", { topic: topic.value.trim(), group: group.value.trim(), url: url.value.trim() });
      replace(secret, h("div", { class: "notice" }, h("b", {}, "Keep this secret now; it is not shown again."), facts([["Secret", h("code", {}, made.secret)], ["Webhook", h("code", {}, made.webhook.id)]])));
      save.remove();
      leave.textContent = "Close";
      await again();
      return made.webhook;
    }, (made) => `Messages of ${made.topic} / ${made.group} go to ${made.url}.`);
    return h("form", { onsubmit: work }, h("div", { class: "fields" }, field("Topic", topic), field("Group", group), field("URL", url, { wide: true })), secret, h("div", { class: "tools end" }, leave, save));
  });
}
