// All evaluations of a run between floor and ceiling, what training changed (level by level where
// they can be paired), and how the run does beside another one.

import { shared, useApi, useEvents } from "../api.js";
import { Interval, Loading, Problem, Table, Text, link, moment, number, percent, plural, useReady } from "../parts.js";
import { html, useMemo } from "../vendor/preact-htm.js";

export default function Page({ params, query, setQuery }) {
  const { run } = params;
  const { data, error, reload } = useApi("/api/run", { run });
  const gains = useApi("/api/gains", { run });
  const again = () => { reload(); gains.reload(); };
  useEvents({ run }, { step: again, end: again, again });
  useReady(Boolean((data || error) && (gains.data || gains.error)));
  return html`<main class="page page-evaluations">
    <h1>Evaluations</h1>
    ${error && html`<${Problem} error=${error} reload=${reload} />`}
    ${!data && !error && html`<${Loading} />`}
    ${data && (data.evaluations.length > 0
      ? html`<${Gains} gains=${gains} /><${All} evaluations=${data.evaluations} />`
      : html`<section class="panel"><p>The run was not evaluated yet. It is before its first step and
          after its last one, and between them with <code>--eval.every 10</code>; <code>ragen eval</code>
          plays any checkpoint.</p></section>`)}
    ${data && !shared && html`<${Contest} run=${run} other=${query.other} setQuery=${setQuery} />`}
  </main>`;
}

/** A difference of shares in points, with its sign. */
export function points(x) {
  if (x === null || x === undefined) return "–";
  return `${x > 0 ? "+" : x < 0 ? "−" : ""}${Math.abs(100 * x).toFixed(1)}`;
}

/** What may be said of a difference, in a sentence. */
function verdict({ difference, smallest_detectable: detectable }, better, worse) {
  const { value, low, high } = difference;
  const said = html`<b>${points(value)} points</b> [${points(low)}, ${points(high)}]`;
  if (low > 0) return html`<span class="good">${better}</span>: ${said}.`;
  if (high < 0) return html`<span class="bad">${worse}</span>: ${said}.`;
  const least = detectable === null || detectable === undefined ? ""
    : ` A difference of less than ${(100 * detectable).toFixed(1)} points could not have been expected to show in this sample.`;
  return html`No difference is shown: ${said}.${least}`;
}

const PHASES = { eval: "sampled", "eval greedy": "greedy" };

