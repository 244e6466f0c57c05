// A task ends with its turn: the stream closes, and so does the session.
import assert from "node:assert/strict";
import { client, host, types } from "../support.mjs";

const created = await fetch(`${host}/eve/v1/session`, {
  method: "POST",
  body: JSON.stringify({ message: "say done", mode: "task" }),
});
assert.equal(created.status, 202);
const { sessionId, continuationToken } = await created.json();
const session = client().session({ sessionId, continuationToken, streamIndex: 0 });

const events = [];
for await (const event of session.stream()) events.push(event);

assert.deepEqual(types(events).slice(-2), ["turn.completed", "session.completed"]);
const late = client().session({ sessionId, continuationToken, streamIndex: events.length });
await assert.rejects(late.send("say more"), (error) => error.status === 409);
