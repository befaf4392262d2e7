// The plane of H(Z|X) and I(X;Z) with its four regimes, and the path of a run through it.

import { number, percent } from "./parts.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const HEIGHT = 340;
const NARROW = 560; // Pixels below which two names do not fit beside each other.
const BOX = { left: 54, right: 14, top: 14, bottom: 42 };
const TICKS = [0, 0.1, 0.3, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
const COLOURS = { first: 0, any: 5 };

/** Which turn of an episode speaks, by the name of its path in the metrics. */
export const PATHS = { first: "first turns", any: "a turn drawn uniformly" };

/** The paths among `names`, each once, first turns first. */
export function pathsIn(names) {
  return [...new Set(names)].sort((a, b) => (b === "first") - (a === "first"));
}

/**
 * The share of what could be told (I over H of the prompts, so that steps with other numbers of
 * prompts compare) against H(Z|X), whose axis is logarithmic around its threshold.
 */
export function Plane({ paths, thresholds, path, step, onPick }) {
  const [over, setOver] = useState(null);
  const [place, width] = useWidth();
  const named = Object.entries(paths).filter(([, { steps }]) => steps.length > 0);
  const points = named.map(([name, one]) => ({ name, points: pointsOf(name, one, thresholds) }));
  const all = points.flatMap((one) => one.points);
  const edge = thresholds.conditional_entropy;
  const most = Math.max(4 * edge, ...all.map(({ entropy }) => entropy)) * 1.15;
  const x = (nats) => BOX.left + (width - BOX.left - BOX.right) * (bent(nats / edge) / bent(most / edge));
  const top = Math.max(1, ...all.map(({ share }) => share));
  const low = Math.min(0, ...all.map(({ share }) => share));
  const y = (share) => HEIGHT - BOX.bottom - (HEIGHT - BOX.top - BOX.bottom) * ((share - low) / (top - low));
  const scale = { width, x, y, most, edge, middle: thresholds.mi_share, top, low };
  const shown = over ?? all.find((one) => one.path === path && one.step === step) ?? null;
  return html`<div class="plane" ref=${place}>
    <svg viewBox="0 0 ${width} ${HEIGHT}" role="img" aria-label=${spoken(points)} data-testid="plane">
      <${Regimes} ...${scale} />
      <${Axes} ...${scale} />
      ${points.map((one) => html`<${Course} key=${one.name} ...${one} ...${scale} shown=${shown}
        onOver=${setOver} onPick=${onPick} />`)}
    </svg>
    <p class="readout" aria-live="polite">${shown ? told(shown) : html`<span class="row tight">
      ${points.map(({ name }) => html`<span key=${name} class="row tight"><i class=${`dot fill-${colourOf(name)}`}></i>
        ${PATHS[name] ?? name}</span>`)}
      <span class="muted">Ring: first step; disc: last step. Hover or choose a point.</span></span>`}</p>
  </div>`;
}

/** The width that a place has, for pictures whose letters must not shrink with it. */
function useWidth() {
  const place = useRef(null);
  const [width, setWidth] = useState(720);
  useEffect(() => {
    const size = new ResizeObserver(([{ contentRect }]) => setWidth(Math.max(280, Math.round(contentRect.width))));
    size.observe(place.current);
    return () => size.disconnect();
  }, []);
  return [place, width];
}

const colourOf = (name) => COLOURS[name] ?? 7;
const bent = (ratio) => Math.log1p(Math.max(0, ratio));

function pointsOf(path, { steps, mi, conditional_entropy: entropies, prompt_entropy: ceilings, ...rest }, { min_prompts: least }) {
  return steps
    .map((step, i) => ({
      path, step, mi: mi[i], entropy: entropies[i], ceiling: ceilings[i],
      share: ceilings[i] ? mi[i] / ceilings[i] : 0,
      regime: rest.regime[i], prompts: rest.num_prompts[i], decided: rest.num_prompts[i] >= least,
      retrieval: rest.retrieval?.[i], chance: rest.chance?.[i], zscore: rest.zscore?.[i],
    }))
    .filter(({ mi: told, entropy }) => told !== null && entropy !== null);
}

function Regimes({ width, x, y, most, edge, middle, top, low }) {
  const box = (name, x0, x1, y0, y1, kind, anchor, at) => html`
    <rect class=${`regime ${kind}`} x=${x(x0)} y=${y(y1)} width=${x(x1) - x(x0)} height=${y(y0) - y(y1)} />
    ${linesOf(name, width).map((line, i) => html`<text key=${i} class="regime-name"
      x=${anchor === "start" ? x(x0) + 8 : x(x1) - 8} y=${at + 16 * i} text-anchor=${anchor}>${line}</text>`)}`;
  const [above, below] = [y(middle) - 9, y(middle) + 19]; // Courses keep to the outer edges.
  return html`<g>
    ${box("compressed", 0, edge, middle, top, "warn", "start", above)}
    ${box("diverse", edge, most, middle, top, "good", "end", above)}
    ${box("low-entropy collapse", 0, edge, low, middle, "bad", "start", below)}
    ${box("template collapse", edge, most, low, middle, "bad", "end", below)}
  </g>`;
}

const linesOf = (name, width) => (width < NARROW ? name.split(" ") : [name]);

function Axes({ width, x, y, most, edge, top, low, middle }) {
  const steps = [0, 0.25, 0.5, 0.75, 1].filter((share) => share >= low && share <= top);
  const [bottom, left] = [HEIGHT - BOX.bottom, BOX.left];
  const ticks = TICKS.filter((nats) => nats <= most).reduce(
    (kept, nats) => (kept.length && x(nats) - x(kept.at(-1)) < 34 ? kept : [...kept, nats]), []);
  return html`<g class="axes">
    ${ticks.map((nats) => html`<g key=${nats}><line x1=${x(nats)} x2=${x(nats)} y1=${bottom} y2=${bottom + 4} />
      <text x=${x(nats)} y=${bottom + 16} text-anchor="middle">${nats}</text></g>`)}
    ${steps.map((share) => html`<g key=${share}><line x1=${left - 4} x2=${left} y1=${y(share)} y2=${y(share)} />
      <text x=${left - 7} y=${y(share) + 4} text-anchor="end">${100 * share} %</text></g>`)}
    <line class="threshold" x1=${x(edge)} x2=${x(edge)} y1=${BOX.top} y2=${bottom} />
    <line class="threshold" x1=${left} x2=${width - BOX.right} y1=${y(middle)} y2=${y(middle)} />
    <text class="axis-title" x=${(left + width - BOX.right) / 2} y=${HEIGHT - 6} text-anchor="middle">H(Z|X): how thoughts vary given the prompt, nats</text>
    <text class="axis-title" transform=${`translate(12 ${(BOX.top + bottom) / 2}) rotate(-90)`} text-anchor="middle">I(X;Z): share of the prompt that is told</text>
  </g>`;
}

function Course({ name, points, x, y, shown, onOver, onPick }) {
  const colour = colourOf(name);
  const line = points.map(({ entropy, share }) => `${x(entropy)},${y(share)}`).join(" ");
  const last = points.length - 1;
  return html`<g class=${`course stroke-${colour} fill-${colour}`}>
    <polyline points=${line} />
    ${points.map((point, i) => html`<circle key=${point.step} tabindex="0" role="button"
      aria-label=${`step ${point.step}, ${PATHS[name] ?? name}: ${point.regime}`}
      class=${[i === 0 && "begin", i === last && "end", !point.decided && "undecided", same(point, shown) && "on"].filter(Boolean).join(" ")}
      cx=${x(point.entropy)} cy=${y(point.share)} r=${i === last ? 6 : i === 0 ? 5 : 3}
      onPointerEnter=${() => onOver(point)} onPointerLeave=${() => onOver(null)}
      onFocus=${() => onOver(point)} onBlur=${() => onOver(null)}
      onClick=${() => onPick(point.path, point.step)}
      onKeyDown=${(event) => event.key === "Enter" && onPick(point.path, point.step)} />`)}
  </g>`;
}

const same = (one, other) => other !== null && one.path === other.path && one.step === other.step;

function told({ path, step, mi, entropy, share, ceiling, regime, prompts, retrieval, chance, zscore }) {
  return html`<i class=${`dot fill-${colourOf(path)}`}></i> <b>step ${step}</b>, ${PATHS[path] ?? path}: ${regime};
    H(Z|X) ${number(entropy)}, I(X;Z) ${number(mi)} of ${number(ceiling)} nats (${percent(share, 0)}), ${prompts} prompts${
    retrieval === undefined || retrieval === null ? "" : `, own prompt found ${percent(retrieval, 0)} (chance ${percent(chance, 0)})`}${
    zscore === undefined || zscore === null ? "" : `, z-score ${number(zscore)}`}`;
}

function spoken(points) {
  return points.map(({ name, points: all }) => {
    const [first, last] = [all[0], all.at(-1)];
    return `${PATHS[name] ?? name}: from ${first.regime} in step ${first.step} to ${last.regime} in step ${last.step}`;
  }).join("; ");
}
