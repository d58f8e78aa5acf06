// One message and its passport: everything that has happened to it, and what it is to each queue group.

import { empty, facts, h, heading, pill, replace, section } from "../dom.js";
import { get, part } from "../api.js";
import { copy } from "../dialogs.js";
import { table } from "../tables.js";
import { ago, bytes, count, duration, keyed, number, plain, pretty, priorities, when } from "../words.js";

export const title = "Message";

const kinds = { stored: "good", published: "good", fired: "good", acked: "good", replayed: "good", nacked: "warn", timeout: "warn", returned: "warn", waiting: "warn", moved: "warn", cancelled: "warn", purged: "warn", rejected: "bad", dead_lettered: "bad", expired: "bad", evicted: "bad" };
const words = { acked: "settled", nacked: "failed, to be retried", timeout: "lease timed out", returned: "returned by its consumer", dead_lettered: "dead letter", fired: "due and delivered", waiting: "waits for its next try" };
const standings = { settled: "good", leased: "main", waiting: "warn" };

export async function show(place, [id]) {
  const [top, history, about, value, groups] = ["div", "div", "div", "div", "div"].map((name) => h(name));
  let said;
  const draw = async () => {
    const [passport, message, why] = await Promise.all([get(`/messages/${part(id)}/passport`).catch((error) => ({ events: [], error })), get(`/messages/${part(id)}`, { encoding: "text" }).catch((error) => ({ error })), get("/why", { id }).catch(() => null)]);
    if (message.error && passport.error) throw message.error;
    const queues = message.error || !why?.facts.groups ? [] : await get(`/messages/${part(id)}/queues`).catch(() => []);
    const named = h("span", { class: "mono" }, id);
    replace(top, heading(named, { crumbs: crumbs(passport, message), actions: h("button", { type: "button", onclick: () => copy(id, named) }, "Copy id") }),
      why ? h("p", { class: "lead" }, pill(plain(why.state).replaceAll("-", " "), "main"), " ", why.facts.group ? [h("b", {}, why.facts.group), ": "] : null, why.sentence) : null);
    replace(history, stamps(passport));
    replace(groups, queues.length ? section("Queue groups", standing(queues)) : null);
    replace(about, message.error ? h("p", { class: "soft" }, message.error.message) : content(message, passport));
    // Only once: it may be long, and does not change while somebody reads it.
    if (message.value !== said) replace(value, message.error ? null : body(message));
    said = message.value;
  };
  await draw();
  replace(place, top, h("div", { class: "columns" }, h("section", { class: "card" }, h("h2", {}, "Passport"), history), h("section", { class: "card" }, h("h2", {}, "Message"), about, value)), groups);
  return draw;
}

function standing(queues) {
  const until = (row) => (!row.until_ms ? "–" : [row.state === "leased" ? "until " : "", ago(row.until_ms)]);
  return table([
    { title: "Group", name: true, cell: (row) => h("a", { href: `#/queue/${part(row.topic)}/${part(row.group)}` }, row.group) },
    { title: "State", cell: (row) => pill(row.state, standings[row.state] || "") },
    { title: "Consumer", cell: (row) => row.consumer || "–" },
    { title: "Due", cell: until },
    { title: "Deliveries", num: true, cell: (row) => count(row.deliveries) },
    { title: "Failures", num: true, cell: (row) => count(row.failures) },
    { title: "Last error", wrap: true, cell: (row) => row.attempts.at(-1)?.reason || "–" },
  ], queues, { caption: "What the message is to each queue group" });
}

function crumbs(passport, message) {
  const topic = message.topic || passport.topic;
  return topic ? [["Topics", "#/topics"], [topic, `#/topic/${part(topic)}`], ["Messages", `#/messages?topic=${part(topic)}`]] : [["Messages", "#/messages"]];
}

function stamps(passport) {
  if (passport.error) return h("p", { class: "soft" }, passport.error.message);
  if (!passport.events.length) return empty("Nothing is recorded", "Successes are sampled; failures always leave a trace.");
  let before = null;
  return [h("ol", { class: "passport" }, passport.events.map((event) => {
    const later = before ? event.time_ms - before.time_ms : 0, again = before?.error === event.error;
    before = event;
    return h("li", { class: kinds[event.kind] || "" },
      h("div", { class: "head" }, h("span", { class: "what" }, words[event.kind] || plain(event.kind)), event.group ? h("span", {}, "by group ", h("b", {}, event.group)) : null, event.consumer ? h("span", { class: "soft" }, event.consumer) : null, h("span", { class: "at" }, later > 0 ? `+${duration(later)}  ` : "", when(event.time_ms, { milliseconds: true }))),
      event.note ? h("div", { class: "soft" }, /^[A-Z_]+$/.test(event.note) ? plain(event.note) : event.note) : null,
      event.error && !again ? h("pre", {}, event.error) : null,
      event.link ? h("div", {}, linked(event)) : null);
  })), passport.complete === false ? h("p", { class: "soft" }, "There are more records than could be looked through.") : null];
}

// The dead letter has a page of its own, from where it can be sent again.
function linked(event) {
  return event.kind === "dead_lettered" ? h("a", { href: `#/letter/${event.link}` }, "Open the dead letter") : h("a", { href: `#/message/${event.link}`, class: "mono" }, event.link);
}

function content(message, passport) {
  const scheduled = message.deliver_at_ms > 0;
  return [facts([
    ["Topic", h("a", { href: `#/topic/${part(message.topic)}` }, message.topic)],
    ["Place", scheduled ? "scheduled" : `partition ${message.partition}, offset ${number(message.offset)}`],
    ["Due", scheduled ? [when(message.deliver_at_ms), " (", ago(message.deliver_at_ms), ")"] : null],
    ["Stored", [when(message.append_time_ms), " (", ago(message.append_time_ms), ")"]],
    ["Key", message.key === null ? null : keyed(message)],
    ["Priority", message.priority === 2 ? null : priorities[message.priority]],
    ["Expires", message.expiry_ms ? when(message.expiry_ms) : null],
    ["Size", bytes(message.size)],
    ["Trace", passport.trace_id ? h("a", { href: `#/traces?trace_id=${passport.trace_id}`, class: "mono" }, passport.trace_id) : null],
  ]), Object.keys(message.headers).length ? [h("h2", {}, "Headers"), facts(Object.entries(message.headers).map(([name, value]) => [h("code", {}, name), h("code", {}, [value].flat().join(", "))]))] : null];
}

function body(message) {
  const binary = message.encoding === "base64";
  return [h("h2", {}, "Value"), message.value === null ? h("p", { class: "soft" }, "None: it is a deletion marker.") : [binary ? h("p", { class: "soft" }, "Not text; shown as base64.") : null, h("pre", { tabindex: 0, "aria-label": "Value" }, binary ? message.value : pretty(message.value))]];
}
