// The formats of numbers, shares and times.

/** Whether a value is there: neither null nor undefined. */
export const known = (x) => x !== null && x !== undefined;

/** The number between `low` and `high` that is nearest to `x`. */
export const clamp = (x, low, high) => Math.min(high, Math.max(low, x));

/** The index of the value in `all` that is nearest to `x`. */
export function nearest(all, x) {
  const distance = (i) => Math.abs(all[i] - x);
  return all.reduce((best, _, i) => (distance(i) < distance(best) ? i : best), 0);
}

/** A share in per cent: 0.5 → "50.0 %". */
export function percent(x, digits = 1) {
  return known(x) ? `${(100 * x).toFixed(digits)} %` : "–";
}

/** A number with three significant digits, large ones grouped: 0.01234 → "0.0123". */
export function number(x) {
  if (!known(x)) return "–";
  if (Number.isInteger(x)) return x.toLocaleString("en-GB").replace("-", "−");
  const size = Math.abs(x);
  if (size >= 1e5 || size < 1e-3) return x.toExponential(1).replace("e+", "e").replace("-", "−");
  if (size >= 1000) return Math.round(x).toLocaleString("en-GB");
  return String(Number(x.toPrecision(3))).replace("-", "−");
}

/** Seconds as a duration: 75 → "1 min 15 s". */
export function clock(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 59.5) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  if (h >= 48) return `${Math.floor(h / 24)} d ${h % 24} h`;
  return h ? `${h} h ${m} min` : s ? `${m} min ${s} s` : `${m} min`;
}

/** A share in per cent with three digits: 0.00021 → "0.021 %". */
export function share(x) {
  return known(x) ? `${number(100 * x)} %` : "–";
}

/** A difference of shares in percentage points, with its sign: 0.1 → "+10.0". */
export function points(x, digits = 1) {
  if (!known(x)) return "–";
  return `${x > 0 ? "+" : x < 0 ? "−" : "±"}${Math.abs(100 * x).toFixed(digits)}`;
}

/** The time since a moment (unix seconds): "3 min ago". */
export function ago(time) {
  const seconds = Math.max(0, Date.now() / 1000 - time);
  if (seconds < 60) return "now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

/** A time (unix seconds) in the local time zone: "2026-11-21 18:05:09". */
export function moment(time) {
  return new Date(1000 * time).toLocaleString("sv-SE"); // Sweden writes it in this order.
}

/** A count and its noun: (1, "alarm") → "1 alarm". */
export function plural(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}
