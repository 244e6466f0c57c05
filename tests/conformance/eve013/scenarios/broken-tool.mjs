// A tool that raises is a failed action; the turn continues.
import assert from "node:assert/strict";
import { client } from "../support.mjs";

const result = await (await client().session().send("call broken {} then say sorry")).result();

const outcome = result.events.find((event) => event.type === "action.result");
assert.equal(outcome.data.status, "failed");
assert.equal(typeof outcome.data.error.code, "string");
assert.equal(typeof outcome.data.error.message, "string");
assert.equal(result.status, "waiting");
assert.equal(result.message, "sorry");
