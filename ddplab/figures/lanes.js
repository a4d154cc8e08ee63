// One DDP step, the same model as ddplab/timeline.py and ddplab/lanes.py, so that a slider answers without Python.
const MIB = 2 ** 20;

/** Indices of the gradients in each bucket; gradients: [[elements, bytes of one, ready, dtype], ...] in the order of
 *  readiness. cap in MiB; null is torch's default, 25 and 1 for the first. */
export function fillBuckets(gradients, cap) {
  const full = [], filling = new Map(), room = new Map(), limit = Math.trunc((cap ?? 25) * MIB);
  gradients.forEach(([elements, item, , dtype], i) => {
    if (!filling.has(dtype)) filling.set(dtype, []);
    filling.get(dtype).push(i);
    room.set(dtype, (room.get(dtype) ?? (cap === null ? MIB : limit)) - elements * item);
    if (room.get(dtype) <= 0) { full.push(filling.get(dtype)); filling.delete(dtype); room.set(dtype, limit); }
  });
  return [...full, ...filling.values()];
}

/** The buckets of the first iteration: one a dtype, in the order of the module's parameters (positions[i]). */
export function firstBuckets(gradients, positions) {
  const filling = new Map(), order = [...gradients.keys()].sort((a, b) => positions[a] - positions[b]);
  for (const i of order) filling.set(gradients[i][3], [...(filling.get(gradients[i][3]) || []), i]);
  return [...filling.values()].reverse();
}

/** Seconds of a ring all-reduce of `nbytes` among n ranks. */
export const ringSeconds = (n, nbytes, { latency_s, payload_Bps }) => (nbytes ? 2 * (n - 1) * (latency_s + nbytes / (n * payload_Bps)) : 0);

function computeWork(gradients, backward, buckets) {
  const work = [], of = [], missing = buckets.map(b => b.members.length);
  buckets.forEach((b, i) => b.members.forEach(g => { of[g] = i; }));
  let turn = 0, before = 0;
  gradients.forEach(([, , ready], g) => {
    const b = of[g];
    missing[b] -= 1;
    work.push([ready - before, missing[b] ? -1 : b, -1]);
    before = ready;
    for (; turn < buckets.length && missing[turn] === 0; turn += 1) work.push([buckets[turn].encode, -1, turn]);
  });
  work.push([backward - before, -1, -1]);
  return work;
}

/** When each bucket is ready, starts and ends, and when backward's own work ends; seconds since backward began. */
function runLanes(gradients, backward, buckets, slowdown, lanes) {
  const out = { ready: [], start: [], end: [], compute_end: 0 }, work = computeWork(gradients, backward, buckets), waiting = [];
  let moving = [], now = 0, left = work[0][0];
  while (work.length || waiting.length || moving.length) {
    while (waiting.length && moving.length < lanes) {
      const b = waiting.shift();
      out.start[b] = now;
      moving.push([b, buckets[b].transfer, buckets[b].decode]);
    }
    const sharing = moving.filter(m => m[1] > 0).length, speed = moving.length ? 1 / slowdown : 1;
    const ends = moving.map(m => (m[1] > 0 ? m[1] * sharing : m[2]));
    const step = Math.min(...ends, ...(work.length ? [left / speed] : []));
    now += step;
    moving.forEach((m, i) => {
      const part = m[1] > 0 ? 1 : 2;
      m[part] = ends[i] === step ? 0 : m[part] - step / (part === 1 ? sharing : 1);
    });
    for (const m of moving) if (m[1] <= 0 && m[2] <= 0) out.end[m[0]] = now;
    moving = moving.filter(m => m[1] > 0 || m[2] > 0);
    if (work.length && left / speed === step) {
      const [, filled, leaving] = work.shift();
      if (filled >= 0) out.ready[filled] = now;
      if (leaving >= 0) waiting.push(leaving);
      if (!work.length) out.compute_end = now;
      left = work.length ? work[0][0] : 0;
    } else if (work.length) left -= step * speed;
  }
  return out;
}

/** One step: { forward, compute_end, done, optimizer, buckets: [[nbytes, ready, start, end, gradients], ...] }.
 *  how: { ranks, link, cap, factor, encode, decode (s a byte of gradient), slowdown, lanes }. */
export function predictStep(profile, how) {
  const { gradients, forward, backward, optimizer } = profile;
  const buckets = fillBuckets(gradients, how.cap).map(members => {
    const nbytes = members.reduce((sum, g) => sum + gradients[g][0] * gradients[g][1], 0);
    const transfer = how.ranks > 1 ? ringSeconds(how.ranks, nbytes * how.factor, how.link) : 0;
    return { members, nbytes, transfer, encode: how.encode * nbytes, decode: how.decode * nbytes };
  });
  const lane = runLanes(gradients, backward, buckets, how.slowdown, how.lanes);
  const rows = buckets.map((b, i) => [b.nbytes, lane.ready[i], lane.start[i], lane.end[i], b.members.length]);
  return { forward, optimizer, compute_end: lane.compute_end, done: Math.max(lane.compute_end, ...lane.end), buckets: rows };
}

/** Seconds in which communication runs after `from`: the union of the buckets' intervals. */
export function busySeconds(buckets, from = -Infinity) {
  let busy = 0, until = from;
  for (const [, , start, end] of [...buckets].sort((a, b) => a[2] - b[2])) {
    busy += Math.max(0, end - Math.max(start, until));
    until = Math.max(until, end);
  }
  return busy;
}
