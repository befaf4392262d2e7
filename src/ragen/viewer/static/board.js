// The board of an environment as SVG, from the drawing that the environment provides: rows with one
// character a cell, in one alphabet for all environments. Sokoban and FrozenLake are drawn; any other
// character is shown in a plain cell. Bandit has no drawing: its two arms are drawn from the turn.
// Other environments are shown as text. What an agent saw in pictures is shown as these pictures.

import { pieces, Text } from "./parts.js";
import { Seen } from "./pictures.js";
import { html } from "./vendor/preact-htm.js";

/** The meaning of each character: the ground, the pieces on it, and its name. */
const CELLS = {
  "#": { ground: "wall", name: "wall" },
  _: { ground: "floor" },
  P: { ground: "floor", on: ["player"], name: "player" },
  X: { ground: "floor", on: ["box"], name: "box" },
  O: { ground: "floor", on: ["target"], name: "target" },
  H: { ground: "hole", name: "hole" },
  G: { ground: "floor", on: ["goal"], name: "goal" },
  "√": { ground: "floor", on: ["target", "box-home"], name: "box on its target" },
  S: { ground: "floor", on: ["target", "player"], name: "player on a target" },
  "@": { ground: "hole", on: ["player-lost"], name: "player in a hole" },
  "*": { ground: "floor", on: ["goal", "player"], name: "player on the goal" },
};

/** FrozenLake has a goal or a hole; Sokoban has neither. */
const ICE = /[HG@*]/;

/** Boards with more cells are shown as text, because each cell is several nodes of the page. */
const MOST_CELLS = 4096;

/** A cell as the coordinates of an observation name it; other texts name its row by a letter. */
const COORDINATES = /\(\d+, \d+\)/;

/** The room for the names of rows and columns, in cells. */
const EDGE = 0.45;

/** The pieces, drawn in the unit square. */
const SHAPES = {
  player: () => html`
    <circle cx=".5" cy=".31" r=".15" />
    <path d="M.22 .84a.28 .33 0 0 1 .56 0z" />`,
  "player-lost": () => html`
    <circle cx=".5" cy=".42" r=".13" />
    <path d="M.3 .74a.2 .16 0 0 1 .4 0z" />
    <path class="line" d="M.2 .8q.15 -.08 .3 0t.3 0" />`,
  box: () => html`
    <rect x=".15" y=".15" width=".7" height=".7" rx=".05" />
    <path class="line" d="M.15 .38H.85M.15 .62H.85M.22 .82L.78 .18" />`,
  "box-home": () => html`
    <rect x=".15" y=".15" width=".7" height=".7" rx=".05" />
    <path class="line tick" d="M.31 .52L.45 .66L.7 .36" />`,
  target: () => html`
    <circle class="line" cx=".5" cy=".5" r=".27" />
    <circle cx=".5" cy=".5" r=".06" />`,
  goal: () => html`
    <path class="line" d="M.34 .16V.86" />
    <path d="M.34 .17L.8 .32L.34 .48z" />
    <path class="line" d="M.22 .86H.5" />`,
};

/**
 * The environment before a turn, or after the last one.
 *
 * @param drawing Rows of the board, or null if the environment provides none.
 * @param env The environment's name.
 * @param turn The turn that is shown, or null.
 * @param after The observation after the turn, `{observation, pictures}`, if that is to be drawn.
 */
export function Board({ drawing, env, turn = null, after = null }) {
  const seen = after ?? turn;
  if (seen?.pictures?.length) {
    return html`<div class="board board-text board-seen mono" data-testid="board" tabindex="0">
      <${Seen} text=${seen.observation} pictures=${seen.pictures} /></div>`;
  }
  if (drawing?.length && drawing.length * drawing[0].length <= MOST_CELLS) {
    const numbered = COORDINATES.test(turn?.observation ?? "");
    return html`<${Grid} rows=${drawing} env=${env} names=${numbered ? NUMBERS : LETTERS} />`;
  }
  const arms = env.startsWith("bandit") && turn && armsOf(turn.observation);
  if (arms) return html`<${Arms} arms=${arms} turn=${turn} after=${after} />`;
  const text = drawing ? drawing.join("\n") : seen?.observation;
  return html`<div class="board board-text mono" data-testid="board" tabindex="0">
    <${Text} text=${text ?? ""} />
  </div>`;
}

