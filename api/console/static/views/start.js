// A new session: an agent and the first message.
import { html, useEffect, useRef, useState } from "../html.js";
import { sentence } from "../api.js";
import { oneLine } from "../format.js";
import { newKey, start } from "../work.js";

const WELCOME =
  "A session is a conversation with an agent. It goes on when workers, this API or Temporal are killed, " +
  "and waits for days when people have to decide.";

// What was typed is kept while another place is shown, with the key of the request that may have arrived.
let typed = "";
let attempt = {};

export function NewSession({ agents, go, first, welcome = false }) {
  const [agent, setAgent] = useState(first ?? "");
  const [message, setMessage] = useState(typed);
  const [error, setError] = useState(null);
  const [sending, setSending] = useState(false);
  const field = useRef(null);
  const name = agent || agents[0]?.name || "";
  const about = agents.find((each) => each.name === name);
  useEffect(() => field.current?.focus(), []);
  const write = (text) => {
    typed = text;
    setMessage(text);
  };

  const send = async (event) => {
    event.preventDefault();
    if (!message.trim() || !name || sending) return;
    const words = JSON.stringify([name, message]);
    if (attempt.words !== words) attempt = { words, key: newKey() };
    setSending(true);
    setError(null);
    try {
      const { sessionId } = await start(name, message.trim(), attempt.key);
      attempt = {};
      typed = "";
      go(`#/sessions/${encodeURIComponent(sessionId)}`);
    } catch (refused) {
      setError(refused);
      setSending(false);
    }
  };
  return html`<main class="new-session" id="main" tabindex="-1">
    <a class="back" href="#/sessions" aria-label="All sessions">‹</a>
    <h1>${welcome ? "Start your first session" : "New session"}</h1>
    ${welcome && html`<p
      class="dim">${WELCOME}</p>`}
    <form onSubmit=${send}>
      <label class="field">Agent
        <select aria-label="Agent of the session" value=${name}
          onChange=${(event) => setAgent(event.currentTarget.value)}>
          ${agents.map((each) => html`<option key=${each.name} value=${each.name}>${oneLine(each.name, 60)}</option>`)}
        </select>
      </label>
      ${about?.description && html`<p class="dim small">${oneLine(about.description, 300)}</p>`}
      <label class="field">First message
        <textarea ref=${field} rows="5" dir="auto" value=${message}
          onInput=${(event) => write(event.currentTarget.value)}
          onKeyDown=${(event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && send(event)}>
            </textarea>
      </label>
      ${error && html`<p class="problem" role="alert">Not started. ${error.status === 0
        ? "The API does not answer; start it again, it counts once." : sentence(error, "This agent")}</p>`}
      <div class="buttons"><button type="submit" class="primary" disabled=${sending || !message.trim() || !name}>
        Start</button></div>
    </form>
  </main>`;
}
