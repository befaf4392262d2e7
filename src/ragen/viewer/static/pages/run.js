// One run: its success, its curves, its alarms and its settings, live while it trains.

import { link, visit } from "../addresses.js";
import { shared, useApi, useEvents } from "../api.js";
import { Events, Exactness, Phases } from "../details.js";
import { Glance, Headline, Tiles } from "../headline.js";
import { nearest } from "../numbers.js";
import { Status, Text, useReady } from "../parts.js";
import { CompareWith, Settings } from "../settings.js";
import { Signals, chosen, useMetrics } from "../signals.js";
import { html, useMemo } from "../vendor/preact-htm.js";

// The three signals whose order reveals an Echo Trap (arXiv:2504.20073), as in the report.
const COLLAPSE = ["reward/std_in_group", "entropy/mean", "gradient/policy_norm"];

export function Page({ params, query, setQuery }) {
  const { run } = params;
  const { data, error, reload } = useApi("/api/run", { run });
  const { names = [], labels = {} } = data ?? {};
  const shown = useMemo(() => chosen(names, labels, query.m), [data, query.m]);
  const signs = COLLAPSE.filter((name) => names.includes(name));
  const asked = [...new Set([...shown, ...signs])];
  const runs = useMemo(() => (data ? [data] : []), [data]);
  const metrics = useMetrics([run], asked);
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
  const open = (step) => visit(link("episodes", { run }, stepsNear(data, step)));
  const tools = html`${!shared && html`<${CompareWith} run=${run} />`}
    <span class="muted small hint">drag zooms, double click ends it</span>`;
  return html`<main class="page page-run">
    <${Headline} run=${data} />
    <${Status} data=${data} error=${error ?? metrics.error} reload=${refresh} />
    <${Glance} run=${data} />
    <${Tiles} run=${data} answer=${metrics.data[run]} signs=${COLLAPSE} />
    ${data.steps > 0 && html`<${Signals} all=${names}
      ...${{ runs, metrics, names: shown, query, setQuery, tools }}
      onPick=${data.episode_steps.length && link("episodes", { run }) ? open : undefined}
      onMark=${({ id }) => setQuery({ event: id })} />`}
    <div class="cards">
      <${Events} run=${data} picked=${query.event} />
      <${Phases} phases=${data.phases} />
      <${Exactness} rows=${data.exactness} />
      <${Settings} run=${data} ...${{ query, setQuery }} />
    </div>
  </main>`;
}

/** The filter for the episodes of a step, or of the nearest step that has recorded ones. */
function stepsNear({ episode_steps: steps }, step) {
  const near = steps[nearest(steps, step)];
  return { step_from: near, step_to: near };
}
