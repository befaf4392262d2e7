// The tokens of an episode in order, as the model saw them and the optimiser trained them, coloured by
// one of their numbers. Ten thousand tokens stay fast because their elements are made once, with a
// class for each colouring: another colouring changes one class of the element around them.

import { pictureSource } from "./api.js";
import { SHADES, Shades, shadeOf } from "./heat.js";
import { number, plural } from "./numbers.js";
import { Tabs, mark, picked, pieces } from "./parts.js";
import { ALT, PLACE, Run, Seen } from "./pictures.js";
import { html, useContext, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const RAREST = -6.9; // One in a thousand. Rarer ones look alike; one of −20 would hide the others.
const CHUNK = 1000; // Tokens of a block; in a long sample, a block is laid out when it is visible.
const LONG = 4000; // Shorter samples are laid out at once, so that scrolling to a turn is exact.

const identity = (x) => x;

/**
 * What tokens can be coloured by. `series` names the array of the API; `letter` begins the classes;
 * `diverging` scales are as wide on both sides of `centre`, on the axis that `axis` makes.
 */
export const COLOURS = {
  mask: { title: "mask", hint: "Completions are trained; prompts never are." },
  logprob: {
    title: "logprob", series: "logprob", fallback: "sampled_logprob", letter: "l", floor: RAREST,
    flip: true, hint: "Nats; the darker, the less likely the token was.",
  },
  entropy: {
    title: "entropy", series: "entropy", letter: "e",
    hint: "Nats; the darker, the less certain the policy was.",
  },
  advantage: {
    title: "advantage", series: "advantage", letter: "a", diverging: true,
    hint: "Above 0, the update makes the token more likely; below 0, less likely.",
  },
  ratio: {
    title: "importance ratio", series: "ratio", letter: "r", diverging: true, axis: Math.log,
    back: Math.exp,
    hint: "Probability now ÷ probability at the start of the update; 1 is unchanged.",
  },
  value: {
    title: "value", series: "value", letter: "v", diverging: true,
    hint: "The critic's estimate of the return from here on.",
  },
};

/** A token's numbers, in the order in which they are shown: title and series. */
const FACTS = {
  "sampled logprob": "sampled_logprob",
  logprob: "logprob",
  entropy: "entropy",
  advantage: "advantage",
  return: "return",
  "importance ratio": "ratio",
  value: "value",
};

/**
 * An episode's token sequences.
 *
 * @param data The answer of `/api/tokens`.
 * @param turn The turn whose tokens are marked, or null.
 * @param colour A name of `COLOURS`.
 * @param untrained A sentence: why the optimiser's numbers are missing, if they are.
 * @param onColour Called with the colouring that the reader chose.
 */
export function Tokens({ data, turn = null, colour = "mask", untrained = "", onColour }) {
  const [current, setCurrent] = useState(null);
  const run = useContext(Run);
  const scales = useMemo(() => scalesOf(data.samples), [data]);
  const available = Object.entries(COLOURS).filter(([name]) => name === "mask" || scales[name]);
  const options = Object.fromEntries(available);
  const shown = picked(options, colour);
  const word = data.source === "turns" ? "sampled" : "trained";
  return html`<section class="tokens">
    <div class="tokens-head">
      <${Tabs} options=${options} value=${shown} onChange=${onColour} label="colour tokens by" />
      <${Legend} colour=${shown} scale=${scales[shown]} word=${word} />
    </div>
    ${data.source === "turns" && html`<p class="muted">${untrained} These are the tokens of the
      turns, with their sampled logprobs.</p>`}
    <${Flow} run=${run} samples=${data.samples} scales=${scales} colour=${shown} turn=${turn}
      onCurrent=${setCurrent} />
    <${Facts} samples=${data.samples} at=${current} word=${word} />
  </section>`;
}

/** The array of a number in a sample, or its fallback. */
const seriesOf = (sample, { series, fallback }) => sample[series] ?? sample[fallback] ?? null;

/** For each colouring with numbers, the range from its lowest to its highest trained token. */
function scalesOf(samples) {
  const all = Object.entries(COLOURS).map(([name, colour]) => [name, scaleOf(samples, colour)]);
  return Object.fromEntries(all.filter(([, scale]) => scale));
}

function scaleOf(samples, colour) {
  const { axis = identity, floor = -Infinity, diverging } = colour;
  let [low, high] = [Infinity, -Infinity];
  for (const sample of samples) {
    const series = seriesOf(sample, colour) ?? [];
    for (const [i, value] of series.entries()) {
      if (!sample.mask[i] || value === null) continue;
      low = Math.min(low, axis(value));
      high = Math.max(high, axis(value));
    }
  }
  if (low > high) return null;
  if (colour.flip) high = 0;
  if (!diverging) return { low: Math.max(low, floor), high: Math.max(high, floor) };
  const width = Math.max(Math.abs(low), Math.abs(high));
  return { low: -width, high: width };
}

/** The shade of a value; on a flipped axis, low values are dark. */
function shade(value, { axis = identity, flip, diverging }, { low, high }) {
  if (high === low) return diverging ? (SHADES - 1) / 2 : 0;
  const share = (axis(value) - low) / (high - low);
  return shadeOf(flip ? 1 - share : share);
}

function Legend({ colour, scale, word }) {
  const { hint, letter, flip, diverging, back = identity } = COLOURS[colour];
  const notes = html`<span class="token">not ${word}</span> <span class="muted">${hint}</span>`;
  if (!scale) {
    return html`<p class="row tight legend by-mask">
      <span class="token trained">${word}</span> ${notes}</p>`;
  }
  const ends = [scale.low, scale.high].map((x) => number(back(x)));
  if (flip) ends.reverse();
  return html`<p class="row tight legend by-${letter}">
    <span class="number">${ends[0]}</span>
    <${Shades} letter=${letter} />
    <span class="number">${ends[1]}</span>
    ${diverging && html`<span class="muted">middle ${number(back(0))}</span>`} ${notes}
  </p>`;
}

/** The elements of the tokens, which are made once and not managed by Preact. */
function Flow({ run, samples, scales, colour, turn, onCurrent }) {
  const root = useRef(null);
  const met = useRef(null);
  const still = useRef(turn === 0); // A page that opens at the first turn is not scrolled.
  useEffect(() => {
    const made = samples.map((sample, i) => sampleOf(sample, i, samples, scales, run));
    root.current.replaceChildren(...made);
    met.current = root.current.querySelector(".token");
    if (met.current) met.current.tabIndex = 0;
  }, [samples]);
  useEffect(() => {
    for (const each of root.current.querySelectorAll(".stretch")) {
      each.classList.toggle("this-turn", each.dataset.turn === String(turn));
    }
    const here = root.current.querySelector(".this-turn");
    if (!still.current) here?.scrollIntoView({ block: "nearest" });
    still.current = false;
  }, [samples, turn]);
  const meet = (event) => {
    const token = event.target.closest(".token");
    if (!token) return;
    move(met.current, token);
    met.current = token;
    onCurrent([Number(token.closest(".sample").dataset.sample), Number(token.dataset.at)]);
  };
  return html`<div ref=${root} class="flow by-${COLOURS[colour].letter ?? "mask"}" role="group"
    aria-label="tokens" onMouseOver=${meet} onfocusin=${meet} onClick=${meet}
    onKeyDown=${step}></div>`;
}

/** The Tab key stops at one token: the last one that was visited. */
function move(old, token) {
  old.tabIndex = -1;
  old.classList.remove("current");
  token.tabIndex = 0;
  token.classList.add("current");
}

/** The arrow keys move from token to token while one has the focus. */
function step(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const token = event.target.closest(".token");
  if (!by || !token) return;
  event.stopPropagation();
  event.preventDefault();
  const all = [...event.currentTarget.querySelectorAll(".token")];
  all[all.indexOf(token) + by]?.focus();
}

/** A sample as stretches of tokens: a prompt, the completion of a turn, and so on. */
function sampleOf(sample, index, samples, scales, run) {
  const section = element("div", sample.ids.length > LONG ? "sample long" : "sample");
  section.dataset.sample = index;
  const whole = samples.filter(({ mask }) => mask.includes(1)).length;
  if (samples.length > 1) {
    const name = index < whole ? `Sample ${index + 1} of ${whole}` : "Not trained on";
    section.append(element("h3", "", name));
  }
  const shades = Object.entries(scales).flatMap(([name, scale]) => {
    const series = seriesOf(sample, COLOURS[name]);
    return series ? [{ series, scale, colour: COLOURS[name] }] : [];
  });
  for (const { start, end, turn } of stretchesOf(sample)) {
    const stretch = element("div", turn < 0 ? "stretch" : "stretch sampled");
    stretch.dataset.turn = turn;
    const name = turn < 0 ? "prompt" : `turn ${turn + 1}`;
    stretch.append(element("span", "stretch-name small muted", name));
    for (let from = start; from < end; from += CHUNK) {
      stretch.append(chunkOf(sample, from, Math.min(end, from + CHUNK), shades, run));
    }
    section.append(stretch);
  }
  return section;
}

/** Half-open ranges of tokens that belong to one turn, or to a prompt (turn −1). */
function stretchesOf(sample) {
  const stretches = [];
  for (const [i, turn] of sample.turn.entries()) {
    const last = stretches.at(-1);
    if (last && last.turn === turn) last.end = i + 1;
    else stretches.push({ start: i, end: i + 1, turn });
  }
  return stretches;
}

function chunkOf(sample, start, end, shades, run) {
  const chunk = element("div", "chunk");
  for (let i = start; i < end; i += 1) {
    const shown = pictureAt(sample, i);
    if (shown && shown[0] !== i) continue; // A picture's tokens are one element.
    const classes = ["text token"];
    if (sample.mask[i]) {
      classes.push("trained");
      for (const { series, scale, colour } of shades) {
        if (series[i] === null) continue;
        classes.push(`${colour.letter}${shade(series[i], colour, scale)}`);
      }
    }
    const token = element("span", classes.join(" "), spelled(sample.texts[i]));
    if (shown) {
      const picture = element("img", "picture");
      token.replaceChildren(Object.assign(picture, { alt: ALT, src: pictureSource(run, shown[2]) }));
    }
    token.dataset.at = i;
    token.dataset.testid = "token";
    token.tabIndex = -1;
    chunk.append(token);
    if (sample.texts[i].endsWith("\n")) chunk.append(element("br"));
  }
  return chunk;
}

/** The run of picture tokens around token i as `[start, end, hash]`, if it is one of a picture. */
const pictureAt = (sample, i) => sample.ids[i] === null
  ? sample.pictures.find(([start, end]) => start <= i && i < end) : undefined;

function element(name, className = "", textContent = "") {
  return Object.assign(document.createElement(name), { className, textContent });
}

/** A token's text with spaces, line breaks and hidden characters made visible. */
function spelled(text) {
  if (text === "") return "∅";
  const seen = pieces(text).map((piece) => (piece.hidden ? mark(piece.text) : piece.text)).join("");
  return seen.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

/** All numbers of the token under the pointer or the focus. */
function Facts({ samples, at, word }) {
  if (at === null || !samples[at[0]]) {
    return html`<div class="panel token-facts">
      <p class="muted">Point at a token to see its numbers.</p></div>`;
  }
  const [sample, i] = [samples[at[0]], at[1]];
  const trained = sample.mask[i];
  const sampled = sample.sampled_logprob[i];
  const old = sample.logprob?.[i] ?? null;
  const place = sample.turn[i] < 0 ? "prompt" : `turn ${sample.turn[i] + 1}`;
  const [start, end, hash] = pictureAt(sample, i) ?? [];
  const name = hash ? [`${plural(end - start, "token")} of the picture ${hash}, from ${number(start)}`]
    : [`token ${number(i)}`, `id ${sample.ids[i]}`];
  const about = [...name, place, trained ? word : `not ${word}`];
  const facts = [
    ...Object.entries(FACTS).map(([name, series]) => [name, sample[series]?.[i] ?? null]),
    ["probability", sampled !== null ? Math.exp(sampled) : null],
    ["recomputed − sampled", old !== null && sampled !== null ? old - sampled : null],
  ].filter(([, value]) => value !== null);
  return html`<div class="panel token-facts" data-testid="token-facts">
    <p>${!hash && html`<span class="text token current">${spelled(sample.texts[i])}</span>`}
      <span class="muted">${" "}${about.join(", ")}</span></p>
    ${trained ? html`<dl class="figures">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt>
      <dd>${exact(value)}</dd></div>`)}</dl>` : ""}
  </div>`;
}

/** Five significant digits, enough to distinguish two logprobs. */
const exact = (x) => (Number.isInteger(x) ? String(x) : x.toPrecision(5)).replace("-", "−");

/**
 * What the model saw before a turn: the tokens before its completion, as text. Its own completions
 * of earlier turns are tinted.
 */
export function RawPrompt({ data, turn }) {
  const sample = data.samples.find((each) => each.turn.includes(turn));
  if (!sample) {
    return html`<p class="muted">The tokens of this turn's prompt were not recorded.</p>`;
  }
  const length = sample.turn.indexOf(turn);
  const parts = stretchesOf(sample).filter(({ start }) => start < length);
  return html`<section class="prompt">
    <p class="muted">${number(length)} tokens, exactly as the model saw them. Its own
      completions are tinted.</p>
    <div class="panel mono prompt-text" data-testid="prompt">${parts.map(({ start, end, turn: of }) =>
      html`<span key=${start} class=${of >= 0 ? "sampled" : ""}
        ><${Seen} ...${spelledWith(sample, start, end)} /></span>`)}
    </div>
  </section>`;
}

/** The text of tokens, with a place for each run of picture tokens. */
function spelledWith(sample, start, end) {
  const runs = sample.pictures.filter(([at]) => start <= at && at < end);
  const ends = [...runs.map(([at]) => at), end];
  const texts = ends.map((at, k) => sample.texts.slice(k ? runs[k - 1][1] : start, at).join(""));
  return { text: texts.join(PLACE), pictures: runs.map(([, , hash]) => hash) };
}
