// Curves over a run, on uPlot: small charts that share a cursor and show the run's events.

import { nearest, number } from "./numbers.js";
import { COLOURS, axis, bars, flags, levels, seriesOf } from "./paint.js";
import { Text } from "./parts.js";
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const { uPlot } = window; // A script of its own, which is no module.

const NEAR = 6; // Tolerance in pixels for clicks and marks.
const DOUBLE_MS = 250; // How long a click waits, because it may be the first of two.
const FAINT = 0.28; // Opacity of the raw values behind the smoothed ones.
const LEFT = 0.5; // Opacity of values that were rolled back.
const MOST_VALUES = 4; // Values in a title line; more would not fit.

/** The exponential moving average with weight `w` on the past, bias-corrected; gaps stay. */
function smooth(values, w) {
  let [sum, weight] = [0, 0];
  return values.map((y) => {
    if (y === null) return null;
    sum = w * sum + (1 - w) * y;
    weight = w * weight + (1 - w);
    return sum / weight;
  });
}

/** What is drawn of the series, from back to front: `{x, y, colour, alpha, points, dash}`. */
function layersOf(series, smoothing) {
  const behind = [];
  const front = [];
  for (const { x, y, colour, points, left = [] } of series) {
    behind.push(...left.map((part) => ({ ...part, colour, alpha: LEFT, dash: [3, 3] })));
    const plain = { x, y, points, colour, alpha: 1 };
    if (smoothing > 0 && !points) {
      behind.push({ ...plain, alpha: FAINT });
      front.push({ ...plain, y: smooth(y, smoothing) });
    } else front.push(plain);
  }
  return [...behind, ...front];
}

/**
 * Curves in one small chart.
 *
 * `series`: `[{name, x, y, colour, left: [{x, y}], points, low, high}]`; `left` was rolled back,
 * `points` draws dots with intervals. `marks`: events `[{x, kind, text}]`; `lines`: levels
 * `[{y, label}]`. `range` fixes the vertical axis, `most` is its upper limit; `domain` widens the
 * horizontal axis. Charts of one `sync` share the cursor and the zoom (drag; a double click resets
 * it). `onPick(x)`: a click on a step; `onMark(mark)`: on an event; `onTitle()`: on the title, which
 * makes the chart `large` or small again; `wide` takes two columns.
 */
export function Curves({
  title, label = title, series, marks = [], lines = [], xLabel, height, sync, smoothing = 0,
  range, most, domain, format = number, formatX = number, onPick, onMark, onTitle, wide, large,
}) {
  const host = useRef(null);
  const chart = useRef(null);
  const now = useRef(null);
  const [at, setAt] = useState(null);
  now.current = { series, marks, lines, onPick, onMark };
  const layers = useMemo(() => layersOf(series, smoothing), [series, smoothing]);
  const data = useMemo(() => {
    if (layers.every(({ x }) => x.length === 0)) return [[]];
    const ends = domain ? [[domain, [null, null]]] : []; // An empty series keeps the width.
    return uPlot.join([...layers.map(({ x, y }) => [x, y]), ...ends]);
  }, [layers, domain?.join()]);
  const shape = JSON.stringify([
    layers.map(({ x, colour, alpha, points }) => [x.length < 2, colour, alpha, points]),
    range, most, xLabel, height, sync, domain !== undefined,
  ]);

  useEffect(() => {
    if (data[0].length === 0) return undefined;
    const u = (chart.current = new uPlot(
      {
        width: host.current.clientWidth,
        height,
        padding: [8, 10, 0, 0],
        legend: { show: false },
        cursor: {
          y: false,
          points: { show: false },
          drag: { x: true, y: false },
          sync: sync && { key: sync },
        },
        scales: {
          x: { time: false, range: apart },
          y: { range: range ? () => range : roomy(most) },
        },
        axes: [axis(2, xLabel, formatX), axis(3, undefined, format)],
        series: [{}, ...layers.map(seriesOf), ...(domain ? [{ show: false }] : [])],
        hooks: {
          draw: [
            (u) => levels(u, now.current.lines),
            (u) => bars(u, now.current.series),
            (u) => flags(u, now.current.marks),
          ],
          setCursor: [(u) => setAt(u.cursor.left < 0 ? null : cursorOf(u, now.current))],
        },
      },
      data,
      host.current,
    ));
    const end = new AbortController();
    follow(u, host.current, end.signal);
    clicks(u, now, end.signal);
    return () => {
      end.abort();
      u.destroy();
      chart.current = null;
    };
  }, [shape, data[0].length === 0]);

  useEffect(() => {
    const u = chart.current;
    if (!u || u.data === data) return;
    const { min, max } = u.scales.x;
    const zoomed = min > u.data[0][0] || max < u.data[0].at(-1);
    u.setData(data, !zoomed); // A new step must not end a zoom.
    if (zoomed) u.redraw();
  }, [data]);
  useEffect(() => chart.current?.redraw(false), [marks, lines]);

  const kinds = ["curve", wide && "wide", large && "large"].filter(Boolean).join(" ");
  const said = series.map((one) => spoken(one, format)).join("; ");
  return html`<figure class=${kinds} data-testid="curve">
    <figcaption>
      ${onTitle
        ? html`<button class="bare curve-title clipped" title=${title}
            aria-expanded=${large ? "true" : "false"} onClick=${onTitle}>${label}</button>`
        : html`<span class="curve-title clipped">${label}</span>`}
      <${Readout} ...${{ series, at, format, formatX }} />
    </figcaption>
    <div class="curve-host ${onPick ? "pick" : ""}" ref=${host} style=${{ height: `${height}px` }}
      role="img" aria-label="${label}: ${said}">
      ${data[0].length === 0 && html`<p class="muted">nothing recorded yet</p>`}
      ${at?.marks.length > 0 && html`<${Tip} ...${at} />`}
    </div>
  </figure>`;
}

