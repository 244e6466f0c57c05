// A task hands over its result and ends; one that cannot has failed. Either way the stream ends.
import assert from "node:assert/strict";
import { client, host, types } from "../support.mjs";

const outputSchema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

async function task(message) {
  const created = await fetch(`${host}/eve/v1/session`, {
    method: "POST",
    body: JSON.stringify({ message, mode: "task", outputSchema }),
  });
  assert.equal(created.status, 202);
  const { sessionId, continuationToken } = await created.json();
  const session = client().session({ sessionId, continuationToken, streamIndex: 0 });
  const events = [];
  for await (const event of session.stream()) events.push(event);
  const late = client().session({ sessionId, continuationToken, streamIndex: events.length });
  await assert.rejects(late.send("say more"), (error) => error.status === 409);
  return events;
}

const done = await task('call add {"a": 1, "b": 1} then call final_output {"city": "Oslo"}');
assert.deepEqual(types(done).slice(-3), ["result.completed", "turn.completed", "session.completed"]);
assert.deepEqual(done.find((event) => event.type === "result.completed").data.result, { city: "Oslo" });

const failed = await task("say only words");
assert.deepEqual(types(failed).slice(-3), ["step.failed", "turn.failed", "session.failed"]);
assert.equal(failed.at(-1).data.code, "OUTPUT_SCHEMA_NOT_FULFILLED");
assert.ok(!types(failed).includes("result.completed"));
