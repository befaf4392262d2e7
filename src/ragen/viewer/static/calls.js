// The calls of an agent: a drawing of which call continues which, and how each one belongs to its episode.

import { known } from "./numbers.js";
import { Chip, Text } from "./parts.js";
import { html, useEffect, useMemo, useRef } from "./vendor/preact-htm.js";

const [WIDTH, HEIGHT] = [36, 32]; // The place of a call in the drawing, in pixels.
const BEND = 8; // The radius of a line that leads to another lane.

/** The roles of calls beside the conversations, and what each one means. */
const ROLES = {
  compaction: "trained on: a summary of earlier replies, which later messages tell",
  auxiliary: "not trained on: the agent said so, or the call offered no tools where others did",
  discarded: "not trained on: the agent left before it got the reply, or rejected the summary",
  budget: "not trained on: the budget of calls was used up, and a fixed text was the reply",
};

/** All calls of an episode by number: its turns, and then those that are not trained on. */
export const callsOf = ({ turns, others }) => [...turns, ...others];

const isTrained = (role) => role === "agent" || role === "compaction";

/** Names the role of a call beside the conversations. */
export const Role = ({ role }) => known(role) && role !== "agent" && html`<${Chip}
  title=${ROLES[role]}>${role}<//>`;

/** Which call an agent's call continues and how well it repeats the reply, or why it continues none. */
export const Origin = ({ turn: { parent, link, role } }) => known(link) && html`<p
  class="muted small">${parent >= 0 ? `continues turn ${parent + 1}, `
    : role === "budget" ? "" : "begins a conversation: "}<${Text} text=${link} /></p>`;

/**
 * The lane of each call. The first call that continues another one follows it in its lane, if both or
 * neither are trained on. Any other opens a lane: the first that is free from its parent on.
 */
function lanesOf(calls) {
  const conversations = [];
  const continued = new Set();
  const places = [];
  for (const [number, { parent, role }] of calls.entries()) {
    const start = calls[parent] ? Math.min(parent, number) : number;
    const follows = start < number && !continued.has(parent)
      && isTrained(calls[parent].role) === isTrained(role);
    if (follows) continued.add(parent);
    else conversations.push({ start, end: Math.max(parent, number) });
    places.push(follows ? places[parent] : conversations.at(-1));
    if (follows) places[number].end = Math.max(places[number].end, number);
  }
  const ends = [];
  for (const each of conversations) {
    const free = ends.findIndex((end) => end < each.start);
    each.lane = free < 0 ? ends.length : free;
    ends[each.lane] = each.end;
  }
  return places.map(({ lane }) => lane);
}

function line([x, y], [toX, toY]) {
  if (y === toY) return `M${x} ${y}H${toX}`;
  const [on, down] = [BEND * Math.sign(toX - x), BEND * Math.sign(toY - y)];
  return `M${x} ${y}V${toY - down}Q${x} ${toY} ${x + on} ${toY}H${toX}`;
}

/** The calls of an agent from left to right, with lines from each one to those that continue it. */
export function Calls({ episode, at, onChoose }) {
  const calls = useMemo(() => callsOf(episode), [episode]);
  const lanes = useMemo(() => lanesOf(calls), [calls]);
  const box = useRef(null);
  useEffect(() => {
    if (at === null) return;
    const left = WIDTH * at - box.current.clientWidth / 2;
    box.current.scrollTo({ left, top: HEIGHT * lanes[at] - box.current.clientHeight / 2 });
  }, [at, lanes]);
  const spot = (number) => [WIDTH * (number + 0.5), HEIGHT * (lanes[number] + 0.5)];
  const [width, height] = [WIDTH * calls.length, HEIGHT * (Math.max(...lanes) + 1)];
  const lines = calls.map(({ parent }, number) =>
    calls[parent] ? line(spot(parent), spot(number)) : "");
  return html`<nav class="panel calls" aria-label="Calls of the agent" ref=${box}>
    <div style=${{ width: `${width}px`, height: `${height}px` }}>
      <svg width=${width} height=${height} aria-hidden="true"><path d=${lines.join("")} /></svg>
      <ol>${calls.map(({ parent, role }, number) => {
        const origin = calls[parent] ? `continues turn ${parent + 1}` : "begins a conversation";
        const label = `turn ${number + 1} ${origin}${isTrained(role) ? "" : ", not trained on"}`;
        return html`<li key=${number} style=${{ left: `${spot(number)[0]}px`, top: `${spot(number)[1]}px` }}>
          <button class=${isTrained(role) ? "" : "other"} aria-label=${label} title=${label}
            aria-current=${number === at ? "true" : undefined} onClick=${() => onChoose(number)}>${
            number + 1}</button></li>`;
      })}</ol>
    </div>
  </nav>`;
}
