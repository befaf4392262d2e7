// All evaluations of a run between floor and ceiling, what training changed (level by level where
// they can be paired), and how the run does beside another one.

import { shared, useApi, useEvents } from "../api.js";
import { Curves } from "../charts.js";
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
      ? html`<${Gains} gains=${gains} evaluations=${data.evaluations} /><${All} evaluations=${data.evaluations} />`
      : html`<section class="panel"><p>The run was not evaluated yet. It is before its first step and
          after its last one, and between them with <code>--eval.every 10</code>; any
          checkpoint can be evaluated by <code>ragen eval</code>.</p></section>`)}
    ${data && !shared && html`<${Contest} run=${run} other=${query.other} setQuery=${setQuery} />`}
  </main>`;
}

const known = (x) => x !== null && x !== undefined;

/** A difference of shares in points, with its sign. */
export function points(x) {
  if (!known(x)) return "–";
  return `${x > 0 ? "+" : x < 0 ? "−" : ""}${Math.abs(100 * x).toFixed(1)}`;
}

/** What may be said of a difference, in a sentence. */
function verdict({ difference, smallest_detectable: detectable }, better, worse) {
  const { value, low, high } = difference;
  const said = html`<b>${points(value)} points</b> [${points(low)}, ${points(high)}]`;
  if (low > 0) return html`<span class="good">${better}</span>: ${said}.`;
  if (high < 0) return html`<span class="bad">${worse}</span>: ${said}.`;
  const least = !known(detectable) ? ""
    : ` A difference of less than ${(100 * detectable).toFixed(1)} points could not have been expected to show in this sample.`;
  return html`No difference is shown: ${said}.${least}`;
}

const PHASES = { eval: "sampled", "eval greedy": "greedy" };

function Gains({ gains, evaluations }) {
  if (gains.error) return html`<${Problem} error=${gains.error} reload=${gains.reload} />`;
  if (!gains.data) return html`<${Loading} />`;
  if (!gains.data.gains.length) return null;
  return html`<section class="panel">
    <h2>Before and after, level by level</h2>
    ${gains.data.gains.map((gain) => html`<div key=${`${gain.phase} ${gain.world}`} class="contest" data-testid="gain">
      <${Sides} title=${`${gain.world}, ${PHASES[gain.phase] ?? gain.phase}`} ...${gain}
        a=${[`step ${gain.from_step}`, gain.before]} b=${[`step ${gain.to_step}`, gain.after]}
        ...${boundsIn(evaluations, gain.world)} />
      <p>${verdict(gain, "Training helped", "Training harmed")}${" "}
        Of ${plural(gain.levels, "level")} it won ${number(gain.won)} and lost${" "}
        ${number(gain.lost)} (McNemar's p ${small(gain.mcnemar_p)}).</p>
    </div>`)}
  </section>`;
}

/** Random and best play in a world. */
function boundsIn(evaluations, world) {
  const one = evaluations.find((each) => each.world === world);
  return { floor: one?.random, ceiling: one?.best };
}

/** Two rates and their difference, one under the other on the same line of length. */
function Sides({ title, a, b, difference, floor, ceiling }) {
  return html`<h3>${title}</h3>
    <dl class="sides">
      ${[a, b].map(([name, rate]) => html`<dt key=${name}><${Text} text=${name} /></dt>
        <dd><${Interval} ...${rate} floor=${floor} ceiling=${ceiling} /></dd>`)}
      <dt>difference</dt>
      <dd><${Interval} ...${difference} min=${-1} max=${1} zero=${true} format=${points} /></dd>
    </dl>`;
}

const small = (p) => (!known(p) ? "–" : p < 0.001 ? "< 0.001" : `= ${p.toPrecision(2)}`);

/** Every evaluation, the latest first, in groups of one world and one way of choosing tokens. */
function All({ evaluations }) {
  const groups = useMemo(() => grouped(evaluations), [evaluations]);
  return groups.map(({ name, rows }) => html`<section class="panel" key=${name}>
    <h2>${name}</h2>
    <${Course} rows=${rows} />
    <${Table} label=${`Evaluations: ${name}`} rows=${rows} rowKey=${(row) => `${row.attempt} ${row.step} ${row.time}`}
      columns=${columnsOf(rows)} />
    <p class="muted">The shaded part lies between random play (${percent(rows[0].random)}) and best play
      (${percent(rows[0].best)}) on the same levels; bars are 95 % intervals.</p>
  </section>`);
}

/** Success over steps between floor and ceiling. */
function Course({ rows }) {
  const series = useMemo(() => {
    const steps = [...rows].sort((a, b) => a.step - b.step);
    const of = (name) => steps.map(({ success }) => success[name]);
    return [{ name: "success", x: steps.map(({ step }) => step), y: of("value"), low: of("low"), high: of("high"), points: true }];
  }, [rows]);
  const lines = [{ y: rows[0].random, label: "random play" }, { y: rows[0].best, label: "best play" }];
  if (series[0].x.length < 3) return null;
  return html`<${Curves} title="success" series=${series} lines=${lines.filter(({ y }) => known(y))}
    range=${[0, 1]} height=${150} format=${(x) => percent(x, 0)} xLabel="step" />`;
}

function grouped(evaluations) {
  const found = new Map();
  for (const one of [...evaluations].sort((a, b) => b.step - a.step || b.time - a.time)) {
    const name = `${one.world}, ${one.how}`;
    found.set(name, [...(found.get(name) ?? []), one]);
  }
  // Where tokens were sampled comes first: that is how the policy was trained.
  const greedy = ({ rows }) => rows[0].how === "greedy";
  return [...found].map(([name, rows]) => ({ name, rows })).sort((a, b) => greedy(a) - greedy(b));
}

function columnsOf(rows) {
  const returns = rows.flatMap((row) => [row.mean_return_low, row.mean_return_high, row.random_return, row.best_return]);
  const knownReturns = returns.filter(known);
  const [min, max] = [Math.min(...knownReturns), Math.max(...knownReturns)];
  const many = rows.some(({ attempt }) => attempt !== rows[0].attempt);
  return [
    { key: "step", title: "step", align: "right", sort: true },
    ...(many ? [{ key: "attempt", title: "attempt", align: "right", sort: true }] : []),
    { key: "success", title: "success", sort: (row) => row.success.value,
      render: (row) => html`<${Interval} ...${row.success} floor=${row.random} ceiling=${row.best} />` },
    { key: "bounds", title: "95 % interval", align: "right",
      render: ({ success }) => html`<span class="muted number">${percent(success.low)} to ${percent(success.high)}</span>` },
    { key: "mean_return", title: "mean return", sort: true,
      render: (row) => html`<${Interval} value=${row.mean_return} low=${row.mean_return_low} high=${row.mean_return_high}
        floor=${row.random_return} ceiling=${row.best_return} min=${min} max=${max} format=${number} />` },
    { key: "mean_turns", title: "turns", align: "right", sort: true, render: (row) => number(row.mean_turns) },
    { key: "valid_fraction", title: "valid replies", align: "right", sort: true, render: (row) => percent(row.valid_fraction, 0) },
    { key: "thought_words", title: "words a thought", align: "right", sort: true, render: (row) => number(row.thought_words) },
    { key: "episodes", title: "levels", align: "right", render: (row) => number(row.episodes) },
    { key: "time", title: "when", render: (row) => html`<span class="muted number">${moment(row.time)}</span>` },
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

function One({ run, other, world, how, a, b, difference, mcnemar_p: p, smallest_detectable: detectable, levels, note }) {
  const size = levels ? ` On ${plural(levels, "level")}${known(p) ? `, McNemar's p ${small(p)}` : ""}.` : "";
  return html`<div class="contest" data-testid="contest">
    <${Sides} title=${`${world}, ${how}`} a=${[run, a]} b=${[other, b]} difference=${difference} />
    <p>${verdict({ difference, smallest_detectable: detectable }, `${run} is better`, `${run} is worse than ${other}`)}${size}
      ${known(detectable) && ` In four of five such comparisons, a true difference of ${(100 * detectable).toFixed(1)} points would show.`}
      ${note && html` <span class="muted"><${Text} text=${note} /></span>`}</p>
  </div>`;
}
