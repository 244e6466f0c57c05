// The sessions of the caller: those that need somebody first, then the newest.
import { html, useCallback, useEffect, useMemo, useRef, useState } from "../html.js";
import { get } from "../api.js";
import { count, oneLine, plural } from "../format.js";
import { Ago, Empty, Problem, Status } from "../parts.js";
import { usePolled } from "../poll.js";
import { Rows } from "../rows.js";

const PAGE = 50;
const AGES = { "": "any age", 3600: "last hour", 86400: "last day", 604800: "last week", 2592000: "last 30 days" };
const STATES = ["needs_attention", "running", "waiting", "starting", "completed", "failed"];

export function SessionList({ chosen, agents, go, searchRef, onEmpty }) {
  const [words, setWords] = useState("");
  const [agent, setAgent] = useState("");
  const [status, setStatus] = useState("");
  const [age, setAge] = useState("");
  const sought = useLate(words.trim(), 300);
  const since = useMemo(() => (age ? new Date(Date.now() - Number(age) * 1_000).toISOString() : ""), [age]);
  const query = { limit: PAGE, agent, status, q: sought, createdAfter: since };
  const first = usePolled("v1/sessions", { query, often: 4_000, seldom: 20_000 });
  const needy = usePolled(status ? null : "v1/sessions", {
    query: { ...query, status: "needs_attention" },
    often: 10_000,
    seldom: 30_000,
  });
  const rest = useRest(query, first.data?.nextCursor);
  const sessions = useMemo(
    () =>
      ordered([...(needy.data?.sessions ?? []), ...(first.data?.sessions ?? []), ...rest.found], {
        agent,
        status,
        sought,
        since,
      }),
    [needy.data, first.data, rest.found, agent, status, sought, since],
  );
  const handle = useRef(null);
  const narrowed = Boolean(sought || agent || status || age);
  useEffect(
    () => onEmpty(Boolean(first.data) && !narrowed && sessions.length === 0),
    [first.data, narrowed, sessions.length],
  );
  useEffect(() => keyboard(handle, sessions, chosen, go), [sessions, chosen]);

  return html`<section class="session-list" aria-label="Sessions">
    <div class="list-head">
      <input ref=${searchRef} type="search" aria-label="Search sessions" placeholder="Search …  /" value=${words}
        onInput=${(event) => setWords(event.currentTarget.value)} />
      <a class="button primary" href="#/new">New</a>
    </div>
    <div class="filters">
      <select aria-label="Agent" value=${agent} onChange=${(event) => setAgent(event.currentTarget.value)}>
        <option value="">all agents</option>${names(agents, sessions).map((each) => html`<option key=${each}
          value=${each}>${oneLine(each, 40)}</option>`)}
      </select>
      <select aria-label="Status" value=${status} onChange=${(event) => setStatus(event.currentTarget.value)}>
        <option value="">any status</option>${STATES.map((each) => html`<option key=${each} value=${each}>
          ${each.replace("_", " ")}</option>`)}
      </select>
      <select aria-label="Age" value=${age} onChange=${(event) => setAge(event.currentTarget.value)}>
        ${Object.entries(AGES).map(([each, shown]) => html`<option key=${each} value=${each}>${shown}</option>`)}
      </select>
    </div>
    ${first.error && html`<${Problem} error=${first.error} what="The list of sessions" retry=${first.refresh} />`}
    ${
      first.data && sessions.length === 0
        ? html`<${Empty}>${narrowed ? "No session is like that" : html`No sessions yet. <a href="#/new">Start one.
          </a>`}${
            rest.left
              ? html` among the newest. <button type="button" class="link" onClick=${rest.more}>Look at older ones
                </button>`
              : ""
          }</${Empty}>`
        : html`<${Rows} items=${sessions} keyOf=${keyOf} guess=${61} label="Sessions" onEnd=${rest.more}
          handle=${handle}
      row=${(each) => html`<${Entry} session=${each} chosen=${each.sessionId === chosen} />`} />`
    }
  </section>`;
}

const keyOf = (session) => session.sessionId;

