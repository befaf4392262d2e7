// The metrics of one or more runs as a grid of small charts, with axis, smoothing and search.

import { useAnswers } from "./api.js";
import { Curves } from "./charts.js";
import { useKeys } from "./keys.js";
import { clamp, clock, known, number, plural, share } from "./numbers.js";
import { Tabs, picked } from "./parts.js";
import { html, useMemo, useRef } from "./vendor/preact-htm.js";

const MOST = 24; // Charts that a search shows at once.
const SUCCESS = "success/mean";
const SHARES = [0, 1.02]; // A little above 1, so that a curve at 1 is not on the edge.
const NOWHERE = { step: [] };

const AXES = {
  step: { title: "Step" },
  updates: { title: "Updates" },
  episodes: { title: "Episodes" },
  tokens: { title: "Tokens" },
  seconds: { title: "Time" },
};

/** The metrics to show: the report's signals in its order, or those that match the search. */
export function chosen(names, labels, sought) {
  const words = (sought ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0) return Object.keys(labels).filter((name) => names.includes(name));
  const wanted = (name) => {
    const said = `${name} ${labels[name] ?? ""}`.toLowerCase();
    const smoothed = name.startsWith("ema/") && !words.includes("ema");
    return !smoothed && words.every((word) => said.includes(word));
  };
  return names.filter(wanted).slice(0, MOST);
}

/**
 * The answers of `/api/metrics` by run: `{data: {run: answer}, error, reload}`. When other metrics
 * are requested, the previous ones stay until the new ones have arrived.
 */
export function useMetrics(runs, names) {
  const asked = names.join(",");
  const questions = asked ? runs.map((run) => ["/api/metrics", { run, names: asked }]) : [];
  const { answers, errors, reload } = useAnswers(questions);
  const last = useRef({});
  last.current = useMemo(() => {
    const pairs = answers.filter(Boolean).map((answer) => [answer.run, answer]);
    return { ...last.current, ...Object.fromEntries(pairs) };
  }, [answers]);
  return { data: last.current, error: errors.find(Boolean) ?? null, reload };
}

/** The position of a step on an axis: the count after that step, 0 before the first. */
function placed(axes, axis, step) {
  if (axis === "step") return step;
  const index = axes.step.findLastIndex((each) => each <= step);
  return index < 0 ? 0 : axes[axis][index];
}

/** The step at position `x` of an axis. */
function stepAt(axes, axis, x) {
  return axis === "step" ? x : axes.step[axes[axis].indexOf(x)];
}

/** A metric of a run as a series of `Curves`; rolled-back values are known only by step. */
function seriesOf(run, answer, name, axis, colour) {
  const found = answer?.names[name];
  if (!found) return { name: run, colour, x: [], y: [] };
  const left = axis === "step" ? found.left : [];
  return {
    name: run,
    colour,
    x: found.at.map((index) => answer.axes[axis][index]),
    y: found.values,
    left: left.map(({ steps, values }) => ({ x: steps, y: values })),
  };
}

/** Evaluations as dots with intervals, a series of `Curves`; `place` says where a step is. */
export function dotsOf(evaluations, place = (step) => step) {
  const of = (name) => evaluations.map(({ success }) => success[name]);
  const x = evaluations.map(({ step }) => place(step));
  return { points: true, x, y: of("value"), low: of("low"), high: of("high") };
}

/** Random and optimal play as lines of `Curves`. */
export function baselines({ random, optimal }) {
  const levels = [{ y: random, label: "random play" }, { y: optimal, label: "optimal play" }];
  return levels.filter(({ y }) => known(y));
}

/** A run's evaluations with the sampling of its headline; its curves say where steps are. */
function evaluated(run, answer, axis, colour) {
  if (!answer) return null;
  const alike = run.evaluations.filter(({ how, is_part: isPart }) => (
    !isPart && how === run.success?.how));
  const dots = dotsOf(alike, (step) => placed(answer.axes, axis, step));
  return { ...dots, name: `${run.run}, evaluated`, colour };
}

/** The events of the runs as marks; with several runs, in the colours of the runs. */
function marksOf(runs, answers, axis) {
  const several = runs.length > 1;
  const markOf = ({ run }, index, { id, kind, step, text }) => ({
    x: placed(answers[run]?.axes ?? NOWHERE, axis, step),
    kind,
    id,
    own: index === 0,
    colour: several ? index : undefined,
    text: `${several ? `${run}, ` : ""}${text.startsWith("step ") ? "" : `step ${step}: `}${text}`,
  });
  return runs.flatMap((run, index) => run.events.map((event) => markOf(run, index, event)));
}

