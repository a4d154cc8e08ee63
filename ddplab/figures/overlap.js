import { h, svg, bytes, choice, range } from "./kit.js";
import { predictStep, fillBuckets, ringSeconds, busySeconds } from "./lanes.js";
// The overlap timeline: compute lane, communication lane, and hatched what sticks out. Sliders run the model again.
const HIGH = 30, GAP = 26, LEFT = 2;

const ms = seconds => {
  const value = seconds * 1e3;
  return value >= 1e4 ? `${+(seconds).toPrecision(4)} s` : `${+value.toPrecision(value < 1000 ? 3 : 4)} ms`;
};

/** The settings that the sliders stand for. */
function settings(model) {
  const factor = model.get("compressions").find(c => c[0] === model.get("compression"))[1];
  return {
    ranks: model.get("ranks")[model.get("rank_at")], link: model.get("links")[model.get("link_at")], cap: model.get("caps")[model.get("cap_at")],
    factor, encode: factor < 1 ? model.get("encode_ns") * 1e-9 : 0, decode: 0, slowdown: model.get("slowdown"), lanes: model.get("lanes"),
  };
}

/** Diagonal strokes inside a rectangle: what is exposed is told by pattern, not by colour alone. */
function hatch(x, y, width, height, gap = 7) {
  let path = "";
  for (let k = gap - height; k < width; k += gap) {
    const a = Math.max(0, k), b = Math.min(width, k + height);
    if (b > a) path += `M${(x + a).toFixed(1)} ${(y + height - (a - k)).toFixed(1)}L${(x + b).toFixed(1)} ${(y + height - (b - k)).toFixed(1)}`;
  }
  return svg("path", { d: path, class: "ddp-hatch" });
}

/** Rows so that buckets that are under way together do not cover each other. */
function rows(buckets) {
  const free = [];
  return buckets.map(([, , start, end]) => {
    let row = free.findIndex(until => until <= start + 1e-9);
    if (row < 0) row = free.length;
    free[row] = end;
    return row;
  });
}

function ticks(total, most) {
  const raw = total / most, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].find(m => m * power >= raw) * power;
  return Array.from({ length: Math.floor(total / step + 1e-9) + 1 }, (_, i) => i * step);
}

/** One step as an SVG. `total` seconds span the width. */
function picture(step, total, wide, name) {
  const scale = (wide - 2 * LEFT) / total, x = t => LEFT + t * scale, from = step.forward;
  const place = rows(step.buckets), lanes = Math.max(1, ...place.map(r => r + 1));
  const top = 18, comm = top + HIGH + GAP + 16, bottom = comm + lanes * (HIGH + 3), parts = [];
  const box = (kind, start, end, y, label, title, style) => {
    const width = Math.max(0.8, (end - start) * scale);
    const g = svg("g", { class: kind, style }, svg("title", {}, title), svg("rect", { x: x(start), y, width, height: HIGH, rx: width > 6 ? 3 : 0 }));
    if (label && label.length * 6.6 + 4 < width) g.append(svg("text", { x: x(start) + width / 2, y: y + 20 }, label));
    parts.push(g);
  };
  const word = (text, x, y, kind) => parts.push(svg("text", { x, y, class: `ddp-halo ${kind}` }, text));
  word("compute", LEFT, top - 6, "ddp-lane");
  if (step.forward > 0) box("ddp-forward", 0, from, top, "forward", `forward: ${ms(step.forward)}`);
  box("ddp-backward", from, from + step.compute_end, top, "backward", `backward: ${ms(step.compute_end)}`);
  const done = from + step.done, ends = from + step.compute_end;
  if (step.done - step.compute_end > 0.002 * total) {
    box("ddp-exposed", ends, done, top, "", `exposed: ${ms(step.done - step.compute_end)}`);
    parts.push(hatch(x(ends), top, (done - ends) * scale, HIGH));
    if ((done - ends) * scale > 56) word("waits", (x(ends) + x(done)) / 2, top + 20, "");
  }
  if (step.optimizer > 0) box("ddp-optimizer", done, done + step.optimizer, top, "optimizer", `optimizer: ${ms(step.optimizer)}`);
  step.buckets.forEach(([nbytes, ready, start, end, count], i) => {
    const y = comm + place[i] * (HIGH + 3), colour = `--ddp-rank: var(--ddp-${i % 8})`;
    const said = `bucket ${i}: ${bytes(nbytes)}${count ? `, ${count} gradient${count > 1 ? "s" : ""}` : ""}; ready ${ms(ready)}, starts ${ms(start)}, ends ${ms(end)} after backward began`;
    parts.push(svg("path", { class: "ddp-handover", style: colour, d: `M${x(from + ready)} ${top + HIGH - 8}v8L${x(from + start)} ${comm}` }));
    if (end - start <= 0) return;
    box("ddp-bucket", from + start, from + end, y, "", said, colour);
    const out = Math.max(start, step.compute_end);
    if (end - out > 0.002 * total) parts.push(hatch(x(from + out), y, (end - out) * scale, HIGH));
    if (String(i).length * 7 + 4 < (end - start) * scale) word(String(i), x(from + (start + end) / 2), y + 20, "");
  });
  word("communication, by bucket", LEFT, comm - 6, "ddp-lane");
  parts.push(svg("path", { class: "ddp-end", d: `M${x(ends)} ${top - 4}V${bottom + 2}` }));
  const label = t => (total < 2 ? ms(t) : `${+t.toPrecision(3)} s`);
  for (const t of ticks(total, wide < 480 ? 4 : 6)) {
    const anchor = x(t) > wide - 30 ? "end" : t === 0 ? "start" : "middle";
    parts.push(svg("path", { class: "ddp-axis", d: `M${x(t)} ${bottom + 2}v5` }), svg("text", { x: x(t), y: bottom + 19, class: "ddp-tick", style: `text-anchor: ${anchor}` }, label(t)));
  }
  return svg("svg", { class: "ddp-timeline", viewBox: `0 0 ${wide} ${bottom + 24}`, width: wide, height: bottom + 24, role: "img", "aria-label": name }, parts);
}

