// One step asks for a tool that may run and for one that has to be approved.
import assert from "node:assert/strict";
import { client, outcome, outline } from "../support.mjs";

const session = client().session();
const asked = await (
  await session.send('call add {"a": 2, "b": 3} and pay {"amount": 5} then say done')
).result();

assert.deepEqual(outline(asked.events), [
  "session.started",
  "turn.started",
  "message.received",
  "step.started",
  "actions.requested",
  "action.result",
  "step.completed",
  "input.requested",
  "turn.completed",
  "session.waiting",
]);
const requested = asked.events.find((event) => event.type === "actions.requested");
assert.deepEqual(requested.data.actions.map((action) => action.toolName), ["add"]);
assert.equal(outcome(asked.events).result.output, 5);

const [request] = asked.inputRequests;
const approved = await (
  await session.send({
    message: 'say thanks',
    inputResponses: [{ requestId: request.requestId, optionId: "approve" }],
  })
).result();

assert.deepEqual(outcome(approved.events).result.output, { paid: 5 });
assert.ok(outline(approved.events).includes("message.received"));
assert.equal(approved.message, "thanks");
