// The words that two thoughts share: the longest runs of words that occur in both, in the same order,
// by the algorithm of Ratcliff and Obershelp (Dr. Dobb's Journal, July 1988): find the longest run,
// then do the same to its left and to its right. Pure functions on lists of words.

/** The shortest shared run, in words: two in a row are often chance. */
export const MIN_RUN = 3;

/** Words of a text that are compared: the time grows with their square. */
export const MAX_WORDS = 1000;

/**
 * The shared runs of two lists of words, in order, without overlap: `[{a, b, length}]`, where `a` and
 * `b` are the indices at which a run begins. White space around words is ignored.
 */
export function sharedRuns(ones, others) {
  const numbers = new Map(); // Equal words get equal numbers, which are faster to compare.
  const numbered = (word) => {
    const plain = word.trim();
    if (!numbers.has(plain)) numbers.set(plain, numbers.size);
    return numbers.get(plain);
  };
  const [a, b] = [ones, others].map((words) =>
    Uint32Array.from(words.slice(0, MAX_WORDS), numbered),
  );
  const runs = [];
  const look = (fromA, toA, fromB, toB) => {
    if (Math.min(toA - fromA, toB - fromB) < MIN_RUN) return;
    const run = longestRun(a, b, fromA, toA, fromB, toB);
    if (run.length < MIN_RUN) return;
    look(fromA, run.a, fromB, run.b);
    runs.push(run);
    look(run.a + run.length, toA, run.b + run.length, toB);
  };
  look(0, a.length, 0, b.length);
  return runs;
}

/** The longest run of words in both ranges; of several, the one that ends first in `a`. */
function longestRun(a, b, fromA, toA, fromB, toB) {
  let best = { a: fromA, b: fromB, length: 0 };
  const lengths = new Uint16Array(toB - fromB + 1); // Of the run that ends at i, before word j.
  for (let i = fromA; i < toA; i += 1) {
    for (let j = toB - 1; j >= fromB; j -= 1) {
      const length = a[i] === b[j] ? lengths[j - fromB] + 1 : 0;
      lengths[j - fromB + 1] = length;
      if (length > best.length) best = { a: i - length + 1, b: j - length + 1, length };
    }
  }
  return best;
}

/** The share of the words of two texts (`joined`) that belong to `runs`; null without words. */
export function sharedShare(runs, one, other) {
  const words = one.count + other.count;
  return words ? (2 * runs.reduce((sum, { length }) => sum + length, 0)) / words : null;
}

/**
 * Several texts, such as an episode's thoughts, as one list of words, each with the white space
 * after it. `starts[k]` is the index where text k begins; `count` is the number of words that are
 * compared. A word that occurs only on this `side` separates the texts: no run crosses a border.
 */
export function joined(texts, side) {
  const words = [];
  const starts = texts.map((text, index) => {
    if (index > 0) words.push(`\u0000${side}${index}`);
    const start = words.length;
    words.push(...(text.trim().match(/\S+\s*/g) ?? []));
    return start;
  });
  const borders = starts.slice(1).filter((start) => start <= MAX_WORDS).length;
  return { words, starts, count: Math.min(words.length, MAX_WORDS) - borders };
}
