// A run's metrics as a grid of small charts: which are shown, over which axis, of which runs.

import { useApis } from "./api.js";
import { Curves } from "./charts.js";
import { Tabs, Text, clock, link, number, plural, share } from "./parts.js";
import { html, useMemo } from "./vendor/preact-htm.js";

const MOST = 24; // Charts that a search shows at once.
const SUCCESS = "success/mean";

export const AXES = [
  { key: "step", title: "Step" },
  { key: "updates", title: "Updates" },
  { key: "episodes", title: "Episodes" },
  { key: "tokens", title: "Tokens" },
  { key: "seconds", title: "Time" },
];

/** The metrics to show: the report's signals in its order, or those that hold the sought words. */
export function chosen(names, labels, sought) {
  const words = (sought ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 0) return Object.keys(labels).filter((name) => names.includes(name));
  const holds = (name) => {
    const said = `${name} ${labels[name] ?? ""}`.toLowerCase();
    return words.every((word) => said.includes(word));
  };
  const found = names.filter((name) => holds(name) && (!name.startsWith("ema/") || words.includes("ema")));
  return found.slice(0, MOST);
}

/** The answers of `/api/metrics` by run: `{answers: {run: answer}, error, reload}`. */
export function useMetrics(runs, names) {
  const questions = names.length ? runs.map((run) => ["/api/metrics", { run, names: names.join(",") }]) : [];
  const { data, error, reload } = useApis(questions);
  const answers = useMemo(() => Object.fromEntries((data ?? []).map((each) => [each.run, each])), [data]);
  return { answers, error, reload };
}

/** Where a step lies on an axis: the count after it, 0 before the first. */
export function placed(axes, axis, step) {
  if (axis === "step") return step;
  const index = axes.step.findLastIndex((each) => each <= step);
  return index < 0 ? 0 : axes[axis][index];
}

/** The step whose point lies at `x` of an axis. */
export function stepAt(axes, axis, x) {
  return axis === "step" ? x : axes.step[axes[axis].indexOf(x)];
}

/** One metric of a run as a series of `Curves`; what a rollback left behind is known by step only. */
function seriesOf(run, answer, name, axis, colour) {
  const found = answer?.names[name];
  if (!found) return { name: run, run, colour, x: [], y: [], left: [] };
  const left = axis === "step" ? found.left.map(({ steps, values }) => ({ x: steps, y: values })) : [];
  const x = found.at.map((index) => answer.axes[axis][index]);
  return { name: run, run, colour, x, y: found.values, left };
}

/** A run's evaluations in its training's own way of sampling, as dots with intervals. */
function evaluationsOf(run, answer, axis, colour) {
  const alike = run.evaluations.filter(({ how }) => how === run.success?.how);
  return {
    name: `${run.run}, evaluated`, run: run.run, colour, points: true,
    x: alike.map(({ step }) => placed(answer.axes, axis, step)),
    y: alike.map(({ success }) => success.value),
    low: alike.map(({ success }) => success.low),
    high: alike.map(({ success }) => success.high),
  };
}

/** The events of all runs that are shown as marks of an axis; of several, each in its run's colour. */
function marksOf(runs, answers, axis) {
  const several = runs.length > 1;
  return runs.flatMap(({ run, events }, index) => events.map((event) => ({
    x: placed(answers[run]?.axes ?? NOWHERE, axis, event.step), kind: event.kind,
    colour: several ? index : undefined, own: index === 0, id: event.id,
    text: `${several ? `${run}, ` : ""}${event.text.startsWith("step ") ? "" : `step ${event.step}: `}${event.text}`,
  })));
}

const NOWHERE = { step: [] };

/**
 * The charts of `names`. `runs` are answers of `/api/run`, the page's own first, each in its own
 * colour; `answers` their metrics by run. `onPick(step)` is a click on a step of the first run.
 */
