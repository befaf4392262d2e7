// The frame around all pages: it reads the address, loads the page and draws the header.

import { link } from "./addresses.js";
import { shared, start } from "./api.js";
import { activeKeys, useKeys } from "./keys.js";
import { Loading, Problem, Text, useReady, useStored } from "./parts.js";
import {
  html, render, useEffect, useErrorBoundary, useLayoutEffect, useRef, useState,
} from "./vendor/preact-htm.js";

const PAGES = {
  runs: () => import("./pages/runs.js"),
  run: () => import("./pages/run.js"),
  compare: () => import("./pages/compare.js"),
  episodes: () => import("./pages/episodes.js"),
  group: () => import("./pages/group.js"),
  episode: () => import("./pages/episode.js"),
  levels: () => import("./pages/levels.js"),
  collapse: () => import("./pages/collapse.js"),
  evaluations: () => import("./pages/evaluations.js"),
};

// The pages of a run in the header, each with the second key of `g …`.
const PLACES = [
  ["run", "Run", "r"],
  ["episodes", "Episodes", "e"],
  ["levels", "Then and now", "t"],
  ["collapse", "Collapse", "c"],
  ["evaluations", "Evaluations", "v"],
];

/** The parts of the address `#/PAGE/RUN/ID?name=value`. */
function route() {
  const [path, search = ""] = (location.hash || start).replace(/^#\/?/, "").split(/\?(.*)/s);
  const [page, run, id] = path.split("/").map(decoded);
  return { page: page || "runs", params: { run, id }, query: queryOf(search) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // A stray % in an address that was typed by hand.
  }
}

function queryOf(search) {
  return Object.fromEntries(new URLSearchParams(search.replaceAll("+", "%2B")));
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
  const go = (name) => () => {
    if (name !== "runs" && !params.run) return false;
    const address = link(name, name === "runs" ? {} : { run: params.run });
    if (address) location.hash = address;
    return Boolean(address);
  };
  const jumps = Object.fromEntries(PLACES.map(([name, , key]) => [`g ${key}`, go(name)]));
  const there = params.run ? PLACES.filter(([name]) => link(name, params)) : [];
  const lines = there.map(([, title, key]) => [`g ${key}`, title]);
  useKeys(
    { "?": () => setHelp(true), "g l": go("runs"), ...jumps },
    { "?": "these keys", ...(!shared && { "g l": "List of runs" }), ...Object.fromEntries(lines) },
  );
  return html`<${Head} page=${page} run=${params.run} onHelp=${() => setHelp(true)} />
    <${Place} key=${[page, params.run, params.id].join("\n")} ...${{ page, params, query }} />
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}`;
}

function Head({ page, run, onHelp }) {
  const current = (name) => (name === page ? "page" : undefined);
  const places = run ? PLACES.filter(([name]) => link(name, { run })) : [];
  return html`<header class="head">
    <a class="brand" href=${link("runs")} aria-current=${current("runs")}>RAGEN</a>
    ${run && html`<span class="crumb" title=${run}><${Text} text=${run} /></span>`}
    ${places.length > 0 &&
    html`<nav aria-label="Pages of the run">
      ${places.map(
        ([name, title]) =>
          html`<a href=${link(name, { run })} aria-current=${current(name)}>${title}</a>`,
      )}
    </nav>`}
    <span class="grow"></span>
    <${Theme} />
    <button class="quiet" onClick=${onHelp} aria-label="Keys" title="Keys (?)">?</button>
  </header>`;
}

const THEMES = { auto: "◐", light: "☀", dark: "☾" };

function Theme() {
  const [theme, setTheme] = useStored("theme", "auto");
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    dispatchEvent(new Event("theme"));
  }, [theme]);
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(theme) + 1) % names.length];
  return html`<button
    class="quiet" title="Colours: ${theme}" aria-label="Colours: ${theme}; change to ${next}"
    onClick=${() => setTheme(next)}
  >
    ${THEMES[theme]}
  </button>`;
}

/** A page, which is loaded on first use; an error in it does not affect the frame. */
function Place({ page, params, query }) {
  const [Page, setPage] = useState(null);
  const [problem, setProblem] = useState(null);
  const [broken] = useErrorBoundary((error) => console.error(error));
  useEffect(() => {
    delete document.body.dataset.ready;
    scrollTo(0, 0);
    const place = PLACES.find(([name]) => name === page);
    const what = params.id ? `${page} ${params.id}` : (place?.[1] ?? page);
    document.title = [page === "runs" ? null : what, params.run, "RAGEN"]
      .filter(Boolean)
      .join(" · ");
    if (!Object.hasOwn(PAGES, page)) return setProblem(`There is no page “${page}”.`);
    PAGES[page]().then(
      (module) => setPage(() => module.default),
      (error) => setProblem(`The page “${page}” cannot be loaded: ${error.message}`),
    );
    return undefined;
  }, []);
  useReady(broken || problem);
  const trouble = broken ? `This page has a defect: ${broken.message}` : problem;
  if (trouble) {
    return html`<main class="page page-problem">
      <h1>Problem</h1>
      <${Problem} error=${trouble} reload=${() => location.reload()} />
      ${!shared && html`<p><a href=${link("runs")}>All runs</a></p>`}
    </main>`;
  }
  if (!Page) return html`<main class="page"><${Loading} /></main>`;
  return html`<${Page} params=${params} query=${query} setQuery=${setQuery} />`;
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
  return html`<dialog class="help" ref=${dialog} aria-label="Keys" onClick=${outside}
    onClose=${onClose}>
    <section>
      <h2>Keys</h2>
      <dl>
        ${activeKeys().map(
          ([key, line]) =>
            html`<dt><kbd>${NAMES[key] ?? key}</kbd></dt>
              <dd>${line}</dd>`,
        )}
      </dl>
      <button onClick=${onClose}>Close</button>
    </section>
  </dialog>`;
}

render(html`<${App} />`, document.getElementById("app"));
