// Then and now: evaluations play the same levels each time, so that the thoughts about a level at two
// steps can be read side by side.

import { link } from "../addresses.js";
import { useLive } from "../api.js";
import { VERTICAL, useRowKeys } from "../keys.js";
import { clamp, percent } from "../numbers.js";
import { Status, Tabs, picked, useReady } from "../parts.js";
import { Phrases } from "../phrases.js";
import { SideBySide } from "../turns.js";
import { html, useEffect, useMemo, useRef } from "../vendor/preact-htm.js";

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
  const choose = (one) => setQuery({ level_seed: one.level_seed });
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
      ...${{ run, level, query, setQuery }} />
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

/** One level: its episodes of two steps side by side. */
function Level({ run, level, query, setQuery }) {
  const { phase, env, level_seed } = level;
  const answer = useLive("/api/level", { run, phase, env, level_seed });
  useReady(Boolean(answer.data || answer.error));
  if (!answer.data || answer.error) return html`<div><${Status} ...${answer} /></div>`;
  const { episodes } = answer.data;
  const steps = episodes.map(({ step }) => step);
  const wanted = (query.steps ?? "").split(",").map(Number);
  const two = wanted.length === 2 && wanted.every((step) => steps.includes(step))
    ? wanted : [steps[0], steps.at(-1)];
  const choice = (label, place) => html`<label>${label} <select value=${two[place]}
    onChange=${(event) => setQuery({ steps: two.with(place, event.target.value).join() })}>
    ${steps.map((step) =>
      html`<option key=${step} value=${step} selected=${step === two[place]}>${step}</option>`)}
  </select></label>`;
  const column = (step) => {
    const episode = episodes.find((one) => one.step === step);
    return { title: `step ${step}`, episode, href: link("episode", { run, id: episode.id }) };
  };
  return html`<section class="panel">
    <h2>Level ${level_seed}</h2>
    <div class="row toolbar">${choice("then: step", 0)} ${choice("now: step", 1)}</div>
    <${SideBySide} columns=${two.map(column)} />
  </section>`;
}
