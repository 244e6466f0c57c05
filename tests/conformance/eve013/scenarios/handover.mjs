// Another client takes over with the serialised state.
import assert from "node:assert/strict";
import { client } from "../support.mjs";

const one = client().session();
await (await one.send("say one")).result();

const other = client().session(JSON.parse(JSON.stringify(one.state)));
const result = await (await other.send("say two")).result();

assert.equal(result.message, "two");
assert.equal(other.state.sessionId, one.state.sessionId);
