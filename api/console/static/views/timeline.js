// When what has happened: turns, model calls and tools as bars, with the attempts at each.
import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { get, path } from "../api.js";
import { clock, count, dollars, duration, millis, moment, oneLine } from "../format.js";
import { Empty, Json, Problem } from "../parts.js";
import { Rows } from "../rows.js";
import { lines } from "../timing.js";

const PAGES = 10;
/** Of a session with more turns, reports are fetched for those in sight, so many turns at a time. */
const SHORT = 60;
const AT_ONCE = 30;

export function Timeline({ id, state }) {
  const { attempts, deliveries, error, want } = useReports(id, state);
  const rows = useMemo(() => lines(state, attempts, deliveries), [state.turns, attempts, deliveries]);
  const [chosen, choose] = useState(null);
  const line = rows.find((each) => each.key === chosen);
  const now = useNow(state.status === "running");
  if (!rows.length) return html`<${Empty}>Nothing has happened yet.</${Empty}>`;
  return html`<div class="split">
    <section class="timeline ${rows.some((each) => each.cost > 0) ? "" : "free"}" aria-label="Timeline">
      ${error && html`<${Problem} error=${error} what="The list of attempts" />`}
      <${Rows} items=${rows} keyOf=${(each) => each.key} guess=${28} stick label="Turns, model calls and tools"
        row=${(each) => html`<${Line} line=${each} now=${now} chosen=${each.key === chosen} choose=${choose}
          want=${want} />`} />
    </section>
    ${line && html`<${Detail} line=${line} close=${() => choose(null)} />`}
  </div>`;
}

/**
 * The attempts and deliveries of the session. Of a short session all of them; of a long one those of the turns that are
 * in sight. When a step ends, those of its turn again.
 */
