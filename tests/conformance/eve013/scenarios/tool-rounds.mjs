// One tool round, two rounds, and two calls at once.
import assert from "node:assert/strict";
import { client, outline } from "../support.mjs";

const session = client().session();
const step = (...inner) => ["step.started", ...inner, "step.completed"];
const turn = (...steps) => ["turn.started", "message.received", ...steps.flat(), "turn.completed", "session.waiting"];
const text = step("message.completed");

const one = await (await session.send('call add {"a": 2, "b": 3} then say five')).result();
assert.deepEqual(outline(one.events), [
  "session.started",
  ...turn(step("actions.requested", "action.result"), text),
]);
const requested = one.events.find((event) => event.type === "actions.requested");
const outcome = one.events.find((event) => event.type === "action.result");
assert.deepEqual(requested.data.actions[0].input, { a: 2, b: 3 });
assert.equal(requested.data.actions[0].toolName, "add");
assert.equal(outcome.data.result.callId, requested.data.actions[0].callId);
assert.equal(outcome.data.result.output, 5);
assert.equal(outcome.data.status, "completed");
assert.equal(one.message, "five");

const two = await (
  await session.send('call add {"a": 1, "b": 1} then call weather {"city": "Oslo"} then say done')
).result();
const round = step("actions.requested", "action.result");
assert.deepEqual(outline(two.events), turn(round, round, text));
assert.deepEqual(
  two.events.filter((event) => event.type === "step.started").map((event) => event.data.stepIndex),
  [0, 1, 2],
);

const both = await (
  await session.send('call add {"a": 1, "b": 2} and weather {"city": "Rome"} then say both')
).result();
assert.deepEqual(outline(both.events), turn(step("actions.requested", "action.result", "action.result"), text));
const calls = both.events.find((event) => event.type === "actions.requested").data.actions;
const results = both.events.filter((event) => event.type === "action.result");
assert.deepEqual(new Set(results.map((event) => event.data.result.callId)), new Set(calls.map((call) => call.callId)));
