// Communication with the server: requests (`get`, `useApi`), one command (`post`) and news
// (`useEvents`). A shared file has no server: the answers are in the page.

import { known } from "./numbers.js";
import { useCallback, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const RETRY_MS = 2000; // A server that is gone is usually being restarted.

const embedded = document.getElementById("ragen-data");
const snapshot = embedded && JSON.parse(embedded.textContent);

/** Whether this page is a shared file, which has only the answers that it holds. */
export const shared = snapshot !== null;

/** The address at which a shared file opens. */
export const start = embedded?.dataset.start ?? "";

const pages = new Set(embedded?.dataset.pages.split(" "));

/** Whether a page exists: a server has all, a shared file has some, and one group at most. */
export function reachable(page, address, { run }, { attempt, step, phase, group }) {
  if (!shared) return true;
  const question = keyOf("/api/group", { run, attempt, step, phase, group });
  return pages.has(address) && (page !== "group" || Object.hasOwn(snapshot, question));
}

/** An error with one line for users; `status` is 0 if the server did not answer. */
const failure = (message, status) => Object.assign(new Error(message), { status });

/** The parameters that are not absent, as pairs. */
export function given(params) {
  return Object.entries(params).filter(([, value]) => known(value) && value !== "");
}

/**
 * The address of a request: the path and its parameters, sorted by name, without absent ones. It is
 * the key of an answer in a shared file (`ragen/viewer/share.py` makes the same keys).
 */
function keyOf(path, params = {}) {
  const pairs = given(params).sort().map((pair) => pair.map(encodeURIComponent).join("="));
  return pairs.length ? `${path}?${pairs.join("&")}` : path;
}

/** The answer to a request, or a `failure`. A shared file holds all curves under one key. */
export async function get(path, params, signal) {
  if (!shared) return answer(keyOf(path, params), { signal });
  const key = keyOf(path, path === "/api/metrics" ? { run: params.run } : params);
  if (Object.hasOwn(snapshot, key)) return snapshot[key];
  throw failure("This is not part of the shared file.", 404);
}

/** Where the picture with a hash is, in a run. */
export function pictureSource(run, hash) {
  const key = keyOf("/api/picture", { run, hash });
  return shared ? snapshot[key] : key;
}

/** Send a command; the answer, or a `failure`. */
export async function post(path, body) {
  const headers = { "Content-Type": "application/json", "X-Ragen": "1" };
  return answer(path, { method: "POST", headers, body: JSON.stringify(body) });
}

async function answer(url, options) {
  const response = await fetch(url, options).catch(() => {
    throw failure("The server does not answer. Is `ragen view` still running?", 0);
  });
  const { ok, status } = response;
  const data = await response.json().catch(() => {
    throw failure(`The server's answer cannot be read (status ${status}).`, status);
  });
  // Only the status is decisive: a failed episode has an `error`, too.
  if (!ok) throw failure(data.error, status);
  return data;
}

/**
 * A request as a hook: `{data, error, reload}`; a path of null requests nothing. While the same
 * request is repeated, its answer stays. For another request nothing stays, because old numbers must
 * not appear under a new name; except with `keep`, for pictures under a slider, which would flicker.
 */
export function useApi(path, params, { keep = false } = {}) {
  const { data, ...rest } = useApis(path === null ? [] : [[path, params]]);
  const last = useRef(null);
  if (data || rest.error) last.current = data;
  const kept = keep && path !== null ? last.current : null;
  return { data: data?.[0] ?? kept?.[0] ?? null, ...rest };
}

/** Several requests `[[path, params], …]` as one: `data` has all answers, in order, or none. */
export function useApis(questions) {
  const { answers, errors, reload } = useAnswers(questions);
  const data = questions.length && answers.every(Boolean) ? answers : null;
  return { data, error: errors.find(Boolean) ?? null, reload };
}

/**
 * Several requests in parallel: `{answers, errors, reload}` in their order, with null for missing
 * ones. An answer stays while its request is repeated; a server that is gone is retried.
 */
export function useAnswers(questions) {
  const keys = questions.map((question) => keyOf(...question));
  const key = JSON.stringify(keys);
  const [state, setState] = useState({ key: null, found: {}, errors: [] });
  const asking = useRef({ controller: null, again: false });
  const ask = useCallback(async () => {
    const controller = (asking.current.controller = new AbortController());
    const asked = questions.map(([path, params]) => get(path, params, controller.signal));
    const results = await Promise.allSettled(asked);
    if (controller.signal.aborted) return;
    asking.current.controller = null;
    const errors = results.map(({ reason }) => reason ?? null);
    setState((old) => {
      const pairs = results.map(({ value }, i) => [keys[i], value ?? old.found[keys[i]]]);
      return { key, found: Object.fromEntries(pairs), errors };
    });
    if (asking.current.again) reload();
  }, [key]);
  // If a run steps faster than answers arrive, an answer must not be aborted for the next one.
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
  const answers = useMemo(() => keys.map((each) => state.found[each] ?? null), [state, key]);
  const errors = state.key === key ? state.errors : keys.map(() => null);
  useRetry(errors.find((error) => error?.status === 0) ?? null, reload);
  return { answers, errors, reload };
}

/** Retry after a while if `error` says that the server did not answer. */
export function useRetry(error, reload) {
  useEffect(() => {
    if (error?.status !== 0) return undefined;
    const timer = setTimeout(reload, RETRY_MS);
    return () => clearTimeout(timer);
  }, [error, reload]);
}

/**
 * Listen to news: with `{run}` to its `step` and `alarm`, to the `end` of its process and to the `begin`
 * of one that resumes it; with `{}` to `runs`. `again` is called when a lost connection is back,
 * because news may have been missed.
 */
export function useEvents(params, handlers) {
  const latest = useRef(handlers);
  latest.current = handlers;
  const key = keyOf("/api/events", params);
  useEffect(() => {
    if (shared) return undefined;
    const hear = (name) => latest.current[name]?.();
    if (!streams.has(key)) streams.set(key, streamOf(key));
    const { hearers, end } = streams.get(key);
    hearers.add(hear);
    return () => {
      hearers.delete(hear);
      if (hearers.size) return;
      end();
      streams.delete(key);
    };
  }, [key]);
}

/** A request that is repeated whenever its run, or any if it names another, has news. */
export function useLive(path, params) {
  const answer = useApi(path, params);
  const { reload } = answer;
  const run = params.other ? undefined : params.run;
  useEvents({ run }, { step: reload, end: reload, runs: reload, again: reload });
  return answer;
}

const streams = new Map(); // By address: one connection for all parts of a page.

/**
 * A connection that is open while a part of the page listens and the page is visible: a browser opens
 * at most six connections to one server, and users open more than six tabs.
 */
function streamOf(address) {
  const hearers = new Set();
  const tell = (name) => hearers.forEach((hear) => hear(name));
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
      source.addEventListener(name, () => tell(name));
    }
  };
  const turn = () => (document.hidden ? close() : source || open());
  document.addEventListener("visibilitychange", turn);
  turn();
  const end = () => {
    document.removeEventListener("visibilitychange", turn);
    close();
  };
  return { hearers, end };
}
