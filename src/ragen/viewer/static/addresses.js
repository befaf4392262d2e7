// The addresses of pages, and lists of runs in one parameter.

import { given, reachable } from "./api.js";
import { known } from "./numbers.js";

/**
 * The address of a page: `link("episode", {run, id}, {turn: 2})`. Absent values are left out. It is
 * undefined for a page that a shared file does not hold: an `<a>` without href is plain text.
 */
export function link(page, params = {}, query = {}) {
  const path = page === "runs" ? [] : [page, params.run, params.id].filter(known);
  const pairs = given(query).map(([name, value]) => `${name}=${readable(value)}`);
  const address = `#/${path.map(encodeURIComponent).join("/")}`;
  if (!reachable(page, address, params, query)) return undefined;
  return pairs.length ? `${address}?${pairs.join("&")}` : address;
}

/** Go to a page, if it exists. */
export function visit(address) {
  if (address) location.hash = address;
}

function readable(value) {
  return encodeURIComponent(value).replaceAll("%2F", "/").replaceAll("%2C", ",");
}

/** Several runs in one parameter, separated by commas; a comma in a name becomes %2C. */
export function joinRuns(runs) {
  return runs.map((run) => run.replaceAll("%", "%25").replaceAll(",", "%2C")).join(",");
}

/** The runs in a parameter of `joinRuns`. */
export function splitRuns(text) {
  const names = (text ?? "").split(",").filter(Boolean);
  return names.map((name) => name.replaceAll("%2C", ",").replaceAll("%25", "%"));
}
