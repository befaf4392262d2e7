// The most frequent phrases of a run's thoughts: one row a phrase, one cell a step, darker where more
// of the step's thoughts contain the phrase. A row that turns dark and stays dark is a template.

import { useLive } from "./api.js";
import { Shades, heat } from "./heat.js";
import { percent, plural } from "./numbers.js";
import { Status, Tabs, Text, picked } from "./parts.js";
import { html, useMemo, useState } from "./vendor/preact-htm.js";

const LENGTHS = { 3: { title: "3" }, 5: { title: "5" }, 8: { title: "8" } };

/** What the rows may be sorted by: the share of thoughts with the phrase, and its change. */
const ORDERS = {
  now: { title: "now", value: ({ counts }) => counts.at(-1) },
  peak: { title: "peak", value: ({ counts }) => Math.max(...counts) },
  grown: { title: "grown", value: ({ counts }) => counts.at(-1) - counts[0] },
  shrunk: { title: "shrunk", value: ({ counts }) => counts[0] - counts.at(-1) },
};

/** The table, in a panel with its controls; `query` has `words` and `order`. */
export function Phrases({ run, phase, query, setQuery }) {
  const words = picked(LENGTHS, query.words ?? "5");
  const order = picked(ORDERS, query.order);
  const answer = useLive("/api/phrases", { run, words, phase });
  return html`<section class="panel">
    <h2>Repeated phrases</h2>
    <div class="row toolbar">
      <span class="row tight"><span class="muted">words in a phrase</span>
        <${Tabs} label="Words of a phrase" options=${LENGTHS} value=${words}
          onChange=${(key) => setQuery({ words: key })} /></span>
      <span class="row tight"><span class="muted">sort by</span>
        <${Tabs} label="Sort phrases by" options=${ORDERS} value=${order}
          onChange=${(key) => setQuery({ order: key })} /></span>
    </div>
    <${Status} ...${answer} what="Counting phrases" />
    ${answer.data && html`<${HeatTable} data=${answer.data} order=${order} words=${words} />`}
  </section>`;
}

function HeatTable({ data, order, words }) {
  const [over, setOver] = useState(null);
  const { steps } = data;
  const { value } = ORDERS[order];
  const rows = useMemo(() => data.phrases.toSorted((a, b) => value(b) - value(a)), [data, order]);
  if (!steps.length) return html`<p class="muted">No thought is recorded.</p>`;
  if (!rows.length) {
    return html`<p class="muted">No ${words} words in a row occur in two thoughts of a step.</p>`;
  }
  const said = over && `${percent(over.share, 0)} of the thoughts of step ${over.step}`;
  return html`<p class="readout" aria-live="polite">
      ${over
        ? html`<b>${said}</b> contain “<${Text} text=${over.phrase} limit=${200} />”`
        : summary(rows, steps)}
    </p>
    <div class="scroll" onPointerLeave=${() => setOver(null)}>
      <table class="pinned heat-table" aria-label="Phrases by step" data-testid="phrases">
        <thead><tr><th scope="col">phrase</th>
          ${steps.map((step, i) => html`<th scope="col" key=${step}>
            ${shown(i, steps) ? step : ""}</th>`)}
        </tr></thead>
        <tbody>${rows.map(({ phrase, counts }) => html`<tr key=${phrase}>
          <th class="clipped" scope="row"><${Text} text=${phrase} limit=${200} /></th>
          ${counts.map((share, i) => html`<td key=${i} class=${heat(share)}
            title=${`step ${steps[i]}: ${percent(share, 0)}`}
            onPointerEnter=${() => setOver({ share, step: steps[i], phrase })}></td>`)}
        </tr>`)}</tbody>
      </table>
    </div>
    <p class="row tight legend small muted" aria-hidden="true">none <${Shades} />
      <span>all of the thoughts</span></p>`;
}

/** Whether a step gets a number: only every few do, so that numbers do not touch. */
const shown = (index, steps) => index % Math.ceil(steps.length / 12) === 0;

function summary(rows, steps) {
  const most = rows.reduce((a, b) => (ORDERS.now.value(b) > ORDERS.now.value(a) ? b : a));
  const half = rows.filter(({ counts }) => counts.at(-1) >= 0.5).length;
  const [first, last] = [most.counts[0], most.counts.at(-1)].map((share) => percent(share, 0));
  const these = `${half} of these ${plural(rows.length, "phrase")}`;
  return html`${`In step ${steps.at(-1)}, ${these} occurred in half of the thoughts or more.`}
    ${" The most frequent, “"}<${Text} text=${most.phrase} limit=${200} />${
    `”, occurred in ${last} (${first} in step ${steps[0]}).`}`;
}
