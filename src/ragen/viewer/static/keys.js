// The keyboard: one listener for all pages. A page registers its keys while it is shown.

import { useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";

const CHORD_MS = 1000; // How long the first key of two (`g r`) waits for the second.

const layers = []; // The latest page's keys come first.
let first = null;

/**
 * Keys of a page while it is shown: `useKeys({ j: next, "g r": runs }, { j: "next row", … })`.
 * A name is the browser's (`ArrowLeft`, `Escape`, `/`, ` `), or two with a blank for one after the
 * other. A handler that returns false leaves the key to others and to the browser. With `alone`, as
 * in a dialog, no keys but these act.
 */
export function useKeys(handlers, help = {}, { alone = false } = {}) {
  const layer = useRef({ handlers, help, alone });
  layer.current.handlers = handlers;
  layer.current.help = help;
  // Before the page is painted: whoever sees it may press a key.
  useLayoutEffect(() => {
    layers.unshift(layer.current);
    return () => layers.splice(layers.indexOf(layer.current), 1);
  }, []);
}

/** All keys that act now and have a line of help: `[key, line]`; an empty line is of no use now. */
export function activeKeys() {
  const lines = new Map();
  for (const { help } of layers) {
    for (const [key, line] of Object.entries(help)) if (!lines.has(key)) lines.set(key, line);
  }
  return [...lines].filter(([, line]) => line);
}

function typing(target) {
  const kinds = ["checkbox", "radio", "range", "button"];
  if (target.isContentEditable || ["TEXTAREA", "SELECT"].includes(target.tagName)) return true;
  return target.tagName === "INPUT" && !kinds.includes(target.type);
}

/** Keys by which a control that has the focus is worked stay its own. */
function owned(event) {
  const name = event.target.tagName;
  const role = event.target.getAttribute?.("role");
  if (name === "INPUT") return event.key.startsWith("Arrow") || event.key === " ";
  const pressed = ["BUTTON", "A", "SUMMARY"].includes(name) || role === "button";
  return pressed && ["Enter", " "].includes(event.key);
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
  if (typing(event.target)) {
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

/**
 * The keys of a list: j and k move along its rows, Enter opens the one they are on. `names` are
 * what the rows are known by, wherever they stand: a live list moves. Returns the row's index, −1
 * before the first j and where the row has gone.
 */
export function useRowKeys(names, open) {
  const [name, setName] = useState(null);
  const row = names.indexOf(name);
  const move = (by) => () => setName(names[Math.min(names.length - 1, Math.max(0, row + by))]);
  useKeys(
    { j: move(1), k: move(-1), Enter: () => row >= 0 && open(row) },
    { j: "next row", k: "previous row", Enter: "open the row" },
  );
  return row;
}
