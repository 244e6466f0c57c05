// Two approvals in one step, answered in one post; then two answered one by one.
import assert from "node:assert/strict";
import { client, outline } from "../support.mjs";

const results = (turn) => turn.events.filter((event) => event.type === "action.result").map((event) => event.data);

const session = client().session();
const ask = async () => {
  const asked = await (await session.send('call pay {"amount": 1} and pay {"amount": 2} then say settled')).result();
  assert.equal(outline(asked.events).filter((type) => type === "input.requested").length, 1);
  assert.equal(asked.inputRequests.length, 2);
  return asked.inputRequests;
};

const [first, second] = await ask();
const both = await (
  await session.send({
    inputResponses: [
      { requestId: first.requestId, optionId: "approve" },
      { requestId: second.requestId, optionId: "deny" },
    ],
  })
).result();
assert.deepEqual(
  Object.fromEntries(results(both).map((data) => [data.result.callId, data.status])),
  { [first.action.callId]: "completed", [second.action.callId]: "rejected" },
);
assert.equal(both.message, "settled");

const [third, fourth] = await ask();
const half = await (
  await session.send({ inputResponses: [{ requestId: third.requestId, optionId: "approve" }] })
).result();
assert.equal(half.status, "waiting");
assert.equal(half.message, undefined);
assert.deepEqual(results(half).map((data) => data.result.callId), [third.action.callId]);
const whole = await (
  await session.send({ inputResponses: [{ requestId: fourth.requestId, optionId: "approve" }] })
).result();
assert.deepEqual(results(whole).map((data) => data.result.output), [{ paid: 2 }]);
assert.equal(whole.message, "settled");
