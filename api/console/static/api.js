// Calls of the public API, with the key of the user. The key is in this tab only: no cookie, no URL, no other storage.

import { parse } from "./format.js";

const KEY = "perdure.key";
const PATIENCE = 30_000;
const ROOT = new URL(".", document.baseURI);

const listeners = new Set();
let key = read();

/** What the API has answered instead of a result; `status` 0 when it has not answered. */
export class ApiError extends Error {
  constructor(status, body = {}, retryAfter = null) {
    super(typeof body.error === "string" ? body.error : (body.message ?? `HTTP ${status}`));
    this.status = status;
    this.code = body.code ?? body.error?.type ?? null;
    this.body = body;
    this.retryAfter = retryAfter;
    // An unknown route has another form than an unknown session.
    this.noRoute = status === 404 && body.error === true;
  }
}

export function hasKey() {
  return key !== "";
}

export function setKey(given) {
  key = given.trim();
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // Without storage the key is there until the page is loaded again.
  }
}

/** Call back when the API refuses the key, or wants one. */
export function onUnauthorized(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function path(strings, ...values) {
  return strings.reduce((made, part, at) => made + encodeURIComponent(values[at - 1]) + part);
}

export async function get(where, { query, signal, timeout } = {}) {
  return parse(await (await answer(where, { query, signal, timeout })).text());
}

export async function post(where, body, { headers, method = "POST" } = {}) {
  const answered = await answer(where, { method, body: JSON.stringify(body ?? {}), headers });
  return parse(await answered.text());
}

export async function answer(where, { query, signal, timeout = PATIENCE, ...options } = {}) {
  const patience = AbortSignal.timeout(timeout);
  const response = await open(where, {
    query,
    ...options,
    signal: signal ? AbortSignal.any([signal, patience]) : patience,
  });
  return response;
}

/** A response whose body may be read for as long as it comes. */
export async function open(where, { query, signal, method = "GET", body, headers = {} } = {}) {
  const url = new URL(where, ROOT);
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value !== undefined && value !== null && value !== "") url.searchParams.set(name, value);
  }
  const sent = { accept: "application/json, text/event-stream", ...headers };
  if (body !== undefined) sent["content-type"] = "application/json";
  if (key) sent.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(url, {
      method,
      body,
      headers: sent,
      signal,
      credentials: "omit",
      cache: "no-store",
      redirect: "error",
    });
  } catch (error) {
    if (signal?.aborted && signal.reason?.name !== "TimeoutError") throw error;
    throw new ApiError(0, { error: "The API does not answer." });
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let body = {};
  try {
    body = await response.json();
  } catch {
    // A proxy answers with a page.
  }
  if (response.status === 401) for (const listener of listeners) listener(body);
  return new ApiError(response.status, body ?? {}, Number(response.headers.get("retry-after")) || null);
}

/** Why something is not shown, in one sentence. */
export function sentence(error, what = "This") {
  // A connection that breaks off in a body, or takes too long; and a proxy that answers with a page of its own.
  if (error instanceof TypeError || error?.name === "TimeoutError")
    return "The API does not answer; the console tries again.";
  if (error instanceof SyntaxError) return "What answers is not this API: there may be a proxy before it.";
  if (!(error instanceof ApiError)) return `${what} cannot be shown: ${error?.message ?? error}`;
  switch (error.status) {
    case 0:
      return "The API does not answer; the console tries again.";
    case 401:
      return "The API wants a key.";
    case 403:
      return `${what} is not for this key: the API shows it to operators only.`;
    case 404:
      return error.noRoute
        ? `${what} is not in this API: it is older than the console.`
        : `${what} does not exist, or belongs to another caller.`;
    case 410:
      return `${what} was deleted.`;
    case 429:
      return "Too much waits there; try again in a moment.";
    case 503:
      return "The API cannot reach its store or Temporal; the console tries again.";
    default:
      return error.message;
  }
}

function read() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}
