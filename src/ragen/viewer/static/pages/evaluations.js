// All evaluations of a run between random and optimal play, what training changed (level by level where
// they can be paired), and how the run does beside another one.

import { link } from "../addresses.js";
import { shared, useApi, useEvents } from "../api.js";
import { Curves } from "../charts.js";
import { moment, number, percent, plural, points } from "../numbers.js";
import { Interval, Loading, Problem, Table, Text, useReady } from "../parts.js";
import { html, useMemo } from "../vendor/preact-htm.js";

const PHASES = { eval: "sampled", "eval greedy": "greedy" };

export default function Page({ params, query, setQuery }) {
  const { run } = params;
  const { data, error, reload } = useApi("/api/run", { run });
  const gains = useApi("/api/gains", { run });
  const again = () => {
    reload();
    gains.reload();
  };
  useEvents({ run }, { step: again, end: again, again });
  useReady(Boolean((data || error) && (gains.data || gains.error)));
  const evaluations = data?.evaluations ?? [];
  return html`<main class="page page-evaluations">
    <h1>Evaluations</h1>
    ${error && html`<${Problem} error=${error} reload=${reload} />`}
    ${!data && !error && html`<${Loading} />`}
    ${data && evaluations.length === 0 && html`<${Nothing} />`}
    ${evaluations.length > 0 && html`<${Gains} gains=${gains} evaluations=${evaluations} />`}
    ${evaluations.length > 0 && html`<${All} evaluations=${evaluations} />`}
    ${data && !shared && html`<${Contests} run=${run} other=${query.other} setQuery=${setQuery} />`}
  </main>`;
}

function Nothing() {
  return html`<section class="panel">
    <p>The run was not evaluated yet. A run is before its first step and after its last one,
      unless <code>eval.episodes</code> is 0, and between them with <code>--eval.every 10</code>, say; any
      checkpoint can be evaluated by the command <code>ragen eval</code>.</p>
  </section>`;
}

const known = (x) => x !== null && x !== undefined;

/** What may be said of a difference, in a sentence. */
function verdict({ difference, smallest_detectable: detectable }, better, worse) {
  const { value, low, high } = difference;
  const said = html`<b>${points(value)} points</b> [${points(low)}, ${points(high)}]`;
  if (low > 0) return html`<span class="good">${better}</span>: ${said}.`;
  if (high < 0) return html`<span class="bad">${worse}</span>: ${said}.`;
  const least = known(detectable) &&
    ` One of less than ${(100 * detectable).toFixed(1)} points could not have been expected to show
      in this sample.`;
  return html`No difference is shown: ${said}.${least}`;
}

const small = (p) => (!known(p) ? "–" : p < 0.001 ? "< 0.001" : `= ${p.toPrecision(2)}`);

// ---- before and after

function Gains({ gains: { data, error, reload }, evaluations }) {
  if (error) return html`<${Problem} error=${error} reload=${reload} />`;
  if (!data) return html`<${Loading} />`;
  if (!data.gains.length) return null;
  return html`<section class="panel">
    <h2>Before and after, level by level</h2>
    ${data.gains.map((gain) => html`<${Gain} key=${`${gain.phase} ${gain.env}`} gain=${gain}
      evaluation=${evaluations.find(({ env }) => env === gain.env)} />`)}
  </section>`;
}

