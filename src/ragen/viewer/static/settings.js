// A run's settings: what differs from its recipe or preset, all of them, and beside another run's.

import { shared, useApi } from "./api.js";
import { Problem, Table, Tabs, Text } from "./parts.js";
import { html, useState } from "./vendor/preact-htm.js";

const VIEWS = [
  { key: "changed", title: "Changed" },
  { key: "all", title: "All" },
  { key: "other", title: "Beside another run" },
];

/** The panel of a run's page; which view and which other run live in the address. */
export function Settings({ run, query, setQuery }) {
  const views = shared ? VIEWS.slice(0, 2) : VIEWS;
  const view = views.some(({ key }) => key === query.settings) ? query.settings : "changed";
  const [sought, setSought] = useState("");
  const found = (rows) => rows.filter(({ key }) => key.includes(sought.toLowerCase()));
  const all = () => Object.entries(run.config).map(([key, value]) => ({ key, values: [value] }));
  return html`<section class="panel settings" aria-label="Settings">
    <div class="row">
      <h2>Settings</h2>
      <${Tabs}
        label="Which settings"
        tabs=${views}
        value=${view}
        onChange=${(key) => setQuery({ settings: key === "changed" ? null : key })}
      />
      <input
        type="search" aria-label="Filter settings" placeholder="Filter" value=${sought}
        onInput=${(event) => setSought(event.target.value)}
      />
    </div>
    ${view === "changed" && html`<${Changed} run=${run} rows=${found(run.differences ?? [])} />`}
    ${view === "all" && html`<${Values} titles=${["Value"]} rows=${found(all())} />`}
    ${view === "other" &&
    html`<${Beside} run=${run.run} other=${query.beside} found=${found} setQuery=${setQuery} />`}
  </section>`;
}

function Changed({ run, rows }) {
  if (run.differences === null) {
    return html`<p class="muted">These settings are of another version of RAGEN: what they change
      of ${run.recipe} cannot be told.</p>`;
  }
  if (run.differences.length === 0) {
    return html`<p class="muted">Nothing differs from ${run.recipe} and ${run.algorithm}.</p>`;
  }
  const columns = [
    { key: "key", title: "Key", render: ({ key }) => html`<code>${key}</code>` },
    {
      key: "value",
      title: "This run",
      render: ({ value }) => html`<b><${Text} text=${written(value)} /></b>`,
    },
    {
      key: "base",
      title: `In ${rows[0]?.source ?? run.recipe}`,
      render: ({ base }) => html`<${Text} text=${written(base)} />`,
    },
  ];
  return html`<div class="tall">
    <${Table} label="Changed settings" columns=${columns} rows=${rows} rowKey=${(row) => row.key} />
  </div>`;
}

/** A setting's value for people. */
function written(value) {
  if (value === null || value === undefined) return "unset";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Settings by key with one value or several: `rows` of `{key, values}`, a title for each value. */
export function Values({ titles, rows }) {
  const columns = [
    { key: "key", title: "Key", render: ({ key }) => html`<code>${key}</code>` },
    ...titles.map((title, i) => ({
      key: `value ${i}`,
      title,
      render: ({ values }) => html`<${Text} text=${written(values[i])} />`,
    })),
  ];
  return html`<div class="tall">
    <${Table} label="Settings" columns=${columns} rows=${rows} rowKey=${(row) => row.key} />
  </div>`;
}

function Beside({ run, other, found, setQuery }) {
  const { data, error, reload } = useApi(other ? "/api/difference" : null, { run, other });
  const rows = data?.differences.map(({ key, a, b }) => ({ key, values: [a, b] })) ?? [];
  return html`<div>
    <p>
      <${RunChoice}
        label="The other run" prompt="Choose a run …" value=${other ?? ""} without=${[run]}
        onChoose=${(beside) => setQuery({ beside })}
      />
    </p>
    ${error && html`<${Problem} error=${error} reload=${reload} />`}
    ${data && rows.length === 0 && html`<p class="muted">Their settings are the same.</p>`}
    ${rows.length > 0 && html`<${Values} titles=${["This run", other]} rows=${found(rows)} />`}
  </div>`;
}

/** A choice among the folder's runs that can be read, but those of `without`. */
export function RunChoice({ label, prompt, value, without, onChoose }) {
  const { data } = useApi("/api/runs");
  const readable = (data?.runs ?? []).filter(({ state }) => state !== "unreadable");
  const free = readable.filter(({ run }) => !without.includes(run));
  if (free.length === 0) return null;
  return html`<select
    aria-label=${label} value=${value} onChange=${(event) => onChoose(event.target.value)}
  >
    <option value="" disabled>${prompt}</option>
    ${free.map(({ run }) => html`<option key=${run} value=${run}>${run}</option>`)}
  </select>`;
}
