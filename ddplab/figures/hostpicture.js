import { svg, bytes, calm } from "./kit.js";
import { sentOut } from "./collective.js";
import { NODE_W, NODE_H, arrow, node, parcel } from "./ringpicture.js";
// Hosts as boxes, side by side, each with its ranks in a column; arrows inside a box, and from box to box.
const HEAD = 50, PITCH = 80, WIDE = 58, SIDE = 20;

/** Where everything stands, for k hosts of g ranks. */
function grid({ ranks, ranks_per_host: g }) {
  // from the last rank of a host back to the first an arrow runs on the side away from the other host
  const k = ranks / g, outer = host => (k === 2 && host === 1 ? +1 : -1), wide = g > 2 ? WIDE : SIDE;
  const box = NODE_W + SIDE + wide, gap = k > 2 ? 70 : 100, left = host => 2 + host * (box + gap);
  const x = host => left(host) + (outer(host) < 0 ? wide : SIDE) + NODE_W / 2;
  const spot = rank => [x(Math.floor(rank / g)), HEAD + 34 + (rank % g) * PITCH];
  return { k, g, box, left, outer, spot, host: rank => Math.floor(rank / g), width: left(k - 1) + box + 2, height: HEAD + g * PITCH + (k > 2 ? 14 : 0) };
}

const sampled = at => Array.from({ length: 41 }, (_, i) => at(i / 40));
const straight = ([x0, y0], [x1, y1]) => sampled(t => [x0 + t * (x1 - x0), y0 + t * (y1 - y0)]);
const bowed = ([x0, y0], [cx, cy], [dx, dy], [x1, y1]) => sampled(t => {
  const [a, b, c, d] = [(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t ** 3];
  return [a * x0 + b * cx + c * dx + d * x1, a * y0 + b * cy + c * dy + d * y1];
});

/** The way of a message. */
function road(layout, src, dst) {
  const { g, k, host, spot, outer } = layout, [x0, y0] = spot(src), [x1, y1] = spot(dst), half = NODE_W / 2, down = NODE_H / 2;
  if (host(src) === host(dst)) {
    const hop = dst - src, beside = g === 2 ? 24 * hop : 0;
    if (Math.abs(hop) === 1) return straight([x0 + beside, y0 + hop * (down + 2)], [x1 + beside, y1 - hop * (down + 4)]);
    const side = outer(host(src)), edge = x0 + side * (half + 1), out = edge + side * 44;
    return bowed([edge, y0], [out, y0], [out, y1], [edge + side * 3, y1]);
  }
  const way = Math.sign(host(dst) - host(src));
  if (Math.abs(host(dst) - host(src)) > 1) { // round the end of a ring of hosts: below the row
    const low = y0 + down + 30;
    return bowed([x0 - 18, y0 + down + 2], [x0 - 40, low], [x1 + 40, low], [x1 + 18, y1 + down + 5]);
  }
  const lane = k === 2 && y0 === y1 ? 9 * way : 0; // both directions at once
  return straight([x0 + way * (half + 2), y0 - lane], [x1 - way * (half + 5), y1 - lane]);
}

/** A collective on hosts: title is shown between two of them. `moved` lets the labels travel. */
export function hostPicture({ schedule, held, step, part, title, moved }) {
  const layout = grid(schedule), { k, g, box, left, host, spot, width, height } = layout, { ranks, transfers } = schedule;
  const loads = new Map(); // [src, dst] of this step -> the chunks on the way
  for (const [when, src, dst, chunk] of transfers) if (when === step - 1) loads.set(src * ranks + dst, [...(loads.get(src * ranks + dst) || []), chunk + 1]);
  const ends = pair => [Math.floor(pair / ranks), pair % ranks], kind = (src, dst) => (host(src) === host(dst) ? "ddp-inner" : "ddp-outer");
  const draw = (pair, state) => { const [src, dst] = ends(pair); return arrow(road(layout, src, dst), `${state} ${kind(src, dst)}`, src); };
  const idle = [...new Set(transfers.map(([, src, dst]) => src * ranks + dst))].filter(pair => !loads.has(pair));
  const places = [...loads].map(([pair, chunks]) => {
    const [src, dst] = ends(pair), points = road(layout, src, dst), text = chunks.length > 4 ? `${chunks.length} chunks` : chunks.join(", ");
    return { src, text, at: points[kind(src, dst) === "ddp-outer" ? 13 : 19], half: text.length * 3.8 + 8 };
  });
  const meet = (a, b) => a !== b && Math.abs(a.at[0] - b.at[0]) < a.half + b.half && Math.abs(a.at[1] - b.at[1]) < 21;
  const crowded = places.some(a => places.some(b => meet(a, b))); // then the table alone says what travels
  const labels = crowded ? [] : places.map(({ src, text, at }) => parcel(text, at, moved && !calm() && spot(src), src));
  const out = sentOut(schedule, step);
  const boxes = out.map((count, at) => svg("g", {},
    svg("rect", { class: "ddp-hostbox", x: left(at), y: 1, width: box, height: height - 2, rx: 12 }),
    svg("text", { class: "ddp-hostname", x: left(at) + box / 2, y: 20 }, `host ${at}`),
    svg("text", { x: left(at) + box / 2, y: 36 }, `sent out ${bytes(count * part)}`)));
  const crossing = [...loads.keys()].filter(pair => kind(...ends(pair)) === "ddp-outer").length;
  const label = loads.size ? `Step ${step}: ${loads.size - crossing} arrows inside the hosts, ${crossing} from host to host` : `${k} hosts of ${g} ranks, nothing sent yet`;
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "ddp-ring", style: `max-width: ${width * 1.08}px`, role: "img", "aria-label": label },
    boxes, k === 2 && svg("text", { class: "ddp-title0", x: width / 2, y: 24 }, title[0]),
    idle.map(pair => draw(pair, "ddp-idle")), [...loads.keys()].map(pair => draw(pair, "ddp-busy")),
    held.map((row, rank) => node(rank, row, ranks, spot(rank))), labels);
}