export function Signals({ runs, answers, names, axis, smoothing, large, onLarge, onPick, onMark }) {
  const own = runs[0];
  const axes = answers[own.run]?.axes;
  const marks = useMemo(() => marksOf(runs, answers, axis), [runs, answers, axis]);
  const end = Math.max(...runs.map((run) => answers[run.run]?.axes[axis].at(-1) ?? 0));
  const title = AXES.find(({ key }) => key === axis).title.toLowerCase();
  if (!axes) return null;
  const follow = onMark && ((mark) => mark.own && onMark(mark));
  return html`<div class="signals">
    ${names.map((name) => html`<${Signal}
      key=${name} ...${{ name, runs, answers, axis, smoothing, marks, onLarge }} onMark=${follow} domain=${[0, end]}
      large=${name === large} xLabel=${name === large && title}
      onPick=${onPick && ((x) => onPick(stepAt(axes, axis, x)))}
    />`)}
  </div>`;
}

function Signal({ name, runs, answers, axis, smoothing, marks, large, onLarge, ...rest }) {
  const shares = name === SUCCESS || name.endsWith("fraction");
  const own = runs[0];
  const isSuccess = name === SUCCESS;
  const series = useMemo(() => {
    const drawn = runs.map((run, i) => seriesOf(run.run, answers[run.run], name, axis, i));
    const known = runs.filter((run) => isSuccess && answers[run.run]);
    const dots = known.map((run) => evaluationsOf(run, answers[run.run], axis, runs.indexOf(run)));
    return [...drawn, ...dots];
  }, [runs, answers, name, axis]);
  const lines = useMemo(() => {
    if (!isSuccess) return [];
    const levels = [{ y: own.random, label: "random play" }, { y: own.best, label: "best play" }];
    return levels.filter(({ y }) => y !== null);
  }, [own.random, own.best]);
  return html`<${Curves}
    ...${rest} ...${{ series, marks, lines, smoothing, large }} title=${name} label=${own.labels[name] ?? name}
    height=${large ? 320 : 112} wide=${isSuccess} sync=${`run ${axis}`}
    range=${isSuccess ? SHARES : undefined} most=${shares ? 1 : undefined} format=${shares ? share : number}
    formatX=${axis === "seconds" ? clock : number} onTitle=${() => onLarge(large ? null : name)}
  />`;
}

const SHARES = [0, 1.02]; // A little above 1, so that perfect play is not on the edge.

/** Axis, smoothing and search; all of it lives in the address. */
export function Toolbar({ query, setQuery, names, search, children }) {
  const axis = axisOf(query);
  const smoothing = smoothingOf(query);
  const metrics = names.filter((name) => !name.startsWith("ema/")).length;
  return html`<div class="row toolbar">
    <${Tabs} label="Horizontal axis" tabs=${AXES} value=${axis}
      onChange=${(key) => setQuery({ axis: key === "step" ? null : key })} />
    <label title="Exponential moving average; the raw course stays behind it, pale">Smooth
      <input type="range" min="0" max="0.95" step="0.05" value=${smoothing}
        onInput=${(event) => setQuery({ smooth: Number(event.target.value) || null })} />
      <span class="number smoothing">${smoothing ? smoothing.toFixed(2) : "off"}</span>
    </label>
    <input type="search" ref=${search} aria-label="Find a metric" placeholder="Find a metric  ( / )" title="${metrics} are recorded"
      value=${query.m ?? ""} onInput=${(event) => setQuery({ m: event.target.value || null })} />
    ${children}
  </div>`;
}

/** The axis that the address names. */
export function axisOf(query) {
  return AXES.some(({ key }) => key === query.axis) ? query.axis : "step";
}

/** The smoothing that the address names, from 0 to 0.95. */
export function smoothingOf(query) {
  return Math.min(0.95, Math.max(0, Number(query.smooth) || 0));
}

/** The runs that are drawn over each other, each with its colour; the first cannot be removed. */
export function Legend({ runs, onRemove }) {
  return html`<ul class="legend" aria-label="Runs shown">
    ${runs.map((run, index) => html`<li key=${run}>
      <i class="swatch fill-${index % 8}"></i><a href=${link("run", { run })}><${Text} text=${run} /></a>
      ${index > 0 && onRemove && html`<button class="quiet" aria-label="remove ${run}" onClick=${() => onRemove(run)}>×</button>`}
    </li>`)}
  </ul>`;
}

/** A line when a search found nothing, or more than is shown. */
export function Found({ names, sought }) {
  if (!sought) return null;
  if (names.length === 0) return html`<p class="muted">No metric holds these words.</p>`;
  if (names.length < MOST) return null;
  return html`<p class="muted">The first ${plural(MOST, "metric")}; name more of it to see others.</p>`;
}
