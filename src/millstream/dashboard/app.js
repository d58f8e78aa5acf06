// The shell: which page is shown, what is always on screen, and the keys.
// A page is a module with `title` and `show(place, words, query, again)`; it may return a function that refreshes it.

import { h, heading, refusal, replace, shown } from "./dom.js";
import { choose, get, namespace, useKey } from "./api.js";
import { doing, open } from "./dialogs.js";
import { number, plain, short } from "./words.js";
import * as overview from "./pages/overview.js";
import * as topics from "./pages/topics.js";
import * as topic from "./pages/topic.js";
import * as messages from "./pages/messages.js";
import * as message from "./pages/message.js";
import * as traces from "./pages/traces.js";
import * as letters from "./pages/letters.js";
import * as letter from "./pages/letter.js";
import * as schedules from "./pages/schedules.js";
import * as groups from "./pages/groups.js";
import * as group from "./pages/group.js";
import * as queue from "./pages/queue.js";
import * as publish from "./pages/publish.js";
import * as webhooks from "./pages/webhooks.js";
import * as mqtt from "./pages/mqtt.js";
import * as mqttSession from "./pages/mqtt-session.js";
import * as pipelines from "./pages/pipelines.js";
import * as health from "./pages/health.js";

const pages = { "": overview, topics, topic, messages, message, traces, letters, letter, schedules, groups, group, queue, publish, webhooks, mqtt, "mqtt-session": mqttSession, pipelines, health };
const under = { topic: "topics", message: "messages", traces: "messages", letter: "letters", group: "groups", queue: "groups", "mqtt-session": "mqtt" };
const menu = [
  { name: "", text: "Overview", key: "o" },
  { name: "topics", text: "Topics", key: "t" },
  { name: "messages", text: "Messages", key: "m" },
  { name: "groups", text: "Groups", key: "g" },
  { name: "letters", text: "Dead letters", key: "d" },
  { name: "schedules", text: "Schedules", key: "s" },
  { name: "publish", text: "Publish", key: "p", apart: true },
  { name: "webhooks", text: "Webhooks", key: "w" },
  { name: "mqtt", text: "MQTT", key: "q" },
  { name: "pipelines", text: "Pipelines", key: "l" },
  { name: "health", text: "Health", key: "h" },
];
const refreshEvery = 5000;

const main = document.getElementById("main");
let current = { name: "", refresh: null, run: 0, cutOff: false, stale: false };
let dead = 0, live = true, looking = 0, waved = false;

// The page before stays until the next one is ready: nothing flickers, and nothing late is drawn over it.
async function show({ focus = false } = {}) {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name = "", ...words] = path.split("/").map(decoded);
  const run = current.run + 1;
  current = { name, refresh: null, run, cutOff: false, stale: false };
  waved = false;
  drawMenu();
  main.setAttribute("aria-busy", "true");
  const page = pages[name], place = h("div"), here = location.hash;
  const slow = setTimeout(() => { if (current.run === run) replace(main, h("p", { class: "soft", role: "status" }, "Loading…")); }, 400);
  let refresh = null;
  try {
    if (!page) replace(place, heading("There is no such page"), h("p", {}, h("a", { href: "#/" }, "Go to the overview")));
    else refresh = await page.show(place, words, new URLSearchParams(search), () => (location.hash === here ? show() : null));  // whoever went on is not disturbed
  } catch (error) {
    replace(place, heading(page.title), problem(error));
    if (current.run === run) current.cutOff = !(error.status > 0 && error.status < 500);
  }
  clearTimeout(slow);
  if (current.run !== run) return;
  document.title = shown(`${page ? page.title : "Not found"}${words.length ? ` ${words.join(" / ")}` : ""} · Millstream`);
  replace(main, place);
  main.removeAttribute("aria-busy");
  current.refresh = refresh || null;
  if (focus) { scrollTo(0, 0); main.querySelector("h1")?.focus({ preventScroll: true }); }
}

