// Talks to the server: answers to questions (`get`, `useApi`), one command (`post`) and what
// happens meanwhile (`useEvents`). A shared file has no server: the answers are in the page.

import { useCallback, useEffect, useRef, useState } from "./vendor/preact-htm.js";

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
 * A question as a hook: `{data, error, loading, reload}`; with a path of null nothing is asked.
 * What is shown stays until the next answer is there; a server that is gone is asked again.
 */
export function useApi(path, params) {
  const { data, ...rest } = useApis(path === null ? [] : [[path, params]]);
  return { data: data?.[0] ?? null, ...rest };
}

/** Several questions `[[path, params], …]` as one: `data` has the answers in their order. */
export function useApis(questions) {
  const key = JSON.stringify(questions.map(([path, params]) => keyOf(path, params)));
  const [state, setState] = useState({ data: null, error: null, loading: questions.length > 0 });
  const asking = useRef({ controller: null, again: false });
  const ask = useCallback(async () => {
    const controller = (asking.current.controller = new AbortController());
    setState((old) => ({ ...old, loading: true }));
    let next;
    try {
      const { signal } = controller;
      const data = await Promise.all(questions.map(([path, params]) => get(path, params, signal)));
      next = () => ({ data, error: null, loading: false });
    } catch (error) {
      if (!controller.signal.aborted && !(error instanceof ApiError)) throw error;
      next = (old) => ({ data: old.data, error, loading: false });
    }
    if (controller.signal.aborted) return;
    asking.current.controller = null;
    setState(next);
    if (asking.current.again) reload();
  }, [key]);
  // A run that steps faster than it is read must not abort each answer for the next.
  const reload = useCallback(() => {
    asking.current.again = asking.current.controller !== null;
    if (!asking.current.again) ask();
  }, [ask]);
  useEffect(() => {
    if (questions.length) ask();
    else setState({ data: null, error: null, loading: false });
    return () => {
      asking.current.controller?.abort();
      asking.current = { controller: null, again: false };
    };
  }, [ask]);
  useEffect(() => {
    if (state.error?.status !== 0) return undefined;
    const timer = setTimeout(reload, RETRY_MS);
    return () => clearTimeout(timer);
  }, [state.error, reload]);
  return { ...state, reload };
}

/**
 * Listen to what happens: with `{run}` to its `step`, `alarm` and `end`, with `{}` to `runs`;
 * `params` of null listens to nothing. `again` is called when a lost connection is back: what was
 * missed meanwhile must be asked for. A hidden page does not listen, because a browser opens only
 * six connections to one server, and a researcher more than six tabs.
 */
export function useEvents(params, handlers) {
  const latest = useRef(handlers);
  latest.current = handlers;
  const key = params && keyOf("/api/events", params);
  useEffect(() => {
    if (shared || key === null) return undefined;
    let source = null;
    let missed = false;
    const close = () => {
      source?.close();
      source = null;
      missed = true;
    };
    const open = () => {
      source = new EventSource(key);
      source.onerror = () => (missed = true);
      source.onopen = () => {
        if (missed) latest.current.again?.();
        missed = false;
      };
      for (const name of ["step", "alarm", "runs", "end"]) {
        source.addEventListener(name, (event) => {
          if (name === "end") close();
          latest.current[name]?.(event.data ? JSON.parse(event.data) : null);
        });
      }
    };
    const turn = () => (document.hidden ? close() : source || open());
    document.addEventListener("visibilitychange", turn);
    turn();
    return () => {
      document.removeEventListener("visibilitychange", turn);
      close();
    };
  }, [key]);
}
