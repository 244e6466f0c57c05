// What the model thinks comes before what it says, and apart from it.
import assert from "node:assert/strict";
import { client, types } from "../support.mjs";

const result = await (await client().session().send("think Let me see; say Forty-two")).result();

assert.equal(result.message, "Forty-two");
const told = types(result.events);
const reasoning = result.events.filter((event) => event.type === "reasoning.appended");
assert.ok(reasoning.length > 0, "no reasoning was told");
assert.ok(told.lastIndexOf("reasoning.appended") < told.indexOf("reasoning.completed"));
assert.ok(told.indexOf("reasoning.completed") < told.indexOf("message.completed"));
const completed = result.events.find((event) => event.type === "reasoning.completed");
assert.equal(reasoning.at(-1).data.reasoningSoFar, completed.data.reasoning);
