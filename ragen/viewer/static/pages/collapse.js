// Is the policy collapsing? Where the run is between the two axes H(Z|X) and I(X;Z), which prompt
// each thought points to, and whether the task or the regularisers make the gradient.

import { useApi, useEvents } from "../api.js";
import { Matrix } from "../matrix.js";
import { Loading, Problem, number, percent, useReady } from "../parts.js";
import { Plane } from "../plane.js";
import { html } from "../vendor/preact-htm.js";

/** Which turn of an episode speaks, by the name of its path in the metrics. */
export const PATHS = { first: "first turns", any: "a turn drawn uniformly" };

export default function Page({ params, query, setQuery }) {
  const { run } = params;
  const { data, error, reload } = useApi("/api/collapse", { run });
  useEvents({ run }, { step: reload, again: reload });
  useReady(Boolean(data || error));
  return html`<main class="page page-collapse">
    <h1>Collapse</h1>
    ${error && html`<${Problem} error=${error} reload=${reload} />`}
    ${!data && !error && html`<${Loading} />`}
    ${data && html`<${Collapse} ...${{ run, data, query, setQuery }} />`}
  </main>`;
}

function Collapse({ run, data, query, setQuery }) {
  const paths = Object.entries(data.paths).filter(([, { steps }]) => steps.length > 0);
  const at = paths.some(([name]) => name === query.path) ? query.path : paths[0]?.[0];
  return html`
    <section class="panel">
      ${paths.length > 0
        ? html`<p class="lead">${standing(data.paths[at], at, data.thresholds)}</p>
            <${Plane} paths=${data.paths} thresholds=${data.thresholds} path=${at}
              step=${Number(query.step)} onPick=${(path, step) => setQuery({ path, step })} />`
        : html`<${Unmeasured} what="What thoughts tell of their prompts"
            how="--diagnose.information_every 5" also="It needs prompts with thoughts (prompt.think = true)." />`}
    </section>
    <section class="panel">
      <h2>Cross-scores: which prompt does a thought point to?</h2>
      ${data.matrix_steps.length > 0
        ? html`<${Matrix} run=${run} steps=${data.matrix_steps} ...${{ query, setQuery }} />`
        : html`<${Unmeasured} what="The matrix of cross-scores" how="--diagnose.information_every 5" />`}
    </section>
    <section class="panel">
      <h2>Gradient norms by reward std</h2>
      ${data.gradients.steps.length > 0
        ? html`<${Gradients} gradients=${data.gradients} step=${Number(query.gradients)}
            onStep=${(step) => setQuery({ gradients: step })} />`
        : html`<${Unmeasured} what="Gradients by bucket of reward std" how="--diagnose.gradients_every 10"
            also="Each time costs a backward pass for each term." />`}
    </section>`;
}

function Unmeasured({ what, how, also = "" }) {
  return html`<p class="muted">${what} ${"was not measured in this run. "}
    Train with <code>${how}</code> to see it here. ${also}</p>`;
}

/** Where the run is now, in words, and whether that can be decided. */
function standing(path, name, thresholds) {
  const last = path.steps.length - 1;
  const [mi, entropy, prompts] = [path.mi[last], path.conditional_entropy[last], path.num_prompts[last]];
  const where = html`In step ${path.steps[last]} (${PATHS[name] ?? name}), thoughts vary by
    <b>H(Z|X) = ${number(entropy)} nats</b> given their prompt, and tell <b>I(X;Z) = ${number(mi)} nats</b>
    of it, ${percent(share(path, last), 0)} of the ${number(path.prompt_entropy[last])} that there is to tell`;
  if (prompts < thresholds.min_prompts) {
    return html`${where}. Of ${prompts} different prompts no regime can be told: at least ${thresholds.min_prompts} are
      needed (rollout.prompts).`;
  }
  return html`${where}: <b class=${REGIMES[path.regime[last]]?.kind}>${path.regime[last]}</b>,
    ${REGIMES[path.regime[last]]?.words ?? ""}`;
}

