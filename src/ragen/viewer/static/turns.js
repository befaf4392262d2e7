// The parts of a turn (actions, rewards, thought), an episode's outcome, and episodes side by side with
// one row for each turn.

import { link } from "./addresses.js";
import { Board } from "./board.js";
import { Origin, Role } from "./calls.js";
import { clock, known, number, plural } from "./numbers.js";
import { Chip, Text } from "./parts.js";
import { inTurn } from "./pictures.js";
import { html, useEffect, useRef } from "./vendor/preact-htm.js";

/** Above this number of cells in total, episodes side by side are shown without boards. */
const MOST_SMALL_CELLS = 15000;

/** Different actions that are listed where episodes diverge; the rest are counted. */
const MOST_WAYS = 6;

/** Characters of a thought beside others that are shown at first. */
const LONG = 900;

/** Characters of an observation in a table: enough to distinguish two. */
const SHORT = 300;

/** Marks an episode of a step that the run was rolled back over. */
export const Undone = ({ still_counts: counts }) => counts ? "" : html`<${Chip}
  title="the run was rolled back to an earlier step: this episode no longer counts">rolled back<//>`;

/** The address of an episode's group. */
export const groupLink = (run, { attempt, step, phase, group }) =>
  link("group", { run }, { attempt, step, phase, group });

/** The return after each turn, penalties included: rewards and penalties so far. */
export function returnsOf(episode) {
  let sum = 0;
  return episode.turns.map((turn) => (sum += turn.reward + turn.penalty));
}

/** A number with its sign, so that gains and losses look different. */
export function signed(x) {
  return x > 0 ? `+${number(x)}` : number(x);
}

/** The actions of a turn; those that the environment did not execute are struck through. */
function Actions({ actions_asked: asked, actions_executed: executed }) {
  if (!asked.length) return html`<span class="muted">no action</span>`;
  return html`<span class="actions">${matched(asked, executed).map(({ action, done }, i) => done
    ? html`<span key=${i} class="action"><${Text} text=${called(action)} limit=${80} /></span>`
    : html`<s key=${i} class="action undone" title="requested, not executed"
        ><${Text} text=${called(action)} limit=${80} /></s>`)}</span>`;
}

/** A call of a tool as `name(argument: value)`; any other action is itself. */
function called(action) {
  if (!action.startsWith("{")) return action;
  try {
    const { name, arguments: values } = JSON.parse(action);
    const given = Object.entries(values).map(([key, value]) => `${key}: ${JSON.stringify(value)}`);
    return `${name}(${given.join(", ")})`;
  } catch {
    return action; // not a call
  }
}

/** What the calls of a turn returned. */
function Results({ turn }) {
  return turn.results && html`<ol class="results mono" data-testid="results">${inTurn(
    turn.results, turn.result_pictures, (result, i) => html`<li key=${i}><span class="muted"><${Text}
      text=${called(turn.actions_asked[i])} limit=${LONG} /> → </span>${result}</li>`, LONG)}</ol>`;
}

/**
 * Which of the requested actions were executed. The executed ones are a subsequence of the requested
 * ones, in the environment's own spelling; unknown names and actions beyond the budget are missing.
 */
export function matched(asked, executed) {
  let done = 0;
  return asked.map((action) => {
    const same = done < executed.length && action.toLowerCase() === executed[done].toLowerCase();
    if (same) done += 1;
    return { action, done: same };
  });
}

/** An amount in the colour of gains or losses. */
export const Earned = ({ amount }) =>
  html`<span class="number ${tone(amount)}">${signed(amount)}</span>`;

/** In words: the reward, the penalty if there is one, and the return so far if it is given. */
function Balance({ reward, penalty, sum }) {
  return html`<span class="balance"><span class="muted">reward </span><${Earned} amount=${reward} />${
    penalty !== 0 && html`<span class="muted">, penalty </span><${Earned} amount=${penalty} />`}${
    known(sum) && html`<span class="muted" title="rewards and penalties so far">, return so far${" "}
      ${number(sum)}</span>`}</span>`;
}

const tone = (x) => (x > 0 ? "good" : x < 0 ? "bad" : "muted");

