// Then and now: evaluations play the same levels each time, so that the thoughts about a level at two
// steps can be compared, with the words that both share marked. The thoughts about two levels at one
// step are compared in the same way: that shows the Echo Trap.

import { useLive } from "../api.js";
import { Compared, useShares } from "../two_episodes.js";
import { heat } from "../heat.js";
import { VERTICAL, useRowKeys } from "../keys.js";
import { clamp, percent, plural } from "../numbers.js";
import { Status, Tabs, picked, useReady } from "../parts.js";
import { Phrases } from "../phrases.js";
import { MIN_RUN } from "../words.js";
import { html, useEffect, useMemo, useRef } from "../vendor/preact-htm.js";

const MOST_STEPS = 12; // Columns of the table of pairs; of more steps, this many, evenly spaced.

/** The phases of evaluations: their ways of sampling. */
const PHASES = { eval: { title: "sampled" }, "eval greedy": { title: "greedy" } };

/** How the success on a level changed between the first evaluation and the last one. */
const FATES = {
  all: { title: "all", hint: "every level", holds: () => true },
  learnt: { title: "learnt", hint: "success is higher in the last one", holds: (a, b) => a < b },
  lost: { title: "lost", hint: "success is lower in the last one", holds: (a, b) => a > b },
  solved: { title: "solved", hint: "solved in both", holds: (a, b) => a === 1 && b === 1 },
  failed: { title: "failed", hint: "failed in both", holds: (a, b) => a === 0 && b === 0 },
};

const fits = (fate, { successes }) => FATES[fate].holds(successes[0], successes.at(-1));

export function Page({ params, query, setQuery }) {
  const { run } = params;
  const answer = useLive("/api/levels", { run });
  const { data, error } = answer;
  useReady(Boolean(error) || data?.levels.length === 0);
  return html`<main class="page page-levels">
    <h1>Then and now</h1>
    <${Status} ...${answer} />
    ${data?.levels.length === 0 && html`<${Nothing} />`}
    ${data?.levels.length > 0 && html`<${Levels} ...${{ ...data, run, query, setQuery }} />`}
    <${Phrases} run=${run} phase="train" query=${query} setQuery=${setQuery} />
  </main>`;
}

function Nothing() {
  return html`<div class="panel">
    <p>No level was played at two steps. Evaluations play the same levels each time: to see thoughts
      change, train with <code>--eval.every 5</code>. The first and the last evaluation are there
      when the run has ended.</p>
  </div>`;
}

/** A shared file holds only some of the `levels`; `all` then counts those of each phase. */
function Levels({ run, levels, all, query, setQuery }) {
  const played = ([phase]) => levels.some((level) => level.phase === phase);
  const phases = Object.fromEntries(Object.entries(PHASES).filter(played));
  const phase = picked(phases, query.phase);
  const fate = picked(FATES, query.fate);
  const envs = Object.fromEntries(levels.map(({ env }) => [env, { title: env }]));
  const env = picked(envs, query.env);
  const here = levels.filter((level) => level.phase === phase && level.env === env);
  const shown = here.filter((level) => fits(fate, level));
  const named = here.find((level) => String(level.level_seed) === query.level_seed);
  // Chosen once: a new evaluation must not replace the level that somebody reads.
  const usual = useMemo(
    () => (shown.find((one) => fits("learnt", one)) ?? shown[0] ?? here[0]).level_seed,
    [phase, env, fate],
  );
  const level = named ?? here.find((one) => one.level_seed === usual) ?? here[0];
  const place = shown.indexOf(level);
  const choose = (one) => setQuery({ level_seed: one.level_seed, other: null });
  useRowKeys("level", {
    count: shown.length, at: place, select: (at) => choose(shown[at]), arrows: VERTICAL,
  });
  const counted = ([key, { title, hint }]) => {
    const count = here.filter((one) => fits(key, one)).length;
    return [key, { title: `${title} ${count}`, hint }];
  };
  return html`<div class="columns then-now">
    <section class="panel levels">
      <div class="row toolbar">
        ${Object.keys(phases).length > 1 && html`<${Tabs} label="Evaluations" value=${phase}
          options=${phases} onChange=${(key) => setQuery({ phase: key, level_seed: null })} />`}
        ${Object.keys(envs).length > 1 && html`<${Tabs} label="Environment" value=${env}
          options=${envs} onChange=${(key) => setQuery({ env: key, level_seed: null })} />`}
        <${Tabs} label="Levels" value=${fate} onChange=${(key) => setQuery({ fate: key })}
          options=${Object.fromEntries(Object.entries(FATES).map(counted))} />
      </div>
      ${all?.[phase] > here.length && html`<p class="muted">This file holds ${here.length} of the
        ${all[phase]} levels.</p>`}
      ${shown.length === 0 && html`<p class="muted">No level fits the filter.</p>`}
      <${LevelTable} levels=${shown} chosen=${level} onChoose=${choose} />
    </section>
    <${Level} key=${`${phase} ${env} ${level.level_seed}`}
      ...${{ run, level, others: here.filter((one) => one !== level), query, setQuery }} />
  </div>`;
}

