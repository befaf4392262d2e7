// Two episodes side by side, turn by turn, with the words that their thoughts share marked in both.

import { link } from "./addresses.js";
import { Board } from "./board.js";
import { percent, plural } from "./numbers.js";
import { Text } from "./parts.js";
import { Actions, Balance, ColumnHead, hasBoard } from "./turns.js";
import { MAX_WORDS, joined, sharedRuns, sharedShare } from "./words.js";
import { html, useEffect, useMemo, useState } from "./vendor/preact-htm.js";

const SLICE_MS = 12; // Longest stretch of work between two updates of the page.

const thoughtsOf = (episode, side) => joined(episode.turns.map(({ thought }) => thought ?? ""), side);

/** The shared runs of words in two episodes' thoughts, and the share of all words in them. */
function compared(one, other) {
  const [a, b] = [thoughtsOf(one, "a"), thoughtsOf(other, "b")];
  const runs = sharedRuns(a.words, b.words);
  return { a, b, runs, share: sharedShare(runs, a, b) };
}

/**
 * The share of shared words of each pair of episodes, by `"i,j"` with i > j. Pairs are computed one
 * after the other, so that long thoughts do not block the page.
 */
export function useShares(episodes) {
  const [shares, setShares] = useState({});
  const key = episodes.map(({ id }) => id).join(",");
  useEffect(() => {
    const pairs = episodes.flatMap((_, i) => episodes.slice(0, i).map((__, j) => [i, j]));
    const found = {};
    let timer = null;
    const go = () => {
      const until = performance.now() + SLICE_MS;
      while (pairs.length && performance.now() < until) {
        const [i, j] = pairs.shift();
        found[`${i},${j}`] = compared(episodes[i], episodes[j]).share;
      }
      setShares({ ...found });
      if (pairs.length) timer = setTimeout(go);
    };
    go();
    return () => clearTimeout(timer);
  }, [key]);
  return shares;
}

/** The two episodes; `left` is the earlier one, or one of another level. */
export function Compared({ left, right, run }) {
  const found = useMemo(() => compared(left, right), [left.id, right.id]);
  const [over, setOver] = useState(null);
  const turns = Math.max(left.turns.length, right.turns.length);
  const side = (episode, list, from) => ({
    episode, list, over, setOver,
    marks: found.runs.map((one, index) => ({ start: one[from], length: one.length, index })),
  });
  const sides = [side(left, found.a, "a"), side(right, found.b, "b")];
  return html`<p>${summary(found, left, right)}</p>
    <div class="columns beside-two" data-testid="beside" onPointerLeave=${() => setOver(null)}>
      ${[left, right].map((episode, i) => html`<header class="row tight" key=${`head ${i}`}>
        <${ColumnHead} title=${html`<b>step ${episode.step}</b>, level ${episode.level_seed}`}
        episode=${episode} href=${link("episode", { run, id: episode.id })} /></header>`)}
      ${Array.from({ length: turns }, (_, k) => sides.map((one, i) =>
        html`<${Turn} key=${`${k} ${i}`} place=${k} ...${one} />`))}
    </div>`;
}

function summary({ a, b, runs, share }, left, right) {
  if (share === null) return "Neither episode has a thought.";
  const one = left.level_seed === right.level_seed
    ? `Steps ${left.step} and ${right.step}`
    : `In step ${right.step}, levels ${left.level_seed} and ${right.level_seed}`;
  if (!runs.length) return `${one} share no three words in a row.`;
  const longest = runs.reduce((x, y) => (y.length > x.length ? y : x));
  const words = a.words.slice(longest.a, longest.a + longest.length).join("").trim();
  const cut = Math.max(a.words.length, b.words.length) > MAX_WORDS;
  return html`${one} share <b>${percent(share, 0)}</b> of their words,
    in ${plural(runs.length, "run")}; the longest has
    ${` ${longest.length}: “`}<${Text} text=${words} limit=${300} />”.
    ${cut && ` Words beyond the first ${MAX_WORDS} were not compared.`}`;
}

function Turn({ episode, place, list, marks, over, setOver }) {
  const { turns } = episode;
  const turn = turns[place];
  if (!turn) return html`<article class="muted">${place === turns.length && "ended"}</article>`;
  const end = place + 1 < list.starts.length ? list.starts[place + 1] - 1 : list.words.length;
  return html`<article>
    <div class="row tight">
      <span class="muted">${place + 1}</span>
      <${Actions} ...${turn} />
      <${Balance} ...${turn} />
    </div>
    <div class="turn-body">
      ${hasBoard(turn) && html`<${Board} drawing=${turn.drawing} env=${episode.env} turn=${turn} />`}
      <p class="thought mono">${!turn.thought?.trim()
        ? html`<span class="muted">${turn.thought === null ? "not a valid" : "empty"} thought</span>`
        : marked(list.words, list.starts[place], end, marks).map(({ text, run }, i) =>
            run === null
              ? html`<${Text} key=${i} text=${text} />`
              : html`<mark key=${i} class=${run === over ? "shared twin" : "shared"}
                  onPointerEnter=${() => setOver(run)}><${Text} text=${text} /></mark>`)}</p>
    </div>
  </article>`;
}

/** Words `start` to `end` as pieces `{text, run}`; `run` is their shared run, or null. */
function marked(words, start, end, marks) {
  const pieces = [];
  let at = start;
  const push = (to, run) => {
    if (to > at) pieces.push({ text: words.slice(at, to).join(""), run });
    at = Math.max(at, to);
  };
  for (const { start: from, length, index } of marks) {
    if (from + length <= start || from >= end) continue;
    push(from, null);
    push(from + length, index);
  }
  push(end, null);
  return pieces;
}