function Entry({ session, chosen }) {
  const needs = session.status === "needs_attention" ? session.attention?.message : null;
  const asks = asksPeople(session) ? session.waitingFor : null;
  const tokens = (session.usage?.inputTokens ?? 0) + (session.usage?.outputTokens ?? 0);
  return html`<a class="entry ${session.status} ${asks ? "asks" : ""}"
    href="#/sessions/${encodeURIComponent(session.sessionId)}" aria-current=${chosen ? "true" : null}>
    <span class="entry-line"><span class="clip title" dir="auto">${oneLine(session.title || session.sessionId, 120)}
      </span><${Ago} at=${session.updatedAt} /></span>
    <span class="entry-line dim small"><${Status} status=${asks ? "asks" : session.status} /><span class="clip">
      ${needs ? oneLine(needs, 120) : html`${oneLine(session.agent, 40)}${session.parent?.callId ? " (called)"
        : ""} · ${plural(session.counts?.turns, "turn")}${tokens ? ` · ${count(tokens)} tokens` : ""}`}</span></span>
  </a>`;
}

function asksPeople(session) {
  return session.waitingCode === "input";
}

/** Those that somebody has to help first, then those that ask, then the newest; each once, and as the filters say. */
function ordered(sessions, { agent, status, sought, since }) {
  const each = [...new Map(sessions.map((session) => [session.sessionId, session])).values()];
  const wanted = sought.toLowerCase();
  const tags = (session) => Object.entries(session.tags ?? {}).map(([name, value]) => `${name}:${value}`);
  const texts = (session) => [session.sessionId, session.agent, session.title ?? "", ...tags(session)];
  // An older API does not know all filters, and ignores them.
  const fits = (session) =>
    (!agent || session.agent === agent) &&
    (!status || session.status === status) &&
    (!since || session.createdAt >= since) &&
    (!wanted || texts(session).some((text) => text.toLowerCase().includes(wanted)));
  const rank = (session) => (session.status === "needs_attention" ? 0 : asksPeople(session) ? 1 : 2);
  return each.filter(fits).sort((one, other) => rank(one) - rank(other) || (one.createdAt < other.createdAt ? 1 : -1));
}

function names(agents, sessions) {
  return [...new Set([...agents.map((agent) => agent.name), ...sessions.map((session) => session.agent)])].sort();
}

/** The pages after the first one, as far as somebody has scrolled. */
function useRest(query, cursor) {
  const [pages, setPages] = useState({ found: [], cursor: undefined, done: false });
  const busy = useRef(false);
  const of = JSON.stringify(query);
  useEffect(() => setPages({ found: [], cursor: undefined, done: false }), [of]);
  const more = useCallback(async () => {
    const next = pages.cursor ?? cursor;
    if (busy.current || pages.done || !next) return;
    busy.current = true;
    try {
      const page = await get("v1/sessions", { query: { ...query, cursor: next } });
      setPages((before) => ({
        found: [...before.found, ...page.sessions],
        cursor: page.nextCursor,
        done: !page.nextCursor,
      }));
    } catch {
      // The poll of the first page says what is wrong; scrolling asks again.
    } finally {
      busy.current = false;
    }
  }, [of, cursor, pages]);
  return { found: pages.found, more, left: !pages.done && Boolean(pages.cursor ?? cursor) };
}

/** The value, once it has not changed for a while. */
function useLate(value, ms) {
  const [late, setLate] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setLate(value), ms);
    return () => clearTimeout(timer);
  }, [value]);
  return late;
}

/** `j` and `k`, or the arrows in the list, go to the next and the last session. */
function keyboard(handle, sessions, chosen, go) {
  const press = (event) => {
    const list = handle.current?.element;
    const inList = list?.contains(event.target);
    const step = { j: 1, k: -1, ...(inList ? { ArrowDown: 1, ArrowUp: -1 } : {}) }[event.key];
    if (
      !step ||
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      event.target.closest("input, textarea, select, dialog")
    )
      return;
    event.preventDefault();
    const at = sessions.findIndex((session) => session.sessionId === chosen);
    const next = Math.min(sessions.length - 1, Math.max(0, at + step));
    if (!sessions[next] || next === at) return;
    handle.current.show(next);
    go(`#/sessions/${encodeURIComponent(sessions[next].sessionId)}`);
    if (inList) requestAnimationFrame(() => list.querySelector(`[data-index="${next}"] a`)?.focus());
  };
  document.addEventListener("keydown", press);
  return () => document.removeEventListener("keydown", press);
}
