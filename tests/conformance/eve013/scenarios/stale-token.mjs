// A token that no session waits on is an error, and never a new session.
import assert from "node:assert/strict";
import { ClientError } from "eve/client";
import { client } from "../support.mjs";

const session = client().session();
await (await session.send("say hello")).result();
const { sessionId, streamIndex } = session.state;

const stale = client().session({ sessionId, streamIndex, continuationToken: "eve:stale" });
await assert.rejects(stale.send("say anything"), (error) => {
  assert.ok(error instanceof ClientError);
  assert.equal(error.status, 409);
  assert.equal(JSON.parse(error.body).code, "session_not_active");
  assert.match(error.message, /No session waits/);
  return true;
});

const foreign = client().session({ ...session.state, sessionId: "ses_unknown" });
await assert.rejects(foreign.send("say anything"), (error) => error instanceof ClientError && error.status === 404);

const wrong = client({ auth: { bearer: "not a key" } }).session();
await assert.rejects(wrong.send("say anything"), (error) => error instanceof ClientError && error.status === 401);
