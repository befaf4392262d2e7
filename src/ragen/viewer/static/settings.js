// A run's settings: those that differ from its recipe or preset, or all of them.

import { useApi } from "./api.js";
import { Table, Tabs, Text } from "./parts.js";
import { html, useState } from "./vendor/preact-htm.js";

const VIEWS = [
  { key: "changed", title: "Changed" },
  { key: "all", title: "All" },
];

/** The panel of a run's page; the address holds which view is open. */
export function Settings({ run, query, setQuery }) {
  const view = query.settings === "all" ? "all" : "changed";
  const [sought, setSought] = useState("");
  const found = (rows) => rows.filter(({ key }) => key.includes(sought.toLowerCase()));
  const all = () => Object.entries(run.config).map(([key, value]) => ({ key, values: [value] }));
  return html`<section class="panel settings" aria-label="Settings">
    <div class="row">
      <h2>Settings</h2>
      <${Tabs}
        label="Which settings"
        tabs=${VIEWS}
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
  </section>`;
}

function Changed({ run, rows }) {
  if (run.differences === null) {
    return html`<p class="muted">These settings were written by another version of RAGEN. Their
      difference from ${run.recipe} is unknown.</p>`;
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

/** A setting's value as text. */
function written(value) {
  if (value === null || value === undefined) return "unset";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Settings by key, with one value or several: `rows` of `{key, values}`, a title a value. */
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

/** A choice among the folder's readable runs, except those of `without`. */
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