/** The events under the pointer. */
function Tip({ marks, left, turned }) {
  return html`<div class="panel curve-tip ${turned ? "turned" : ""}" style=${{ left: `${left}px` }}>
    ${marks.map(({ text }) => html`<p><${Text} text=${text} /></p>`)}
  </div>`;
}

// A curve of one step still needs a width, a constant one a height.
const apart = (u, low, high) => {
  if (low === high) return [low - 1, high + 1];
  // A zoom may be closer; a run of one step is drawn on an axis with three whole numbers.
  const whole = Number.isInteger(low) && Number.isInteger(high);
  return whole && high - low < 2 ? [low, low + 2] : [low, high];
};
const roomy = (most) => (_, low, high) => {
  if (low === null) return [0, 1];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  const top = high <= most ? Math.min(high + room, 1.02 * most) : high + room;
  return [low >= 0 && low - room < 0 ? 0 : low - room, top];
};

function cursorOf(u, { marks }) {
  const hovered = u.over.matches(":hover");
  const on = (mark) => Math.abs(u.valToPos(mark.x, "x") - u.cursor.left) <= NEAR;
  return {
    x: u.posToVal(u.cursor.left, "x"),
    left: u.cursor.left + u.over.offsetLeft,
    turned: u.cursor.left > u.over.clientWidth / 2,
    marks: hovered ? marks.filter(on).slice(0, 6) : [],
  };
}

/** Keep a chart as wide as its container and in the theme's colours, until `signal`. */
function follow(u, place, signal) {
  const size = new ResizeObserver(() => {
    const width = place.clientWidth;
    if (width && width !== u.width) u.setSize({ width, height: u.height });
  });
  const redraw = () => u.redraw(false);
  size.observe(place);
  signal.addEventListener("abort", () => size.disconnect());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw, { signal });
  addEventListener("theme", redraw, { signal });
}

/** Clicks on events and steps, until `signal`. A drag zooms, a double click ends the zoom. */
function clicks(u, now, signal) {
  let down = null;
  let waiting = null;
  const press = (event) => (down = event.clientX);
  const click = (event) => {
    if (down !== null && Math.abs(event.clientX - down) > NEAR) return;
    const { series, marks, onPick, onMark } = now.current;
    const left = event.clientX - u.over.getBoundingClientRect().left;
    const mark = marks.find(({ x }) => Math.abs(u.valToPos(x, "x") - left) <= NEAR);
    if (mark && onMark) {
      onMark(mark);
      return;
    }
    const x = series[0]?.x ?? [];
    clearTimeout(waiting);
    if (!onPick || x.length === 0 || event.detail > 1) return;
    const step = x[nearest(x, u.posToVal(left, "x"))];
    waiting = setTimeout(() => onPick(step), DOUBLE_MS);
  };
  signal.addEventListener("abort", () => clearTimeout(waiting));
  u.over.addEventListener("pointerdown", press, { signal });
  u.over.addEventListener("click", click, { signal });
}

/** The values under the cursor, or the last ones. */
function Readout({ series, at, format, formatX }) {
  const known = series.filter(({ x }) => x.length);
  const shown = known.map(({ name, colour, x, y, points }) => {
    const i = at ? nearest(x, at.x) : x.length - 1;
    const text = `${points ? "● " : ""}${format(y[i])}`;
    return { name, text, x: x[i], ink: `ink-${colour % COLOURS}` };
  });
  return html`<span class="curve-readout">
    ${at && shown.length > 0 && html`<span class="muted">${formatX(shown[0].x)}</span>`}
    ${shown.slice(0, MOST_VALUES).map(({ name, text, ink }) =>
      html`<b class=${ink} title=${name}>${text}</b>`)}
  </span>`;
}

function spoken({ name, y }, format) {
  const known = y.filter((value) => value !== null);
  if (known.length === 0) return `${name} none`;
  return `${name} from ${format(known[0])} to ${format(known.at(-1))}`;
}
