// Curves over a run (on uPlot) and heat maps (on a canvas). Colours are read from the style sheet
// whenever something is drawn, so that both follow the theme.

import { number } from "./parts.js";
import uPlot from "./vendor/uplot.js";
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const NEAR = 6; // Pixels from a mark or a click's beginning that still count as on it.
const DOUBLE_MS = 250; // A click waits so long for being the first of two.
const FAINT = 0.28; // Opacity of what stands behind: raw values, what a rollback left.
const FONT = "11px system-ui, sans-serif";
const COLOURS = 8;

/** A colour of the style sheet: `css("--c0")`. */
export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const colour = (index) => css(`--c${index % COLOURS}`);

/** The exponential moving average of weight `w` for the past, started without bias; gaps stay. */
export function smooth(values, w) {
  let [sum, weight] = [0, 0];
  return values.map((y) => {
    if (y === null) return null;
    sum = w * sum + (1 - w) * y;
    weight = w * weight + (1 - w);
    return sum / weight;
  });
}

/** The index of the value in ascending `x` that is nearest to `at`. */
export function nearest(x, at) {
  let [low, high] = [0, x.length - 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < at) low = middle + 1;
    else high = middle;
  }
  return low > 0 && at - x[low - 1] < x[low] - at ? low - 1 : low;
}

/** What is drawn of the series, from back to front: `{x, y, colour, alpha, points, dash}`. */
function layersOf(series, smoothing) {
  const behind = [];
  const front = [];
  series.forEach((one, index) => {
    const shade = one.colour ?? index;
    for (const part of one.left ?? []) {
      behind.push({ ...part, colour: shade, alpha: FAINT + 0.2, dash: [3, 3], points: part.x.length < 2 });
    }
    const plain = { x: one.x, y: one.y, colour: shade, alpha: 1, points: one.points, alone: one.x.length < 2 };
    if (smoothing > 0 && !one.points && !plain.alone) {
      behind.push({ ...plain, alpha: FAINT });
      front.push({ ...plain, y: smooth(one.y, smoothing) });
    } else front.push(plain);
  });
  return [...behind, ...front];
}

function seriesOf(layer) {
  return {
    stroke: () => colour(layer.colour),
    alpha: layer.alpha,
    width: layer.points ? 0 : 1.6,
    dash: layer.dash,
    spanGaps: true,
    points: {
      show: Boolean(layer.points || layer.alone),
      size: layer.points ? 6 : 4,
      fill: () => colour(layer.colour),
      stroke: () => colour(layer.colour),
    },
  };
}

/** One axis: short numbers and quiet lines. */
function axis(side, label, format) {
  return {
    side,
    label,
    labelSize: label ? 16 : 0,
    labelFont: FONT,
    font: FONT,
    stroke: () => css("--muted"),
    grid: { stroke: () => css("--grid"), width: 1 },
    ticks: { show: false },
    gap: 4,
    size: side === 2 ? 20 : 46,
    space: side === 2 ? 52 : 30,
    values: (_, splits) => splits.map(format),
  };
}

function bars(u, series) {
  series.forEach((one, index) => {
    if (!one.low) return;
    u.ctx.strokeStyle = colour(one.colour ?? index);
    u.ctx.lineWidth = 1.5 * devicePixelRatio;
    one.x.forEach((x, i) => {
      if (one.low[i] === null) return;
      const at = u.valToPos(x, "x", true);
      u.ctx.beginPath();
      u.ctx.moveTo(at, u.valToPos(one.low[i], "y", true));
      u.ctx.lineTo(at, u.valToPos(one.high[i], "y", true));
      u.ctx.stroke();
    });
  });
}

