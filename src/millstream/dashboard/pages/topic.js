// One topic: where it stands, who reads it, how it is set.

import { card, empty, field, h, heading, lead, pill, replace, section, settings } from "../dom.js";
import { get, part, patch, remove } from "../api.js";
import { button, doing, open } from "../dialogs.js";
import { overTime, plot } from "../plots.js";
import { table } from "../tables.js";
import { bytes, count, duration, many, number, priorities, setting, short, when } from "../words.js";

export const title = "Topic";

export async function show(place, [name], query, again) {
  const here = `/topics/${part(name)}`;
  const [cards, readers, lanes, partitions, config] = [h("div", { class: "cards" }), h("div"), h("div"), h("div"), h("div")];
  let topic = null;
  const change = h("button", { type: "button", onclick: () => edit(here, topic, again) }, "Change settings");
  const drop = button("Delete", async () => { await remove(here, { force: true }); lead(place, "#/topics"); }, {
    look: "danger", done: `Topic ${name} was deleted.`,
    ask: { title: `Delete topic ${name}?`, text: "All its messages, its groups and their progress are removed. This cannot be undone.", action: "Delete the topic", typed: name },
  });
  const refresh = async () => {
    let queues, flow, streams, waiting;
    [topic, queues, flow, streams, waiting] = await Promise.all([get(here), get("/queues", { topic: name, limit: 1000 }), get(`${here}/flow`), standings(name), get("/schedules/statistics", { topic: name }).catch(() => null)]);
    const sum = (value) => topic.partitions.reduce((total, one) => total + value(one), 0);
    const slowed = flow.level !== "normal", unsettled = Math.max(0, ...queues.map((one) => one.depth));  // without a group nobody has to
    replace(cards,
      card("Messages kept", short(sum((one) => one.high_watermark - one.start_offset)), `${bytes(sum((one) => one.size_bytes))} on disk`),
      card("Unsettled", short(unsettled), unsettled ? [flow.measured ? flow.trend : "", flow.lag_ms ? `oldest ${duration(flow.lag_ms)}` : ""].filter(Boolean).join(", ") : ""),
      card("Publishers", slowed ? `slowed by ${duration(flow.delay_ms)}` : "not slowed", slowed ? `level ${flow.level}` : flow.catch_up_ms ? `caught up in ${duration(flow.catch_up_ms)}` : "", slowed ? "warn" : ""),
      card("Scheduled", short(waiting && (waiting[0]?.pending || 0)), waiting?.[0]?.pending ? h("a", { href: `#/schedules?topic=${part(name)}` }, "Timeline") : ""),
      card("Partitions", number(topic.partition_count), h("span", {}, "since ", when(topic.created_ms))));
    replace(readers, table([
      { title: "Group", name: true, cell: (row) => h("a", { href: row.href }, row.group), sort: (row) => row.group },
      { title: "Kind", cell: (row) => row.kind },
      { title: "Behind", num: true, cell: (row) => count(row.depth), sort: (row) => row.depth },
      { title: "Leased", num: true, cell: (row) => (row.leased === undefined ? "–" : count(row.leased)) },
      { title: "Retrying", num: true, cell: (row) => (row.waiting === undefined ? "–" : count(row.waiting)) },
      { title: "Readers", num: true, cell: (row) => count(row.consumers), sort: (row) => row.consumers },
      { title: "State", cell: (row) => (row.paused ? pill("paused", "warn") : row.depth && !row.consumers ? pill("nobody reads", "warn") : pill(row.depth ? "active" : "caught up", "good")) },
    ], [...queues.map((row) => ({ ...row, kind: "queue", href: `#/queue/${part(name)}/${part(row.group)}` })), ...streams], { key: "topic-readers", caption: "Groups that read this topic", empty: empty("Nobody reads this topic", "A group appears with its first consumer.") }));
    replace(partitions, table([
      { title: "Partition", num: true, cell: (row) => h("a", { href: `#/messages?topic=${part(name)}&partition=${row.partition}` }, row.partition), sort: (row) => row.partition },
      { title: "Messages", num: true, cell: (row) => count(row.high_watermark - row.start_offset), sort: (row) => row.high_watermark - row.start_offset },
      { title: "First offset", num: true, cell: (row) => number(row.start_offset) },
      { title: "Next offset", num: true, cell: (row) => number(row.next_offset) },
      { title: "Size", num: true, cell: (row) => bytes(row.size_bytes), sort: (row) => row.size_bytes },
      { title: "Segments", num: true, cell: (row) => number(row.segments) },
      { title: "State", wide: true, wrap: true, cell: (row) => (row.failed ? pill(row.failed, "bad") : row.damaged_ranges.length ? pill(many(row.damaged_ranges.length, "damaged range"), "bad") : pill("ok", "good")) },
    ], topic.partitions, { key: "topic-partitions", caption: "Partitions", pages: `partitions of ${name}` }));
    replace(config, settings(Object.entries(topic.config).map(([key, value]) => [h("code", {}, key), setting(key, value)])));
    replace(lanes, await prioritized(here));
  };
  const past = overTime(async (from_ms) => {
    const history = (metric) => get("/stats/history", { metric, topic: name, from_ms, points: 150 });
    const [incoming, outgoing, depth] = await Promise.all(["published_rate", "consumed_rate", "depth"].map(history));
    return [plot("Messages", [{ name: "published", history: incoming }, { name: "delivered", history: outgoing }], { unit: "rate" }), plot("Unsettled", [{ name: "unsettled", history: depth }])];
  });
  await Promise.all([refresh(), past.draw()]);
  replace(place, heading(name, { crumbs: [["Topics", "#/topics"]], actions: [h("a", { class: "button", href: `#/messages?topic=${part(name)}` }, "Messages"), h("a", { class: "button", href: `#/publish?topic=${part(name)}` }, "Publish"), change, drop] }),
    cards, section("Groups", readers), lanes, section("Over time", past.graphs, { actions: past.range }), section("Partitions", partitions), section("Settings", config));
  let turns = 0;
  return async () => { await refresh(); if ((turns += 1) % 2 === 0) await past.draw(); };
}

