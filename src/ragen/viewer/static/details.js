// The panels below a run's curves: events, time by phase and exactness.

import { link } from "./addresses.js";
import { clock, moment, number, percent } from "./numbers.js";
import { Chip, Table, Text } from "./parts.js";
import { html, useEffect, useRef } from "./vendor/preact-htm.js";

const KINDS = { alarm: "bad", guard: "warn", engine: "warn", "damaged checkpoint": "bad" };

/** The event that the address names is scrolled to the middle of the screen. */
export function Events({ run, picked }) {
  const list = useRef(null);
  useEffect(() => {
    if (picked) list.current?.querySelector(".picked")?.scrollIntoView({ block: "center" });
  }, [picked]);
  const stepLink = (step) => link("episodes", { run: run.run }, { step_from: step, step_to: step });
  return html`<section class="panel events" aria-label="Alarms and actions">
    <h2>Alarms and actions</h2>
    ${run.events.length === 0 && html`<p class="muted">None.</p>`}
    <ol class="scroll tall" ref=${list}>
      ${run.events.map(({ id, step, kind, text, time, attempt }) => html`<li key=${id}
      class=${String(id) === picked ? "picked" : ""}>
      <span class="right"><a href=${stepLink(step)}>${number(step)}</a></span>
      <span><${Chip} kind=${KINDS[kind] ?? ""}>${kind}<//></span>
      <span><${Text} text=${text} /></span>
      <time class="muted number" title="attempt ${attempt}">${moment(time)}</time>
    </li>`)}</ol>
  </section>`;
}

/** Time by phase, as one bar and as numbers. */
export function Phases({ phases }) {
  const parts = Object.entries(phases).sort(([, a], [, b]) => b - a);
  const whole = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  const ink = (index) => `ink-${Math.min(index, 7)}`;
  const said = parts.map(([name, seconds]) => `${name} ${percent(seconds / whole, 0)}`).join(", ");
  return html`<section class="panel" aria-label="Time by phase">
    <h2>Time by phase <span class="muted">${clock(whole)} in all</span></h2>
    ${whole === 0 && html`<p class="muted">No step is finished.</p>`}
    <div class="phases" role="img" aria-label=${said}>${parts.map(([name, seconds], i) => html`
      <i class=${ink(i)} title="${name} ${clock(seconds)}" style=${{ flexGrow: seconds }}></i>`)}
    </div>
    <table><tbody>${parts.map(([name, seconds], i) => html`<tr key=${name}>
      <td><i class="swatch ${ink(i)}"></i>${name}</td>
      <td class="right">${clock(seconds)}</td>
      <td class="right muted">${percent(seconds / whole)}</td>
    </tr>`)}</tbody></table>
  </section>`;
}

/** The report of exactness: the number of checks over the run, and the largest differences. */
export function Exactness({ rows }) {
  const isCount = ({ name }) => name.endsWith("_checked");
  const columns = [
    { key: "name", title: "Measure" },
    { key: "last", title: "Last step", align: "right", render: ({ last }) => number(last) },
    {
      key: "whole", title: "Whole run", align: "right",
      hint: "checks: their number; differences: the largest of any step",
      render: (row) => html`<b>${number(isCount(row) ? row.total : row.largest)}</b>`,
    },
  ];
  return html`<section class="panel" aria-label="Exactness">
    <h2>Exactness</h2>
    <p class="muted">${rows.length
      ? "The number of checks over the run, and the largest difference of any step."
      : "Nothing was measured."}</p>
    ${rows.length > 0 && html`<${Table} label="Exactness" ...${{ columns, rows }} rowKey="name" />`}
  </section>`;
}
