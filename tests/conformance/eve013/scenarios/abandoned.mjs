// A client that goes away in mid-turn does not stop the turn; another one reads it to its end.
import assert from "node:assert/strict";
import { client, read } from "../support.mjs";

const session = client().session();
const controller = new AbortController();
const response = await session.send({ message: "drip 40 words delay 20", signal: controller.signal });
for await (const event of response) {
  if (event.type === "message.appended") break;
}
controller.abort();

const other = client().session({ sessionId: response.sessionId, streamIndex: 0 });
const events = [];
for await (const event of other.stream()) {
  events.push(event);
  if (event.type === "session.waiting") break;
}
assert.equal(events.findLast((event) => event.type === "message.completed").data.message.trim().split(" ").length, 40);
assert.deepEqual(await read(other, 0, events.length - 1), events);
