// The conversation: what was said, what was called, what is asked; and the field to say something.
import { html, useEffect, useMemo, useRef, useState } from "../html.js";
import { sentence } from "../api.js";
import { clock, count, duration, millis, moment, oneLine, pretty } from "../format.js";
import { Clipped, Folded, Json } from "../parts.js";
import { Rows } from "../rows.js";
import { MODES, cancel, newKey, say, withdraw } from "../work.js";
import { Ask } from "./ask.js";

const rowsOf = new WeakMap();

export function Chat({ sessionId, state, session, replaying, feed, pending, onSent }) {
  const rows = useMemo(() => {
    const known = state.turns.flatMap(turnRows);
    const waiting = replaying ? [] : pending.filter((each) => !state.read[each.deliveryId]);
    return [
      ...known,
      ...waiting.map((each) => ({ kind: "pending", key: each.deliveryId, text: each.text, mode: each.mode })),
    ];
  }, [state.turns, state.read, pending, replaying]);
  const handle = useRef(null);
  const sent = (message) => {
    handle.current?.end();
    onSent(message);
  };
  return html`<section class="chat" aria-label="Conversation">
    <${Rows} items=${rows} keyOf=${keyOf} row=${Row} key=${replaying ? "then" : "now"} guess=${64} stick
      label="Messages" handle=${handle}>
      ${!replaying && html`<${Doing} state=${state} feed=${feed} session=${session} />`}
    </${Rows}>
    ${!replaying && html`<${Composer} sessionId=${sessionId} state=${state} session=${session} onSent=${sent} />`}
  </section>`;
}

const keyOf = (row) => row.key;

function turnRows(turn) {
  if (!rowsOf.has(turn)) {
    const rows = turn.items.map((item) => ({ ...item, turn: turn.number }));
    if (turn.endedAt)
      rows.push({
        kind: "end",
        key: `end/${turn.number}`,
        number: turn.number,
        from: turn.startedAt,
        to: turn.endedAt,
        steps: turn.steps,
      });
    rowsOf.set(turn, rows);
  }
  return rowsOf.get(turn);
}

function Row(row) {
  switch (row.kind) {
    case "message":
      return html`<article class="said user"><h2 class="who">You <time title=${moment(row.at)}>${clock(row.at)}
        </time></h2><${Clipped} text=${row.text} /></article>`;
    case "pending":
      return html`<${Waiting} message=${row} />`;
    case "reply":
      return html`<article class="said agent ${row.done ? "" : "live"}"><h2 class="who">Agent <time
        title=${moment(row.at)}>${clock(row.at)}</time></h2><${Clipped} text=${row.text} /></article>`;
    case "reasoning":
      return html`<${Folded} class="reasoning" open=${!row.done} summary="Reasoning"><${Clipped} text=${row.text} />
        </${Folded}>`;
    case "call":
      return html`<${Call} call=${row} />`;
    case "result":
      return html`<article class="call"><h2 class="who">Result</h2><${Json} value=${row.value} /></article>`;
    case "notice":
      return html`<p class="notice ${row.tone}"><span dir="auto">${oneLine(row.text, 600)}</span> <time
        title=${moment(row.at)}>${clock(row.at)}</time></p>`;
    case "end":
      return html`<${TurnEnd} row=${row} />`;
    default:
      return null;
  }
}

/** A message that no turn has read so far: it can be taken back. */
function Waiting({ message }) {
  const [said, say] = useState("waits to be read");
  const back = async () => {
    try {
      await withdraw(message.key);
      say("is taken back");
    } catch (error) {
      say(error.code === "delivery_taken" ? "is being read" : sentence(error, "This message"));
    }
  };
  return html`<article class="said user waits">
    <h2 class="who">You <span role="status">${said}</span>
      <button type="button" class="link" onClick=${back}>Take back</button></h2>
    <${Clipped} text=${message.text} />
  </article>`;
}

function TurnEnd({ row }) {
  const tokens = row.steps.reduce(
    (sum, step) => sum + (step.usage?.inputTokens ?? 0) + (step.usage?.outputTokens ?? 0),
    0,
  );
  return html`<p class="turn-end"><span>turn ${row.number} · ${duration(millis(row.from, row.to))}${tokens > 0
    ? ` · ${count(tokens)} tokens` : ""}</span></p>`;
}

const CALL = {
  drafting: "is being written",
  running: "runs",
  asking: "waits for people",
  answered: "goes on",
  completed: "done",
  failed: "failed",
  rejected: "not run",
};

function Call({ call }) {
  const took = call.endedAt ? duration(millis(call.startedAt, call.endedAt)) : "";
  const child = call.childSessionId;
  return html`<article class="call ${call.status}">
    <h2 class="who"><code>${oneLine(call.tool, 80) || "a tool"}</code>
      <span class="call-status">${CALL[call.status] ?? call.status}${took && !call.request ? ` · ${took}` : ""}</span>
      ${child && html`<a class="small" href="#/sessions/${encodeURIComponent(child)}">its session</a>`}
    </h2>
    ${call.request && html`<${Ask} request=${call.request} />`}
    ${!call.request && html`<${CallLine} call=${call} />`}
    ${
      call.endedAt &&
      html`<${Folded} class="outcome-of" summary=${html`<span class="clip">${call.error
        ? oneLine(call.error.message ?? call.error.code, 160) : oneLine(pretty(call.output ?? "", 600), 160) ||
          "nothing"}</span>`}>
      ${call.error && html`<p class="problem">${oneLine(call.error.code ?? "", 80)}
        : ${oneLine(call.error.message ?? "", 2000)}</p>`}
      <${Json} value=${call.output} /></${Folded}>`
    }
  </article>`;
}

