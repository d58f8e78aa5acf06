// Who reads what: queue groups and stream groups.

import { empty, h, heading, pill, replace, section } from "../dom.js";
import { everything, part } from "../api.js";
import { list } from "../tables.js";
import { count, number } from "../words.js";

export const title = "Groups";

export async function show(place) {
  const queues = list([
    { title: "Group", name: true, cell: (row) => h("a", { href: `#/queue/${part(row.topic)}/${part(row.group)}`, title: `${row.topic} / ${row.group}` }, `${row.topic} / ${row.group}`), sort: (row) => `${row.topic} ${row.group}` },
    { title: "Ready", num: true, cell: (row) => count(row.ready), sort: (row) => row.ready },
    { title: "Leased", num: true, cell: (row) => count(row.leased), sort: (row) => row.leased },
    { title: "Retrying", num: true, cell: (row) => count(row.waiting), sort: (row) => row.waiting },
    { title: "Consumers", num: true, cell: (row) => count(row.consumers), sort: (row) => row.consumers },
    { title: "State", wrap: true, cell: (row) => (row.failed ? pill(row.failed, "bad") : row.paused ? pill("paused", "warn") : row.depth && !row.consumers ? pill("no consumer", "warn") : pill(row.depth ? "active" : "caught up", "good")), sort: (row) => (row.failed ? -1 : row.paused ? 0 : row.depth && !row.consumers ? 1 : row.depth ? 2 : 3) },
  ], { key: "queues", caption: "Queue groups", text: (row) => `${row.topic} / ${row.group}`, noun: "queue group", empty: empty("No queue groups", "One appears with its first consumer.") });
  const streams = list([
    { title: "Group", name: true, cell: (row) => h("a", { href: `#/group/${part(row.name)}` }, row.name), sort: (row) => row.name },
    { title: "Topics", wrap: true, cell: (row) => row.topics.join(", ") || "–" },
    { title: "Members", num: true, cell: (row) => count(row.members), sort: (row) => row.members },
    { title: "Generation", num: true, cell: (row) => number(row.generation), sort: (row) => row.generation },
    { title: "State", cell: (row) => (row.paused ? pill("paused", "warn") : pill(row.state, { stable: "good", rebalancing: "warn" }[row.state] || "")), sort: (row) => row.state },
  ], { key: "streams", caption: "Stream groups", text: (row) => `${row.name} ${row.topics.join(" ")}`, noun: "stream group", empty: empty("No stream groups", "One appears with its first member.") });
  replace(place, heading("Groups"), h("p", { class: "lead" }, "Queue groups lease messages one by one; stream groups read partitions in order."), section("Queue groups", queues.box), section("Stream groups", streams.box));
  const refresh = async () => {
    const [leased, read] = await Promise.all([everything("/queues"), everything("/groups")]);
    queues.draw(leased);
    streams.draw(read);
  };
  await refresh();
  return refresh;
}