function problem(error) {
  return refusal(error, h("div", { class: "tools after" }, h("button", { type: "button", onclick: () => show() }, "Try again"), error.status === 403 ? h("button", { type: "button", onclick: () => askForKey() }, "Use another key") : null));
}

function decoded(word) { try { return decodeURIComponent(word); } catch { return word; } }

function drawMenu() {
  const here = under[current.name] ?? current.name;
  const badge = (entry) => (entry.name === "letters" && dead ? h("span", { class: "pill bad" }, short(dead), h("span", { class: "hidden" }, " dead letters")) : null);
  replace(document.getElementById("nav"), h("ul", {}, menu.map((entry) => h("li", { class: entry.apart ? "apart" : null }, h("a", { href: `#/${entry.name}`, "aria-current": here === entry.name ? "page" : null, title: `Keys: g ${entry.key}` }, entry.text, badge(entry))))));
  revealInMenu();
}

// On a narrow screen the menu is a row wider than it.  Not scrollIntoView: newer browsers let Tab go on from what it has shown, past the link that skips the menu.
function revealInMenu() {
  const row = document.getElementById("nav"), mark = row.querySelector("[aria-current]");
  if (!mark) return;
  const seen = row.getBoundingClientRect(), one = mark.getBoundingClientRect(), gap = 8;
  row.scrollLeft += Math.min(0, one.left - gap - seen.left) + Math.max(0, one.right + gap - seen.right);
}

const troubles = { 0: "not reachable", 401: "key needed", 403: "not allowed", 404: "no such namespace" };

async function tick() {
  looking += 1;
  try { await look(namespace()); } finally { looking -= 1; }
}

async function look(asked) {
  const pill = document.getElementById("mode");
  const say = (kind, text, title = "") => { pill.className = `pill ${kind}`; pill.title = title; if (pill.textContent !== text) pill.textContent = text; };
  let well = null;
  try {
    const seen = await get("/stats/overview", { limit: 1 });
    if (asked !== namespace()) return;
    well = () => say(seen.mode === "normal" ? "good" : "warn", seen.mode === "normal" ? "● running" : `▲ ${plain(seen.mode)}`, seen.reason);
    if (!current.stale) well();
    if (dead !== seen.dead_letters) { dead = seen.dead_letters; drawMenu(); }
    if (live && current.cutOff) show();
  } catch (error) {
    if (asked === namespace()) say("bad", `✕ ${troubles[error.status] || "cannot answer"}`, error.message);
  }
  // Nothing moves under somebody who marks text or is in a dialog.
  if (live && !document.hidden && current.refresh && !document.querySelector("dialog[open]") && getSelection().type !== "Range") {
    const { run, refresh } = current;
    try {
      await refresh();
      if (current.run !== run) return;
      current.stale = false;
      well?.();
    } catch (error) {
      if (current.run !== run) return;
      // What is gone, or not for this key any more, is not shown as if it were there.  Of the rest the pill tells.
      if ([403, 404].includes(error.status)) show();
      else if (well) { current.stale = true; say("warn", "▲ this page is not up to date", error.message); }
    }
  }
}

async function fillNamespaces() {
  const select = document.getElementById("namespace"), names = await namespaces();
  if (!names.includes(namespace())) choose(names.includes("default") ? "default" : names[0] || "default");
  offer(select, names);
  // More may have been made.  The one that is shown stays chosen, also if it is gone: the page says so.
  select.onpointerenter = select.onfocus = async () => { const known = await namespaces(); offer(select, [...new Set([...known, namespace()])].sort()); };
  // Nothing of the namespace before may be pressed any more: it would be done in the one that is chosen now.
  select.onchange = () => { choose(select.value); dead = 0; replace(document.getElementById("toasts")); replace(main); tick(); show(); };
}

// Without the right to list them the chosen one works.
async function namespaces() { try { return await get("/namespaces", {}, { whole: true }); } catch { return [namespace()]; } }

