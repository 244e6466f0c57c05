// Small parts that several views have.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { sentence } from "./api.js";
import { ago, bytes, moment, pretty, shown } from "./format.js";

/** So many characters of a text are there at first: more than one reads, and less than makes a page slow. */
const CLIP = 20_000;
const CHUNK = 64_000;

/** A text of any length: the beginning of it, and more when it is asked for. */
export function Clipped({ text, most = CLIP, mono = false }) {
  const [seen, setSeen] = useState(most);
  const whole = text.length <= seen;
  const part = whole ? text : text.slice(0, seen);
  return html`<div class=${mono ? "clipped mono" : "clipped"} dir=${mono ? "ltr" : "auto"}>${shown(part)}${
    !whole &&
    html`<span class="more">…
    <button type="button" class="link" onClick=${() => setSeen(seen + CHUNK)}>Show more
    </button> <span class="dim">(${bytes(seen)} of ${bytes(text.length)})</span></span>`
  }</div>`;
}

export function Json({ value }) {
  if (value === undefined) return html`<span class="dim">–</span>`;
  return html`<${Clipped} text=${pretty(value)} most=${2_000} mono />`;
}

const STATUS = {
  starting: "starting",
  running: "running",
  waiting: "waiting",
  completed: "completed",
  failed: "failed",
  needs_attention: "needs attention",
};

export function Status({ status }) {
  return html`<span class="status ${status}">${STATUS[status] ?? status}</span>`;
}

export function Ago({ at }) {
  const [, tick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => !document.hidden && tick((now) => now + 1), 15_000);
    return () => clearInterval(timer);
  }, []);
  return html`<time datetime=${at} title=${moment(at)}>${ago(at)}</time>`;
}

/** What went wrong, where something would be. */
export function Problem({ error, what, retry }) {
  return html`<p class="problem" role="status">${sentence(error, what)}
    ${retry && html` <button type="button" class="link" onClick=${retry}>Try again</button>`}</p>`;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

export function Dialog({ label, onClose, children }) {
  const element = useRef(null);
  useLayoutEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${element} aria-label=${label} onClose=${onClose}>${children}</dialog>`;
}

/** What is folded away is not in the page until somebody unfolds it. */
export function Folded({ summary, open = false, children, ...more }) {
  const [unfolded, setUnfolded] = useState(open);
  useEffect(() => setUnfolded(open), [open]);
  return html`<details ...${more} open=${unfolded} onToggle=${(event) => setUnfolded(event.currentTarget.open)}>
    <summary>${summary}</summary>${unfolded && children}</details>`;
}

export function Tabs({ label, tabs, at }) {
  return html`<nav class="tabs" aria-label=${label}>${tabs.map(
    ([name, href, words]) => html`<a
    key=${name} href=${href} aria-current=${name === at ? "page" : null}>${words}</a>`,
  )}</nav>`;
}