const share = ({ mi, prompt_entropy: ceiling }, i) => (ceiling[i] ? mi[i] / ceiling[i] : null);

const REGIMES = {
  diverse: { kind: "good", words: "it thinks in many ways, and about what it sees." },
  "template collapse": { kind: "bad", words: "it thinks in many ways, but hardly about what it sees." },
  compressed: { kind: "warn", words: "it thinks in few ways, and these fit what it sees." },
  "low-entropy collapse": { kind: "bad", words: "it thinks the same, whatever it sees." },
};

/** The terms of the loss, with what is expected of their gradient as the reward std grows. */
const TERMS = [
  { key: "task_per_token", title: "task", colour: 0 },
  { key: "entropy_per_token", title: "entropy bonus", colour: 1 },
  { key: "kl_per_token", title: "KL to reference", colour: 3 },
];

function Gradients({ gradients, step, onStep }) {
  const { steps } = gradients;
  const at = Math.max(0, steps.includes(step) ? steps.indexOf(step) : steps.length - 1);
  const buckets = gradients.buckets.filter((bucket) => known(bucket.reward_std[at]));
  const terms = TERMS.filter(({ key }) => buckets.some((bucket) => known(bucket[key]?.[at])));
  return html`<p>${shape(buckets, terms, at)}</p>
    ${steps.length > 1 && html`<label class="step-slider">step
      <input type="range" min="0" max=${steps.length - 1} value=${at}
        onInput=${(event) => onStep(steps[event.target.value])} /> <b>${steps[at]}</b></label>`}
    <div class="gradients">${terms.map(({ key, title, colour }) => html`<${Bars} key=${key}
      title=${title} colour=${colour}
      values=${buckets.map((bucket) => bucket[key]?.[at] ?? null)}
      labels=${buckets.map((bucket) => number(bucket.reward_std[at]))} />`)}</div>
    <p class="muted">A bar is the norm of the gradient a token of the groups in one bucket, each panel
      on its own scale; below it the mean reward std of the bucket's groups.</p>`;
}

const known = (x) => x !== null && x !== undefined;

/** How each gradient changes from the lowest bucket to the highest. */
function shape(buckets, terms, at) {
  if (buckets.length < 2) return "All groups have the same reward std: there is nothing to compare.";
  const factors = terms.map(({ key, title }) => {
    const [low, high] = [buckets[0], buckets.at(-1)].map((bucket) => bucket[key]?.[at]);
    return { title, task: key === "task_per_token", factor: low > 0 ? high / low : null };
  });
  const task = factors.find(({ task: is }) => is);
  const others = factors.filter(({ task: is }) => !is);
  const steep = task && (task.factor === null || task.factor > STEEP);
  const flat = others.every(({ factor }) => factor !== null && factor < STEEP && factor > 1 / STEEP);
  const healthy = steep && flat;
  const grow = ({ title, factor }) => `${title} ${factor === null ? "grows from 0" : `× ${number(factor)}`}`;
  return html`From the lowest reward std to the highest: ${factors.map(grow).join(", ")}.
    ${healthy
      ? html` <b class="good">The healthy shape</b>: the task's gradient grows with what there is to learn,
          the regularisers' does not.`
      : html` The healthy shape would be a task gradient that grows, and regularisers that stay flat
          (within a factor of ${STEEP}).`}`;
}

const STEEP = 2; // A factor below which a norm counts as flat: seeds differ by half as much.

function Bars({ title, values, labels, colour }) {
  const most = Math.max(...values.filter(known), 0);
  return html`<figure class="bars"><figcaption>${title}</figcaption>
    <div class="bars-row" role="img" aria-label=${`${title}: ${values.map(number).join(", ")}`}>
      ${values.map((value, i) => html`<div key=${i} class="bar">
        <span class="bar-value">${number(value)}</span>
        <i class=${`fill-${colour}`} style=${{ height: `${most ? Math.max(1, (76 * (value ?? 0)) / most) : 1}px` }}></i>
        <span class="muted">${labels[i]}</span>
      </div>`)}
    </div></figure>`;
}
