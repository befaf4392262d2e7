// Signs of collapse: the run's course in the plane of H(Z|X) and I(X;Z), the matrix of cross-scores,
// and the gradient norms of the task and the regularisers.

import { useApi, useEvents } from "../api.js";
import { Curves } from "../charts.js";
import { Gradients } from "../gradients.js";
import { Matrix } from "../matrix.js";
import { number, percent, plural } from "../numbers.js";
import { Loading, Problem, useReady } from "../parts.js";
import { PATHS, Plane, colourOf, pathsIn } from "../plane.js";
import { html, useMemo } from "../vendor/preact-htm.js";

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
  const measured = Object.keys(data.paths).filter((name) => data.paths[name].steps.length > 0);
  const path = measured.includes(query.path) ? query.path : pathsIn(measured)[0];
  return html`
    <section class="panel">
      <h2>Information of thoughts about their prompts</h2>
      ${path === undefined
        ? html`<${Unmeasured} how="--diagnose.information_every 5"
            also="The policy has to think (prompt.think = true)." />`
        : html`<${Axes} ...${{ data, path, measured, query, setQuery }} />`}
    </section>
    <section class="panel">
      <h2>Cross-scores: which prompt does a thought identify?</h2>
      ${data.matrix_steps.length === 0
        ? html`<${Unmeasured} how="--diagnose.information_every 5" />`
        : html`<${Matrix} steps=${data.matrix_steps} all=${data.all}
            ...${{ run, query, setQuery }} />`}
    </section>
    <section class="panel">
      <h2>Gradient norms by reward std</h2>
      ${data.gradients.steps.length === 0
        ? html`<${Unmeasured} how="--diagnose.gradients_every 10"
            also="Each measurement costs a backward pass for each term and bucket." />`
        : html`<${Gradients} gradients=${data.gradients} step=${Number(query.gradients)}
            onStep=${(step) => setQuery({ gradients: step })} />`}
    </section>`;
}

function Unmeasured({ how, also }) {
  return html`<p class="muted">This was not measured. To see it here, train with <code>${how}</code>. ${also}</p>`;
}

function Axes({ data, path, measured, query, setQuery }) {
  const { paths, thresholds } = data;
  const series = useMemo(() => coursesOf(paths, measured), [data]);
  const look = { sync: "collapse", height: 92 };
  return html`
    <p class="lead">${standing(paths[path], path, thresholds)}</p>
    <div class="axes-row">
      <${Plane} paths=${paths} thresholds=${thresholds} path=${path} step=${Number(query.step)}
        onPick=${(name, step) => setQuery({ path: name, step })} />
      <div class="axes-curves">
        <${Curves} ...${look} title="own prompt identified" series=${series.retrieval} range=${[0, 1]}
          format=${(x) => percent(x, 0)} lines=${chanceOf(paths[path])} />
        <${Curves} ...${look} title="I(X;Z), nats" series=${series.mi} />
        <${Curves} ...${look} title="H(Z|X), nats" series=${series.conditional_entropy} />
        <${Curves} ...${look} title="MI z-score" series=${series.zscore} xLabel="step" />
      </div>
    </div>`;
}

/** Each measure over steps, a curve for each path, in the colours of the plane. */
function coursesOf(paths, measured) {
  const of = (name) => measured.map((path) => ({
    name: PATHS[path] ?? path, colour: colourOf(path), x: paths[path].steps, y: paths[path][name],
  }));
  const names = ["retrieval", "mi", "conditional_entropy", "zscore"];
  return Object.fromEntries(names.map((name) => [name, of(name)]));
}

function chanceOf({ chance }) {
  const last = chance?.at(-1);
  return last === null || last === undefined ? [] : [{ y: last, label: "chance" }];
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
  const where = html`Step ${path.steps[last]}, ${PATHS[name] ?? name}: the entropy of
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
