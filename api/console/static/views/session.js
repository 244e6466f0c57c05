// One session: its head, and the conversation, the timeline or the events.
import { html, useCallback, useEffect, useMemo, useState } from "../html.js";
import { path, sentence } from "../api.js";
import { Feed } from "../feed.js";
import { EMPTY, fold, openRequests } from "../fold.js";
import { clock, count, oneLine, plural, safeLink, sentenceOf } from "../format.js";
import { Folded, Problem, Status, Tabs } from "../parts.js";
import { usePolled } from "../poll.js";
import { Chat } from "./chat.js";
import { Events } from "./events.js";
import { Timeline } from "./timeline.js";

export function Session({ id, tab, at, go }) {
  const feed = useFeed(id);
  const about = usePolled(path`v1/sessions/${id}`, { often: 4_000, seldom: 20_000 });
  const [pending, setPending] = useState([]);
  const { state, connection } = feed;
  useEffect(about.refresh, [state.status, state.attention === null]);
  const here = `#/sessions/${encodeURIComponent(id)}`;
  const onSent = useCallback((message) => {
    setPending((before) => [...before.slice(-50), message]);
    about.refresh();
  }, []);
  const unread = pending.some((each) => !state.read[each.deliveryId]);
  const replaying = at !== null;
  const seen = useMemo(
    () =>
      replaying
        ? fold(
            EMPTY,
            feed.events.filter((event) => event.meta.index <= at),
          )
        : state,
    [replaying, at, replaying ? feed.events.length : state],
  );
  const session = about.data;
  if (connection.kind === "refused")
    return html`<main class="session" id="main" tabindex="-1"><${Problem} error=${connection.error}
      what="This session" /></main>`;
  return html`<main class="session" id="main" tabindex="-1">
    <${Head} id=${id} here=${here} state=${state} session=${session} feed=${feed} tab=${tab} at=${at} go=${go}
      unread=${unread} />
    ${replaying && html`<${Replay} feed=${feed} at=${at} go=${go} here=${here} tab=${tab} />`}
    ${feed.left > 0 && html`<p class="banner">
      Only the last ${count(feed.head - feed.left - 1)} events are loaded.${" "}
      All of them are under Events, with pieces of texts.</p>`}
    ${
      tab === "timeline"
        ? html`<${Timeline} id=${id} state=${seen} />`
        : tab === "events"
          ? html`<${Events} id=${id} feed=${feed} here=${here} at=${at} />`
          : html`<${Chat} sessionId=${id} state=${seen} session=${session} replaying=${replaying} feed=${feed}
            pending=${pending} onSent=${onSent} />`
    }
  </main>`;
}

/** The feed of a session, drawn again when it changes. */
function useFeed(id) {
  const feed = useMemo(() => new Feed(id), [id]);
  const [, draw] = useState(0);
  useEffect(() => {
    const leave = feed.subscribe(() => draw((now) => now + 1));
    feed.run();
    return () => {
      leave();
      feed.close();
    };
  }, [feed]);
  return feed;
}

function Head({ id, here, state, session, feed, tab, at, go, unread }) {
  const status =
    session?.status === "needs_attention"
      ? "needs_attention"
      : feed.connection.kind === "loading"
        ? (session?.status ?? "starting")
        : shownStatus(state, session);
  const link = safeLink(session?.temporal?.uiUrl);
  const usage = session?.usage ?? state.usage;
  const tokens = (usage.inputTokens ?? 0) + (usage.outputTokens ?? 0);
  const replay = at === null ? `${here}/${tab}?at=${Math.max(0, state.last)}` : `${here}/${tab}`;
  return html`<header class="session-head">
    <div class="title-line">
      <a class="back" href="#/sessions" aria-label="All sessions">‹</a>
      <h1 dir="auto" title=${oneLine(session?.title ?? id, 400)}>${oneLine(session?.title ?? id, 120)}</h1>
      <${Status} status=${status} />
      <${Connection} connection=${feed.connection} />
    </div>
    <${Why} id=${id} state=${state} session=${session} unread=${unread} />
    <p class="facts dim small">
      <b>${oneLine(session?.agent ?? state.agent ?? "", 60)}</b>
      ${state.model && html`<span>${oneLine(state.model, 60)}</span>`}
      <code class="id">${id}</code>
      <span>${plural(session?.counts?.turns ?? state.turns.length, "turn")}</span><span>${plural(feed.head, "event")}
        </span>
      ${tokens > 0 && html`<span>${count(tokens)} tokens</span>`}
      ${Object.entries(session?.tags ?? {}).map(([name, value]) => html`<span class="badge"
        key=${name}>${oneLine(`${name}: ${value}`, 60)}</span>`)}
      ${session?.descendants?.cost > 0 && html`<span>$${session.descendants.cost.toFixed(4)} below</span>`}
      ${session?.parent?.sessionId && html`<a href="#/sessions/${encodeURIComponent(session.parent.sessionId)}">
        parent</a>`}
      <${Lanes} id=${id} state=${state} />
      ${link && html`<a href=${link} target="_blank" rel="noopener noreferrer">Temporal ↗</a>`}
    </p>
    ${state.plan && html`<${Plan} plan=${state.plan} />`}
    <div class="tab-line">
      <${Tabs} label="Session" at=${tab} tabs=${[
        ["chat", `${here}/chat`, "Chat"],
        ["timeline", `${here}/timeline`, "Timeline"],
        ["events", `${here}/events`, "Events"],
      ]} />
      <button type="button" class="quiet" aria-pressed=${at !== null} onClick=${() => go(replay)}>Replay</button>
    </div>
  </header>`;
}

