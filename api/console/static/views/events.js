// The events as they are: without pieces those that are loaded, with them all, by pages as they come into sight.
import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { get, path } from "../api.js";
import { clock, moment, oneLine, pretty } from "../format.js";
import { Empty, Json, Problem } from "../parts.js";
import { Rows } from "../rows.js";

const PAGE = 100;
const KEPT = 80;
const MOST = 200_000;

export function Events({ id, feed, here, at }) {
  const [pieces, setPieces] = useState(false);
  const [words, setWords] = useState("");
  const [chosen, choose] = useState(null);
  const pages = usePages(id);
  const loaded = useMemo(() => (pieces ? [] : matching(feed.events, words)), [pieces, words, feed.events.length]);
  const indexes = useMemo(
    () =>
      pieces
        ? Array.from({ length: Math.min(MOST, feed.head) }, (_, each) => each + Math.max(0, feed.head - MOST))
        : [],
    [pieces, feed.head],
  );
  const items = pieces ? indexes : loaded;
  const event =
    chosen === null ? null : pieces ? pages.at(chosen) : feed.events.find((each) => each.meta.index === chosen);
  return html`<div class="split">
    <section class="events" aria-label="Events">
      <div class="filters">
        <label><input type="checkbox" checked=${pieces}
          onChange=${(input) => setPieces(input.currentTarget.checked)} /> with pieces of texts</label>
        ${!pieces && html`<input type="search" aria-label="Type of events" placeholder="type …" value=${words}
          onInput=${(input) => setWords(input.currentTarget.value)} />`}
        ${pages.error && html`<${Problem} error=${pages.error} what="This page of events" />`}
      </div>
      ${
        items.length === 0
          ? html`<${Empty}>No events.</${Empty}>`
          : html`<${Rows} items=${items} guess=${26} stick=${at === null} label="Events"
        keyOf=${(each) => (pieces ? each : each.meta.index)}
        row=${(each) => html`<${EventRow} index=${pieces ? each : each.meta.index} event=${pieces ? pages.want(each)
          : each} chosen=${chosen} choose=${choose} at=${at} />`} />`
      }
    </section>
    ${
      event &&
      html`<aside class="detail" aria-label="Event">
      <header><h2>${event.meta.index} · ${oneLine(event.type, 60)}</h2><button type="button" class="quiet"
        onClick=${() => choose(null)} aria-label="Close">✕</button></header>
      <p class="small dim">${moment(event.meta.at)} · <a href="${here}/chat?at=${event.meta.index}">replay to here
        </a></p>
      <${Json} value=${event} />
    </aside>`
    }
  </div>`;
}

function matching(events, words) {
  const wanted = words.trim().toLowerCase();
  return wanted ? events.filter((event) => event.type.includes(wanted)) : events.slice();
}

function EventRow({ index, event, chosen, choose, at }) {
  if (event === undefined) return html`<div class="event dim"><span class="mono">${index}</span> …</div>`;
  if (event === null)
    return html`<div class="event dim"><span class="mono">${index}</span> deleted, or not shown</div>`;
  return html`<button type="button" class="event ${at !== null && index > at ? "dim" : ""}"
    aria-pressed=${chosen === index} onClick=${() => choose(index)}>
    <span class="mono dim">${index}</span><time class="mono dim">${clock(event.meta.at)}</time>
    <b class="mono ${event.type.includes("failed") || event.type === "session.attention" ? "bad" : ""}">
      ${oneLine(event.type, 40)}</b>
    <span class="clip dim">${oneLine(pretty(event.data ?? {}, 500), 160)}</span>
  </button>`;
}

/** Events by index, fetched a page at a time; of pages that were seen long ago nothing is kept. */
function usePages(id) {
  const pages = useRef(new Map());
  const [error, setError] = useState(null);
  const [, draw] = useState(0);
  const stop = useMemo(() => new AbortController(), [id]);
  useEffect(() => () => stop.abort(), [stop]);
  const fetch = async (number) => {
    pages.current.set(number, null);
    try {
      const query = { after: number * PAGE - 1, before: (number + 1) * PAGE, limit: PAGE };
      const answered =
        number === 0
          ? await get(path`v1/sessions/${id}/events`, { query: { before: PAGE, limit: PAGE }, signal: stop.signal })
          : await get(path`v1/sessions/${id}/events`, { query, signal: stop.signal });
      pages.current.set(number, {
        full: Date.now(),
        events: new Map(answered.events.map((event) => [event.meta.index, event])),
      });
      for (const old of [...pages.current.keys()].slice(0, Math.max(0, pages.current.size - KEPT)))
        pages.current.delete(old);
      setError(null);
    } catch (failed) {
      if (stop.signal.aborted) return;
      // Asked for again only when it is looked at later.
      pages.current.set(number, { full: Date.now(), events: new Map() });
      setError(failed);
    }
    draw((now) => now + 1);
  };
  const at = (index) => pages.current.get(Math.floor(index / PAGE))?.events.get(index);
  return {
    error,
    at,
    /** The event; undefined while it is fetched, null when the API does not have it. */
    want(index) {
      const number = Math.floor(index / PAGE);
      const page = pages.current.get(number);
      const missing = page && !page.events.has(index);
      // The last page grows while the session goes on.
      if (page === undefined || (missing && Date.now() - page.full > 2_000 && index % PAGE >= page.events.size))
        queueMicrotask(() => pages.current.get(number) !== null && fetch(number));
      return page ? (page.events.get(index) ?? (missing ? null : undefined)) : undefined;
    },
  };
}
