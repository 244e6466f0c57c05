// An approval: the turn parks, the answer carries the call out in the next turn.
import assert from "node:assert/strict";
import { client, outcome, outline } from "../support.mjs";

const session = client().session();
const asked = await (await session.send('call pay {"amount": 3} then say paid')).result();

assert.equal(asked.status, "waiting");
assert.deepEqual(outline(asked.events), [
  "session.started",
  "turn.started",
  "message.received",
  "step.started",
  "step.completed",
  "input.requested",
  "turn.completed",
  "session.waiting",
]);
const [request] = asked.inputRequests;
assert.equal(asked.inputRequests.length, 1);
assert.equal(request.prompt, "Approve tool call: pay");
assert.equal(request.display, "confirmation");
assert.equal(request.allowFreeform, false);
assert.deepEqual(request.options, [
  { id: "approve", label: "Yes" },
  { id: "deny", label: "No" },
]);
assert.equal(request.action.kind, "tool-call");
assert.equal(request.action.toolName, "pay");
assert.deepEqual(request.action.input, { amount: 3 });

const response = await session.send({ inputResponses: [{ requestId: request.requestId, optionId: "approve" }] });
const approved = await response.result();

const kinds = outline(approved.events).filter((type) => !type.startsWith("input."));
assert.equal(kinds[0], "turn.started");
assert.deepEqual([...kinds].sort(), [
  "action.result",
  "message.completed",
  "session.waiting",
  "step.completed",
  "step.started",
  "turn.completed",
  "turn.started",
]);
assert.equal(kinds.at(-1), "session.waiting");
const paid = outcome(approved.events);
assert.equal(paid.status, "completed");
assert.equal(paid.turnId, "turn_1");
assert.equal(paid.result.callId, request.action.callId);
assert.deepEqual(paid.result.output, { paid: 3 });
assert.equal(approved.message, "paid");

// The session continues as before.
assert.equal((await (await session.send("say next")).result()).message, "next");