/** Floor and ceiling; a course begins low and ends high, so the high label stands left. */
function levels(u, lines) {
  const { ctx, bbox } = u;
  ctx.lineWidth = devicePixelRatio;
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  for (const { y, label } of lines) {
    const at = u.valToPos(y, "y", true);
    if (at < bbox.top - 1 || at > bbox.top + bbox.height + 1) continue;
    ctx.strokeStyle = ctx.fillStyle = css("--muted");
    ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(bbox.left, at);
    ctx.lineTo(bbox.left + bbox.width, at);
    ctx.stroke();
    const high = at < bbox.top + bbox.height / 2;
    ctx.textAlign = high ? "left" : "right";
    const beside = high ? bbox.left + 4 : bbox.left + bbox.width - 4;
    ctx.fillText(label, beside, at + (high ? 12 : -4) * devicePixelRatio);
  }
  ctx.setLineDash([]);
}

function flags(u, marks) {
  const { ctx, bbox } = u;
  const wide = 4 * devicePixelRatio;
  for (const mark of marks) {
    const at = Math.round(u.valToPos(mark.x, "x", true));
    if (at < bbox.left || at > bbox.left + bbox.width) continue;
    const kind = css(mark.kind === "alarm" ? "--bad" : "--warn");
    ctx.strokeStyle = ctx.fillStyle = mark.colour === undefined ? kind : colour(mark.colour);
    ctx.lineWidth = devicePixelRatio;
    ctx.globalAlpha = 0.55;
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    ctx.globalAlpha = 1;
    ctx.beginPath(); // An alarm is a triangle on top, what was done about it a square below.
    if (mark.kind === "alarm") {
      ctx.moveTo(at - wide, bbox.top - wide);
      ctx.lineTo(at + wide, bbox.top - wide);
      ctx.lineTo(at, bbox.top + wide);
    } else ctx.rect(at - wide, bbox.top + bbox.height - 2 * wide, 2 * wide, 2 * wide);
    ctx.fill();
  }
}

/**
 * Curves in one small chart.
 *
 * `series`: `[{name, x, y, colour, left: [{x, y}], points, low, high}]`; `left` is what a rollback
 * left behind, `points` draws dots with intervals. `marks`: events `[{x, kind, text}]`; `lines`:
 * levels `[{y, label}]`. `range` fixes the vertical axis, `most` is where it may end; `domain` widens the
 * horizontal one. Charts of one `sync` share the cursor and
 * the zoom (drag; double click for all). `onPick(x)`: a click on a step; `onMark(mark)`: on an
 * event; `onTitle()`: on the title, which makes it `large` or small again; `wide` takes two places.
 */
