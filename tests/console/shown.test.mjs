// What the console makes of values and times: timelines, and texts for people.
import assert from "node:assert/strict";
import { test } from "node:test";
import { EMPTY, fold } from "../../api/console/static/fold.js";
import { ago, duration, oneLine, pretty, safeLink, sentenceOf, shown } from "../../api/console/static/format.js";
import { lines } from "../../api/console/static/timing.js";

const second = (number) => new Date(Date.UTC(2026, 0, 1) + number * 1000).toISOString();
const event = (index, type, data, at, deliveryIds) => ({
  type,
  data,
  meta: { index, at: second(at), attempt: 1, deliveryIds },
});
const step = { sequence: 0, turnId: "turn_0", stepIndex: 0 };

const STATE = fold(EMPTY, [
  event(0, "turn.started", { sequence: 0, turnId: "turn_0" }, 10, ["dlv_1"]),
  event(1, "step.started", step, 10),
  event(2, "actions.requested", { ...step, actions: [{ callId: "c", toolName: "look", input: {} }] }, 14),
  event(3, "action.result", { ...step, result: { callId: "c", toolName: "look", output: 1 }, status: "completed" }, 20),
  event(4, "step.completed", { ...step, usage: { inputTokens: 7, outputTokens: 3 } }, 20),
  event(5, "turn.completed", { sequence: 0, turnId: "turn_0" }, 21),
]);
const attempt = (scope, number, from, to, more = {}) => ({
  attemptId: `att_${scope}_${number}`,
  turnId: "turn_0",
  stepIndex: 0,
  scope,
  number,
  worker: "w",
  status: "succeeded",
  startedAt: second(from),
  endedAt: to === null ? null : second(to),
  ...more,
});
const seconds = (line) => (Date.parse(line.to) - Date.parse(line.from)) / 1000;

test("a timeline has the wait, the model and the call, each with its own time", () => {
  const attempts = [
    attempt("model", 2, 12, 14, { costUsdMicros: 40 }),
    attempt("model", 1, 10, 11, { status: "superseded", costUsdMicros: 2 }),
    attempt("call/c", 1, 15, 19),
  ];
  const delivery = {
    deliveryId: "dlv_1",
    kind: "message",
    status: "settled",
    acceptedAt: second(8),
    startedAt: second(10),
  };

  const [turn, queued, model, call] = lines(STATE, attempts, [delivery]);

  assert.deepEqual(
    [turn, queued, model, call].map((line) => [line.kind, seconds(line)]),
    [
      ["turn", 11],
      ["queue", 2],
      ["model", 4],
      ["call", 4],
    ],
  );
  assert.deepEqual(
    [model.retries, model.attempts.map((each) => each.number), model.cost, turn.cost],
    [1, [1, 2], 42, 42],
  );
  assert.deepEqual(turn.usage, { input: 7, output: 3 });
  assert.equal(turn.scale.from, second(8));
});

test("without reports of attempts the events say when", () => {
  const [, model, call] = lines(STATE, [], []);

  assert.deepEqual([seconds(model), seconds(call)], [4, 6]);
});

test("what still runs has no end", () => {
  const running = lines(STATE, [attempt("call/c", 1, 15, null)], []).find((line) => line.kind === "call");

  assert.equal(running.to, null);
});

test("characters that reorder text, or that nobody sees, are shown as what they are", () => {
  assert.equal(shown("a\u200bb\u0000\u001b[1m\u{e0041}"), "a⟪U+200B⟫b⟪U+0⟫⟪U+1B⟫[1m⟪U+E0041⟫");
  assert.equal(shown("tab\tline\r\nمرحبا\u200f 👩‍🚀"), "tab\tline\r\nمرحبا\u200f 👩‍🚀");
  assert.equal(shown("a\u202eb\u2066c"), "a⟪U+202E⟫b⟪U+2066⟫c");
  assert.equal(oneLine("a\n\n b\u202e"), "a b⟪U+202E⟫");
});

test("values of any depth and width are written, and cut", () => {
  let deep = 1;
  for (let depth = 0; depth < 10_000; depth += 1) deep = depth % 2 ? [deep] : { a: deep };

  assert.deepEqual(JSON.parse(pretty({ a: [1, "x", null, { b: {} }], c: [] })), {
    a: [1, "x", null, { b: {} }],
    c: [],
  });
  assert.ok(pretty(deep, 3_000).length < 4_000);
  assert.ok(
    pretty(
      Array.from({ length: 1e6 }, () => 1),
      3_000,
    ).length < 4_000,
  );
  assert.equal(pretty(undefined), "null");
});

test("only links of the web are links", () => {
  assert.deepEqual(["https://a.example/x", "javascript:alert(1)", "nonsense", null].map(safeLink), [
    "https://a.example/x",
    null,
    null,
    null,
  ]);
});

test("times and sentences are short", () => {
  assert.deepEqual([5, 1_500, 61_000, 7_200_000, null].map(duration), [
    "5 ms",
    "1.50 s",
    "1 min 1 s",
    "2 h 0 min",
    "–",
  ]);
  assert.equal(ago(second(0), Date.parse(second(90))), "1 min");
  assert.doesNotMatch(sentenceOf("Approval of `pay` (inp_0a1b), since 2026-01-01T00:00:00.000Z."), /inp_|`|T00:00/);
});
