// From events to what a session looks like. Pure: no clock, no network, no page. Every event counts once, by its index.
//
// `fold(state, events)` gives a new state; parts that no event has changed are the same objects as before.

const ENDS = { "turn.completed": "completed", "turn.failed": "failed", "turn.cancelled": "cancelled" };

/** Pieces of what a later event has as a whole. */
export const PIECES = ["message.appended", "reasoning.appended", "action.input.appended"];

export const EMPTY = Object.freeze({
  last: -1,
  agent: null,
  model: null,
  status: "starting",
  error: null,
  attention: null,
  cancelling: null,
  plan: null,
  turns: [],
  places: table(),
  calls: table(),
  requests: table(),
  read: table(),
  usage: { inputTokens: 0, outputTokens: 0 },
});

export function fold(state, events) {
  const draft = new Draft(state);
  for (const event of events) {
    const index = event?.meta?.index;
    // A stream that goes on after a break, or a page beside it, may have an event again.
    if (!Number.isSafeInteger(index) || index <= draft.state.last) continue;
    draft.take(event, index);
  }
  return draft.state;
}

/** The requests that are open, oldest first. */
export function openRequests(state) {
  return Object.keys(state.requests)
    .map((id) => requestOf(state, id))
    .filter((each) => each?.status === "open");
}

function requestOf(state, id) {
  const place = state.requests[id];
  return place && state.turns[place.turn]?.items.find((item) => item.key === place.key)?.request;
}

class Draft {
  constructor(state) {
    this.state = { ...state };
    this.copied = new Set();
    this.owned = new Set();
  }

  /** One of the tables of the state, copied before its first change. */
  table(name) {
    if (!this.owned.has(name)) this.state[name] = table(this.state[name]);
    this.owned.add(name);
    return this.state[name];
  }

  take(event, index) {
    const { type, meta } = event;
    const data = event.data ?? {};
    this.state.last = index;
    this.event = { type, data, index, at: meta.at, attempt: meta.attempt ?? 1, deliveries: meta.deliveryIds ?? [] };
    if (type === "session.started") {
      this.set({ agent: data.runtime?.agentName ?? null, model: data.runtime?.modelId ?? null, status: "running" });
    } else if (type.startsWith("session.")) this.session(type, data);
    else if (type.startsWith("turn.")) this.turnEvent(type, data);
    else if (type.startsWith("step.")) this.step(type, data);
    else if (type.startsWith("message.") || type.startsWith("reasoning.")) this.text(type, data);
    else if (type.startsWith("action")) this.action(type, data);
    else if (type.startsWith("input.")) this.input(type, data);
    else this.other(type, data);
  }

  // --- the session and its turns

  session(type, data) {
    switch (type) {
      case "session.waiting":
        return this.set({ status: "waiting", cancelling: null });
      case "session.completed":
        return this.end("completed", null);
      case "session.failed":
        this.end("failed", { code: data.code, message: data.message });
        return this.notice("bad", `The session has failed: ${text(data.message) || text(data.code)}`);
      case "session.attention":
        this.set({ attention: { code: data.code, message: data.message, since: this.event.at } });
        return this.notice("bad", `Needs attention (${text(data.code)}): ${text(data.message)}`);
      case "session.recovered":
        this.set({ attention: null });
        return this.notice("good", `The session continues (${text(data.code)}).`);
      case "session.reset":
        return this.notice("note", "Later prompts leave out what was before.");
      case "session.forked":
        return this.notice("note", `A fork of ${text(data.parent?.sessionId)}.`);
      case "session.imported":
        return this.notice("note", `Imported, with ${text(data.turns)} turns.`);
      case "session.rebuilt":
        return this.notice("note", `Rebuilt from the store (${text(data.reason)}).`);
      case "session.rolled_back":
        return this.notice("note", `Rolled back to ${text(data.name ?? data.checkpointId)}.`);
      default:
        return undefined;
    }
  }

  end(status, error) {
    this.set({ status, error, cancelling: null, attention: null });
  }

