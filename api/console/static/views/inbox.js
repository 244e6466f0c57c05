// What sessions ask: all open requests that the caller may answer, over all sessions.
import { html, useEffect, useRef, useState } from "../html.js";
import { oneLine } from "../format.js";
import { Ago, Empty, Problem } from "../parts.js";
import { Ask } from "./ask.js";

export function Inbox({ inbox }) {
  // What was open when it was seen stays, so that it can say what became of it.
  const seen = useRef(new Map());
  const [, draw] = useState(0);
  const open = inbox.data?.inputs ?? [];
  const ids = new Set(open.map((each) => each.requestId));
  for (const each of open) seen.current.set(each.requestId, { ...each, agent: each.agent });
  const rows = [...seen.current.values()].filter((each) => ids.has(each.requestId) || each.kept);
  useEffect(inbox.refresh, []);
  const done = (request, outcome) => {
    seen.current.set(request.requestId, { ...request, kept: true, outcome });
    inbox.refresh();
    draw((now) => now + 1);
  };
  return html`<main class="page inbox" id="main" tabindex="-1">
    <h1>Inbox</h1>
    ${inbox.error && html`<${Problem} error=${inbox.error} what="The inbox" retry=${inbox.refresh} />`}
    ${inbox.data && rows.length === 0 && html`<${Empty}>No session asks anything.</${Empty}>`}
    ${inbox.data?.nextCursor && html`<p class="banner">More requests are open than are shown; answer these first.</p>`}
    <ol class="requests">${rows.map((each) => html`<li key=${each.requestId} class="card">
      <p class="entry-line small"><a href="#/sessions/${encodeURIComponent(each.sessionId)}">${oneLine(each.agent, 60)} · <code>${each.sessionId}</code></a><${Ago} at=${each.openedAt} /></p>
      <${Ask} request=${each} onDone=${(outcome) => done(each, outcome)} />
    </li>`)}</ol>
  </main>`;
}
