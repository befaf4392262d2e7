// The components that all pages share.

import { link, visit } from "./addresses.js";
import { useKeys } from "./keys.js";
import { clamp, known, number, percent } from "./numbers.js";
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const CUT = 20000; // Characters of a text that are shown at once; a megabyte would block the page.

/** Mark the page as completely drawn once `done` is true; tests and screenshots wait for this. */
export function useReady(done) {
  useEffect(() => {
    if (done) document.body.dataset.ready = "1";
  }, [done]);
}

/** The option that the address names, or the first one. */
export function picked(options, wanted) {
  return Object.hasOwn(options, wanted ?? "") ? wanted : Object.keys(options)[0];
}

// ---- text of models

// Characters that are invisible or change the order of visible text: control and format characters
// (zero-width and bidi marks, tags), separators of lines, and Hangul fillers.
const HIDDEN = /((?![\t\n])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\u115f\u1160\u3164])/u;

/** A text in pieces `{text, hidden}`; a hidden piece is one character to be made visible. */
export function pieces(text) {
  const parts = text.split(HIDDEN); // What is split at stands at odd places.
  return parts.map((part, i) => ({ text: part, hidden: i % 2 === 1 })).filter((part) => part.text);
}

/** The visible form of a hidden character: ␛ for a control character, the code for others. */
export function mark(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  return code === 0x7f ? "␡" : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** A text of a model, an environment or an error: shown as it is, never interpreted. */
export function Text({ text, limit = CUT }) {
  const [shown, setShown] = useState(limit);
  const whole = String(text ?? "");
  const part = useMemo(() => pieces(whole.slice(0, shown)), [whole, shown]);
  const rest = whole.length - shown;
  return html`<span class="text">${part.map((piece) =>
    piece.hidden ? html`<span class="mark">${mark(piece.text)}</span>` : piece.text)}${
    rest > 0 && html`… <button class="quiet" onClick=${() => setShown(shown + CUT)}>
      show more (${number(rest)} characters left)</button>`}</span>`;
}

// ---- pictures

/**
 * An estimate with its interval, on a line from `min` to `max`. The range from `random` to `optimal`
 * (the baselines: random and optimal play) is shaded. `zero` draws a line at 0, for differences.
 */
export function Interval({
  value, low, high, random, optimal, min = 0, max = 1, zero, text = true, format = percent,
}) {
  if (!known(value)) return html`<span class="muted">–</span>`;
  const at = (x) => `${(100 * clamp((x - min) / (max - min), 0, 1)).toFixed(2)}%`;
  const span = (a, b) => ({ left: at(a), width: `calc(${at(b)} - ${at(a)})` });
  const bounds = known(low) ? ` [${format(low)}, ${format(high)}]` : "";
  const baselines = [["random play", random], ["optimal play", optimal]];
  const said = baselines.map(([name, x]) => (known(x) ? `, ${name} ${format(x)}` : ""));
  const label = `${format(value)}${bounds}${said.join("")}`;
  const ticks = [zero ? 0 : null, random, optimal].filter(known);
  return html`<span class="interval" title=${label}>
    <span class="interval-bar" role="img" aria-label=${label}>
      ${known(random) &&
      html`<i class="interval-room" style=${span(random, known(optimal) ? optimal : max)}></i>`}
      ${ticks.map((x) => html`<i class="interval-tick" style=${{ left: at(x) }}></i>`)}
      ${bounds && html`<i class="interval-range" style=${span(low, high)}></i>`}
      <i class="interval-dot" style=${{ left: at(value) }}></i>
    </span>
    ${text && html`<span class="number">${format(value)}</span>`}
  </span>`;
}

/** A small curve in a line of text; `min` and `max` make several comparable. */
export function Spark({ values, min, max, label }) {
  if (values.length < 2) return html`<span class="spark"></span>`;
  const low = min ?? Math.min(...values);
  const high = max ?? Math.max(...values);
  const x = (i) => (100 * i) / (values.length - 1);
  const y = (value) => 19 - (18 * (value - low)) / (high - low || 1);
  return html`<svg class="spark" viewBox="0 0 100 20" preserveAspectRatio="none" role="img"
    aria-label=${label}>
    <polyline points=${values.map((value, i) => `${x(i)},${y(value)}`).join(" ")}
      vector-effect="non-scaling-stroke" />
  </svg>`;
}

const STATES = {
  running: ["●", "running", "a process is writing this run"],
  finished: ["✓", "good", "the run reached its last step"],
  stopped: ["■", "bad", "the guard stopped the run"],
  interrupted: ["◐", "warn", "the run ended early; ragen resume continues it"],
  unreadable: ["!", "bad", "the database cannot be read"],
};

/** A run's state, shown by a sign and a word as well as by colour. */
export function State({ state, problem }) {
  const [sign, kind, why] = STATES[state] ?? ["?", "", ""];
  return html`<span class="number state ${kind}" title=${problem ?? why}>
    <span aria-hidden="true">${sign}</span> ${state}</span>`;
}

// ---- controls

/** Rows sorted by a column that the user chose: `{rows, sort: {key, descending}, onSort}`. */
export function useSorted(rows, columns) {
  const [sort, setSort] = useState(null);
  const onSort = (key) =>
    setSort(sort?.key !== key ? { key, descending: true }
      : sort.descending ? { key, descending: false } : null);
  const sorted = useMemo(() => {
    const column = sort && columns.find(({ key }) => key === sort.key);
    if (!column) return rows;
    const value = typeof column.sort === "function" ? column.sort : (row) => row[column.key];
    const sign = sort.descending ? -1 : 1;
    return rows.toSorted((a, b) => sign * ordered(value(a), value(b)));
  }, [rows, sort]);
  return { rows: sorted, sort, onSort };
}

function ordered(a, b) {
  if (a === b) return 0;
  if (!known(a)) return -1;
  if (!known(b)) return 1;
  return a < b ? -1 : 1;
}

/**
 * A table: `columns` of `{key, title, align, render(row), sort, hint}`. A column with `sort` (true,
 * or a function of the row) can be sorted by; with `onSort`, the page sorts. `selected` is the row
 * that the keyboard has selected, `onRow(row)` opens one, and `rowKey` names what identifies a row.
 */
export function Table({ columns, rows, onRow, selected, sort, onSort, rowKey = "id", label }) {
  const own = useSorted(rows, columns);
  const by = onSort ? { rows, sort, onSort } : own;
  const body = useRef(null);
  useEffect(() => {
    body.current?.querySelector(".selected")?.scrollIntoView({ block: "nearest" });
  }, [selected]);
  return html`<div class="scroll">
    <table aria-label=${label}>
      <thead><tr>${columns.map((column) => html`<${Head} column=${column} by=${by} />`)}</tr></thead>
      <tbody ref=${body}>${by.rows.map((row, index) => html`<${Row}
        key=${row[rowKey]} ...${{ row, columns, onRow }}
        selected=${index === selected} />`)}
      </tbody>
    </table>
  </div>`;
}

/** A row, which is drawn again only if its data, the columns or its selection changed. */
function Row({ row, columns, selected, onRow }) {
  return useMemo(() => html`<tr
    class=${[onRow && "opens", selected && "selected"].filter(Boolean).join(" ")}
    aria-current=${selected ? "true" : undefined}
    onClick=${onRow && ((event) => fromControl(event) || onRow(row))}>
    ${columns.map(({ key, align, render }) => html`<td class=${`${align ?? ""} col-${key}`}>
      ${render ? render(row) : row[key]}</td>`)}
  </tr>`, [row, columns, selected]);
}

const fromControl = (event) => event.target.closest("a, button, input, label, select") !== null;

function Head({ column, by }) {
  const { key, title, align = "", sort, hint } = column;
  if (!sort) return html`<th class=${align} title=${hint}>${title}</th>`;
  const on = by.sort?.key === key;
  const direction = !on ? "none" : by.sort.descending ? "descending" : "ascending";
  return html`<th class=${align} aria-sort=${direction} title=${hint}>
    <button class="bare" onClick=${() => by.onSort(key)}>${title}<span aria-hidden="true">${
      on ? (by.sort.descending ? " ↓" : " ↑") : ""}</span></button>
  </th>`;
}

/** The number of shown rows, and a button for the next page, which also loads by scrolling. */
export function Pager({ shown, total, more, loading, onMore }) {
  const button = useRef(null);
  useEffect(() => {
    if (!more || loading || !button.current) return undefined;
    const watch = new IntersectionObserver(([entry]) => entry.isIntersecting && onMore());
    watch.observe(button.current);
    return () => watch.disconnect();
  }, [more, loading, onMore]);
  return html`<p class="row pager">
    <span class="muted">${number(shown)}${known(total) && ` of ${number(total)}`} shown</span>
    ${more && html`<button ref=${button} disabled=${loading} onClick=${onMore}>
      ${loading ? "Loading …" : "Show more"}</button>`}
  </p>`;
}

/** What stands for an answer (`useApi`) that is missing or out of date: a note, or the error. */
export function Status({ data, error, reload, home, what = "Loading" }) {
  if (error) return html`<${Problem} ...${{ error, reload, home }} />`;
  return !data && html`<p class="muted" role="status">${what} …</p>`;
}

/** An error, with a button to try again and, with `home`, a way out. */
export function Problem({ error, reload, home }) {
  return html`<div class="panel problem" role="alert">
    <p><${Text} text=${error.message} /></p>
    ${home && link("runs") && html`<p><a href=${link("runs")}>All runs</a></p>`}
    <p>${error.status === 0 && html`<span class="muted">Trying again every two seconds. </span>`}
      <button onClick=${reload}>Try again</button></p>
  </div>`;
}

/** A choice of one: `options` of `{key: {title, hint}}`. */
export function Tabs({ options, value, onChange, label }) {
  return html`<div class="tabs" role="group" aria-label=${label}>
    ${Object.entries(options).map(([key, { title, hint }]) => html`<button key=${key}
      aria-pressed=${key === value ? "true" : "false"} title=${hint}
      onClick=${() => onChange(key)}>${title}</button>`)}
  </div>`;
}

/** A slider over `steps`, of which the one at index `at` is chosen. */
export function StepSlider({ steps, at, onStep }) {
  return html`<label>step
    <input type="range" min="0" max=${steps.length - 1} value=${at} disabled=${steps.length < 2}
      onInput=${(event) => onStep(steps[event.target.value])} /> <b>${steps[at]}</b></label>`;
}

/** A small label; with `onRemove` it has a button that removes it. */
export function Chip({ kind = "", title, onRemove, children }) {
  return html`<span class="chip ${kind}" title=${title}>${children}${onRemove && html`<button
    class="bare" aria-label="remove" onClick=${onRemove}>×</button>`}</span>`;
}

/** Links and keys to the previous and the next one of a kind. */
export function Neighbours({ of, previous, next }) {
  const ways = [
    { key: "[", sign: "‹", name: `previous ${of}`, href: previous },
    { key: "]", sign: "›", name: `next ${of}`, href: next },
  ];
  useKeys(
    Object.fromEntries(ways.map(({ key, href }) => [key, () => visit(href)])),
    Object.fromEntries(ways.map(({ key, name, href }) => [key, href && name])),
  );
  return html`<nav class="neighbours" aria-label="neighbouring ${of}s">${ways.map(
    ({ key, sign, name, href }) => html`<a href=${href} aria-label=${name} title="${name} (${key})"
      >${sign}</a>`)}</nav>`;
}

/** Numbers with their names: `[[name, number], …]`. */
export function Figures({ all }) {
  return html`<dl class="figures">${all.map(([name, value]) => html`<div key=${name}>
    <dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}
