// Is everything all right, and if not, where?

import { card, h, heading, pill, replace, section } from "../dom.js";
import { get, part } from "../api.js";
import { overTime, plot } from "../plots.js";
import { table } from "../tables.js";
import { ago, bytes, count, duration, many, number, plain, rate, short } from "../words.js";

export const title = "Overview";

const plots = [
  ["Messages", "rate", [["published_rate", "published"], ["acked_rate", "settled"], ["failed_rate", "failed"]]],
  ["Unsettled", "count", [["depth", "unsettled"], ["leased", "leased"], ["waiting", "retrying"]]],
  ["Oldest unsettled message", "time", [["oldest_ms", "age"]]],
  ["Latency, 99th percentile", "time", [["end_to_end_p99_ms", "end to end"], ["publish_p99_ms", "publish"], ["fsync_p99_ms", "disk"]]],
  ["Dead letters", "count", [["dead_letters", "dead letters"]]],
  ["Memory", "bytes", [["memory_bytes", "memory"]]],
];
const old = 5 * 60 * 1000;

function page(row) { return row.kind === "stream" ? `#/group/${part(row.group)}` : `#/queue/${part(row.topic)}/${part(row.group)}`; }

function standing(row) {
  const kind = { paused: "warn", idle: "warn", rebalancing: "warn", active: "good", "caught up": "good" }[row.state] || "";
  return pill({ idle: row.kind === "stream" ? "no member" : "no consumer" }[row.state] || row.state, kind);
}

export async function show(place) {
  const [attention, cards, worst, busiest] = ["div", "div", "div", "div"].map((name) => h(name));
  cards.className = "cards four";
  const past = overTime(async (from_ms) => {
    const histories = (metrics) => Promise.all(metrics.map(async ([metric, name]) => ({ name, history: await get("/stats/history", { metric, from_ms, points: 150 }) })));
    const found = await Promise.all(plots.map(([, , metrics]) => histories(metrics)));
    return plots.map(([name, unit], index) => plot(name, found[index], { unit }));
  });
  const refresh = async () => {
    const [now, health, hooks, pipelines] = await Promise.all([get("/stats/overview"), get("/health", {}, { whole: true }).catch((error) => error.data), get("/webhooks", { limit: 1000 }).catch(() => []), get("/pipelines").catch(() => [])]);
    replace(attention, h("ul", { class: "attention", "aria-label": "What needs attention" }, concerns(now, health, hooks, pipelines).map(([kind, text, href, label]) => h("li", { class: kind }, h("span", {}, text), href ? h("a", { href }, label) : null))));
    replace(cards,
      card("Published", rate(now.rates.published), `${short(now.totals.published)} since the start`),
      card("Settled", rate(now.rates.acked), now.rates.failed ? `${rate(now.rates.failed)} failed` : "none failing"),
      card("Unsettled", short(now.depth), `${short(now.leased)} leased, ${short(now.waiting)} retrying`),
      card("Oldest unsettled", now.oldest_ms ? duration(now.oldest_ms) : "none", "", now.oldest_ms > old ? "warn" : ""),
      card("Dead letters", short(now.dead_letters), now.dead_letters ? h("a", { href: "#/letters" }, "Open the workbench") : "", now.dead_letters ? "bad" : ""),
      card("Scheduled", short(now.scheduled), now.scheduled ? h("a", { href: "#/schedules" }, "Timeline") : ""),
      card("Stored", bytes(now.log_bytes), `${bytes(now.disk_free_bytes)} free`),
      card("Topics", number(now.topics), `${many(now.connections, "connection")}`));
    replace(worst, table([
      { title: "Group", name: true, cell: (row) => h("a", { href: page(row), title: `${row.topic} / ${row.group}` }, `${row.topic} / ${row.group}`) },
      { title: "Behind", num: true, cell: (row) => count(row.lag) },
      { title: "Oldest", num: true, cell: (row) => (row.oldest_ms ? duration(row.oldest_ms) : "–") },
      { title: "State", cell: standing },
    ], now.furthest_behind.filter((row) => row.lag), { caption: "Groups furthest behind", empty: "Every group is up to date." }));
    replace(busiest, table([
      { title: "Topic", name: true, cell: (row) => h("a", { href: `#/topic/${part(row.topic)}`, title: row.topic }, row.topic) },
      { title: "In", num: true, cell: (row) => rate(row.published_rate) },
      { title: "Out", num: true, cell: (row) => rate(row.consumed_rate) },
      { title: "Unsettled", num: true, cell: (row) => count(row.depth) },
    ], now.busiest.filter((row) => row.published_rate || row.consumed_rate), { caption: "Busiest topics", empty: "Nothing is published or read right now." }));
  };
  replace(place, heading("Overview"), attention, cards, section("Over time", past.graphs, { actions: past.range, note: "of the whole broker" }), h("div", { class: "columns" }, section("Furthest behind", worst), section("Busiest topics", busiest)));
  await Promise.all([refresh(), past.draw()]);
  let turns = 0;
  return async () => { await refresh(); if ((turns += 1) % 2 === 0) await past.draw(); };
}

