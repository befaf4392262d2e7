// The engine of a run: its processes, and what they do and wait for, over the steps.

import { link } from "./addresses.js";
import { Curves } from "./charts.js";
import { known, number, share } from "./numbers.js";
import { Chip, Table, Text } from "./parts.js";
import { seriesOf } from "./signals.js";
import { html, useMemo } from "./vendor/preact-htm.js";

/** The charts: their titles, their metrics, and whether these are shares. */
const CHARTS = [
  { title: "tokens a second", names: { sampled: "time/tokens_per_s" } },
  { title: "steps in the queue", names: { waiting: "engine/queue" } },
  {
    title: "staleness",
    names: { mean: "engine/staleness_mean", largest: "engine/staleness_max" },
  },
  {
    title: "idle", shares: true,
    names: {
      learners: "engine/learner_idle_fraction", samplers: "engine/sampler_idle_fraction",
    },
  },
  { title: "publication, s", names: { publication: "time/publish_s" } },
  { title: "samplers", names: { alive: "engine/samplers" } },
  { title: "set aside", names: { stale: "engine/stale_groups" } },
];

/** The metrics that the part shows, of those that the run has. */
export function engineNames(run) {
  if (!run?.engine) return [];
  const all = CHARTS.flatMap(({ names }) => Object.values(names));
  return all.filter((name) => run.names.includes(name));
}

const STATES = { running: "good", lost: "bad" };

/** `run` as `/api/run` has it, and the `answer` of `/api/metrics`. */
export function Engine({ run, answer, onPick }) {
  const charts = useMemo(() => CHARTS
    .map((chart) => ({ ...chart, series: drawn(chart, answer) }))
    .filter(({ series }) => series.length > 0), [answer]);
  const look = { sync: "engine", height: 106, xLabel: "Step", onPick };
  return html`<section class="panel engine" aria-label="Engine">
    <h2>Engine</h2>
    ${run.engine.length > 0 && html`<${Processes} run=${run} />`}
    <div class="signals">${charts.map(({ title, series, shares }) => html`<${Curves} key=${title}
      ...${{ ...look, series }} title=${title} label=${labelOf(title, series)}
      format=${shares ? share : number} range=${shares ? [0, 1.02] : undefined} />`)}</div>
  </section>`;
}

/** The title, and the names of the curves if there are several. */
function labelOf(title, series) {
  return series.length > 1 ? `${title}: ${series.map(({ name }) => name).join(", ")}` : title;
}

function drawn({ names }, answer) {
  return Object.entries(names)
    .map(([name, metric], colour) => seriesOf(name, answer, metric, "step", colour))
    .filter(({ x }) => x.length > 0);
}

function Processes({ run }) {
  const at = (step) => link("episodes", { run: run.run }, { step_from: step, step_to: step });
  const columns = [
    { key: "process", title: "Process", render: ({ process }) => html`<${Text} text=${process} />` },
    {
      key: "state", title: "State",
      render: ({ state }) => html`<${Chip} kind=${STATES[state] ?? ""}>${state}<//>`,
    },
    { key: "losses", title: "Losses", align: "right", render: ({ losses }) => number(losses) },
    {
      key: "step", title: "Step", align: "right",
      render: ({ step }) => known(step) && html`<a href=${at(step)}>${number(step)}</a>`,
    },
    { key: "text", title: "Last event", render: ({ text }) => html`<${Text} text=${text} />` },
  ];
  return html`<div class="scroll tall"><${Table} label="Processes" rows=${run.engine}
    rowKey="process" columns=${columns} /></div>`;
}
