// The matrix of cross-scores as a heat map: how well each thought identifies its prompt. A row is a
// thought, a column a prompt; the colour is p(prompt | thought), which follows from the scores
// S_ij = log p(z_i | x_j) and the frequencies of the prompts. A dark diagonal: thoughts depend on what
// the policy observes. Rows of one even colour: the thoughts would fit any prompt.

import { useApi } from "./api.js";
import { Shades, shadeOf } from "./heat.js";
import { clamp, number, percent } from "./numbers.js";
import { Status, StepSlider, Tabs, Text, picked } from "./parts.js";
import { PATHS } from "./plane.js";
import { html, useMemo, useState } from "./vendor/preact-htm.js";

/**
 * `steps`: `[{step, path}]`; `courses` are the measures over steps by path; `query` has `step` and
 * `path`. A shared file holds only some steps; `all` then counts those of each path.
 */
export function Matrix({ run, steps, courses, all, query, setQuery }) {
  const recorded = ([name]) => steps.some((one) => one.path === name);
  const paths = Object.fromEntries(Object.entries(PATHS).filter(recorded));
  const path = picked(paths, query.path);
  const chosen = steps.filter((one) => one.path === path);
  const here = chosen.map(({ step }) => step).sort((a, b) => a - b);
  const at = nearestBefore(here, query.step);
  const step = here[at];
  const answer = useApi("/api/matrix", { run, step, path }, { keep: true });
  const course = courses[path];
  return html`<div><div class="row toolbar">
      ${Object.keys(paths).length > 1 && html`<${Tabs} label="Turns" value=${path} options=${paths}
        onChange=${(key) => setQuery({ path: key })} />`}
      <${StepSlider} steps=${here} at=${at} onStep=${(one) => setQuery({ step: one, path })} />
      ${all?.[path] > here.length && html`<span class="muted">This file holds ${here.length} of
        ${all[path]} steps.</span>`}
    </div>
    <${Status} ...${answer} />
    ${answer.data && html`<${Picture} key=${`${path} ${step}`} data=${answer.data}
      retrieval=${course?.retrieval[course.steps.indexOf(step)]} />`}</div>`;
}

/** The index of the last step that is not after `wanted`; without `wanted`, of the last one. */
function nearestBefore(steps, wanted) {
  const later = wanted ? steps.findIndex((step) => step > Number(wanted)) : -1;
  return later < 0 ? steps.length - 1 : Math.max(0, later - 1);
}

/** `retrieval` is the share of the thoughts under which their own prompt scores highest. */
function Picture({ data, retrieval }) {
  const { rows, columns, shares } = useMemo(() => sorted(data), [data]);
  const [over, setOver] = useState(null);
  const [pinned, setPinned] = useState(null);
  const cell = over ?? pinned;
  return html`<p>${number(rows.length)} thoughts, ${number(columns.length)} prompts.
      For ${percent(retrieval, 0)} of the thoughts, their own prompt scores highest (chance:
      ${` ${percent(1 / columns.length, 0)}`}).</p>
    <div class="columns sides">
      <div>
        <${HeatMap} shares=${shares} own=${rows.map((row) => columns.indexOf(data.own[row]))}
          over=${over} onHover=${setOver} onPick=${setPinned} />
        <p class="row tight legend small muted">p(prompt | thought): 0 <${Shades} /> 1
          <span><i class="swatch own"></i>own prompt</span></p>
      </div>
      <div class="scroll tall matrix-said">
        ${cell
          ? html`<${Cell} data=${data} row=${rows[cell[0]]} column=${columns[cell[1]]}
              share=${shares[cell[0]][cell[1]]} />`
          : html`<p class="muted">Point at a cell to read its thought and its prompt; click to keep
              it. Rows are thoughts, sorted by their own prompt (framed). Columns are prompts.</p>`}
      </div>
    </div>`;
}

const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/**
 * The heat map. `own` is the column of each row's own prompt. `onHover([row, column])` follows the
 * pointer or the arrow keys (null on leaving); `onPick` is a click or Enter.
 */
