// What the console does to sessions. Each request that changes something has a key: repeated, it counts once.
import { ApiError, answer, get, path, post } from "./api.js";

export const MODES = {
  followup: "after this turn",
  collect: "together with what waits",
  steer: "into this turn",
  interrupt: "instead of this turn",
};

export function newKey() {
  // Pages of another machine without TLS have no randomUUID.
  if (crypto.randomUUID) return crypto.randomUUID();
  return [...crypto.getRandomValues(new Uint8Array(16))].map((each) => each.toString(16).padStart(2, "0")).join("");
}

export function start(agent, message, key) {
  const headers = { "idempotency-key": key };
  return post(path`agents/${agent}/eve/v1/session`, { message }, { headers });
}

/** Deliver to a session of the caller: a dispatch needs no continuation token, so no secret comes here. */
export function say(agent, sessionId, message, mode, key) {
  return post("v1/dispatches", { agent, id: sessionId, input: message, dispatchId: key, ...(mode ? { mode } : {}) });
}

export function cancel(sessionId) {
  return post(path`eve/v1/session/${sessionId}/cancel`, {});
}

/** Take back a message that no turn has read. */
export async function withdraw(deliveryId) {
  await answer(path`v1/deliveries/${deliveryId}`, { method: "DELETE" });
}

export function requeue(sessionId, turnId) {
  return post(path`v1/dead-letters/${sessionId}/${turnId}/requeue`, {});
}

/** Answer a request; what another one has answered before is the result, and not an error. */
export async function respond(requestId, answer, key) {
  const where = path`v1/inputs/${requestId}`;
  try {
    const given = await post(where, answer, { headers: { "idempotency-key": key } });
    return { first: true, ...given };
  } catch (error) {
    if (!(error instanceof ApiError) || !["input_closed", "input_expired"].includes(error.code)) throw error;
    const known = await get(where).catch(() => ({}));
    return { first: false, status: error.body.status, optionId: error.body.optionId, ...known };
  }
}

/** The agents of the API; of an older one its default agent alone. */
export async function agents() {
  try {
    return (await get("v1/agents")).agents;
  } catch (error) {
    if (!error.noRoute) throw error;
    const { agent, tools, subagents } = await get("eve/v1/info");
    return [
      {
        name: agent.name,
        description: agent.description,
        model: agent.model.id,
        alone: true,
        tools: tools.available.map((tool) => ({ ...tool, approval: tool.requiresApproval })),
        subagents: subagents.local.map((each) => each.name),
      },
    ];
  }
}
