// Talks to the server: answers to questions (`get`, `useApi`), one command (`post`) and what
// happens meanwhile (`useEvents`). A shared file has no server: the answers are in the page.

import { useCallback, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const RETRY_MS = 2000; // A server that is gone is usually being restarted by hand.

const embedded = document.getElementById("ragen-data");
const snapshot = embedded && JSON.parse(embedded.textContent);

/** Whether this page is a shared file: nothing can be asked but what it holds. */
export const shared = snapshot !== null;

/** The address with which a shared file opens. */
export const start = embedded?.dataset.start ?? "";

const pages = new Set(embedded?.dataset.pages.split(" "));

/** Whether there is such a page: a shared file holds a few, and of groups one; a server has all. */
export function reachable(page, address, { run }, { attempt, step, phase, group }) {
  if (!shared) return true;
  const question = keyOf("/api/group", { run, attempt, step, phase, group });
  return pages.has(address) && (page !== "group" || Object.hasOwn(snapshot, question));
}

/** What went wrong, in a line for people; `status` is 0 where the server did not answer at all. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/**
 * The address of a question: the path and its parameters sorted by name, without the absent ones.
 * A shared file keeps its answers under it (`ragen/viewer/share.py` makes the same).
 */
export function keyOf(path, params = {}) {
  const pairs = Object.keys(params)
    .filter((name) => params[name] !== null && params[name] !== undefined && params[name] !== "")
    .sort()
    .map((name) => `${encodeURIComponent(name)}=${encodeURIComponent(params[name])}`);
  return pairs.length ? `${path}?${pairs.join("&")}` : path;
}

/** The answer to a question; throws an `ApiError`, or an `AbortError` where `signal` ended it. */
export async function get(path, params, signal) {
  if (shared) return held(path, params);
  return answer(keyOf(path, params), { signal });
}

/** An answer that the shared file holds; of curves it holds all, whichever are asked for. */
function held(path, params) {
  const key = keyOf(path, path === "/api/metrics" ? { run: params.run } : params);
  if (Object.hasOwn(snapshot, key)) return snapshot[key];
  throw new ApiError("This is not part of the shared file.", 404);
}

/** Send a command; throws an `ApiError`. */
export async function post(path, body) {
  const headers = { "Content-Type": "application/json", "X-Ragen": "1" };
  return answer(path, { method: "POST", headers, body: JSON.stringify(body) });
}

async function answer(url, options) {
  let response;
  try {
    response = await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is `ragen view` still running?", 0);
  }
  const data = await response.json().catch((error) => {
    if (error.name === "AbortError") throw error;
    const { status } = response;
    throw new ApiError(`The server's answer cannot be read (status ${status}).`, status);
  });
  // Only the status tells: an episode that failed has an `error` of its own.
  if (!response.ok) throw new ApiError(data.error, response.status);
  return data;
}

/**
 * A question as a hook: `{data, error, reload}`; with a path of null nothing is asked. What is
 * shown stays while the same question is asked again; of another question nothing stays, because a
 * page has its name above the answer. With `keep` the former answer stands until the next one is
 * there: for a picture under a slider, which would else flicker.
 */
export function useApi(path, params, { keep = false } = {}) {
  const { data, ...rest } = useApis(path === null ? [] : [[path, params]]);
  const last = useRef(null);
  if (data || rest.error) last.current = data;
  const kept = keep && path !== null ? last.current : null;
  return { data: data?.[0] ?? kept?.[0] ?? null, ...rest };
}

/** Several questions `[[path, params], …]` as one: `data` has all answers, in order, or none. */
export function useApis(questions) {
  const { answers, errors, reload } = useAnswers(questions);
  const data = questions.length && answers.every(Boolean) ? answers : null;
  return { data, error: errors.find(Boolean) ?? null, reload };
}

const NOTHING = { key: null, keys: [], answers: [], errors: [] };

/**
 * Several questions side by side: `{answers, errors, reload}` in their order, null where there is
 * none. An answer stays while its question is asked; a server that is gone is asked again.
 */
export function useAnswers(questions) {
  const keys = questions.map(([path, params]) => keyOf(path, params));
  const key = JSON.stringify(keys);
  const [state, setState] = useState(NOTHING);
  const asking = useRef({ controller: null, again: false });
  const ask = useCallback(async () => {
    const controller = (asking.current.controller = new AbortController());
    const asked = questions.map(([path, params]) => get(path, params, controller.signal));
    const results = await Promise.allSettled(asked);
    if (controller.signal.aborted) return;
    asking.current.controller = null;
    const errors = results.map(({ reason }) => reason ?? null);
    const defect = errors.find((error) => error && !(error instanceof ApiError));
    if (defect) throw defect;
    setState((old) => {
      const before = known(old, keys);
      return { key, keys, answers: results.map(({ value }, i) => value ?? before[i]), errors };
    });
    if (asking.current.again) reload();
  }, [key]);
  // A run that steps faster than it is read must not abort each answer for the next.
  const reload = useCallback(() => {
    asking.current.again = asking.current.controller !== null;
    if (!asking.current.again) ask();
  }, [ask]);
  useEffect(() => {
    if (questions.length) ask();
    return () => {
      asking.current.controller?.abort();
      asking.current = { controller: null, again: false };
    };
  }, [ask]);
  const same = state.key === key;
  const answers = useMemo(() => (same ? state.answers : known(state, keys)), [state, key]);
  const errors = same ? state.errors : keys.map(() => null);
  useRetry(errors.find((error) => error?.status === 0) ?? null, reload);
  return { answers, errors, reload };
}

/** The answers that a state has to the questions of `keys`, null where it has none. */
function known(state, keys) {
  return keys.map((key) => state.answers[state.keys.indexOf(key)] ?? null);
}

/** Ask again, after a while, where `error` is that the server did not answer. */
export function useRetry(error, reload) {
  useEffect(() => {
    if (error?.status !== 0) return undefined;
    const timer = setTimeout(reload, RETRY_MS);
    return () => clearTimeout(timer);
  }, [error, reload]);
}

/**
 * Listen to what happens: with `{run}` to its `step` and `alarm`, to the `end` of its process and to
 * the `begin` of one that resumes it, with `{}` to `runs`; with `params` of null to nothing. `again`
 * is called when a lost connection is back: what was missed meanwhile must be asked for.
 */
export function useEvents(params, handlers) {
  const latest = useRef(handlers);
  latest.current = handlers;
  const key = params && keyOf("/api/events", params);
  useEffect(() => {
    if (shared || key === null) return undefined;
    const hear = (name, said) => latest.current[name]?.(said);
    if (!streams.has(key)) streams.set(key, streamOf(key));
    streams.get(key).add(hear);
    return () => streams.get(key).leave(hear) && streams.delete(key);
  }, [key]);
}

const streams = new Map(); // By address: however many parts of a page listen, one connection.

/**
 * A connection that is open while somebody listens. A hidden page does not, because a browser opens
 * only six connections to one server, and a researcher more than six tabs.
 */
function streamOf(address) {
  const hearers = new Set();
  const tell = (name, said = null) => hearers.forEach((hear) => hear(name, said));
  let source = null;
  let missed = false;
  const close = () => {
    source?.close();
    source = null;
    missed = true;
  };
  const open = () => {
    source = new EventSource(address);
    source.onerror = () => (missed = true);
    source.onopen = () => {
      if (missed) tell("again");
      missed = false;
    };
    for (const name of ["begin", "step", "alarm", "end", "runs"]) {
      source.addEventListener(name, ({ data }) => tell(name, JSON.parse(data)));
    }
  };
  const turn = () => (document.hidden ? close() : source || open());
  document.addEventListener("visibilitychange", turn);
  turn();
  return {
    add: (hear) => hearers.add(hear),
    /** Whether that was the last one, with whom the connection ends. */
    leave(hear) {
      hearers.delete(hear);
      if (hearers.size) return false;
      document.removeEventListener("visibilitychange", turn);
      close();
      return true;
    },
  };
}
