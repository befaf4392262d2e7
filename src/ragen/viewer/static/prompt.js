// The prompt of a turn exactly as the model saw it: the tokens before its completion, as text.

import { number } from "./numbers.js";
import { Text } from "./parts.js";
import { stretchesOf } from "./tokens.js";
import { html, useMemo } from "./vendor/preact-htm.js";

/**
 * What the model saw before a turn: the tokens before its completion, as text. Its own completions
 * of earlier turns are tinted.
 */
export function RawPrompt({ data, turn }) {
  const prompt = useMemo(() => promptOf(data.samples, turn), [data, turn]);
  if (prompt === null) {
    return html`<p class="muted">The tokens of this turn's prompt were not recorded.</p>`;
  }
  return html`<section class="prompt">
    <p class="muted">${number(prompt.length)} tokens, exactly as the model saw them. Its own
      completions are tinted.</p>
    <div class="prompt-text" data-testid="prompt">${prompt.parts.map((part, i) =>
      html`<span key=${i} class=${part.sampled ? "sampled" : ""}
        ><${Text} text=${part.text} /></span>`)}
    </div>
  </section>`;
}

/** The tokens before a turn's completion, joined to texts: `{length, parts: [{text, sampled}]}`. */
function promptOf(samples, turn) {
  const sample = samples.find((each) => each.turn.includes(turn));
  if (!sample) return null;
  const length = sample.turn.indexOf(turn);
  const parts = stretchesOf(sample).filter(({ start }) => start < length).map((each) => ({
    text: sample.texts.slice(each.start, each.end).join(""), sampled: each.turn >= 0,
  }));
  return { length, parts };
}
