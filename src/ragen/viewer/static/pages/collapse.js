// Is the policy collapsing? Where the run is between the two axes H(Z|X) and I(X;Z), which prompt
// each thought points to, and whether the task or the regularisers make the gradient.

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
      <h2>What thoughts tell of their prompts</h2>
      ${path === undefined
        ? html`<${Unmeasured} how="--diagnose.information_every 5"
            also="It needs a policy that thinks (prompt.think = true)." />`
        : html`<${Axes} ...${{ data, path, measured, query, setQuery }} />`}
    </section>
    <section class="panel">
      <h2>Cross-scores: which prompt does a thought point to?</h2>
      ${data.matrix_steps.length === 0
        ? html`<${Unmeasured} how="--diagnose.information_every 5" />`
        : html`<${Matrix} steps=${data.matrix_steps} all=${data.all}
            ...${{ run, query, setQuery }} />`}
    </section>
    <section class="panel">
      <h2>Gradient norms by reward std</h2>
      ${data.gradients.steps.length === 0
        ? html`<${Unmeasured} how="--diagnose.gradients_every 10"
            also="Each time costs a backward pass for each term and bucket." />`
        : html`<${Gradients} gradients=${data.gradients} step=${Number(query.gradients)}
            onStep=${(step) => setQuery({ gradients: step })} />`}
    </section>`;
}

function Unmeasured({ how, also }) {
  return html`<p class="muted">This run did not measure it. To see it here, train
    with <code>${how}</code>. ${also}</p>`;
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
        <${Curves} ...${look} title="own prompt found" series=${series.retrieval} range=${[0, 1]}
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

/** What each regime means, in words. */
const REGIMES = {
  diverse: ["good", "it thinks in many ways, and about what it sees."],
  "template collapse": ["bad", "it thinks in many ways, but hardly about what it sees."],
  compressed: ["warn", "it thinks in few ways, and they fit what it sees."],
  "low-entropy collapse": ["bad", "it thinks the same, whatever it sees."],
};

/** Where the run is now, in words, and whether that can be decided. */
function standing(path, name, { min_prompts: least }) {
  const last = path.steps.length - 1;
  const names = ["mi", "conditional_entropy", "prompt_entropy", "num_prompts"];
  const [mi, entropy, ceiling, prompts] = names.map((each) => path[each][last]);
  const told = ceiling > 0 ? `${percent(mi / ceiling, 0)} of the ${number(ceiling)}` : "of the 0";
  const where = html`Step ${path.steps[last]}, ${PATHS[name] ?? name}: given their prompt, thoughts
    vary by <b>H(Z|X) = ${number(entropy)} nats</b>; of the prompt they tell${" "}
    <b>I(X;Z) = ${number(mi)} nats</b>, ${told} that there are to tell.`;
  if (prompts < least) {
    return html`${where} <b>That is undecidable</b>: the thoughts came
      from ${plural(prompts, "different prompt")}, and a regime needs ${least} or more (more levels
      a step: rollout.num_groups; some environments have fewer first prompts than that).`;
  }
  const [kind, words] = REGIMES[path.regime[last]];
  return html`${where} That is <b class=${kind}>${path.regime[last]}</b>: ${words}`;
}
