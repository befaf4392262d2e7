// What stands under a run's curves: events, time by phase, exactness, evaluations, settings.

import { shared, useApi } from "./api.js";
import { Chip, Interval, Problem, Table, Tabs, Text, clock, link, moment, number, percent } from "./parts.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

export function Details({ run, query, setQuery }) {
  return html`<div class="details">
    <${Events} run=${run} picked=${query.event} />
    <${Evaluations} run=${run} />
    <${Phases} phases=${run.phases} />
    <${Exactness} rows=${run.exactness} />
    <${Settings} run=${run} ...${{ query, setQuery }} />
  </div>`;
}

/** A step as a link to its episodes. */
function Step({ run, step }) {
  if (shared) return number(step);
  return html`<a href=${link("episodes", { run }, { step_from: step, step_to: step })} title="episodes of this step">${number(step)}</a>`;
}

function Events({ run, picked }) {
  const list = useRef(null);
  useEffect(() => {
    if (picked) list.current?.querySelector(".picked")?.scrollIntoView({ block: "center" });
  }, [picked]);
  return html`<section class="panel events" aria-label="Alarms and actions">
    <h2>Alarms and actions</h2>
    ${run.events.length === 0 && html`<p class="muted">None.</p>`}
    <ol ref=${list}>
      ${run.events.map((event) => html`<li key=${event.id} class=${String(event.id) === picked ? "picked" : ""}>
        <span class="number"><${Step} run=${run.run} step=${event.step} /></span>
        <span><${Chip} kind=${KINDS[event.kind] ?? ""}>${event.kind}<//></span>
        <span><${Text} text=${event.text} /></span>
        <time class="muted number" title="attempt ${event.attempt}">${moment(event.time)}</time>
      </li>`)}
    </ol>
  </section>`;
}

const KINDS = { alarm: "bad", guard: "warn", "damaged checkpoint": "bad" };

function Evaluations({ run }) {
  const columns = [
    { key: "step", title: "Step", align: "right", render: ({ step }) => number(step) },
    { key: "how", title: "How" },
    {
      key: "success", title: "Success",
      render: ({ success, random, best }) => html`<${Interval} ...${success} floor=${random ?? run.random} ceiling=${best ?? run.best} />`,
    },
    {
      key: "range", title: "95 % interval", align: "right muted wide",
      render: ({ success }) => `${percent(success.low)} – ${percent(success.high)}`,
    },
    { key: "episodes", title: "Levels", align: "right", render: ({ episodes }) => number(episodes) },
  ];
  return html`<section class="panel" aria-label="Evaluations">
    <h2>Evaluations ${!shared && html`<a href=${link("evaluations", { run: run.run })}>more</a>`}</h2>
    ${run.evaluations.length
      ? html`<div class="tall"><${Table} label="Evaluations" columns=${columns} rows=${[...run.evaluations].reverse()} /></div>`
      : html`<p class="muted">It was not evaluated yet.</p>`}
  </section>`;
}

function Phases({ phases }) {
  const parts = Object.entries(phases).sort(([, a], [, b]) => b - a);
  const whole = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!whole) return html`<section class="panel"><h2>Time</h2><p class="muted">No step is finished.</p></section>`;
  return html`<section class="panel" aria-label="Time by phase">
    <h2>Time by phase <span class="muted">${clock(whole)} in all</span></h2>
    <div class="stack" role="img" aria-label=${parts.map(([name, s]) => `${name} ${percent(s / whole, 0)}`).join(", ")}>
      ${parts.map(([name, s], i) => html`<i class="fill-${i % 8}" title="${name} ${clock(s)}" style=${{ flexGrow: s }}></i>`)}
    </div>
    <table>
      <tbody>
        ${parts.map(([name, s], i) => html`<tr key=${name}>
          <td><i class="swatch fill-${i % 8}"></i>${name}</td>
          <td class="right">${clock(s)}</td>
          <td class="right muted">${percent(s / whole)}</td>
        </tr>`)}
      </tbody>
    </table>
  </section>`;
}

