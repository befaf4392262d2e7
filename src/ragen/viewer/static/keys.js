// The keyboard: one listener for all pages. A page registers its keys while it is shown.

import { useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";

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

/** Whether a key operates the focused control and is left to it. */
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
 * The keys of a list: j and k select the next and the previous row, Enter opens the selected one.
 * `names` identify the rows, because a live list moves. Returns the index of the selected row, or −1
 * if none is selected or the row is gone.
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