// Stream groups of a topic, with how far each is behind.
async function standings(topic) {
  const groups = (await get("/groups", { topic, limit: 50 })).slice(0, 50);
  return Promise.all(groups.map(async (row) => ({ group: row.name, kind: "stream", href: `#/group/${part(row.name)}`, depth: (await get(`/groups/${part(row.name)}/lag`, { topic, limit: 1 })).lag, consumers: row.members, paused: row.paused })));
}

async function prioritized(here) {
  const groups = (await get(`${here}/lanes`)).filter((one) => one.lanes.some((lane) => lane.ready || lane.leased || lane.served));
  if (!groups.length) return null;
  const cell = (one, priority) => { const lane = one.lanes.find((each) => each.priority === priority); return lane ? [count(lane.ready + lane.leased), h("span", { class: "soft" }, ` of ${short(lane.ready + lane.leased + lane.served)}`)] : "–"; };
  return section("Priorities", table([{ title: "Group", name: true, cell: (one) => one.group }, ...priorities.map((name, priority) => ({ title: name, num: true, cell: (one) => cell(one, priority) }))], groups, { caption: "Priorities" }), { note: "unsettled, of all since the broker started" });
}

function edit(here, topic, again) {
  open(`Settings of ${topic.name}`, (close) => {
    const inputs = Object.entries(topic.config).map(([key, value]) => [key, value, h("input", { value: String(value), name: key, type: typeof value === "number" ? "number" : "text", required: typeof value === "number", autocomplete: "off" })]);
    const partitions = h("input", { type: "number", min: topic.partition_count, max: 10000, value: topic.partition_count });
    const save = h("button", { class: "main", type: "submit" }, "Save");
    const work = doing(save, async () => {
      const config = {}, before = {};
      for (const [key, value, input] of inputs) {
        if (input.value === String(value)) continue;
        before[key] = value;
        config[key] = typeof value === "number" ? Number(input.value) : typeof value === "boolean" ? input.value === "true" : input.value;
      }
      const grown = Number(partitions.value) > topic.partition_count;
      await patch(here, { config, ...(grown ? { partitions: Number(partitions.value) } : {}) });
      close();
      await again();
      return { changed: Object.keys(config), before, grown };
    }, ({ changed, before, grown }) => ({
      text: [changed.length ? `Changed ${changed.join(", ")}.` : grown ? "" : "Nothing was changed.", grown ? `The topic has ${partitions.value} partitions now.` : ""].join(" "),
      undo: changed.length ? async () => { await patch(here, { config: before }); await again(); return `${changed.join(", ")} as before.`; } : null,
    }));
    return h("form", { onsubmit: work }, h("div", { class: "fields" }, field("partitions", partitions), inputs.map(([key, , input]) => field(key, input))), h("div", { class: "tools end" }, h("button", { type: "button", onclick: close }, "Cancel"), save));
  }, { large: true });
}