function Exactness({ rows }) {
  const columns = [
    { key: "name", title: "Measure" },
    { key: "last", title: "Last step", align: "right", render: ({ last }) => number(last) },
    { key: "largest", title: "Largest of a step", align: "right", render: ({ largest }) => number(largest) },
    {
      key: "total", title: "In all", align: "right",
      render: ({ name, total }) => (name.endsWith("_checked") ? html`<b>${number(total)}</b>` : ""),
    },
  ];
  return html`<section class="panel" aria-label="Exactness">
    <h2>Exactness</h2>
    <p class="muted">What was checked, and how far two computations of the same number differ.</p>
    ${rows.length ? html`<${Table} label="Exactness" columns=${columns} rows=${rows} rowKey=${({ name }) => name} />` : html`<p>Nothing was measured.</p>`}
  </section>`;
}

const VIEWS = [
  { key: "changed", title: "Changed" },
  { key: "all", title: "All" },
  { key: "other", title: "Beside another run" },
];

function Settings({ run, query, setQuery }) {
  const views = shared ? VIEWS.slice(0, 2) : VIEWS;
  const view = views.some(({ key }) => key === query.settings) ? query.settings : "changed";
  const [sought, setSought] = useState("");
  const words = (rows) => rows.filter((row) => row.key.toLowerCase().includes(sought.toLowerCase()));
  return html`<section class="panel settings" aria-label="Settings">
    <div class="row">
      <h2>Settings</h2>
      <${Tabs} label="Which settings" tabs=${views} value=${view} onChange=${(key) => setQuery({ settings: key === "changed" ? null : key })} />
      <input type="search" aria-label="Filter settings" placeholder="Filter" value=${sought} onInput=${(event) => setSought(event.target.value)} />
    </div>
    ${view === "changed" && html`<${Changed} rows=${words(run.differences)} algorithm=${run.algorithm} />`}
    ${view === "all" && html`<${Pairs} titles=${["Value"]} rows=${words(Object.entries(run.config).map(([key, a]) => ({ key, a })))} />`}
    ${view === "other" && html`<${Beside} run=${run.run} other=${query.beside} onChoose=${(beside) => setQuery({ beside })} words=${words} />`}
  </section>`;
}

function Changed({ rows, algorithm }) {
  if (rows.length === 0) return html`<p class="muted">Nothing differs from ${algorithm}.</p>`;
  const columns = [
    { key: "key", title: "Key", render: ({ key }) => html`<code>${key}</code>` },
    { key: "value", title: "This run", render: ({ value }) => html`<b><${Text} text=${written(value)} /></b>` },
    { key: "base", title: "Otherwise", render: ({ base }) => html`<${Text} text=${written(base)} />` },
    { key: "source", title: "Whose", align: "muted" },
  ];
  return html`<div class="tall"><${Table} label="Changed settings" columns=${columns} rows=${rows} rowKey=${({ key }) => key} /></div>`;
}

/** A setting's value as a TOML file would have it. */
export function written(value) {
  if (value === null || value === undefined) return "unset";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Settings with one value or several: `rows` of `{key, a, b, …}`. */
export function Pairs({ titles, rows }) {
  const fields = [..."abcdefgh"].slice(0, titles.length);
  const columns = [
    { key: "key", title: "Key", render: ({ key }) => html`<code>${key}</code>` },
    ...fields.map((field, i) => ({ key: field, title: titles[i], render: (row) => html`<${Text} text=${written(row[field])} />` })),
  ];
  return html`<div class="tall"><${Table} label="Settings" columns=${columns} rows=${rows} rowKey=${({ key }) => key} /></div>`;
}

function Beside({ run, other, onChoose, words }) {
  const { data: list } = useApi("/api/runs");
  const { data, error, reload } = useApi(other ? "/api/difference" : null, { run, other });
  const free = (list?.runs ?? []).filter((each) => each.run !== run && each.state !== "unreadable");
  return html`<div>
    <p><select aria-label="The other run" value=${other ?? ""} onChange=${(event) => onChoose(event.target.value)}>
      <option value="" disabled>Choose a run …</option>
      ${free.map((each) => html`<option key=${each.run} value=${each.run}>${each.run}</option>`)}
    </select></p>
    ${error && html`<${Problem} error=${error} reload=${reload} />`}
    ${data && (data.differences.length
      ? html`<${Pairs} titles=${["This run", other]} rows=${words(data.differences)} />`
      : html`<p class="muted">Their settings are the same.</p>`)}
  </div>`;
}
