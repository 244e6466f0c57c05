// What a chat window shows of approvals, also when the page is loaded again before the answer.
import assert from "node:assert/strict";
import { defaultMessageReducer, EveAgentStore } from "eve/client";
import { client, host, tools } from "../support.mjs";

const window = (kept = {}) => new EveAgentStore({ host, reducer: defaultMessageReducer(), ...kept });
const reloaded = (store) =>
  window(
    JSON.parse(JSON.stringify({ initialEvents: store.snapshot.events, initialSession: store.snapshot.session })),
  );
const states = (store) => tools(store.snapshot.data).map((part) => [part.toolName, part.state]);

const one = window();
await one.send({ message: 'call pay {"amount": 3} then say paid' });
assert.deepEqual(states(one), [["pay", "approval-requested"]]);

const two = reloaded(one);
assert.deepEqual(states(two), [["pay", "approval-requested"]]);
const [asked] = tools(two.snapshot.data);
assert.deepEqual(asked.input, { amount: 3 });
assert.equal(asked.toolMetadata.eve.inputRequest.requestId, asked.approval.id);
const seen = new Set();
two.subscribe(() => states(two).forEach(([, state]) => seen.add(state)));
await two.send({ inputResponses: [{ requestId: asked.approval.id, optionId: "approve" }] });
assert.ok(seen.has("approval-responded"));
assert.deepEqual(states(two), [["pay", "output-available"]]);
const [paid] = tools(two.snapshot.data);
assert.deepEqual(paid.output, { paid: 3 });
assert.equal(paid.approval.approved, true);

await two.send({ message: 'call pay {"amount": 4} then say never mind' });
const three = reloaded(two);
const [, again] = tools(three.snapshot.data);
await three.send({ inputResponses: [{ requestId: again.approval.id, optionId: "deny" }] });
assert.deepEqual(states(three), [
  ["pay", "output-available"],
  ["pay", "output-denied"],
]);
assert.equal(three.snapshot.status, "ready");
assert.equal(three.snapshot.error, undefined);

// A client that reads the session from its beginning, without having kept anything, sees the same.
const { sessionId, continuationToken, streamIndex } = three.snapshot.session;
const reader = client().session({ sessionId, continuationToken, streamIndex: 0 });
const reducer = defaultMessageReducer();
let data = reducer.initial();
let read = 0;
for await (const event of reader.stream({ startIndex: 0 })) {
  data = reducer.reduce(data, event);
  if (++read === streamIndex) break;
}
assert.deepEqual(
  tools(data).map((part) => [part.toolCallId, part.state]),
  tools(three.snapshot.data).map((part) => [part.toolCallId, part.state]),
);
