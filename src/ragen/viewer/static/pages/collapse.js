// Signs of collapse: the run's course in the plane of H(Z|X) and I(X;Z), the matrix of cross-scores,
// and the gradient norms of the task and the regularisers.

import { useLive } from "../api.js";
import { Curves } from "../charts.js";
import { Gradients } from "../gradients.js";
import { Matrix } from "../matrix.js";
import { known, number, percent, plural } from "../numbers.js";
import { Status, picked, useReady } from "../parts.js";
import { PATHS, Plane } from "../plane.js";
import { html, useMemo } from "../vendor/preact-htm.js";

export function Page({ params, query, setQuery }) {
  const { run } = params;
  const answer = useLive("/api/collapse", { run });
  const { data } = answer;
  useReady(Boolean(data || answer.error));
  return html`<main class="page page-collapse">
    <h1>Collapse</h1>
    <${Status} ...${answer} />
    ${data && html`<${Collapse} ...${{ run, data, query, setQuery }} />`}
  </main>`;
}

function Collapse({ run, data, query, setQuery }) {
  const { gradients, thresholds, matrix_steps: steps } = data;
  const measured = Object.entries(data.paths).filter(([, course]) => course.steps.length > 0);
  const paths = useMemo(() => Object.fromEntries(measured), [data]);
  const path = picked(paths, query.path);
  return html`
    <section class="panel">
      <h2>Information of thoughts about their prompts</h2>
      ${path === undefined
        ? html`<${Unmeasured} how="--diagnose.information_every 5"
            also="The policy has to think (prompt.think = true)." />`
        : html`<${Axes} ...${{ paths, thresholds, path, query, setQuery }} />`}
    </section>
    <section class="panel">
      <h2>Cross-scores: which prompt does a thought identify?</h2>
      ${steps.length === 0
        ? html`<${Unmeasured} how="--diagnose.information_every 5" />`
        : html`<${Matrix} courses=${paths} all=${data.all} ...${{ run, steps, query, setQuery }} />`}
    </section>
    <section class="panel">
      <h2>Gradient norms by reward std</h2>
      ${gradients.steps.length === 0
        ? html`<${Unmeasured} how="--diagnose.gradients_every 10"
            also="Each measurement costs a backward pass for each term and bucket." />`
        : html`<${Gradients} gradients=${gradients} step=${Number(query.gradients)}
            onStep=${(step) => setQuery({ gradients: step })} />`}
    </section>`;
}

function Unmeasured({ how, also }) {
  return html`<p class="muted">This was not measured. To see it here, train with <code>${how}</code>.${
    also && ` ${also}`}</p>`;
}

function Axes({ paths, thresholds, path, query, setQuery }) {
  const series = useMemo(() => coursesOf(paths), [paths]);
  const look = { sync: "collapse", height: 106, xLabel: "step" };
  const chance = paths[path].chance.at(-1);
  const lines = known(chance) ? [{ y: chance, label: "chance" }] : [];
  return html`
    <p class="lead">${standing(paths[path], path, thresholds)}</p>
    <div class="columns sides">
      <${Plane} paths=${paths} thresholds=${thresholds} path=${path} step=${Number(query.step)}
        onPick=${(name, step) => setQuery({ path: name, step })} />
      <div>
        <${Curves} ...${look} title="own prompt identified" series=${series.retrieval}
          range=${[0, 1]} format=${(x) => percent(x, 0)} lines=${lines} />
        <${Curves} ...${look} title="I(X;Z), nats" series=${series.mi} />
        <${Curves} ...${look} title="H(Z|X), nats" series=${series.conditional_entropy} />
        <${Curves} ...${look} title="MI z-score" series=${series.zscore} />
      </div>
    </div>`;
}

/** Each measure over steps, a curve for each path, in the colours of the plane. */
function coursesOf(paths) {
  const curve = (path, name) => {
    const { title, colour } = PATHS[path];
    return { name: title, colour, x: paths[path].steps, y: paths[path][name] };
  };
  const names = ["retrieval", "mi", "conditional_entropy", "zscore"];
  const curves = (name) => Object.keys(paths).map((path) => curve(path, name));
  return Object.fromEntries(names.map((name) => [name, curves(name)]));
}

/** The meaning of each regime. */
const REGIMES = {
  diverse: ["good", "thoughts vary, and depend on the observation."],
  "template collapse": ["bad", "thoughts vary, but hardly depend on the observation."],
  compressed: ["warn", "thoughts vary little, and depend on the observation."],
  "low-entropy collapse": ["bad", "thoughts are the same, whatever the observation."],
};

/** The regime of the last step in words, and whether it can be decided. */
function standing(path, name, { min_prompts: least }) {
  const last = path.steps.length - 1;
  const names = ["mi", "conditional_entropy", "prompt_entropy", "num_prompts"];
  const [mi, entropy, ceiling, prompts] = names.map((each) => path[each][last]);
  const told = ceiling > 0 ? `${percent(mi / ceiling, 0)} of the ${number(ceiling)} nats` : "0 nats";
  const where = html`Step ${path.steps[last]}, ${PATHS[name].title}: the entropy of
    thoughts given their prompt is <b>H(Z|X) = ${number(entropy)} nats</b>; their information about
    the prompt is <b>I(X;Z) = ${number(mi)} nats</b>, which is ${told} of the prompts' entropy.`;
  if (prompts < least) {
    return html`${where} <b>The regime is undecided</b>: the thoughts came
      from ${plural(prompts, "different prompt")}, and at least ${least} are needed. Raise
      rollout.num_groups; some environments have fewer first prompts.`;
  }
  const [kind, words] = REGIMES[path.regime[last]];
  return html`${where} The regime is <b class=${kind}>${path.regime[last]}</b>: ${words}`;
}
