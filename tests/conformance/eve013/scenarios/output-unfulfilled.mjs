// A result that never fits fails the turn, and not the conversation.
import assert from "node:assert/strict";
import { client, types } from "../support.mjs";

const outputSchema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const wrong = 'call final_output {"city": 7}';

for (const message of ["say only words", [wrong, wrong, wrong, wrong].join(" then ")]) {
  const session = client().session();

  const failed = await (await session.send({ message, outputSchema })).result();

  assert.deepEqual(types(failed.events).slice(-3), ["step.failed", "turn.failed", "session.waiting"]);
  assert.equal(failed.data, undefined);
  assert.equal(failed.status, "waiting");
  const why = failed.events.find((event) => event.type === "turn.failed").data;
  assert.equal(why.code, "OUTPUT_SCHEMA_NOT_FULFILLED");
  assert.equal(why.message, "The agent could not produce a result matching the requested schema.");

  const mended = await (await session.send("say better now")).result();
  assert.equal(mended.message, "better now");
}
