// What the model thinks comes before what it says, and apart from it.
import assert from "node:assert/strict";
import { client, types } from "../support.mjs";

const result = await (await client().session().send("think Let me see; say Forty-two")).result();

assert.equal(result.message, "Forty-two");
const seen = types(result.events);
const reasoning = result.events.filter((event) => event.type === "reasoning.appended");
assert.ok(reasoning.length > 0, "no reasoning was emitted");
assert.ok(seen.lastIndexOf("reasoning.appended") < seen.indexOf("reasoning.completed"));
assert.ok(seen.indexOf("reasoning.completed") < seen.indexOf("message.completed"));
const completed = result.events.find((event) => event.type === "reasoning.completed");
assert.equal(reasoning.at(-1).data.reasoningSoFar, completed.data.reasoning);
