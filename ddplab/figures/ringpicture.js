import { svg, calm } from "./kit.js";
import { finished, letter, span, terms } from "./collective.js";
// The ranks on a circle, each with its row of chunks in miniature, and an arrow for every transfer of the step.
export const NODE_W = 72, NODE_H = 42;
// up to four ranks a smaller picture: it then stands beside the table even in a narrow column
const sizes = ranks => (ranks > 4 ? { width: 390, height: 330, rx: 155, ry: 140 } : { width: 304, height: 268, rx: 114, ry: 109 });

const angle = (rank, ranks) => -Math.PI / 2 + (2 * Math.PI * rank) / ranks;
function onEllipse(a, ranks, scale = 1) {
  const { width, height, rx, ry } = sizes(ranks);
  return [width / 2 + scale * rx * Math.cos(a), height / 2 + scale * ry * Math.sin(a)];
}
const place = (rank, ranks) => onEllipse(angle(rank, ranks), ranks);

/** Points of the way from one rank to another, cut where it leaves the first node and where it meets the second. */
function way(src, dst, ranks, along) {
  const [x0, y0] = place(src, ranks), [x1, y1] = place(dst, ranks);
  const bow = 0.14, cx = (x0 + x1) / 2 - bow * (y1 - y0), cy = (y0 + y1) / 2 + bow * (x1 - x0);
  const at = t => along
    ? onEllipse(angle(src, ranks) + (along * t * 2 * Math.PI) / ranks, ranks)
    : [(1 - t) ** 2 * x0 + 2 * t * (1 - t) * cx + t * t * x1, (1 - t) ** 2 * y0 + 2 * t * (1 - t) * cy + t * t * y1];
  const inside = ([x, y], [nx, ny], room) => Math.abs(x - nx) < NODE_W / 2 + room && Math.abs(y - ny) < NODE_H / 2 + room;
  const points = Array.from({ length: 81 }, (_, i) => at(i / 80));
  return points.filter(p => !inside(p, [x0, y0], 3) && !inside(p, [x1, y1], 5));
}

/** An arrow along points; its head needs at least four of them. */
export function arrow(points, kind, rank) {
  const [x, y] = points.at(-1), [px, py] = points.at(-4) || points[0], turn = (Math.atan2(y - py, x - px) * 180) / Math.PI;
  return svg("g", { class: `ddp-arrow ${kind}`, style: `--ddp-rank: var(--ddp-${rank % 8})` },
    svg("path", { d: "M" + points.slice(0, -2).map(p => p.map(v => v.toFixed(1)).join(" ")).join("L"), fill: "none" }),
    svg("path", { class: "ddp-head", d: "M1 0-8-5v10z", transform: `translate(${x.toFixed(1)} ${y.toFixed(1)}) rotate(${turn.toFixed(1)})` }));
}

/** The label that travels with an arrow, at its resting place; `from` is where it starts when it moves. */
export function parcel(text, [x, y], from, rank) {
  const half = text.length * 3.8 + 7;
  const box = svg("g", { class: "ddp-parcel", style: `--ddp-rank: var(--ddp-${rank % 8})` },
    svg("rect", { x: -half, y: -10, width: 2 * half, height: 20, rx: 10 }), svg("text", { y: 4 }, text));
  if (from) box.animate([{ transform: `translate(${from[0] - x}px, ${from[1] - y}px)`, opacity: 0.2 }, { transform: "none", opacity: 1 }], { duration: 500, easing: "ease-out" });
  return svg("g", { transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` }, box);
}

/** One rank, at (x, y): its name and its chunks in miniature. */
export function node(rank, row, ranks, [x, y]) {
  const wide = (NODE_W - 10) / row.length;
  const cells = row.map((held, chunk) => {
    const left = -NODE_W / 2 + 5 + chunk * wide, high = (14 * new Set(held).size) / ranks, full = finished(held, ranks);
    return [
      svg("rect", { x: left + 0.5, y: 17 - high, width: wide - 1, height: high, class: full ? "ddp-full" : "ddp-part" }),
      svg("rect", { x: left + 0.5, y: 3, width: wide - 1, height: 14, class: "ddp-slot" }),
      full && svg("path", { d: `M${left + wide / 2 - 2.5} 10l2 2.5 3-5`, class: "ddp-tick" }),
    ];
  });
  return svg("g", { class: "ddp-node", transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})`, style: `--ddp-rank: var(--ddp-${rank % 8})` },
    svg("rect", { class: "ddp-box", x: -NODE_W / 2, y: -NODE_H / 2, width: NODE_W, height: NODE_H, rx: 7 }),
    svg("text", { y: -5 }, `GPU${rank} `, svg("tspan", { class: "ddp-letter" }, letter(rank))), cells);
}

// An arrow's label stays as short as its arrow: with many ranks only the ends of a long sum are named.
const short = (held, chunk, ranks, direction) =>
  (ranks > 4 && span(held, chunk, ranks, direction)?.join("…")) || terms(held, chunk, ranks).join("+");

/** direction: +1 or -1 where the schedule is a ring, else 0. `moved` lets the labels travel. */
export function ringPicture({ schedule, held, before, step, direction, title, moved }) {
  const { ranks, transfers } = schedule, { width, height } = sizes(ranks), sent = transfers.filter(t => t[0] === step - 1);
  const pairs = [...new Set(transfers.map(([, src, dst]) => src * ranks + dst))].map(p => [Math.floor(p / ranks), p % ranks]);
  const path = (src, dst) => way(src, dst, ranks, direction);
  const crowded = sent.length > 2 * ranks || new Set(sent.map(([, src, dst]) => src * ranks + dst)).size < sent.length;
  const answered = ([, src, dst]) => sent.some(([, from, to]) => from === dst && to === src); // two labels on one way: apart
  const parcels = crowded ? [] : sent.map(transfer => {
    const [, src, dst, chunk] = transfer, middle = angle(src, ranks) + (direction * Math.PI) / ranks;
    const points = path(src, dst), rest = direction ? onEllipse(middle, ranks, ranks > 4 ? 0.68 : 0.97) : points[Math.floor(points.length * (answered(transfer) ? 0.2 : 0.45))];
    return parcel(short(before[src][chunk], chunk, ranks, direction), rest, moved && !calm() && place(src, ranks), src);
  });
  const label = sent.length ? `Arrows of step ${step}: ${sent.length} transfers` : "The ranks on a circle, nothing sent yet";
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "ddp-ring", style: `max-width: ${width * 1.08}px`, role: "img", "aria-label": label },
    pairs.map(([src, dst]) => arrow(path(src, dst), "ddp-idle", src)),
    sent.map(([, src, dst]) => arrow(path(src, dst), "ddp-busy", src)),
    direction !== 0 && title.map((line, i) => svg("text", { class: `ddp-title${i}`, x: width / 2, y: height / 2 - 6 + 18 * i }, line)),
    held.map((row, rank) => node(rank, row, ranks, place(rank, ranks))), parcels);
}
