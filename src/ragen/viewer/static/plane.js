// The plane of H(Z|X) and I(X;Z) with its four regimes, and the path of a run through it.

import { number, percent } from "./numbers.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const HEIGHT = 340;
const NARROW = 560; // Width in pixels below which two names do not fit in one row.
const BOX = { left: 54, right: 14, top: 14, bottom: 42 };
const BOTTOM = HEIGHT - BOX.bottom;
const TICKS = [0, 0.1, 0.3, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];

/** Which turns of the episodes are measured, by the name of their path in the metrics. */
export const PATHS = {
  first: { title: "first turns", colour: 0 },
  any: { title: "a turn drawn uniformly", colour: 5 },
};

/** `paths` and `thresholds` as `/api/collapse` has them; `path` and `step` say which is chosen. */
export function Plane({ paths, thresholds, path, step, onPick }) {
  const [over, setOver] = useState(null);
  const [place, width] = useWidth();
  const courses = Object.keys(paths)
    .map((name) => [name, pointsOf(name, paths[name], thresholds)])
    .filter(([, points]) => points.length > 0);
  const all = courses.flatMap(([, points]) => points);
  const scale = scaleOf(all, thresholds, width);
  const shown = over ?? all.find((one) => one.path === path && one.step === step) ?? null;
  return html`<div class="plane" ref=${place}>
    <svg viewBox="0 0 ${width} ${HEIGHT}" data-testid="plane" role="img"
      aria-label=${courses.map(summary).join("; ")}>
      <${Regimes} ...${scale} />
      <${Axes} ...${scale} />
      ${courses.map(([name, points]) => html`<${Course} key=${name}
        ...${{ name, points, scale, shown, onPick }} onOver=${setOver} />`)}
    </svg>
    <p class="readout" aria-live="polite">
      ${shown ? html`<${Facts} ...${shown} />`
        : html`<${Legend} names=${courses.map(([name]) => name)} />`}</p>
  </div>`;
}

/** The width of an element, for pictures whose text must not shrink with it. */
function useWidth() {
  const place = useRef(null);
  const [width, setWidth] = useState(720);
  useEffect(() => {
    const measure = ([{ contentRect }]) => setWidth(Math.max(280, Math.round(contentRect.width)));
    const size = new ResizeObserver(measure);
    size.observe(place.current);
    return () => size.disconnect();
  }, []);
  return [place, width];
}

/** The steps of a path at which both measures are known. */
function pointsOf(path, course, { min_prompts: least }) {
  const points = course.steps.map((step, i) => {
    const [mi, ceiling] = [course.mi[i], course.prompt_entropy[i]];
    return {
      path, step, mi, ceiling, entropy: course.conditional_entropy[i],
      share: ceiling ? mi / ceiling : 0,
      regime: course.regime[i], prompts: course.num_prompts[i],
      decided: course.num_prompts[i] >= least,
      retrieval: course.retrieval[i], chance: course.chance[i], zscore: course.zscore[i],
    };
  });
  return points.filter(({ mi, entropy }) => mi !== null && entropy !== null);
}

/**
 * The axes. Vertical: I(X;Z) as a share of the entropy of the prompts, so that steps with different
 * numbers of prompts can be compared. Horizontal: H(Z|X), logarithmic around its threshold.
 */
function scaleOf(points, thresholds, width) {
  const edge = thresholds.conditional_entropy;
  const shares = points.map(({ share }) => share);
  const [low, top] = [Math.min(0, ...shares), Math.max(1, ...shares)];
  const most = 1.15 * Math.max(4 * edge, ...points.map(({ entropy }) => entropy));
  const bent = (nats) => Math.log1p(Math.max(0, nats / edge)) / Math.log1p(most / edge);
  const [wide, tall] = [width - BOX.left - BOX.right, BOTTOM - BOX.top];
  return {
    width, edge, most, low, top, middle: thresholds.mi_share,
    x: (nats) => BOX.left + wide * bent(nats),
    y: (share) => BOTTOM - (tall * (share - low)) / (top - low),
  };
}

function Regimes({ width, x, y, most, edge, middle, top, low }) {
  const [left, right] = [[0, edge, "start"], [edge, most, "end"]];
  const [above, below] = [[top, middle, -9], [middle, low, 19]]; // The outer edges are left to the curves.
  const quarter = (name, kind, [from, to, anchor], [upper, lower, offset]) => {
    const lines = width < NARROW ? name.split(" ") : [name];
    const at = anchor === "start" ? x(from) + 8 : x(to) - 8;
    return html`
      <rect class=${`regime ${kind}`} x=${x(from)} y=${y(upper)} width=${x(to) - x(from)}
        height=${y(lower) - y(upper)} />
      ${lines.map((line, i) => html`<text key=${i} class="regime-name" x=${at}
        y=${y(middle) + offset + 16 * i} text-anchor=${anchor}>${line}</text>`)}`;
  };
  return html`<g>
    ${quarter("compressed", "warn", left, above)}
    ${quarter("diverse", "good", right, above)}
    ${quarter("low-entropy collapse", "bad", left, below)}
    ${quarter("template collapse", "bad", right, below)}
  </g>`;
}

