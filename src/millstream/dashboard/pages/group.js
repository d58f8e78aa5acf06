// A stream group: members, what each of them reads, how far behind it is.

import { card, empty, field, h, heading, lead, pill, replace, section } from "../dom.js";
import { get, part, post, remove } from "../api.js";
import { button, doing, open } from "../dialogs.js";
import { table } from "../tables.js";
import { count, duration, many, number, short } from "../words.js";

export const title = "Stream group";

export async function show(place, [name], query, again) {
  const here = `/groups/${part(name)}`;
  const [cards, members, lag, paused] = [h("div", { class: "cards" }), h("div"), h("div"), h("span")];
  let group = await get(here);
  const refresh = async () => { group = await get(here); draw(); };
  const setPaused = async (wanted) => { await post(`${here}/${wanted ? "pause" : "resume"}`); await refresh(); return wanted; };
  const said = (now) => (now ? `Group ${name} is paused.` : `Group ${name} goes on.`);
  const pausing = () => button(group.paused ? "Resume" : "Pause", () => setPaused(!group.paused), {
    look: group.paused ? "main" : "",
    ask: group.paused ? null : { title: `Pause ${name}?`, text: "Its members commit what they have in hand and give their partitions back. Nobody reads until it is resumed.", action: "Pause", danger: false },
    done: (now) => ({ text: said(now), undo: async () => said(await setPaused(!now)) }),
  });
  const rebalance = button("Rebalance", async () => { await post(`${here}/rebalance`); await refresh(); }, { ask: { title: `Rebalance ${name}?`, text: "The partitions are dealt anew; reading pauses for a moment.", action: "Rebalance", danger: false }, done: `Group ${name} rebalances.` });
  const forget = button("Delete", async () => { await remove(here); lead(place, "#/groups"); }, { look: "danger", ask: { title: `Delete group ${name}?`, text: "Its progress is forgotten. Who joins again begins as if it were new. This cannot be undone.", action: "Delete the group", typed: name }, done: `Group ${name} was deleted.` });
  const draw = () => {
    const behind = group.lag.reduce((sum, one) => sum + one.lag, 0), oldest = Math.max(0, ...group.lag.map((one) => one.lag_ms));
    replace(paused, pausing());
    replace(cards,
      card("State", pill(group.paused ? "paused" : group.state, group.paused || group.state === "rebalancing" ? "warn" : group.state === "stable" ? "good" : ""), `generation ${number(group.generation)}`),
      card("Behind", short(behind), behind ? `oldest ${duration(oldest)}` : "up to date"),
      card("Members", number(group.members.length), many(group.lag.length, "partition")),
      card("Assignment", group.strategy || "–", group.protocol));
    replace(members, table([
      { title: "Member", cell: (row) => [h("b", {}, row.client_id), " ", h("span", { class: "mono soft" }, row.member_id)] },
      { title: "Address", cell: (row) => row.address },
      { title: "Reads", wrap: true, cell: (row) => row.partitions.map((one) => `${one.topic} ${ranges(one.partitions)}`).join("; ") || "nothing" },
      { title: "Heard of", num: true, cell: (row) => `${duration(Math.round(row.last_heartbeat_ms_ago / 1000) * 1000) || "0 s"} ago` },
      { title: "", act: true, cell: (row) => evict(here, row, refresh) },
    ], group.members, { caption: "Members", pages: `members of ${name}`, empty: empty("The group has no members", "Its progress is kept.") }));
    replace(lag, table([
      { title: "Topic", name: true, cell: (row) => h("a", { href: `#/topic/${part(row.topic)}` }, row.topic), sort: (row) => row.topic },
      { title: "Partition", num: true, cell: (row) => row.partition, sort: (row) => row.partition },
      { title: "Committed", num: true, cell: (row) => (row.committed === null ? "–" : number(row.committed)) },
      { title: "End", num: true, cell: (row) => (row.failed ? "–" : number(row.end)) },
      { title: "Behind", num: true, cell: (row) => (row.failed ? pill(row.failed, "bad") : count(row.lag)), sort: (row) => row.lag },
      { title: "Oldest", num: true, cell: (row) => (row.lag ? duration(row.lag_ms) : "–"), sort: (row) => row.lag_ms },
      { title: "Read by", cell: (row) => (row.member_id ? h("span", { class: "mono" }, row.member_id) : pill("nobody", "warn")) },
    ], group.lag, { key: "group-lag", caption: "Progress of each partition", pages: `progress of ${name}`, empty: "Nothing was committed yet." }));
  };
  replace(place, heading(name, { crumbs: [["Groups", "#/groups"]], actions: [paused, rebalance, h("button", { type: "button", onclick: () => resetOffsets(here, group, refresh) }, "Reset offsets…"), forget] }), cards, section("Members", members), section("Progress", lag));
  draw();
  return refresh;
}

