// The metrics of one or more runs as a grid of small charts, with axis, smoothing and search.

import { link } from "./addresses.js";
import { useAnswers } from "./api.js";
import { Curves } from "./charts.js";
import { clock, number, plural, share } from "./numbers.js";
import { Tabs, Text } from "./parts.js";
import { html, useMemo, useRef } from "./vendor/preact-htm.js";

const MOST = 24; // Charts that a search shows at once.
const SUCCESS = "success/mean";
const SHARES = [0, 1.02]; // A little above 1, so that a curve at 1 is not on the edge.
const NOWHERE = { step: [] };

export const AXES = [
  { key: "step", title: "Step" },
  { key: "updates", title: "Updates" },
  { key: "episodes", title: "Episodes" },
  { key: "tokens", title: "Tokens" },
  { key: "seconds", title: "Time" },
];

/** The horizontal axis, from the address. */
export function axisOf(query) {
  return AXES.some(({ key }) => key === query.axis) ? query.axis : "step";
}

/** The smoothing, from the address: 0 to 0.95. */
export function smoothingOf(query) {
  return Math.min(0.95, Math.max(0, Number(query.smooth) || 0));
}

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
 * The answers of `/api/metrics` by run: `{answers: {run: answer}, error, reload}`. When other metrics
 * are requested, the previous ones stay until the new ones have arrived.
 */
export function useMetrics(runs, names) {
  const asked = names.join(",");
  const questions = asked ? runs.map((run) => ["/api/metrics", { run, names: asked }]) : [];
  const { answers, errors, reload } = useAnswers(questions);
  const last = useRef({});
  last.current = useMemo(
    () => ({ ...last.current, ...byRun(answers.filter(Boolean)) }), [answers],
  );
  return { answers: last.current, error: errors.find(Boolean) ?? null, reload };
}

const byRun = (answers) => Object.fromEntries(answers.map((answer) => [answer.run, answer]));

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
  if (!found) return { name: run, run, colour, x: [], y: [], left: [] };
  const left = axis === "step" ? found.left : [];
  return {
    name: run,
    run,
    colour,
    x: found.at.map((index) => answer.axes[axis][index]),
    y: found.values,
    left: left.map(({ steps, values }) => ({ x: steps, y: values })),
  };
}

/** A run's evaluations with the sampling of its headline, as dots with intervals. */
function evaluationsOf(run, answer, axis, colour) {
  const ownWay = ({ how, step }) => step !== null && how === run.success?.how;
  const alike = run.evaluations.filter(ownWay);
  return {
    name: `${run.run}, evaluated`,
    run: run.run,
    colour,
    points: true,
    x: alike.map(({ step }) => placed(answer.axes, axis, step)),
    y: alike.map(({ success }) => success.value),
    low: alike.map(({ success }) => success.low),
    high: alike.map(({ success }) => success.high),
  };
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
 * The charts of `names`. `runs` are answers of `/api/run`, the page's own run first, each in its own
 * colour; `answers` are their metrics by run. `onPick(step)` is a click on a step of the first run,
 * `onMark(mark)` on one of its events, `onLarge(name)` on a title.
 */
export function Signals({ runs, answers, names, axis, large, onPick, onMark, ...rest }) {
  const axes = answers[runs[0].run]?.axes;
  const marks = useMemo(() => marksOf(runs, answers, axis), [runs, answers, axis]);
  if (!axes) return null;
  const end = Math.max(...runs.map(({ run }) => answers[run]?.axes[axis].at(-1) ?? 0));
  return html`<div class="signals">
    ${names.map(
      (name) => html`<${Signal}
        key=${name}
        ...${{ name, runs, answers, axis, marks, ...rest }}
        large=${name === large}
        domain=${[0, end]}
        onMark=${onMark && ((mark) => mark.own && onMark(mark))}
        onPick=${onPick && ((x) => onPick(stepAt(axes, axis, x)))}
      />`,
    )}
  </div>`;
}

function Signal({ name, runs, answers, axis, large, onLarge, ...rest }) {
  const [own, isSuccess] = [runs[0], name === SUCCESS];
  const isShare = isSuccess || name.endsWith("fraction");
  const series = useMemo(() => {
    const curve = (run, i) => seriesOf(run.run, answers[run.run], name, axis, i);
    const dots = (run, i) =>
      isSuccess && answers[run.run] ? [evaluationsOf(run, answers[run.run], axis, i)] : [];
    return [...runs.map(curve), ...runs.flatMap(dots)];
  }, [runs, answers, name, axis]);
  const lines = useMemo(() => {
    const levels = [
      { y: own.random, label: "random play" },
      { y: own.optimal, label: "optimal play" },
    ];
    // Baselines are drawn only if all runs have the same environment.
    const alike = runs.every(({ env }) => env === own.env);
    return isSuccess && alike ? levels.filter(({ y }) => y !== null) : [];
  }, [runs]);
  return html`<${Curves}
    ...${{ ...rest, series, lines, large }}
    title=${name}
    label=${own.labels[name] ?? name}
    height=${large ? 320 : 112}
    wide=${isSuccess}
    range=${isSuccess ? SHARES : undefined}
    most=${isShare ? 1 : undefined}
    format=${isShare ? share : number}
    formatX=${axis === "seconds" ? clock : number}
    xLabel=${large ? AXES.find(({ key }) => key === axis).title : undefined}
    sync=${`run ${axis}`}
    onTitle=${() => onLarge(large ? null : name)}
  />`;
}

/** Axis, smoothing and search, which are all in the address. */
export function Toolbar({ query, setQuery, names, search, children }) {
  const smoothing = smoothingOf(query);
  const metrics = names.filter((name) => !name.startsWith("ema/")).length;
  return html`<div class="row toolbar">
    <${Tabs}
      label="Horizontal axis"
      tabs=${AXES}
      value=${axisOf(query)}
      onChange=${(key) => setQuery({ axis: key === "step" ? null : key })}
    />
    <label title="Exponential moving average; the raw values stay visible, pale">
      Smooth
      <input
        type="range" min="0" max="0.95" step="0.05" value=${smoothing}
        onInput=${(event) => setQuery({ smooth: Number(event.target.value) || null })}
      />
      <span class="number smoothing">${smoothing ? smoothing.toFixed(2) : "off"}</span>
    </label>
    <input
      type="search" ref=${search} aria-label="Find a metric" placeholder="Find a metric  ( / )"
      title="${metrics} metrics are recorded" value=${query.m ?? ""}
      onInput=${(event) => setQuery({ m: event.target.value || null })}
    />
    ${children}
  </div>`;
}

/** The runs in the charts, each with its colour; the first one cannot be removed. */
export function Legend({ runs, onRemove }) {
  return html`<ul class="legend" aria-label="Runs shown">
    ${runs.map(
      (run, index) => html`<li key=${run}>
        <i class="swatch fill-${index % 8}"></i>
        <a href=${link("run", { run })}><${Text} text=${run} /></a>
        ${index > 0 &&
        html`<button class="quiet" aria-label="remove ${run}" onClick=${() => onRemove(run)}>
          ×
        </button>`}
      </li>`,
    )}
  </ul>`;
}

/** A note when a search finds nothing, or more than is shown. */
export function Found({ names, sought }) {
  if (!sought) return null;
  if (names.length === 0) return html`<p class="muted">No metric matches these words.</p>`;
  if (names.length < MOST) return null;
  return html`<p class="muted">Only the first ${plural(MOST, "metric")} are shown; add a word to narrow the search.</p>`;
}
