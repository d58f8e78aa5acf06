// The HTTP API, for the namespace that is chosen.  Every failure becomes one Error whose message is the broker's own sentence.

const state = { namespace: localStorage.getItem("millstream.namespace") || "default", key: sessionStorage.getItem("millstream.key") || "" };

export function namespace() { return state.namespace; }
export function choose(name) { state.namespace = name; localStorage.setItem("millstream.namespace", name); }
export function useKey(key) { state.key = key; sessionStorage.setItem("millstream.key", key); }

// A machine that vanishes closes no connection.  But some answers rightly take long: as long as the broker answers
// anything at all, they are waited for.
const quiet = 15000, grace = 5000;
let heard = 0;

function listen(waiting) {
  let timer = setTimeout(wonder, quiet);
  async function wonder() {
    const before = heard;
    timer = setTimeout(() => { if (heard === before) waiting.abort(); else timer = setTimeout(wonder, quiet); }, grace);
    try { await fetch("/api/v1/health/live", { signal: waiting.signal }); heard += 1; } catch { /* it is not there */ }
  }
  return () => clearTimeout(timer);
}

class Problem extends Error {
  constructor(status, body) {
    super(body?.message || `the broker answered ${status}`);
    this.status = status;
    this.suggestions = body?.suggestions || [];
    this.data = body;
  }
}

async function ask(method, path, { query = {}, body = undefined, whole = false } = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value === "" || value === null || value === undefined) continue;
    for (const one of Array.isArray(value) ? value : [value]) parameters.append(name, one);
  }
  const prefix = whole ? "/api/v1" : `/api/v1/namespaces/${encodeURIComponent(state.namespace)}`;
  const headers = { "X-Client-Id": "dashboard" }, { key } = state;
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const waiting = new AbortController(), stop = listen(waiting);
  let answer, text;
  try {
    answer = await fetch(`${prefix}${path}${parameters.size ? `?${parameters}` : ""}`, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), signal: waiting.signal });
    heard += 1;
    text = await answer.text();
  } catch {
    throw new Problem(0, { message: `the broker does not answer${method === "GET" ? "" : "; look whether it was done before you do it again"}` });
  } finally {
    stop();
  }
  const data = text && answer.headers.get("content-type")?.includes("json") ? JSON.parse(text) : text || null;
  if (!answer.ok) {
    // Unless there is another key by now.
    if (answer.status === 401 && key === state.key) window.dispatchEvent(new CustomEvent("millstream-key", { detail: key ? data?.message : "" }));
    throw new Problem(answer.status, data);
  }
  if (Array.isArray(data) && answer.headers.has("x-total-count")) data.total = Number(answer.headers.get("x-total-count"));
  return data;
}

export const get = (path, query, options) => ask("GET", path, { query, ...options });
export const post = (path, body, options) => ask("POST", path, { body, ...options });
export const put = (path, body, options) => ask("PUT", path, { body, ...options });
export const patch = (path, body, options) => ask("PATCH", path, { body, ...options });
export const remove = (path, query, options) => ask("DELETE", path, { query, ...options });
export const part = encodeURIComponent;

const rowsMax = 20000;

// A whole list, a thousand at a time, up to what a browser bears; `total` says how many there are.
export async function everything(path, query = {}, options = {}) {
  const rows = [];
  for (let found = null; !found || (found.length && rows.length < rows.total && rows.length < rowsMax);) {
    found = await get(path, { ...query, limit: 1000, offset: rows.length }, options);
    rows.push(...found);
    rows.total = Math.max(rows.length, found.total ?? 0);
  }
  return rows;
}
