import { h, svg, bytes, choice, range } from "./kit.js";
// Speed-up by compression over link speed: a line a compressor, points where it was measured; sliders compute again.
const FROM = -2, TO = 4, DASHES = ["", "7 4", "2 3", "9 3 2 3", "12 4", "4 2 1 2", "1 4", "14 3 3 3"];

/** Crossover and Compressor of ddplab/crossover.py; `s` are settings, compressors [name, factor, routing, encode, decode]. */
function crossing(s) {
  const n = s.ranks, behind = s.compute * s.backward;
  const terms = ([, factor, routing, encode, decode]) => {
    if (n === 1) return [behind, 0, 0];
    const e = encode / s.faster, d = decode / s.faster, gather = routing === "all-gather", two = routing === "two-phase";
    const beside = (gather ? n * d : two ? 2 * d + e / n : d) * s.nbytes, latencies = gather ? n - 1 : two ? n : 2 * (n - 1);
    return [behind + e * s.nbytes, latencies * s.latency + beside, (gather ? n - 1 : 2 * (n - 1) / n) * factor * s.nbytes];
  };
  const seconds = (one, gbps) => {
    const [lane, fixed, sent] = terms(one), beside = fixed + sent / (gbps * 1e9 / 8 * s.efficiency);
    return s.compute * (1 - s.backward) + (s.overlap ? Math.max(lane, beside) : lane + beside);
  };
  const rate = one => {  // Gbit/s on the wire
    let [p0, a0, v0] = terms(s.baseline), [p, a, v] = terms(one);
    if (!s.overlap) [p0, a0, p, a] = [-Infinity, a0 + p0, -Infinity, a + p];
    if (v > v0 || (v === v0 && a >= a0)) return 0;
    const slow = Math.max(0, (p - a0) / v0, v < v0 ? (a - a0) / (v0 - v) : 0);
    if (p0 > p && p0 > a + v * slow) return Infinity;
    return slow ? 8 / 1e9 / s.efficiency / slow : Infinity;
  };
  return { seconds, rate, speedup: (one, gbps) => seconds(s.baseline, gbps) / seconds(one, gbps) || 1 };
}

const speedText = gbps => {
  const [factor, unit] = gbps < 0.9995 ? [1e3, "Mbit/s"] : gbps < 999.5 ? [1, "Gbit/s"] : [1e-3, "Tbit/s"];
  return `${+(gbps * factor).toPrecision(3)} ${unit}`;
};
const timeText = s => (s >= 1 ? `${+s.toPrecision(3)} s` : s >= 1e-3 || s === 0 ? `${+(s * 1e3).toPrecision(3)} ms` : `${+(s * 1e6).toPrecision(3)} µs`);
const paysText = gbps => (gbps === Infinity ? "pays on any link" : gbps ? `pays below ${speedText(gbps)}` : "never pays");
const hueOf = i => `var(--ddp-${i})`;

function settingsOf(model) {
  const lists = model.get("lists");
  return {
    ranks: lists.ranks[model.get("rank_at")], nbytes: lists.nbytes[model.get("size_at")], compute: lists.compute_s[model.get("compute_at")],
    faster: model.get("faster")[model.get("faster_at")], latency: model.get("latency_s"), efficiency: model.get("efficiency"),
    backward: model.get("backward"), overlap: model.get("overlap"), baseline: model.get("baseline"),
  };
}
/** Measured points, where the sliders stand at what was measured. */
function pointsOf(model) {
  const at = model.get("measured_at");
  const there = model.get("rank_at") === at.ranks && model.get("size_at") === at.nbytes && model.get("compute_at") === at.compute_s;
  return there && model.get("faster_at") === 0 && model.get("overlap") === model.get("measured_overlap") ? model.get("points") : [];
}

/** One mark a compressor, so that points differ in shape as well as in colour; without a title it stands in the legend. */
function mark(i, x, y, title) {
  const r = 5.5, corners = [null, 4, 3, -4, -3, 5, 6, 8][i];
  const shape = corners === null ? svg("circle", { cx: x, cy: y, r: r - 0.7 }, title)
    : svg("path", { d: "M" + Array.from({ length: Math.abs(corners) }, (_, k) => {
        const angle = 2 * Math.PI * (k + (corners === 4 ? 0.5 : 0)) / Math.abs(corners) - (corners === -3 ? -Math.PI / 2 : Math.PI / 2);
        return `${(x + r * Math.cos(angle)).toFixed(1)} ${(y + r * Math.sin(angle)).toFixed(1)}`;
      }).join("L") + "Z" }, title);
  if (title) shape.setAttribute("class", "ddp-point");
  shape.setAttribute("style", `fill: ${hueOf(i)}; stroke: currentColor; stroke-width: 1.2`);
  return shape;
}

