// The reducer of the console: events in, what a session looks like out.
import assert from "node:assert/strict";
import { test } from "node:test";
import { EMPTY, PIECES, fold, openRequests } from "../../api/console/static/fold.js";

const at = (index) => new Date(Date.UTC(2026, 0, 1) + index * 1000).toISOString();

/** Events with dense indexes; `[type, data, meta]` each. */
function log(...given) {
  return given.map(([type, data = {}, meta = {}], index) => ({
    type,
    data,
    meta: { at: at(index), index, attempt: 1, ...meta },
  }));
}

const turn = (number = 0) => ({ sequence: number, turnId: `turn_${number}` });
const step = (number = 0, of = 0) => ({ ...turn(of), stepIndex: number });
const approval = (id = "inp_1", callId = "c1") => ({
  requests: [
    {
      requestId: id,
      prompt: "Pay 5?",
      action: { kind: "tool-call", callId, toolName: "pay", input: { amount: 5 } },
      display: "confirmation",
      allowFreeform: false,
      options: [
        { id: "approve", label: "Yes" },
        { id: "deny", label: "No" },
      ],
    },
  ],
  details: { [id]: { kind: "approval", responders: { kind: "requester", values: [], quorum: 1 } } },
});

const TALK = log(
  ["session.started", { runtime: { agentName: "desk", modelId: "demo" } }],
  ["turn.started", turn(), { deliveryIds: ["dlv_1"] }],
  ["message.received", { ...turn(), message: "hello" }, { deliveryIds: ["dlv_1"] }],
  ["step.started", step()],
  ["reasoning.appended", { ...step(), reasoningDelta: "hm", reasoningSoFar: "hm" }],
  ["reasoning.completed", { ...step(), reasoning: "hmm" }],
  ["message.appended", { ...step(), messageDelta: "He", messageSoFar: "He" }],
  ["message.appended", { ...step(), messageDelta: "llo", messageSoFar: "Hello" }],
  ["action.input.appended", { ...step(), callId: "c0", toolName: "roll", inputTextDelta: "{}" }],
  ["message.completed", { ...step(), message: "Hello", finishReason: "tool-calls" }],
  ["actions.requested", { ...step(), actions: [{ kind: "tool-call", callId: "c0", toolName: "roll", input: {} }] }],
  [
    "action.result",
    { ...step(), result: { kind: "tool-result", callId: "c0", toolName: "roll", output: [4] }, status: "completed" },
  ],
  ["step.completed", { ...step(), finishReason: "tool-calls", usage: { inputTokens: 10, outputTokens: 4 } }],
  ["step.started", step(1)],
  ["step.completed", { ...step(1), finishReason: "tool-calls", usage: { inputTokens: 20, outputTokens: 6 } }],
  ["input.requested", { ...step(1), ...approval() }],
  ["turn.completed", turn()],
  ["session.waiting", { wait: "next-user-message" }],
  [
    "input.resolved",
    {
      ...step(1),
      requestId: "inp_1",
      callId: "c1",
      status: "answered",
      answer: { optionId: "approve", principalId: "ada" },
    },
  ],
  ["turn.started", turn(1), { deliveryIds: ["dlv_2"] }],
  [
    "action.result",
    {
      ...step(0, 1),
      result: { kind: "tool-result", callId: "c1", toolName: "pay", output: "paid" },
      status: "completed",
    },
  ],
  ["turn.completed", turn(1)],
  ["session.waiting", {}],
);

const items = (state) => state.turns.flatMap((each) => each.items);
const said = (state, kind) =>
  items(state)
    .filter((item) => item.kind === kind)
    .map((item) => item.text);

test("a conversation looks like what was said and done", () => {
  const state = fold(EMPTY, TALK);

  assert.deepEqual(
    items(state).map((item) => [item.kind, item.status ?? null]),
    [
      ["message", null],
      ["reasoning", null],
      ["reply", null],
      ["call", "completed"],
      ["call", "completed"],
    ],
  );
  assert.deepEqual(said(state, "reply"), ["Hello"]);
  assert.deepEqual(said(state, "reasoning"), ["hmm"]);
  assert.deepEqual(
    [state.status, state.agent, state.usage.inputTokens, { ...state.read }],
    ["waiting", "desk", 30, { dlv_1: "read", dlv_2: "read" }],
  );
  assert.equal(items(state)[4].request.answer.principalId, "ada");
  assert.deepEqual(
    state.turns.map((each) => each.status),
    ["completed", "completed"],
  );
});