/** What the model has set out to do, and how far it is. */
function Plan({ plan }) {
  const steps = Array.isArray(plan.steps) ? plan.steps : [];
  const done = steps.filter((step) => step.status === "done").length;
  return html`<${Folded} class="plan small" summary=${html`Plan: ${oneLine(plan.objective ?? "", 160)} <span
    class="dim">· ${done} of ${steps.length} done</span>`}>
    <ol>${steps.map((step) => html`<li key=${step.stepId} class=${step.status}>${oneLine(step.title, 200)} <span
      class="dim">${oneLine(step.status, 20)}</span></li>`)}</ol>
  </${Folded}>`;
}

/** The other lanes of the session: each is a session of its own, which no list has. */
function Lanes({ id, state }) {
  const lanes = usePolled(path`v1/sessions/${id}/lanes`, { seldom: 0 });
  useEffect(lanes.refresh, [state.status]);
  const others = (lanes.data?.lanes ?? []).filter((lane) => lane.sessionId && lane.sessionId !== id);
  return others.map(
    (lane) =>
      html`<a key=${lane.lane} href="#/sessions/${encodeURIComponent(lane.sessionId)}">lane ${oneLine(lane.lane, 40)}
        : ${lane.status}</a>`,
  );
}

/** The status that the events say, which are sooner here than the next look at the session. */
function shownStatus(state, session) {
  if (state.attention) return "needs_attention";
  return state.last < 0 ? (session?.status ?? "starting") : state.status;
}

/** Codes of why that say nothing new beside the status. */
const PLAIN = ["message", "ended"];
const QUIET = 4_000;

/** Why it does not move, in one sentence; nothing while it does. */
function Why({ id, state, session, unread }) {
  const quiet = useQuiet(state.last);
  const ended = state.status === "completed" || state.status === "failed";
  // It is known why: nobody has said anything.
  const idle =
    state.status === "waiting" &&
    !unread &&
    !state.attention &&
    (!session || session.waitingCode === "message");
  const asks = !ended && !idle && (state.attention || state.status !== "running" || quiet);
  const why = usePolled(asks ? path`v1/sessions/${id}/why` : null, { often: 5_000, seldom: 30_000 });
  const open = openRequests(state).length;
  useEffect(why.refresh, [state.status, open, unread]);
  if (state.error)
    return html`<p class="why bad" role="status">${oneLine(state.error.message ?? state.error.code, 400)}</p>`;
  if (!asks || PLAIN.includes(why.data?.code)) return null;
  const words = why.error ? session?.waitingFor && `Waits for: ${session.waitingFor}` : why.data?.sentence;
  if (!words) return null;
  const bad =
    state.attention ||
    session?.status === "needs_attention" ||
    /^(no_|worker_silent|temporal_)/.test(why.data?.code ?? "");
  return html`<p class="why ${bad ? "bad" : open ? "asks" : ""}" role="status">${sentenceOf(words)}</p>`;
}

/** Whether no event has come for some seconds. */
function useQuiet(last) {
  const [quiet, setQuiet] = useState(false);
  useEffect(() => {
    setQuiet(false);
    const timer = setTimeout(() => setQuiet(true), QUIET);
    return () => clearTimeout(timer);
  }, [last]);
  return quiet;
}

function Connection({ connection }) {
  switch (connection.kind) {
    case "retrying":
      return html`<span class="connection bad" role="status">${sentence(connection.error)}</span>`;
    case "reconnecting":
      return html`<span class="connection late" role="status">connects again</span>`;
    case "loading":
      return html`<span class="connection late" role="status">loads</span>`;
    case "live":
      return html`<span class="connection live" title="Events arrive as they happen"><span class="visually-hidden">
        live</span></span>`;
    default:
      return null;
  }
}

/** The session as it was after an event. */
function Replay({ feed, at, go, here, tab }) {
  const { events } = feed;
  let place = events.findLastIndex((event) => event.meta.index <= at);
  if (place < 0) place = 0;
  const event = events[place];
  const to = (number) =>
    go(`${here}/${tab}?at=${events[Math.min(events.length - 1, Math.max(0, number))]?.meta.index ?? 0}`, true);
  return html`<div class="replay" role="group" aria-label="Replay">
    <button type="button" onClick=${() => to(place - 1)} disabled=${place <= 0} aria-label="One event back">‹</button>
    <input type="range" min="0" max=${Math.max(0, events.length - 1)} value=${place} aria-label="Event"
      aria-valuetext=${event ? `event ${event.meta.index}, ${event.type}` : "nothing"}
        onInput=${(input) => to(Number(input.currentTarget.value))} />
    <button type="button" onClick=${() => to(place + 1)} disabled=${place >= events.length - 1}
      aria-label="One event on">›</button>
    <span class="mono small">${event ? `${event.meta.index} · ${event.type} · ${clock(event.meta.at)}` : "no events"}
      </span>
    <a href="${here}/${tab}">Back to now</a>
  </div>`;
}
