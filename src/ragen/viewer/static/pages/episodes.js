// The list of a run's episodes, which the server filters, searches, sorts and pages. Every filter is in
// the address, so that a list can be shared as a link.

import { link, visit } from "../addresses.js";
import { get, useApi, useEvents, useRetry } from "../api.js";
import { VERTICAL, useKeys, useRowKeys } from "../keys.js";
import { known, number } from "../numbers.js";
import { Chip, Pager, Status, Table, Text, useReady } from "../parts.js";
import { Earned, groupLink, Outcome, Undone } from "../turns.js";
import { html, useCallback, useEffect, useMemo, useRef, useState } from "../vendor/preact-htm.js";

const PAUSE_MS = 250; // Between the last key and the search.
const PAGE_SIZE = 50;
const AHEAD = 5; // Rows before the end at which j loads the next page.

/** The filters' names, in the address as in the API. */
const FILTERS = [
  "q", "phase", "step_from", "step_to", "env", "success", "reward_min", "reward_max",
  "stop_reason", "kept", "alarm", "group", "level_seed",
];

const ANY = ["", "any"];
const ALL = "all"; // The phase in the address that shows every phase; without one it is training.

export function Page({ params, query, setQuery }) {
  const { run } = params;
  const { sort = "step", order = "desc" } = query;
  const filters = Object.fromEntries(FILTERS.map((name) => [name, query[name]]));
  const others = JSON.stringify([run, filters]);
  const [untrained, setUntrained] = useState(null); // Filters that fit no episode of training.
  const phase = query.phase ?? (untrained === others ? ALL : "train");
  const asked = { ...filters, phase: phase === ALL ? null : phase, sort, order };
  const list = useList(run, asked);
  useEffect(() => {
    if (!query.phase && !list.stale && list.episodes?.length === 0) setUntrained(others);
  }, [list.episodes, list.stale]);
  const newest = useApi("/api/episodes", { run, ...asked, limit: 1 });
  const [at, setAt] = useState(0);
  const search = useRef(null);
  useReady(list.episodes !== null || list.error !== null);
  useEffect(() => setAt(0), [list.key]);
  const episodes = list.episodes ?? [];
  // A new step must not move the rows that somebody reads; an empty list may be loaded again.
  const onNews = () => (episodes.length ? newest.reload() : list.reload());
  useEvents({ run }, { step: onNews, end: onNews, again: onNews });
  const comparable = newest.data !== null && episodes.length > 0 && !list.stale;
  const fresh = comparable && grown(newest.data, list);
  const trouble = list.error ? [list.error, list.retry] : [newest.error, newest.reload];
  const open = (episode) => visit(link("episode", { run, id: episode.id }));
  const select = (row) => {
    setAt(row);
    if (row >= episodes.length - AHEAD) list.more();
  };
  useRowKeys("episode", {
    count: episodes.length, at, select, open: (row) => open(episodes[row]), arrows: VERTICAL,
  });
  useKeys(
    {
      o: () => episodes[at] && visit(groupLink(run, episodes[at])),
      "/": () => search.current.focus(),
    },
    { o: "open the episode's group", "/": "search in thoughts" },
  );
  const columns = useMemo(
    () => columnsOf(run, phase, list.facets), [run, phase, JSON.stringify(list.facets)],
  );
  const onSort = (key) => setQuery({
    sort: key === "step" ? null : key, order: key === sort && order === "desc" ? "asc" : null,
  });
  return html`<main class="page list page-episodes">
    <h1>Episodes</h1>
    <${Filters} ...${{ query, phase, setQuery, search }} facets=${list.facets} />
    <${Status} data=${list.episodes} error=${trouble[0]} reload=${trouble[1]} />
    ${fresh && html`<p><button onClick=${list.reload} data-testid="fresh">
      New episodes: show them</button></p>`}
    ${list.episodes !== null && html`<div class=${list.stale ? "stale" : ""}>
        <${Table} label="episodes" columns=${columns} rows=${episodes}
          selected=${at} onRow=${open} sort=${{ key: sort, descending: order === "desc" }}
          onSort=${onSort} />
        ${!episodes.length && html`<${Nothing} facets=${list.facets} />`}
        <${Pager} shown=${episodes.length} total=${list.total} more=${list.cursor !== null}
          loading=${list.loading} onMore=${list.more} />
      </div>`}
  </main>`;
}

