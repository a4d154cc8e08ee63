// A collective as data: transfers [step, source, destination, chunk, reduce], and what every rank holds after each step.
// Ranks, chunks and steps count from 0 here, as in ddplab.schedule; the labels that readers see count chunks from 1.

/** One rule, two numbers: the chunk a rank sends first, relative to its own number, and the direction of the ring. */
export const VARIANTS = {
  article: { first: +1, direction: +1 },
  textbook: { first: 0, direction: +1 },
  nccl: { first: -1, direction: +1 },
  gloo: { first: +1, direction: -1 },
};

export const mod = (a, n) => ((a % n) + n) % n;

/** The ring all-reduce of n ranks: n - 1 steps that reduce, n - 1 that copy. */
export function ring(n, variant) {
  const { first, direction } = VARIANTS[variant];
  const transfers = [];
  for (let step = 0; step < 2 * (n - 1); step++)
    for (let r = 0; r < n; r++)
      transfers.push([step, r, mod(r + direction, n), mod(r + first - direction * step, n), step < n - 1]);
  return { name: variant, ranks: n, chunks: n, steps: 2 * (n - 1), reduce_steps: n - 1, direction, scatters: true, transfers };
}

// A rank that is counted more than once stands in the sum twice.
const sum = (a, b) => [...a, ...b].sort((x, y) => x - y).filter((r, i, all) => r !== all[i - 2]);

/** states(schedule)[step][rank][chunk]: the ranks whose gradients that chunk contains, sorted, after `step` steps. */
export function states({ ranks, chunks, steps, transfers }) {
  const all = [Array.from({ length: ranks }, (_, r) => Array.from({ length: chunks }, () => [r]))];
  for (let step = 0; step < steps; step++) {
    const before = all[step], after = before.map(row => row.slice());
    for (const [when, src, dst, chunk, reduce] of transfers)
      if (when === step) after[dst][chunk] = reduce ? sum(after[dst][chunk], before[src][chunk]) : before[src][chunk];
    all.push(after);
  }
  return all;
}

/** A chunk is finished when it holds every rank's contribution, each once. */
export const finished = (held, ranks) => held.length === ranks && held.every((r, i) => r === i);

export const letter = rank => String.fromCharCode(65 + rank);

/** The terms of a chunk: ["A1", "D1"], or ["SUM1"] when it is finished. */
export const terms = (held, chunk, ranks) => (finished(held, ranks) ? [`SUM${chunk + 1}`] : held.map(r => letter(r) + (chunk + 1)));

/** A long sum that runs without a gap along the ranks of a ring, by its ends, in the order it was added: ["E4", "A4"]; else null. */
export function span(held, chunk, ranks, direction) {
  const has = r => held.includes(mod(r, ranks)), starts = held.filter(r => !has(r - direction));
  if (!direction || held.length < 3 || held.length >= ranks || starts.length !== 1) return null;
  return [starts[0], mod(starts[0] + direction * (held.length - 1), ranks)].map(r => letter(r) + (chunk + 1));
}

/** Chunks that each host's ranks have sent to other hosts after `step` steps. */
export function sentOut({ ranks, ranks_per_host, transfers }, step) {
  const out = Array.from({ length: ranks / ranks_per_host }, () => 0), host = rank => Math.floor(rank / ranks_per_host);
  for (const [when, src, dst] of transfers) if (when < step && host(src) !== host(dst)) out[host(src)] += 1;
  return out;
}
