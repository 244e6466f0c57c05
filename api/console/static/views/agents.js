// The agents of this API, and their tools.
import { html } from "../html.js";
import { count, oneLine } from "../format.js";
import { Empty, Folded, Json, Problem } from "../parts.js";

const EFFECTS = {
  pure: "may run again",
  idempotent: "may run again",
  at_most_once: "runs at most once",
};

export function Agents({ agents, error }) {
  return html`<main class="page" id="main" tabindex="-1">
    <h1>Agents</h1>
    ${error && html`<${Problem} error=${error} what="The list of agents" />`}
    ${agents.some((each) => each.alone) && html`<p class="banner">
      This API is older than the console, and shows its default agent only.</p>`}
    ${!error && agents.length === 0 && html`<${Empty}>Loads …</${Empty}>`}
    ${agents.map(
      (agent) => html`<section class="card agent" key=${agent.name} aria-label=${agent.name}>
      <header class="entry-line"><h2>${oneLine(agent.name, 80)}</h2><a class="button"
        href="#/new?agent=${encodeURIComponent(agent.name)}">New session</a></header>
      ${agent.description && html`<p dir="auto">${oneLine(agent.description, 600)}</p>`}
      <p class="facts dim small"><code>${oneLine(agent.model ?? "", 80)}</code>${agent.turns && html`<span>
        turns: ${agent.turns}</span>`}
        <span>${count(agent.tools.length)} tools</span>${agent.subagents?.length > 0 && html`<span>
          hands work to ${agent.subagents.map((each) => oneLine(each, 40)).join(", ")}</span>`}</p>
      ${agent.tools.map(
        (
          tool,
        ) => html`<${Folded} class="tool" key=${tool.name} summary=${html`<code>${oneLine(tool.name, 80)}
          </code> <span class="dim clip">${oneLine(tool.description ?? "", 140)}</span>
          ${tool.effects && html` <span class="badge" title=${EFFECTS[tool.effects] ?? ""}>${tool.effects}
            </span>`}${tool.approval && html` <span class="badge asks">approval</span>`}`}>
        ${tool.inputSchema && html`<${Json} value=${tool.inputSchema} />`}
      </${Folded}>`,
      )}
    </section>`,
    )}
  </main>`;
}
