// The matrix of cross-scores as a heat map: how well each thought identifies its prompt. A row is a
// thought, a column a prompt; the colour is p(prompt | thought), which follows from the scores
// S_ij = log p(z_i | x_j) and the frequencies of the prompts. A dark diagonal: thoughts depend on what
// the policy observes. Rows of one even colour: the thoughts would fit any prompt.

import { useApi } from "./api.js";
import { Heat } from "./heat.js";
import { number, percent } from "./numbers.js";
import { Loading, Problem, Tabs, Text } from "./parts.js";
import { PATHS, pathsIn } from "./plane.js";
import { html, useMemo, useState } from "./vendor/preact-htm.js";

/**
 * `steps`: `[{step, path}]`; `query` has `step` and `path`. A shared file holds only some steps;
 * `all` then counts those of each path.
 */
export function Matrix({ run, steps, all, query, setQuery }) {
  const paths = pathsIn(steps.map(({ path }) => path));
  const path = paths.includes(query.path) ? query.path : paths[0];
  const chosen = steps.filter((one) => one.path === path);
  const here = chosen.map(({ step }) => step).sort((a, b) => a - b);
  const at = nearestBefore(here, query.step);
  const asked = { run, step: here[at], path };
  const { data, error, reload } = useApi("/api/matrix", asked, { keep: true });
  return html`<div class="row choices">
      ${paths.length > 1 && html`<${Tabs} label="Turns" value=${path}
        tabs=${paths.map((key) => ({ key, title: PATHS[key] ?? key }))}
        onChange=${(key) => setQuery({ path: key })} />`}
      <label class="step-slider">step
        <input type="range" min="0" max=${here.length - 1} value=${at} disabled=${here.length < 2}
          onInput=${(event) => setQuery({ step: here[event.target.value], path })} />
        <b>${here[at]}</b></label>
      ${all?.[path] > here.length && html`<span class="muted">This file holds ${here.length} of
        ${all[path]} steps.</span>`}
    </div>
    ${error && html`<${Problem} error=${error} reload=${reload} />`}
    ${!data && !error && html`<${Loading} />`}
    ${data && html`<${Picture} key=${`${path} ${here[at]}`} data=${data} />`}`;
}

/** The index of the last step that is not after `wanted`; without `wanted`, of the last one. */
function nearestBefore(steps, wanted) {
  const later = wanted ? steps.findIndex((step) => step > Number(wanted)) : -1;
  return later < 0 ? steps.length - 1 : Math.max(0, later - 1);
}

function Picture({ data }) {
  const { rows, columns, shares } = useMemo(() => sorted(data), [data]);
  const [over, setOver] = useState(null);
  const [picked, setPicked] = useState(null);
  const own = useMemo(() => rows.map((row) => columns.indexOf(data.own[row])), [rows, columns]);
  const outlined = useMemo(() => blocks(own), [own]);
  const cell = over ?? picked;
  return html`<p>${number(rows.length)} thoughts, ${number(columns.length)} prompts.
      For ${percent(retrieved(data), 0)} of the thoughts, their own prompt scores highest (chance:
      ${` ${percent(1 / columns.length, 0)}`}).</p>
    <div class="matrix">
      <div class="matrix-map">
        <${Heat} matrix=${shares} low=${0} high=${1} outlined=${outlined}
          label="Rows are thoughts, columns are prompts; the own prompt of each thought is framed"
          height=${Math.min(520, Math.max(160, rows.length * 7))}
          onHover=${(i, j) => setOver(i === null ? null : [i, j])}
          onPick=${(i, j) => setPicked([i, j])} />
        <p class="muted scale"><span>p(prompt | thought): 0</span>
          ${Array.from({ length: 9 }, (_, i) => html`<i key=${i} class=${`heat-${i}`}></i>`)}
          <span>1</span>
          <span class="own-sign"></span><span>own prompt</span></p>
      </div>
      <div class="matrix-said">
        ${cell
          ? html`<${Cell} data=${data} row=${rows[cell[0]]} column=${columns[cell[1]]}
              share=${shares[cell[0]][cell[1]]} pinned=${!over && picked} />`
          : html`<p class="muted">Point at a cell to read its thought and its prompt; click to keep
              it. Rows are thoughts, sorted by their own prompt (framed). Columns are prompts.</p>`}
      </div>
    </div>`;
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
  <p class="quoted"><${Text} text=${data.thoughts[row]} limit=${1500} /></p>
  <h3>Prompt ${column + 1}${own === column ? " (its own)" : ""}</h3>
  <p class="quoted"><${Text} text=${data.prompts[column]} limit=${1500} /></p>
  ${own !== column && html`<h3>Its own prompt, ${own + 1}</h3>
    <p class="quoted"><${Text} text=${data.prompts[own]} limit=${1500} /></p>`}`;
}

/**
 * The share of thoughts that score highest under their own prompt, with ties broken at random: the
 * measure `ragen.diagnostics.information.retrieval`, which ignores the frequencies of the prompts.
 */
export function retrieved({ scores, own }) {
  const found = scores.map((row, i) => {
    const [least, ...all] = [row[own[i]], ...row].map((score) => score ?? -Infinity);
    if (all.some((score) => score > least)) return 0;
    return 1 / all.filter((score) => score === least).length;
  });
  return found.reduce((a, b) => a + b, 0) / found.length;
}

/** Prompts by their number of thoughts, thoughts by their own prompt, and p(prompt | thought). */
export function sorted({ scores, own, prompts }) {
  const counts = prompts.map((_, j) => own.filter((one) => one === j).length);
  const columns = prompts.map((_, j) => j).sort((a, b) => counts[b] - counts[a] || a - b);
  const place = columns.reduce((all, j, at) => Object.assign(all, { [j]: at }), {});
  const rows = own.map((_, i) => i).sort((a, b) => place[own[a]] - place[own[b]] || a - b);
  const inOrder = (list) => columns.map((j) => list[j]);
  const shares = rows.map((i) => posterior(inOrder(scores[i]), inOrder(counts)));
  return { rows, columns, shares };
}

/** The frames `[row, column, rows, 1]` around the thoughts of each prompt, which are adjacent. */
function blocks(own) {
  const count = (column) => own.filter((one) => one === column).length;
  return [...new Set(own)].map((column) => [own.indexOf(column), column, count(column), 1]);
}

/** Bayes' rule over the prompts: w_j e^S_j, summed to 1; a score of null is −∞. */
function posterior(scores, counts) {
  const most = Math.max(...scores.filter((score) => score !== null));
  const likelihood = (score) => (score === null ? 0 : Math.exp(score - most));
  const weights = scores.map((score, j) => counts[j] * likelihood(score));
  const sum = weights.reduce((a, b) => a + b, 0);
  return weights.map((weight) => weight / sum);
}
