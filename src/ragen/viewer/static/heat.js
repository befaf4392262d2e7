// Heat maps on a canvas. Colours are read from the style sheet whenever one is drawn.

import { css } from "./paint.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

/** The nine colours of a scale as `[r, g, b]`: `s` is sequential, `d` is diverging. */
function scaleOf(kind) {
  return Array.from({ length: 9 }, (_, i) => css(`--${kind}${i}`).match(/\d+/g).map(Number));
}

/** The colour of `share` (0 to 1) on a scale of `scaleOf`. */
function shade(colours, share) {
  const at = Math.min(1, Math.max(0, share)) * (colours.length - 1);
  const low = Math.min(Math.floor(at), colours.length - 2);
  const mixed = colours[low].map((c, k) => Math.round(c + (at - low) * (colours[low + 1][k] - c)));
  return `rgb(${mixed.join(" ")})`;
}

/**
 * A matrix as a heat map: rows downwards, columns rightwards; null is left empty. `outlined`
 * blocks `[[row, column, rows, columns], …]` get a frame. `onHover(row, column)` follows the
 * pointer or the arrow keys (null, null on leaving); `onPick(row, column)` is a click or Enter.
 */
export function Heat({
  matrix, label, low, high, scale = "s", outlined = [], height, onHover, onPick,
}) {
  const canvas = useRef(null);
  const [cell, setCell] = useState(null);
  const [numRows, numColumns] = [matrix.length, matrix[0]?.length ?? 0];
  const tall = height ?? Math.min(480, Math.max(120, numRows * 8));
  const draw = () => drawHeat(canvas.current, { matrix, low, high, scale, outlined, cell });
  useEffect(draw, [matrix, low, high, scale, outlined, cell]);
  useEffect(() => {
    const size = new ResizeObserver(draw);
    size.observe(canvas.current);
    addEventListener("theme", draw);
    return () => {
      size.disconnect();
      removeEventListener("theme", draw);
    };
  }, [matrix, low, high, scale, outlined, cell]);

  const go = (next) => {
    setCell(next);
    onHover?.(...(next ?? [null, null]));
  };
  const under = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * numRows);
    const column = Math.floor(((event.clientX - box.left) / box.width) * numColumns);
    const within = row >= 0 && row < numRows && column >= 0 && column < numColumns;
    return within ? [row, column] : null;
  };
  const key = (event) => {
    const [row, column] = cell ?? [0, 0];
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const by = moves[event.key];
    if (by) {
      const clamp = (x, end) => Math.min(end - 1, Math.max(0, x));
      go([clamp(row + by[0], numRows), clamp(column + by[1], numColumns)]);
    } else if (event.key === "Enter") onPick?.(row, column);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<canvas
    class="heat" ref=${canvas} tabindex="0" role="img" aria-label=${label} data-testid="matrix"
    style=${{ height: `${tall}px` }}
    onPointerMove=${(event) => go(under(event))}
    onPointerLeave=${() => go(null)}
    onClick=${(event) => under(event) && onPick?.(...under(event))}
    onKeyDown=${key}
  ></canvas>`;
}

function drawHeat(canvas, { matrix, low, high, scale, outlined, cell }) {
  if (!canvas) return;
  const ratio = devicePixelRatio;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = canvas.clientHeight * ratio;
  const context = canvas.getContext("2d");
  const known = matrix.flat().filter((x) => x !== null);
  const from = low ?? known.reduce((a, b) => Math.min(a, b), Infinity);
  const to = high ?? known.reduce((a, b) => Math.max(a, b), -Infinity);
  const colours = scaleOf(scale);
  const [tall, wide] = [canvas.height / matrix.length, canvas.width / (matrix[0]?.length ?? 1)];
  const box = (i, j, rows = 1, columns = 1) =>
    [j * wide, i * tall, Math.ceil(columns * wide), Math.ceil(rows * tall)];
  matrix.forEach((row, i) =>
    row.forEach((x, j) => {
      if (x === null) return;
      context.fillStyle = shade(colours, (x - from) / (to - from || 1));
      context.fillRect(...box(i, j));
    }),
  );
  context.lineWidth = 1.5 * ratio;
  context.strokeStyle = css("--c1");
  for (const block of outlined) context.strokeRect(...box(...block));
  context.strokeStyle = css("--ink");
  if (cell) context.strokeRect(...box(...cell));
}
