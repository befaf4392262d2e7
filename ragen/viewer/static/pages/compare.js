// Two runs or more beside each other: who is better and by how much, all curves, what differs.

import { useApis, useEvents } from "../api.js";
import { Pairs } from "../details.js";
import { useKeys } from "../keys.js";
import {
  Interval, Loading, Problem, Spark, State, Table, Text, joinRuns, link, number, percent, points,
  splitRuns, useReady,
} from "../parts.js";
import { Found, Signals, Toolbar, axisOf, chosen, smoothingOf, useMetrics } from "../signals.js";
import { html, useMemo, useRef } from "../vendor/preact-htm.js";

const MOST = 8; // As many as there are colours that all can tell apart.

export default function Compare({ params, query, setQuery }) {
  const others = splitRuns(query.other).filter((other) => other !== params.run);
  const names = [params.run, ...new Set(others)].slice(0, MOST);
  const { data: runs, error, reload } = useApis(names.map((run) => ["/api/run", { run }]));
  const whole = runs?.length === names.length ? runs : null;
  useReady(whole !== null || error !== null);
  const remove = (gone) => {
    const [run, ...rest] = names.filter((name) => name !== gone);
    location.hash = rest.length ? link("compare", { run }, { ...query, other: joinRuns(rest) }) : link("run", { run });
  };
  return html`<main class="page page-compare">
    <div class="row title-row">
      <h1>Compare</h1>
      <span class="muted">${number(names.length)} runs; the others are set against the first</span>
    </div>
    ${error && html`<${Problem} error=${error} reload=${reload}><p><a href=${link("runs")}>All runs</a></p><//>`}
    ${!whole && !error && html`<${Loading} />`}
    ${whole && html`<${Standings} runs=${whole} onRemove=${remove} />`}
    ${whole && names.length > 1 && html`<${Contests} names=${names} />`}
    ${whole && html`<${Overlaid} runs=${whole} ...${{ names, query, setQuery, reload }} />`}
    ${names.length > 1 && html`<${Settings} names=${names} />`}
  </main>`;
}

function Standings({ runs, onRemove }) {
  const columns = [
    {
      key: "run", title: "Run", align: "run",
      render: ({ run }, index) => html`<i class="swatch fill-${index}"></i><a href=${link("run", { run })}><${Text} text=${run} /></a>`,
    },
    { key: "state", title: "State", align: "wide", render: (run) => html`<${State} ...${run} />` },
    { key: "step", title: "Step", align: "right", render: ({ step }) => number(step) },
    {
      key: "success", title: "Success",
      render: (run) => html`<${Interval} ...${run.success ?? {}} floor=${run.random} ceiling=${run.best} />`,
    },
    { key: "before", title: "Before", align: "right wide", render: ({ before }) => percent(before?.value) },
    { key: "spark", title: "In training", align: "wide", render: ({ spark }) => html`<${Spark} values=${spark} min=${0} max=${1} />` },
    { key: "alarms", title: "Alarms", align: "right", render: ({ alarms }) => html`<span class=${alarms ? "bad" : "muted"}>${alarms}</span>` },
    { key: "what", title: "World, recipe", align: "wide muted", render: ({ world, recipe, algorithm }) => html`<${Text} text="${world}, ${recipe}, ${algorithm}" />` },
    { key: "gone", title: "", render: ({ run }) => html`<button class="quiet" aria-label="leave out ${run}" title="leave out" onClick=${() => onRemove(run)}>×</button>` },
  ];
  return html`<section class="panel flush" aria-label="The runs">
    <${Table} label="The runs" columns=${columns} rows=${runs} rowKey=${({ run }) => run} />
  </section>`;
}

/** Each other run against the first, on the worlds and ways of sampling that both were judged in. */
function Contests({ names }) {
  const [first, ...others] = names;
  const { data, error, reload } = useApis(others.map((other) => ["/api/compare", { run: first, other }]));
  const rows = (data ?? []).flatMap(({ contests }, i) => contests.map((contest) => ({ ...contest, other: others[i], index: i + 1 })));
  const reach = Math.max(0.1, ...rows.flatMap(({ difference }) => [-difference.low, difference.high]));
  const columns = [
    { key: "other", title: "Run", align: "run", render: ({ other, index }) => html`<i class="swatch fill-${index}"></i><${Text} text=${other} />` },
    { key: "how", title: "Contest", align: "run", render: ({ world, how }) => html`<${Text} text="${world}, ${how}" />` },
    {
      key: "difference", title: "Difference, points",
      render: ({ difference }) => html`<${Interval} ...${difference} min=${-reach} max=${reach} zero format=${points} />`,
    },
    { key: "verdict", title: "", render: (contest) => html`<${Verdict} ...${contest} />` },
    { key: "b", title: "Its success", render: ({ b }) => html`<${Interval} ...${b} />` },
    { key: "a", title: "The first's", render: ({ a }) => html`<${Interval} ...${a} />` },
  ];
  return html`<section class="panel" aria-label="Contests">
    <h2>Against <i class="swatch fill-0"></i><${Text} text=${first} /></h2>
    ${error && html`<${Problem} error=${error} reload=${reload} />`}
    ${!data && !error && html`<${Loading} />`}
    ${data && (rows.length
      ? html`<${Table} label="Contests" columns=${columns} rows=${rows} rowKey=${({ other, world, how }) => [other, world, how].join("\n")} />`
      : html`<p class="muted">They share no evaluation: runs are set against each other on the same world and way of sampling.</p>`)}
  </section>`;
}

function Verdict({ difference, mcnemar_p: p, smallest_detectable: smallest, levels, note }) {
  const [low, high] = [points(difference.low, 0), points(difference.high, 0)];
  const [kind, word] = difference.low > 0 ? ["good", "better"] : difference.high < 0 ? ["bad", "worse"] : ["muted", "no difference is shown"];
  const facts = [
    note,
    levels !== null && levels !== undefined && `${number(levels)} levels`,
    p !== null && p !== undefined && `McNemar p = ${number(p)}`,
    smallest !== null && smallest !== undefined && `could have shown ${points(smallest).slice(1)} points`,
  ];
  return html`<div class="verdict">
    <span class=${kind}><b>${word}</b> [${low}, ${high}]</span>
    <span class="muted"><${Text} text=${facts.filter(Boolean).join(" · ")} /></span>
  </div>`;
}

function Overlaid({ runs, names, query, setQuery, reload }) {
  const all = useMemo(() => [...new Set(runs.flatMap((run) => run.names))].sort(), [runs]);
  const shown = useMemo(() => chosen(all, runs[0].labels, query.m), [all, query.m]);
  const { answers, error, reload: again } = useMetrics(names, shown);
  const search = useRef(null);
  const refresh = () => {
    reload();
    again();
  };
  useEvents({}, { runs: refresh, again: refresh });
  useKeys({ "/": () => search.current?.focus() }, { "/": "find a metric" });
  return html`<section aria-label="Signals">
    <${Toolbar} names=${all} ...${{ query, setQuery, search }} />
    ${error && html`<${Problem} error=${error} reload=${again} />`}
    <${Signals} ...${{ runs, answers }} names=${shown} axis=${axisOf(query)} smoothing=${smoothingOf(query)}
      large=${query.large} onLarge=${(name) => setQuery({ large: name })} />
    <${Found} names=${shown} sought=${query.m} />
  </section>`;
}

/** The settings in which any of the runs differs from the first. */
function Settings({ names }) {
  const [first, ...others] = names;
  const { data, error, reload } = useApis(others.map((other) => ["/api/difference", { run: first, other }]));
  const rows = useMemo(() => merged(data ?? []), [data]);
  if (error) return html`<${Problem} error=${error} reload=${reload} />`;
  if (!data) return html`<${Loading} />`;
  return html`<section class="panel" aria-label="Settings">
    <h2>Settings that differ</h2>
    ${rows.length ? html`<${Pairs} titles=${names} rows=${rows} />` : html`<p class="muted">Their settings are the same.</p>`}
  </section>`;
}

/** One row a key: the first run's value in `a`, the others' in `b`, `c`, …; equal ones repeat `a`. */
export function merged(answers) {
  const rows = new Map();
  answers.forEach(({ differences }) => {
    for (const { key, a } of differences) {
      const same = answers.map((_, i) => [field(i), a]);
      if (!rows.has(key)) rows.set(key, { key, a, ...Object.fromEntries(same) });
    }
  });
  answers.forEach(({ differences }, i) => {
    for (const { key, b } of differences) rows.get(key)[field(i)] = b;
  });
  return [...rows.values()];
}

const field = (index) => "bcdefgh"[index];
