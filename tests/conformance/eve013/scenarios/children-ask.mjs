// Two children of a session ask for approval: each POST leads to one boundary, and the client is never one behind.
import assert from "node:assert/strict";
import { defaultMessageReducer, EveAgentStore, isCurrentTurnBoundaryEvent, isInputRequest } from "eve/client";
import { client, host, outline, read, tools } from "../support.mjs";

const foreman = client({ host: `${host}/agents/foreman` });
const task = (amount) => `cashier ${JSON.stringify({ message: `call pay {"amount": ${amount}}` })}`;
const approve = (request) => ({ requestId: request.requestId, optionId: "approve" });
const of = (events, type) => events.filter((event) => event.type === type).map((event) => event.data);

class Reader {
  session = foreman.session();
  events = [];
  requests = new Map();

  // One POST, and what its result has.
  async send(input) {
    const result = await (await this.session.send(input)).result();
    assert.deepEqual(result.events.filter(isCurrentTurnBoundaryEvent), [result.events.at(-1)]);
    this.events.push(...result.events);
    this.keep(result.inputRequests);
    return result;
  }

  keep(requests) {
    for (const request of requests) {
      assert.ok(isInputRequest(request), JSON.stringify(request));
      this.requests.set(request.requestId, request);
    }
  }

  // Read on behind the boundary until so many requests were shown. The client's own place stays where it is.
  async wait(count) {
    const controller = new AbortController();
    const { streamIndex } = this.session.state;
    const other = foreman.session(this.session.state);
    const seen = other.stream({ startIndex: streamIndex, signal: controller.signal });
    while (this.requests.size < count) this.keep((await seen.next()).value.data.requests ?? []);
    controller.abort();
  }

  // What the client has read is the whole stream, and the next message is answered by its own turn.
  async ends() {
    assert.equal((await this.send("say next")).message, "next");
    assert.equal(this.session.state.streamIndex, this.events.length);
    const whole = await read(foreman.session(this.session.state), 0, this.events.length - 1);
    assert.deepEqual(whole, this.events);
    const called = of(whole, "subagent.called").map((data) => data.callId);
    const results = of(whole, "action.result");
    assert.deepEqual(results.map((data) => data.result.callId), called);
    assert.deepEqual(
      results.map((data) => data.result.output),
      ['Results: {"paid":3}', 'Results: {"paid":4}'],
    );
    assert.deepEqual(results.map((data) => data.status), ["completed", "completed"]);
  }
}

// Each request is answered as soon as it is known.
const one = new Reader();
const begun = await one.send(`call ${task(3)} and ${task(4)} then say settled`);
assert.deepEqual(outline(begun.events).slice(-3), ["input.requested", "turn.completed", "session.waiting"]);
const [first] = one.requests.values();
const half = await one.send({ inputResponses: [approve(first)] });
assert.equal(half.status, "waiting");
assert.equal(half.message, undefined);
assert.deepEqual([...one.requests.values()].map((request) => request.action.toolName), ["pay", "pay"]);
const second = [...one.requests.values()].find((request) => request.requestId !== first.requestId);
const whole = await one.send({ inputResponses: [approve(second)] });
assert.equal(whole.message, "settled");
assert.deepEqual(of(one.events, "turn.started").map((data) => data.turnId), ["turn_0", "turn_1", "turn_2"]);
await one.ends();

// Both are answered in one POST.
const both = new Reader();
await both.send(`call ${task(3)} and ${task(4)} then say settled`);
await both.wait(2);
const settled = await both.send({ inputResponses: [...both.requests.values()].map(approve) });
assert.equal(settled.message, "settled");
await both.ends();

// A chat window shows who was asked, and what its child asks.
const store = new EveAgentStore({ host: `${host}/agents/foreman`, reducer: defaultMessageReducer() });
const states = () => tools(store.snapshot.data).map((part) => [part.toolName, part.state]);
await store.send({ message: `call ${task(3)} then say settled` });
assert.deepEqual(states(), [
  ["eve:subagent:cashier", "input-available"],
  ["pay", "approval-requested"],
]);
const asked = tools(store.snapshot.data).at(-1);
assert.deepEqual(asked.input, { amount: 3 });
await store.send({ inputResponses: [{ requestId: asked.approval.id, optionId: "approve" }] });
assert.deepEqual(states(), [
  ["eve:subagent:cashier", "output-available"],
  ["pay", "approval-responded"],
]);
await store.send({ message: "say next" });
assert.equal(store.snapshot.data.messages.at(-1).parts.findLast((part) => part.type === "text").text, "next");
assert.equal(store.snapshot.status, "ready");
