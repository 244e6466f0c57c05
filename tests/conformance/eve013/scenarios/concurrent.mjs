// Many sessions at once do not mix.
import assert from "node:assert/strict";
import { client } from "../support.mjs";

const talks = Array.from({ length: 12 }, async (_, number) => {
  const session = client().session();
  for (const turn of [0, 1]) {
    const words = `session ${number} turn ${turn}`;
    const result = await (await session.send(`say ${words}`)).result();
    assert.equal(result.message, words);
  }
  return session.state.sessionId;
});

assert.equal(new Set(await Promise.all(talks)).size, 12);
