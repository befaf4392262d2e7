// A run's settings: those that differ from its recipe or preset, or all of them.

import { joinRuns, link, visit } from "./addresses.js";
import { useApi } from "./api.js";
import { known } from "./numbers.js";
import { Table, Tabs, Text, picked } from "./parts.js";
import { html, useState } from "./vendor/preact-htm.js";

const VIEWS = { changed: { title: "Changed" }, all: { title: "All" } };

/** The panel of a run's page; the address holds which view is open. */
export function Settings({ run, query, setQuery }) {
  const view = picked(VIEWS, query.settings);
  const [sought, setSought] = useState("");
  const found = (rows) => rows.filter(({ key }) => key.includes(sought.toLowerCase()));
  const all = () => Object.entries(run.config).map(([key, value]) => ({ key, values: [value] }));
  return html`<section class="panel settings" aria-label="Settings">
    <div class="row">
      <h2>Settings</h2>
      <${Tabs} label="Which settings" options=${VIEWS} value=${view}
        onChange=${(key) => setQuery({ settings: key === "changed" ? null : key })} />
      <input type="search" aria-label="Filter settings" placeholder="Filter" value=${sought}
        onInput=${(event) => setSought(event.target.value)} />
    </div>
    ${view === "changed" && html`<${Changed} run=${run} found=${found} />`}
    ${view === "all" && html`<${Values} titles=${["Value"]} rows=${found(all())} />`}
  </section>`;
}

function Changed({ run, found }) {
  const { differences, recipe, algorithm } = run;
  if (differences === null) {
    return html`<p class="muted">These settings were written by another version of RAGEN. Their
      difference from ${recipe} is unknown.</p>`;
  }
  if (differences.length === 0) {
    return html`<p class="muted">Nothing differs from ${recipe} and ${algorithm}.</p>`;
  }
  const rows = differences.map(({ key, value, base }) => ({ key, values: [value, base] }));
  const titles = ["This run", `In ${differences[0].source}`];
  return html`<${Values} titles=${titles} rows=${found(rows)} />`;
}

/** A setting's value as text. */
function written(value) {
  if (!known(value)) return "unset";
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** Settings by key, with one value or several: `rows` of `{key, values}`, a title a value. */
export function Values({ titles, rows }) {
  const columns = [
    { key: "key", title: "Key", render: ({ key }) => html`<code>${key}</code>` },
    ...titles.map((title, i) => ({
      key: `value ${i}`, title, render: ({ values }) => html`<${Text} text=${written(values[i])} />`,
    })),
  ];
  return html`<div class="scroll tall">
    <${Table} label="Settings" columns=${columns} rows=${rows} rowKey="key" />
  </div>`;
}

/** A choice of another readable run to compare a run with. */
export function CompareWith({ run }) {
  const { data } = useApi("/api/runs");
  const readable = (data?.runs ?? []).filter(({ state }) => state !== "unreadable");
  const others = readable.map((other) => other.run).filter((other) => other !== run);
  const go = ({ target }) => visit(link("compare", { run }, { other: joinRuns([target.value]) }));
  return others.length > 0 && html`<select aria-label="Compare with another run" value=""
    onChange=${go}>
    <option value="" disabled>Compare with …</option>
    ${others.map((other) => html`<option key=${other} value=${other}>${other}</option>`)}
  </select>`;
}