const stepSeconds = s => s.forward + s.done + s.optimizer;

/** The same in words. */
function words(s, kind) {
  const total = busySeconds(s.buckets), late = busySeconds(s.buckets, s.compute_end), n = s.buckets.length;
  return `${kind}: step ${ms(stepSeconds(s))}. Compute ${ms(s.forward + s.compute_end + s.optimizer)}; communication ${ms(total)} in ${n} bucket${n === 1 ? "" : "s"}, `
    + `${ms(total - late)} of it hidden behind backward; ${ms(s.done - s.compute_end)} exposed.`;
}

function table(s) {
  const head = ["bucket", "size", "ready", "waits", "ends", "exposed"];
  const body = s.buckets.map(([nbytes, ready, start, end], i) =>
    [i, bytes(nbytes), ms(ready), ms(start - ready), ms(end), ms(Math.max(0, end - Math.max(start, s.compute_end)))]);
  return h("div", { class: "ddp-scroll", tabindex: "0", role: "region", "aria-label": "Buckets" }, h("table", { class: "ddp-data" },
    h("thead", {}, h("tr", {}, head.map(t => h("th", { scope: "col" }, t)))),
    h("tbody", {}, body.map(row => h("tr", {}, row.map(t => h("td", {}, t)))))));
}

function render({ model, el }) {
  const profile = model.get("profile"), measured = model.get("measured");
  const pictures = h("div", { class: "ddp-pictures" }), said = h("div", { "aria-live": "polite" }), details = h("div", {});
  const draw = () => {
    const wide = Math.round(Math.max(300, Math.min(1000, el.clientWidth || 720))), shown = [], lines = [];
    if (profile) {
      const how = settings(model), step = predictStep(profile, how), alone = profile.forward + profile.backward + profile.optimizer;
      const caps = model.get("caps").map(cap => [stepSeconds(predictStep(profile, { ...how, cap })), cap]);
      const best = caps.reduce((a, b) => (b[0] <= a[0] * 1.0001 ? b : a));
      shown.push([step, "Predicted"]);
      lines.push(words(step, "Predicted"), `Against one rank: ${(100 * alone / stepSeconds(step)).toFixed(0)}% efficiency. Best bucket cap of those on the slider: ${capText(best[1])}, ${ms(best[0])} a step.`);
    }
    if (measured) { shown.push([measured, measured.label]); lines.push(words(measured, measured.label)); }
    const total = Math.max(...shown.map(([s]) => stepSeconds(s))) || 1;
    pictures.replaceChildren(...shown.flatMap(([s, kind]) => [...(shown.length > 1 ? [h("p", { class: "ddp-kind" }, kind)] : []), picture(s, total, wide, words(s, kind))]));
    said.replaceChildren(...lines.map(line => h("p", {}, line)));
    details.replaceChildren(...shown.map(([s, kind]) => h("div", {}, h("p", {}, `${kind}, times since backward began`), table(s))));
  };
  const capText = cap => (cap === null ? "1, then 25 MiB" : `${cap} MiB`);
  if (profile) {
    const at = (key, label, list, text) => range(model, key, label, { max: list.length - 1, text: i => text(list[i]) });
    el.append(h("div", { class: "ddp-sliders" },
      at("rank_at", "Ranks", model.get("ranks"), String),
      at("link_at", "Link", model.get("links"), link => link.name),
      at("cap_at", "Bucket cap", model.get("caps"), capText),
      range(model, "encode_ns", "Encoding", { max: 2, step: 0.05, text: v => `${v.toFixed(2)} ns a byte` }),
      range(model, "slowdown", "Slowdown", { min: 1, max: 2, step: 0.05, text: v => `x ${v.toFixed(2)}` }),
      choice(model, "compression", "Compression", model.get("compressions").map(([key, factor]) => [key, key, `${+(factor * 100).toFixed(3)}% of the bytes`]))));
    for (const key of ["rank_at", "link_at", "cap_at", "encode_ns", "slowdown", "compression"]) model.on(`change:${key}`, draw);
  }
  el.append(pictures,
    h("p", { class: "ddp-legend" }, ["forward", "backward"].map(k => h("span", {}, h("i", { class: `ddp-key ${k}` }), k)),
      h("span", {}, h("i", { class: "ddp-key exposed" }), "exposed: the step waits"), h("span", {}, h("b", {}, "0, 1, …"), " buckets; a line from ready to start")),
    said, h("details", {}, h("summary", {}, "The buckets as a table"), details));
  draw();
  let before = el.clientWidth;
  new ResizeObserver(() => { if (Math.abs(el.clientWidth - before) > 1) { before = el.clientWidth; draw(); } }).observe(el);
}
export default { render, predictStep, fillBuckets, ringSeconds };
