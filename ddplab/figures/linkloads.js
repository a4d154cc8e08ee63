import { h, svg, bytes, choice, select } from "./kit.js";
// Link loads: who sends to whom, and what that puts on every GPU's own link. All numbers come from the schedules (state "loads").
const SIZE = 260, RADIUS = 96, SIZES = [1e6, 25.6e6, 102.4e6, 1e9];
const SHAPES = [["star", "star", "DataParallel as the article tells it"], ["chain", "chain", "DataParallel over NCCL: reduce to GPU0, broadcast from it"], ["ring", "ring", "a ring all-reduce"]];
const CSS = `
.ddp-loads .ddp-panes { grid-template-columns: 1fr; }
@container (min-width: 640px) { .ddplab-figure.ddplab-figure .ddp-loads .ddp-panes { grid-template-columns: 260px 1fr; } }
.ddp-loads .ddp-who-to-whom { display: block; width: 100%; max-width: 260px; margin: 0 auto; font-family: inherit; }
.ddp-loads .ddp-who-to-whom text { fill: currentColor; font-size: 13px; text-anchor: middle; }
.ddp-loads .ddp-who-to-whom circle { fill: var(--ddp-ground); stroke: currentColor; stroke-width: 1.5; }
.ddp-loads .ddp-who-to-whom .ddp-hot { stroke: var(--ddp-bad); stroke-width: 3; }
.ddp-loads .ddp-who-to-whom line { stroke: var(--ddp-accent); }
.ddp-loads .ddp-who-to-whom path { fill: var(--ddp-accent); }
.ddp-loads .ddp-bars { display: grid; grid-template-columns: max-content max-content 1fr; gap: 2px 8px; align-items: center; font-size: 13px; font-variant-numeric: tabular-nums; }
.ddp-loads .ddp-bars [role="row"] { display: contents; }
.ddp-loads .ddp-bars .ddp-first { margin-top: 5px; }
.ddp-loads .ddp-load { display: flex; align-items: center; gap: 6px; white-space: nowrap; }
.ddp-loads .ddp-load i { display: block; height: 13px; border: 1px solid var(--ddp-accent); flex: none; }
.ddp-loads .ddp-load i + i { border-left: 0; margin-left: -6px; }
.ddp-loads .ddp-adds { background: var(--ddp-accent); }
.ddp-loads .ddp-copies { background: repeating-linear-gradient(135deg, var(--ddp-accent) 0 2px, transparent 2px 6px); }
.ddp-loads .ddp-top { font-weight: 700; }
.ddp-loads .ddp-key { display: inline-block; width: 22px; height: 11px; border: 1px solid var(--ddp-accent); vertical-align: -1px; }`;

const total = ([adds, copies]) => adds + copies;
const near = (a, b) => Math.abs(a - b) < 1e-9;

