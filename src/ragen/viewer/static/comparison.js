// The comparison of two sets of episodes: a run at its first and last evaluation, or two runs.

import { plural, points } from "./numbers.js";
import { Interval, Status, Text } from "./parts.js";
import { html } from "./vendor/preact-htm.js";

/**
 * All comparisons of an `answer` of `/api/compare`: of two runs, or of a run's first and last
 * evaluation. `names` are what the two sets are called, or null for their steps; `none` is shown
 * where nothing can be compared.
 */
export function Comparisons({ answer, names = null, none }) {
  const { data, error } = answer;
  if (!data || error) return html`<${Status} ...${answer} />`;
  if (data.comparisons.length === 0) return html`<p class="muted">${none}</p>`;
  return html`<div class="cards">
    ${data.comparisons.map((one) => html`<${Comparison} key=${`${one.env} ${one.how}`} ...${one}
      names=${names ?? [one.a, one.b].map(({ step }) => `step ${step}`)} />`)}
  </div>`;
}

/** Both success rates on one scale, their difference, and what it shows. */
function Comparison({ env, how, a, b, difference, names, random, optimal, ...tests }) {
  const sides = [a, b].map((rate, i) => [names[i], rate]);
  return html`<div class="comparison" data-testid="comparison">
    <h3><${Text} text=${`${env}, ${how}`} /></h3>
    <dl>
      ${sides.map(([name, rate]) => html`<dt><${Text} text=${name} /></dt>
        <dd><${Interval} ...${rate} ...${{ random, optimal }} /></dd>`)}
      <dt>difference</dt>
      <dd><${Interval} ...${difference} min=${-1} max=${1} zero format=${points} /></dd>
    </dl>
    <p><${Verdict} difference=${difference} names=${names} /> <${Tests} ...${tests} /></p>
  </div>`;
}

function Verdict({ difference: { value, low, high }, names: [a, b] }) {
  const size = html`<b>${points(value)} points</b> [${points(low)}, ${points(high)}]`;
  if (low <= 0 && high >= 0) return html`No difference is shown: ${size}.`;
  const [kind, word] = low > 0 ? ["good", "better"] : ["bad", "worse"];
  return html`<span class=${kind}><${Text} text=${b} /> is ${word}</span>
    ${" than "}<${Text} text=${a} />: ${size}.`;
}

function Tests({ levels, won, lost, mcnemar_p: p, smallest_detectable: smallest, note }) {
  const paired = won !== null && `: ${won} gained, ${lost} lost (McNemar's p ${pValue(p)})`;
  const least = smallest !== null && ` The smallest difference that this number of levels shows in
    four of five cases is ${(100 * smallest).toFixed(1)} points.`;
  return html`On ${plural(levels, "level")}${paired}.${least}
    <span class="muted">${" "}Basis: <${Text} text=${note} />.</span>`;
}

const pValue = (p) => (p === null ? "unknown" : p < 0.001 ? "< 0.001" : `= ${p.toPrecision(2)}`);