/** Which levels (rows) were solved at which steps (columns). */
function LevelTable({ levels, chosen, onChoose }) {
  const steps = [...new Set(levels.flatMap((level) => level.steps))].sort((a, b) => a - b);
  const box = useRef(null);
  useEffect(() => {
    const row = box.current.querySelector(".selected"); // Kept visible without scrolling the page.
    if (!row) return;
    const most = row.offsetTop - row.offsetHeight; // Below the header, which is as high as a row.
    const least = row.offsetTop + row.offsetHeight - box.current.clientHeight;
    box.current.scrollTop = clamp(box.current.scrollTop, least, most);
  }, [chosen.level_seed]);
  return html`<div class="scroll tall" ref=${box}>
    <table class="pinned level-table" aria-label="Levels by step">
      <thead><tr><th scope="col">level</th>
        ${steps.map((step) => html`<th scope="col" key=${step}>${step}</th>`)}</tr></thead>
      <tbody>${levels.map((level) => {
        const on = level === chosen;
        return html`<tr key=${level.level_seed} class=${on ? "opens selected" : "opens"}
          aria-current=${on ? "true" : undefined} onClick=${() => onChoose(level)}>
          <th scope="row"><button class="bare">${level.level_seed}</button></th>
          ${steps.map((step) => html`<td key=${step}>
            <${Sign} success=${level.successes[level.steps.indexOf(step)]} /></td>`)}
        </tr>`;
      })}</tbody>
    </table>
  </div>`;
}

function Sign({ success }) {
  if (success === undefined) return null;
  if (success === 1) return html`<span class="good" title="solved">✓</span>`;
  if (success === 0) return html`<span class="muted" title="not solved">·</span>`;
  return html`<span title="share of its episodes that solved it">${percent(success, 0)}</span>`;
}

/** One level: the table of its pairs of steps, and two of its episodes side by side. */
function Level({ run, level, others, query, setQuery }) {
  const { phase, env, level_seed } = level;
  const answer = useLive("/api/level", { run, phase, env, level_seed });
  const otherSeed = others.find((one) => String(one.level_seed) === query.other)?.level_seed;
  const path = otherSeed === undefined ? null : "/api/level";
  const another = useLive(path, { run, phase, env, level_seed: otherSeed });
  const episodes = answer.data?.episodes ?? [];
  const steps = episodes.map(({ step }) => step);
  const wanted = (query.steps ?? "").split(",").map(Number);
  const [from, to] = wanted.length === 2 && wanted.every((step) => steps.includes(step))
    ? wanted : [steps[0], steps.at(-1)];
  const setSteps = (a, b) => setQuery({ steps: `${a},${b}`, other: null });
  const now = episodes.find(({ step }) => step === to);
  const left = otherSeed === undefined
    ? episodes.find(({ step }) => step === from)
    : another.data?.episodes.find(({ step }) => step === to);
  useReady(Boolean(left && now) || Boolean(answer.error));
  if (!answer.data || answer.error) return html`<div><${Status} ...${answer} /></div>`;
  const compare = { episodes, from, to, setSteps, run, others, otherSeed, setQuery };
  return html`<div>
    <section class="panel">
      <h2>Level ${level_seed}: words that two steps share</h2>
      <${Pairs} ...${compare} />
    </section>
    <section class="panel">
      <${Choice} ...${compare} />
      ${left && now ? html`<${Compared} left=${left} right=${now} run=${run} />`
        : html`<${Status} />`}
    </section>
  </div>`;
}