function ranges(partitions) {
  const runs = [];
  for (const one of [...partitions].sort((a, b) => a - b)) if (runs.length && runs.at(-1)[1] === one - 1) runs.at(-1)[1] = one; else runs.push([one, one]);
  return `[${runs.map(([first, last]) => (first === last ? first : `${first}–${last}`)).join(", ")}]`;
}

function evict(here, member, refresh) {
  return button("Evict", async () => { await remove(`${here}/members/${part(member.member_id)}`); await refresh(); }, { look: "danger small", done: `${member.client_id} was evicted.`, ask: { title: `Evict ${member.client_id}?`, text: `${member.member_id} loses its partitions at once; others take them over. If it is alive it joins again.`, action: "Evict" } });
}

function resetOffsets(here, group, refresh) {
  open(`Reset offsets of ${group.name}`, (close) => {
    const topics = [...new Set(group.lag.map((one) => one.topic))];
    const topic = topics.length ? h("select", {}, topics.map((one) => h("option", { value: one }, one))) : h("input", { required: true, list: "jump-topics" });
    const to = h("select", {}, [["earliest", "the beginning"], ["latest", "the end"], ["timestamp", "a time"], ["offset", "an offset"], ["shift", "so many messages on (or back)"]].map(([value, text]) => h("option", { value }, text)));
    const value = h("input", { type: "number", required: true }), time = h("input", { type: "datetime-local", step: 1, required: true });
    const [valueField, timeField, plan] = [field("By, or to", value), field("Time", time), h("div", { role: "status" })];
    const arrange = () => {
      timeField.hidden = time.disabled = to.value !== "timestamp";
      valueField.hidden = value.disabled = !["offset", "shift"].includes(to.value);
      for (const one of [timeField, valueField]) one.style.display = one.hidden ? "none" : "";
    };
    to.onchange = arrange;
    arrange();
    const body = (dry_run) => ({ topic: topic.value.trim(), to: to.value, ...(to.value === "timestamp" ? { value: new Date(time.value).getTime() } : value.disabled ? {} : { value: Number(value.value) }), dry_run });
    const look = h("button", { type: "button" }, "Dry run");
    look.onclick = doing(look, async () => {
      if (!look.form.reportValidity()) return;
      const [wanted, found] = [JSON.stringify(body(true)), await post(`${here}/reset`, body(true))];
      if (wanted !== JSON.stringify(body(true))) return;
      const committed = (entry) => group.lag.find((one) => one.topic === entry.topic && one.partition === entry.partition)?.committed;
      replace(plan, h("div", { style: "margin-top:14px" }, table([{ title: "Partition", num: true, cell: (row) => row.partition }, { title: "Now", num: true, cell: (row) => number(committed(row)) }, { title: "Then", num: true, cell: (row) => number(row.offset) }], found, { caption: "What would change", pages: "reset", empty: "Nothing would change." })));
    });
    const save = h("button", { class: "danger", type: "submit" }, "Reset");
    const work = doing(save, async () => { const moved = await post(`${here}/reset`, body(false)); close(); await refresh(); return moved; }, (moved) => ({ text: `${many(moved.length, "partition was", "partitions were")} moved.`, undo: undoing(here, group.lag, moved, refresh) }));
    return h("form", { onsubmit: work, oninput: () => replace(plan) }, h("p", { class: "soft" }, "Only a group without members can be moved; pausing it is not enough."), h("div", { class: "fields" }, field("Topic", topic), field("To", to), valueField, timeField), plan, h("div", { class: "tools end" }, look, h("button", { type: "button", onclick: close }, "Cancel"), save));
  });
}

// Back to where each partition was, if every one of them was somewhere.
function undoing(here, lag, moved, refresh) {
  const before = moved.map((entry) => ({ ...entry, offset: lag.find((one) => one.topic === entry.topic && one.partition === entry.partition)?.committed }));
  if (before.some((entry) => entry.offset === null || entry.offset === undefined)) return null;
  return async () => {
    for (const entry of before) await post(`${here}/reset`, { topic: entry.topic, to: "offset", value: entry.offset, partitions: [entry.partition] });
    await refresh();
    return "The offsets are what they were.";
  };
}
