// Elements from data.  Text always becomes a text node: nothing a message contains is markup.

const said = new Set(["title", "aria-label", "placeholder"]);
const drawn = new Set(["svg", "path", "line", "rect", "circle", "text", "g", "title", "polyline", "polygon"]);

export function h(name, attributes = {}, ...children) {
  const element = drawn.has(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  add(element, children);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "value" || key === "checked" || key === "disabled") element[key] = value;
    else if (key === "style") element.style.cssText = value;  // an attribute would need a weaker content security policy
    else element.setAttribute(key, value === true ? "" : said.has(key) ? shown(value) : value);
  }
  return element;
}

function add(parent, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(shown(child)));
  }
}

// Signs that turn the direction of writing, in a name or an error, must not turn what stands behind them.  They are
// written as numbers: the end of an isolation would leave even an element that isolates.
export function shown(text) { return String(text).replace(/[\u202a-\u202e\u2066-\u2069]/g, (sign) => `\\u${sign.charCodeAt(0).toString(16)}`); }

// Pages draw themselves anew every few seconds: whoever is reading or tabbing through one must not notice.
export function replace(parent, ...children) {
  const back = trail(parent, document.activeElement);
  const scrolling = () => [...parent.querySelectorAll(".table, pre")];
  const scrolled = scrolling().map((box) => [box.scrollLeft, box.scrollTop]);
  const open = [...parent.querySelectorAll("details")].map((one) => one.open);
  const fresh = document.createDocumentFragment();
  add(fresh, children);
  parent.replaceChildren(fresh);
  scrolling().forEach((box, index) => { if (scrolled[index]) [box.scrollLeft, box.scrollTop] = scrolled[index]; });
  [...parent.querySelectorAll("details")].forEach((one, index) => { if (open[index]) one.open = true; });
  back();
}

// Gives the focus to an element, or to what is in its place by then.
export function trail(parent, element) {
  if (!element || element === parent || !parent.contains(element)) return () => {};
  const path = [];
  for (let at = element; at !== parent; at = at.parentElement) path.unshift([...at.parentElement.children].indexOf(at));
  return () => path.reduce((at, index) => at?.children[index], parent)?.focus({ preventScroll: true });
}

// Where somebody is led after something was done, unless they went elsewhere meanwhile.
export function lead(place, hash) { if (place.isConnected) location.hash = hash; }

// --- pieces -------------------------------------------------------------------------------------------------------

export function heading(text, { crumbs = [], actions = [] } = {}) {
  return [
    crumbs.length ? h("nav", { class: "crumbs", "aria-label": "Where this is" }, crumbs.map(([name, href], index) => [index ? " / " : "", h("a", { href }, name)])) : null,
    h("div", { class: "heading" }, h("h1", { tabindex: -1 }, text), actions),
  ];
}

export function section(title, body, { actions = [], note = "" } = {}) {
  return h("section", { class: "section" }, h("header", {}, h("h2", {}, title), note ? h("span", { class: "soft" }, note) : null, h("div", { class: "tools" }, actions)), body);
}

export function pill(text, kind = "") { return h("span", { class: `pill ${kind}` }, text); }

export function card(label, figure, note = "", kind = "") {
  const words = typeof figure !== "string" || /[a-z]{4}/i.test(figure);
  return h("div", { class: `card figures ${kind}` }, h("div", { class: "label" }, label), h("div", { class: `figure ${words ? "words" : ""}` }, figure), note ? h("div", { class: "note" }, note) : null);
}

export function facts(pairs) {
  const known = pairs.filter((pair) => pair && pair[1] !== undefined && pair[1] !== null && pair[1] !== "");
  return h("dl", { class: "facts" }, known.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

// Many short ones, in columns.
export function settings(pairs) {
  return h("dl", { class: "facts many card" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

export function field(label, control, { wide = false, hint = "" } = {}) {
  return h("label", { class: `field ${wide ? "wide" : ""}` }, h("span", {}, label), control, hint ? h("span", {}, hint) : null);
}

// What could not be done, in the place where its outcome would be.
export function refusal(error, ...more) { return h("div", { class: "notice bad", role: "alert" }, h("b", {}, error.message), error.suggestions?.length ? h("div", {}, error.suggestions.join(" ")) : null, more); }

export function empty(title, ...more) { return h("div", { class: "empty" }, h("b", {}, title), more); }

export function meter(part, label) {
  const percent = Math.max(0, Math.min(100, part * 100));
  return h("div", { class: "meter", role: "progressbar", "aria-valuenow": Math.round(percent), "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": label }, h("i", { style: `width:${percent}%` }));
}

// A few things of which one holds: [[value, label], ...].
export function choices(label, options, chosen, pick) {
  return h("div", { class: "choices", role: "group", "aria-label": label }, options.map(([value, text]) => h("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => pick(value) }, text)));
}