function Gains({ gains }) {
  if (gains.error) return html`<${Problem} error=${gains.error} reload=${gains.reload} />`;
  if (!gains.data) return html`<${Loading} />`;
  if (!gains.data.gains.length) return null;
  return html`<section class="panel">
    <h2>Before and after, level by level</h2>
    ${gains.data.gains.map((gain) => html`<div key=${`${gain.phase} ${gain.world}`} class="gain" data-testid="gain">
      <div class="gain-side"><span class="muted">${PHASES[gain.phase] ?? gain.phase}, ${gain.world}</span>
        <span>step ${gain.from_step} → ${gain.to_step}</span></div>
      <div class="gain-bars">
        <${Interval} ...${gain.before} /><${Interval} ...${gain.after} />
        <${Interval} ...${gain.difference} min=${-1} max=${1} zero=${true} format=${points} />
      </div>
      <p>${verdict(gain, "Training helped", "Training harmed")}
        ${" "}Of ${plural(gain.levels, "level")}, ${number(gain.won)} were won and ${number(gain.lost)} lost
        (McNemar's p ${small(gain.mcnemar_p)}).</p>
    </div>`)}
  </section>`;
}

const small = (p) => (p === null || p === undefined ? "–" : p < 0.001 ? "< 0.001" : `= ${p.toPrecision(2)}`);

/** Every evaluation, the latest first, in groups of one world and one way of choosing tokens. */
function All({ evaluations }) {
  const groups = useMemo(() => grouped(evaluations), [evaluations]);
  return groups.map(({ name, rows }) => html`<section class="panel" key=${name}>
    <h2>${name}</h2>
    <${Table} label=${`Evaluations: ${name}`} rows=${rows} rowKey=${(row) => `${row.attempt} ${row.step} ${row.time}`}
      columns=${columnsOf(rows)} />
    <p class="muted">The shaded part lies between random play (${percent(rows[0].random)}) and best play
      (${percent(rows[0].best)}) on the same levels; bars are 95 % intervals.</p>
  </section>`);
}

function grouped(evaluations) {
  const found = new Map();
  for (const one of [...evaluations].sort((a, b) => b.step - a.step || b.time - a.time)) {
    const name = `${one.world}, ${one.how}`;
    found.set(name, [...(found.get(name) ?? []), one]);
  }
  return [...found].map(([name, rows]) => ({ name, rows }));
}

function columnsOf(rows) {
  const returns = rows.flatMap((row) => [row.mean_return_low, row.mean_return_high, row.random_return, row.best_return]);
  const knownReturns = returns.filter((x) => x !== null && x !== undefined);
  const [min, max] = [Math.min(...knownReturns), Math.max(...knownReturns)];
  const many = rows.some(({ attempt }) => attempt !== rows[0].attempt);
  return [
    { key: "step", title: "step", align: "right", sort: true },
    ...(many ? [{ key: "attempt", title: "attempt", align: "right", sort: true }] : []),
    { key: "success", title: "success", sort: (row) => row.success.value,
      render: (row) => html`<${Interval} ...${row.success} floor=${row.random} ceiling=${row.best} />` },
    { key: "bounds", title: "95 % interval", align: "right",
      render: ({ success }) => html`<span class="muted">${percent(success.low)} to ${percent(success.high)}</span>` },
    { key: "mean_return", title: "mean return", sort: true,
      render: (row) => html`<${Interval} value=${row.mean_return} low=${row.mean_return_low} high=${row.mean_return_high}
        floor=${row.random_return} ceiling=${row.best_return} min=${min} max=${max} format=${number} />` },
    { key: "mean_turns", title: "turns", align: "right", sort: true, render: (row) => number(row.mean_turns) },
    { key: "valid_fraction", title: "valid replies", align: "right", sort: true, render: (row) => percent(row.valid_fraction, 0) },
    { key: "thought_words", title: "words a thought", align: "right", sort: true, render: (row) => number(row.thought_words) },
    { key: "episodes", title: "levels", align: "right", render: (row) => number(row.episodes) },
    { key: "time", title: "when", render: (row) => html`<span class="muted">${moment(row.time)}</span>` },
  ];
}

/** This run beside another one that the reader chooses. */
function Contest({ run, other, setQuery }) {
  const runs = useApi("/api/runs");
  const { data, error, reload } = useApi(other ? "/api/compare" : null, { run, other });
  const others = (runs.data?.runs ?? []).filter((one) => one.run !== run && one.state !== "unreadable");
  return html`<section class="panel">
    <h2>Beside another run</h2>
    <label>compare with
      <select value=${other ?? ""} onChange=${(event) => setQuery({ other: event.target.value || null })}>
        <option value="">choose a run</option>
        ${others.map((one) => html`<option key=${one.run} value=${one.run} selected=${one.run === other}>${one.run} (${one.world})</option>`)}
      </select></label>
    ${other && html`${" "}<a href=${link("compare", { run }, { other })}>curves and settings of both</a>`}
    ${error && html`<${Problem} error=${error} reload=${reload} />`}
    ${other && !data && !error && html`<${Loading} />`}
    ${other && data && (data.contests.length
      ? data.contests.map((contest, i) => html`<${One} key=${i} run=${run} other=${other} ...${contest} />`)
      : html`<p class="muted">The two were evaluated in no world alike: nothing can be compared.</p>`)}
  </section>`;
}

function One({ run, other, world, how, a, b, difference, mcnemar_p: p, smallest_detectable, levels, note }) {
  return html`<div class="gain" data-testid="contest">
    <div class="gain-side"><span class="muted">${how}, ${world}</span></div>
    <div class="gain-bars">
      <${Interval} ...${a} /><${Interval} ...${b} />
      <${Interval} ...${difference} min=${-1} max=${1} zero=${true} format=${points} />
    </div>
    <p>${verdict({ difference, smallest_detectable }, `${run} is better`, `${run} is worse than ${other}`)}
      ${levels ? ` On ${plural(levels, "level")}` : ""}${p === null || p === undefined ? "" : `, McNemar's p ${small(p)}`}.
      ${note && html` <span class="muted"><${Text} text=${note} /></span>`}</p>
    ${smallest_detectable !== null && html`<p class="muted">The smallest difference that this comparison would have shown in
      four of five cases is ${(100 * smallest_detectable).toFixed(1)} points.</p>`}
  </div>`;
}