function chart(model, c, wide, name) {
  const isTime = model.get("show") === "time", all = model.get("compressors"), base = model.get("baseline")[0];
  const left = 64, right = wide - 14, top = 12, bottom = 272, strip = bottom + 42, parts = [];
  const shown = all.map((one, i) => [one, i]).filter(([one]) => isTime || one[0] !== base);
  const value = (one, power) => (isTime ? c.seconds(one, 10 ** power) * 1e3 : c.speedup(one, 10 ** power));
  const grid = Array.from({ length: (TO - FROM) * 20 + 1 }, (_, i) => FROM + i / 20), points = isTime ? [] : pointsOf(model);
  const ends = shown.flatMap(([one]) => grid.map(power => value(one, power))).concat(isTime ? [] : [1], points.map(p => p.speedup)).filter(v => v > 0);
  const low = Math.floor(Math.log10(Math.min(...ends))), high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...ends)) + 1e-9));
  const x = power => left + (power - FROM) / (TO - FROM) * (right - left);
  const y = v => bottom - (Math.log10(v) - low) / (high - low) * (bottom - top);
  const put = (tag, attrs, ...kids) => parts.push(svg(tag, attrs, ...kids));
  const word = (text, px, py, anchor = "start", extra = "") => put("text", { x: px, y: py, style: `text-anchor: ${anchor}; fill: currentColor; font-size: 12px; ${extra}` }, text);
  const outline = "paint-order: stroke; stroke: var(--ddp-ground); stroke-width: 4px; stroke-linejoin: round;";
  for (let decade = low; decade <= high; decade++) {
    const even = !isTime && decade === 0;
    put("path", { d: `M${left} ${y(10 ** decade)}H${right}`, stroke: "currentColor", "stroke-opacity": even ? 0.8 : 0.15, "stroke-width": even ? 1.5 : 1 });
    word(isTime ? timeText(10 ** decade / 1e3) : `${+(10 ** decade).toPrecision(1)}×`, left - 6, y(10 ** decade) + 4, "end");
  }
  if (!isTime && high > 0) word(`as fast as ${base}`, right - 3, y(1) - 5, "end", "font-size: 11.5px;");
  for (let power = FROM; power <= TO; power++) put("path", { d: `M${x(power)} ${top}V${bottom + 5}`, stroke: "currentColor", "stroke-opacity": 0.15 });
  const at = x(Math.log10(model.get("rates")[model.get("rate_at")]));
  put("path", { d: `M${at} ${top}V${strip + 16}`, stroke: "currentColor", "stroke-width": 1.4, "stroke-dasharray": "3 3" });
  for (let power = FROM; power <= TO; power++) {
    const middle = power === TO ? "end" : power === FROM ? "start" : "middle";
    if (wide > 520 || (power - FROM) % 2 === 0) word(speedText(10 ** power), x(power), bottom + 19, middle, `font-size: 11.5px; ${outline}`);
  }
  for (const [one, i] of shown) {
    const line = grid.map(power => `${x(power).toFixed(1)} ${y(value(one, power)).toFixed(1)}`);
    put("path", { class: "ddp-line", d: `M${line.join("L")}`, fill: "none", "stroke-width": 2.4, "stroke-dasharray": DASHES[i], style: `stroke: ${hueOf(i)}` }, svg("title", {}, one[0]));
    const gbps = c.rate(one), power = Math.log10(gbps);
    if (one[0] !== base && gbps > 0 && power >= FROM && power <= TO)
      put("path", { class: "ddp-cross", d: `M${x(power)} ${y(value(one, power)) - 7}v14`, "stroke-width": 3, style: `stroke: ${hueOf(i)}` }, svg("title", {}, `${one[0]} ${paysText(gbps)}`));
  }
  const names = all.map(one => one[0]);
  points.forEach(p => parts.push(mark(names.indexOf(p.compressor), x(Math.log10(p.rate_Gbps)), y(p.speedup),
    svg("title", {}, `measured: ${p.compressor} at ${speedText(p.rate_Gbps)}, ${p.speedup.toPrecision(3)} times as fast as ${base}`))));
  word("fastest", left - 6, strip + 12, "end");
  const rivals = all.some(one => one[0] === base) ? all : [...all, model.get("baseline")];
  const best = power => rivals.reduce((a, b) => (c.seconds(b, 10 ** power) < c.seconds(a, 10 ** power) ? b : a))[0];
  let begin = FROM;
  grid.forEach((power, k) => {  // a band for whoever is the fastest there
    const here = best(power), next = k + 1 < grid.length ? best(grid[k + 1]) : null;
    if (here === next) return;
    const end = next ? power + 1 / 40 : TO, width = x(end) - x(begin), i = names.indexOf(here);
    put("rect", { class: "ddp-band", x: x(begin), y: strip, width, height: 17, stroke: "currentColor", "stroke-opacity": 0.5, style: `fill: ${i < 0 ? "var(--ddp-soft)" : `color-mix(in srgb, ${hueOf(i)} 32%, var(--ddp-ground))`}` }, svg("title", {}, here));
    if (here.length * 7 + 4 < width) word(here, x((begin + end) / 2), strip + 13, "middle");
    begin = end;
  });
  return svg("svg", { class: "ddp-chart", viewBox: `0 0 ${wide} ${strip + 22}`, width: wide, height: strip + 22, style: "display: block; max-width: 100%; font-family: inherit", role: "img", "aria-label": name }, parts);
}

