// One MQTT session: its client, what it is subscribed to, and what waits for it.

import { card, empty, facts, h, heading, lead, pill, replace, section } from "../dom.js";
import { get, part, post, remove } from "../api.js";
import { button } from "../dialogs.js";
import { table } from "../tables.js";
import { ago, count, duration, number, short, when } from "../words.js";

export const title = "MQTT session";
const versions = { 4: "3.1.1", 5: "5.0" };
const handling = ["when subscribed", "if new", "never"];

export async function show(place, [name]) {
  const here = `/mqtt/sessions/${part(name)}`;
  const [cards, about, subscriptions, behind, actions] = [h("div", { class: "cards" }), h("div"), h("div"), h("div"), h("span")];
  let session = await get(here);
  const refresh = async () => { session = await get(here); draw(); };
  const leave = () => lead(place, "#/mqtt");
  const disconnect = button("Disconnect", async () => {
    await post(`${here}/disconnect`, {});
    if (session.expiry_s) await refresh(); else leave();
  }, { ask: { title: `Disconnect ${name}?`, text: "Its will is published, if it has one. The client may come back at once.", action: "Disconnect", danger: false }, done: `${name} was disconnected.` });
  const forget = button("Forget", async () => { await remove(here); leave(); }, { look: "danger", ask: { title: `Forget the session of ${name}?`, text: "Its subscriptions, and what it has not received, are gone. Its client is disconnected. This cannot be undone.", action: "Forget the session", typed: name }, done: `The session of ${name} is forgotten.` });
  const draw = () => {
    replace(actions, session.connected ? [disconnect, " "] : null, forget);
    replace(cards,
      card("State", session.connected ? pill("connected", "good") : pill("away", "warn"), session.connected ? ["since ", ago(session.connected_ms)] : ["ends ", ago(session.ends_ms)]),
      card("Waiting", short(session.waiting), session.queued ? `and ${number(session.queued)} in memory` : "in the log"),
      card("In flight", short(session.in_flight), session.receiving ? `${number(session.receiving)} of QoS 2 coming in` : "sent, not confirmed"),
      card("Dropped", short(session.dropped), session.dropped ? "because of a limit" : "nothing was missed", session.dropped ? "warn" : ""));
    replace(about, h("div", { class: "card" }, facts([
      ["Address", session.address],
      ["Version", versions[session.version]],
      ["Keep-alive", session.connected ? (session.keep_alive_s ? duration(session.keep_alive_s * 1000) : "none") : null],
      ["Lasts", session.expiry_s ? `${duration(session.expiry_s * 1000)} without its client` : "as long as its connection"],
      ["Ends", session.ends_ms ? when(session.ends_ms) : null],
      ["Created", when(session.created_ms)],
      ["Will", session.will_topic ? h("code", {}, session.will_topic) : null],
    ])));
    replace(subscriptions, table([
      { title: "Filter", name: true, wide: true, cell: (row) => h("code", {}, row.filter), sort: (row) => row.filter },
      { title: "QoS", num: true, cell: (row) => row.qos, sort: (row) => row.qos },
      { title: "Retained", cell: (row) => handling[row.retain_handling] || row.retain_handling },
      { title: "Options", cell: (row) => [row.group ? `queue group ${row.group}` : "", row.no_local ? "no local" : "", row.retain_as_published ? "retain as published" : "", row.identifier ? `identifier ${row.identifier}` : ""].filter(Boolean).join(", ") || "–" },
    ], session.subscribed, { key: "mqtt-subscriptions", caption: "Subscriptions", empty: empty("No subscriptions") }));
    replace(behind, session.behind.length ? section("Waiting", table([
      { title: "Topic", name: true, wide: true, cell: (row) => h("a", { href: `#/topic/${part(row.topic)}` }, row.topic), sort: (row) => row.topic },
      { title: "Partition", num: true, cell: (row) => row.partition, sort: (row) => row.partition },
      { title: "Next offset", num: true, cell: (row) => number(row.offset) },
      { title: "Messages", num: true, cell: (row) => count(row.end - row.offset), sort: (row) => row.end - row.offset },
    ], session.behind, { key: "mqtt-behind", caption: "What waits, and where" })) : null);
  };
  replace(place, heading(name, { crumbs: [["MQTT", "#/mqtt"]], actions }), cards, section("Client", about), section("Subscriptions", subscriptions), behind);
  draw();
  return refresh;
}
