// What the client itself exports to recognise what it reads, on every event of every session that the server has.
import assert from "node:assert/strict";
import {
  defaultMessageReducer,
  inputOptionSchema,
  inputRequestSchema,
  isCurrentTurnBoundaryEvent,
  isInputRequest,
  isInputResponse,
  isTurnFailureEvent,
} from "eve/client";
import { client, host, outline, read } from "./support.mjs";

// Not exported, and closed as well: what the client is compiled with.
const actions = new URL("../runtime/actions/types.js", import.meta.resolve("eve/client"));
const { runtimeActionRequestSchema } = await import(actions);

const BOUNDARIES = ["session.completed", "session.failed", "session.waiting"];
const FAILURES = ["session.failed", "step.failed", "turn.failed"];
const EXPECTED = [
  "action.result",
  "actions.requested",
  "cancel.requested",
  "input.requested",
  "input.resolved",
  "message.appended",
  "message.completed",
  "message.received",
  "reasoning.appended",
  "reasoning.completed",
  "result.completed",
  "session.completed",
  "session.failed",
  "session.started",
  "session.waiting",
  "step.completed",
  "step.failed",
  "step.started",
  "subagent.called",
  "subagent.completed",
  "turn.cancelled",
  "turn.completed",
  "turn.failed",
  "turn.started",
];

const seen = new Set();
await drive();
for (const { sessionId, agent, parent, counts } of await sessions()) {
  // The agent of a child is not served under its own name.
  const at = parent ? host : `${host}/agents/${agent}`;
  const session = client({ host: at }).session({ sessionId, streamIndex: 0 });
  check(await read(session, 0, counts.events - 1));
}
assert.deepEqual(EXPECTED.filter((type) => !seen.has(type)), []);

// Sessions that have one event of each kind, whatever the other scenarios have left.
async function drive() {
  const talk = client().session();
  const say = async (message) => (await talk.send(message)).result();
  await say("think Let me see; say Hello");
  await say('call add {"a": 1, "b": 2} and broken {} then say done');
  await say("fail 400");
  const paid = await say('call pay {"amount": 3} then say paid');
  await say({ inputResponses: [answer(paid.inputRequests[0], { optionId: "approve" })] });
  const asked = await say('call ask_question {"prompt": "Which?", "options": ["a", "b"], "allowFreeform": true}');
  await say({ inputResponses: [answer(asked.inputRequests[0], { text: "a" })] });
  await say('call pay {"amount": 4}');
  const cancelled = await client().fetch(`/eve/v1/session/${talk.state.sessionId}/cancel`, { method: "POST" });
  assert.equal(cancelled.status, 200);
  const cancelling = talk.stream();
  for await (const event of cancelling) if (isCurrentTurnBoundaryEvent(event)) break;

  const clerk = client({ host: `${host}/agents/clerk` }).session();
  const sent = await (await clerk.send('call send {"text": "hi"}')).result();
  assert.equal(sent.inputRequests[0].prompt, "Send 'hi'");
  const requested = sent.events.find((event) => event.type === "input.requested").data;
  const details = requested.details[sent.inputRequests[0].requestId];
  assert.deepEqual([details.kind, details.summary, details.onExpiry], ["approval", "Send 'hi'", "fail"]);
  assert.deepEqual(details.responders, { kind: "requester", values: [], quorum: 1 });
  assert.ok(Date.parse(details.expiresAt) > Date.now());

  const foreman = client({ host: `${host}/agents/foreman` }).session();
  const handed = JSON.stringify({ message: 'call pay {"amount": 5}' });
  const first = await (await foreman.send(`call cashier ${handed}`)).result();
  await (await foreman.send({ inputResponses: [answer(first.inputRequests[0], { optionId: "approve" })] })).result();

  for (const message of ['call final_output {"sum": 3}', "fail 400"]) await task(message);
}

async function task(message) {
  const body = { message, mode: "task", outputSchema: { type: "object" } };
  const { sessionId } = await (await client().fetch("/eve/v1/session", { method: "POST", body: json(body) })).json();
  for await (const event of client().session({ sessionId, streamIndex: 0 }).stream()) seen.add(event.type);
}

function json(value) {
  return JSON.stringify(value);
}

function answer(request, said) {
  const response = { requestId: request.requestId, ...said };
  assert.ok(isInputResponse(response));
  return response;
}

async function sessions() {
  const answer = await (await fetch(`${host}/v1/sessions?limit=200`)).json();
  assert.ok(answer.sessions, json(answer));
  return answer.sessions;
}

function check(events) {
  const reducer = defaultMessageReducer();
  let shown = reducer.initial();
  for (const event of events) {
    seen.add(event.type);
    shown = reducer.reduce(shown, event);
    assert.equal(isCurrentTurnBoundaryEvent(event), BOUNDARIES.includes(event.type), event.type);
    assert.equal(isTurnFailureEvent(event), FAILURES.includes(event.type), event.type);
    for (const request of event.data?.requests ?? []) {
      assert.ok(isInputRequest(request), json([request, inputRequestSchema.safeParse(request).error?.issues]));
      for (const option of request.options ?? []) inputOptionSchema.parse(option);
    }
    for (const action of event.data?.actions ?? []) runtimeActionRequestSchema.parse(action);
  }
  // Every turn that said or did something has a message of its own in a chat window.
  const turns = new Set(events.filter((event) => event.type === "step.started").map((event) => event.data.turnId));
  const answers = shown.messages.filter((message) => message.role === "assistant").map((message) => message.metadata.turnId);
  for (const turn of turns) assert.ok(answers.includes(turn), `${turn}: ${outline(events)}`);
}