/** The names beside a piece of their line. */
function legend(model) {
  const base = model.get("baseline")[0], marked = model.get("points").length > 0;
  return model.get("compressors").map(([name], i) => h("span", { class: "ddp-name" },
    svg("svg", { width: 34, height: 14, "aria-hidden": "true", style: "vertical-align: -2px; margin-right: 5px" },
      svg("path", { d: "M0 7h34", "stroke-width": 2.4, "stroke-dasharray": DASHES[i], style: `stroke: ${hueOf(i)}` }), marked && name !== base && mark(i, 17, 7)), name));
}

function story(model, c) {
  const all = model.get("compressors"), base = model.get("baseline"), gbps = model.get("rates")[model.get("rate_at")];
  const others = all.filter(one => one[0] !== base[0]), points = pointsOf(model);
  const best = others.reduce((a, b) => (c.seconds(b, gbps) < c.seconds(a, gbps) ? b : a), base);
  const gain = c.speedup(best, gbps);
  return [
    `Predicted: ${others.map(one => `${one[0]} ${paysText(c.rate(one))}`).join("; ")}.`,
    `At ${speedText(gbps)} a step takes ${timeText(c.seconds(base, gbps))} with ${base[0]}` + (best === base ? "; nothing is faster." : `, ${timeText(c.seconds(best, gbps))} with ${best[0]}, ${gain.toPrecision(3)} times as fast.`),
    ...(model.get("points").length ? [points.length ? `${points.length} measured points.` : "The measured points belong to other settings, so they are not shown."] : []),
  ];
}

function numbers(model, c) {
  const gbps = model.get("rates")[model.get("rate_at")], rows = model.get("compressors").map(one =>
    [one[0], one[2], `${+(100 * one[1]).toPrecision(3)}%`, timeText(c.seconds(one, gbps)), `${c.speedup(one, gbps).toPrecision(3)}×`, one[0] === model.get("baseline")[0] ? "" : paysText(c.rate(one))]);
  const head = ["", "route", "bytes encoded", `step at ${speedText(gbps)}`, "speed-up", "crossover"];
  return h("div", { class: "ddp-scroll", tabindex: "0", role: "region", "aria-label": "The compressors in numbers" }, h("table", { class: "ddp-data" },
    h("thead", {}, h("tr", {}, head.map(text => h("th", { scope: "col" }, text)))),
    h("tbody", {}, rows.map(row => h("tr", {}, row.map((text, i) => (i ? h("td", {}, text) : h("th", { scope: "row" }, text))))))));
}

function render({ model, el }) {
  const place = h("div", { class: "ddp-pictures" }), said = h("div", { "aria-live": "polite" }), details = h("div", {});
  const draw = () => {
    const c = crossing(settingsOf(model)), lines = story(model, c);
    place.replaceChildren(chart(model, c, Math.round(Math.max(320, Math.min(900, el.clientWidth || 720))), lines.join(" ")));
    said.replaceChildren(...lines.map(line => h("p", {}, line)));
    details.replaceChildren(numbers(model, c));
  };
  const lists = model.get("lists"), at = (key, label, list, text) => range(model, key, label, { max: list.length - 1, text: i => text(list[i]) });
  el.append(
    h("div", { class: "ddp-controls" },
      choice(model, "show", "Show", [["speedup", "speed-up"], ["time", "time"]]),
      choice(model, "overlap", "Communication", [[false, "after backward", "encoding, exchange and decoding add to compute"], [true, "beside backward", "exchange and decoding run while backward computes"]])),
    h("div", { class: "ddp-sliders" },
      at("rate_at", "Read off at", model.get("rates"), speedText),
      at("rank_at", "Ranks", lists.ranks, String),
      at("size_at", "Gradients", lists.nbytes, bytes),
      at("compute_at", "Compute", lists.compute_s, timeText),
      at("faster_at", "Codecs", model.get("faster"), k => (k === 1 ? "as measured" : `${k} times as fast`))),
    place, h("p", { class: "ddp-legend" }, legend(model)),
    h("p", { class: "ddp-legend" }, h("span", {}, "lines: predicted"), model.get("points").length > 0 && h("span", {}, "marks: measured"), h("span", {}, h("b", {}, "|"), " crossover")),
    said, h("details", {}, h("summary", {}, "The compressors in numbers"), details));
  for (const key of ["show", "overlap", "rate_at", "rank_at", "size_at", "compute_at", "faster_at"]) model.on(`change:${key}`, draw);
  draw();
  let before = el.clientWidth;
  new ResizeObserver(() => { if (Math.abs(el.clientWidth - before) > 1) { before = el.clientWidth; draw(); } }).observe(el);
}
export default { render, crossing };
