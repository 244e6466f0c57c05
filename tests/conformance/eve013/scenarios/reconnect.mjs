// From every index on a reader gets exactly the rest, also while a turn runs and in the middle of a message.
import assert from "node:assert/strict";
import { client, read } from "../support.mjs";

const session = client().session();
await (await session.send('call add {"a": 1, "b": 1} then drip 10 words delay 5')).result();
const last = session.state.streamIndex - 1;
const state = session.state;
const whole = await read(client().session(state), 0, last);
assert.equal(whole.length, last + 1);

for (let index = 0; index <= last; index += 1) {
  assert.deepEqual(await read(client().session(state), index, last), whole.slice(index));
}

// Live: readers start at any index while the next turn is being emitted.
const response = await session.send("drip 30 words delay 10");
const until = last + 12;
const readers = await Promise.all(
  Array.from({ length: 12 }, (_, offset) => read(client().session(state), last + 1 + offset, until)),
);
for (const [offset, events] of readers.entries()) assert.deepEqual(events, readers[0].slice(offset));
await response.result();