function Axes({ width, x, y, most, edge, top, low, middle }) {
  const [left, right] = [BOX.left, width - BOX.right];
  const shares = [0, 0.25, 0.5, 0.75, 1].filter((share) => share >= low && share <= top);
  const near = (nats, before) => before !== undefined && x(nats) - x(before) < 34;
  const apart = (kept, nats) => (near(nats, kept.at(-1)) ? kept : [...kept, nats]);
  const ticks = TICKS.filter((nats) => nats <= most).reduce(apart, []);
  const middleX = (left + right) / 2;
  const sideways = `translate(12 ${(BOX.top + BOTTOM) / 2}) rotate(-90)`;
  return html`<g class="axes">
    ${ticks.map((nats) => html`<g key=${nats}>
      <line x1=${x(nats)} x2=${x(nats)} y1=${BOTTOM} y2=${BOTTOM + 4} />
      <text x=${x(nats)} y=${BOTTOM + 16} text-anchor="middle">${nats}</text></g>`)}
    ${shares.map((share) => html`<g key=${share}>
      <line x1=${left - 4} x2=${left} y1=${y(share)} y2=${y(share)} />
      <text x=${left - 7} y=${y(share) + 4} text-anchor="end">${100 * share} %</text></g>`)}
    <line class="threshold" x1=${x(edge)} x2=${x(edge)} y1=${BOX.top} y2=${BOTTOM} />
    <line class="threshold" x1=${left} x2=${right} y1=${y(middle)} y2=${y(middle)} />
    <text class="axis-title" x=${middleX} y=${HEIGHT - 6} text-anchor="middle"
      >H(Z|X): how thoughts vary given the prompt, nats</text>
    <text class="axis-title" transform=${sideways} text-anchor="middle"
      >I(X;Z): share of the prompt's entropy</text>
  </g>`;
}

/** Whether a key activates the focused element, as it would a native button. */
function pressed(event) {
  if (!["Enter", " "].includes(event.key)) return false;
  event.preventDefault(); // A space would scroll the page.
  return true;
}

/** One path: a ring at the first step, a disc at the last; hollow where it is undecided. */
function Course({ name, points, scale: { x, y }, shown, onOver, onPick }) {
  const colour = PATHS[name].colour;
  const last = points.length - 1;
  const same = (one) => shown !== null && one.path === shown.path && one.step === shown.step;
  const classOf = (point, i) => [
    i === 0 && "begin", i === last && "end", !point.decided && "undecided", same(point) && "on",
  ].filter(Boolean).join(" ");
  return html`<g class=${`course ink-${colour}`}>
    <polyline points=${points.map(({ entropy, share }) => `${x(entropy)},${y(share)}`).join(" ")} />
    ${points.map((point, i) => html`<circle key=${point.step} tabindex="0" role="button"
      aria-label=${`step ${point.step}, ${PATHS[name].title}: ${point.regime}`}
      class=${classOf(point, i)} cx=${x(point.entropy)} cy=${y(point.share)}
      r=${i === last ? 6 : i === 0 ? 5 : 3}
      onPointerEnter=${() => onOver(point)} onPointerLeave=${() => onOver(null)}
      onFocus=${() => onOver(point)} onBlur=${() => onOver(null)}
      onClick=${() => onPick(point.path, point.step)}
      onKeyDown=${(event) => pressed(event) && onPick(point.path, point.step)} />`)}
  </g>`;
}

function Legend({ names }) {
  return html`<span class="row tight">
    ${names.map((name) => html`<span key=${name}>
      <i class=${`swatch ink-${PATHS[name].colour}`}></i>${PATHS[name].title}</span>`)}
    <span class="muted">Ring: first step; disc: last step. Hover or choose a point.</span>
  </span>`;
}

/** One point in numbers. */
function Facts({ path, step, mi, entropy, share, ceiling, regime, prompts, ...rest }) {
  const { retrieval, chance, zscore } = rest;
  const facts = [
    `${PATHS[path].title}: ${regime}; H(Z|X) ${number(entropy)}`,
    `I(X;Z) ${number(mi)} of ${number(ceiling)} nats (${percent(share, 0)})`,
    `${prompts} prompts`,
    retrieval !== null &&
      `own prompt identified ${percent(retrieval, 0)} (chance ${percent(chance, 0)})`,
    zscore !== null && `z-score ${number(zscore)}`,
  ];
  return html`<i class=${`swatch ink-${PATHS[path].colour}`}></i><b>step ${step}</b>,${" "}
    ${facts.filter(Boolean).join(", ")}`;
}

function summary([name, points]) {
  const describe = ({ regime, step }) => `${regime} in step ${step}`;
  const [first, last] = [points[0], points.at(-1)].map(describe);
  return `${PATHS[name].title}: from ${first} to ${last}`;
}