function useReports(id, state) {
  const [reports, setReports] = useState({ attempts: [], deliveries: [], error: null });
  const wanted = useRef(new Set());
  const seen = useRef(new Map());
  const steps = state.turns.reduce(
    (sum, turn) => sum + turn.steps.length + turn.items.filter((item) => item.endedAt).length,
    0,
  );
  const short = state.turns.length <= SHORT;
  const last = state.turns.at(-1)?.number;
  const [round, again] = useState(0);
  useEffect(() => {
    const stop = new AbortController();
    const timer = setTimeout(async () => {
      const first = seen.current.size === 0 && short;
      const turns = first
        ? [null]
        : [...new Set([last, ...wanted.current])]
            .filter((turn) => turn === last || !seen.current.has(turn))
            .slice(-AT_ONCE);
      try {
        const deliveries = await all(
          path`v1/sessions/${id}/deliveries`,
          "deliveries",
          {},
          stop.signal,
          first ? PAGES : 1,
        );
        for (const turn of turns) {
          const found = await all(path`v1/sessions/${id}/attempts`, "attempts", { turn }, stop.signal);
          if (turn === null) for (const each of state.turns) seen.current.set(each.number, []);
          for (const number of new Set([turn, ...found.map(numberOf)]))
            if (number !== null)
              seen.current.set(
                number,
                found.filter((each) => numberOf(each) === number),
              );
        }
        wanted.current.clear();
        setReports((before) => ({
          attempts: [...seen.current.values()].flat(),
          deliveries: merged(before.deliveries, deliveries),
          error: null,
        }));
      } catch (error) {
        if (!stop.signal.aborted) setReports((before) => ({ ...before, error }));
      }
    }, 300);
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [id, steps, state.status, round]);
  const want = (turn) => {
    if (seen.current.has(turn) || wanted.current.has(turn) || (short && seen.current.size === 0)) return;
    wanted.current.add(turn);
    again((now) => now + 1);
  };
  return { ...reports, want };
}

function numberOf(attempt) {
  return Number(/^turn_(\d+)$/.exec(attempt.turnId)?.[1] ?? -1);
}

function merged(before, now) {
  return [...new Map([...before, ...now].map((each) => [each.deliveryId, each])).values()];
}

async function all(where, name, query, signal, pages = PAGES) {
  const found = [];
  let cursor;
  for (let page = 0; page < pages; page += 1) {
    const answered = await get(where, { query: { ...query, limit: 200, cursor }, signal });
    found.push(...answered[name]);
    cursor = answered.nextCursor;
    if (!cursor) break;
  }
  return found;
}

/** The time, each second while something runs. */
function useNow(runs) {
  const [, tick] = useState(0);
  useEffect(() => {
    if (!runs) return undefined;
    const timer = setInterval(() => tick((now) => now + 1), 1_000);
    return () => clearInterval(timer);
  }, [runs]);
  return new Date().toISOString();
}

function Line({ line, now, chosen, choose, want }) {
  useEffect(() => want(line.scale.turn), [line.scale.turn]);
  const took = line.from ? millis(line.from, line.to ?? now) : null;
  const tokens = line.usage ? line.usage.input + line.usage.output : 0;
  return html`<button type="button" class="line ${line.kind} ${line.status}" aria-pressed=${chosen}
    onClick=${() => choose(chosen ? null : line.key)}>
    <span class="line-label">${line.kind === "turn" ? html`<b>${line.label}</b>` : oneLine(line.label, 60)}
      ${line.retries > 0 && html` <span class="retries" title="Attempts after the first">${line.retries}× again
        </span>`}</span>
    <span class="line-bar"><${Bar} line=${line} now=${now} /></span>
    <span class="line-time">${took !== null && (line.to || line.kind === "turn" || line.status === "running")
      ? duration(took) : line.status === "asking" ? "waits" : "–"}</span>
    <span class="line-tokens">${tokens > 0 ? count(tokens) : ""}</span>
    <span class="line-cost">${line.cost > 0 ? dollars(line.cost) : ""}</span>
  </button>`;
}

function Bar({ line, now }) {
  const from = Date.parse(line.scale.from);
  const length = Math.max(1, Date.parse(line.scale.to ?? now) - from);
  const place = (at) => Math.min(100, Math.max(0, ((Date.parse(at) - from) / length) * 100));
  const bar = (begin, end, kind) => {
    const left = Math.min(99.4, place(begin));
    return html`<i class=${kind} style=${{ left: `${left}%`, width: `${Math.max(0.6, place(end ?? now) - left)}%` }}>
      </i>`;
  };
  return html`${line.waited && bar(line.waited.from, line.waited.to, "waited")}
    ${
      line.attempts.length > 1
        ? line.attempts.map((each) => bar(each.startedAt, each.endedAt, each.status === "succeeded" ? "took" : "lost"))
        : line.from && line.status !== "asking" && bar(line.from, line.to, "took")
    }`;
}

function Detail({ line, close }) {
  const { call, attempts, waited, usage, error } = line;
  return html`<aside class="detail" aria-label="Detail">
    <header><h2>${oneLine(line.label, 80)}</h2><button type="button" class="quiet" onClick=${close}
      aria-label="Close">✕</button></header>
    <dl>
      <dt>Status</dt><dd>${line.status}</dd>
      ${line.from && html`<dt>Began</dt><dd>${moment(line.from)}</dd>`}
      ${line.to && html`<dt>Took</dt><dd>${duration(millis(line.from, line.to))}</dd>`}
      ${waited && html`<dt>Waited for people</dt><dd>${waited.to ? duration(millis(waited.from, waited.to))
        : "still waits"}</dd>`}
      ${usage && usage.input + usage.output > 0 && html`<dt>Tokens</dt>
        <dd>${count(usage.input)} in, ${count(usage.output)} out</dd>`}
      ${line.cost > 0 && html`<dt>Cost</dt><dd>${dollars(line.cost)}</dd>`}
      ${line.delivery && html`<dt>Delivery</dt><dd><code>${line.delivery.deliveryId}</code></dd>`}
      ${call?.childSessionId && html`<dt>Session</dt><dd><a
        href="#/sessions/${encodeURIComponent(call.childSessionId)}">${call.childSessionId}</a></dd>`}
    </dl>
    ${error && html`<p class="problem">${oneLine(error.code ?? "", 80)}: ${oneLine(error.message ?? "", 2000)}</p>`}
    ${
      attempts.length > 0 &&
      html`<h3>Attempts</h3><ol class="attempts">${attempts.map(
        (each) => html`<li key=${each.attemptId}>
      <b>${each.number}</b> <span class="status ${each.status}">${each.status}</span> ${each.endedAt
        ? duration(millis(each.startedAt, each.endedAt)) : "runs"}
      <span class="dim small"> at ${clock(each.startedAt)} by ${oneLine(each.worker, 80)}</span>
      ${each.error && html`<p class="dim small">${oneLine(each.error.type, 80)}: ${oneLine(each.error.message, 400)}
        </p>`}</li>`,
      )}</ol>`
    }
    ${call && html`<h3>Arguments</h3><${Json} value=${call.input ?? call.request?.arguments} />`}
    ${call?.endedAt && html`<h3>Output</h3><${Json} value=${call.output} />`}
  </aside>`;
}
