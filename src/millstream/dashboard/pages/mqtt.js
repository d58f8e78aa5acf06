// MQTT: who is connected, what is remembered of those who are not, and what is retained.

import { card, empty, field, h, heading, pill, replace, section } from "../dom.js";
import { get, part, remove } from "../api.js";
import { button, confirm, doing, open } from "../dialogs.js";
import { table } from "../tables.js";
import { ago, bytes, count, duration, many, number, pretty, short } from "../words.js";

export const title = "MQTT";
const limit = 50;
const versions = { 4: "3.1.1", 5: "5.0" };

export async function show(place, words, query) {
  const filter = { prefix: query.get("prefix") || "", connected: query.get("connected") || "", filter: query.get("filter") || "" };
  const go = (changes) => { location.hash = `#/mqtt?${new URLSearchParams(Object.entries({ ...filter, ...changes }).filter((pair) => pair[1]))}`; };
  const prefix = h("input", { type: "search", value: filter.prefix, placeholder: "sensor-", autocomplete: "off", spellcheck: "false" });
  const state = h("select", {}, [["", "all"], ["true", "connected"], ["false", "away"]].map(([value, text]) => h("option", { value, selected: value === filter.connected }, text)));
  const topics = h("input", { type: "search", value: filter.filter, placeholder: "sensors/+/temperature", autocomplete: "off", spellcheck: "false" });
  const [cards, clients, kept] = [h("div", { class: "cards" }), h("div"), h("div")];
  const wanted = filter.filter || "#";
  const sessions = paged(clients, (after) => get("/mqtt/sessions", { prefix: filter.prefix, connected: filter.connected, limit, after }), "sessions", drawSessions);
  const retained = paged(kept, (after) => get("/mqtt/retained", { filter: wanted, limit, after }), "messages", (rows) => drawRetained(rows, retained.again));
  const figures = async () => {
    const seen = await get("/mqtt");
    replace(cards,
      card("Connected", short(seen.connected), many(seen.subscriptions, "subscription")),
      card("Sessions", short(seen.sessions), seen.away ? `${number(seen.away)} away` : "nobody is away"),
      card("Retained", short(seen.retained), bytes(seen.retained_bytes)),
      card("Received", short(seen.received), `${short(seen.sent)} sent, in all namespaces`),
      card("Dropped", short(seen.dropped), seen.dropped ? "clients were too slow" : "nobody was too slow", seen.dropped ? "warn" : ""));
  };
  const clear = button("Clear…", async () => {
    const { cleared } = await remove("/mqtt/retained", { filter: wanted, dry_run: true });
    if (!cleared || !place.isConnected || !(await confirm({ title: `Clear ${many(cleared, "retained message")}?`, text: `Those that match ${wanted}. Whoever subscribes later gets nothing in their place; subscribers are not told.`, action: `Clear ${number(cleared)}`, typed: cleared > 10 ? String(cleared) : "" }))) return null;
    const done = await remove("/mqtt/retained", { filter: wanted });
    await Promise.all([retained.again(), figures()]);
    return done.cleared;
  }, { look: "danger", done: (cleared) => `${many(cleared, "retained message was", "retained messages were")} cleared.` });
  const search = (fields) => h("form", { class: "tools", onsubmit: (event) => { event.preventDefault(); go({ prefix: prefix.value.trim(), connected: state.value, filter: topics.value.trim() }); } }, fields, h("div", { class: "tools", style: "align-self:end;margin:0" }, h("button", { type: "submit" }, "Filter")));
  state.onchange = () => go({ connected: state.value });
  replace(place, heading("MQTT"), h("p", { class: "lead" }, "Clients of MQTT 3.1.1 and 5. Their topic a/b is the topic a.b; in filters + is one level and # the rest."), cards,
    section("Sessions", [search([field("Client id begins with", prefix), field("State", state)]), clients]),
    section("Retained messages", [search([field("Topic filter", topics)]), kept], { actions: clear }));
  await Promise.all([figures(), sessions.again(), retained.again()]);
  return () => Promise.all([figures(), sessions.refresh(), retained.refresh()]);
}

