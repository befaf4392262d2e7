// One run: its success, its curves, its alarms and its settings, live while it trains.

import { joinRuns, link, splitRuns } from "../addresses.js";
import { shared, useAnswers, useApi, useEvents } from "../api.js";
import { Events, Exactness, Phases } from "../details.js";
import { Headline, Tiles } from "../headline.js";
import { useKeys } from "../keys.js";
import { Chip, Loading, Problem, Text, useReady } from "../parts.js";
import { RunChoice, Settings } from "../settings.js";
import {
  Found, Legend, Signals, Toolbar, axisOf, chosen, smoothingOf, useMetrics,
} from "../signals.js";
import { html, useMemo, useRef } from "../vendor/preact-htm.js";

// The three signals whose order reveals an Echo Trap (arXiv:2504.20073), as in the report.
const COLLAPSE = ["reward/std_in_group", "entropy/mean", "gradient/policy_norm"];

export default function Run({ params, query, setQuery }) {
  const { run } = params;
  const others = splitRuns(query.with).filter((other) => other !== run);
  const { data, error, reload } = useApi("/api/run", { run });
  const beside = useAnswers(others.map((other) => ["/api/run", { run: other }]));
  const shown = useMemo(
    () => (data ? chosen(data.names, data.labels, query.m) : []),
    [data, query.m],
  );
  const asked = [...new Set([...shown, ...COLLAPSE.filter((name) => data?.names.includes(name))])];
  const runs = useMemo(
    () => (data ? [data, ...beside.answers.filter(Boolean)] : []), [data, beside.answers],
  );
  const missing = others.filter((_, i) => beside.errors[i] && !beside.answers[i]);
  const metrics = useMetrics([run, ...others.filter((_, i) => beside.answers[i])], asked);
  const search = useRef(null);
  const refresh = () => {
    reload();
    metrics.reload();
  };
  const news = { begin: reload, step: refresh, alarm: reload, end: refresh, again: refresh };
  useEvents({ run }, news);
  useKeys({ "/": () => search.current?.focus() }, { "/": "find a metric" });
  const drawn = data && (asked.length === 0 || metrics.answers[run]);
  useReady(drawn || error !== null);

  if (!data) return html`<${Missing} ...${{ run, error, reload }} />`;
  const trouble = error ?? metrics.error;
  const overlay = (next) => setQuery({ with: joinRuns(next) || null });
  const without = (gone) => overlay(others.filter((other) => other !== gone));
  const open = (step) => (location.hash = link("episodes", { run }, stepsNear(data, step)));
  return html`<main class="page page-run">
    <${Headline} run=${data} />
    ${trouble && html`<${Problem} error=${trouble} reload=${refresh} />`}
    <${Tiles} run=${data} answer=${metrics.answers[run]} signs=${COLLAPSE} />
    <section aria-label="Signals">
      <${Toolbar} ...${{ query, setQuery, names: data.names, search }}>
        ${!shared &&
        html`<${RunChoice}
          label="Draw another run over it" prompt="Draw over it …" value=""
          without=${[run, ...others]}
          onChoose=${(other) => overlay([...others, other])}
        />`}
        <span class="muted hint">drag zooms, double click ends it</span>
      <//>
      ${runs.length > 1 &&
      html`<${Legend} runs=${runs.map((each) => each.run)} onRemove=${without} />`}
      ${missing.length > 0 &&
      html`<p class="warn" role="alert">
        Not drawn, because they cannot be read:
        ${missing.map((other) => html` <${Chip} key=${other} onRemove=${() => without(other)}
          ><${Text} text=${other} /><//>`)}
      </p>`}
      <${Signals}
        ...${{ runs, answers: metrics.answers, names: shown, large: query.large }}
        axis=${axisOf(query)}
        smoothing=${smoothingOf(query)}
        onLarge=${(name) => setQuery({ large: name })}
        onPick=${data.episode_steps.length && link("episodes", { run }) ? open : undefined}
        onMark=${({ id }) => setQuery({ event: id })}
      />
      <${Found} names=${shown} sought=${query.m} />
    </section>
    <div class="details">
      <${Events} run=${data} picked=${query.event} />
      <${Phases} phases=${data.phases} />
      <${Exactness} rows=${data.exactness} />
      <${Settings} run=${data} ...${{ query, setQuery }} />
    </div>
  </main>`;
}

function Missing({ run, error, reload }) {
  return html`<main class="page page-run">
    <h1><${Text} text=${run} /></h1>
    ${!error && html`<${Loading} />`}
    ${error &&
    html`<${Problem} error=${error} reload=${reload}>
      <p><a href=${link("runs")}>All runs</a></p>
    <//>`}
  </main>`;
}

/** The filter for the episodes of a step, or of the nearest step that has recorded ones. */
function stepsNear({ episode_steps: steps }, step) {
  const nearer = (best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best);
  const near = steps.reduce(nearer, steps[0] ?? step);
  return { step_from: near, step_to: near };
}
