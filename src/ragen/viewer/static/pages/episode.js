// One episode, turn by turn: the board before the turn that is shown, the thought, the actions and the
// rewards; the tokens; the prompt as the model saw it; and branches. The turn and the view are in the
// address.

import { link, visit } from "../addresses.js";
import { useApi } from "../api.js";
import { Board } from "../board.js";
import { Calls, callsOf } from "../calls.js";
import { useKeys } from "../keys.js";
import { clamp, known, number, plural } from "../numbers.js";
import { Notation } from "../notation.js";
import { Figures, Neighbours, Status, Tabs, Text, picked, useReady } from "../parts.js";
import { Seen } from "../pictures.js";
import { RawPrompt, Tokens } from "../tokens.js";
import { Earned, groupLink, Outcome, returnsOf, signed, TurnCard, Undone } from "../turns.js";
import { WhatIf } from "../whatif.js";
import { html, useCallback, useEffect, useMemo, useState } from "../vendor/preact-htm.js";

const SPEEDS = [0.5, 1, 2, 4]; // Turns a second.

const VIEWS = {
  turns: { title: "Turns" },
  tokens: { title: "Tokens", hint: "every token with mask, logprob, advantage, ratio" },
  prompt: { title: "Raw prompt", hint: "exactly what the model saw before this turn" },
};

export function Page({ params, query, setQuery }) {
  const { run, id } = params;
  const answer = useApi("/api/episode", { run, episode: id });
  const { data, error } = answer;
  useReady(data !== null || error !== null);
  if (data) return html`<${Episode} episode=${data} ...${{ run, query, setQuery }} />`;
  return html`<main class="page page-episode">
    <h1>Episode ${error && id}</h1>
    <${Status} ...${answer} />
  </main>`;
}

function Episode({ run, episode, query, setQuery }) {
  const last = episode.turns.length;
  const view = picked(VIEWS, query.view);
  // The address counts the turns, the end, and then the calls that are not trained on.
  const at = clamp(Number.parseInt(query.turn, 10) || 0, 0, last + episode.others.length);
  const call = at < last ? at : at > last ? at - 1 : null;
  const choose = (number) => setQuery({ turn: number < last ? number : number + 1 });
  const go = useCallback((turn) => setQuery({ turn: clamp(turn, 0, last) }), [setQuery, last]);
  const play = usePlay(at, last, go);
  useKeys(
    {
      ArrowLeft: () => go(at - 1), ArrowRight: () => go(at + 1), Home: () => go(0),
      End: () => go(last), " ": play.toggle,
      t: () => setQuery({ view: following(view) }),
      o: () => visit(groupLink(run, episode)),
    },
    {
      ArrowLeft: "previous turn", ArrowRight: "next turn", " ": "play or pause",
      t: "next view: turns, tokens, raw prompt", o: groupLink(run, episode) && "the episode's group",
    },
  );
  return html`<main class="page page-episode">
    <${Headline} run=${run} episode=${episode} view=${view} />
    <div class="columns episode">
      <aside class="stage panel">
        <${Stage} episode=${episode} at=${at} />
        <${Player} at=${Math.min(at, last)} last=${last} go=${go} play=${play} />
        <${Returns} episode=${episode} at=${at} go=${go} />
      </aside>
      <div class="telling">
        <${Tabs} options=${VIEWS} value=${view} onChange=${(key) => setQuery({ view: key })}
          label="view" />
        ${callsOf(episode).length > 1 && callsOf(episode).every(({ role }) => role) && html`<${Calls}
          episode=${episode} at=${call} onChoose=${choose} />`}
        ${view === "turns" ? html`<${Turns} episode=${episode} call=${call} choose=${choose} />`
          : html`<${TokenViews} run=${run} episode=${episode} turn=${call ?? last - 1} view=${view}
              colour=${query.colour} onColour=${(colour) => setQuery({ colour })} />`}
        <${WhatIf} run=${run} episode=${episode} turn=${at} />
      </div>
    </div>
  </main>`;
}

function following(view) {
  const names = Object.keys(VIEWS);
  return names[(names.indexOf(view) + 1) % names.length];
}

/** The address of the previous or next episode, in the open view. */
const neighbour = (run, id, view) => id === null ? undefined
  : link("episode", { run, id }, { view: view === "turns" ? null : view });

