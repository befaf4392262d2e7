// Gradient norms of task, entropy and KL by bucket of in-group reward std (arXiv:2604.06268): the norm
// of the task should grow with the reward std, those of the regularisers should not.

import { known, number } from "./numbers.js";
import { StepSlider } from "./parts.js";
import { html } from "./vendor/preact-htm.js";

const ALIKE = 1.2; // Below this factor of the reward std, buckets are not compared.
const FLAT = 2; // Where the lowest reward std is 0: a norm within this factor is flat.
const TALL = 76; // Pixels of the highest bar.

const TERMS = [
  { key: "task_per_token", title: "task", colour: 0 },
  { key: "entropy_per_token", title: "entropy bonus", colour: 1 },
  { key: "kl_per_token", title: "KL to reference", colour: 3 },
];

/** `gradients` as `/api/collapse` has them; `step` is the chosen one, or not a number. */
export function Gradients({ gradients, step, onStep }) {
  const { steps } = gradients;
  const at = steps.includes(step) ? steps.indexOf(step) : steps.length - 1;
  const buckets = gradients.buckets.filter((bucket) => known(bucket.reward_std[at]));
  const of = (key) => buckets.map((bucket) => bucket[key]?.[at] ?? null);
  const terms = TERMS.map((term) => ({ ...term, values: of(term.key) }));
  const norms = terms.filter(({ values }) => values.some(known));
  const stds = of("reward_std");
  return html`<p>${shape(norms, stds)}</p>
    ${steps.length > 1 && html`<${StepSlider} ...${{ steps, at, onStep }} />`}
    <div class="row gradients">${norms.map(({ key, ...one }) =>
      html`<${Bars} key=${key} ...${one} labels=${stds.map(number)} />`)}</div>
    <p class="muted">Each bar is a bucket of groups, with the gradient norm a token above it and the
      mean reward std below it. Each panel has its own scale.</p>`;
}

/**
 * How each gradient changes from the lowest bucket to the highest, in a sentence. A term grows with
 * the reward std if the factor of its norm is at least the square root of the factor of the std, and
 * is flat otherwise. Without spread, the task has no gradient: such a bucket counts only if there are
 * no two others.
 */
function shape(allNorms, allStds) {
  const spread = allStds.filter((each) => each > 0).length;
  const from = spread > 1 ? allStds.length - spread : 0;
  const stds = allStds.slice(from);
  const norms = allNorms.map((one) => ({ ...one, values: one.values.slice(from) }));
  const std = factorOf(stds);
  if (stds.length < 2 || std < ALIKE) {
    return "The reward std is about the same in all groups: there is nothing to compare in this step.";
  }
  const factors = norms.map(({ title, values }) => ({ title, factor: factorOf(values) }));
  const limit = Number.isFinite(std) ? Math.sqrt(std) : FLAT;
  const task = factors.find(({ title }) => title === "task");
  const steep = ({ factor }) => factor > limit || factor < 1 / limit;
  const unsteady = factors.filter((one) => one !== task && steep(one));
  const faults = [
    !(task?.factor >= limit) && "the gradient of the task does not grow",
    ...unsteady.map(({ title }) => `that of the ${title} is not flat`),
  ].filter(Boolean);
  const changes = factors.map(({ title, factor }) => `${title} ${times(factor)}`).join(", ");
  return html`From the lowest bucket${from > 0 && " with any spread"} to the highest, the reward std
    changes by ${times(std)}, and the gradients by: ${changes}.${" "}
    ${faults.length
      ? html`<b class="warn">Not the healthy shape</b>: ${faults.join(", and ")}.`
      : html`<b class="good">The healthy shape</b>: the gradient of the task grows with the reward
          std, those of the regularisers stay flat.`}`;
}

const factorOf = (values) => (values[0] > 0 ? values.at(-1) / values[0] : Infinity);
const times = (factor) => (Number.isFinite(factor) ? `× ${number(factor)}` : "from nothing");

function Bars({ title, values, labels, colour }) {
  const most = Math.max(...values.filter(known));
  const tall = (value) => (most > 0 ? Math.max(1, (TALL * (value ?? 0)) / most) : 1);
  return html`<figure class="norms"><figcaption><b>${title}</b></figcaption>
    <div class="norms-row" role="img" aria-label=${`${title}: ${values.map(number).join(", ")}`}>
      ${values.map((value, i) => html`<div key=${i} class="norm">
        <span>${number(value)}</span>
        <i class=${`ink-${colour}`} style=${{ height: `${tall(value)}px` }}></i>
        <span class="muted">${labels[i]}</span>
      </div>`)}
    </div></figure>`;
}