function Gain({ gain, evaluation }) {
  const { phase, env, levels, won, lost, mcnemar_p: p } = gain;
  return html`<div class="contest" data-testid="gain">
    <${Sides} title=${`${env}, ${PHASES[phase] ?? phase}`} difference=${gain.difference}
      a=${[`step ${gain.from_step}`, gain.before]} b=${[`step ${gain.to_step}`, gain.after]}
      random=${evaluation?.random} optimal=${evaluation?.optimal} />
    <p>${verdict(gain, "Training helped", "Training harmed")}${` Of ${plural(levels, "level")} it
      won ${won} and lost ${lost} (McNemar's p ${small(p)}).`}</p>
  </div>`;
}

/** Two rates and their difference, one under the other on the same line of length. */
function Sides({ title, a, b, difference, random, optimal }) {
  return html`<h3>${title}</h3>
    <dl class="sides">
      ${[a, b].map(([name, rate]) => html`<dt key=${name}><${Text} text=${name} /></dt>
        <dd><${Interval} ...${rate} random=${random} optimal=${optimal} /></dd>`)}
      <dt>difference</dt>
      <dd><${Interval} ...${difference} min=${-1} max=${1} zero=${true} format=${points} /></dd>
    </dl>`;
}

// ---- all of them

/** Every evaluation, the latest first, by env and way of choosing tokens. */
function All({ evaluations }) {
  const kinds = useMemo(() => kindsOf(evaluations), [evaluations]);
  return kinds.map(([name, rows]) => html`<section class="panel" key=${name}>
    <h2>${name}</h2>
    <${Course} rows=${rows} />
    <${Table} label=${`Evaluations: ${name}`} rows=${rows} columns=${columnsOf(rows)}
      rowKey=${({ attempt, step, time }) => `${attempt} ${step} ${time}`} />
    <p class="muted">The shaded part lies between random play (${percent(rows[0].random)}) and optimal
      play (${percent(rows[0].optimal)}) on the same levels; bars are 95 % intervals.</p>
  </section>`);
}

/** `[[name, rows], …]`; where tokens were sampled comes first, for so the policy was trained. */
function kindsOf(evaluations) {
  const found = new Map();
  for (const one of [...evaluations].sort((a, b) => b.step - a.step || b.time - a.time)) {
    const name = `${one.env}, ${one.how}`;
    found.set(name, [...(found.get(name) ?? []), one]);
  }
  const greedy = ([, rows]) => rows[0].how === "greedy";
  return [...found].sort((a, b) => greedy(a) - greedy(b));
}

/** Success over steps between random and optimal play. */
function Course({ rows }) {
  const series = useMemo(() => {
    const inOrder = rows.filter(({ step }) => step !== null).reverse();
    const of = (name) => inOrder.map(({ success }) => success[name]);
    const x = inOrder.map(({ step }) => step);
    return [{ name: "success", x, y: of("value"), low: of("low"), high: of("high"), points: true }];
  }, [rows]);
  const { random, optimal } = rows[0];
  const lines = [{ y: random, label: "random play" }, { y: optimal, label: "optimal play" }];
  if (series[0].x.length < 3) return null;
  return html`<${Curves} title="success" series=${series} lines=${lines.filter(({ y }) => known(y))}
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

// ---- beside another run

function Contests({ run, other, setQuery }) {
  const runs = useApi("/api/runs");
  const { data, error, reload } = useApi(other ? "/api/compare" : null, { run, other });
  useEvents(other ? {} : null, { runs: reload, again: reload }); // Either run may train.
  const fit = (one) => one.run !== run && one.state !== "unreadable";
  const others = (runs.data?.runs ?? []).filter(fit);
  const choose = (event) => setQuery({ other: event.target.value || null });
  return html`<section class="panel">
    <h2>Beside another run</h2>
    <div class="row choices">
      <label>compare with
        <select value=${other ?? ""} onChange=${choose}>
          <option value="">choose a run</option>
          ${others.map((one) => html`<option key=${one.run} value=${one.run}
            selected=${one.run === other}>${one.run} (${one.env})</option>`)}
        </select></label>
      ${other &&
      html`<a href=${link("compare", { run }, { other })}>curves and settings of both</a>`}
    </div>
    ${error && html`<${Problem} error=${error} reload=${reload} />`}
    ${other && !data && !error && html`<${Loading} />`}
    ${other && data?.contests.length === 0 &&
    html`<p class="muted">The two were evaluated in no common environment: nothing can be compared.</p>`}
    ${other && data?.contests.map((contest, i) =>
      html`<${Contest} key=${i} run=${run} other=${other} contest=${contest} />`)}
  </section>`;
}

function Contest({ run, other, contest }) {
  const { env, how, a, b, levels, mcnemar_p: p, smallest_detectable: detectable, note } = contest;
  const tested = known(p) ? `, McNemar's p ${small(p)}` : "";
  const shows = contest.difference.low > 0 || contest.difference.high < 0;
  const effect = `${(100 * detectable).toFixed(1)} points`;
  return html`<div class="contest" data-testid="contest">
    <${Sides} title=${`${env}, ${how}`} a=${[run, a]} b=${[other, b]}
      difference=${contest.difference} />
    <p>${verdict(contest, `${run} is better`, `${run} is worse than ${other}`)}
      ${levels > 0 && ` On ${plural(levels, "level")}${tested}.`}
      ${shows && known(detectable) && ` The smallest difference that this many levels show in four
        of five cases is ${effect}.`}
      ${note && html` <span class="muted"><${Text} text=${note} /></span>`}</p>
  </div>`;
}