/** The episode, its outcome, and links to its neighbours and its group. */
function Headline({ run, episode, view }) {
  const { step, phase, group, member, env, level_seed: level, previous, next } = episode;
  return html`<header class="row headline">
    <div class="roomy">
      <h1>Episode ${episode.id} <small><${Outcome} episode=${episode} /></small></h1>
      <p class="muted"><${Text} text=${env} />, level ${level} · ${phase}, step ${step}${
        episode.attempt > 0 && `, attempt ${episode.attempt}`} <${Undone} ...${episode} /> · <a href=${groupLink(run, episode)}>
        group ${group}</a>, member ${member}${
        phase === "train" && `, ${episode.kept ? "kept" : "dropped"} by the filter`}</p>
    </div>
    <${Figures} all=${[
      ["reward", html`<${Earned} amount=${episode.reward} />`],
      ["penalty", episode.penalty && html`<${Earned} amount=${episode.penalty} />`],
      ["turns", number(episode.num_turns)],
      ["tokens", number(episode.num_tokens)],
      ["entropy", known(episode.entropy) && number(episode.entropy)],
    ].filter(([, value]) => value)} />
    <${Neighbours} of="episode" previous=${neighbour(run, previous, view)}
      next=${neighbour(run, next, view)} />
  </header>
  ${episode.error && html`<details class="panel"><summary class="bad">The episode failed</summary>
    <pre><${Text} text=${episode.error} /></pre></details>`}`;
}

/** The board before turn `at`, or after the last one; or what a call that is not trained on was asked. */
function Stage({ episode, at }) {
  const { turns, others, env, final_observation: words, final_drawing: final } = episode;
  const last = { observation: words ?? "", pictures: episode.final_pictures };
  const over = at === turns.length;
  const other = others[at - turns.length - 1];
  const turn = other ?? (over ? turns.at(-1) : turns[at]) ?? null;
  // An environment that failed has no final drawing: the last one stays.
  const drawing = over && words !== null ? final : turn?.drawing;
  return html`<${Board} drawing=${drawing} env=${env} turn=${turn}
      after=${over ? last : null} />
    <p class="caption">${other ? `Before turn ${other.turn + 1}, which is not trained on` : over ? html`After the last turn: <${Outcome} episode=${episode} />`
      : html`Before turn ${at + 1} of ${turns.length}`}</p>`;
}

/** Playback: a clock that moves turn by turn to the end; from the end it starts over. */
function usePlay(at, last, go) {
  const [playing, setPlaying] = useState(false);
  const [speed, setSpeed] = useState(1);
  useEffect(() => {
    if (!playing) return undefined;
    if (at >= last) return setPlaying(false);
    const timer = setTimeout(() => go(at + 1), 1000 / speed);
    return () => clearTimeout(timer);
  }, [playing, at, last, speed, go]);
  const toggle = () => {
    if (!playing && at >= last) go(0);
    setPlaying(!playing);
  };
  return { playing, toggle, speed, setSpeed };
}

function Player({ at, last, go, play }) {
  const step = (label, sign, turn) => html`<button class="quiet" aria-label=${label} title=${label}
    disabled=${turn < 0 || turn > last || turn === at} onClick=${() => go(turn)}>${sign}</button>`;
  return html`<div class="row controls">
    ${step("first turn", "|◂", 0)} ${step("turn before", "◂", at - 1)}
    <button class="primary" onClick=${play.toggle} aria-label=${play.playing ? "pause" : "play"}
      title="play or pause (space)">${play.playing ? "❚❚" : "▶"}</button>
    ${step("turn after", "▸", at + 1)} ${step("the end", "▸|", last)}
    <select aria-label="speed" value=${play.speed}
      onChange=${(event) => play.setSpeed(Number(event.target.value))}>
      ${SPEEDS.map((speed) => html`<option key=${speed} value=${speed}>${speed}×</option>`)}
    </select>
    <input class="whole" type="range" min="0" max=${last} value=${at} aria-label="turn"
      aria-valuetext=${at < last ? `turn ${at + 1}` : "the end"}
      onInput=${(event) => go(Number(event.target.value))} />
  </div>`;
}

