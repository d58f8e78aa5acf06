// Publishing one message by hand.

import { field, h, heading, replace } from "../dom.js";
import { part, post } from "../api.js";
import { doing } from "../dialogs.js";
import { headersOf, priorities } from "../words.js";

export const title = "Publish";
const survives = { disk: "a power cut", os: "a crash of the broker", memory: "nothing" };

export async function show(place, words, query) {
  const topic = h("input", { value: query.get("topic") || "", required: true, autocomplete: "off", spellcheck: "false", list: "jump-topics" });
  const key = h("input", { autocomplete: "off", placeholder: "none" });
  const value = h("textarea", { spellcheck: "false", style: "min-height:180px" });
  const encoding = h("select", {}, [["text", "text"], ["json", "JSON"], ["base64", "base64"]].map(([one, text]) => h("option", { value: one }, text)));
  const headers = h("textarea", { style: "min-height:60px", spellcheck: "false", placeholder: "name: value, one per line" });
  const priority = h("select", { value: "2" }, priorities.map((name, index) => h("option", { value: index }, name)));
  const delay = h("input", { type: "number", min: 0, step: "any", placeholder: "at once" });
  const ttl = h("input", { type: "number", min: 0, step: "any", placeholder: "as the topic says" });
  const dedup = h("input", { autocomplete: "off", placeholder: "none" });
  const send = h("button", { class: "main", type: "submit" }, "Publish"), result = h("div", { role: "status" });
  const work = doing(send, async () => {
    if (encoding.value === "json") parsed(value.value);
    // JSON is sent as the text that was typed: long numbers stay what they are.
    const message = { value: value.value, encoding: encoding.value === "json" ? "text" : encoding.value, priority: Number(priority.value) };
    if (key.value) message.key = key.value;
    if (dedup.value) message.dedup_id = dedup.value;
    if (delay.value) message.delay_ms = Math.round(Number(delay.value) * 1000);
    if (ttl.value) message.ttl_ms = Math.round(Number(ttl.value) * 1000);
    if (headers.value.trim()) message.headers = headersOf(headers.value);
    const [receipt] = await post(`/topics/${part(topic.value.trim())}/messages`, message);
    const what = receipt.duplicate ? "Was stored before" : receipt.scheduled ? "Is scheduled" : "Stored";
    replace(result, h("div", { class: "notice good" }, `${what} as `, h("a", { href: `#/message/${receipt.id}`, class: "mono" }, receipt.id), receipt.scheduled ? "" : ` in partition ${receipt.partition} at offset ${receipt.offset}`, `; it survives ${survives[receipt.durability] || receipt.durability}. `, h("a", { href: `#/topic/${part(receipt.topic)}` }, "Open the topic")));
    return receipt;
  }, (receipt) => `Published to ${receipt.topic}.`);
  replace(place, heading("Publish"), h("p", { class: "lead" }, "One message by hand. A missing topic is made if the broker may make topics."),
    h("form", { class: "card", onsubmit: work }, h("div", { class: "fields" }, field("Topic", topic), field("Key", key), field("Priority", priority), field("Delay, seconds", delay), field("Expires after, seconds", ttl), field("Deduplication id", dedup), field("The value is", encoding), field("Value", value, { wide: true }), field("Headers", headers, { wide: true })), h("div", { class: "tools after" }, send)), result);
}

function parsed(text) { try { JSON.parse(text); } catch (error) { throw new Error(`The value is not JSON: ${error.message}.`); } }
