// All topics: a thousand of them are as quick as ten.

import { empty, field, h, heading, pill, replace } from "../dom.js";
import { everything, part, post, remove } from "../api.js";
import { doing, open } from "../dialogs.js";
import { list } from "../tables.js";
import { bytes, count, number, short } from "../words.js";

export const title = "Topics";

export async function show(place, words, query, again) {
  const topics = list([
    { title: "Topic", name: true, cell: (row) => h("a", { href: `#/topic/${part(row.name)}`, title: row.name }, row.name), sort: (row) => row.name },
    { title: "Messages", num: true, cell: (row) => (row.failed ? pill(row.failed, "bad") : count(row.messages)), sort: (row) => row.messages },
    { title: "Size", num: true, cell: (row) => bytes(row.size_bytes), sort: (row) => row.size_bytes },
    { title: "Unsettled", num: true, cell: (row) => count(row.depth), sort: (row) => row.depth },
    { title: "Leased", num: true, cell: (row) => count(row.leased), sort: (row) => row.leased },
    { title: "Retrying", num: true, cell: (row) => count(row.waiting), sort: (row) => row.waiting },
    { title: "Dead letters", num: true, cell: (row) => (row.dead_letters ? h("a", { href: `#/letters?topic=${part(row.name)}` }, pill(short(row.dead_letters), "bad")) : count(0)), sort: (row) => row.dead_letters },
    { title: "Groups", num: true, cell: (row) => count(row.groups), sort: (row) => row.groups },
    { title: "Partitions", num: true, cell: (row) => number(row.partition_count), sort: (row) => row.partition_count },
  ], { key: "topics", caption: "Topics", text: (row) => row.name, noun: "topic", empty: empty("There are no topics yet", "Make one, or ", h("a", { href: "#/publish" }, "publish something"), ".") });
  replace(place, heading("Topics", { actions: h("button", { class: "main", type: "button", onclick: () => create(again) }, "New topic") }), h("p", { class: "lead" }, "Filter by a part of the name, or by a pattern: * is one level, # the rest."), topics.box);
  let rows = [], turns = 0;
  const refresh = async () => { rows = await everything("/topics"); topics.draw(rows); };
  await refresh();
  return async () => { if (rows.length < 2000 || (turns += 1) % 6 === 0) await refresh(); };
}

function create(again) {
  open("New topic", (close) => {
    const name = h("input", { required: true, placeholder: "orders.eu.created", autocomplete: "off", spellcheck: "false" });
    const partitions = h("input", { type: "number", min: 1, max: 10000, value: 1, required: true });
    const save = h("button", { class: "main", type: "submit" }, "Create");
    const work = doing(save, async () => {
      const made = await post("/topics", { name: name.value.trim(), partitions: Number(partitions.value) });
      close();
      await again();
      return made.name;
    }, (made) => ({ text: `Topic ${made} was created.`, undo: async () => { await remove(`/topics/${part(made)}`); await again(); return `Topic ${made} was deleted again.`; } }));
    return h("form", { onsubmit: work }, h("div", { class: "fields" }, field("Name", name, { hint: "Levels are separated by dots." }), field("Partitions", partitions, { hint: "They can grow later, never shrink." })), h("div", { class: "tools end" }, h("button", { type: "button", onclick: close }, "Cancel"), save));
  });
}
