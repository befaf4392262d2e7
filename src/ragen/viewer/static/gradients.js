// Gradient norms of task, entropy and KL by bucket of in-group reward std (arXiv:2604.06268): the norm
// of the task should grow with the reward std, those of the regularisers should not.

import { known, number } from "./numbers.js";
import { StepSlider } from "./parts.js";
import { html } from "./vendor/preact-htm.js";

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
  return html`${steps.length > 1 && html`<${StepSlider} ...${{ steps, at, onStep }} />`}
    <div class="row gradients">${norms.map(({ key, ...one }) =>
      html`<${Bars} key=${key} ...${one} labels=${stds.map(number)} />`)}</div>
    <p class="muted">Each bar is a bucket of groups, with the gradient norm a token above it and the
      mean reward std below it. Each panel has its own scale. In a healthy run the norm of the task
      grows with the reward std, and those of the regularisers stay flat.</p>`;
}

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