// What somebody should look at, the worst first: [kind, sentence, link, its words].
function concerns(now, health, hooks, pipelines) {
  const found = [];
  if (now.mode !== "normal") found.push(["bad", `The broker is in mode ${plain(now.mode)}${now.reason ? `: ${now.reason}` : "."}`, "#/health", "Health"]);
  for (const one of health?.components || []) if (one.status !== "healthy" && one.name !== "mode") found.push([one.status === "critical" ? "bad" : "warn", `${one.name}: ${one.message}`, "#/health", "Health"]);
  if (now.dead_letters) found.push(["bad", `${many(now.dead_letters, "message is a dead letter", "messages are dead letters")}.`, "#/letters", "Look at them"]);
  for (const one of pipelines) {
    if (one.state === "failed") found.push(["bad", `Pipeline ${one.name} failed${one.error ? `: ${one.error}` : ""}.`, "#/pipelines", "Pipelines"]);
    else if (one.state === "lost") found.push(["bad", ["Pipeline ", one.name, " is lost: it reported last ", ago(one.reported_ms), "."], "#/pipelines", "Pipelines"]);
  }
  const failing = hooks.filter((hook) => hook.state === "failing" || hook.paused_reason), said = new Set(failing.map((hook) => `${hook.topic} / ${hook.group}`));
  for (const row of now.furthest_behind.filter((one) => !said.has(`${one.topic} / ${one.group}`))) {
    const href = page(row), name = `${row.topic} / ${row.group}`, waits = many(row.lag, "message waits", "messages wait");
    if (row.lag && row.state === "paused") found.push(["warn", `${name} is paused; ${waits}.`, href, "Open the group"]);
    else if (row.lag && row.state === "idle") found.push(["warn", `${name} has nobody who reads it; ${waits}${row.oldest_ms ? `, the oldest for ${duration(row.oldest_ms)}` : ""}.`, href, "Open the group"]);
    else if (row.oldest_ms > old) found.push(["warn", `${name} is behind: ${waits}, the oldest for ${duration(row.oldest_ms)}.`, href, "Open the group"]);
  }
  for (const hook of failing) found.push(hook.paused_reason ? ["bad", `Webhook to ${hook.url} has paused itself: ${hook.paused_reason}.`, "#/webhooks", "Webhooks"] : ["warn", `Webhook to ${hook.url} fails: ${hook.last_error}.`, "#/webhooks", "Webhooks"]);
  if (now.throttled_topics) found.push(["warn", `${many(now.throttled_topics, "topic slows its", "topics slow their")} publishers down.`, "#/topics", "Topics"]);
  const worst = [...found.filter((one) => one[0] === "bad"), ...found.filter((one) => one[0] !== "bad")];
  if (worst.length > 6) worst.splice(5, worst.length, ["warn", `And ${worst.length - 5} more.`, "#/groups", "Groups"]);
  if (worst.length) return worst;
  return now.topics ? [["good", "All is well: every group keeps up, and nothing died."]] : [["good", "All is well, and nothing is here yet.", "#/publish", "Publish a message"]];
}
