// A text turn: the order of its events, its result, and the state that the client keeps.
import assert from "node:assert/strict";
import { client, outline } from "../support.mjs";

const session = client().session();
const response = await session.send("say Hello there");
assert.match(response.continuationToken, /^eve:/);
const result = await response.result();

assert.equal(result.status, "waiting");
assert.equal(result.message, "Hello there");
assert.deepEqual(outline(result.events), [
  "session.started",
  "turn.started",
  "message.received",
  "step.started",
  "message.completed",
  "step.completed",
  "turn.completed",
  "session.waiting",
]);
assert.deepEqual(session.state, {
  continuationToken: response.continuationToken,
  sessionId: response.sessionId,
  streamIndex: result.events.length,
});