  turnEvent(type, data) {
    const { at, deliveries } = this.event;
    if (type === "turn.started") {
      this.readDeliveries(deliveries);
      this.set({ status: "running" });
      return this.turn({ status: "running", startedAt: at, deliveries });
    }
    if (ENDS[type] === undefined) return undefined;
    this.turn({ status: ENDS[type], endedAt: at, error: type === "turn.failed" ? data : null });
    this.set({ cancelling: null });
    this.settle(type);
    if (type === "turn.failed") this.notice("bad", `The turn has failed (${text(data.code)}): ${text(data.message)}`);
    if (type === "turn.cancelled") this.notice("note", "The turn was cancelled.");
    return undefined;
  }

  /** What a turn that ends leaves open: text that stops where it is, and calls of which no result will come. */
  settle(type) {
    if (type === "turn.completed") return;
    for (const item of this.turn().items) {
      if (item.kind === "call" && item.status === "drafting") this.remove(item.key);
      else if (item.done === false) this.change(item.key, { done: true });
    }
  }

  readDeliveries(ids) {
    for (const id of ids) this.table("read")[id] = "read";
  }

  // --- steps

  step(type, data) {
    const { at, attempt } = this.event;
    const number = data.stepIndex ?? 0;
    switch (type) {
      case "step.started":
        return this.stepOf(number, { startedAt: at, attempt });
      case "step.completed":
        this.count(data.usage);
        return this.stepOf(number, { endedAt: at, usage: data.usage, finishReason: data.finishReason });
      case "step.failed":
        return this.stepOf(number, { endedAt: at, failure: data });
      case "step.superseded":
        return this.retract(number, data);
      case "step.recovered":
        return this.stepOf(number, { attempt: data.attempt ?? attempt });
      default:
        return undefined;
    }
  }

  /** Another attempt has taken the step over: what earlier ones have streamed never happened. */
  retract(number, data) {
    const attempt = data.attempt ?? this.event.attempt;
    for (const item of this.turn().items) {
      const piece = item.kind === "reply" || item.kind === "reasoning" || item.status === "drafting";
      if (piece && item.step === number && item.attempt < attempt) this.remove(item.key);
    }
    const before = this.turn().steps.find((step) => step.number === number);
    this.stepOf(number, { attempt, retracted: (before?.retracted ?? 0) + 1 });
  }

  count(usage) {
    if (!usage) return;
    const { inputTokens, outputTokens } = this.state.usage;
    this.set({
      usage: {
        inputTokens: inputTokens + (usage.inputTokens ?? 0),
        outputTokens: outputTokens + (usage.outputTokens ?? 0),
      },
    });
  }

  // --- what was said

  text(type, data) {
    if (type === "message.received") {
      this.readDeliveries(this.event.deliveries);
      return this.add({ kind: "message", key: `message/${this.event.index}`, text: text(data.message), done: true });
    }
    const [of, field] = type.startsWith("message.") ? ["reply", "message"] : ["reasoning", "reasoning"];
    const key = `${of}/${this.at()}/${data.stepIndex}`;
    const known = this.find(key);
    if (type.endsWith(".completed")) {
      const whole = data[field];
      // A reply that only calls tools says nothing.
      if (!whole && !known) return undefined;
      const said = typeof whole === "string" ? whole : (known?.text ?? "");
      return this.put({ kind: of, key, text: said, done: true, finishReason: data.finishReason });
    }
    if (!type.endsWith(".appended")) return undefined;
    const sofar = data[`${field}SoFar`];
    const delta = text(data[`${field}Delta`]);
    return this.put({
      kind: of,
      key,
      text: typeof sofar === "string" ? sofar : (known?.text ?? "") + delta,
      done: false,
    });
  }

  // --- calls and requests

  action(type, data) {
    if (type === "action.input.appended") {
      const known = this.call(data.callId);
      const input = (known?.inputText ?? "") + text(data.inputTextDelta);
      if (known && known.status !== "drafting") return undefined;
      return this.putCall(data.callId, { tool: text(data.toolName), status: "drafting", inputText: input });
    }
    if (type === "actions.requested") {
      for (const action of list(data.actions)) {
        const tool = text(action.toolName ?? action.subagentName ?? action.remoteAgentName ?? action.name);
        this.putCall(action.callId, {
          tool,
          input: action.input,
          status: "running",
          startedAt: this.event.at,
          inputText: "",
          child: action.kind === "subagent-call" || action.kind === "remote-agent-call",
        });
      }
      return undefined;
    }
    if (type === "action.result") return this.result(data);
    return undefined;
  }

