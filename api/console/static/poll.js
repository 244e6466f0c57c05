// Asking the API again and again, as seldom as possible: slower while nothing changes, never in a tab nobody looks at.
import { useCallback, useEffect, useRef, useState } from "./html.js";
import { ApiError, answer } from "./api.js";
import { pause, visible } from "./feed.js";
import { parse } from "./format.js";

const SLOWER = 1.5;

/**
 * What `where` answers, asked again every `often` to `seldom` milliseconds. `where` null: nothing is asked.
 * `seldom` 0: it is asked once, and again with `refresh`.
 */
export function usePolled(where, { query = {}, often = 4_000, seldom = 20_000 } = {}) {
  const [answered, setAnswered] = useState({ data: null, error: null });
  const wake = useRef(() => undefined);
  const asked = where === null ? null : `${where}?${JSON.stringify(query)}`;
  useEffect(() => {
    if (asked === null) return undefined;
    const stop = new AbortController();
    setAnswered((before) => ({ ...before, error: null, stale: true }));
    poll(where, query, often, seldom, stop.signal, setAnswered, wake);
    return () => stop.abort();
  }, [asked, often, seldom]);
  const refresh = useCallback(() => wake.current(), []);
  return { ...answered, refresh };
}

async function poll(where, query, often, seldom, stop, report, wake) {
  let wait = often;
  let known = null;
  while (!stop.aborted) {
    const woken = new AbortController();
    wake.current = () => {
      wait = often;
      woken.abort();
    };
    try {
      await visible(stop);
      const text = await (await answer(where, { query, signal: stop })).text();
      if (stop.aborted) return;
      if (text !== known) {
        report({ data: parse(text), error: null });
        wait = often;
      } else {
        report((before) => (before.error || before.stale ? { data: before.data, error: null } : before));
        wait = Math.min(seldom, wait * SLOWER);
      }
      known = text;
    } catch (error) {
      if (stop.aborted) return;
      report((before) => ({ data: before.data, error }));
      wait = Math.max(often, Math.min(60_000, wait * 2), (error.retryAfter ?? 0) * 1000);
      // What this key may not see, or this API does not have, does not come by asking.
      if (error instanceof ApiError && [400, 401, 403, 404].includes(error.status)) wait = 60_000;
    }
    const over = AbortSignal.any([stop, woken.signal]);
    await pause(seldom === 0 ? 2 ** 30 : wait * (0.9 + Math.random() / 5), over);
  }
}