// Rows in pages, the first of which is refreshed while nobody has asked for more.
function paged(box, read, name, draw) {
  let rows = [], after = "";
  const more = h("button", { type: "button" }, "Show more");
  const drawn = () => replace(box, draw(rows), after ? h("div", { class: "tools after" }, more, h("span", { class: "soft" }, `${number(rows.length)} shown`)) : null);
  more.onclick = doing(more, async () => { const page = await read(after); rows = rows.concat(page[name]); after = page.after; drawn(); });
  const show = (page) => { rows = page[name]; after = page.after; drawn(); };
  const refresh = async () => {
    if (rows.length > limit) return;
    const page = await read("");
    if (rows.length <= limit) show(page);
  };
  return { again: async () => show(await read("")), refresh };
}

function drawSessions(rows) {
  return table([
    { title: "Client", name: true, cell: (row) => h("a", { href: `#/mqtt-session/${part(row.client_id)}`, title: row.client_id }, row.client_id), sort: (row) => row.client_id },
    { title: "State", cell: (row) => [row.connected ? pill("connected", "good") : pill("away", "warn"), " ", h("span", { class: "soft" }, row.connected ? ago(row.connected_ms) : row.ends_ms ? ["ends ", ago(row.ends_ms)] : "")], sort: (row) => (row.connected ? 1 : 0) },
    { title: "Version", cell: (row) => versions[row.version] || "–", sort: (row) => row.version },
    { title: "Address", cell: (row) => row.address || "–", sort: (row) => row.address },
    { title: "Lasts", num: true, cell: (row) => (row.expiry_s ? duration(row.expiry_s * 1000) : "–"), sort: (row) => row.expiry_s },
    { title: "Subscriptions", num: true, cell: (row) => count(row.subscriptions), sort: (row) => row.subscriptions },
    { title: "In flight", num: true, cell: (row) => count(row.in_flight), sort: (row) => row.in_flight },
    { title: "Waiting", num: true, cell: (row) => count(row.waiting + row.queued), sort: (row) => row.waiting + row.queued },
    { title: "Dropped", num: true, cell: (row) => count(row.dropped), sort: (row) => row.dropped },
  ], rows, { key: "mqtt-sessions", caption: "Sessions", empty: empty("No sessions", "A client that connects to the MQTT port appears here.") });
}

function drawRetained(rows, again) {
  return table([
    { title: "Topic", name: true, wide: true, cell: (row) => h("code", { title: row.topic }, row.topic), sort: (row) => row.topic },
    { title: "Size", num: true, cell: (row) => bytes(row.size), sort: (row) => row.size },
    { title: "QoS", num: true, cell: (row) => row.qos, sort: (row) => row.qos },
    { title: "Stored", cell: (row) => ago(row.stored_ms), sort: (row) => row.stored_ms },
    { title: "Expires", cell: (row) => (row.expiry_ms ? ago(row.expiry_ms) : "–"), sort: (row) => row.expiry_ms },
    { title: "Published by", name: true, cell: (row) => row.client_id || "–", sort: (row) => row.client_id },
    { title: "", act: true, cell: (row) => [button("Show", () => look(row.topic), { look: "small" }), " ", button("Clear", async () => { await remove("/mqtt/retained", { filter: row.topic }); await again(); }, { look: "danger small", done: `Nothing is retained for ${row.topic} any more.`, ask: { title: "Clear this retained message?", text: `Whoever subscribes to ${row.topic} later gets nothing in its place.`, action: "Clear" } })] },
  ], rows, { key: "mqtt-retained", caption: "Retained messages", empty: empty("Nothing is retained", "A client publishes with the retain flag, and its message appears here.") });
}

async function look(topic) {
  const message = await get("/mqtt/retained/message", { topic, encoding: "text" });
  open(topic, (close) => h("div", {},
    h("p", { class: "soft" }, `${bytes(message.size)}, QoS ${message.qos}${message.encoding === "base64" ? ", as base64" : ""}`),
    h("pre", {}, pretty(message.value)),
    message.user_properties.length ? h("dl", { class: "facts" }, message.user_properties.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])) : null,
    h("div", { class: "tools end" }, h("button", { type: "button", onclick: close }, "Close"))), { large: true });
}