  result(data) {
    const { result = {}, status, error } = data;
    const known = this.call(result.callId);
    this.putCall(result.callId, {
      tool: text(result.toolName ?? result.subagentName) || known?.tool || "",
      output: result.output,
      status,
      error: error ?? null,
      endedAt: this.event.at,
      startedAt: known?.startedAt ?? this.event.at,
    });
  }

  input(type, data) {
    switch (type) {
      case "input.requested":
        for (const request of list(data.requests)) this.request(request, data.details?.[request.requestId] ?? {});
        return undefined;
      case "input.resolved":
        return this.changeRequest(data.requestId, {
          status: data.status,
          answer: data.answer ?? null,
          closedAt: this.event.at,
        });
      case "input.reminded":
        return this.changeRequest(data.requestId, { reminded: this.event.at });
      default:
        return undefined;
    }
  }

  request(given, details) {
    const known = requestOf(this.state, given.requestId);
    // A turn that parks again shows the requests that are still open once more.
    if (known) return this.changeRequest(given.requestId, { status: "open" });
    const action = given.action ?? {};
    const request = {
      requestId: given.requestId,
      kind: details.kind ?? "approval",
      prompt: text(given.prompt),
      status: "open",
      tool: text(action.toolName),
      arguments: action.input,
      display: given.display,
      options: list(given.options),
      allowFreeform: Boolean(given.allowFreeform),
      summary: details.summary ?? null,
      answer: null,
      responders: details.responders ?? null,
      expiresAt: details.expiresAt ?? null,
      onExpiry: details.onExpiry ?? null,
      openedAt: this.event.at,
      sessionId: details.sessionId ?? null,
      agent: details.agent ?? null,
    };
    // A call of a descendant is not one of ours, whatever its id is.
    if (request.sessionId !== null) {
      const key = `request/${request.requestId}`;
      this.add({ kind: "call", key, callId: null, tool: request.tool, input: action.input, status: "asking", request });
      return this.remember("requests", request.requestId, key);
    }
    const key = this.putCall(action.callId ?? request.requestId, {
      tool: request.tool,
      input: action.input,
      status: "asking",
      inputText: "",
      request,
    });
    return this.remember("requests", request.requestId, key);
  }

  changeRequest(id, change) {
    const place = this.state.requests[id];
    const item = place && this.state.turns[place.turn].items.find((each) => each.key === place.key);
    if (!item) return;
    const request = { ...item.request, ...change };
    const answered = item.status === "asking" && request.status !== "open";
    this.change(item.key, { request, ...(answered ? { status: "answered" } : {}) }, place.turn);
  }

  // --- everything else

  other(type, data) {
    switch (type) {
      case "cancel.requested":
        return this.set({ cancelling: text(data.turnId) || "turn" });
      case "plan.updated":
        return this.set({ plan: data.plan ?? null });
      case "steer.applied":
        return this.readDeliveries(list(data.deliveryIds));
      case "delivery.refused":
        this.table("read")[data.deliveryId] = "refused";
        return this.notice("bad", `A message was not read (${text(data.code)}): ${text(data.message)}`);
      case "inbox.overflow":
        return this.notice("note", `More messages came than there is room for (${text(data.policy)}).`);
      case "context.cleared":
        return this.notice("note", "The model's history was cleared.");
      case "compaction.completed":
        this.count(data.usage);
        return this.notice("note", "Older history is summarised from here on.");
      case "compaction.failed":
        this.count(data.usage);
        return this.notice("bad", `The history could not be summarised: ${text(data.message)}`);
      case "result.completed":
        return this.put({
          kind: "result",
          key: `result/${this.at()}/${data.stepIndex}`,
          value: data.result,
          done: true,
        });
      case "subagent.called":
        return this.putCall(data.callId, { childSessionId: text(data.childSessionId) });
      case "checkpoint.created":
        return data.name ? this.notice("note", `Checkpoint “${text(data.name)}”.`) : undefined;
      case "checkpoint.failed":
        return this.notice("bad", `No checkpoint was taken: ${text(data.reason)}`);
      case "event.expired":
      case "event.excluded":
        return undefined;
      default:
        return this.run(type, data);
    }
  }