/** Why the list is empty: no episode fits the filters, or none is recorded. */
function Nothing({ facets }) {
  if (facets.phases.length) return html`<p class="muted">No episode fits the filters.</p>`;
  return html`<p class="muted">No episode is recorded yet. A run records the episodes of each step;
    its <code>record.episodes_every</code> may be larger.</p>`;
}

/** Whether a list has grown; a search with very many hits has no total. */
function grown(now, then) {
  const counted = known(now.total) && known(then.total);
  const last = ({ facets }) => facets.steps?.[1] ?? 0;
  return counted ? now.total > then.total : last(now) > last(then);
}

/** The loaded pages of the list. A new request starts over, and late answers are dropped. */
function useList(run, asked) {
  const key = JSON.stringify([run, asked]);
  const [state, setState] = useState({ episodes: null, cursor: null, loading: true, error: null });
  const running = useRef(null);
  const load = useCallback(async (cursor) => {
    running.current?.abort();
    const controller = (running.current = new AbortController());
    setState((old) => ({ ...old, loading: true }));
    try {
      const page = await get("/api/episodes", { run, ...asked, cursor, limit: PAGE_SIZE },
        controller.signal);
      if (controller.signal.aborted) return;
      setState((old) => ({
        key, loading: false, error: null, cursor: page.next, facets: page.facets,
        total: page.total ?? (cursor ? old.total : null),
        episodes: cursor ? [...old.episodes, ...page.episodes] : page.episodes,
      }));
    } catch (error) {
      if (controller.signal.aborted) return;
      setState((old) => ({ ...old, loading: false, error, failed: cursor }));
    }
  }, [key]);
  useEffect(() => {
    load(null);
    return () => running.current?.abort();
  }, [load]);
  const more = useCallback(() => {
    if (state.cursor && !state.loading && !state.error) load(state.cursor);
  }, [state.cursor, state.loading, state.error, load]);
  const retry = useCallback(() => load(state.failed), [state.failed, load]);
  useRetry(state.error, retry);
  return { ...state, stale: state.key !== key, more, retry, reload: () => load(null) };
}

function columnsOf(run, phase, facets = { phases: [], envs: [] }) {
  const right = "right";
  return [
    {
      key: "id", title: "episode", align: right, hint: "the number that ragen branch takes",
      render: ({ id }) => html`<span class="unit">episode </span><a
        href=${link("episode", { run, id })}>${id}</a>`,
    },
    {
      key: "step", title: "step", align: right, sort: true,
      render: (row) => html`<${Undone} ...${row} /> <span class="unit">step </span>${row.step}`,
    },
    phase === ALL && facets.phases.length > 1 && { key: "phase", title: "phase" },
    facets.envs.length > 1 && {
      key: "env", title: "environment", render: ({ env }) => html`<${Text} text=${env} />`,
    },
    {
      key: "group", title: "group", align: right, hint: "group and member",
      render: (row) => html`<a href=${groupLink(run, row)}>${row.group}</a>·${row.member}`,
    },
    { key: "outcome", title: "outcome", render: (row) => html`<${Outcome} episode=${row} />` },
    {
      key: "reward", title: "reward", align: right, sort: true,
      render: ({ reward }) => html`<span class="unit">reward </span><${Earned} amount=${reward} />`,
    },
    {
      key: "penalty", title: "penalty", align: right, hint: "for invalid replies, and reward terms",
      render: ({ penalty }) => penalty !== 0 && html`<span class="unit">penalty </span
        ><${Earned} amount=${penalty} />`,
    },
    {
      key: "turns", title: "turns", align: right, sort: true,
      render: ({ num_turns: n }) => html`${n}<${Unit} of=${n === 1 ? "turn" : "turns"} />`,
    },
    {
      key: "length", title: "tokens", align: right, sort: true, hint: "sampled tokens",
      render: (row) => html`${number(row.num_tokens)}<${Unit} of="tokens" />`,
    },
    {
      key: "entropy", title: "entropy", align: right, sort: true,
      hint: "mean of −logprob over its sampled tokens, in nats",
      render: (row) => row.entropy !== null && html`${number(row.entropy)}<${Unit} of="nats" />`,
    },
    facets.phases.includes("train") && {
      key: "score", title: "filter", align: right, sort: true,
      hint: "the filter's score of its group, and whether it was kept",
      render: ({ phase, kept, group_score: score }) => phase !== "train" ? "" : html`
        <span class=${kept ? "" : "muted"}>${number(score)} ${kept ? "kept" : "dropped"}</span>`,
    },
    {
      key: "snippet", title: "thought", align: "snippet clipped",
      render: (row) => html`<a href=${link("episode", { run, id: row.id })}
        ><${Text} text=${row.snippet ?? ""} /></a>`,
    },
  ].filter(Boolean);
}

