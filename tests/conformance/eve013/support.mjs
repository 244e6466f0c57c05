// What the scenarios share. The client comes from the official package and is used as it is.
import { Client } from "eve/client";

export const host = process.env.EVE_URL;
if (!host) throw new Error("EVE_URL is not set");

export function client(options = {}) {
  return new Client({ host, ...options });
}

export const types = (events) => events.map((event) => event.type);

// A turn without its deltas, whose number the model decides, and without what stands for those that are not shown.
export const outline = (events) =>
  types(events).filter(
    (type) => !type.endsWith(".appended") && !type.startsWith("reasoning") && type !== "event.excluded",
  );

// The one call's outcome of a turn.
export const outcome = (events) => events.find((event) => event.type === "action.result").data;

// Every tool part that a chat window shows, by call.
export const tools = (data) =>
  data.messages.flatMap((message) => message.parts).filter((part) => part.type === "dynamic-tool");

// Every event of a session from an index on, up to and with its last known one.
export async function read(session, from, until) {
  const seen = [];
  if (from > until) return seen;
  const controller = new AbortController();
  try {
    for await (const event of session.stream({ startIndex: from, signal: controller.signal })) {
      seen.push(event);
      if (event.meta.index === until) break;
    }
  } finally {
    controller.abort();
  }
  return seen;
}
