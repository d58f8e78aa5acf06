// Tables: sorted by any column, filtered as you type, a hundred rows at a time.

import { h, replace } from "./dom.js";
import { many, number } from "./words.js";

const pageSize = 100;
// What somebody chose stays chosen while the page lives, and when it is drawn anew.
const sorting = new Map(), filters = new Map(), places = new Map();

// What is wider than its place can be scrolled with the keyboard too; the rest is no stop on the way.
const wider = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.setAttribute("tabindex", "0");
    else target.removeAttribute("tabindex");
  }
});

// columns: {title, cell(row), num, sort(row), wrap, name, act, wide, label}
// With `pages` there are a hundred rows at a time; it is the name under which the place is remembered.
export function table(columns, rows, { key = "", caption = "", empty = "Nothing here.", mark = null, sorted = null, pages = "" } = {}) {
  const box = h("div", { class: "table", role: "group", "aria-label": caption }), turns = h("div");
  wider.observe(box);
  const draw = () => {
    const chosen = sorting.get(key) || sorted, size = pages ? pageSize : rows.length || 1;
    const last = Math.max(0, Math.ceil(rows.length / size) - 1), at = Math.min(places.get(pages) || 0, last);
    const shown = ordered(columns, rows, chosen).slice(at * size, (at + 1) * size);
    const wide = columns.findIndex((column) => column.wide) >= 0 ? -1 : columns.findIndex((column) => column.wrap) >= 0 ? columns.findIndex((column) => column.wrap) : columns.findIndex((column) => !column.num);
    const look = (column, index) => [column.num && "num", column.wrap && "wrap", column.act && "act", column.name && "name", (column.wide || index === wide) && "wide"].filter(Boolean).join(" ");
    const head = columns.map((column, index) => {
      const down = chosen?.index === index ? chosen.down : null;
      const sort = () => { sorting.set(key, { index, down: down === null ? !!column.num : !down }); draw(); };
      const title = column.title || h("span", { class: "hidden" }, column.label || "Actions");
      return h("th", { class: look(column, index), scope: "col", "aria-sort": down === null ? null : down ? "descending" : "ascending" }, column.sort && key ? h("button", { type: "button", onclick: sort }, title, down === null ? "" : down ? " ↓" : " ↑") : title);
    });
    const body = shown.map((row) => h("tr", { class: mark?.(row) ? "chosen" : null }, columns.map((column, index) => h("td", { class: look(column, index) }, column.cell(row)))));
    replace(box, h("table", {}, h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, head)), rows.length ? h("tbody", {}, body) : null), rows.length ? null : typeof empty === "string" ? h("div", { class: "empty" }, empty) : empty);
    const turn = (to) => () => { places.set(pages, to); draw(); };
    replace(turns, last ? h("div", { class: "tools after" }, h("button", { type: "button", disabled: at === 0, onclick: turn(at - 1) }, "Previous"), h("span", { class: "soft" }, `${number(at * size + 1)} to ${number(at * size + shown.length)} of ${number(rows.length)}`), h("button", { type: "button", disabled: at === last, onclick: turn(at + 1) }, "Next")) : null);
  };
  draw();
  return h("div", {}, box, turns);
}

function ordered(columns, rows, chosen) {
  const value = columns[chosen?.index]?.sort;
  if (!value) return rows;
  const turn = chosen.down ? -1 : 1;
  return [...rows].sort((a, b) => { const x = value(a), y = value(b); return (x > y ? 1 : x < y ? -1 : 0) * turn; });
}

// A long list: a table with a box to filter it by.  `text(row)` is what is searched.  `draw(rows)` shows it anew.
export function list(columns, { key, caption, text, noun = "row", empty }) {
  const input = h("input", { type: "search", placeholder: "Filter", "aria-label": `Filter ${caption.toLowerCase()}`, value: filters.get(key) || "", autocomplete: "off", spellcheck: "false" });
  const [body, said] = [h("div"), h("span", { class: "soft", role: "status" })];
  const box = h("div", {}, h("div", { class: "tools" }, input, said), body);
  let rows = [];
  const show = () => {
    const wanted = (filters.get(key) || "").toLowerCase();
    const matches = wildcard(wanted);
    const found = wanted ? rows.filter((row) => matches(text(row).toLowerCase())) : rows;
    replace(body, table(columns, found, { key, caption, pages: key, empty: wanted ? `Nothing matches “${wanted}”.` : empty }));
    const all = rows.total > rows.length ? `the first ${number(rows.length)} of ${many(rows.total, noun)}; the others are not looked through here` : many(rows.length, noun);
    said.textContent = wanted ? `${number(found.length)} of ${all}` : all;
  };
  input.addEventListener("input", () => { filters.set(key, input.value.trim()); places.delete(key); show(); });
  return { box, draw: (fresh) => { rows = fresh; show(); } };
}

// A part of the name; or, with `*` (one level) or `#` (the rest), a pattern.
function wildcard(wanted) {
  if (!/[*#]/.test(wanted)) return (name) => name.includes(wanted);
  const levels = wanted.split(".").map((level) => (level === "#" ? ".*" : level.replace(/[\\^$+?()[\]{}|]/g, "\\$&").replaceAll("*", "[^.]*")));
  const pattern = new RegExp(`^${levels.join("\\.").replace(/\\\.\.\*$/, "(\\..*)?")}$`);
  return (name) => pattern.test(name);
}
