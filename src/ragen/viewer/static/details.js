// What stands under a run's curves: events, evaluations, time by phase and exactness.

import { link } from "./addresses.js";
import { clock, moment, number, percent } from "./numbers.js";
import { Chip, Interval, Table, Text } from "./parts.js";
import { html, useEffect, useRef } from "./vendor/preact-htm.js";

const KINDS = { alarm: "bad", guard: "warn", "damaged checkpoint": "bad" };

/** The event of the address is shown in the middle of the screen. */
export function Events({ run, picked }) {
  const list = useRef(null);
  useEffect(() => {
    if (picked) list.current?.querySelector(".picked")?.scrollIntoView({ block: "center" });
  }, [picked]);
  return html`<section class="panel events" aria-label="Alarms and actions">
    <h2>Alarms and actions</h2>
    ${run.events.length === 0 && html`<p class="muted">None.</p>`}
    <ol ref=${list}>
      ${run.events.map(
        ({ id, step, kind, text, time, attempt }) => html`<li
          key=${id}
          class=${String(id) === picked ? "picked" : ""}
        >
          <span class="number"><${Step} run=${run.run} step=${step} /></span>
          <span><${Chip} kind=${KINDS[kind] ?? ""}>${kind}<//></span>
          <span><${Text} text=${text} /></span>
          <time class="muted number" title="attempt ${attempt}">${moment(time)}</time>
        </li>`,
      )}
    </ol>
  </section>`;
}

/** A step as a link to its episodes. */
function Step({ run, step }) {
  const address = link("episodes", { run }, { step_from: step, step_to: step });
  return html`<a href=${address}>${number(step)}</a>`;
}

/** All evaluations, the latest on top. */
export function Evaluations({ run }) {
  const columns = [
    { key: "step", title: "Step", align: "right", render: ({ step }) => number(step) },
    { key: "how", title: "How" },
    {
      key: "success",
      title: "Success",
      render: ({ success, random, optimal }) =>
        html`<${Interval} ...${success} random=${random} optimal=${optimal} />`,
    },
    {
      key: "range",
      title: "95 % interval",
      align: "right muted wide",
      render: ({ success }) => `${percent(success.low)} – ${percent(success.high)}`,
    },
    { key: "episodes", title: "Levels", align: "right", render: (row) => number(row.episodes) },
  ];
  const rows = [...run.evaluations].reverse();
  const more = link("evaluations", { run: run.run });
  return html`<section class="panel" aria-label="Evaluations">
    <h2>Evaluations ${more && html`<a href=${more}>more</a>`}</h2>
    ${rows.length === 0 && html`<p class="muted">It was not evaluated yet.</p>`}
    ${rows.length > 0 &&
    html`<div class="tall">
      <${Table} label="Evaluations" columns=${columns} rows=${rows} />
    </div>`}
  </section>`;
}

/** Where the time went: one bar, and the same as numbers. */
export function Phases({ phases }) {
  const parts = Object.entries(phases).sort(([, a], [, b]) => b - a);
  const whole = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  const fill = (index) => `fill-${Math.min(index, 7)}`;
  const said = parts.map(([name, seconds]) => `${name} ${percent(seconds / whole, 0)}`).join(", ");
  return html`<section class="panel" aria-label="Time by phase">
    <h2>Time by phase <span class="muted">${clock(whole)} in all</span></h2>
    ${whole === 0 && html`<p class="muted">No step is finished.</p>`}
    <div class="stack" role="img" aria-label=${said}>
      ${parts.map(
        ([name, seconds], i) =>
          html`<i
            class=${fill(i)}
            title="${name} ${clock(seconds)}"
            style=${{ flexGrow: seconds }}
          ></i>`,
      )}
    </div>
    <table>
      <tbody>
        ${parts.map(
          ([name, seconds], i) => html`<tr key=${name}>
            <td><i class="swatch ${fill(i)}"></i>${name}</td>
            <td class="right">${clock(seconds)}</td>
            <td class="right muted">${percent(seconds / whole)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </section>`;
}

/** The report of exactness: checks are counted over the run, of differences the largest counts. */
export function Exactness({ rows }) {
  const isCount = ({ name }) => name.endsWith("_checked");
  const columns = [
    { key: "name", title: "Measure" },
    { key: "last", title: "Last step", align: "right", render: ({ last }) => number(last) },
    {
      key: "whole",
      title: "Whole run",
      align: "right",
      hint: "the sum of checks, the largest difference of a step",
      render: (row) => html`<b>${number(isCount(row) ? row.total : row.largest)}</b>`,
    },
  ];
  return html`<section class="panel" aria-label="Exactness">
    <h2>Exactness</h2>
    <p class="muted">
      ${rows.length
        ? "Checks counted over the run; of differences the largest in a step."
        : "Nothing was measured."}
    </p>
    ${rows.length > 0 &&
    html`<${Table} label="Exactness" ...${{ columns, rows }} rowKey=${(row) => row.name} />`}
  </section>`;
}