  /** A run has no turns; what it does is a list of notices. */
  run(type, data) {
    switch (type) {
      case "run.step.completed":
        return this.notice("note", `${text(data.kind)} “${text(data.name)}” is done.`);
      case "run.step.failed":
        return this.notice("bad", `${text(data.kind)} “${text(data.name)}”: ${text(data.error?.message)}`);
      case "run.log":
        return this.notice("note", `${text(data.level)}: ${text(data.message)}`);
      case "run.waiting":
        return this.notice("note", `Waits for ${text(data.waitingFor)}.`);
      case "run.started":
        return this.set({ status: "running", agent: text(data.workflowName) });
      case "run.completed":
        return this.end("completed", null);
      case "run.cancelled":
      case "run.failed":
        return this.end("failed", data.error ?? null);
      default:
        return undefined;
    }
  }

  // --- writing

  set(change) {
    Object.assign(this.state, change);
  }

  /** The number of the turn of this event; what belongs to none is shown with the turn before it. */
  at() {
    const given = this.event.data.sequence;
    if (Number.isSafeInteger(given)) return given;
    const last = this.state.turns.at(-1);
    return last ? last.number : 0;
  }

  /** The turn of this event, which is changed here, or the one at `place`. */
  turn(change = {}, place = null) {
    let at = place ?? this.state.places[this.at()];
    if (at === undefined) {
      at = this.state.turns.length;
      const number = this.at();
      const turn = {
        number,
        status: "running",
        startedAt: this.event.at,
        endedAt: null,
        error: null,
        deliveries: [],
        items: [],
        steps: [],
      };
      this.state.turns = [...this.state.turns, turn];
      this.table("places")[number] = at;
    }
    if (!this.copied.has(at)) {
      if (this.copied.size === 0) this.state.turns = [...this.state.turns];
      const turn = this.state.turns[at];
      this.state.turns[at] = { ...turn, items: [...turn.items], steps: [...turn.steps] };
      this.copied.add(at);
    }
    return Object.assign(this.state.turns[at], change);
  }

  stepOf(number, change) {
    const { steps } = this.turn();
    const at = steps.findLastIndex((step) => step.number === number);
    if (at >= 0) steps[at] = { ...steps[at], ...change };
    else steps.push({ number, startedAt: this.event.at, endedAt: null, ...change });
  }

  find(key) {
    const place = this.state.places[this.at()];
    return place === undefined ? undefined : this.state.turns[place].items.findLast((item) => item.key === key);
  }

  add(item) {
    const { at, attempt, index, data } = this.event;
    this.turn().items.push({ at, attempt, index, step: data.stepIndex ?? null, ...item });
  }

  put(item) {
    if (this.find(item.key)) this.change(item.key, item);
    else this.add(item);
  }

  change(key, change, place = null) {
    const { items } = this.turn({}, place);
    const at = items.findLastIndex((item) => item.key === key);
    if (at >= 0) items[at] = { ...items[at], ...change };
  }

  remove(key) {
    const turn = this.turn();
    turn.items = turn.items.filter((item) => item.key !== key);
  }

  notice(tone, words) {
    this.add({ kind: "notice", key: `notice/${this.event.index}`, tone, text: words, done: true });
  }

  remember(kind, id, key) {
    this.table(kind)[id] = { turn: this.state.places[this.at()], key };
    return key;
  }

  /** The newest call with this id: a model may give an id again. */
  call(id) {
    const place = this.state.calls[id];
    return place && this.state.turns[place.turn].items.find((item) => item.key === place.key);
  }

  putCall(id, change) {
    const known = this.call(id);
    // What asks for the call of a turn that has a result already is another call with the same id.
    const again = known?.endedAt && (change.status === "drafting" || change.status === "running");
    if (known && !again) {
      this.change(known.key, change, this.state.calls[id].turn);
      return known.key;
    }
    const key = `call/${this.event.index}/${id}`;
    this.add({ kind: "call", key, callId: id, tool: "", startedAt: this.event.at, ...change });
    return this.remember("calls", id, key);
  }
}

/** A table by ids, which others have chosen: `constructor` may be one. */
function table(entries = {}) {
  return Object.assign(Object.create(null), entries);
}

function text(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function list(value) {
  return Array.isArray(value) ? value : [];
}
