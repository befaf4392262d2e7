// The frame around all pages: it reads the address, loads the page and draws the header.

import { link, visit } from "./addresses.js";
import { start } from "./api.js";
import { activeKeys, useKeys } from "./keys.js";
import { Problem, Status, Text, useReady } from "./parts.js";
import { Run } from "./pictures.js";
import {
  html, render, useEffect, useErrorBoundary, useLayoutEffect, useRef, useState,
} from "./vendor/preact-htm.js";

/** The pages. `g` and the `key` open a page; those of a run with a key are in the header. */
const PAGES = {
  runs: { load: () => import("./pages/runs.js"), title: "List of runs", key: "l" },
  run: { load: () => import("./pages/run.js"), title: "Run", key: "r" },
  episodes: { load: () => import("./pages/episodes.js"), title: "Episodes", key: "e" },
  levels: { load: () => import("./pages/levels.js"), title: "Then and now", key: "t" },
  collapse: { load: () => import("./pages/collapse.js"), title: "Collapse", key: "c" },
  evaluations: { load: () => import("./pages/evaluations.js"), title: "Evaluations", key: "v" },
  compare: { load: () => import("./pages/compare.js"), title: "compare" },
  group: { load: () => import("./pages/group.js"), title: "group" },
  episode: { load: () => import("./pages/episode.js"), title: "episode" },
};

/** The parts of the address `#/PAGE/RUN/ID?name=value`. */
function route() {
  const [path, search = ""] = (location.hash || start).replace(/^#\/?/, "").split(/\?(.*)/s);
  const [page, run, id] = path.split("/").map(decoded);
  const pairs = new URLSearchParams(search.replaceAll("+", "%2B"));
  return { page: page || "runs", params: { run, id }, query: Object.fromEntries(pairs) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // A stray % in an address that was typed by hand.
  }
}

/** Change parameters of the address; null removes one. The browser's Back skips the change. */
function setQuery(changes) {
  const { page, params, query } = route();
  const address = link(page, params, { ...query, ...changes });
  if (!address || address === location.hash) return;
  // Relative to the page's own URL, which in a srcdoc frame is not the base of links.
  history.replaceState(null, "", new URL(address, location.href));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

function App() {
  const [{ page, params, query }, setRoute] = useState(route);
  const [help, setHelp] = useState(false);
  useLayoutEffect(() => {
    const follow = () => setRoute(route());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  const { run } = params;
  const places = Object.entries(PAGES).filter(([name, { key }]) => key && (run || name === "runs"));
  const there = places
    .map(([name, place]) => ({ ...place, name, href: link(name, { run }) }))
    .filter(({ href }) => href);
  const jumps = there.map(({ key, href }) => [`g ${key}`, () => visit(href)]);
  const lines = there.map(({ key, title }) => [`g ${key}`, title]);
  useKeys(
    { "?": () => setHelp(true), ...Object.fromEntries(jumps) },
    { "?": "these keys", ...Object.fromEntries(lines) },
  );
  return html`<${Head} places=${there} ...${{ page, run }} onHelp=${() => setHelp(true)} />
    <${Place} key=${[page, run, params.id].join("\n")} ...${{ page, params, query }} />
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}`;
}

function Head({ places, page, run, onHelp }) {
  const current = (name) => (name === page ? "page" : undefined);
  const ofRun = places.filter(({ name }) => name !== "runs");
  return html`<header class="head">
    <a class="brand" href=${link("runs")} aria-current=${current("runs")}>RAGEN</a>
    ${run && run !== "." && html`<span class="crumb clipped muted" title=${run}><${Text} text=${run} /></span>`}
    ${ofRun.length > 0 && html`<nav aria-label="Pages of the run">${ofRun.map(
      ({ name, title, href }) => html`<a href=${href} aria-current=${current(name)}>${title}</a>`)}
    </nav>`}
    <${Theme} />
    <button class="quiet" onClick=${onHelp} aria-label="Keys" title="Keys (?)">?</button>
  </header>`;
}

const THEMES = { auto: "◐", light: "☀", dark: "☾" };

/** The browser's storage; undefined if it is not allowed, as in the frame of a mail program. */
const memory = (() => {
  try {
    return window.localStorage;
  } catch {
    return undefined; // Even the access is forbidden.
  }
})();

/** The choice of colours, which is kept between visits if the browser has storage. */
function Theme() {
  const [theme, setTheme] = useState(memory?.getItem("theme") ?? "auto");
  useEffect(() => {
    document.documentElement.style.colorScheme = theme === "auto" ? "" : theme;
    memory?.setItem("theme", theme);
    dispatchEvent(new Event("theme"));
  }, [theme]);
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(theme) + 1) % names.length];
  return html`<button class="quiet" title="Colours: ${theme}" onClick=${() => setTheme(next)}
    aria-label="Colours: ${theme}; change to ${next}">${THEMES[theme]}</button>`;
}

/** A page, which is loaded on first use; an error in it does not affect the frame. */
function Place({ page, params, query }) {
  const [Page, setPage] = useState(null);
  const [problem, setProblem] = useState(null);
  const [broken] = useErrorBoundary((error) => console.error(error));
  useEffect(() => {
    delete document.body.dataset.ready;
    scrollTo(0, 0);
    const known = Object.hasOwn(PAGES, page);
    const name = known ? PAGES[page].title : page;
    const what = params.id ? `${page} ${params.id}` : name;
    const title = [page === "runs" ? null : what, params.run, "RAGEN"];
    document.title = title.filter(Boolean).join(" · ");
    if (!known) return setProblem(`There is no page “${page}”.`);
    PAGES[page].load().then(
      (module) => setPage(() => module.Page),
      (error) => setProblem(`The page “${page}” cannot be loaded: ${error.message}`),
    );
    return undefined;
  }, []);
  useReady(broken || problem);
  const message = broken ? `This page has a defect: ${broken.message}` : problem;
  if (message) {
    return html`<main class="page page-problem">
      <h1>Problem</h1>
      <${Problem} error=${{ message }} reload=${() => location.reload()} home />
    </main>`;
  }
  if (!Page) return html`<main class="page"><${Status} /></main>`;
  return html`<${Run.Provider} value=${params.run}>
    <${Page} params=${params} query=${query} setQuery=${setQuery} />
  <//>`;
}

const NAMES = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓", " ": "space" };

/** The list of keys: a dialog that takes the focus and all keys until it is closed. */
function Help({ onClose }) {
  const dialog = useRef(null);
  useKeys({ "?": onClose, Escape: onClose }, {}, { alone: true });
  useLayoutEffect(() => {
    const before = document.activeElement;
    dialog.current.showModal();
    return () => before?.focus();
  }, []);
  const outside = (event) => event.target === dialog.current && onClose();
  return html`<dialog class="panel flush help" ref=${dialog} aria-label="Keys" onClick=${outside}
    onClose=${onClose}>
    <section>
      <h2>Keys</h2>
      <dl>${activeKeys().map(([key, line]) =>
        html`<dt><kbd>${NAMES[key] ?? key}</kbd></dt><dd>${line}</dd>`)}</dl>
      <button onClick=${onClose}>Close</button>
    </section>
  </dialog>`;
}

render(html`<${App} />`, document.getElementById("app"));
