// Whether everything that sessions need is there.
import { html, useState } from "../html.js";
import { sentence } from "../api.js";
import { count, oneLine, safeLink } from "../format.js";
import { Ago, Empty, Problem } from "../parts.js";
import { usePolled } from "../poll.js";
import { requeue } from "../work.js";

export function Health() {
  const health = usePolled("v1/health", { often: 5_000, seldom: 30_000 });
  const letters = usePolled("v1/dead-letters", { query: { limit: 50 }, often: 15_000, seldom: 60_000 });
  const { data } = health;
  return html`<main class="page" id="main" tabindex="-1">
    <h1>Health</h1>
    ${health.error && html`<${Problem} error=${health.error} what="The health of this deployment"
      retry=${health.refresh} />`}
    ${!data && !health.error && html`<${Empty}>Loads …</${Empty}>`}
    ${
      data &&
      html`<div class="tiles">
      <${Tile} name="API" ok=${true} facts=${[
        ["version", data.version],
        ["build", data.build],
      ]} />
      <${Tile} name="Store" ok=${data.store?.ok} facts=${[
        ["kind", data.store?.kind],
        ["schema", data.store?.schema],
        ["answers in", latency(data.store)],
        ["problem", data.store?.problem],
      ]} />
      <${Tile} name="Temporal" ok=${data.temporal?.ok} link=${safeLink(data.temporal?.ui)} facts=${[
        ["address", data.temporal?.address],
        ["namespace", data.temporal?.namespace],
        ["version", data.temporal?.serverVersion],
        ["answers in", latency(data.temporal)],
        ["problem", data.temporal?.problem],
      ]} />
    </div>
    <h2>Queues</h2>
    ${data.queues ? html`<${Queues} queues=${data.queues} />` : html`<p class="problem">
      Queues are shown to operators only.</p>`}
    <h2>Workers</h2>
    ${data.workers ? html`<${Workers} workers=${data.workers} />` : html`<p class="problem">
      Workers are shown to operators only.</p>`}`
    }
    <h2>Failed turns</h2>
    ${letters.error ? html`<${Problem} error=${letters.error} what="The list of failed turns" />` : html`<${Letters}
      letters=${letters.data?.deadLetters ?? []} onDone=${letters.refresh} />`}
  </main>`;
}

function latency(part) {
  return part?.latencyMs === undefined ? undefined : `${Number(part.latencyMs).toFixed(1)} ms`;
}

function Tile({ name, ok, facts, link }) {
  return html`<section class="card tile" aria-label=${name}>
    <h2>${name} <span class="status ${ok ? "completed" : "failed"}">${ok ? "ok" : "does not answer"}</span></h2>
    <dl>${facts.filter(([, value]) => value !== undefined && value !== null).map(([fact, value]) => html`<dt
      key=${fact}>${fact}</dt><dd>${oneLine(value, 120)}</dd>`)}</dl>
    ${link && html`<p><a href=${link} target="_blank" rel="noopener noreferrer">Temporal UI</a></p>`}
  </section>`;
}

function Queues({ queues }) {
  return html`<div class="scroll-x" tabindex="0" role="group" aria-label="Queues"><table><thead><tr><th>Queue</th>
    <th>Of</th><th>Waiting</th><th>Pollers</th></tr></thead><tbody>
    ${queues.map(
      (
        queue,
      ) => html`<tr key=${`${queue.name}/${queue.kind}`}><td><code>${oneLine(queue.name, 120)}</code></td>
        <td>${queue.kind}</td>
      <td class="number">${queue.backlog === undefined || queue.backlog === null ? "–" : count(queue.backlog)}</td>
      <td>${typeof queue.pollers === "number" ? queue.pollers || html`<span class="bad">nobody</span>`
        : queue.pollers?.length ? html`${queue.pollers.length} <span class="dim small">
          ${oneLine(queue.pollers.map((each) => each.identity).join(", "), 120)}</span>` : html`<span
            class="bad">nobody</span>`}</td></tr>`,
    )}
  </tbody></table></div>`;
}

function Workers({ workers }) {
  if (!workers.length) return html`<p class="problem">No worker runs: sessions wait until one does.</p>`;
  return html`<div class="scroll-x" tabindex="0" role="group" aria-label="Workers"><table><thead><tr><th>Worker</th>
    <th>Queues</th><th>Seen</th></tr></thead><tbody>
    ${workers.map((worker) => html`<tr key=${worker.identity}><td><code>${oneLine(worker.identity, 120)}</code></td>
      <td class="dim small">${oneLine((worker.queues ?? []).join(", ") || "–", 200)}</td><td><${Ago}
        at=${worker.lastSeenAt} /></td></tr>`)}
  </tbody></table></div>`;
}

function Letters({ letters, onDone }) {
  const [said, say] = useState(null);
  const again = async (letter) => {
    try {
      await requeue(letter.sessionId, letter.turnId);
      say(`The messages of ${letter.turnId} are delivered again.`);
      onDone();
    } catch (error) {
      say(sentence(error, "This turn"));
    }
  };
  if (!letters.length)
    return html`<p class="dim" role="status">${said ?? "No turn has failed and waits for somebody."}</p>`;
  return html`${said && html`<p role="status">${said}</p>`}<div class="scroll-x" tabindex="0" role="group"
    aria-label="Failed turns"><table><thead><tr><th>Session</th><th>Turn</th><th>Code</th><th>Message</th><th>Failed
      </th><th><span class="visually-hidden">What to do</span></th></tr></thead><tbody>
    ${letters.map(
      (
        each,
      ) => html`<tr key=${`${each.sessionId}/${each.turnId}`}><td><a
        href="#/sessions/${encodeURIComponent(each.sessionId)}">${oneLine(each.agent, 60)}</a></td><td>${each.turnId}
          </td>
      <td><code>${oneLine(each.code, 60)}</code></td><td class="wide">${oneLine(each.message, 200)}</td><td><${Ago}
        at=${each.failedAt} /></td>
      <td><button type="button" onClick=${() => again(each)}>Deliver again</button></td></tr>`,
    )}
  </tbody></table></div>`;
}
