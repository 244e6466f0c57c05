// What sessions ask: all open requests that the caller may answer, over all sessions.
import { html, useEffect, useRef, useState } from "../html.js";
import { get, path } from "../api.js";
import { oneLine } from "../format.js";
import { Ago, Empty, Problem } from "../parts.js";
import { Ask } from "./ask.js";

export function Inbox({ inbox }) {
  // What was open when it was seen stays, so that it can say what became of it.
  const seen = useRef(new Map());
  const [, draw] = useState(0);
  const open = inbox.data?.inputs ?? [];
  const ids = new Set(open.map((each) => each.requestId));
  for (const each of open) seen.current.set(each.requestId, each);
  const rows = [...seen.current.values()];
  useEffect(inbox.refresh, []);
  // Somebody else was first: say so, and do not take away what one is looking at.
  useEffect(() => {
    const gone = rows.filter((each) => each.status === "open" && !ids.has(each.requestId));
    for (const each of inbox.data ? gone : []) follow(each, seen.current).then(() => draw((now) => now + 1));
  }, [inbox.data]);
  const done = () => inbox.refresh();
  return html`<main class="page inbox" id="main" tabindex="-1">
    <h1>Inbox</h1>
    ${inbox.error && html`<${Problem} error=${inbox.error} what="The inbox" retry=${inbox.refresh} />`}
    ${inbox.data && rows.length === 0 && html`<${Empty}>No session asks anything.</${Empty}>`}
    ${inbox.data?.nextCursor && html`<p class="banner">More requests are open than are shown; answer these first.</p>`}
    <ol class="requests">${rows.map(
      (each) => html`<li key=${each.requestId} class="card">
      <p class="entry-line small"><a href="#/sessions/${encodeURIComponent(each.sessionId)}">${oneLine(each.agent,
        60)} · <code>${each.sessionId}</code></a><${Ago} at=${each.openedAt} /></p>
      <${Ask} request=${each} onDone=${done} />
    </li>`,
    )}</ol>
  </main>`;
}

/** What became of a request that is not open any more. */
async function follow(request, seen) {
  try {
    const now = await get(path`v1/inputs/${request.requestId}`);
    if (now.status !== "open") seen.set(request.requestId, now);
  } catch (error) {
    // It was deleted with its session; of anything else the next look at the list tells.
    if (error.status === 404) seen.delete(request.requestId);
  }
}