export function Curves({
  title, label, series, marks = [], lines = [], xLabel, height = 130, sync, smoothing = 0, range, most, domain,
  format = number, formatX = number, onPick, onMark, onTitle, wide: broad, large,
}) {
  const host = useRef(null);
  const chart = useRef(null);
  const now = useRef(null);
  const [at, setAt] = useState(null);
  now.current = { series, marks, lines, onPick, onMark };
  const layers = useMemo(() => layersOf(series, smoothing), [series, smoothing]);
  const data = useMemo(() => {
    if (layers.every(({ x }) => x.length === 0)) return [[]];
    const ends = domain ? [[domain, [null, null]]] : []; // A series of nothing holds the width.
    return uPlot.join([...layers.map(({ x, y }) => [x, y]), ...ends]);
  }, [layers, domain?.join()]);
  const shape = JSON.stringify([
    layers.map(({ colour, alpha, points, alone }) => [colour, alpha, points, alone]),
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
        cursor: { y: false, points: { show: false }, sync: sync && { key: sync }, drag: { x: true, y: false } },
        scales: { x: { time: false, range: apart }, y: range ? { range: () => range } : { range: roomy(most) } },
        axes: [axis(2, xLabel, (x) => formatX(x)), axis(3, undefined, (y) => format(y))],
        series: [{}, ...layers.map(seriesOf), ...(domain ? [{ show: false }] : [])],
        hooks: {
          drawClear: [(u) => levels(u, now.current.lines)],
          draw: [(u) => bars(u, now.current.series), (u) => flags(u, now.current.marks)],
          setCursor: [(u) => setAt(u.cursor.left < 0 ? null : cursorOf(u, now.current))],
        },
      },
      data,
      host.current,
    ));
    const stop = [follow(u, host.current), clicks(u, now)];
    return () => {
      stop.forEach((end) => end());
      u.destroy();
      chart.current = null;
    };
  }, [shape, data[0].length === 0]);

  useEffect(() => {
    const u = chart.current;
    if (!u || u.data === data) return;
    const { min, max } = u.scales.x;
    const zoomed = min > u.data[0][0] || max < u.data[0].at(-1);
    u.setData(data, !zoomed); // A new step must not throw the reader out of a zoom.
    if (zoomed) u.redraw();
  }, [data]);
  useEffect(() => chart.current?.redraw(false), [marks, lines]);

  return html`<figure class=${["curve", broad && "wide", large && "large"].filter(Boolean).join(" ")} data-testid="curve">
    <figcaption>
      ${onTitle
        ? html`<button class="curve-title" title=${title} aria-expanded=${large ? "true" : "false"} onClick=${onTitle}>${label ?? title}</button>`
        : html`<span class="curve-title" title=${title}>${label ?? title}</span>`}
      <${Readout} series=${series} at=${at} format=${format} formatX=${formatX} />
    </figcaption>
    <div class="curve-host ${onPick ? "pick" : ""}" ref=${host} style=${{ height: `${height}px` }}
      role="img" aria-label=${`${label ?? title}: ${series.map((one) => spoken(one, format)).join("; ")}`}>
      ${data[0].length === 0 && html`<p class="muted">nothing recorded yet</p>`}
      ${at?.marks.length > 0 && html`<div class="curve-tip ${at.turned ? "turned" : ""}" style=${{ left: `${at.left}px` }}>
        ${at.marks.map((mark) => html`<p class="event-${mark.kind}">${mark.text}</p>`)}
      </div>`}
    </div>
  </figure>`;
}

// A course of one step still needs a width; a constant one a height.
const apart = (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]);
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

/** Keep a chart as wide as its place and in the theme's colours. */
function follow(u, place) {
  const size = new ResizeObserver(() => {
    if (place.clientWidth && place.clientWidth !== u.width) u.setSize({ width: place.clientWidth, height: u.height });
  });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const redraw = () => u.redraw(false);
  size.observe(place);
  dark.addEventListener("change", redraw);
  addEventListener("theme", redraw);
  return () => {
    size.disconnect();
    dark.removeEventListener("change", redraw);
    removeEventListener("theme", redraw);
  };
}

/** Clicks on events and steps. A drag zooms and is no click, nor is a double click, which ends that. */
function clicks(u, now) {
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
  u.over.addEventListener("pointerdown", press);
  u.over.addEventListener("click", click);
  return () => {
    clearTimeout(waiting);
    u.over.removeEventListener("pointerdown", press);
    u.over.removeEventListener("click", click);
  };
}

/** The values under the cursor, or the last ones. */
function Readout({ series, at, format, formatX }) {
  const shown = series.filter(({ x }) => x.length).map((one, index) => {
    const i = at ? nearest(one.x, at.x) : one.x.length - 1;
    return { colour: one.colour ?? index, x: one.x[i], y: one.y[i], points: one.points, name: one.name };
  });
  return html`<span class="curve-readout">
    ${at && shown.length > 0 && html`<span class="muted">${formatX(shown[0].x)}</span>`}
    ${shown.slice(0, 4).map(
      ({ colour: shade, y, points, name }) => html`<b class="ink-${shade % COLOURS}" title=${name}>${points ? "● " : ""}${format(y)}</b>`,
    )}
  </span>`;
}

function spoken({ name, y }, format) {
  const known = y.filter((value) => value !== null);
  return known.length ? `${name} from ${format(known[0])} to ${format(known.at(-1))}` : `${name} none`;
}
