// All evaluations of a run with random and optimal play as baselines, and the gain from the first to
// the last one.

import { useLive } from "../api.js";
import { Curves } from "../charts.js";
import { Comparisons } from "../comparison.js";
import { known, moment, number, percent } from "../numbers.js";
import { Interval, Status, Table, useReady } from "../parts.js";
import { baselines, dotsOf } from "../signals.js";
import { html, useMemo } from "../vendor/preact-htm.js";

export function Page({ params }) {
  const { run } = params;
  const answer = useLive("/api/run", { run });
  const gains = useLive("/api/compare", { run });
  const answered = ({ data, error }) => Boolean(data || error);
  useReady(answered(answer) && answered(gains));
  const evaluations = answer.data?.evaluations ?? [];
  return html`<main class="page page-evaluations">
    <h1>Evaluations</h1>
    <${Status} ...${answer} />
    ${answer.data && evaluations.length === 0 && html`<${Nothing} />`}
    ${evaluations.length > 0 && html`<section class="panel" aria-label="Before and after">
      <h2>Before and after training, level by level</h2>
      <${Comparisons} answer=${gains} none="No two evaluations of the same levels are recorded." />
    </section>
    <${All} evaluations=${evaluations} />`}
  </main>`;
}

function Nothing() {
  return html`<section class="panel">
    <p>This run has no evaluation yet. A run is evaluated before its first step and after its last,
      unless <code>eval.episodes</code> is 0. For more, train with <code>--eval.every 10</code>.
      What <code>ragen eval</code> plays is listed among the runs.</p>
  </section>`;
}

/** Every evaluation, the latest first, by environment and way of sampling. */
function All({ evaluations }) {
  const kinds = useMemo(() => kindsOf(evaluations), [evaluations]);
  return kinds.map(([name, rows]) => html`<section class="panel" key=${name}>
    <h2>${name}</h2>
    <${Course} rows=${rows} />
    <${Table} label=${`Evaluations: ${name}`} rows=${rows} columns=${columnsOf(rows)} />
    <p class="muted">The shaded range is from random play (${percent(rows[0].random)}) to optimal play
      (${percent(rows[0].optimal)}) on the same levels. Bars are 95 % intervals.</p>
  </section>`);
}

/** `[[name, rows], …]`; sampled evaluations come first, because the policy was trained so. */
function kindsOf(evaluations) {
  const latestFirst = evaluations.toSorted((a, b) => b.step - a.step || b.time - a.time);
  const kinds = Map.groupBy(latestFirst, ({ env, how }) => `${env}, ${how}`);
  const greedy = ([, rows]) => rows[0].how === "greedy";
  return [...kinds].sort((a, b) => greedy(a) - greedy(b));
}

/** Success over steps, with both baselines. */
function Course({ rows }) {
  const inOrder = useMemo(() => rows.toReversed(), [rows]);
  const series = useMemo(() => [{ name: "success", colour: 0, ...dotsOf(inOrder) }], [inOrder]);
  if (inOrder.length < 3) return null;
  return html`<${Curves} title="success" series=${series} lines=${baselines(rows[0])}
    range=${[0, 1]} height=${150} format=${(x) => percent(x, 0)} xLabel="step" />`;
}

function columnsOf(rows) {
  const ends = ["mean_return_low", "mean_return_high", "random_return", "optimal_return"];
  const returns = rows.flatMap((row) => ends.map((name) => row[name])).filter(known);
  const [min, max] = [Math.min(...returns), Math.max(...returns)];
  const attempts = new Set(rows.map(({ attempt }) => attempt)).size;
  const plain = (key, title, format = number) => (
    { key, title, align: "right", sort: true, render: (row) => format(row[key]) }
  );
  const quiet = (text) => html`<span class="muted number">${text}</span>`;
  const success = (row) => html`<${Interval} ...${row.success}
    random=${row.random} optimal=${row.optimal} />`;
  const mean = (row) => html`<${Interval} value=${row.mean_return}
    low=${row.mean_return_low} high=${row.mean_return_high} min=${min} max=${max}
    random=${row.random_return} optimal=${row.optimal_return} format=${number} />`;
  const bounds = ({ success: { low, high } }) => quiet(`${percent(low)} to ${percent(high)}`);
  return [
    plain("step", "step"),
    ...(attempts > 1 ? [plain("attempt", "attempt")] : []),
    { key: "success", title: "success", sort: (row) => row.success.value, render: success },
    { key: "bounds", title: "95 % interval", align: "right", render: bounds },
    { key: "mean_return", title: "mean return", sort: true, render: mean },
    plain("mean_turns", "turns"),
    plain("valid_fraction", "valid replies", (x) => percent(x, 0)),
    plain("thought_words", "words a thought"),
    plain("episodes", "levels"),
    { key: "time", title: "when", render: (row) => quiet(moment(row.time)) },
  ];
}