function CallLine({ call }) {
  if (call.status === "drafting") return html`<p class="mono small clip dim">${oneLine(call.inputText, 300)}</p>`;
  const input = oneLine(pretty(call.input ?? {}, 600), 160);
  return html`<${Folded} class="input-of" summary=${html`<span class="clip">${input}</span>`}><${Json}
    value=${call.input} /></${Folded}>`;
}

/** What the session does now, in a few words. */
function Doing({ state, feed, session }) {
  const words = doing(state, feed, session);
  return html`<p class="doing" role="status">${words && html`<span class="dots" aria-hidden="true"></span>${words}`}
    </p>`;
}

function doing(state, feed, session) {
  if (state.attention || ["completed", "failed"].includes(state.status)) return "";
  if (feed.stalled) return "The worker of this turn is gone; another one takes it over.";
  if (state.cancelling) return "The turn is being cancelled.";
  if (state.status === "starting" && session) return "Waits for a worker.";
  if (state.status !== "running") return "";
  const running = (state.turns.at(-1)?.items ?? []).filter((item) => item.kind === "call" && item.status === "running");
  if (running.length)
    return `Runs ${running
      .map((call) => oneLine(call.tool, 40))
      .slice(0, 3)
      .join(", ")}.`;
  const writes = state.turns.at(-1)?.items.some((item) => item.done === false);
  return writes ? "The model answers." : "Asks the model.";
}

// What was typed is kept while another session is shown, and what became of it is not known yet.
const texts = new Map();
const attempts = new Map();

function Composer({ sessionId, state, session, onSent }) {
  const [text, setText] = useState(texts.get(sessionId) ?? "");
  const [mode, setMode] = useState("");
  const [error, setError] = useState(null);
  const [sending, setSending] = useState(false);
  const field = useRef(null);
  const busy = state.status === "running";
  const ended = state.status === "completed" || state.status === "failed" || session?.status === "completed";
  const agent = session?.agent ?? state.agent;

  const write = (value) => {
    texts.set(sessionId, value);
    setText(value);
  };
  const send = async (event) => {
    event?.preventDefault();
    const message = text.trim();
    if (!message || sending || !agent) return;
    // The same words under the same key, and as the same request, until they are accepted: what seems lost may have
    // arrived.
    const known = attempts.get(sessionId);
    const attempt = known?.message === message ? known : { message, mode: busy ? mode : "", key: newKey() };
    attempts.set(sessionId, attempt);
    setSending(true);
    setError(null);
    try {
      attempt.answer = say(agent, sessionId, message, attempt.mode, attempt.key);
      const receipt = await attempt.answer;
      attempts.delete(sessionId);
      write("");
      onSent({ deliveryId: receipt.deliveryId, text: message, mode: attempt.mode });
    } catch (refused) {
      // What was refused for what it says may be sent again in another way. Others may be let in later, as they are: an
      // earlier one of the same key may have arrived.
      const later = [401, 403, 408, 429].includes(refused.status);
      if (refused.status >= 400 && refused.status < 500 && !later) attempts.delete(sessionId);
      setError(refused);
    } finally {
      attempt.answer = null;
      setSending(false);
      field.current?.focus();
    }
  };
  // What was sent before another place was shown is still under way.
  useEffect(() => {
    const answer = attempts.get(sessionId)?.answer;
    if (!answer) return;
    setSending(true);
    answer.catch(setError).then(() => {
      setSending(false);
      setText(texts.get(sessionId) ?? "");
    });
  }, []);
  const keyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  const stop = () => cancel(sessionId).catch(setError);
  useEffect(() => {
    const grow = field.current;
    if (!grow) return;
    grow.style.height = "auto";
    grow.style.height = `${Math.min(grow.scrollHeight + 2, 200)}px`;
  }, [text]);

  if (ended) return html`<p class="composer ended dim">This session has ended.</p>`;
  return html`<form class="composer" onSubmit=${send}>
    ${error && html`<p class="problem" role="alert">Not sent. ${error.status === 0
      ? "The API does not answer; send it again, it counts once." : sentence(error, "This session")}</p>`}
    <div class="composer-line">
      <textarea ref=${field} rows="1" dir="auto" aria-label="Message" placeholder="Say something …" value=${text}
        onInput=${(event) => write(event.currentTarget.value)} onKeyDown=${keyDown}></textarea>
      ${
        busy &&
        html`<select aria-label="When it is read" value=${mode}
          onChange=${(event) => setMode(event.currentTarget.value)}>
        <option value="">as declared</option>
        ${Object.entries(MODES).map(([name, words]) => html`<option key=${name} value=${name}>${words}</option>`)}
      </select>`
      }
      <button type="submit" class="primary" disabled=${sending || !text.trim()}>Send</button>
      ${(busy || state.cancelling) && html`<button type="button" disabled=${Boolean(state.cancelling)}
        onClick=${stop}>Stop</button>`}
    </div>
  </form>`;
}
