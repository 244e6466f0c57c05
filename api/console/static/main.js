// The page: where one is, what is around it, the key, the keyboard.
import { html, render, useCallback, useEffect, useRef, useState } from "./html.js";
import { hasKey, onUnauthorized, setKey } from "./api.js";
import { Dialog } from "./parts.js";
import { usePolled } from "./poll.js";
import { agents as listAgents } from "./work.js";
import { Agents } from "./views/agents.js";
import { Health } from "./views/health.js";
import { Inbox } from "./views/inbox.js";
import { Session } from "./views/session.js";
import { SessionList } from "./views/sessions.js";
import { NewSession } from "./views/start.js";

const PLACES = [
  ["sessions", "Sessions", "s"],
  ["inbox", "Inbox", "i"],
  ["agents", "Agents", "a"],
  ["health", "Health", "h"],
];
const THEMES = ["auto", "light", "dark"];
const TABS = ["chat", "timeline", "events"];

/** Where one is, from what is behind the `#` of the address. */
function placeOf(hash) {
  const [where, more = ""] = hash.replace(/^#\/?/, "").split("?");
  const [name = "", id = "", tab = ""] = where.split("/").map(decoded);
  const query = new URLSearchParams(more);
  const at = /^\d{1,15}$/.test(query.get("at") ?? "") ? Number(query.get("at")) : null;
  const known = name === "new" || PLACES.some(([each]) => each === name);
  return {
    name: known ? name : "sessions",
    id: name === "sessions" ? id : "",
    tab: TABS.includes(tab) ? tab : "chat",
    at,
    agent: query.get("agent"),
  };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function App() {
  const [place, setPlace] = useState(placeOf(location.hash));
  const [round, setRound] = useState(0);
  const [asking, setAsking] = useState(null);
  const [help, setHelp] = useState(false);
  const search = useRef(null);
  const go = useCallback((to, quietly = false) => {
    if (!quietly) location.hash = to;
    else {
      // The slider moves through hundreds of places: none of them is one to go back to.
      history.replaceState(null, "", to);
      setPlace(placeOf(to));
    }
  }, []);
  useEffect(() => {
    const moved = () => setPlace(placeOf(location.hash));
    window.addEventListener("hashchange", moved);
    return () => window.removeEventListener("hashchange", moved);
  }, []);
  // Who has closed the dialog is not asked again by each poll.
  const declined = useRef(false);
  useEffect(() => onUnauthorized(() => declined.current || setAsking({ refused: hasKey() })), []);
  const close = () => {
    declined.current = true;
    setAsking(null);
  };
  useEffect(
    () =>
      shortcuts(
        go,
        () => search.current,
        () => setHelp(true),
      ),
    [],
  );
  const enter = (key) => {
    setKey(key);
    declined.current = false;
    setAsking(null);
    setRound((now) => now + 1);
  };
  return html`
    <a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("main")?.focus();
    }}>To the content</a>
    <${Shell} key=${round} place=${place} go=${go} search=${search} askKey=${() => setAsking({ refused: false })}
      showHelp=${() => setHelp(true)} />
    ${asking && html`<${KeyDialog} asking=${asking} enter=${enter} close=${close} />`}
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

function Shell({ place, go, search, askKey, showHelp }) {
  const inbox = usePolled("v1/inputs", {
    query: { status: "open", limit: 100 },
    often: place.name === "inbox" ? 3_000 : 10_000,
    seldom: place.name === "inbox" ? 10_000 : 30_000,
  });
  const { agents, error } = useAgents();
  const asked = inbox.data?.inputs.length ?? 0;
  useEffect(() => {
    document.title = `${asked ? `(${asked}) `
      : ""}${PLACES.find(([name]) => name === place.name)?.[1] ?? "New session"} · Perdure`;
  }, [asked, place.name]);
  const inList = place.name === "sessions" || place.name === "new";
  // Who is here for the first time begins with a session of their own.
  const [empty, setEmpty] = useState(false);
  // They keep the page that they write into when a session of somebody else appears meanwhile.
  const onEmpty = useCallback((is) => is && setEmpty(true), []);
  useEffect(() => {
    if (place.id) setEmpty(false);
  }, [place.id]);
  const starts = place.name === "new" || (place.name === "sessions" && !place.id && empty);
  return html`<div class="shell ${inList ? "with-list" : ""} ${place.id || starts ? "in-session" : ""}">
    <nav class="rail" aria-label="Places">
      <a class="brand" href="#/sessions">Perdure</a>
      ${PLACES.map(
        ([
          name,
          words,
        ]) => html`<a key=${name} href="#/${name}" aria-current=${place.name === name || (name === "sessions" &&
          place.name === "new") ? "page" : null}>
        ${words}${name === "inbox" && asked > 0 && html` <span class="badge asks" aria-label="${asked} open">${asked}
          ${inbox.data.nextCursor ? "+" : ""}</span>`}</a>`,
      )}
      <span class="grow"></span>
      <${Theme} />
      <button type="button" class="quiet rail-more" onClick=${askKey}>${hasKey() ? "Change key" : "Key"}</button>
      <button type="button" class="quiet rail-more" onClick=${showHelp} aria-label="Keyboard">?</button>
    </nav>
    ${inList && html`<${SessionList} chosen=${place.id} agents=${agents} go=${go} searchRef=${search}
      onEmpty=${onEmpty} />`}
    ${
      starts
        ? html`<${NewSession} key=${place.agent} agents=${agents} go=${go} first=${place.agent} welcome=${empty} />`
        : place.name === "inbox"
          ? html`<${Inbox} inbox=${inbox} />`
          : place.name === "agents"
            ? html`<${Agents} agents=${agents} error=${error} />`
            : place.name === "health"
              ? html`<${Health} />`
              : place.id
                ? html`<${Session} key=${place.id} id=${place.id} tab=${place.tab} at=${place.at} go=${go} />`
                : html`<main class="nothing" id="main" tabindex="-1"><h1 class="visually-hidden">Sessions</h1><p
                class="empty">Choose a session, or <a href="#/new">start one</a>.</p></main>`
    }
  </div>`;
}

function useAgents() {
  const [found, setFound] = useState({ agents: [], error: null });
  useEffect(() => {
    let timer;
    let gone = false;
    const look = async () => {
      try {
        const agents = await listAgents();
        if (!gone) setFound({ agents, error: null });
      } catch (error) {
        if (gone) return;
        setFound((before) => ({ ...before, error }));
        if (![401, 403, 404].includes(error.status)) timer = setTimeout(look, 10_000);
      }
    };
    look();
    return () => {
      gone = true;
      clearTimeout(timer);
    };
  }, []);
  return found;
}

function KeyDialog({ asking, enter, close }) {
  const [key, write] = useState("");
  const [wrong, setWrong] = useState(null);
  const submit = (event) => {
    event.preventDefault();
    // A header takes these characters only; with any other the browser would refuse the request itself.
    if (!/^[\x21-\x7e]+$/.test(key.trim())) setWrong("A key has letters, digits and signs, and no spaces.");
    else enter(key);
  };
  return html`<${Dialog} label="Key" onClose=${close}>
    <form onSubmit=${submit}>
      <h2>${asking.refused ? "The API refuses this key" : "The API wants a key"}</h2>
      <p class="dim">An API key or a bearer token. It stays in this tab, and goes to this API only, as a header.</p>
      <label class="field">Key <input type="password" autocomplete="off" value=${key} autofocus
        onInput=${(event) => write(event.currentTarget.value)} /></label>
      ${wrong && html`<p class="problem" role="alert">${wrong}</p>`}
      <div class="buttons"><button type="submit" class="primary" disabled=${!key.trim()}>Use it</button>
        ${hasKey() && html`<button type="button" onClick=${() => enter("")}>Forget the key</button>`}
        <button type="button" onClick=${close}>Cancel</button></div>
    </form>
  </${Dialog}>`;
}

const KEYS = [
  ["n", "new session"],
  ["/", "search"],
  ["j, k", "next, last session"],
  ["m", "write a message"],
  ["r", "the first open request"],
  ["g s, g i, g a, g h", "sessions, inbox, agents, health"],
  ["Esc", "leave a field"],
  ["?", "this list"],
];

function Help({ close }) {
  return html`<${Dialog} label="Keyboard" onClose=${close}><h2>Keyboard</h2>
    <dl class="keys">${KEYS.map(([key, words]) => html`<dt key=${key}><kbd>${key}</kbd></dt><dd>${words}</dd>`)}</dl>
    <div class="buttons"><button type="button" autofocus onClick=${close}>Close</button></div></${Dialog}>`;
}

function shortcuts(go, searchField, help) {
  let leader = 0;
  const press = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest("input, textarea, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const led = Date.now() - leader < 1_200;
    leader = event.key === "g" ? Date.now() : 0;
    const target = led && PLACES.find(([, , key]) => key === event.key);
    const act = target
      ? () => go(`#/${target[0]}`)
      : {
          n: () => go("#/new"),
          "?": help,
          "/": () => searchField()?.focus(),
          m: () => document.querySelector(".composer textarea")?.focus(),
          r: () =>
            (
              document.querySelector(".ask.open button:not(:disabled)") ?? document.querySelector(".ask.open input")
            )?.focus(),
        }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };
  document.addEventListener("keydown", press);
  return () => document.removeEventListener("keydown", press);
}

function Theme() {
  const [theme, setTheme] = useState(() => known());
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("perdure.theme", theme);
    } catch {
      // It is the choice of this page then.
    }
  }, [theme]);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  return html`<button type="button" class="quiet rail-more" onClick=${() => setTheme(next)}
    aria-label="Colours: ${theme}. Change to ${next}.">${{ auto: "◐", light: "☀", dark: "☾" }[theme]} <span
      class="wide-only">${theme}</span></button>`;
}

function known() {
  try {
    const kept = localStorage.getItem("perdure.theme");
    return THEMES.includes(kept) ? kept : "auto";
  } catch {
    return "auto";
  }
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
