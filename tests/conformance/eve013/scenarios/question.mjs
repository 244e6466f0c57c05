// Questions: answered by an option, in words, and by a plain message that names an option.
import assert from "node:assert/strict";
import { client, outline } from "../support.mjs";

const select = { prompt: "Which colour?", options: [{ id: "r", label: "Red" }, { id: "b", label: "Blue" }] };
const session = client().session();
const ask = async (question) => {
  const asked = await (await session.send(`call ask_question ${JSON.stringify(question)}`)).result();
  assert.equal(asked.status, "waiting");
  assert.ok(!outline(asked.events).includes("actions.requested"));
  return asked.inputRequests[0];
};
const answered = async (input) => {
  const result = await (await session.send(input)).result();
  assert.ok(!outline(result.events).includes("action.result"));
  assert.equal(outline(result.events).at(-1), "session.waiting");
  return result.message;
};

const choice = await ask(select);
assert.equal(choice.prompt, "Which colour?");
assert.equal(choice.display, "select");
assert.deepEqual(choice.options, select.options);
const chosen = await answered({ inputResponses: [{ requestId: choice.requestId, optionId: "b" }] });
assert.match(chosen, /"optionId": ?"b"/);
assert.match(chosen, /"status": ?"answered"/);

const open = await ask({ prompt: "How many?" });
assert.equal(open.display, "text");
assert.match(await answered({ inputResponses: [{ requestId: open.requestId, text: "two dozen" }] }), /two dozen/);

await ask(select);
assert.match(await answered("red"), /"optionId": ?"r"/);
