// Two or more runs: which one is better and by how much, all curves, and which settings differ.

import { joinRuns, link, splitRuns, visit } from "../addresses.js";
import { useApis, useEvents, useLive } from "../api.js";
import { Comparisons } from "../comparison.js";
import { plural } from "../numbers.js";
import { Status, Table, Text, useReady } from "../parts.js";
import { COLUMNS } from "./runs.js";
import { Values } from "../settings.js";
import { Signals, chosen, useMetrics } from "../signals.js";
import { html, useMemo } from "../vendor/preact-htm.js";

const MOST = 8; // The number of colours that everybody can tell apart.

export function Page({ params, query, setQuery }) {
  const all = [...new Set([params.run, ...splitRuns(query.other)])];
  const names = all.slice(0, MOST);
  const { data: runs, error, reload } = useApis(names.map((run) => ["/api/run", { run }]));
  useReady(runs !== null || error !== null);
  const remove = (gone) => {
    const [run, ...rest] = all.filter((name) => name !== gone);
    const left = { ...query, other: joinRuns(rest) };
    visit(rest.length ? link("compare", { run }, left) : link("run", { run }));
  };
  const few = all.length > MOST &&
    ` of the ${all.length} that were chosen, because there are only ${MOST} colours`;
  const about = html`${plural(names.length, "run")}${few}; each is compared with the first`;
  return html`<main class="page page-compare">
    <div class="row toolbar">
      <h1>Compare</h1>
      <span class="muted">${about}</span>
    </div>
    <${Status} data=${runs} ...${{ error, reload }} home />
    ${runs && html`
      <${Standings} ...${{ runs, names }} onRemove=${remove} />
      ${names.slice(1).map((other) => html`<${AgainstFirst} key=${other}
        ...${{ first: names[0], other, names }} />`)}
      ${names.length > 1 && html`<${Differences} runs=${runs} names=${names} />`}
      <${Overlaid} ...${{ runs, names, query, setQuery, reload }} />`}
  </main>`;
}

/** A run's name in its colour. */
const named = (run, names) => html`<i class="swatch ink-${names.indexOf(run)}"></i
  ><a href=${link("run", { run })}><${Text} text=${run} /></a>`;

function Standings({ runs, names, onRemove }) {
  const name = { ...COLUMNS[0], align: "number", render: ({ run }) => named(run, names) };
  const remove = {
    key: "remove", title: "",
    render: ({ run }) => html`<button class="quiet" aria-label="leave out ${run}"
      onClick=${() => onRemove(run)}>×</button>`,
  };
  const columns = [name, ...COLUMNS.slice(1), remove];
  return html`<section class="panel flush" aria-label="The runs">
    <${Table} label="The runs" columns=${columns} rows=${runs} rowKey="run" />
  </section>`;
}

/** The first run is the baseline: a positive difference is in favour of the other one. */
function AgainstFirst({ first, other, names }) {
  const answer = useLive("/api/compare", { run: first, other });
  return html`<section class="panel" aria-label="${other} against ${first}">
    <h2>${named(other, names)}${" against "}${named(first, names)}</h2>
    <${Comparisons} answer=${answer} names=${[first, other]} none="They share no evaluation: runs are
      compared in the same environment with the same way of sampling." />
  </section>`;
}

function Overlaid({ runs, names, query, setQuery, reload }) {
  const all = useMemo(() => [...new Set(runs.flatMap((run) => run.names))].sort(), [runs]);
  const shown = useMemo(() => chosen(all, runs[0].labels, query.m), [all, query.m]);
  const metrics = useMetrics(names, shown);
  const refresh = () => {
    reload();
    metrics.reload();
  };
  useEvents({}, { runs: refresh, again: refresh });
  return html`<${Signals} ...${{ runs, metrics, all, names: shown, query, setQuery }}>
    <${Status} ...${metrics} />
  <//>`;
}

/** The settings in which the runs differ. */
function Differences({ runs, names }) {
  const keys = [...new Set(runs.flatMap(({ config }) => Object.keys(config)))];
  const rows = keys
    .map((key) => ({ key, values: runs.map(({ config }) => config[key]) }))
    .filter(({ values }) => new Set(values.map((value) => JSON.stringify(value))).size > 1);
  return html`<section class="panel" aria-label="Settings">
    <h2>Settings that differ</h2>
    ${rows.length === 0 && html`<p class="muted">The settings are the same.</p>`}
    ${rows.length > 0 && html`<${Values} titles=${names} rows=${rows} />`}
  </section>`;
}
