// A denial: the call is not run, the model is informed, the window shows it.
import assert from "node:assert/strict";
import { client, outcome, outline } from "../support.mjs";

const session = client().session();
const asked = await (await session.send('call pay {"amount": 3} then say a pity')).result();
const [request] = asked.inputRequests;

const denied = await (
  await session.send({ inputResponses: [{ requestId: request.requestId, optionId: "deny" }] })
).result();

const rejected = outcome(denied.events);
assert.equal(rejected.status, "rejected");
assert.equal(rejected.error.code, "TOOL_EXECUTION_DENIED");
assert.equal(rejected.result.callId, request.action.callId);
assert.equal(denied.message, "a pity");
assert.ok(!outline(denied.events).includes("actions.requested"));
assert.equal(outline(denied.events).at(-1), "session.waiting");
