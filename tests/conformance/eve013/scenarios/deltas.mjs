// Text arrives in pieces, each with the text so far; reasoning likewise.
import assert from "node:assert/strict";
import { client } from "../support.mjs";

const session = client().session();
const result = await (await session.send("drip 40 words delay 10")).result();
const deltas = result.events.filter((event) => event.type === "message.appended");

assert.ok(deltas.length > 1, "the text came in one piece");
let text = "";
for (const { data } of deltas) {
  text += data.messageDelta;
  assert.equal(data.messageSoFar, text);
}
assert.equal(result.message, text);
assert.deepEqual(
  result.events.map((event) => event.meta.index),
  result.events.map((_, index) => index),
);
assert.ok(result.events.every((event) => !Number.isNaN(Date.parse(event.meta.at))));
