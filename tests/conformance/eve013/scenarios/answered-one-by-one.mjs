// Several requests of one step are answered one by one: a chat window has one part for each, with its last state.
import assert from "node:assert/strict";
import { defaultMessageReducer, EveAgentStore } from "eve/client";
import { client, host, read, tools } from "../support.mjs";

const approve = ({ requestId }) => ({ inputResponses: [{ requestId, optionId: "approve" }] });
const states = (data) => tools(data).map((part) => [part.toolName, part.input.amount, part.state]);

class Window {
  constructor(at) {
    this.at = at;
    this.store = new EveAgentStore({ host: at, reducer: defaultMessageReducer() });
  }

  get data() {
    return this.store.snapshot.data;
  }

  // One POST; the requests that its boundary leaves open.
  async send(input) {
    const before = this.store.snapshot.events.length;
    await this.store.send(input);
    assert.equal(this.store.snapshot.status, "ready");
    const events = this.store.snapshot.events.slice(before);
    return events.filter((event) => event.type === "input.requested").flatMap((event) => event.data.requests);
  }

  // The requests that the session shows behind the boundary that this window has read.
  async shows() {
    const controller = new AbortController();
    const { session } = this.store.snapshot;
    const reader = client({ host: this.at }).session(session);
    for await (const event of reader.stream({ startIndex: session.streamIndex, signal: controller.signal }))
      if (event.type === "input.requested") {
        controller.abort();
        return event.data.requests;
      }
    throw new Error("nothing was shown");
  }

  // What a client shows that reads the session from its beginning, and has answered nothing itself.
  async reread() {
    const { session } = this.store.snapshot;
    const events = await read(client({ host: this.at }).session(session), 0, session.streamIndex - 1);
    const reducer = defaultMessageReducer();
    return events.reduce((data, event) => reducer.reduce(data, event), reducer.initial());
  }
}

// Two approvals of one step.
const own = new Window(host);
const [first, second, ...more] = await own.send({
  message: 'call pay {"amount": 1} and pay {"amount": 2} then say settled',
});
assert.deepEqual(more, []);
const left = await own.send(approve(first));
assert.deepEqual(left, [second]);
assert.deepEqual(states(own.data), [
  ["pay", 1, "output-available"],
  ["pay", 2, "approval-requested"],
]);
assert.deepEqual(states(await own.reread()), states(own.data));
assert.deepEqual(await own.send(approve(second)), []);
const paid = [
  ["pay", 1, "output-available"],
  ["pay", 2, "output-available"],
];
assert.deepEqual(states(own.data), paid);
assert.deepEqual(states(await own.reread()), paid);

// An approval of the session, and one of its child, which is shown behind the boundary.
const both = new Window(`${host}/agents/foreman`);
const child = JSON.stringify({ message: 'call pay {"amount": 4}' });
const [mine] = await both.send({ message: `call pay {"amount": 3} and cashier ${child} then say settled` });
const [its] = await both.shows();
assert.deepEqual([mine.action.input, its.action.input], [{ amount: 3 }, { amount: 4 }]);
const open = await both.send(approve(mine));
// As it was shown behind the boundary, and again as what the next one waits for.
assert.deepEqual(open, [its, its]);
assert.deepEqual(states(both.data), [
  ["eve:subagent:cashier", undefined, "input-available"],
  ["pay", 3, "output-available"],
  ["pay", 4, "approval-requested"],
]);
await both.send(approve(its));
// The result of the child's call is on the child's own stream.
assert.deepEqual(states(both.data), [
  ["eve:subagent:cashier", undefined, "output-available"],
  ["pay", 3, "output-available"],
  ["pay", 4, "approval-responded"],
]);
assert.equal(both.data.messages.at(-1).parts.findLast((part) => part.type === "text").text, "settled");
