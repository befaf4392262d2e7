// The sequential scale of the style sheet, for shares from 0 to 1.

import { clamp, known } from "./numbers.js";
import { html } from "./vendor/preact-htm.js";

/** The number of --s… and of --d… in style.css. */
export const SHADES = 9;

const ALL = Array.from({ length: SHADES }, (_, i) => i);

/** The number of the shade for a share from 0 to 1, which is darker for larger ones. */
export const shadeOf = (share) => Math.round(clamp(share, 0, 1) * (SHADES - 1));

/** The class that colours a cell by a share; null stays without colour. */
export const heat = (share) => (known(share) ? `heat-${shadeOf(share)}` : "heat-none");

/** All shades in order, as elements of the classes `${letter}0`, `${letter}1`, …. */
export const Shades = ({ letter = "heat-" }) =>
  html`<span class="shades" aria-hidden="true">${ALL.map((i) =>
    html`<i key=${i} class=${`${letter}${i}`}></i>`)}</span>`;