test("events in any portions, and again and again, count once", () => {
  const whole = fold(EMPTY, TALK);
  for (let seed = 1; seed <= 60; seed += 1) {
    let number = seed;
    const random = (most) => {
      number = (number * 48271) % 2147483647;
      return number % most;
    };
    let state = EMPTY;
    for (let next = 0; next < TALK.length;) {
      // A reader that was cut off begins a little before what it has.
      const from = Math.max(0, next - random(4));
      const to = next + 1 + random(4);
      state = fold(state, TALK.slice(from, to));
      next = to;
    }
    assert.deepEqual(state, whole);
  }
});

test("without the pieces of what is complete the result is the same", () => {
  const without = fold(
    EMPTY,
    TALK.filter((event) => !PIECES.includes(event.type)),
  );
  const shape = (state) => items(state).map((item) => [item.kind, item.text, item.status, item.output]);

  assert.deepEqual(shape(without), shape(fold(EMPTY, TALK)));
});

test("a state is never changed", () => {
  let state = EMPTY;
  for (const event of TALK) {
    const before = JSON.stringify(state);
    const next = fold(state, [event]);
    assert.equal(JSON.stringify(state), before);
    state = next;
  }
});

test("a turn that did not change is the same object", () => {
  const before = fold(EMPTY, TALK.slice(0, 19));
  const after = fold(before, TALK.slice(19, 20));

  assert.equal(after.turns[0], before.turns[0]);
});

test("what a superseded attempt has streamed is gone, and text is not doubled", () => {
  const state = fold(
    EMPTY,
    log(
      ["turn.started", turn()],
      ["step.started", step()],
      ["reasoning.appended", { ...step(), reasoningDelta: "old", reasoningSoFar: "old" }],
      ["message.appended", { ...step(), messageDelta: "Hel", messageSoFar: "Hel" }],
      ["action.input.appended", { ...step(), callId: "x", toolName: "roll", inputTextDelta: "{" }],
      ["step.superseded", { ...step(), attempt: 2, phase: "provider_started", decision: "retract" }, { attempt: 2 }],
      ["message.appended", { ...step(), messageDelta: "Hello", messageSoFar: "Hello" }, { attempt: 2 }],
      ["message.completed", { ...step(), message: "Hello again" }, { attempt: 2 }],
    ),
  );

  assert.deepEqual(
    items(state).map((item) => [item.kind, item.text]),
    [["reply", "Hello again"]],
  );
  assert.equal(state.turns[0].steps[0].retracted, 1);
});

test("a recovered step goes on with the text that is there", () => {
  const state = fold(
    EMPTY,
    log(
      ["turn.started", turn()],
      ["step.started", step()],
      ["message.appended", { ...step(), messageDelta: "Hel", messageSoFar: "Hel" }],
      ["step.recovered", { ...step(), attempt: 2, decision: "continue" }, { attempt: 2 }],
      ["message.appended", { ...step(), messageDelta: "lo", messageSoFar: "Hello" }, { attempt: 2 }],
    ),
  );

  assert.deepEqual(said(state, "reply"), ["Hello"]);
});

test("a request that is shown again is one request", () => {
  const state = fold(
    EMPTY,
    log(
      ["turn.started", turn()],
      ["step.started", step()],
      ["input.requested", { ...step(), ...approval() }],
      ["turn.completed", turn()],
      ["session.waiting"],
      ["turn.started", turn(1)],
      ["input.requested", { ...step(), ...approval() }],
      ["turn.completed", turn(1)],
      ["session.waiting"],
    ),
  );

  assert.equal(items(state).length, 1);
  assert.deepEqual(
    openRequests(state).map((each) => each.requestId),
    ["inp_1"],
  );
});

test("two children may call by the same id", () => {
  const of = (id, child) => {
    const asked = approval(id, "demo_1_0");
    asked.details[id].sessionId = child;
    return asked;
  };
  const state = fold(
    EMPTY,
    log(
      ["turn.started", turn()],
      ["step.started", step()],
      [
        "actions.requested",
        { ...step(), actions: [{ kind: "subagent-call", callId: "demo_1_0", subagentName: "billing", input: {} }] },
      ],
      ["input.requested", { ...step(), ...of("inp_1", "ses_a") }],
      ["input.requested", { ...step(), ...of("inp_2", "ses_b") }],
      ["input.resolved", { ...step(), requestId: "inp_1", status: "answered", answer: { optionId: "deny" } }],
    ),
  );

  assert.deepEqual(
    items(state).map((item) => [item.tool, item.status]),
    [
      ["billing", "running"],
      ["pay", "answered"],
      ["pay", "asking"],
    ],
  );
});

