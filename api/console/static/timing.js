// From a session and its attempts to the lines of a timeline. Pure.

/** The lines of all turns: the turn, how long its messages have waited, each model call, each call of a tool. */
export function lines(state, attempts, deliveries) {
  const tries = bySite(attempts);
  const accepted = new Map(deliveries.map((each) => [each.deliveryId, each]));
  return state.turns
    .filter((turn) => turn.steps.length || turn.items.length)
    .flatMap((turn) => ofTurn(turn, tries, accepted));
}

function ofTurn(turn, tries, accepted) {
  const steps = turn.steps.flatMap((step) => ofStep(turn, step, tries));
  const queued = turn.deliveries
    .map((id) => accepted.get(id))
    .filter((each) => each?.startedAt)
    .map((each) => ({
      kind: "queue",
      key: `queue/${turn.number}/${each.deliveryId}`,
      label: "queued",
      from: each.acceptedAt,
      to: each.startedAt,
      status: each.status,
      attempts: [],
      delivery: each,
    }));
  const starts = [...queued, ...steps].map((line) => line.from).filter(Boolean);
  const ends = [...queued, ...steps].map((line) => line.to).filter(Boolean);
  const from = earliest([turn.startedAt, ...starts]);
  const to = turn.endedAt ? latest([turn.endedAt, ...ends]) : null;
  const usage = turn.steps.reduce((sum, step) => add(sum, step.usage), { input: 0, output: 0 });
  const cost = steps.reduce((sum, line) => sum + (line.cost ?? 0), 0);
  const head = {
    kind: "turn",
    key: `turn/${turn.number}`,
    label: `Turn ${turn.number}`,
    from: turn.startedAt,
    to: turn.endedAt,
    status: turn.status,
    attempts: [],
    usage,
    cost,
    retries: steps.reduce((sum, line) => sum + line.retries, 0),
    turn: turn.number,
    error: turn.error,
  };
  return [head, ...queued, ...steps].map((line) => ({ retries: 0, ...line, scale: { from, to, turn: turn.number } }));
}

function ofStep(turn, step, tries) {
  const site = `turn_${turn.number}/${step.number}`;
  const asked = tries.get(`${site}/model`) ?? [];
  const calls = turn.items.filter((item) => item.kind === "call" && item.step === step.number);
  const model = {
    kind: "model",
    key: `model/${site}`,
    label: "model",
    ...span(asked, step.startedAt, endOfModel(step, calls)),
    attempts: asked,
    usage: add({ input: 0, output: 0 }, step.usage),
    cost: asked.reduce((sum, each) => sum + (each.costUsdMicros ?? 0), 0),
    status: step.failure ? "failed" : step.endedAt ? "completed" : "running",
    retries: Math.max(0, asked.length - 1),
    step: step.number,
    turn: turn.number,
    error: step.failure ?? null,
  };
  return [model, ...calls.map((call) => ofCall(turn, call, tries, site))];
}

/** Without reports of attempts: the model has ended when its first call begins. */
function endOfModel(step, calls) {
  const first = calls
    .map((call) => call.at)
    .filter(Boolean)
    .sort()[0];
  return first ?? step.endedAt;
}

function ofCall(turn, call, tries, site) {
  const made = call.callId === null ? [] : (tries.get(`${site}/call/${call.callId}`) ?? []);
  const asked = call.request;
  return {
    kind: "call",
    key: `${call.key}`,
    label: call.tool || "a tool",
    status: call.status,
    // What was asked of people and never ran has taken no time itself.
    ...(asked && !made.length ? { from: null, to: null } : span(made, call.startedAt, call.endedAt)),
    attempts: made,
    retries: Math.max(0, made.length - 1),
    call,
    turn: turn.number,
    step: call.step,
    waited: asked ? { from: asked.openedAt, to: asked.closedAt ?? asked.answer?.at ?? null } : null,
    error: call.error ?? null,
  };
}

function span(attempts, from, to) {
  if (!attempts.length) return { from, to };
  const open = attempts.some((each) => !each.endedAt);
  return {
    from: earliest(attempts.map((each) => each.startedAt)),
    to: open ? null : latest(attempts.map((each) => each.endedAt)),
  };
}

function bySite(attempts) {
  const found = new Map();
  for (const each of attempts) {
    const site = `${each.turnId}/${each.stepIndex}/${each.scope}`;
    found.set(
      site,
      [...(found.get(site) ?? []), each].sort((one, other) => one.number - other.number),
    );
  }
  return found;
}

function add(sum, usage) {
  return { input: sum.input + (usage?.inputTokens ?? 0), output: sum.output + (usage?.outputTokens ?? 0) };
}

function earliest(times) {
  return times.filter(Boolean).reduce((one, other) => (other < one ? other : one), times[0]);
}

function latest(times) {
  return times.filter(Boolean).reduce((one, other) => (other > one ? other : one), times[0]);
}
