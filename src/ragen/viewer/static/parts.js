// The components that all pages share.

import { number, percent } from "./numbers.js";
import { Component, html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const CUT = 20000; // Characters of a text that are shown at once; a megabyte would block the page.

const SPARK = 100; // Points of a small curve, which is about as many pixels wide.

/** Mark the page as completely drawn; tests and screenshots wait for this. */
export function ready() {
  document.body.dataset.ready = "1";
}

/** Call `ready` once `done` is true. */
export function useReady(done) {
  useEffect(() => {
    if (done) ready();
  }, [done]);
}

/** The browser's storage; null if it is not allowed, as in the frame of a mail program. */
const memory = (() => {
  try {
    return window.localStorage;
  } catch {
    return null; // Even the access is forbidden.
  }
})();

/** A value, such as the theme, that is kept between visits if the browser has storage. */
export function useStored(name, initial) {
  const [value, setValue] = useState(() => memory?.getItem(name) ?? initial);
  const set = (next) => {
    setValue(next);
    memory?.setItem(name, next);
  };
  return [value, set];
}

// ---- text of models

// Characters that are invisible or change the order of visible text: control characters except tab and
// newline, soft hyphen, zero-width and bidi marks, invisible operators, tags.
const HIDDEN = new RegExp(
  [
    "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u115f\\u1160\\u180e\\u200b-\\u200f",
    "\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]",
  ].join(""),
  "gu",
);

/** A text in pieces `{text, hidden}`; a hidden piece is one character to be made visible. */
export function pieces(text) {
  const found = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > end) found.push({ text: text.slice(end, match.index), hidden: false });
    found.push({ text: match[0], hidden: true });
    end = match.index + match[0].length;
  }
  if (end < text.length) found.push({ text: text.slice(end), hidden: false });
  return found;
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
  return html`<span class="text"
    >${part.map((piece) =>
      piece.hidden ? html`<span class="mark">${mark(piece.text)}</span>` : piece.text,
    )}${rest > 0 &&
    html`… <button class="quiet" onClick=${() => setShown(shown + CUT)}>
        show more (${number(rest)} characters left)
      </button>`}</span
  >`;
}

// ---- pictures

const inside = (x) => Math.min(1, Math.max(0, x));

const known = (x) => x !== null && x !== undefined;

/**
 * An estimate with its interval, on a line from `min` to `max`. The range from `random` to `optimal`
 * (the baselines: random and optimal play) is shaded. `zero` draws a line at 0, for differences.
 */
export function Interval({
  value, low, high, random, optimal, min = 0, max = 1, zero, text = true, format = percent,
}) {
  if (!known(value)) return html`<span class="muted">–</span>`;
  const at = (x) => `${(100 * inside((x - min) / (max - min))).toFixed(2)}%`;
  const span = (a, b) => ({ left: at(a), width: `calc(${at(b)} - ${at(a)})` });
  const bounds = known(low) ? ` [${format(low)}, ${format(high)}]` : "";
  const label =
    `${format(value)}${bounds}` +
    (known(random) ? `, random play ${format(random)}` : "") +
    (known(optimal) ? `, optimal play ${format(optimal)}` : "");
  const ticks = [zero && 0, random, optimal].filter((x) => known(x) && x !== false);
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
export function Spark({ values: all, min, max, label = "curve" }) {
  const values = thinned(all, SPARK);
  const known = values.filter((y) => y !== null);
  if (known.length < 2) return html`<span class="spark"></span>`;
  const low = min ?? Math.min(...known);
  const high = max ?? Math.max(...known);
  const y = (value) => 19 - (18 * (value - low)) / (high - low || 1);
  const points = values
    .map((value, i) => value !== null && `${(100 * i) / (values.length - 1)},${y(value)}`)
    .filter(Boolean)
    .join(" ");
  return html`<svg
    class="spark" viewBox="0 0 100 20" preserveAspectRatio="none" role="img" aria-label=${label}
  >
    <polyline points=${points} vector-effect="non-scaling-stroke" />
  </svg>`;
}

/** At most `count` of the values, evenly spaced, including the last one. */
function thinned(values, count) {
  const every = Math.ceil(values.length / count);
  return values.filter((_, i) => (values.length - 1 - i) % every === 0);
}

const STATES = {
  running: ["●", "", "a process is writing this run"],
  finished: ["✓", "good", "the run reached its last step"],
  stopped: ["■", "bad", "the guard stopped the run"],
  interrupted: ["◐", "warn", "the run ended early; ragen resume continues it"],
  unreadable: ["!", "bad", "the database cannot be read"],
};

/** A run's state, shown by a sign and a word as well as by colour. */
export function State({ state, problem }) {
  const [sign, kind, why] = STATES[state] ?? ["?", "", ""];
  return html`<span class="state state-${state} ${kind}" title=${problem ?? why}
    ><span aria-hidden="true">${sign}</span> ${state}</span
  >`;
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
    return [...rows].sort((a, b) => sign * ordered(value(a), value(b)));
  }, [rows, sort]);
  return { rows: sorted, sort, onSort };
}

