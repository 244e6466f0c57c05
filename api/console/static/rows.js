// A list of any length: only the rows that can be seen are in the page. Rows may have any height.
import { html, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";

/** So many pixels above and below are there already when one scrolls. */
const MARGIN = 400;
const AT_END = 48;

/**
 * `items` with `keyOf(item)`; `row(item, index)` makes one. `guess`: the height of a row that was never seen.
 * `stick`: stay at the end while it grows, as long as the reader is there. `handle.current` gets `{ show(index) }`.
 */
export function Rows({ items, keyOf, row, guess = 40, stick = false, label, role = "list", onEnd, handle, children }) {
  const box = useRef(null);
  const heights = useRef(new Map());
  const sticks = useRef(stick);
  const [view, setView] = useState({ top: 0, height: 800 });
  const [round, setRound] = useState(0);

  const tops = useMemo(() => {
    const made = new Float64Array(items.length + 1);
    for (let at = 0; at < items.length; at += 1)
      made[at + 1] = made[at] + (heights.current.get(keyOf(items[at])) ?? guess);
    return made;
  }, [items, round, guess]);

  const first = Math.max(0, find(tops, view.top - MARGIN));
  const last = Math.min(items.length, find(tops, view.top + view.height + MARGIN) + 1);

  const look = useCallback(() => {
    const { scrollTop, clientHeight, scrollHeight } = box.current;
    sticks.current = stick && scrollHeight - scrollTop - clientHeight < AT_END;
    setView((now) =>
      now.top === scrollTop && now.height === clientHeight ? now : { top: scrollTop, height: clientHeight },
    );
    if (onEnd && scrollHeight - scrollTop - clientHeight < MARGIN) onEnd();
  }, [stick, onEnd]);

  // After each drawing: take the heights as they are, and keep what is read where it is.
  useLayoutEffect(() => {
    const element = box.current;
    let moved = 0;
    let changed = false;
    for (const each of element.querySelectorAll(":scope > .rows-space > .rows-window > .row")) {
      const at = Number(each.dataset.index);
      const item = items[at];
      if (item === undefined) continue;
      const key = keyOf(item);
      const height = each.getBoundingClientRect().height;
      const before = heights.current.get(key) ?? guess;
      if (Math.abs(height - before) < 0.5) continue;
      heights.current.set(key, height);
      changed = true;
      if (tops[at] + before <= element.scrollTop) moved += height - before;
    }
    if (changed) setRound((now) => now + 1);
    // Who writes into a row keeps it.
    const busy = element.contains(document.activeElement) && document.activeElement.matches("input, textarea");
    if (stick && sticks.current && !busy) element.scrollTop = element.scrollHeight;
    else if (moved) element.scrollTop += moved;
  });

  useEffect(() => {
    const observer = new ResizeObserver(() => {
      if (!box.current) return;
      if (sticks.current && stick) box.current.scrollTop = box.current.scrollHeight;
      look();
      setRound((now) => now + 1);
    });
    observer.observe(box.current);
    look();
    return () => observer.disconnect();
  }, [look]);

  useEffect(() => {
    if (!handle) return;
    handle.current = {
      element: box.current,
      show(at) {
        const element = box.current;
        if (tops[at] < element.scrollTop) element.scrollTop = tops[at];
        else if (tops[at + 1] > element.scrollTop + element.clientHeight)
          element.scrollTop = tops[at + 1] - element.clientHeight;
        look();
      },
      end() {
        sticks.current = true;
        box.current.scrollTop = box.current.scrollHeight;
      },
    };
  });

  const drawn = [];
  for (let at = first; at < last; at += 1) {
    const item = items[at];
    const place = role === "list" ? { role: "listitem", "aria-setsize": items.length, "aria-posinset": at + 1 } : {};
    drawn.push(html`<div class="row" key=${keyOf(item)} data-index=${at} ...${place}>${row(item, at)}</div>`);
  }
  return html`<div class="rows" ref=${box} onScroll=${look} tabindex="0" role=${role === "list" ? "group" : role}
    aria-label=${label}>
    <div class="rows-space" role=${role === "list" ? "list" : null} style=${{ minHeight: `${tops[items.length]}px` }}>
      <div class="rows-window" role="presentation" style=${{ transform: `translateY(${tops[first] ?? 0}px)` }}>
        ${drawn}</div>
    </div>
    ${children}
  </div>`;
}

/** The index of the row at this height. */
function find(tops, height) {
  let low = 0;
  let high = tops.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (tops[middle] <= height) low = middle;
    else high = middle - 1;
  }
  return low;
}
