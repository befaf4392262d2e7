// All runs of the folder: what each trains, how far it is, what was learnt and what went wrong.

import { useApi, useEvents } from "../api.js";
import { useKeys, useRowKeys } from "../keys.js";
import {
  Chip, Interval, Loading, Problem, Spark, State, Table, Text, ago, joinRuns, link, moment, number,
  percent, plural, useReady, useSorted,
} from "../parts.js";
import { html, useRef, useState } from "../vendor/preact-htm.js";

const COLUMNS = [
  { key: "run", title: "Run", sort: true, render: (run) => html`<${Name} run=${run} />` },
  {
    key: "state", title: "State", sort: true,
    render: ({ state, problem }) => html`<${State} state=${state} problem=${problem} />`,
  },
  { key: "step", title: "Step", align: "right", sort: true, render: (run) => html`<${Steps} run=${run} />` },
  {
    key: "success", title: "Success", sort: (run) => run.success?.value,
    hint: "Latest evaluation with its 95 % interval, between random play (floor) and best play (ceiling)",
    render: (run) => html`<${Interval} ...${run.success ?? {}} floor=${run.random} ceiling=${run.best} />`,
  },
  {
    key: "gain", title: "Before → now", align: "right wide", sort: (run) => gain(run),
    hint: "First and latest evaluation", render: (run) => html`<${Gain} run=${run} />`,
  },
  {
    key: "spark", title: "In training", align: "wide", hint: "success of the training episodes, 0 to 1",
    render: ({ spark }) => html`<${Spark} values=${spark} min=${0} max=${1} label="success in training" />`,
  },
  {
    key: "alarms", title: "Alarms", align: "right", sort: true,
    render: (run) => html`<${Alarms} run=${run} />`,
  },
  { key: "recipe", title: "Recipe", align: "wide", sort: true, render: (run) => html`<${Recipe} run=${run} />` },
  {
    key: "updated", title: "Changed", align: "right wide", sort: true,
    render: ({ updated }) => updated && html`<span class="muted" title=${moment(updated)}>${ago(updated)}</span>`,
  },
];

function gain({ success, before }) {
  return success && before && success.step !== before.step ? success.value - before.value : null;
}

function Name({ run }) {
  return html`<div class="run-name">
    <a href=${link("run", { run: run.run })}><${Text} text=${run.run === "." ? run.name : run.run} /></a>
    <span class="muted">
      ${run.problem
        ? html`<${Text} text=${run.problem} />`
        : [run.world, run.model && shortModel(run.model), run.seed !== null && `seed ${run.seed}`]
            .filter(Boolean).join(" · ")}
    </span>
  </div>`;
}

/** The last part of a model's path or name. */
function shortModel(model) {
  return model.replace(/\/+$/, "").split("/").at(-1);
}

function Steps({ run }) {
  if (run.step === null) return "–";
  const of = run.steps && run.budget === "steps" ? run.steps : null;
  return html`<span class="steps">
    <span>${number(run.step)}${of && html`<span class="muted"> / ${number(of)}</span>`}</span>
    ${of && html`<progress max=${of} value=${run.step} aria-label="steps done"></progress>`}
  </span>`;
}

function Gain({ run }) {
  const by = gain(run);
  if (by === null) return html`<span class="muted">–</span>`;
  return html`<span class="number">
    <span class="muted">${percent(run.before.value, 0)} →</span> ${percent(run.success.value, 0)}
  </span>`;
}

function Alarms({ run }) {
  if (!run.alarms) return html`<span class="muted">0</span>`;
  const last = run.last_event ? `step ${run.last_event.step}: ${run.last_event.text}` : "";
  return html`<${Chip} kind="bad" title=${last}>▲ ${run.alarms}<//>`;
}

function Recipe({ run }) {
  return html`<div class="run-name">
    <${Text} text=${run.recipe} /><span class="muted"><${Text} text=${run.algorithm} /></span>
  </div>`;
}

/** Whether all words of the filter occur in what the row says. */
function matches(run, words) {
  const said = [run.run, run.state, run.world, run.model, run.recipe, run.algorithm, `seed ${run.seed}`]
    .join(" ").toLowerCase();
  return words.every((word) => said.includes(word));
}

export default function Runs({ query, setQuery }) {
  const { data, error, reload } = useApi("/api/runs");
  const [picked, setPicked] = useState([]);
  const search = useRef(null);
  useEvents({}, { runs: reload, again: reload });
  useReady(data !== null || error !== null);

  const words = (query.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const found = (data?.runs ?? []).filter((run) => matches(run, words));
  const { rows, sort, onSort } = useSorted(found, COLUMNS);
  const pick = (run) =>
    setPicked(picked.includes(run) ? picked.filter((other) => other !== run) : [...picked, run]);
  const compare = () => {
    if (picked.length < 2) return false;
    location.hash = link("compare", { run: picked[0] }, { other: joinRuns(picked.slice(1)) });
    return true;
  };
  const open = (row) => (location.hash = link("run", { run: rows[row].run }));
  const selected = useRowKeys(rows.length, open);
  useKeys(
    {
      "/": () => search.current?.focus(),
      x: () => rows[selected] && pick(rows[selected].run),
      c: compare,
      Escape: () => picked.length > 0 && setPicked([]),
    },
    { "/": "filter", x: "mark the run for comparison", c: "compare the marked runs" },
  );
  const box = {
    key: "pick", title: "",
    render: ({ run, state }) => state !== "unreadable" && html`<input
      type="checkbox" aria-label="compare ${run}" checked=${picked.includes(run)} onChange=${() => pick(run)} />`,
  };
  return html`<main class="page page-runs">
    <div class="row title-row">
      <h1>Runs</h1>
      ${data && html`<span class="muted"><${Text} text=${data.folder} /> · ${summary(data.runs)}</span>`}
      <span class="grow"></span>
      <input type="search" ref=${search} placeholder="Filter: world, recipe, state …  ( / )" aria-label="Filter runs"
        value=${query.q ?? ""} onInput=${(event) => setQuery({ q: event.target.value || null })} />
      <button class="primary" disabled=${picked.length < 2} onClick=${compare}>
        ${picked.length < 2 ? "Compare: mark two" : `Compare ${picked.length} runs`}
      </button>
    </div>
    ${error && html`<${Problem} error=${error} reload=${reload} />`}
    ${!data && !error && html`<${Loading} />`}
    ${data && (rows.length
      ? html`<div class="panel flush"><${Table} label="Runs" columns=${[box, ...COLUMNS]} rows=${rows}
          rowKey=${({ run }) => run} selected=${selected} onRow=${(_, row) => open(row)} sort=${sort} onSort=${onSort} /></div>`
      : html`<${Nothing} words=${words} />`)}
  </main>`;
}

function summary(runs) {
  const running = runs.filter(({ state }) => state === "running").length;
  return `${plural(runs.length, "run")}${running ? `, ${running} running` : ""}`;
}

function Nothing({ words }) {
  if (words.length) return html`<p class="muted">No run matches the filter.</p>`;
  return html`<div class="panel">
    <p>There is no run in this folder yet. Train one, and it appears here as it starts:</p>
    <pre>ragen train bandit</pre>
  </div>`;
}
