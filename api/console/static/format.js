// From values to text for people. Pure, but for the language of the browser.

const TIME = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const COUNT = new Intl.NumberFormat();

// Characters that reorder what is beside them, or that nobody sees: an approval must not read otherwise than it is.
const CONTROLS = "\\u0000-\\u0008\\u000b\\u000c\\u000e-\\u001f\\u007f-\\u009f";
const INVISIBLE = "\\u200b\\u2060-\\u2064\\ufeff\\u{e0000}-\\u{e007f}";
const REORDERING = "\\u202a-\\u202e\\u2066-\\u2069";
const MISLEADING = new RegExp(`[${CONTROLS}${INVISIBLE}${REORDERING}]`, "gu");

/** The text with such characters as what they are. */
export function shown(text) {
  return String(text).replace(MISLEADING, (each) => `⟪U+${each.codePointAt(0).toString(16).toUpperCase()}⟫`);
}

/** The value as JSON that is changed in a field: such characters are escaped, which in JSON are the same ones. */
export function editable(value) {
  const escaped = (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return pretty(value).replace(MISLEADING, (each) => each.split("").map(escaped).join(""));
}

export function oneLine(text, most = 200) {
  const said = typeof text === "object" && text !== null ? JSON.stringify(text) : String(text ?? "");
  const line = shown(said.slice(0, most * 4))
    .replace(/\s+/g, " ")
    .trim();
  return line.length > most ? `${line.slice(0, most - 1)}…` : line;
}

export function count(number) {
  return COUNT.format(number ?? 0);
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

export function bytes(number) {
  if (number < 1_000) return `${number} B`;
  if (number < 1_000_000) return `${(number / 1_000).toFixed(0)} kB`;
  return `${(number / 1_000_000).toFixed(1)} MB`;
}

export function dollars(micros) {
  return `$${(micros / 1e6).toFixed(micros < 10_000 ? 4 : 2)}`;
}

export function millis(from, to) {
  const time = Date.parse(to) - Date.parse(from);
  return Number.isFinite(time) ? Math.max(0, time) : null;
}

export function duration(ms) {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return "–";
  if (ms < 1_000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1_000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  const minutes = Math.floor(ms / 60_000);
  if (minutes < 60) return `${minutes} min ${Math.round((ms % 60_000) / 1_000)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** How long ago, in the fewest letters. */
export function ago(at, now = Date.now()) {
  const seconds = Math.max(0, (now - Date.parse(at)) / 1_000);
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 5) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3_600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 172_800) return `${Math.floor(seconds / 3_600)} h`;
  return `${Math.floor(seconds / 86_400)} d`;
}

export function clock(at) {
  const time = new Date(at);
  return Number.isNaN(time.getTime()) ? String(at ?? "") : TIME.format(time);
}

export function moment(at) {
  const time = new Date(at);
  return Number.isNaN(time.getTime()) ? String(at ?? "") : DAY.format(time);
}

/** A sentence of the API with times as people here write them, and without the ids of requests, which are beside it. */
export function sentenceOf(text) {
  const times = /\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z/g;
  return oneLine(text, 500)
    .replace(/ \(inp_[0-9a-f]+\)/g, "")
    .replace(times, (at) => moment(at))
    .replaceAll("`", "");
}

/**
 * The value of a JSON text, in which long numbers keep all their digits: a number of an account must not be shown, or
 * sent back, as another one.
 */
export function parse(text) {
  if (!JSON.rawJSON || !/\d{16}/.test(text)) return JSON.parse(text);
  const exact = (_, value, { source }) =>
    typeof value === "number" && source.replace(/\D/g, "").length > 15 ? JSON.rawJSON(source) : value;
  return JSON.parse(text, exact);
}

/** JSON with line breaks, of at most so many characters. It keeps a stack of its own: values may be nested deeply. */
export function pretty(value, most = 1_000_000) {
  if (typeof value === "string") return value;
  const out = [];
  let size = 0;
  const write = (piece) => {
    out.push(piece);
    size += piece.length;
  };
  const indent = (depth) => `\n${"  ".repeat(Math.min(depth, 40))}`;
  const open = (item, depth) => {
    const entries = Array.isArray(item) ? item.map((each) => [null, each]) : Object.entries(item);
    const [begin, end] = Array.isArray(item) ? ["[", "]"] : ["{", "}"];
    write(entries.length ? begin : begin + end);
    return entries.length ? { entries, at: 0, end, depth } : null;
  };
  const leaf = (item) => write(JSON.stringify(item) ?? "null");
  const stack = [];
  const enter = (item, depth) => {
    if (item === null || typeof item !== "object" || JSON.isRawJSON?.(item)) return leaf(item);
    const frame = open(item, depth);
    if (frame) stack.push(frame);
    return undefined;
  };
  enter(value, 1);
  while (stack.length && size < most) {
    const frame = stack.at(-1);
    if (frame.at === frame.entries.length) {
      stack.pop();
      write(indent(frame.depth - 1) + frame.end);
      continue;
    }
    const [name, item] = frame.entries[frame.at];
    write((frame.at ? "," : "") + indent(frame.depth) + (name === null ? "" : `${JSON.stringify(name)}: `));
    frame.at += 1;
    enter(item, frame.depth + 1);
  }
  return stack.length ? `${out.join("")} …` : out.join("");
}

/** The link, if it is one that may be followed: what a server says may be anything. */
export function safeLink(url) {
  try {
    return ["http:", "https:"].includes(new URL(url).protocol) ? url : null;
  } catch {
    return null;
  }
}