const MODES = {
  steps: { title: "two steps of the level" },
  levels: { title: "two levels of a step", hint: "shows what does not depend on the level" },
};

/** What is compared: two steps of a level, or two levels of a step. */
function Choice({ episodes, from, to, others, otherSeed, setQuery }) {
  const steps = episodes.map(({ step }) => step);
  const mode = otherSeed === undefined ? "steps" : "levels";
  const seeds = others.map(({ level_seed: seed }) => seed);
  const setSteps = (a, b, change) => setQuery({ steps: `${a},${b}`, ...change });
  const swap = (key) =>
    setSteps(from, to, { other: key === "steps" ? null : others[0].level_seed });
  const choice = (label, value, values, onChange) => html`<label>${label}
    <select value=${value} onChange=${(event) => onChange(Number(event.target.value))}>
      ${values.map((one) =>
        html`<option key=${one} value=${one} selected=${one === value}>${one}</option>`)}
    </select></label>`;
  return html`<div class="row toolbar">
    ${others.length > 0 && html`<${Tabs} label="Compare" options=${MODES} value=${mode}
      onChange=${swap} />`}
    ${mode === "steps"
      ? choice("then: step", from, steps, (step) => setSteps(step, to))
      : choice("other level", otherSeed, seeds, (seed) => setQuery({ other: seed }))}
    ${choice("now: step", to, steps, (step) => setSteps(from, step))}
  </div>`;
}

/** The share of shared words for each pair of steps; a click on a cell chooses its pair. */
function Pairs({ episodes, from, to, otherSeed, setSteps }) {
  const every = Math.ceil(episodes.length / MOST_STEPS);
  const chosen = episodes.filter((_, i) => i % every === 0 || i === episodes.length - 1);
  const shares = useShares(chosen);
  if (chosen.length < 2) return html`<p class="muted">This level was played at one step only.</p>`;
  const cell = (i, j) => {
    const share = shares[`${i},${j}`];
    const [a, b] = [chosen[j].step, chosen[i].step];
    const on = otherSeed === undefined && [from, to].includes(a) && [from, to].includes(b);
    const text = share === null ? "–" : Math.round(100 * share);
    const said = `steps ${a} and ${b} share ${percent(share, 0)} of their words`;
    return html`<td key=${j} class=${heat(share)}>
      <button aria-label=${said} title=${said} aria-pressed=${on ? "true" : "false"}
        onClick=${() => setSteps(a, b)}>${share === undefined ? "…" : text}</button>
    </td>`;
  };
  const columns = chosen.slice(0, -1);
  return html`<div class="row"><div class="scroll"><table class="pair-table"
    aria-label="Words that two steps share" data-testid="pairs">
    <tbody>${chosen.slice(1).map((episode, at) => html`<tr key=${episode.step}>
      <th scope="row">${episode.step}</th>
      ${columns.map((_, j) => (j <= at ? cell(at + 1, j) : html`<td key=${j}></td>`))}
    </tr>`)}</tbody>
    <tfoot><tr><th>step</th>${columns.map(({ step }) =>
      html`<th scope="col" key=${step}>${step}</th>`)}</tr></tfoot>
  </table></div>
  <p class="muted roomy">A cell is the percentage of the words of two steps' thoughts that belong to
    runs of ${MIN_RUN} or more words in both. Choose a cell to read the two. In the Echo Trap, late steps
    share nearly all words with each other, and so do two levels of one step: the thoughts are the
    same whatever the policy observes.${
    every > 1 && ` The table shows ${chosen.length} of ${plural(episodes.length, "step")}.`}</p>
  </div>`;
}