/** The unit of a number, shown where a narrow screen hides the table's header. */
const Unit = ({ of }) => html`<span class="unit"> ${of}</span>`;

/** The bar of filters; controls show what is in the address, and change only the address. */
function Filters({ query, phase, setQuery, facets, search }) {
  const [open, setOpen] = useState(false);
  const chosen = FILTERS.filter((name) => query[name]);
  const clear = () => setQuery(Object.fromEntries(FILTERS.map((name) => [name, null])));
  const common = { query, setQuery };
  const named = (names = []) => [ANY, ...names.map((name) => [name, name.replaceAll("_", " ")])];
  return html`<form class="row tight toolbar filters ${open ? "open" : ""}" role="search"
    onSubmit=${(event) => event.preventDefault()}>
    <${Typed} ...${common} name="q" type="search" field=${search}
      placeholder="words in thoughts  ( / )" />
    <button type="button" class="fold" aria-expanded=${open ? "true" : "false"}
      onClick=${() => setOpen(!open)}>filters${chosen.length > 0 && ` (${chosen.length})`}</button>
    <${Typed} ...${common} name="step_from" title="steps" placeholder=${facets?.steps?.[0] ?? ""} />
    <${Typed} ...${common} name="step_to" title="to" placeholder=${facets?.steps?.[1] ?? ""} />
    <${Choice} query=${{ phase }} setQuery=${setQuery} name="phase"
      options=${[[ALL, "any"], ...named(facets?.phases).slice(1)]} />
    ${facets?.envs?.length > 1 && html`<${Choice} ...${common} name="env"
      options=${named(facets.envs)} />`}
    <${Choice} ...${common} name="success" options=${[ANY, ["1", "yes"], ["0", "no"]]} />
    <${Choice} ...${common} name="stop_reason" title="ended by"
      options=${named(facets?.stop_reasons)} />
    <${Typed} ...${common} name="reward_min" title="reward" placeholder="from" />
    <${Typed} ...${common} name="reward_max" title="to" placeholder="to" />
    <${Choice} ...${common} name="kept" title="filter"
      options=${[ANY, ["1", "kept"], ["0", "dropped"]]} />
    <label title="only steps with an alarm"><input type="checkbox"
      checked=${query.alarm === "1"}
      onChange=${(event) => setQuery({ alarm: event.target.checked ? "1" : null })} /> alarm</label>
    ${["group", "level_seed"].filter((name) => query[name]).map((name) => html`
      <${Chip} key=${name} onRemove=${() => setQuery({ [name]: null })}>${
        name.replace("_seed", "")} ${query[name]}<//>`)}
    ${chosen.length > 0 && html`<button type="button" class="quiet" onClick=${clear}>clear all
      </button>`}
  </form>`;
}

function Choice({ query, setQuery, name, title = name, options }) {
  const value = query[name] ?? "";
  const known = options.some(([key]) => key === value) ? options : [...options, [value, value]];
  return html`<label>${title} <select value=${value} aria-label=${title}
    onChange=${(event) => setQuery({ [name]: event.target.value || null })}>
    ${known.map(([key, text]) => html`<option key=${key} value=${key}>${text}</option>`)}
  </select></label>`;
}

/** A field that takes effect when the typing pauses, and follows changes of the address. */
function Typed({ query, setQuery, name, title, type = "number", placeholder, field }) {
  const given = query[name] ?? "";
  const [text, setText] = useState(given);
  useEffect(() => setText(given), [given]);
  useEffect(() => {
    if (text === given) return undefined;
    const timer = setTimeout(() => setQuery({ [name]: text || null }), PAUSE_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return html`<label class=${type}>${title} <input ref=${field} type=${type}
    value=${text} step="any" placeholder=${placeholder} aria-label=${name.replace("_", " ")}
    onInput=${(event) => setText(event.target.value)} /></label>`;
}