/** How an episode ended, by sign, word and colour. */
export function Outcome({ episode }) {
  const good = episode.success ? ["✓", "good"] : ["✗", "bad"];
  const [sign, kind] = known(episode.error) ? ["!", "bad"] : good;
  return html`<span class="number ${kind}" title=${ENDS[episode.stop_reason]}
    ><span aria-hidden="true">${sign}</span> ${episode.stop_reason.replace("_", " ")}</span>`;
}

/** What each stop reason means. */
export const ENDS = {
  solved: "the environment ended the episode with success",
  failed: "the environment ended the episode without success",
  max_turns: "no turns were left",
  max_actions: "no actions were left",
  context: "the next prompt had no room in the model's context",
  error: "the environment raised an error",
  timeout: "the environment did not answer in time",
  request: "the server gave no completion",
};

/** One whole turn: thought, actions, rewards. One that is not trained on has no `sum`. */
export function TurnCard({ turn, sum, current, onChoose }) {
  const card = useRef(null);
  const still = useRef(turn.turn === 0); // A page that opens at the first turn is not scrolled.
  useEffect(() => {
    if (current && !still.current) card.current.scrollIntoView({ block: "nearest" });
    still.current = false;
  }, [current]);
  return html`<article ref=${card} class="panel turn ${current ? "current" : ""}"
    aria-current=${current ? "true" : undefined} data-testid="turn">
    <header class="row tight">
      <button class="quiet" onClick=${onChoose}>turn ${turn.turn + 1}</button>
      <${Actions} ...${turn} />
      ${!turn.valid && html`<${Chip} kind="bad" title="the reply was not valid">invalid<//>`}
      ${turn.finish_reason === "length" && turn.role !== "budget" && html`<${Chip} kind="warn"
        title="the reply reached rollout.max_tokens">cut off<//>`}
      ${turn.finish_reason === "control" && html`<${Chip} kind="bad"
        title="the reply ended with a control token that does not end a turn">control token<//>`}
      <${Role} ...${turn} />
      <span class="grow"></span>
      ${turn.num_tokens !== null && html`<span class="muted small"
        title=${`sampled by policy version ${turn.policy_version}`}>${
        plural(turn.num_tokens, "token")}${
        known(turn.completion_s) && ` in ${clock(turn.completion_s)}`}</span>`}
      ${known(sum) && html`<${Balance} ...${turn} sum=${sum} />`}
    </header>
    <${Origin} turn=${turn} />
    ${turn.problem && html`<p class="bad"><${Text} text=${turn.problem} /></p>`}
    <${Thought} turn=${turn} />
    <${Results} turn=${turn} />
  </article>`;
}

/** The thought, or the whole reply if it is not valid; `limit` cuts it until it is asked for. */
function Thought({ turn, limit }) {
  if (turn.thought === null || !turn.valid) {
    return html`<p class="thought mono"><span class="muted">the reply was: </span
      ><${Text} text=${turn.reply.trim()} limit=${limit} /></p>`;
  }
  return html`<p class="thought mono"><${Text} text=${turn.thought.trim()} limit=${limit} /></p>`;
}

/**
 * Episodes side by side: one column each, one row a turn.
 *
 * @param columns `[{title, episode, href}]`; without `href` the title is plain text.
 * @param from The first turn that is shown.
 * @param selected The column that the keyboard has selected, or null.
 */
export function SideBySide({ columns, from = 0, selected = null }) {
  const episodes = columns.map(({ episode }) => episode);
  const last = Math.max(0, ...episodes.map(({ turns }) => turns.length));
  const parting = partingOf(episodes);
  const boards = smallBoards(episodes);
  const box = useRef(null);
  useEffect(() => {
    const chosen = box.current.querySelector(".selected");
    chosen?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }, [selected]);
  const rows = Array.from({ length: last - from }, (_, i) => from + i);
  return html`<div class="panel flush beside" ref=${box} tabindex="0" role="region"
    aria-label="side by side">
    <table class="pinned">
      <thead><tr><th></th>${columns.map((column, i) => html`
        <th key=${i} scope="col" class=${i === selected ? "selected" : ""}>
          <${ColumnHead} ...${column} />
        </th>`)}</tr></thead>
      <tbody>${rows.map((k) => html`
        ${parting?.turn === k && html`<tr class="parting" data-testid="parting">
          <td colspan=${columns.length + 1}><p>${describe(parting)}</p></td></tr>`}
        <tr key=${k}><th scope="row">${k + 1}</th>${episodes.map((episode, i) => html`
          <td key=${i} class=${i === selected ? "selected" : ""}>
            ${episode.turns[k] && html`<${SmallTurn} turn=${episode.turns[k]} env=${episode.env}
              board=${boards} />`}
          </td>`)}</tr>`)}
      </tbody>
    </table>
  </div>`;
}

/** The head of an episode beside others: its title, which may be a link, and its outcome. */
function ColumnHead({ title, episode, href }) {
  return html`<a href=${href}>${title}</a>
    <div><${Outcome} episode=${episode} /></div>
    <div><${Balance} ...${episode} /><span class="muted small">${" "}
      in ${plural(episode.turns.length, "turn")}</span></div>`;
}

function SmallTurn({ turn, env, board }) {
  return html`<div class="turn-body">
    ${board && hasBoard(turn) && html`<${Board} drawing=${turn.drawing} env=${env} turn=${turn} />`}
    <div>
      <div><${Actions} ...${turn} /> <${Balance} ...${turn} /></div>
      ${turn.parent !== turn.turn - 1 && html`<${Origin} turn=${turn} />`}
      ${turn.problem && html`<p class="bad small"><${Text} text=${turn.problem} /></p>`}
      ${!hasBoard(turn) && turn.turn > 0 && html`<p class="muted"><${Text} text=${turn.observation}
        limit=${SHORT} /></p>`}
      <${Thought} turn=${turn} limit=${LONG} />
      <${Results} turn=${turn} />
    </div>
  </div>`;
}

/** Whether there is more than text to show before a turn. */
const hasBoard = ({ drawing, pictures }) => drawing !== null || pictures.length > 0;

function smallBoards(episodes) {
  const drawings = episodes.flatMap(({ turns }) => turns.map(({ drawing }) => drawing ?? []));
  const rows = drawings.flat();
  return rows.reduce((cells, row) => cells + row.length, 0) <= MOST_SMALL_CELLS;
}

/**
 * The first turn at which episodes of one level diverge, and why: different states after the same
 * actions (`by` is "env", or "agent" for its calls after the same replies) or different actions (`by`
 * is "actions"): `{turn, by, counts}`.
 */
export function partingOf(episodes) {
  const last = Math.max(0, ...episodes.map(({ turns }) => turns.length));
  for (let turn = 0; turn < last; turn += 1) {
    const here = episodes.map(({ turns }) => turns[turn]);
    const states = tally(here.map((each) => each?.state_key ?? "over"));
    const by = here.some((each) => known(each?.role)) ? "agent" : "env";
    if (states.length > 1) return { turn, by, counts: states };
    const acts = tally(here.map(deedOf));
    if (acts.length > 1) return { turn, by: "actions", counts: acts };
  }
  return null;
}

/** What was done in a turn. An agent acts on the whole reply, thoughts included. */
const deedOf = ({ role, reply, actions_executed: acts }) =>
  known(role) ? reply.trim() : acts.join(", ") || "nothing";

/** How often each word occurs, most frequent first. */
function tally(words) {
  const counts = [...Map.groupBy(words, (word) => word)].map(([word, all]) => [word, all.length]);
  return counts.sort((a, b) => b[1] - a[1]);
}

function describe({ by, counts }) {
  if (by === "env") {
    return `They diverge here: the same actions led to ${plural(counts.length, "different state")}.`;
  }
  if (by === "agent") {
    return `They diverge here: the agent went on in ${plural(counts.length, "different way")}.`;
  }
  const ways = counts.slice(0, MOST_WAYS).map(([acts, count], i) => html`${i ? " · " : " "}
    <b>${count}</b> did${" "}<${Text} text=${acts} limit=${80} />`);
  const others = counts.length - MOST_WAYS;
  return html`They diverge here:${ways}${others > 0 && ` · and ${plural(others, "other way")}`}`;
}