function HeatMap({ shares, own, over, onHover, onPick }) {
  const [numRows, numColumns] = [shares.length, shares[0].length];
  const cells = useMemo(() => shares.map((row, i) => row.map((share, j) => html`<rect
    x=${j} y=${i} width="1" height="1" fill=${`var(--s${shadeOf(share)})`} />`)), [shares]);
  const frame = (colour, [row, column, height = 1]) => html`<rect x=${column} y=${row} width="1"
    height=${height} fill="none" stroke=${`var(${colour})`} stroke-width="1.5"
    vector-effect="non-scaling-stroke" />`;
  const under = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * numRows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * numColumns);
    return [clamp(row, 0, numRows - 1), clamp(column, 0, numColumns - 1)];
  };
  const press = (event) => {
    const [row, column] = over ?? [0, 0];
    const [down, right] = MOVES[event.key] ?? [];
    if (event.key === "Enter") onPick([row, column]);
    else if (down === undefined) return;
    else onHover([clamp(row + down, 0, numRows - 1), clamp(column + right, 0, numColumns - 1)]);
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<svg class="heat" viewBox="0 0 ${numColumns} ${numRows}" preserveAspectRatio="none"
    shape-rendering="crispEdges" tabindex="0" role="img" data-testid="matrix"
    aria-label="Rows are thoughts, columns are prompts; the own prompt of each thought is framed"
    style=${{ height: `${clamp(numRows * 7, 160, 520)}px` }} onKeyDown=${press}
    onPointerMove=${(event) => onHover(under(event))} onPointerLeave=${() => onHover(null)}
    onClick=${(event) => onPick(under(event))}>
    ${cells} ${blocks(own).map((block) => frame("--c1", block))} ${over && frame("--ink", over)}
  </svg>`;
}

function Cell({ data, row, column, share }) {
  const own = data.own[row];
  const score = data.scores[row][column];
  const gap = data.scores[row][own] - score;
  const side = gap >= 0 ? "below" : "above";
  return html`<dl>
    <dt>p(prompt | thought)</dt><dd><b>${percent(share)}</b></dd>
    <dt>log p(thought | prompt)</dt><dd>${number(score)} nats${
      own === column ? ", its own prompt" : `, ${number(Math.abs(gap))} ${side} that of its own prompt`}</dd>
  </dl>
  <h3>Thought ${row + 1}</h3>
  <p class="mono quoted"><${Text} text=${data.thoughts[row]} limit=${1500} /></p>
  <h3>Prompt ${column + 1}${own === column ? " (its own)" : ""}</h3>
  <p class="mono quoted"><${Text} text=${data.prompts[column]} limit=${1500} /></p>
  ${own !== column && html`<h3>Its own prompt, ${own + 1}</h3>
    <p class="mono quoted"><${Text} text=${data.prompts[own]} limit=${1500} /></p>`}`;
}

/** Prompts by their number of thoughts, thoughts by their own prompt, and p(prompt | thought). */
function sorted({ scores, own, prompts }) {
  const counts = prompts.map((_, j) => own.filter((one) => one === j).length);
  const columns = prompts.map((_, j) => j).sort((a, b) => counts[b] - counts[a] || a - b);
  const place = (i) => columns.indexOf(own[i]);
  const rows = own.map((_, i) => i).sort((a, b) => place(a) - place(b) || a - b);
  const inOrder = (list) => columns.map((j) => list[j]);
  const shares = rows.map((i) => posterior(inOrder(scores[i]), inOrder(counts)));
  return { rows, columns, shares };
}

/** The frames `[row, column, height]` around the thoughts of each prompt, which are adjacent. */
function blocks(own) {
  const height = (column) => own.lastIndexOf(column) - own.indexOf(column) + 1;
  return [...new Set(own)].map((column) => [own.indexOf(column), column, height(column)]);
}

/** Bayes' rule over the prompts: w_j e^S_j, summed to 1; a score of null is −∞. */
function posterior(scores, counts) {
  const most = Math.max(...scores.filter((score) => score !== null));
  const likelihood = (score) => (score === null ? 0 : Math.exp(score - most));
  const weights = scores.map((score, j) => counts[j] * likelihood(score));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.map((weight) => weight / sum);
}
