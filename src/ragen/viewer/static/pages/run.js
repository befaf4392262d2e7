// One run: its success, its curves, its alarms and its settings, live while it trains.

import { joinRuns, link, splitRuns, visit } from "../addresses.js";
import { shared, useAnswers, useApi, useEvents } from "../api.js";
import { Events, Exactness, Phases } from "../details.js";
import { Engine, engineNames } from "../engine.js";
import { Glance, Headline, Tiles } from "../headline.js";
import { nearest } from "../numbers.js";
import { Chip, Status, Text, useReady } from "../parts.js";
import { RunChoice, Settings } from "../settings.js";
import { Signals, chosen, useMetrics } from "../signals.js";
import { html, useMemo } from "../vendor/preact-htm.js";

// The three signals whose order reveals an Echo Trap (arXiv:2504.20073), as in the report.
const COLLAPSE = ["reward/std_in_group", "entropy/mean", "gradient/policy_norm"];

export function Page({ params, query, setQuery }) {
  const { run } = params;
  const others = splitRuns(query.with).filter((other) => other !== run);
  const { data, error, reload } = useApi("/api/run", { run });
  const beside = useAnswers(others.map((other) => ["/api/run", { run: other }]));
  const { names = [], labels = {} } = data ?? {};
  const shown = useMemo(() => chosen(names, labels, query.m), [data, query.m]);
  const signs = COLLAPSE.filter((name) => names.includes(name));
  const asked = [...new Set([...shown, ...signs, ...engineNames(data)])];
  const runs = useMemo(
    () => (data ? [data, ...beside.answers.filter(Boolean)] : []), [data, beside.answers],
  );
  const missing = others.filter((_, i) => beside.errors[i] && !beside.answers[i]);
  const metrics = useMetrics([run, ...others.filter((_, i) => beside.answers[i])], asked);
  const refresh = () => {
    reload();
    metrics.reload();
  };
  const news = { begin: reload, step: refresh, alarm: reload, end: refresh, again: refresh };
  useEvents({ run }, news);
  const drawn = data && (asked.length === 0 || metrics.data[run]);
  useReady(drawn || error !== null);

  if (!data) {
    return html`<main class="page page-run">
      <h1><${Text} text=${run} /></h1>
      <${Status} ...${{ error, reload }} home />
    </main>`;
  }
  const overlay = (next) => setQuery({ with: joinRuns(next) || null });
  const without = (gone) => overlay(others.filter((other) => other !== gone));
  const open = (step) => visit(link("episodes", { run }, stepsNear(data, step)));
  const tools = html`${!shared && html`<${RunChoice} label="Draw another run over it" value=""
      prompt="Draw over it …" without=${[run, ...others]}
      onChoose=${(other) => overlay([...others, other])} />`}
    <span class="muted small hint">drag zooms, double click ends it</span>`;
  return html`<main class="page page-run">
    <${Headline} run=${data} />
    <${Status} data=${data} error=${error ?? metrics.error} reload=${refresh} />
    <${Glance} run=${data} />
    <${Tiles} run=${data} answer=${metrics.data[run]} signs=${COLLAPSE} />
    ${data.steps > 0 && html`<${Signals} all=${names}
      ...${{ runs, metrics, names: shown, query, setQuery, tools }}
      onPick=${data.episode_steps.length && link("episodes", { run }) ? open : undefined}
      onMark=${({ id }) => setQuery({ event: id })}>
      ${runs.length > 1 && html`<${Legend} runs=${runs} onRemove=${without} />`}
      ${missing.length > 0 && html`<p class="warn" role="alert">
        Not drawn, because they cannot be read:
        ${missing.map((other) => html` <${Chip} key=${other} onRemove=${() => without(other)}
          ><${Text} text=${other} /><//>`)}</p>`}
    <//>`}
    ${data.engine && html`<${Engine} run=${data} answer=${metrics.data[run]} />`}
    <div class="cards">
      <${Events} run=${data} picked=${query.event} />
      <${Phases} phases=${data.phases} />
      <${Exactness} rows=${data.exactness} />
      <${Settings} run=${data} ...${{ query, setQuery }} />
    </div>
  </main>`;
}

/** The runs in the charts, each with its colour; the first one cannot be removed. */
function Legend({ runs, onRemove }) {
  return html`<ul class="row toolbar" aria-label="Runs shown">
    ${runs.map(({ run }, index) => html`<li key=${run}>
      <i class="swatch ink-${index % 8}"></i>
      <a href=${link("run", { run })}><${Text} text=${run} /></a>
      ${index > 0 && html`<button class="quiet" aria-label="remove ${run}"
        onClick=${() => onRemove(run)}>×</button>`}
    </li>`)}
  </ul>`;
}

/** The filter for the episodes of a step, or of the nearest step that has recorded ones. */
function stepsNear({ episode_steps: steps }, step) {
  const near = steps[nearest(steps, step)];
  return { step_from: near, step_to: near };
}
