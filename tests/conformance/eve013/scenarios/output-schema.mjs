// A result that fits a schema, asked for with the first message and with later ones; each time for that turn only.
import assert from "node:assert/strict";
import { client, outline, types } from "../support.mjs";

const city = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const session = client().session();

const first = await (
  await session.send({ message: 'call final_output {"city": "Oslo"}', outputSchema: city })
).result();
assert.deepEqual(first.data, { city: "Oslo" });
assert.equal(first.status, "waiting");
assert.deepEqual(outline(first.events).slice(-4), [
  "step.completed",
  "result.completed",
  "turn.completed",
  "session.waiting",
]);
assert.ok(!types(first.events).includes("actions.requested"), "handing over is no action");

// Were the schema still in force, an answer in words would not do.
const plain = await (await session.send("say in words")).result();
assert.equal(plain.message, "in words");
assert.equal(plain.data, undefined);
assert.deepEqual(types(plain.events).slice(-2), ["turn.completed", "session.waiting"]);

const second = await (
  await session.send({
    message: 'call add {"a": 2, "b": 3} then call final_output {"value": [5]}',
    outputSchema: { type: "array", items: { type: "integer" } },
  })
).result();
assert.deepEqual(second.data, [5]);
assert.ok(types(second.events).includes("action.result"));

// What does not fit is sent back to the model, which gets another try.
const third = await (
  await session.send({
    message: 'call final_output {"city": 7} then call final_output {"city": "Rome"}',
    outputSchema: city,
  })
).result();
assert.deepEqual(third.data, { city: "Rome" });

const last = await (await session.send("say and plain again")).result();
assert.equal(last.message, "and plain again");
assert.equal(last.data, undefined);
