// The headline of a run: what it trains, its success, its gain, signs of collapse, its progress.

import { link } from "./addresses.js";
import { ago, clock, moment, number, percent, plural, points } from "./numbers.js";
import { Figures, Interval, Spark, State, Text } from "./parts.js";
import { html } from "./vendor/preact-htm.js";

export function Headline({ run }) {
  const facts = [
    run.env,
    `model ${run.model}`,
    `recipe ${run.recipe}`,
    run.algorithm,
    `seed ${run.seed}`,
    run.attempts > 1 && plural(run.attempts, "attempt"),
  ];
  return html`<div class="row toolbar">
    <h1><${Text} text=${run.run === "." ? run.name : run.run} /></h1>
    <${State} state=${run.state} problem=${run.problem} />
    <span class="muted roomy"><${Text} text=${facts.filter(Boolean).join(" · ")} /></span>
    ${run.updated && html`<span class="muted" title=${moment(run.updated)}>changed ${
      ago(run.updated)}</span>`}
  </div>`;
}

/** The settings that one asks for first, by name; values that the config does not have are left out. */
export function Glance({ run: { config, steps } }) {
  const of = (key) => config[key] ?? null;
  const text = (key, format = number) =>
    typeof of(key) === "number" ? format(of(key)) : String(of(key) ?? "");
  const critic = String(of("advantage.name")).endsWith("gae") // These estimators read values.
    ? ` (critic ${text("update.critic_lr")})` : "";
  const rule = of("filter.rule");
  const mixed = Object.keys(config).some((key) => key.startsWith("env.mix.")); // each has its own
  const trained = steps === 0 ? [] : [
    ["learning rate", text("update.lr") && `${text("update.lr")}${critic}`],
    ["episodes a step", text("rollout.num_groups") &&
      `${text("rollout.num_groups")} × ${text("rollout.group_size")}`],
    ["filter", rule && (rule.startsWith("top") ? `${rule} ${text("filter.value")}` : rule)],
    ["advantage", text("advantage.name")],
    ["loss", text("loss.name")],
    ["KL, entropy bonus", text("loss.kl") && `${text("loss.kl")}, ${text("loss.entropy")}`],
  ];
  const all = [
    ...trained,
    ["tokens a reply", text("rollout.max_tokens") && `at most ${text("rollout.max_tokens")}`],
    ["temperature", text(steps === 0 ? "eval.temperature" : "rollout.temperature")],
    ["turns, actions", !mixed && text("env.max_turns") && `${text("env.max_turns")}, ${text("env.max_actions")}`],
    ["prompts", text("prompt.style")],
  ];
  return html`<div class="glance"><${Figures} all=${all.filter(([, value]) => value)} /></div>`;
}

/** Four tiles; `answer` has the metrics, `signs` names those that reveal a collapse. */
export function Tiles({ run, answer, signs }) {
  if (run.steps === 0) {
    return html`<div class="tiles"><${Success} ...${run} /><${Replies} run=${run} /></div>`;
  }
  return html`<div class="tiles">
    <${Success} ...${run} />
    <${Gain} ...${run} />
    <${Collapse} ...${{ run, answer, signs }} />
    <${Progress} run=${run} tokens=${answer?.axes.tokens.at(-1)} />
  </div>`;
}

function Tile({ title, note, kind = "", children }) {
  return html`<section class="panel tile ${kind}" aria-label=${title}>
    <h2>${title} <span class="muted">${note}</span></h2>
    ${children}
  </section>`;
}

const range = ({ low, high }, format) => `[${format(low, 0)}, ${format(high, 0)}]`;

function Success({ success, random, optimal, parts, steps }) {
  const of = steps > 0 && success ? `step ${success.step}, ` : "";
  if (!success) return html`<${Tile} title="Success"><p class="muted">Not evaluated yet.</p><//>`;
  return html`<${Tile} title="Success" note=${`${of}${success.how}`}>
    <p class="big">${percent(success.value)} <small>${range(success, percent)}</small></p>
    <${Interval} ...${success} ...${{ random, optimal }} text=${false} />
    <p class="row apart small muted">
      ${random !== null && html`<span>random ${percent(random, 0)}</span>`}
      ${optimal !== null && html`<span>optimal ${percent(optimal, 0)}</span>`}
    </p>
    ${parts.map((part) => html`<p class="row apart small">
      <${Text} text=${part.env} /> <span><b>${percent(part.success.value, 0)}</b> ${
        range(part.success, percent)}</span>
      <span class="muted">random ${percent(part.random, 0)}${
        part.optimal !== null && `, optimal ${percent(part.optimal, 0)}`}</span>
    </p>`)}
  <//>`;
}

