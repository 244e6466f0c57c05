// Goes on with a state that another client has made, and hands its own on: STATE in, one line of JSON out.
import assert from "node:assert/strict";
import { client } from "./support.mjs";

const session = client().session(JSON.parse(process.env.STATE));
const result = await (await session.send(process.env.MESSAGE)).result();

assert.equal(result.status, "waiting");
process.stdout.write(JSON.stringify({ message: result.message, events: result.events.length, state: session.state }));
