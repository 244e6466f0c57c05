// One session, live: its history by pages, then its stream, folded. It reconnects from the last index by itself.
import { ApiError, answer, open, path } from "./api.js";
import { EMPTY, PIECES, fold } from "./fold.js";
import { parse } from "./format.js";

const PAGE = 1000;
/** Of a longer history only the last events are loaded. */
const MOST = 20_000;
/** Heartbeats come every 15 seconds: a connection that is silent for longer is dead. */
const SILENCE = 40_000;
const FIRST_WAIT = 400;
const LONGEST_WAIT = 15_000;
const TERMINAL = ["session.completed", "session.failed", "run.completed", "run.failed", "run.cancelled"];

export class Feed {
  constructor(sessionId) {
    this.sessionId = sessionId;
    this.state = EMPTY;
    // Without pieces, which the events after them repeat: for the replay.
    this.events = [];
    this.head = 0;
    this.left = 0;
    this.connection = { kind: "loading" };
    this.stalled = null;
    this.listeners = new Set();
    this.queue = [];
    this.stop = new AbortController();
  }

  subscribe(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Read until `close`. What cannot be read ends in `connection`, not in an exception. */
  async run() {
    let wait = FIRST_WAIT;
    let loaded = false;
    let ended = false;
    while (!this.stop.signal.aborted && !ended) {
      try {
        await visible(this.stop.signal);
        if (!loaded) {
          await this.history();
          loaded = true;
        }
        const began = Date.now();
        ended = await this.live(() => {
          wait = FIRST_WAIT;
        });
        // A server that stops ends its streams politely; one that ends each at once gets no second request at once.
        if (!ended) this.connected({ kind: "reconnecting" });
        if (!ended && Date.now() - began < 1_000) await pause(1_000, this.stop.signal);
      } catch (error) {
        if (this.stop.signal.aborted) return;
        if (error instanceof ApiError && [400, 401, 403, 404, 410].includes(error.status)) {
          return this.connected({ kind: "refused", error });
        }
        wait = Math.min(LONGEST_WAIT, wait * 2);
        const ms = (error.retryAfter ?? 0) * 1000 + wait * (0.5 + Math.random() / 2);
        this.connected({ kind: "retrying", error, until: Date.now() + ms });
        await pause(ms, this.stop.signal);
      }
    }
    if (ended) this.connected({ kind: "ended" });
  }

  close() {
    this.stop.abort();
  }

  /** All events but pieces; of a step that has not ended, the stream has the pieces, too. */
  async history() {
    let after = -1;
    let held = [];
    for (let more = true; more;) {
      const query = { after: after < 0 ? null : after, limit: PAGE, exclude: PIECES.join(",") };
      const response = await answer(path`v1/sessions/${this.sessionId}/events`, { query, signal: this.stop.signal });
      const tail = Number(response.headers.get("x-perdure-tail-index") ?? -1);
      if (after < 0 && tail > MOST) {
        after = this.left = tail - MOST;
        continue;
      }
      const page = parse(await response.text());
      held.push(...page.events);
      more = page.hasMore && page.events.length > 0;
      // The last step of a page may be the one that has not ended: it is looked at with the next page.
      const last = held.findLastIndex((event) => event.type === "step.started");
      const open = openStep(held);
      const until = more && last >= 0 ? last : open >= 0 ? open + 1 : held.length;
      const ready = held.slice(0, until);
      held = held.slice(until);
      after = page.events.at(-1)?.meta.index ?? after;
      this.head = Math.max(this.head, tail + 1);
      this.take(ready);
      this.next = open < 0 ? Math.max(tail, after) + 1 : this.state.last + 1;
    }
  }

  /** Read the stream; True when the session has ended, and nothing more can come. */
  async live(onLife) {
    const silence = new AbortController();
    const closing = AbortSignal.any([this.stop.signal, silence.signal]);
    let timer = setTimeout(() => silence.abort(), SILENCE);
    // A browser opens six connections to a server: tabs that nobody looks at keep none.
    const hide = () => document.hidden && silence.abort();
    document.addEventListener("visibilitychange", hide);
    try {
      const query = this.next > 0 ? { after: this.next - 1 } : {};
      const where = path`v1/sessions/${this.sessionId}/events/stream`;
      const response = await open(where, { query, signal: closing });
      if (response.status === 204) return true;
      this.connected({ kind: "live" });
      for await (const frame of frames(response.body)) {
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENCE);
        onLife();
        if (frame.type === "session.stalled") this.stall(frame.data);
        if (frame.id === null) continue;
        this.next = frame.id + 1;
        if (!frame.data) continue;
        this.enqueue(frame.data);
        if (TERMINAL.includes(frame.type)) return true;
      }
      return false;
    } catch (error) {
      if (silence.signal.aborted && !this.stop.signal.aborted) return false;
      if (error instanceof ApiError || this.stop.signal.aborted) throw error;
      throw new ApiError(0, { error: "The connection has broken off." });
    } finally {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", hide);
      this.flush();
    }
  }

  /** Many small events come at once: they are folded once for each picture of the screen. */
  enqueue(event) {
    this.queue.push(event);
    if (this.queue.length > 1) return;
    if (document.hidden) setTimeout(() => this.flush(), 100);
    else requestAnimationFrame(() => this.flush());
  }

  flush() {
    const events = this.queue;
    this.queue = [];
    if (events.length) this.take(events);
  }

  take(events) {
    const last = this.state.last;
    this.state = fold(this.state, events);
    this.events.push(...events.filter((event) => event.meta.index > last && !PIECES.includes(event.type)));
    this.head = Math.max(this.head, this.state.last + 1);
    if (events.length) this.stalled = null;
    this.tell();
  }

  stall(data) {
    this.stalled = data ?? {};
    this.tell();
  }

  connected(connection) {
    this.connection = connection;
    this.tell();
  }

  tell() {
    for (const listener of this.listeners) listener();
  }
}

function openStep(events) {
  const ends = ["step.completed", "step.failed", "turn.completed", "turn.failed", "turn.cancelled"];
  const started = events.findLastIndex((event) => event.type === "step.started");
  const ended = events.findLastIndex((event) => ends.includes(event.type) || TERMINAL.includes(event.type));
  return started > ended ? started : -1;
}

/** The frames of server-sent events: their id, type and data. Comments are frames without all three. */
async function* frames(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) yield frame(part);
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

function frame(part) {
  const fields = { id: null, event: null, data: null };
  for (const line of part.split("\n")) {
    const [, name, value] = /^(\w+): ?(.*)$/s.exec(line) ?? [];
    if (name === "data") fields.data = fields.data === null ? value : `${fields.data}\n${value}`;
    else if (name in fields) fields[name] = value;
  }
  return {
    id: fields.id === null ? null : Number(fields.id),
    type: fields.event,
    data: fields.data === null ? null : parse(fields.data),
  };
}

/** Wait until somebody looks at the page. */
export function visible(signal) {
  return new Promise((resolve, reject) => {
    if (!document.hidden) return resolve();
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    signal.addEventListener(
      "abort",
      () => {
        document.removeEventListener("visibilitychange", look);
        reject(signal.reason);
      },
      { once: true },
    );
    return undefined;
  });
}

export function pause(ms, signal) {
  return new Promise((resolve) => {
    const over = new AbortController();
    const end = () => {
      clearTimeout(timer);
      over.abort();
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener("abort", end, { signal: over.signal });
    window.addEventListener("online", end, { signal: over.signal });
  });
}
