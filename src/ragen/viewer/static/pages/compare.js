// Two runs or more beside each other: who is better and by how much, all curves, what differs.

import { joinRuns, link, splitRuns } from "../addresses.js";
import { useApis, useEvents } from "../api.js";
import { useKeys } from "../keys.js";
import { number, percent, plural, points } from "../numbers.js";
import { Interval, Loading, Problem, Spark, State, Table, Text, useReady } from "../parts.js";
import { Values } from "../settings.js";
import { Found, Signals, Toolbar, axisOf, chosen, smoothingOf, useMetrics } from "../signals.js";
import { html, useMemo, useRef } from "../vendor/preact-htm.js";

const MOST = 8; // As many as there are colours that all can tell apart.

export default function Compare({ params, query, setQuery }) {
  const all = [...new Set([params.run, ...splitRuns(query.other)])];
  const names = all.slice(0, MOST);
  const { data: runs, error, reload } = useApis(names.map((run) => ["/api/run", { run }]));
  useReady(runs !== null || error !== null);
  const remove = (gone) => {
    const [run, ...rest] = all.filter((name) => name !== gone);
    const left = { ...query, other: joinRuns(rest) };
    location.hash = rest.length ? link("compare", { run }, left) : link("run", { run });
  };
  return html`<main class="page page-compare">
    <div class="row title-row">
      <h1>Compare</h1>
      <span class="muted"
        >${plural(names.length, "run")}${all.length > MOST &&
        ` of the ${all.length} that were chosen: colours tell no more apart`}; the others are set
        against the first</span
      >
    </div>
    ${error &&
    html`<${Problem} error=${error} reload=${reload}>
      <p><a href=${link("runs")}>All runs</a></p>
    <//>`}
    ${!runs && !error && html`<${Loading} />`}
    ${runs && html`<${Standings} runs=${runs} onRemove=${remove} />`}
    ${runs && names.length > 1 && html`<${Contests} names=${names} />`}
    ${runs && html`<${Overlaid} ...${{ runs, names, query, setQuery, reload }} />`}
    ${runs && names.length > 1 && html`<${Differences} runs=${runs} names=${names} />`}
  </main>`;
}

/** A run's name in its colour. */
const named = (run, index, address) => html`<i class="swatch fill-${index}"></i
  ><a href=${address}><${Text} text=${run} /></a>`;

function Standings({ runs, onRemove }) {
  const columns = [
    {
      key: "run",
      title: "Run",
      align: "run",
      render: ({ run }, index) => named(run, index, link("run", { run })),
    },
    { key: "state", title: "State", align: "wide", render: (run) => html`<${State} ...${run} />` },
    { key: "step", title: "Step", align: "right", render: ({ step }) => number(step) },
    {
      key: "success",
      title: "Success",
      render: ({ success, random, optimal }) =>
        html`<${Interval} ...${success ?? {}} random=${random} optimal=${optimal} />`,
    },
    {
      key: "before",
      title: "Before",
      align: "right wide",
      render: ({ before }) => percent(before?.value),
    },
    {
      key: "spark",
      title: "In training",
      align: "wide",
      render: ({ spark }) => html`<${Spark} values=${spark} min=${0} max=${1} />`,
    },
    {
      key: "alarms",
      title: "Alarms",
      align: "right",
      render: ({ alarms }) => html`<span class=${alarms ? "bad" : "muted"}>${alarms}</span>`,
    },
    {
      key: "what",
      title: "World, recipe",
      align: "wide muted",
      render: ({ env, recipe, algorithm }) =>
        html`<${Text} text=${[env, recipe, algorithm].join(", ")} />`,
    },
    {
      key: "gone",
      title: "",
      render: ({ run }) =>
        html`<button class="quiet" aria-label="leave out ${run}" onClick=${() => onRemove(run)}>
          ×
        </button>`,
    },
  ];
  return html`<section class="panel flush" aria-label="The runs">
    <${Table} label="The runs" columns=${columns} rows=${runs} rowKey=${({ run }) => run} />
  </section>`;
}

/** Each other run against the first, on the environments and ways of sampling that both played. */
function Contests({ names }) {
  const [first, ...others] = names;
  const asked = others.map((other) => ["/api/compare", { run: first, other }]);
  const { data, error, reload } = useApis(asked);
  useEvents({}, { runs: reload, again: reload });
  const rows = (data ?? []).flatMap(({ contests }, i) =>
    contests.map((contest) => ({
      ...contest, other: others[i], index: i + 1, difference: turned(contest.difference),
    })),
  );
  const reach = Math.max(0.1, ...rows.flatMap(({ difference: d }) => [-d.low, d.high]));
  const columns = [
    {
      key: "other",
      title: "Run",
      align: "run",
      render: ({ other, index }) => named(other, index, link("run", { run: other })),
    },
    {
      key: "how",
      title: "Contest",
      align: "run",
      render: ({ env, how }) => html`<div class="lines">
        <${Text} text=${env} /><span class="muted"><${Text} text=${how} /></span>
      </div>`,
    },
    {
      key: "success",
      title: "Success, and the first's",
      align: "run",
      render: ({ a, b }) => html`<div class="lines">
        ${rate(b)}<span class="muted">${rate(a)}</span>
      </div>`,
    },
    {
      key: "difference",
      title: "Difference, points",
      render: ({ difference }) =>
        html`<${Interval} ...${difference} min=${-reach} max=${reach} zero format=${points} />`,
    },
    { key: "verdict", title: "", render: (contest) => html`<${Verdict} ...${contest} />` },
  ];
  return html`<section class="panel contests" aria-label="Contests">
    <h2>Against ${named(first, 0)}</h2>
    ${error && html`<${Problem} error=${error} reload=${reload} />`}
    ${!data && !error && html`<${Loading} />`}
    ${data &&
    rows.length === 0 &&
    html`<p class="muted">
      They share no evaluation: runs are set against each other on the same environment and way of
      sampling.
    </p>`}
    ${rows.length > 0 && html`<${Table} label="Contests" columns=${columns} rows=${rows} />`}
  </section>`;
}

/** The API's difference is the first run's less the other's; the page tells of the other. */
const turned = ({ value, low, high }) => ({ value: -value, low: -high, high: -low });

const rate = ({ value, low, high }) =>
  html`<span>${percent(value)} [${percent(low, 0)}, ${percent(high, 0)}]</span>`;

function Verdict({ difference, mcnemar_p: p, smallest_detectable: smallest, levels, note }) {
  const known = (x) => x !== null && x !== undefined;
  const facts = [
    note,
    known(levels) && plural(levels, "level"),
    known(p) && `McNemar p = ${number(p)}`,
    known(smallest) && `could have shown ${points(smallest).slice(1)} points`,
  ];
  let [kind, word] = ["muted", "no difference is shown"];
  if (difference.low > 0) [kind, word] = ["good", "better"];
  if (difference.high < 0) [kind, word] = ["bad", "worse"];
  return html`<div class="lines verdict">
    <span class=${kind}>
      <b>${word}</b> [${points(difference.low)}, ${points(difference.high)}]
    </span>
    <span class="muted"><${Text} text=${facts.filter(Boolean).join(" · ")} /></span>
  </div>`;
}

function Overlaid({ runs, names, query, setQuery, reload }) {
  const all = useMemo(() => [...new Set(runs.flatMap((run) => run.names))].sort(), [runs]);
  const shown = useMemo(() => chosen(all, runs[0].labels, query.m), [all, query.m]);
  const metrics = useMetrics(names, shown);
  const search = useRef(null);
  const refresh = () => {
    reload();
    metrics.reload();
  };
  useEvents({}, { runs: refresh, again: refresh });
  useKeys({ "/": () => search.current?.focus() }, { "/": "find a metric" });
  return html`<section aria-label="Signals">
    <${Toolbar} names=${all} ...${{ query, setQuery, search }} />
    ${metrics.error && html`<${Problem} error=${metrics.error} reload=${metrics.reload} />`}
    <${Signals}
      ...${{ runs, answers: metrics.answers, names: shown, large: query.large }}
      axis=${axisOf(query)}
      smoothing=${smoothingOf(query)}
      onLarge=${(name) => setQuery({ large: name })}
    />
    <${Found} names=${shown} sought=${query.m} />
  </section>`;
}

/** The settings in which any of the runs differs from the first. */
function Differences({ runs, names }) {
  const [first, ...others] = names;
  const asked = others.map((other) => ["/api/difference", { run: first, other }]);
  const { data, error, reload } = useApis(asked);
  if (error) return html`<${Problem} error=${error} reload=${reload} />`;
  if (!data) return html`<${Loading} />`;
  const rows = merged(data.map(({ differences }) => differences), Object.keys(runs[0].config));
  return html`<section class="panel" aria-label="Settings">
    <h2>Settings that differ</h2>
    ${rows.length === 0 && html`<p class="muted">Their settings are the same.</p>`}
    ${rows.length > 0 && html`<${Values} titles=${names} rows=${rows} />`}
  </section>`;
}

/**
 * One row `{key, values}` a key, in the order of `keys`: the first run's value, then each other's,
 * alike or not.
 */
function merged(lists, keys) {
  const rows = new Map();
  lists.forEach((differences, i) => {
    for (const { key, a, b } of differences) {
      if (!rows.has(key)) rows.set(key, Array(lists.length + 1).fill(a));
      rows.get(key)[i + 1] = b;
    }
  });
  const place = (key) => (keys.includes(key) ? keys.indexOf(key) : keys.length);
  return [...rows]
    .map(([key, values]) => ({ key, values }))
    .sort((a, b) => place(a.key) - place(b.key));
}