function Grid({ rows, env, names }) {
  const cells = rows.map((row) => Array.from(row));
  const height = cells.length;
  const width = Math.max(...cells.map((row) => row.length));
  const ice = rows.some((row) => ICE.test(row));
  return html`<svg class=${`board board-grid ${ice ? "on-ice" : ""}`} data-testid="board"
    viewBox=${`${-EDGE} ${-EDGE} ${width + EDGE + 0.03} ${height + EDGE + 0.03}`} role="img"
    aria-label=${`${env}: ${described(cells, names)}`}>
    ${cells.map((_, y) => html`<text class="coordinate" x=${-EDGE / 2} y=${y + 0.5}>${
      names.row(y)}</text>`)}
    ${cells[0].map((_, x) => html`<text class="coordinate" x=${x + 0.5} y=${-EDGE / 2}>${x}</text>`)}
    ${cells.map((row, y) => row.map((character, x) => html`
      <g key=${`${x},${y}`} transform=${`translate(${x} ${y})`}>
        <title>${[names.cell(y, x), CELLS[character]?.name].filter(Boolean).join(": ")}</title>
        <${Cell} character=${character} />
      </g>`))}
  </svg>`;
}

function Cell({ character }) {
  const cell = CELLS[character];
  if (!cell) {
    return html`<rect class="ground plain" width="1" height="1" />
      <text class="letter" x=".5" y=".5">${visible(character)}</text>`;
  }
  return html`<rect class=${`ground ${cell.ground}`} width="1" height="1" />
    ${cell.ground === "wall" && html`<path class="wall line" d="M0 0H1M0 .5H1M.5 0V.5M0 .5V1" />`}
    ${cell.ground === "hole" && html`<ellipse class="water" cx=".5" cy=".53" rx=".39" ry=".34" />`}
    ${(cell.on ?? []).map((what) => html`<g class=${what}>${SHAPES[what]()}</g>`)}`;
}

/** A character; "�" if it is invisible or would change the order of others. */
const visible = (character) => (pieces(character)[0].hidden ? "\ufffd" : character);

/** The board in words, for screen readers: `4 rows of 4, player at a3, hole at b1, …`. */
function described(cells, names) {
  const named = cells.flatMap((row, y) => row.map((character, x) => {
    const name = CELLS[character]?.name;
    return name && name !== "wall" ? `${name} at ${names.cell(y, x)}` : null;
  }));
  return [`${cells.length} rows of ${cells[0].length}`, ...named.filter(Boolean)].join(", ");
}

/** Names with a letter for the row; a board may have more rows than the alphabet has letters. */
const LETTERS = {
  row: (y) => (y < 26 ? String.fromCharCode(97 + y) : y),
  cell: (y, x) => `${LETTERS.row(y)}${x}`,
};

const NUMBERS = { row: (y) => y, cell: (y, x) => `(${y}, ${x})` };

/** The arms of Bandit, from `Arms: Dragon, Phoenix`; undefined for any other text. */
const armsOf = (observation) => /^Arms: (.+)$/.exec(observation)?.[1].split(", ");

/** The two arms; the one that was pulled is marked, with its reward. */
function Arms({ arms, turn, after }) {
  const pulled = after ? turn.actions_executed[0] : null;
  const said = pulled ? `; ${pulled} was pulled and paid ${turn.reward}` : "";
  return html`<div class="board board-arms columns" data-testid="board" role="img"
    aria-label=${`arms ${arms.join(" and ")}${said}`}>
    ${arms.map((arm) => html`<div key=${arm} class=${`arm ${arm === pulled ? "pulled" : ""}`}>
      <svg viewBox="0 0 1 1" aria-hidden="true">
        <rect class="machine" x=".12" y=".2" width=".56" height=".7" rx=".08" />
        <rect class="window" x=".2" y=".32" width=".4" height=".2" rx=".03" />
        <path class="lever" d=${arm === pulled ? "M.68 .56L.86 .78" : "M.68 .56L.86 .24"} />
        <circle class="knob" cx=".86" cy=${arm === pulled ? ".8" : ".22"} r=".08" />
      </svg>
      <b><${Text} text=${arm} /></b>
      <div>${arm === pulled ? `paid ${turn.reward}` : "\u00a0"}</div>
    </div>`)}
  </div>`;
}
