// Pipelines: jobs of Spark that report to this broker, wherever they run.

import { empty, facts, h, heading, pill, replace } from "../dom.js";
import { get, part, post, remove } from "../api.js";
import { button, open } from "../dialogs.js";
import { table } from "../tables.js";
import { ago, count, duration, number, rate, when } from "../words.js";

export const title = "Pipelines";

const looks = { running: "good", waiting: "good", finished: "good", failed: "bad", lost: "bad" };
const over = new Set(["stopped", "finished", "failed", "lost"]);

export async function show(place) {
  const list = h("div");
  const refresh = async () => replace(list, table([
    { title: "Pipeline", name: true, cell: (row) => button(row.name, () => look(row.name), { look: "link" }), sort: (row) => row.name },
    { title: "State", cell: (row) => [pill(row.state, looks[row.state] || "warn"), row.stop_wished && !over.has(row.state) ? h("div", { class: "soft" }, "told to stop") : null], sort: (row) => row.state },
    { title: "Reads and writes", wrap: true, wide: true, cell: (row) => [named(row.sources), " → ", named(row.sinks)] },
    { title: "Rows", num: true, cell: (row) => count(row.rows), sort: (row) => row.rows },
    { title: "Rows/s", num: true, cell: (row) => (over.has(row.state) ? "–" : rate(row.rows_per_s)), sort: (row) => row.rows_per_s },
    { title: "Lag", num: true, cell: (row) => (row.lag < 0 ? "–" : count(row.lag)), sort: (row) => row.lag },
    { title: "Restarts", num: true, cell: (row) => count(row.restarts), sort: (row) => row.restarts },
    { title: "Last report", cell: (row) => ago(row.reported_ms), sort: (row) => row.reported_ms },
    { title: "Last error", wrap: true, cell: (row) => h("span", { class: "clip", title: row.error }, row.error || "–") },
    { title: "", act: true, cell: (row) => (over.has(row.state) ? forget(row, refresh) : stop(row, refresh)) },
  ], await get("/pipelines"), { key: "pipelines", caption: "Pipelines", empty: empty("No pipeline has reported to this broker", "Declare one in a file, and start it with ", h("code", {}, "millstream pipeline run FILE"), ".") }));
  replace(place, heading("Pipelines"), h("p", { class: "lead" }, "Jobs that read topics in bulk and write results back. They run outside of the broker and report to it."), list);
  await refresh();
  return refresh;
}

function named(names) { return names.length ? names.map((name, index) => [index ? ", " : "", h("code", {}, name)]) : "–"; }

function stop(row, refresh) {
  return button("Stop", async () => { const told = await post(`/pipelines/${part(row.name)}/stop`); await refresh(); return told; }, {
    look: "danger small",
    ask: { title: `Stop ${row.name}?`, text: "It ends after the batch that is under way, and goes on from there when somebody starts it again.", action: "Stop it" },
    done: (told) => (told.stop_wished && !over.has(told.state) ? `${row.name} stops after the batch that is under way.` : `${row.name} does not run: it is ${told.state}.`),
  });
}

function forget(row, refresh) {
  return button("Forget", async () => { await remove(`/pipelines/${part(row.name)}`); await refresh(); }, {
    look: "small",
    ask: { title: `Forget ${row.name}?`, text: "It is not listed any more until it reports again. Its checkpoint stays where it is.", action: "Forget it" },
    done: `${row.name} is forgotten.`,
  });
}

async function look(name) {
  const row = await get(`/pipelines/${part(name)}`);
  open(row.name, (close) => h("div", {},
    row.definition.description ? h("p", { class: "soft" }, row.definition.description) : null,
    facts([
      ["State", pill(row.state, looks[row.state] || "warn")],
      ["Reads", named(row.sources)],
      ["Writes", named(row.sinks)],
      ["Rows", `${number(row.rows)}, ${rate(row.rows_per_s)}`],
      ["Lag", row.lag < 0 ? "" : number(row.lag)],
      ["Last batch", row.batch < 0 ? "" : `${number(row.batch)}, took ${duration(row.batch_ms)}`],
      ["Restarts", row.restarts ? number(row.restarts) : ""],
      ["Last error", row.error],
      ["Runs on", row.host ? `${row.host}, process ${row.pid}` : ""],
      ["Started", row.started_ms ? when(row.started_ms) : ""],
      ["Last report", when(row.reported_ms)],
    ]),
    h("details", {}, h("summary", {}, "What it does"), h("pre", { tabindex: 0, "aria-label": "Definition" }, JSON.stringify(row.definition, null, 2))),
    h("div", { class: "tools end" }, h("button", { type: "button", onclick: close }, "Close"))), { large: true });
}
