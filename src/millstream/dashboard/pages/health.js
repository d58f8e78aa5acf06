// Is the broker well, who is connected, and how is it set?

import { card, h, heading, pill, replace, section, settings } from "../dom.js";
import { everything, get, part, put, remove } from "../api.js";
import { button } from "../dialogs.js";
import { list, table } from "../tables.js";
import { ago, bytes, count, duration, many, number, plain, setting } from "../words.js";

export const title = "Health";
const kinds = { healthy: "good", degraded: "warn", critical: "bad" };

// A broker that is not well answers with an error, which is a report all the same.
const report = (path) => get(path, {}, { whole: true }).catch((error) => { if (error.data?.components) return error.data; throw error; });

// Not for this key, or not to be had right now.
function withheld(error, what) { return h("p", { class: "soft" }, error.status === 403 ? `Only administrators of the broker see ${what}.` : error.message); }

export async function show(place) {
  const [cards, parts, switching, who, config] = [h("div", { class: "cards" }), h("div"), h("span"), h("div"), h("div")];
  const people = list([
    { title: "Client", name: true, cell: (row) => [row.client_id || "–", " ", h("span", { class: "soft" }, row.address)], sort: (row) => row.client_id },
    { title: "Door", cell: (row) => row.door, sort: (row) => row.door },
    { title: "Namespace", cell: (row) => row.namespace, sort: (row) => row.namespace },
    { title: "Connected", cell: (row) => ago(row.opened_ms), sort: (row) => row.opened_ms },
    { title: "Queues", wrap: true, cell: (row) => row.queues.join(", ") || "–" },
    { title: "Leased", num: true, cell: (row) => count(row.leased), sort: (row) => row.leased },
    { title: "Subscriptions", num: true, cell: (row) => count(row.subscriptions), sort: (row) => row.subscriptions },
    { title: "", act: true, cell: (row) => button("Disconnect", async (reason) => { await remove(`/admin/connections/${part(row.id)}`, { reason }, { whole: true }); await refresh(); }, { look: "danger small", done: `${row.client_id || row.address} was disconnected.`, ask: { title: `Disconnect ${row.client_id || row.address}?`, text: "What it has leased goes back at once. The client may come back by itself: to keep it out, revoke its key.", reason: "Reason, which the client is told", action: "Disconnect" } }) },
  ], { key: "connections", caption: "Connections", text: (row) => `${row.client_id} ${row.address} ${row.namespace} ${row.queues.join(" ")}`, noun: "connection", empty: "Nobody is connected. Requests over HTTP are not counted." });
  let deep = null, checked = 0;

  const maintain = async (wanted, reason = "") => { await put("/admin/mode", { mode: wanted ? "maintenance" : "normal", reason }, { whole: true }); await refresh(); return wanted; };
  const said = (now) => (now ? "Maintenance has begun." : "Maintenance is over; the broker is in normal mode.");
  const maintenance = (mode) => button(mode === "maintenance" ? "End maintenance" : "Begin maintenance", (reason) => maintain(mode !== "maintenance", reason), {
    look: mode === "maintenance" ? "main" : "danger",
    ask: mode === "maintenance" ? null : { title: "Begin maintenance?", text: "Publishers and consumers are turned away until maintenance ends. Nothing is lost.", reason: "Reason, which clients are told", action: "Begin maintenance" },
    done: (now) => ({ text: said(now), undo: async () => said(await maintain(!now)) }),
  });
  const probe = button("Run a deep check", async () => { deep = await report("/health/deep"); checked = performance.now(); await refresh(); }, { done: () => `The deep check found: ${deep.status}.`, title: "Stores a message and reads it back" });

  const refresh = async () => {
    const [quick, now, connections] = await Promise.all([report("/health"), get("/stats/overview", { everywhere: true, limit: 1 }).catch((error) => { if (error.status === 403) return get("/stats/overview", { limit: 1 }); throw error; }), everything("/admin/connections", {}, { whole: true }).catch((error) => ({ error }))]);
    const health = deep && performance.now() - checked < 60000 ? deep : quick;
    replace(switching, maintenance(now.mode));
    replace(cards,
      card("Status", pill(health.status, kinds[health.status]), health.deep ? h("span", {}, "deep check, ", ago(health.checked_ms)) : health.ready ? "takes messages" : health.reason, { critical: "bad", degraded: "warn" }[health.status] || ""),
      card("Mode", plain(now.mode), now.reason, now.mode === "normal" ? "" : "warn"),
      card("Up for", duration(now.uptime_ms), now.software),
      card("Memory", bytes(now.memory_bytes)), card("Disk", bytes(now.log_bytes), `${bytes(now.disk_free_bytes)} free`),
      card("Partitions", number(now.partitions), `${many(now.topics, "topic")}, ${many(now.namespaces, "namespace")}`));
    replace(parts, table([
      { title: "Component", cell: (row) => plain(row.name) },
      { title: "Status", cell: (row) => pill(row.status, kinds[row.status]) },
      { title: "Found", wrap: true, cell: (row) => [row.message, row.recommendation ? h("div", {}, h("b", {}, row.recommendation)) : null] },
      { title: "Took", num: true, cell: (row) => (row.latency_ms ? duration(row.latency_ms) : "–") },
      { title: "Errors", num: true, cell: (row) => count(row.errors) },
    ], health.components, { caption: "Components" }));
    if (!connections.error) people.draw(connections);
    replace(who, connections.error ? withheld(connections.error, "who is connected") : people.box);
  };
  await refresh();
  const set = await get("/admin/config", {}, { whole: true }).catch((error) => ({ error }));
  replace(config, set.error ? withheld(set.error, "the settings") : h("details", {}, h("summary", {}, `${number(set.length)} settings, ${number(set.filter((one) => one.source !== "default").length)} of them changed`), settings([...set].sort((a, b) => (a.source === "default") - (b.source === "default")).map((one) => [[h("code", {}, one.name), " ", one.source === "default" ? null : pill(one.source, "main")], setting(one.name, one.value)]))));
  replace(place, heading("Health", { actions: [probe, switching] }), cards, section("Components", parts), section("Connections", who), section("Settings in force", config));
  return refresh;
}
