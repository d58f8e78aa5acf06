// Figures, times and values in words.

import { h } from "./dom.js";

export const priorities = ["critical", "high", "normal", "low", "background"];

export function number(value) {
  if (value === null || value === undefined) return "–";
  return Math.round(value).toLocaleString("en");
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const units = ["", " k", " M", " G", " T"];
  let step = 0;
  while (Math.abs(value) >= 10000 && step < units.length - 1) { value /= 1000; step += 1; }
  const text = Math.abs(value) >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
  return text + units[step];
}

// In tables: a zero steps back.
export function count(value) { return value ? short(value) : h("span", { class: "zero" }, "0"); }

export function many(amount, one, several = `${one}s`) { return `${number(amount)} ${amount === 1 ? one : several}`; }

export function rate(value) { return value === null || value === undefined ? "–" : `${short(value)}/s`; }

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (value >= 1024 && step < names.length - 1) { value /= 1024; step += 1; }
  return `${step === 0 || Number.isInteger(value) ? Math.round(value) : value.toFixed(value < 10 ? 1 : 0)} ${names[step]}`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${ms < 10 && !Number.isInteger(ms) ? ms.toFixed(1) : Math.round(ms)} ms`;
  if (ms < 10000 && ms % 1000) return `${(ms / 1000).toFixed(1)} s`;
  const words = [];
  let rest = Math.floor(ms / 1000);
  for (const [size, name] of [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]]) {
    if (rest >= size) { words.push(`${Math.floor(rest / size)} ${name}`); rest %= size; }
    else if (words.length) break;
    if (words.length === 2) break;
  }
  return words.join(" ");
}

// Local time; the tooltip has it in UTC.
export function when(ms, { milliseconds = false } = {}) {
  if (!ms) return "–";
  const moment = new Date(ms);
  return time(moment, ms, moment.toLocaleString("sv") + (milliseconds ? `.${String(moment.getMilliseconds()).padStart(3, "0")}` : ""));
}

export function ago(ms) {
  if (!ms) return "–";
  const span = Date.now() - ms;
  const words = Math.abs(span) < 1000 ? "just now" : span > 0 ? `${duration(Math.floor(span / 1000) * 1000)} ago` : `in ${duration(Math.ceil(-span / 1000) * 1000)}`;
  return time(new Date(ms), ms, words);
}

// Producers may say any time, and dates end with the year 275760.
function time(moment, ms, text) { return Number.isNaN(moment.getTime()) ? `${number(ms)} ms` : h("time", { datetime: moment.toISOString(), title: utc(moment) }, text); }

function utc(moment) { return `${moment.toISOString().replace("T", " ").replace("Z", "")} UTC`; }

// For <input type="datetime-local">, which speaks local time without saying so.
export function localInput(ms) { return new Date(ms - new Date(ms).getTimezoneOffset() * 60000).toISOString().slice(0, 19); }

export function plain(word) { return word.toLowerCase().replaceAll("_", " "); }

// The key of a message; what is not text is said to be base64.
export function keyed({ key, key_encoding }) {
  if (key === null) return "–";
  const text = key_encoding === "base64" ? `base64: ${key}` : key;
  return h("code", { title: text }, text);
}

// Headers as they are typed: `name: value`, one per line.  A name that is there several times has a list of values.
export function headersOf(text) {
  const found = Object.create(null);
  for (const line of text.split("\n").filter((one) => one.trim())) {
    const [name, value = ""] = line.split(/:(.*)/s).map((one) => one.trim());
    found[name] = name in found ? [found[name], value].flat() : value;
  }
  return found;
}

// A setting, with what its number means.
export function setting(name, value) {
  if (value === "" || value === null) return h("span", { class: "soft" }, "–");
  const meaning = typeof value !== "number" || value === 0 ? "" : name.endsWith("_ms") ? duration(value) : name.endsWith("_bytes") || name.includes("_bytes_") ? bytes(value) : "";
  return meaning ? h("code", { title: String(value) }, meaning) : h("code", {}, typeof value === "object" ? JSON.stringify(value) : String(value));
}

const deepest = 30;

// JSON with line breaks.  Only white space is touched, so that long numbers and the order of keys stay what they are.
// What is nested deeper than anybody reads stays as it is: brackets in brackets would become gigabytes of spaces.
export function pretty(text) {
  try { JSON.parse(text); } catch { return text; }
  if (!/^\s*[[{]/.test(text)) return text;
  const shown = [], line = () => shown.push("\n", "  ".repeat(depth));
  let depth = 0, opened = false;
  for (const token of text.match(/"(?:\\.|[^"\\])*"|[{}[\],:]|[^\s{}[\],:"]+/g) || []) {
    const closes = token === "}" || token === "]";
    if (closes) depth -= 1;
    if (opened !== closes) line();  // what is empty stays on its line
    shown.push(token === ":" ? ": " : token);
    opened = token === "{" || token === "[";
    if (opened) depth += 1;
    if (depth > deepest) return text;
    if (token === ",") line();
  }
  return shown.join("");
}
