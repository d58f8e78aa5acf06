// Line plots.  The figures are in the text as well, for those who do not see the lines.

import { choices, empty, h, replace } from "./dom.js";
import { doing } from "./dialogs.js";
import { bytes, duration, rate, short } from "./words.js";

const colours = ["var(--one)", "var(--two)", "var(--three)", "var(--four)"];
const seconds = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 3600, 7200, 21600, 43200, 86400, 172800, 604800];

// What an axis ends with, and how its figures are written.
const units = {
  count: { most: (value) => Math.max(2, rounded(value)), text: (value) => short(Math.round(value)) },
  rate: { most: rounded, text: rate },
  time: { most: (value) => (seconds.find((step) => step * 1000 >= value) || Math.ceil(value / 604800000) * 604800) * 1000, text: duration },
  bytes: { most: (value) => 2 ** Math.ceil(Math.log2(Math.max(value, 1024))), text: bytes },
};

function rounded(value) {
  if (value <= 0) return 1;
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * size).find((step) => step >= value * 0.999);
}

// Since when; a little less, because what is older than an hour is kept in coarser steps.
function since(span) { return Date.now() - Math.round(span * 0.99); }

const spans = [[900000, "15 min"], [3600000, "1 h"], [21600000, "6 h"], [86400000, "24 h"], [604800000, "7 d"], [2592000000, "30 d"]];

let span = 3600000;

// Plots, and the choice of how far back they go, which is the same on all pages.  `read(since)` answers with plots.
export function overTime(read) {
  const [graphs, range] = [h("div", { class: "plots" }), h("div")];
  let asked = 0;
  const draw = async () => {
    const turn = (asked += 1);
    const found = await read(since(span));
    if (turn === asked) replace(graphs, found);  // or somebody has chosen another span meanwhile
  };
  const pick = (chosen) => { span = chosen; offer(); doing(range.querySelector("[aria-pressed=true]"), draw)(); };
  const offer = () => replace(range, choices("Time span", spans, span, pick));
  offer();
  return { graphs, range, draw };
}

// series: [{name, history}], a history as /stats/history answers it.
export function plot(title, series, { unit = "count" } = {}) {
  const { most, text } = units[unit];
  const now = (one) => (one.history.points.length ? text(one.history.points.at(-1).avg) : "–");
  const legend = h("div", { class: "legend" }, series.map((one, index) => h("span", {}, series.length > 1 ? [h("i", { style: `background:${colours[index]}` }), one.name, " "] : null, h("b", {}, now(one)))));
  const box = h("section", { class: "card plot" }, h("header", {}, h("h3", {}, title), legend));
  const all = series.flatMap((one) => one.history.points);
  if (new Set(all.map((point) => point.time_ms)).size < 2) {
    box.append(empty("Not enough history yet", "It is measured every 5 seconds."));
    return box;
  }
  const until = Math.max(...all.map((point) => point.time_ms));
  const from = Math.min(...all.map((point) => point.time_ms));
  const top = most(Math.max(...all.map((point) => point.avg), 0));
  const x = (ms) => ((ms - from) / (until - from)) * 100, y = (value) => 100 - (value / top) * 100;
  const svg = h("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img" },
    h("title", {}, `${title}, the last ${duration(until - from)}: ${series.map((one) => `${one.name} now ${now(one)}, at most ${text(Math.max(0, ...one.history.points.map((point) => point.avg)))}`).join("; ")}`),
    [0, 50].map((at) => h("line", { class: "grid", x1: 0, x2: 100, y1: at, y2: at, "vector-effect": "non-scaling-stroke" })));
  series.forEach((one, index) => {
    for (const run of unbroken(one.history)) {
      if (run.length === 1) run.push(run[0]);  // with round ends, a dot
      const line = run.map((point) => `${x(point.time_ms).toFixed(2)},${y(point.avg).toFixed(2)}`).join(" ");
      if (index === 0) svg.append(h("polygon", { fill: colours[0], opacity: 0.1, points: `${x(run[0].time_ms)},100 ${line} ${x(run.at(-1).time_ms)},100` }));
      svg.append(h("polyline", { fill: "none", stroke: colours[index], "stroke-width": 1.8, "stroke-linejoin": "round", "stroke-linecap": "round", "vector-effect": "non-scaling-stroke", points: line }));
    }
  });
  const area = h("div", { class: "area" }, svg);
  point(area, svg, series, { from, until, text });
  box.append(h("div", { class: "graph" }, h("div", { class: "ups", "aria-hidden": "true" }, [top, top / 2, 0].map((value) => h("span", {}, text(value)))), area, along(from, until)));
  return box;
}

export function along(from, until, first = null) {
  const days = until - from > 86400000, at = (share) => new Date(from + share * (until - from));
  const clock = (moment) => (days ? moment.toLocaleString("sv").slice(5, 16) : moment.toLocaleTimeString("sv", until - from < 600000 ? {} : { hour: "2-digit", minute: "2-digit" }));
  return h("div", { class: "along", "aria-hidden": "true" }, [0, 1 / 3, 2 / 3, 1].map((share) => h("span", {}, share === 0 && first ? first : clock(at(share)))));
}

// Where nothing was measured the line is broken: a gap is not a zero.
function unbroken(history) {
  const runs = [];
  for (const one of history.points) {
    const last = runs.at(-1)?.at(-1);
    if (last && one.time_ms - last.time_ms <= history.step_ms * 2.5) runs.at(-1).push(one);
    else runs.push([one]);
  }
  return runs;
}

// The figures under the pointer.
function point(area, svg, series, { from, until, text }) {
  const [line, tip] = [h("line", { class: "here", y1: 0, y2: 100, "vector-effect": "non-scaling-stroke" }), h("div", { class: "tip" })];
  area.addEventListener("pointermove", (event) => {
    const { left, width } = area.getBoundingClientRect();
    const share = Math.max(0, Math.min(1, (event.clientX - left) / width)), ms = from + share * (until - from);
    line.setAttribute("x1", share * 100);
    line.setAttribute("x2", share * 100);
    tip.className = `tip ${share > 0.6 ? "left" : "right"}`;
    tip.style.left = `${share * 100}%`;
    replace(tip, h("div", {}, new Date(ms).toLocaleString("sv")), series.map((one) => {
      const nearest = one.history.points.reduce((best, here) => (Math.abs(here.time_ms - ms) < Math.abs(best.time_ms - ms) ? here : best), one.history.points[0]);
      return nearest ? h("div", {}, `${one.name} ${Math.abs(nearest.time_ms - ms) <= one.history.step_ms * 2.5 ? text(nearest.avg) : "not measured"}`) : null;
    }));
    if (!line.isConnected) { svg.append(line); area.append(tip); }
  });
  area.addEventListener("pointerleave", () => { line.remove(); tip.remove(); });
}
