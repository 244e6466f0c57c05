// A request to people: approve or deny a call, change its arguments, choose an option, write an answer.
import { html, useRef, useState } from "../html.js";
import { sentence } from "../api.js";
import { clock, duration, editable, millis, moment, oneLine, parse, shown } from "../format.js";
import { Clipped, Folded, Json } from "../parts.js";
import { newKey, respond } from "../work.js";

// What was begun is kept while its card is out of sight.
const drafts = new Map();

export function Ask({ request, onDone }) {
  const [draft, setDraft] = useState(drafts.get(request.requestId) ?? {});
  const [sending, setSending] = useState(false);
  const [outcome, setOutcome] = useState(null);
  const [error, setError] = useState(null);
  const key = useRef({});
  const write = (change) => {
    const next = { ...draft, ...change };
    drafts.set(request.requestId, next);
    setDraft(next);
  };

  const send = async (answer) => {
    setError(null);
    if (draft.editing && answer.optionId === "approve") {
      try {
        answer.arguments = parse(draft.arguments);
      } catch (wrong) {
        return setError(`These arguments are not JSON: ${wrong.message}`);
      }
    }
    if (draft.reason?.trim()) answer.reason = draft.reason.trim();
    const words = JSON.stringify(answer);
    if (key.current.words !== words) key.current = { words, key: newKey() };
    setSending(true);
    try {
      const result = await respond(request.requestId, answer, key.current.key);
      setOutcome(result);
      if (result.status !== "open") drafts.delete(request.requestId);
      onDone?.(result);
    } catch (refused) {
      setError(
        refused.code === "forbidden_responder"
          ? "Others may answer this, not this key."
          : sentence(refused, "This request"),
      );
    } finally {
      setSending(false);
    }
    return undefined;
  };

  const closed = request.status !== "open" ? request : outcome && outcome.status !== "open" ? outcome : null;
  return html`<div class="ask ${closed ? "closed" : "open"}" data-request=${request.requestId}>
    <${About} request=${request} />
    ${
      closed
        ? html`<${Outcome} closed=${closed} mine=${outcome?.first} request=${request} />`
        : html`
      ${
        request.kind === "question"
          ? html`<${Question} request=${request} draft=${draft} write=${write} send=${send} sending=${sending} />`
          : html`<${Approval} request=${request} draft=${draft} write=${write} send=${send} sending=${sending} />`
      }`
    }
    ${outcome?.status === "open" && !closed && html`<p class="dim" role="status">
      Your answer counts; others have to agree.</p>`}
    ${error && html`<p class="problem" role="alert">${error}</p>`}
  </div>`;
}

function About({ request }) {
  const { responders, expiresAt, onExpiry } = request;
  const who =
    !responders || responders.kind === "requester"
      ? null
      : responders.kind === "anyone"
        ? "Anyone may answer."
        : `${responders.values.map((each) => oneLine(each, 60)).join(", ")} may answer.`;
  return html`<p class="ask-prompt" dir="auto">${shown(request.prompt || request.summary || "The agent asks")}</p>
    <p class="dim small">
      ${request.kind === "question" ? "A question" : html`Approval of <code>${oneLine(request.tool, 80)}</code>`}
      ${request.agent && html` of <b>${oneLine(request.agent, 60)}</b>`}
      ${request.openedAt && html`, asked at <time title=${moment(request.openedAt)}>${clock(request.openedAt)}</time>`}
      ${expiresAt && html`, until ${moment(expiresAt)} (then: ${onExpiry ?? "deny"})`}.
      ${who && ` ${who}`} ${responders?.quorum > 1 && ` ${responders.quorum} have to agree.`}
    </p>`;
}

function Approval({ request, draft, write, send, sending }) {
  const edit = () =>
    write(
      draft.editing
        ? { editing: false }
        : { editing: true, arguments: draft.arguments ?? editable(request.arguments ?? {}) },
    );
  return html`
    ${
      draft.editing
        ? html`<label class="field">Arguments, as JSON
        <textarea class="mono" rows="6" spellcheck="false" value=${draft.arguments}
          onInput=${(event) => write({ arguments: event.currentTarget.value })}></textarea>
      </label>`
        : request.arguments !== undefined && html`<div class="arguments"><${Json} value=${request.arguments} /></div>`
    }
    <label class="field"><span>Reason (optional; after a denial the model reads it)</span>
      <input type="text" value=${draft.reason ?? ""}
        onInput=${(event) => write({ reason: event.currentTarget.value })} />
    </label>
    <div class="buttons">
      <button type="button" class="primary" disabled=${sending} onClick=${() => send({ optionId: "approve" })}>
        ${draft.editing ? "Approve as changed" : "Approve"}</button>
      <button type="button" class="danger" disabled=${sending} onClick=${() => send({ optionId: "deny" })}>Deny</button>
      <button type="button" onClick=${edit}>${draft.editing ? "Keep the arguments" : "Change arguments"}</button>
    </div>`;
}

function Question({ request, draft, write, send, sending }) {
  const submit = (event) => {
    event.preventDefault();
    if (draft.text?.trim()) send({ text: draft.text.trim() });
  };
  return html`
    ${
      request.options?.length > 0 &&
      html`<div class="buttons">${request.options.map(
        (option) => html`<button type="button" key=${option.id}
      disabled=${sending} onClick=${() => send({ optionId: option.id })}>${oneLine(option.label ?? option.id, 120)}
        </button>`,
      )}</div>`
    }
    ${
      (request.allowFreeform || !request.options?.length) &&
      html`<form class="inline" onSubmit=${submit}>
      <label class="field grow">Answer <input type="text" dir="auto" value=${draft.text ?? ""}
        onInput=${(event) => write({ text: event.currentTarget.value })} /></label>
      <button type="submit" class="primary" disabled=${sending || !draft.text?.trim()}>Answer</button>
    </form>`
    }`;
}

const ENDS = {
  expired: "It has expired",
  withdrawn: "It was withdrawn, because its turn has ended",
  unknown: "It is not known any more",
};

function Outcome({ closed, mine, request }) {
  const answer = closed.answer ?? {};
  const option = answer.optionId ?? closed.optionId;
  const label = request.options?.find((each) => each.id === option)?.label ?? option;
  const said =
    request.kind === "approval"
      ? option === "approve"
        ? "approved"
        : "denied"
      : oneLine(answer.text ?? label ?? "answered", 200);
  const after = answer.at && request.openedAt ? ` after ${duration(millis(request.openedAt, answer.at))}` : "";
  if (closed.status !== "answered")
    return html`<p class="outcome" role="status">${ENDS[closed.status] ?? closed.status}.</p>`;
  return html`<p class="outcome ${option === "deny" ? "bad" : "good"}" role="status">
      ${mine ? "You have answered" : html`Already answered by <b>${oneLine(answer.principalId ?? "someone else", 80)}
        </b>`}: ${said}${after}.
    </p>
    ${answer.reason && html`<p class="dim small" dir="auto">Reason: ${oneLine(answer.reason, 400)}</p>`}
    ${answer.arguments && html`<${Folded} summary="With changed arguments"><${Json} value=${answer.arguments} />
      </${Folded}>`}
    ${request.kind === "approval" && request.arguments !== undefined && html`<${Folded} summary="Arguments"><${Json}
      value=${request.arguments} /></${Folded}>`}
    ${answer.text && answer.text.length > 200 && html`<${Clipped} text=${answer.text} />`}`;
}