/** What an evaluation recorded about replies, beside its success. */
function Replies({ run }) {
  const last = run.evaluations.findLast(({ is_part: isPart }) => !isPart);
  const all = link("episodes", { run: run.run });
  return html`<${Tile} title="Replies" note=${last && `${number(last.completion_tokens)} tokens and ${
    number(last.thought_words)} words of thought each`}>
    ${last && html`<p class="big">${percent(last.valid_fraction)} <small>are valid</small></p>`}
    <p class="muted">${plural(run.num_episodes, "episode")} recorded</p>
    ${all && html`<p><a href=${all}>Episodes</a></p>`}
  <//>`;
}

function Gain({ run, gain, before }) {
  if (!gain) return html`<${Tile} title="Gain"><p class="muted">No two evaluations yet.</p><//>`;
  let [kind, words] = ["muted", "no change is shown: the interval contains 0"];
  if (gain.low > 0) [kind, words] = ["good", "better than before training"];
  if (gain.high < 0) [kind, words] = ["bad", "worse than before training"];
  const paired = link("evaluations", { run });
  const note = html`since step ${before.step}${
    paired && html` · <a href=${paired}>level by level</a>`}`;
  return html`<${Tile} title="Gain" note=${note}>
    <p class="big">${points(gain.value)} <small>points ${range(gain, points)}</small></p>
    <${Interval} ...${gain} min=${-1} zero text=${false} format=${points} />
    <p class=${kind}>${words}</p>
  <//>`;
}

function Collapse({ run, answer, signs }) {
  const alarms = run.events.filter(({ kind }) => kind === "alarm");
  const action = run.events.findLast(({ kind }) => kind === "guard");
  const more = link("collapse", { run: run.run });
  return html`<${Tile} title="Collapse" kind="broad" note=${more && html`<a href=${more}>more</a>`}>
    ${alarms.length === 0
      ? html`<p class="good"><b>✓ No alarm</b></p>`
      : html`<p class="bad"><b>▲ ${plural(alarms.length, "alarm")}</b>, first at step
          ${` ${alarms[0].step}: ${alarms[0].data.detector.replaceAll("_", " ")}`}</p>`}
    ${action && html`<p class="warn">■ <${Text} text=${action.text} /></p>`}
    <div class="signs">${signs.map((name) => html`<${Sign} label=${run.labels[name]}
      values=${answer?.names[name]?.values ?? []} />`)}</div>
  <//>`;
}

function Sign({ label, values }) {
  if (values.length === 0) return null;
  const [first, last] = [values[0], values.at(-1)].map(number);
  return html`<div class="row tight apart small" title="${label}: first ${first}, last ${last}">
    <span class="muted">${label}</span> <b>${last}</b>
    <${Spark} values=${values} label=${label} />
  </div>`;
}

function Progress({ run, tokens }) {
  const seconds = Object.values(run.phases).reduce((sum, each) => sum + each, 0);
  const of = run.budget === "steps" ? run.steps : null;
  const last = run.episode_steps.at(-1);
  const now = link("episodes", { run: run.run }, { step_from: last, step_to: last });
  return html`<${Tile} title="Progress">
    <p class="big">${number(run.step)}${of ? " " : " steps "}
      <small>of ${number(run.steps)} ${run.budget}</small></p>
    ${of && html`<progress max=${of} value=${run.step} aria-label="steps done"></progress>`}
    <p class="muted">${clock(seconds)} · ${plural(run.num_episodes, "episode")} recorded${
      tokens > 0 && ` · ${number(tokens)} tokens sampled`}</p>
    ${last !== undefined && now && html`<p><a href=${now}>Episodes of step ${last}</a></p>`}
  <//>`;
}
