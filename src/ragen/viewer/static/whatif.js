// Branches of a recorded episode: the policy plays on from one of its turns, several times, and the
// branches are shown next to the original.

import { post, shared, useApi } from "./api.js";
import { number, percent } from "./numbers.js";
import { Interval, Problem, Text } from "./parts.js";
import { SideBySide } from "./turns.js";
import { html, useEffect, useState } from "./vendor/preact-htm.js";

const POLL_MS = 1000; // A branch of the embedded model takes a few seconds.
const MOST = 64; // The server's limit.

/** The panel below an episode; `turn` is the one shown, or the number of turns at the end. */
export function WhatIf({ run, episode, turn }) {
  const path = shared ? null : "/api/branches";
  const { data, error, reload } = useApi(path, { run, episode: episode.id });
  const jobs = data?.jobs ?? [];
  const busy = jobs.some(({ state }) => state === "running");
  useEffect(() => {
    if (!busy) return undefined;
    const timer = setInterval(reload, POLL_MS);
    return () => clearInterval(timer);
  }, [busy, reload]);
  if (shared) return null;
  return html`<section class="panel" data-testid="branches">
    <h2>What if?</h2>
    <${Ask} run=${run} episode=${episode} turn=${turn} branching=${data} onAsked=${reload} />
    ${error && html`<${Problem} error=${error} reload=${reload} />`}
    ${jobs.toSorted((a, b) => b.time - a.time).map((job) => html`<${Job} key=${job.id} run=${run}
      job=${job} episode=${episode} reload=${reload} />`)}
  </section>`;
}

/** The form: how many, which weights, which temperature; it says why branching is not possible. */
function Ask({ run, episode, turn, branching, onAsked }) {
  const [problem, setProblem] = useState(null);
  const [sending, setSending] = useState(false);
  const over = turn >= episode.turns.length;
  const reason = branching?.reason ?? (over ? "the episode has ended" : null);
  const ask = async (event) => {
    event.preventDefault();
    const values = Object.fromEntries(new FormData(event.target));
    const chosen = (name) => (values[name] === "" ? null : Number(values[name]));
    const asked = {
      n: chosen("n"), checkpoint: chosen("checkpoint"), temperature: chosen("temperature"),
    };
    setSending(true);
    setProblem(null);
    try {
      await post("/api/branch", { run, episode: episode.id, turn, ...asked });
      onAsked();
    } catch (error) {
      setProblem(error.message);
    } finally {
      setSending(false);
    }
  };
  return html`<form class="row toolbar" onSubmit=${ask}>
    <p class="whole">Let the policy play on from ${over ? "a turn" : `turn ${turn + 1}`}. The
      environment is restored to its state there, with the same random events to come. Only the
      sampling differs.</p>
    <label>branches <input name="n" type="number" min="1" max=${MOST} required
      defaultValue="4" /></label>
    <label>weights <select name="checkpoint">
      <option value="">newest</option>
      ${branching?.checkpoints.map((step) =>
        html`<option key=${step} value=${step}>step ${step}</option>`)}
    </select></label>
    <label>temperature <input name="temperature" type="number" min="0" max="5" step="any"
      placeholder="the run's" /></label>
    <button class="primary" type="submit" disabled=${!branching || reason !== null || sending}
      title=${reason ?? ""}>${over ? "Branch" : `Branch from turn ${turn + 1}`}</button>
    ${branching && reason && html`<p class="whole warn">Not possible: <${Text} text=${reason} /></p>`}
    ${problem && html`<p class="whole bad" role="alert"><${Text} text=${problem} /></p>`}
  </form>`;
}

/** One request: running, failed with its reason, or its branches next to the original. */
function Job({ run, job, episode, reload }) {
  const { turn, checkpoint, n, temperature, state, problem, episodes, success } = job;
  const title = html`<h3>${number(n)} from turn ${turn + 1}, weights of step ${checkpoint},
    temperature ${number(temperature)}</h3>`;
  if (state === "running") {
    // A request that has just ended cannot be cancelled; the list then shows its result.
    const cancel = () => post("/api/cancel", { run, id: job.id }).catch(() => null).then(reload);
    return html`${title}<p class="row tight"><span role="status" class="muted">Playing …</span>
      <button onClick=${cancel}>Cancel</button></p>`;
  }
  if (state === "failed") {
    return html`${title}<p class="bad">It failed: <${Text} text=${problem} /></p>`;
  }
  const columns = [
    { title: "original", episode },
    ...episodes.map((each, i) => ({ title: `branch ${i + 1}`, episode: each })),
  ];
  return html`${title}
    <p class="row tight">${job.num_solved} of ${episodes.length} succeed
      ${temperature > 0 && html`<${Interval} ...${success ?? {}} />`}
      <span class="muted">${temperature > 0 && success
        ? `[${percent(success.low)} – ${percent(success.high)}]`
        : "(at temperature 0 all branches are the same)"}; the original ${
      episode.success ? "did" : "did not"}.${
      turn > 0 && ` They share everything before turn ${turn + 1}.`}${
      job.exact === false && " Its tokens are not recorded: the prompts are rebuilt from text."
      }</span></p>
    <${SideBySide} columns=${columns} from=${turn} />`;
}