function ordered(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return a < b ? -1 : 1;
}

/**
 * A table: `columns` of `{key, title, align, render(row, index), sort, hint}`. A column with `sort`
 * (true, or a function of the row) can be sorted by; with `onSort`, the page sorts. `selected` is the
 * row that the keyboard has selected, `onRow(row, index)` opens one.
 */
export function Table({ columns, rows, onRow, selected, sort, onSort, rowKey, label }) {
  const own = useSorted(rows, columns);
  const by = onSort ? { rows, sort, onSort } : own;
  const body = useRef(null);
  useEffect(() => {
    body.current?.querySelector(".selected")?.scrollIntoView({ block: "nearest" });
  }, [selected]);
  return html`<div class="table">
    <table aria-label=${label}>
      <thead>
        <tr>
          ${columns.map((column) => html`<${Head} column=${column} by=${by} />`)}
        </tr>
      </thead>
      <tbody ref=${body}>
        ${by.rows.map(
          (row, index) => html`<${Row}
            key=${rowKey ? rowKey(row) : (row.id ?? index)} ...${{ row, index, columns, onRow }}
            selected=${index === selected}
          />`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** A row is drawn again only if its data, the columns or its selection changed. */
class Row extends Component {
  shouldComponentUpdate(next) {
    return ["row", "index", "columns", "selected"].some((name) => next[name] !== this.props[name]);
  }

  render({ row, index, columns, selected, onRow }) {
    return html`<tr
      class=${[onRow && "opens", selected && "selected"].filter(Boolean).join(" ")}
      aria-current=${selected ? "true" : undefined}
      onClick=${onRow && ((event) => fromControl(event) || onRow(row, index))}
    >
      ${columns.map(
        (column) => html`<td class=${`${column.align ?? ""} col-${column.key}`}>
          ${column.render ? column.render(row, index) : row[column.key]}
        </td>`,
      )}
    </tr>`;
  }
}

const fromControl = (event) => event.target.closest("a, button, input, label, select") !== null;

function Head({ column, by }) {
  const { key, title, align = "", sort, hint } = column;
  if (!sort) return html`<th class=${align} title=${hint}>${title}</th>`;
  const on = by.sort?.key === key;
  const direction = !on ? "none" : by.sort.descending ? "descending" : "ascending";
  return html`<th class=${align} aria-sort=${direction} title=${hint}>
    <button class="sort" onClick=${() => by.onSort(key)}>
      ${title}<span aria-hidden="true">${on ? (by.sort.descending ? " ↓" : " ↑") : ""}</span>
    </button>
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
  const of = total === null || total === undefined ? "" : ` of ${number(total)}`;
  return html`<p class="pager">
    <span class="muted">${number(shown)}${of} shown</span>
    ${more &&
    html`<button ref=${button} disabled=${loading} onClick=${onMore}>
      ${loading ? "Loading …" : "Show more"}
    </button>`}
  </p>`;
}

/** A note that something is loading. */
export function Loading({ what = "Loading" }) {
  return html`<p class="loading" role="status">${what} …</p>`;
}

/** An error, with a button to try again. */
export function Problem({ error, reload, children }) {
  const text = typeof error === "string" ? error : error.message;
  return html`<div class="problem" role="alert">
    <p><${Text} text=${text} /></p>
    ${children}
    <p>
      ${error.status === 0 && html`<span class="muted">Trying again every two seconds. </span>`}
      ${reload && html`<button onClick=${reload}>Try again</button>`}
    </p>
  </div>`;
}

/** A choice of one: `tabs` of `{key, title}`. */
export function Tabs({ tabs, value, onChange, label }) {
  return html`<div class="tabs" role="group" aria-label=${label}>
    ${tabs.map(
      ({ key, title, hint }) => html`<button
        key=${key} aria-pressed=${key === value ? "true" : "false"} title=${hint}
        onClick=${() => onChange(key)}
      >
        ${title}
      </button>`,
    )}
  </div>`;
}

/** A small label; with `onRemove` it has a button that removes it. */
export function Chip({ kind = "", title, onRemove, children }) {
  return html`<span class="chip ${kind}" title=${title}
    >${children}${onRemove &&
    html`<button class="quiet" aria-label="remove" onClick=${onRemove}>×</button>`}</span
  >`;
}