/**
 * The section of charts with its toolbar. `runs` are answers of `/api/run`, the page's own run
 * first, each in its own colour; `metrics` is the answer of `useMetrics`; `all` are the names that can
 * be searched, `names` those shown. `onPick(step)` is a click on a step of the first run,
 * `onMark(mark)` on one of its events. The children are between the toolbar and the charts.
 */
export function Signals({
  runs, metrics, all, names, query, setQuery, onPick, onMark, tools, children,
}) {
  const search = useRef(null);
  useKeys({ "/": () => search.current.focus() }, { "/": "find a metric" });
  const answers = metrics.data;
  const axis = picked(AXES, query.axis);
  const smoothing = clamp(Number(query.smooth) || 0, 0, 0.95);
  const axes = answers[runs[0].run]?.axes;
  const marks = useMemo(() => marksOf(runs, answers, axis), [runs, answers, axis]);
  const ends = runs.map(({ run }) => answers[run]?.axes[axis].at(-1) ?? 0);
  const common = {
    runs, answers, axis, marks, smoothing, domain: [0, Math.max(...ends)],
    onMark: onMark && ((mark) => mark.own && onMark(mark)),
    onPick: onPick && ((x) => onPick(stepAt(axes, axis, x))),
    onLarge: (name) => setQuery({ large: name }),
  };
  return html`<section aria-label="Signals">
    <${Toolbar} names=${all} ...${{ axis, smoothing, query, setQuery, search }}>${tools}<//>
    ${children}
    ${axes && html`<div class="signals">${names.map((name) => html`<${Signal} key=${name}
      name=${name} large=${name === query.large} ...${common} />`)}</div>`}
    <${Found} names=${names} sought=${query.m} />
  </section>`;
}

function Signal({ name, runs, answers, axis, large, onLarge, ...rest }) {
  const [own, isSuccess] = [runs[0], name === SUCCESS];
  const isShare = isSuccess || name.endsWith("fraction");
  const series = useMemo(() => {
    const curves = runs.map(({ run }, i) => seriesOf(run, answers[run], name, axis, i));
    const dots = isSuccess ? runs.map((run, i) => evaluated(run, answers[run.run], axis, i)) : [];
    return [...curves, ...dots.filter(Boolean)];
  }, [runs, answers, name, axis]);
  const lines = useMemo(() => {
    // Baselines are drawn only if all runs have the same environment.
    const alike = runs.every(({ env }) => env === own.env);
    return isSuccess && alike ? baselines(own) : [];
  }, [runs]);
  return html`<${Curves} ...${{ ...rest, series, lines, large }}
    title=${name} label=${own.labels[name] ?? name}
    height=${large ? 320 : 126} wide=${isSuccess}
    range=${isSuccess ? SHARES : undefined} most=${isShare ? 1 : undefined}
    format=${isShare ? share : number} formatX=${axis === "seconds" ? clock : number}
    xLabel=${AXES[axis].title} sync=${`run ${axis}`}
    onTitle=${() => onLarge(large ? null : name)} />`;
}

/** Axis, smoothing and search, which are all in the address. */
function Toolbar({ axis, smoothing, query, setQuery, names, search, children }) {
  const metrics = names.filter((name) => !name.startsWith("ema/")).length;
  return html`<div class="row toolbar">
    <${Tabs} label="Horizontal axis" options=${AXES} value=${axis}
      onChange=${(key) => setQuery({ axis: key === "step" ? null : key })} />
    <label title="Exponential moving average; the raw values stay visible, pale">Smooth
      <input type="range" min="0" max="0.95" step="0.05" value=${smoothing}
        onInput=${(event) => setQuery({ smooth: Number(event.target.value) || null })} />
      <span class="number smoothing">${smoothing ? smoothing.toFixed(2) : "off"}</span></label>
    <input type="search" ref=${search} aria-label="Find a metric" value=${query.m ?? ""}
      placeholder="Find a metric  ( / )" title="${metrics} metrics are recorded"
      onInput=${(event) => setQuery({ m: event.target.value || null })} />
    ${children}
  </div>`;
}

/** A note when a search finds nothing, or more than is shown. */
function Found({ names, sought }) {
  if (!sought) return null;
  if (names.length === 0) return html`<p class="muted">No metric matches these words.</p>`;
  if (names.length < MOST) return null;
  return html`<p class="muted">Only the first ${plural(MOST, "metric")} are shown; add a word to
    narrow the search.</p>`;
}
