// health() and info(), which the client validates strictly; for the default agent and for one by its name.
import assert from "node:assert/strict";
import { client, host } from "../support.mjs";

const health = await client().health();
assert.equal(health.ok, true);
assert.equal(health.status, "ready");
assert.equal(typeof health.workflowId, "string");

const info = await client().info();
assert.equal(info.agent.name, "concierge");
assert.deepEqual(
  info.tools.authored.map((tool) => tool.name).sort(),
  ["add", "broken", "pay", "weather"],
);

const foreman = await client({ host: `${host}/agents/foreman` }).info();
assert.deepEqual(
  foreman.subagents.local.map((each) => [each.name, each.nodeId, each.summary.tools]),
  [["cashier", "subagents/cashier", 1]],
);

const clerk = client({ host: `${host}/agents/clerk` });
assert.equal((await clerk.info()).agent.name, "clerk");
const result = await (await clerk.session().send("say at your service")).result();
assert.equal(result.message, "at your service");