/** The return so far: one bar a turn, up for gains and down for losses. */
function Returns({ episode, at, go }) {
  const sums = useMemo(() => returnsOf(episode), [episode]);
  const shown = at > 0 ? sums[Math.min(at, sums.length) - 1] ?? 0 : 0;
  const each = episode.turns.map(({ reward, penalty }) => reward + penalty);
  const most = Math.max(...each.map(Math.abs)) || 1;
  return html`<div class="returns">
    <p>Return so far <b>${number(shown)}</b>
      <span class="muted"> of ${number(sums.at(-1) ?? 0)}</span></p>
    ${each.length > 1 && each.some((x) => x !== 0) && html`<div class="each-turn">
      <p class="muted small">Reward and penalty of each turn, up and down from 0:</p>
      <div class="bars" aria-hidden="true">${each.map((x, i) => html`
      <i key=${i} class=${`${x < 0 ? "down" : x > 0 ? "up" : ""} ${i < at ? "past" : ""}`}
        title=${`turn ${i + 1}: ${signed(x)}`} onClick=${() => go(i)}><b style=${{
          height: `${(50 * Math.abs(x)) / most}%` }}></b></i>`)}</div></div>`}
  </div>`;
}

function Turns({ episode, call, choose }) {
  const sums = returnsOf(episode);
  const { turns, others } = episode;
  const cards = (some) => some.map((turn) => html`<${TurnCard} key=${turn.turn} turn=${turn}
    sum=${sums[turn.turn]} current=${turn.turn === call} onChoose=${() => choose(turn.turn)} />`);
  return html`<div class="turns">
    <${Notation} episodes=${[episode]} />
    ${cards(turns)}
    ${!turns.length ? html`<p class="muted">The episode ended before its first turn.</p>`
      : html`<p class="muted">End: <${Outcome} episode=${episode} /></p>`}
    ${turns.length > 0 && !episode.final_drawing && episode.final_observation && html`<p class="muted">The
      environment's last words: <span class="mono"><${Seen} text=${episode.final_observation}
      pictures=${episode.final_pictures} /></span></p>`}
    ${others.length > 0 && html`<h3>Not trained on</h3>`}
    ${cards(others)}
  </div>`;
}

/** The prompt of a policy without token ids: a turn has the messages that are new in it. */
function Messages({ turns, turn }) {
  const first = turns.findLastIndex(({ prompt_joins: joins }, k) => k <= turn && !joins);
  const all = turns.slice(first, turn + 1).flatMap(({ messages }) => messages);
  return html`<section class="prompt">
    <p class="muted">${plural(all.length, "message")}, as the model was sent them.</p>
    <div class="panel mono prompt-text" data-testid="prompt">${all.map(({ role, content }, k) => html`
      <p key=${k} class=${role === "assistant" ? "sampled" : ""}><b>${role}</b>${"\n"}<${Text}
        text=${content} /></p>`)}</div>
  </section>`;
}

/** The two views that need the tokens, which are loaded only here. */
function TokenViews({ run, episode, turn, view, colour, onColour }) {
  const path = episode.has_tokens ? "/api/tokens" : null;
  const answer = useApi(path, { run, episode: episode.id });
  const { data, error } = answer;
  const calls = callsOf(episode);
  if (view === "prompt" && calls[turn]?.role === "budget") {
    return html`<p class="muted">The model was not asked: a fixed text was the reply.</p>`;
  }
  if (view === "prompt" && calls[turn]?.messages) {
    return html`<${Messages} turns=${calls} turn=${turn} />`;
  }
  if (!path) {
    return html`<p class="muted">This episode has no tokens: its endpoint returned only text.</p>`;
  }
  if (!data || error) return html`<${Status} ...${answer} what="Loading the tokens" />`;
  if (view === "prompt") return html`<${RawPrompt} data=${data} turn=${turn} />`;
  return html`<${Tokens} data=${data} turn=${turn} colour=${colour} onColour=${onColour}
    untrained=${untrainedBecause(episode)} />`;
}

/** Why an episode has no numbers of the optimiser. */
function untrainedBecause({ phase, kept }) {
  if (phase !== "train") return "Evaluations are not trained on.";
  if (!kept) return "The filter dropped its group, so it was not trained on.";
  return "This step's samples were not recorded; record.tokens_every says which are.";
}