function offer(select, names) {
  const offered = [...select.options].map((one) => one.value);
  if (names.join() !== offered.join()) replace(select, names.map((name) => h("option", { value: name }, name)));  // it may be open
  select.value = namespace();
}

// `refused` is what the broker said about the key that was given.  Who waves it aside is asked again on the next page.
function askForKey(refused = "") {
  if (document.querySelector("dialog[open]")) return;
  const asked = open("This broker asks for a key", (close) => {
    const input = h("input", { type: "password", "aria-label": "API key", autocomplete: "off", required: true, pattern: "\\s*[!-~]+\\s*", title: "A key is made of plain letters, digits and signs.", style: "width:100%" });
    const use = h("button", { class: "main", type: "submit" }, "Use this key");
    return h("form", { onsubmit: doing(use, async () => { useKey(input.value.trim()); close(); await fillNamespaces(); await show(); tick(); }) },
      h("p", { class: "soft" }, "It is kept in this tab only. Make one with ", h("code", {}, "millstream key create"), "."), refused ? h("div", { class: "notice bad", role: "alert" }, refused) : null, input, h("div", { class: "tools end" }, use));
  });
  asked.addEventListener("cancel", () => { waved = true; });
}

function showKeys() {
  const rows = [["/", "go to a topic or a message"], ["r", "refresh"], ["?", "this list"], ...menu.map((entry) => [`g ${entry.key}`, entry.text.toLowerCase()])];
  open("Keyboard shortcuts", (close) => h("div", {}, h("dl", { class: "facts" }, rows.map(([keys, what]) => [h("dt", {}, keys.split(" ").map((key) => [h("kbd", {}, key), " "])), h("dd", {}, what)])), h("div", { class: "tools end" }, h("button", { type: "button", onclick: close }, "Close"))));
}

function setTheme(theme) { document.documentElement.dataset.theme = theme; }

let waiting = 0;
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]") || /^(input|textarea|select)$/i.test(event.target.tagName)) return;
  const entry = menu.find((one) => one.key === event.key);
  if (Date.now() - waiting < 1500 && entry) { waiting = 0; location.hash = `#/${entry.name}`; }
  else if (event.key === "g") waiting = Date.now();
  else if (event.key === "/") { event.preventDefault(); document.getElementById("jump-text").focus(); }
  else if (event.key === "?") showKeys();
  else if (event.key === "r") { tick(); show(); }
});

document.getElementById("jump").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = document.getElementById("jump-text").value.trim();
  if (text) location.hash = /^[0-9A-HJKMNP-TV-Z]{26}$/i.test(text) ? `#/message/${text.toUpperCase()}` : `#/topic/${encodeURIComponent(text)}`;
});
// Names to choose from, for every field that takes a topic; refreshed when somebody is about to choose.
document.addEventListener("focusin", async (event) => {
  if (event.target.getAttribute("list") !== "jump-topics") return;
  try {
    const found = await get("/topics", { limit: 1000 });
    replace(document.getElementById("jump-topics"), found.map((one) => h("option", { value: one.name }, one.depth ? `${number(one.depth)} unsettled` : null)));
  } catch { /* suggestions are a convenience */ }
});
document.getElementById("keys").addEventListener("click", showKeys);
document.getElementById("live").addEventListener("click", (event) => {
  live = !live;
  event.target.setAttribute("aria-pressed", String(live));
  event.target.textContent = live ? "Live" : "Stopped";
  if (live) tick();
});
document.getElementById("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("millstream.theme", theme);
  setTheme(theme);
});
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
window.addEventListener("hashchange", () => show({ focus: true }));
window.addEventListener("millstream-key", (event) => { if (!waved) askForKey(event.detail); });

// Until somebody chooses, as the system has it.
const dark = matchMedia("(prefers-color-scheme: dark)");
const asSystem = () => setTheme(localStorage.getItem("millstream.theme") || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", asSystem);
asSystem();
fillNamespaces().then(() => { tick(); return show(); });
setInterval(() => { if (!looking) tick(); }, refreshEvery);  // answers that are slow do not overtake each other