/** Circles for the ranks, an arrow for every pair that ever sends, as wide as the bytes it sends. */
function picture(loads, ranks, shape) {
  const place = r => { const a = (2 * Math.PI * r) / ranks - Math.PI / 2; return [SIZE / 2 + RADIUS * Math.cos(a), SIZE / 2 + RADIUS * Math.sin(a)]; };
  const hot = r => shape === "star" && r === 0 && ranks > 2;
  const arrows = loads.pairs.map(([src, dst, buffers]) => {
    const [x0, y0] = place(src), [x1, y1] = place(dst), long = Math.hypot(x1 - x0, y1 - y0);
    const turn = (Math.atan2(y1 - y0, x1 - x0) * 180) / Math.PI, wide = 1 + 1.4 * buffers;
    // beside the straight line, so that two opposite arrows do not cover each other
    return svg("g", { transform: `translate(${x0.toFixed(1)} ${y0.toFixed(1)}) rotate(${turn.toFixed(1)})` },
      svg("line", { x1: 22, x2: long - 31, y1: 5, y2: 5, "stroke-width": wide.toFixed(2) }), svg("path", { d: `M${(long - 22).toFixed(1)} 5l-10-5v10z` }));
  });
  const nodes = Array.from({ length: ranks }, (_, r) => { const [x, y] = place(r);
    return svg("g", {}, svg("circle", { cx: x, cy: y, r: 20, class: hot(r) && "ddp-hot" }), svg("text", { x, y: y + 4.5 }, r)); });
  return svg("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, class: "ddp-who-to-whom", role: "img", "aria-label": `Who sends to whom: ${shape} of ${ranks} GPUs` }, arrows, nodes);
}

function render({ model, el }) {
  const scene = h("div", {}), bars = h("div", {}), facts = h("p", { class: "ddp-note" }), spoken = h("p", { class: "ddp-spoken", "aria-live": "polite" });
  const draw = () => {
    const shape = model.get("shape"), ranks = model.get("ranks"), size = model.get("nbytes"), all = model.get("loads"), loads = all[shape][ranks];
    const most = Math.max(...loads.sent.map(total), ...loads.received.map(total));
    // the same scale for every shape, the star's, so that a change of shape can be seen; room is left for the number
    const part = buffers => `calc((100% - 92px) * ${buffers / (ranks - 1)})`;
    const row = (r, way, load, first) => h("div", { role: "row" },
      h("span", { role: "rowheader", class: first && "ddp-first" }, first ? h("b", {}, `GPU${r}`) : h("span", { class: "ddp-spoken" }, `GPU${r}`)),
      h("span", { role: "cell", class: first && "ddp-first" }, way),
      h("div", { role: "cell", class: `ddp-load ${first ? "ddp-first" : ""} ${near(total(load), most) ? "ddp-top" : ""}` },
        load[0] > 0 && h("i", { class: "ddp-adds", style: `width: ${part(load[0])}` }), load[1] > 0 && h("i", { class: "ddp-copies", style: `width: ${part(load[1])}` }), bytes(total(load) * size)));
    scene.replaceChildren(picture(loads, ranks, shape));
    bars.replaceChildren(h("div", { role: "table", class: "ddp-bars", "aria-label": "Bytes on the link of every GPU" },
      loads.sent.map((out, r) => [row(r, "out", out, true), row(r, "in", loads.received[r], false)])));
    const times = loads.time / all.ring[ranks].time, words = [
      `Busiest direction of a link: ${bytes(most * size)}. Mean of all: ${bytes((most * size) / loads.busiest_over_mean)}. Busiest / mean: ${loads.busiest_over_mean.toFixed(2)}.`,
      `Time, were latency free: ${loads.time.toFixed(2)} S/B${shape === "ring" ? "" : `, ${times.toFixed(2)} times the ring's`}. A link is busy ${+(100 * loads.busy).toFixed(1)}% of it.`];
    facts.replaceChildren(h("b", {}, words[0]), " ", words[1]);
    if (spoken.dataset.drawn) spoken.textContent = `${shape}, ${ranks} GPUs. ${words.join(" ")}`;
    spoken.dataset.drawn = "yes";
  };
  for (const key of ["shape", "ranks", "nbytes"]) model.on(`change:${key}`, draw);
  const sizes = [...new Set([...SIZES, model.get("nbytes")])].sort((a, b) => a - b).map(size => [size, bytes(size)]);
  const ranks = Array.from({ length: 7 }, (_, i) => [i + 2, String(i + 2)]);
  el.classList.add("ddp-loads");
  el.append(h("style", {}, CSS),
    h("div", { class: "ddp-controls" }, choice(model, "shape", "Shape", SHAPES), select(model, "ranks", "GPUs", ranks), select(model, "nbytes", "Gradient S", sizes)),
    h("div", { class: "ddp-panes" }, scene, bars), facts,
    h("p", { class: "ddp-legend" }, h("span", {}, h("i", { class: "ddp-key ddp-adds" }), " gradients on their way to be added"), h("span", {}, h("i", { class: "ddp-key ddp-copies" }), " sums on their way back"), h("span", {}, h("b", {}, "bold"), " the busiest direction")), spoken);
  draw();
}
export default { render };
