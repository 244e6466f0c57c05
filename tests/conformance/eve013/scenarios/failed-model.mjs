// A model that refuses fails the turn and not the conversation.
import assert from "node:assert/strict";
import { client, types } from "../support.mjs";

const session = client().session();
const failed = await (await session.send("fail 400 times 99")).result();
assert.deepEqual(types(failed.events).slice(-3), ["step.failed", "turn.failed", "session.waiting"]);
assert.equal(failed.status, "waiting");

const mended = await (await session.send("say better now")).result();
assert.equal(mended.message, "better now");