test("a call id that comes again is another call", () => {
  const call = (number) => [
    ["turn.started", turn(number)],
    ["step.started", step(0, number)],
    ["actions.requested", { ...step(0, number), actions: [{ callId: "same", toolName: "roll", input: number }] }],
    [
      "action.result",
      { ...step(0, number), result: { callId: "same", toolName: "roll", output: number }, status: "completed" },
    ],
    ["turn.completed", turn(number)],
  ];
  const state = fold(EMPTY, log(...call(0), ...call(1)));

  assert.deepEqual(
    items(state).map((item) => [item.input, item.output]),
    [
      [0, 0],
      [1, 1],
    ],
  );
});

test("a cancelled turn leaves nothing that looks alive", () => {
  const state = fold(
    EMPTY,
    log(
      ["turn.started", turn()],
      ["step.started", step()],
      ["message.appended", { ...step(), messageDelta: "Hel", messageSoFar: "Hel" }],
      ["action.input.appended", { ...step(), callId: "x", toolName: "roll", inputTextDelta: "{" }],
      ["cancel.requested", { turnId: "turn_0" }],
      ["turn.cancelled", turn()],
      ["session.waiting"],
    ),
  );

  assert.deepEqual(
    items(state).map((item) => [item.kind, item.done]),
    [
      ["reply", true],
      ["notice", true],
    ],
  );
  assert.deepEqual([state.turns[0].status, state.cancelling], ["cancelled", null]);
});

test("attention comes and goes, and an end stays", () => {
  const before = fold(
    EMPTY,
    log(["session.started"], ["session.attention", { code: "AGENT_GONE", message: "no worker" }]),
  );
  const after = fold(before, [
    { type: "session.recovered", data: { code: "AGENT_GONE" }, meta: { at: at(9), index: 9 } },
  ]);
  const ended = fold(after, [
    { type: "session.failed", data: { code: "SESSION_IDLE", message: "idle" }, meta: { at: at(10), index: 10 } },
  ]);

  assert.equal(before.attention.code, "AGENT_GONE");
  assert.equal(after.attention, null);
  assert.deepEqual([ended.status, ended.error.code], ["failed", "SESSION_IDLE"]);
});

test("what is unknown, redacted or odd does no harm", () => {
  const odd = log(
    ["session.invented", { a: 1 }],
    ["something.else"],
    ["message.received"],
    ["message.completed", { ...step(), message: null }],
    ["message.appended", { ...step(), messageDelta: { x: 1 } }],
    ["actions.requested", { ...step(), actions: "no" }],
    ["action.result", step()],
    ["input.requested", { ...step(), requests: null }],
    ["input.resolved", { requestId: "__proto__" }],
    ["input.resolved", { requestId: "constructor" }],
    ["action.result", { ...step(), result: { callId: "constructor" } }],
    ["event.excluded"],
    ["event.expired"],
    ["turn.started", { sequence: "x" }],
  );
  const bad = [null, {}, { type: "turn.started" }, { type: "turn.started", meta: { index: "7" } }];

  const state = fold(fold(EMPTY, odd), bad);

  assert.equal(state.last, odd.length - 1);
});

test("a history that begins in the middle is shown from there", () => {
  const state = fold(EMPTY, TALK.slice(9));

  assert.deepEqual(
    items(state).map((item) => item.kind),
    ["reply", "call", "call"],
  );
});

test("ten thousand events are folded in less than a second", () => {
  const many = [];
  const add = (type, data, index = many.length) => many.push({ type, data, meta: { at: at(index), index } });
  for (let number = 0; many.length < 10_000; number += 1) {
    add("turn.started", turn(number));
    add("message.received", { ...turn(number), message: "hello" });
    add("step.started", step(0, number));
    add("actions.requested", { ...step(0, number), actions: [{ callId: `c${number}`, toolName: "roll", input: {} }] });
    add("action.result", {
      ...step(0, number),
      result: { callId: `c${number}`, toolName: "roll", output: 1 },
      status: "completed",
    });
    add("message.completed", { ...step(0, number), message: "done" });
    add("turn.completed", turn(number));
    add("session.waiting", {});
  }
  const began = performance.now();
  const state = fold(EMPTY, many);

  assert.ok(performance.now() - began < 1000);
  assert.equal(state.last, many.at(-1).meta.index);
});
