// The keyboard: one listener for all pages. A page registers its keys while it is shown.

import { clamp } from "./numbers.js";
import { useLayoutEffect, useRef } from "./vendor/preact-htm.js";

const CHORD_MS = 1000; // How long the first key of two (`g r`) waits for the second.

const layers = []; // The latest page's keys come first.
let first = null;

/**
 * Keys of a page while it is shown: `useKeys({ j: next, "g r": runs }, { j: "next row", … })`.
 * A name is that of the browser (`ArrowLeft`, `Escape`, `/`, ` `), or two separated by a space for one
 * after the other. A handler that returns false leaves the key to others and to the browser. With
 * `alone`, as in a dialog, only these keys act.
 */
export function useKeys(handlers, help = {}, { alone = false } = {}) {
  const layer = useRef({ handlers, help, alone });
  layer.current.handlers = handlers;
  layer.current.help = help;
  // Before the page is painted, because keys may be pressed as soon as it is visible.
  useLayoutEffect(() => {
    layers.unshift(layer.current);
    return () => layers.splice(layers.indexOf(layer.current), 1);
  }, []);
}

/** The active keys with their help: `[key, line]`. Keys with an empty line are left out. */
export function activeKeys() {
  const lines = layers.flatMap(({ help }) => Object.entries(help));
  const isFirst = (key, i) => lines.findIndex(([other]) => other === key) === i;
  return lines.filter(([key, line], i) => line && isFirst(key, i));
}

const TYPED = "input:not([type=checkbox], [type=radio], [type=range]), textarea, select";
const PRESSED = "button, a, summary, [role=button]";

/** Whether a key operates the focused control and is left to it. */
function owned({ target, key }) {
  if (target.matches?.("input")) return key.startsWith("Arrow") || key === " ";
  return target.matches?.(PRESSED) && ["Enter", " "].includes(key);
}

function acting() {
  const dialog = layers.find(({ alone }) => alone);
  return dialog ? [dialog] : layers;
}

function act(name, event) {
  for (const { handlers } of acting()) {
    if (handlers[name] && handlers[name](event) !== false) {
      event.preventDefault();
      return true;
    }
  }
  return false;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (event.target.matches?.(TYPED)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (owned(event)) return;
  const chord = first && event.timeStamp - first.at < CHORD_MS ? `${first.key} ${event.key}` : null;
  first = null;
  if (chord && act(chord, event)) return;
  if (act(event.key, event)) return;
  const begins = ({ handlers }) => Object.keys(handlers).some((k) => k.startsWith(`${event.key} `));
  if (acting().some(begins)) first = { key: event.key, at: event.timeStamp };
});

/** Keys of a list besides j and k, as `arrows` of `useRowKeys`. */
export const VERTICAL = { ArrowDown: 1, ArrowUp: -1 };
export const HORIZONTAL = { ArrowRight: 1, ArrowLeft: -1 };

/**
 * The keys of a list of `count` rows, each a `noun`: j, k and the `arrows` `select` the next or the
 * previous row of the one `at`, which is −1 if none is selected; Enter calls `open`.
 */
export function useRowKeys(noun, { count, at, select, open, arrows = {} }) {
  const moves = Object.entries({ j: 1, k: -1, ...arrows }).map(([key, by]) => [
    key, () => count > 0 && select(clamp(at + by, 0, count - 1)),
  ]);
  const enter = () => (open && at >= 0 && at < count ? open(at) : false);
  useKeys(
    { ...Object.fromEntries(moves), Enter: enter },
    { j: `next ${noun}`, k: `previous ${noun}`, Enter: open && `open the ${noun}` },
  );
}
