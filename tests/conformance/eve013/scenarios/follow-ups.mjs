// Follow-ups stay in one session, each with one boundary, and the client's cursor fits every time.
import assert from "node:assert/strict";
import { client, outline, read } from "../support.mjs";

const session = client().session();
const first = await (await session.send("say one")).result();
const id = session.state.sessionId;

for (const word of ["two", "three", "four"]) {
  const result = await (await session.send(`say ${word}`)).result();
  assert.equal(result.message, word);
  assert.equal(session.state.sessionId, id);
  assert.deepEqual(outline(result.events), outline(first.events).slice(1));
}

const whole = await read(session, 0, session.state.streamIndex - 1);
assert.equal(whole.filter((event) => event.type === "session.waiting").length, 4);
assert.deepEqual(
  whole.filter((event) => event.type === "turn.started").map((event) => event.data.turnId),
  ["turn_0", "turn_1", "turn_2", "turn_3"],
);
