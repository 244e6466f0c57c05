// The store behind useEveAgent, with its reducer: what a chat window shows.
import assert from "node:assert/strict";
import { defaultMessageReducer, EveAgentStore } from "eve/client";
import { host } from "../support.mjs";

const store = new EveAgentStore({ host, reducer: defaultMessageReducer() });
const statuses = [];
const texts = new Set();
store.subscribe(() => {
  const { status, data } = store.snapshot;
  if (statuses.at(-1) !== status) statuses.push(status);
  for (const part of data.messages.flatMap((message) => (message.role === "assistant" ? message.parts : [])))
    if (part.type === "text") texts.add(part.text);
});

await store.send({ message: "drip 20 words delay 10" });
assert.deepEqual(statuses, ["submitted", "streaming", "ready"]);
assert.equal(store.snapshot.error, undefined);
const [asked, answered] = store.snapshot.data.messages;
assert.equal(store.snapshot.data.messages.length, 2);
assert.deepEqual([asked.id, answered.id], ["turn_0:user", "turn_0:assistant"]);
assert.equal(asked.parts[0].text, "drip 20 words delay 10");
assert.equal(answered.metadata.status, "complete");
const full = answered.parts.find((part) => part.type === "text").text;
assert.ok(texts.size > 2, "the text did not grow");
for (const text of texts) assert.ok(full.startsWith(text));

await store.send({ message: 'call add {"a": 2, "b": 2} and broken {} then say four' });
const last = store.snapshot.data.messages.at(-1);
const tools = last.parts.filter((part) => part.type === "dynamic-tool");
assert.deepEqual(
  tools.map((part) => [part.toolName, part.state]).sort(),
  [
    ["add", "output-available"],
    ["broken", "output-error"],
  ],
);
assert.equal(tools.find((part) => part.toolName === "add").output, 4);
assert.equal(last.parts.findLast((part) => part.type === "text").text, "four");
assert.equal(store.snapshot.status, "ready");

// A page that is loaded again shows the same from the events it kept.
const again = new EveAgentStore({
  host,
  reducer: defaultMessageReducer(),
  initialEvents: store.snapshot.events,
  initialSession: store.snapshot.session,
});
assert.deepEqual(
  again.snapshot.data.messages.map((message) => message.id),
  store.snapshot.data.messages.map((message) => message.id),
);
await again.send({ message: "say still here" });
assert.equal(again.snapshot.data.messages.at(-1).parts.findLast((part) => part.type === "text").text, "still here");
