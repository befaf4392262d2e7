// One run: how well it does, whether it collapses and why, live while it trains.

import { shared, useApi, useApis, useEvents } from "../api.js";
import { Details } from "../details.js";
import { useKeys } from "../keys.js";
import {
  Interval, Loading, Problem, Spark, State, Text, ago, clock, joinRuns, link, moment, number,
  percent, plural, points, splitRuns, useReady,
} from "../parts.js";
import { Found, Legend, Signals, Toolbar, axisOf, chosen, smoothingOf, useMetrics } from "../signals.js";
import { html, useMemo, useRef } from "../vendor/preact-htm.js";

// The three whose order tells an Echo Trap (arXiv:2504.20073), as in the report.
const COLLAPSE = ["reward/std_in_group", "entropy/mean", "gradient/policy_norm"];

export default function Run({ params, query, setQuery }) {
  const { run } = params;
  const others = splitRuns(query.with).filter((other) => other !== run);
  const { data, error, reload } = useApi("/api/run", { run });
  const beside = useApis(others.map((other) => ["/api/run", { run: other }]));
  const names = data?.names ?? [];
  const shown = useMemo(() => (data ? chosen(names, data.labels, query.m) : []), [data, query.m]);
  const asked = useMemo(
    () => [...new Set([...shown, ...COLLAPSE.filter((name) => names.includes(name))])],
    [shown, data],
  );
  const metrics = useMetrics([run, ...others], asked);
  const search = useRef(null);
  const refresh = () => {
    reload();
    metrics.reload();
  };
  useEvents({ run }, { step: refresh, alarm: reload, end: refresh, again: refresh });
  useKeys({ "/": () => search.current?.focus() }, { "/": "find a metric" });
  const answered = shown.length === 0 || metrics.answers[run];
  useReady((data !== null && answered) || error !== null);
  const runs = useMemo(() => (data ? [data, ...(beside.data ?? [])] : []), [data, beside.data]);

  if (!data) {
    return html`<main class="page page-run">
      <h1><${Text} text=${run} /></h1>
      ${error ? html`<${Problem} error=${error} reload=${reload}><p><a href=${link("runs")}>All runs</a></p><//>` : html`<${Loading} />`}
    </main>`;
  }
  const axis = axisOf(query);
  const overlay = (next) => setQuery({ with: joinRuns(next) || null });
  const open = (step) => (location.hash = episodesOf(data, step));
  return html`<main class="page page-run">
    <${Headline} run=${data} />
    ${[error, beside.error, metrics.error].filter(Boolean).slice(0, 1).map((each) => html`<${Problem} error=${each} reload=${refresh} />`)}
    <${Tiles} run=${data} answer=${metrics.answers[run]} />
    <section aria-label="Signals">
      <${Toolbar} ...${{ query, setQuery, names, search }}>
        ${!shared && html`<${Overlay} run=${run} others=${others} onAdd=${(other) => overlay([...others, other])} />`}
      <//>
      ${others.length > 0 && html`<${Legend} runs=${[run, ...others]} onRemove=${(gone) => overlay(others.filter((other) => other !== gone))} />`}
      <${Signals}
        ...${{ runs, axis }} answers=${metrics.answers} names=${shown} smoothing=${smoothingOf(query)}
        large=${query.large} onLarge=${(name) => setQuery({ large: name })}
        onPick=${data.has.episodes && !shared ? open : undefined}
        onMark=${({ id }) => setQuery({ event: id })}
      />
      <${Found} names=${shown} sought=${query.m} />
    </section>
    <${Details} run=${data} ...${{ query, setQuery }} />
  </main>`;
}

/** The episodes of a step, or of the nearest one whose episodes were recorded. */
function episodesOf({ run, episode_steps: steps }, step) {
  const distance = (each) => Math.abs(each - step);
  const near = steps.reduce((best, each) => (distance(each) < distance(best) ? each : best), steps[0] ?? step);
  return link("episodes", { run }, { step_from: near, step_to: near });
}

function Headline({ run }) {
  const facts = [
    run.world, `model ${run.model}`, `recipe ${run.recipe}`, run.algorithm, `seed ${run.seed}`,
    run.attempts > 1 && `attempt ${run.attempts}`,
  ];
  return html`<div class="row title-row">
    <h1><${Text} text=${run.run === "." ? run.name : run.run} /></h1>
    <${State} state=${run.state} problem=${run.problem} />
    <span class="muted facts"><${Text} text=${facts.filter(Boolean).join(" · ")} /></span>
    ${run.updated && html`<span class="muted" title=${moment(run.updated)}>changed ${ago(run.updated)}</span>`}
  </div>`;
}

/** The answers of the first seconds: how well, how much better, does it collapse, how far. */
function Tiles({ run, answer }) {
  return html`<div class="tiles">
    <${Success} run=${run} />
    <${Gain} run=${run} />
    <${Collapse} run=${run} answer=${answer} />
    <${Progress} run=${run} />
  </div>`;
}

function Success({ run }) {
  const { success, random, best } = run;
  if (!success) return html`<section class="panel tile"><h2>Success</h2><p class="muted">It was not evaluated yet.</p></section>`;
  return html`<section class="panel tile" aria-label="Success">
    <h2>Success <span class="muted">step ${success.step}, ${success.how}</span></h2>
    <p class="big">${percent(success.value)} <small>${range(success, (x) => percent(x, 0))}</small></p>
    <${Interval} ...${success} floor=${random} ceiling=${best} text=${false} />
    <p class="muted ends">
      <span>random ${percent(random, 0)}</span>${best !== null && html`<span>best ${percent(best, 0)}</span>`}
    </p>
  </section>`;
}

const range = ({ low, high }, format) => `[${format(low)}, ${format(high)}]`;

/**
 * `now` − `before` with its interval, as of two independent rates (Newcombe 1998, method 10): the
 * report's own formula, `ragen.statistics.difference`.
 */
export function gainOf(before, now) {
  const value = now.value - before.value;
  return {
    value,
    low: value - Math.hypot(now.value - now.low, before.high - before.value),
    high: value + Math.hypot(now.high - now.value, before.value - before.low),
  };
}

function Gain({ run }) {
  const { success, before } = run;
  if (!success || before.step === success.step) {
    return html`<section class="panel tile"><h2>Gain</h2><p class="muted">One evaluation is no gain yet.</p></section>`;
  }
  const gain = gainOf(before, success);
  const [kind, words] =
    gain.low > 0 ? ["good", "better than before training"]
    : gain.high < 0 ? ["bad", "worse than before training"]
    : ["muted", "the interval holds 0: no change is shown"];
  return html`<section class="panel tile" aria-label="Gain">
    <h2>Gain <span class="muted">since step ${before.step}</span></h2>
    <p class="big">${points(gain.value)} <small>points ${range(gain, (x) => points(x, 0))}</small></p>
    <${Interval} ...${gain} min=${-1} zero text=${false} format=${points} />
    <p class=${kind}>${words}</p>
  </section>`;
}

function Collapse({ run, answer }) {
  const alarms = run.events.filter(({ kind }) => kind === "alarm");
  const acts = run.events.filter(({ kind }) => kind === "guard");
  return html`<section class="panel tile broad" aria-label="Collapse">
    <h2>Collapse ${!shared && html`<a href=${link("collapse", { run: run.run })}>more</a>`}</h2>
    <p class=${alarms.length ? "bad" : "good"}>
      ${alarms.length
        ? html`<b>▲ ${plural(alarms.length, "alarm")}</b>, first at step ${alarms[0].step}: ${detector(alarms[0])}`
        : html`<b>✓ No alarm</b>`}
      ${acts.length > 0 && html`<br /><span class="warn">■ <${Text} text=${acts.at(-1).text} /></span>`}
    </p>
    <div class="signs">${COLLAPSE.map((name) => html`<${Sign} label=${run.labels[name]} values=${answer?.names[name]?.values} />`)}</div>
  </section>`;
}

/** The name of an alarm's detector in words. */
function detector({ data, text }) {
  return (data?.detector ?? text.split(/[:,]/)[0]).replaceAll("_", " ");
}

function Sign({ label, values }) {
  if (!values?.length) return null;
  return html`<div title="${label}: first ${number(values[0])}, last ${number(values.at(-1))}">
    <span class="muted">${label}</span><b>${number(values.at(-1))}</b>
    <${Spark} values=${values} label=${label} />
  </div>`;
}

function Progress({ run }) {
  const seconds = Object.values(run.phases).reduce((sum, each) => sum + each, 0);
  const of = run.budget === "steps" ? run.steps : null;
  const last = run.episode_steps.at(-1);
  return html`<section class="panel tile" aria-label="Progress">
    <h2>Progress</h2>
    <p class="big">${number(run.step)} <small>${of ? `of ${plural(of, "step")}` : `steps, budget ${number(run.steps)} ${run.budget}`}</small></p>
    ${of && html`<progress max=${of} value=${run.step} aria-label="steps done"></progress>`}
    <p class="muted">${clock(seconds)} · ${plural(run.num_episodes, "episode")} recorded</p>
    ${last !== undefined && !shared && html`<p><a href=${episodesOf(run, last)}>What it does now: episodes of step ${last}</a></p>`}
  </section>`;
}

function Overlay({ run, others, onAdd }) {
  const { data } = useApi("/api/runs");
  const free = (data?.runs ?? []).filter((each) => each.state !== "unreadable" && each.run !== run && !others.includes(each.run));
  if (free.length === 0) return null;
  return html`<select aria-label="Draw another run over it" value="" onChange=${(event) => onAdd(event.target.value)}>
    <option value="" disabled>Draw over it …</option>
    ${free.map((each) => html`<option key=${each.run} value=${each.run}>${each.run}</option>`)}
  </select>`;
}
