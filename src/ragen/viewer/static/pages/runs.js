// All runs of the folder: what each one trains, its progress, its success and its alarms.

import { joinRuns, link, visit } from "../addresses.js";
import { useApi, useEvents } from "../api.js";
import { useKeys, useRowKeys } from "../keys.js";
import { ago, moment, number, percent, plural } from "../numbers.js";
import {
  Chip, Interval, Spark, State, Status, Table, Text, useReady, useSorted,
} from "../parts.js";
import { html, useRef, useState } from "../vendor/preact-htm.js";

/** The columns of a list of runs; the first is the name. */
export const COLUMNS = [
  { key: "run", title: "Run", sort: true, render: nameOf },
  { key: "state", title: "State", sort: true, render: State },
  { key: "step", title: "Step", align: "right", sort: true, render: stepsOf },
  {
    key: "success", title: "Success", sort: ({ success }) => success?.value, render: successOf,
    hint: "latest evaluation with its 95 % interval; the shaded range is from random to optimal play",
  },
  {
    key: "gain", title: "Before → now", align: "right wide", hint: "first and latest evaluation",
    sort: ({ gain }) => gain?.value, render: gainOf,
  },
  {
    key: "spark", title: "In training", align: "wide", render: sparkOf,
    hint: "success of the training episodes, 0 to 1",
  },
  { key: "alarms", title: "Alarms", align: "right", sort: true, render: alarmsOf },
  { key: "recipe", title: "Recipe", align: "wide", sort: true, render: recipeOf },
  { key: "updated", title: "Changed", align: "right wide", sort: true, render: changeOf },
];

const NONE = html`<span class="muted">–</span>`;

function nameOf({ run, name, problem, env, model, seed }) {
  const short = model?.replace(/\/+$/, "").split("/").at(-1);
  const facts = [env, short, seed !== null && `seed ${seed}`].filter(Boolean).join(" · ");
  return html`<div class="run-name">
    <a href=${link("run", { run })}><${Text} text=${run === "." ? name : run} /></a>
    <div class="muted small"><${Text} text=${problem ?? facts} /></div>
  </div>`;
}

function stepsOf({ step, steps, budget }) {
  if (!steps) return NONE; // Unknown, or an evaluation.
  const of = budget === "steps" ? steps : null;
  return html`${number(step)}${of && html`<span class="muted"> / ${number(of)}</span>`}
    ${of && html`<progress max=${of} value=${step} aria-label="steps done"></progress>`}`;
}

function successOf({ success, random, optimal }) {
  return html`<${Interval} ...${success ?? {}} ...${{ random, optimal }} />`;
}

function gainOf({ gain, success, before }) {
  if (!gain) return NONE;
  return html`<span class="number"><span class="muted">${percent(before.value, 0)} →</span>
    ${` ${percent(success.value, 0)}`}</span>`;
}

function sparkOf({ spark }) {
  return html`<${Spark} values=${spark} min=${0} max=${1} label="success in training" />`;
}

function alarmsOf({ alarms, last_event: last }) {
  if (!alarms) return html`<span class="muted">0</span>`;
  return html`<${Chip} kind="bad" title="latest event: ${last.text}">▲ ${alarms}<//>`;
}

function recipeOf({ recipe, algorithm }) {
  return html`<div class="run-name">
    <${Text} text=${recipe} /><div class="muted small"><${Text} text=${algorithm} /></div>
  </div>`;
}

function changeOf({ updated }) {
  return updated && html`<span class="muted" title=${moment(updated)}>${ago(updated)}</span>`;
}

/** Whether all words of the filter occur in the row. */
function matches({ run, state, env, model, recipe, algorithm, seed }, words) {
  const text = [run, state, env, model, recipe, algorithm, `seed ${seed}`].join(" ");
  return words.every((word) => text.toLowerCase().includes(word));
}

export function Page({ query, setQuery }) {
  const answer = useApi("/api/runs");
  const { data, error, reload } = answer;
  const [picked, setPicked] = useState([]);
  const [current, setCurrent] = useState(null); // The name of a run, because a live list moves.
  const search = useRef(null);
  useEvents({}, { runs: reload, again: reload });
  useReady(data !== null || error !== null);

  const words = (query.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const found = (data?.runs ?? []).filter((run) => matches(run, words));
  const { rows, sort, onSort } = useSorted(found, COLUMNS);
  const pick = ({ run, state }) => {
    if (state === "unreadable") return;
    const rest = picked.filter((other) => other !== run);
    setPicked(rest.length < picked.length ? rest : [...picked, run]);
  };
  const compare = () => {
    const [run, ...others] = picked;
    if (others.length) visit(link("compare", { run }, { other: joinRuns(others) }));
  };
  const onRow = ({ run }) => visit(link("run", { run }));
  const selected = rows.findIndex(({ run }) => run === current);
  useRowKeys("row", {
    count: rows.length, at: selected,
    select: (at) => setCurrent(rows[at].run), open: (at) => onRow(rows[at]),
  });
  useKeys(
    {
      "/": () => search.current.focus(),
      x: () => rows[selected] && pick(rows[selected]),
      c: compare,
      Escape: () => picked.length > 0 && setPicked([]),
    },
    { "/": "filter", x: "select the run for comparison", c: "compare the selected runs" },
  );
  const mark = {
    key: "pick", title: "",
    render: (row) => row.state !== "unreadable" && html`<input type="checkbox"
      aria-label="compare ${row.run}" checked=${picked.includes(row.run)}
      onChange=${() => pick(row)} />`,
  };
  return html`<main class="page list page-runs">
    <div class="row toolbar">
      <h1>Runs</h1>
      ${data && html`<span class="muted">
        <${Text} text=${data.folder} /> · ${counted(data.runs)}</span>`}
      <span class="grow"></span>
      <input type="search" ref=${search} aria-label="Filter runs" value=${query.q ?? ""}
        placeholder="environment, recipe, state …  ( / )"
        onInput=${(event) => setQuery({ q: event.target.value || null })} />
      <button class="primary" disabled=${picked.length < 2} onClick=${compare}>
        ${picked.length < 2 ? "Compare: select two" : `Compare ${picked.length} runs`}</button>
    </div>
    <${Status} ...${answer} />
    ${data && rows.length === 0 && html`<${Nothing} filtered=${words.length > 0} />`}
    ${rows.length > 0 && html`<div class="panel flush">
      <${Table} label="Runs" columns=${[mark, ...COLUMNS]} rowKey="run"
        ...${{ rows, onRow, selected, sort, onSort }} />
    </div>`}
  </main>`;
}

function counted(runs) {
  const running = runs.filter(({ state }) => state === "running").length;
  return `${plural(runs.length, "run")}${running ? `, ${running} running` : ""}`;
}

function Nothing({ filtered }) {
  if (filtered) return html`<p class="muted">No run matches the filter.</p>`;
  return html`<div class="panel">
    <p>This folder holds no run yet. Train one, and it appears here when it starts:</p>
    <pre>ragen train bandit</pre>
  </div>`;
}
