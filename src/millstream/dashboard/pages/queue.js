// A queue group: what is in it, who works on it, and why something is not delivered.

import { card, empty, h, heading, lead, pill, replace, section, settings } from "../dom.js";
import { get, part, post, put, remove } from "../api.js";
import { button } from "../dialogs.js";
import { overTime, plot } from "../plots.js";
import { table } from "../tables.js";
import { ago, count, duration, many, plain, priorities, setting, short } from "../words.js";

export const title = "Queue group";

export async function show(place, [topic, name]) {
  const here = `/queues/${part(topic)}/${part(name)}`, whole = `${topic} / ${name}`;
  const [paused, why, cards, consumers, held, lanes, policy] = ["span", "p", "div", "div", "div", "div", "div"].map((kind) => h(kind));
  [why.className, cards.className] = ["lead", "cards"];
  let stopped = false;
  const setPaused = async (wanted) => { await put(here, { paused: wanted }); await refresh(); return wanted; };
  const said = (now) => (now ? `${whole} is paused.` : `${whole} goes on.`);
  const pausing = () => button(stopped ? "Resume" : "Pause", () => setPaused(!stopped), {
    look: stopped ? "main" : "",
    ask: stopped ? null : { title: `Pause ${whole}?`, text: "Nothing is delivered to this group until it is resumed. Messages are kept.", action: "Pause", danger: false },
    done: (now) => ({ text: said(now), undo: async () => said(await setPaused(!now)) }),
  });
  const purge = button("Purge", async () => { const { purged } = await post(`${here}/purge`); await refresh(); return purged; }, {
    look: "danger", done: (amount) => `${many(amount, "message")} of ${whole} ${amount === 1 ? "was" : "were"} purged.`,
    ask: { title: `Purge ${whole}?`, text: "Everything in this queue counts as settled, leased messages too. The messages stay in the log, but this group will not get them again. This cannot be undone.", action: "Purge", typed: name },
  });
  const forget = button("Delete", async () => { await remove(here, { force: true }); lead(place, `#/topic/${part(topic)}`); }, {
    look: "danger", done: `Group ${whole} was deleted.`,
    ask: { title: `Delete ${whole}?`, text: "The group and its progress are forgotten, also while consumers are connected. The messages stay in the topic. This cannot be undone.", action: "Delete the group", typed: name },
  });
  const refresh = async () => {
    const peek = (state) => get(`${here}/messages`, { state, limit: 20 });
    const [queue, reason, leased, waiting, ready] = await Promise.all([get(here), get("/why", { topic, group: name }).catch(() => null), peek("leased"), peek("waiting"), peek("ready")]);
    stopped = queue.policy.paused;
    replace(paused, pausing());
    replace(why, reason ? [pill(plain(reason.state).replaceAll("-", " "), { paused: "warn", "no-consumer": "warn" }[reason.state] || "main"), " ", reason.sentence] : null);
    const settled = Object.values(queue.settled).reduce((a, b) => a + b, 0);
    replace(cards,
      card("Ready", short(queue.ready)), card("Leased", short(queue.leased)), card("Retrying", short(queue.waiting)),
      card("Oldest unsettled", queue.oldest_ms ? duration(queue.oldest_ms) : "none"),
      card("Settled", short(settled), Object.entries(queue.settled).filter((pair) => pair[1]).map(([kind, amount]) => `${short(amount)} ${kind}`).join(", ")));
    replace(consumers, table([
      { title: "Consumer", name: true, cell: (row) => [row.name || row.client_id, " ", h("span", { class: "soft" }, row.address)], sort: (row) => row.name },
      { title: "Leased", num: true, cell: (row) => count(row.leased), sort: (row) => row.leased },
      { title: "Asks for", num: true, cell: (row) => count(row.requested) },
      { title: "Delivered", num: true, cell: (row) => count(row.delivered), sort: (row) => row.delivered },
      { title: "Settled", num: true, cell: (row) => count(row.acked) },
      { title: "Failed", num: true, cell: (row) => (row.failed ? pill(short(row.failed), "warn") : count(0)), sort: (row) => row.failed },
      { title: "Mean time", num: true, cell: (row) => (row.acked ? duration(row.avg_ms) : "–"), sort: (row) => row.avg_ms },
    ], queue.consumers, { key: "consumers", caption: "Consumers", empty: empty("Nobody is consuming", queue.depth ? "Messages wait until somebody does." : "") }));
    replace(held, table([
      { title: "Message", cell: (row) => h("a", { href: `#/message/${row.id}`, class: "mono" }, row.id) },
      { title: "State", cell: (row) => pill(row.state === "waiting" ? "retrying" : row.state, { waiting: "warn", leased: "main" }[row.state] || "") },
      { title: "Who, until when", cell: (row) => (row.state === "ready" ? "–" : [row.consumer ? `${row.consumer}, ` : "", row.until_ms ? ago(row.until_ms) : "set aside"]) },
      { title: "Tries", num: true, cell: (row) => count(row.deliveries) },
      { title: "Stored", cell: (row) => ago(row.append_time_ms) },
      { title: "Last error", wrap: true, cell: (row) => h("span", { class: "clip" }, row.attempts.at(-1)?.reason || row.attempts.at(-1)?.kind || "–") },
    ], [...waiting, ...leased, ...ready].filter((row) => ["waiting", "leased", "ready"].includes(row.state)), { caption: "Messages in this queue", empty: empty("The queue is empty") }));
    replace(lanes, queue.lanes.length ? section("Priorities", table([
      { title: "Priority", cell: (row) => priorities[row.priority] },
      { title: "Ready", num: true, cell: (row) => count(row.ready) },
      { title: "Leased", num: true, cell: (row) => count(row.leased) },
      { title: "Served", num: true, cell: (row) => count(row.served) },
      { title: "Last served", num: true, cell: (row) => ago(row.last_served_ms) },
    ], queue.lanes, { caption: "Priorities" })) : null);
    replace(policy, settings(Object.entries(queue.policy).map(([key, value]) => [h("code", {}, key), setting(key, value)])));
  };
  const past = overTime(async (from_ms) => {
    const [lag, oldest] = await Promise.all(["lag", "oldest_ms"].map((metric) => get("/stats/history", { metric, topic, group: name, from_ms, points: 150 })));
    return [plot("Unsettled", [{ name: "unsettled", history: lag }]), plot("Oldest unsettled message", [{ name: "age", history: oldest }], { unit: "time" })];
  });
  await Promise.all([refresh(), past.draw()]);
  replace(place, heading(name, { crumbs: [["Groups", "#/groups"], [topic, `#/topic/${part(topic)}`]], actions: [h("a", { class: "button", href: `#/letters?topic=${part(topic)}&group=${part(name)}` }, "Dead letters"), paused, purge, forget] }), why, cards,
    section("Consumers", consumers), section("Messages", held, { note: "retrying, leased, and the next ones" }), section("Over time", past.graphs, { actions: past.range }), lanes, section("Policy", policy));
  let turns = 0;
  return async () => { await refresh(); if ((turns += 1) % 2 === 0) await past.draw(); };
}
