// What if: the policy plays on from a turn of a stored episode, several times, and the branches
// appear beside the original.

import { post, shared, useApi } from "./api.js";
import { number, percent } from "./numbers.js";
import { Interval, Problem, Text } from "./parts.js";
import { SideBySide } from "./turns.js";
import { html, useEffect, useState } from "./vendor/preact-htm.js";

const POLL_MS = 1000; // A branch of the embedded model takes a few seconds.
const MOST = 64; // What the server takes at most.
const Z = 1.959964; // The 95 % quantile of the normal distribution, two-sided.

/** The panel below an episode; `turn` is the one that is shown, after the last one is the end. */
export function WhatIf({ run, episode, turn }) {
  if (shared) return null;
  return html`<${Panel} run=${run} episode=${episode} turn=${turn} />`;
}

function Panel({ run, episode, turn }) {
  const { data, error, reload } = useApi("/api/branches", { run, episode: episode.id });
  const jobs = data?.jobs ?? [];
  const busy = jobs.some(({ state }) => state === "running");
  useEffect(() => {
    if (!busy) return undefined;
    const timer = setInterval(reload, POLL_MS);
    return () => clearInterval(timer);
  }, [busy, reload]);
  const over = turn >= episode.turns.length;
  const reason = !data ? null : !data.possible ? data.reason : over ? "it is over here" : null;
  return html`<section class="panel what-if" data-testid="branches">
    <h2>What if?</h2>
    <${Ask} run=${run} episode=${episode} turn=${turn} over=${over} reason=${reason}
      known=${data !== null} checkpoints=${data?.checkpoints ?? []} onAsked=${reload} />
    ${error && html`<${Problem} error=${error} reload=${reload} />`}
    ${[...jobs].sort((a, b) => b.time - a.time).map((job) => html`<${Job} key=${job.id} job=${job}
      episode=${episode} />`)}
  </section>`;
}

/** How many, with which weights, how hot; the button says why it cannot be pressed. */
function Ask({ run, episode, turn, over, reason, known, checkpoints, onAsked }) {
  const [n, setN] = useState(4);
  const [checkpoint, setCheckpoint] = useState("");
  const [temperature, setTemperature] = useState("");
  const [problem, setProblem] = useState(null);
  const [sending, setSending] = useState(false);
  const ask = async (event) => {
    event.preventDefault();
    setSending(true);
    setProblem(null);
    try {
      await post("/api/branch", {
        run, episode: episode.id, turn, n,
        checkpoint: numberOrNull(checkpoint), temperature: numberOrNull(temperature),
      });
      onAsked();
    } catch (error) {
      setProblem(error.message);
    } finally {
      setSending(false);
    }
  };
  const idle = !known || reason !== null || sending || !valid(n);
  const typed = (set) => (event) => set(event.target.value);
  return html`<form class="ask" onSubmit=${ask}>
    <p>Let the policy play on from ${over ? "a turn" : `turn ${turn + 1}`}: the same environment, put back
      as it was, with the same luck to come; only what is sampled differs.</p>
    <label>times <input type="number" min="1" max=${MOST} value=${n}
      onInput=${(event) => setN(event.target.valueAsNumber)} /></label>
    <label>weights <select value=${checkpoint} onChange=${typed(setCheckpoint)}>
      <option value="">newest</option>
      ${checkpoints.map((step) => html`<option key=${step} value=${step}>step ${step}</option>`)}
    </select></label>
    <label>temperature <input type="number" min="0" max="5" step="any" placeholder="the run's"
      value=${temperature} onInput=${typed(setTemperature)} /></label>
    <button class="primary" type="submit" disabled=${idle} title=${reason ?? ""}>${
      over ? "Branch" : `Branch from turn ${turn + 1}`}</button>
    ${reason && html`<p class="warn">Not possible: <${Text} text=${reason} /></p>`}
    ${problem && html`<p class="bad" role="alert"><${Text} text=${problem} /></p>`}
  </form>`;
}

const valid = (n) => Number.isInteger(n) && n >= 1 && n <= MOST;
const numberOrNull = (text) => (text === "" ? null : Number(text));

/** One request: still running, failed with its reason, or its branches beside the original. */
function Job({ job, episode }) {
  const { turn, checkpoint, n, temperature, state, problem, episodes } = job;
  const title = html`<h3>${number(n)} from turn ${turn + 1}, weights of step ${checkpoint},
    temperature ${number(temperature)}</h3>`;
  if (state === "running") return html`${title}<p role="status" class="muted">Playing …</p>`;
  if (state === "failed") {
    const why = problem ?? "no reason was given";
    return html`${title}<p class="bad">It failed: <${Text} text=${why} /></p>`;
  }
  const won = episodes.filter(({ success }) => success).length;
  const columns = [
    { title: "original", episode },
    ...episodes.map((each, i) => ({ title: `branch ${i + 1}`, episode: each })),
  ];
  return html`${title}
    <p class="job">${won} of ${episodes.length} succeed
      ${temperature > 0 && html`<${Interval} ...${wilson(won, episodes.length)} />`}
      <span class="muted">${temperature > 0 ? `[${percentRange(won, episodes.length)}]`
        : "(without sampling, all are one)"}; the original ${episode.success ? "did" : "did not"}.${
      turn > 0 && ` What came before turn ${turn + 1} they share.`}${
      job.exact === false && " The record has no tokens of it: its prompts are rebuilt from text."
      }</span></p>
    <${SideBySide} columns=${columns} from=${turn} />`;
}

function percentRange(won, of) {
  const { low, high } = wilson(won, of);
  return `${percent(low)} – ${percent(high)}`;
}

/** A share with its Wilson 95 % interval, as `ragen.core.statistics` has it. */
export function wilson(won, of) {
  if (of === 0) return { value: null, low: null, high: null };
  const [p, zz] = [won / of, (Z * Z) / of];
  const middle = (p + zz / 2) / (1 + zz);
  const half = (Z * Math.sqrt((p * (1 - p)) / of + zz / (4 * of))) / (1 + zz);
  return { value: p, low: Math.max(0, middle - half), high: Math.min(1, middle + half) };
}
