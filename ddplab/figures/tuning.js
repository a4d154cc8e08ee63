import { h, svg, bytes, choice, range } from "./kit.js";
// NCCL's cost model: time or bus bandwidth by message size, one line an algorithm and protocol; sliders change the node.
const PROTOCOLS = ["LL", "LL128", "Simple"], HUES = { LL: "--ddp-0", LL128: "--ddp-1", Simple: "--ddp-2", NVLS: "--ddp-3" };
const DASHES = { Ring: "", Tree: "7 4", NVLS: "2 3" }, FROM = 10, TO = 32;

/** The model of one node; `facts` are NCCL's constants, as Python gives them. */
function tuning(facts, m) {
  const limit = facts.limits[m.generation], peak = m.channels * m.rate, steps = 2 * (m.ranks - 1);
  const nvls = m.nvlsChannels >= 2 && limit.nvls > 0;
  const pairs = ["Tree", "Ring"].flatMap(a => PROTOCOLS.map(p => [a, p])).concat(nvls ? [["NVLS", "Simple"]] : []);
  const latency = (a, p) => (a === "NVLS" ? facts.nvlsUs : facts.base[a][PROTOCOLS.indexOf(p)] + steps * facts.step[a][PROTOCOLS.indexOf(p)]);
  const algbw = (a, p) => {
    if (a === "Tree") {
      const rate = Math.min(m.channels * m.treeRate * 0.92, m.channels * limit.tree);
      return (p === "LL" ? Math.min(rate / 3.8, limit.ll) : p === "LL128" ? Math.min(rate * 7 / 9, m.channels * limit.treeLL128) : rate) / 2 * m.treeShare;
    }
    const pulled = m.nvlsRate * limit.nvls * (m.nvlsChannels - 1) / m.nvlsChannels * 2;
    const rate = a === "NVLS" ? m.nvlsChannels * Math.min(pulled, m.nvlsCap ?? Infinity)
      : p === "LL" ? Math.min(limit.ll, peak / 2) : p === "LL128" ? Math.min(peak * 0.92, m.channels * limit.ringLL128) : peak;
    return rate * m.ranks / steps;
  };
  const seconds = (size, a, p) => {
    let rate = algbw(a, p);
    const lines = Math.floor(Math.floor(size) / 64), shares = facts.treeShare[PROTOCOLS.indexOf(p)];
    const power = lines > 0 ? Math.floor(Math.log2(lines)) : -1;
    if (a === "Tree" && power >= 0 && power < shares.length) rate *= shares[power];
    return latency(a, p) * 1e-6 + size / (rate * 1e9);
  };
  const choose = (size, algorithms, protocols) => pairs
    .filter(([a, p]) => (!algorithms || algorithms.includes(a)) && (!protocols || protocols.includes(p)))
    .reduce((best, pair) => (best && seconds(size, ...best) <= seconds(size, ...pair) ? best : pair), null);
  return { pairs, latency, algbw, seconds, choose, busbw: (a, p) => algbw(a, p) * steps / m.ranks };
}

const binary = size => {
  const power = Math.min(3, Math.floor(Math.log2(size) / 10));
  return `${+(size / 1024 ** power).toPrecision(4)} ${["B", "KiB", "MiB", "GiB"][power]}`;
};
const micro = seconds => { const us = seconds * 1e6; return us < 1e4 ? `${+us.toPrecision(3)} µs` : `${+(us / 1e3).toPrecision(4)} ms`; };
const sizeOf = model => model.get("sizes")[model.get("size_at")];
const named = pair => (pair ? pair.join("/") : "nothing");

const graphsOf = model => model.get("nodes")[model.get("machine")];
const machineOf = model => graphsOf(model)[Math.min(model.get("graph"), graphsOf(model).length - 1)];

function picture(t, model, wide, name) {
  const left = 68, right = wide - 84, top = 14, bottom = 250, strip = bottom + 34, parts = [], isTime = model.get("show") === "time";
  const x = power => left + (power - FROM) / (TO - FROM) * (right - left), factor = t.busbw("Ring", "Simple") / t.algbw("Ring", "Simple");
  const value = (size, a, p) => { const s = t.seconds(size, a, p); return isTime ? s * 1e6 : size / s / 1e9 * factor; };
  const grid = Array.from({ length: (TO - FROM) * 4 + 1 }, (_, i) => FROM + i / 4);
  const all = t.pairs.flatMap(pair => [grid[0], grid.at(-1)].map(power => value(2 ** power, ...pair)));
  const low = Math.floor(Math.log10(Math.min(...all))), high = Math.ceil(Math.log10(Math.max(...all)));
  const y = v => bottom - (Math.log10(v) - low) / (high - low) * (bottom - top);
  const put = (tag, attrs, ...kids) => parts.push(svg(tag, attrs, ...kids));
  const word = (text, px, py, anchor = "start", extra = "") => put("text", { x: px, y: py, style: `text-anchor: ${anchor}; fill: currentColor; font-size: 12px; ${extra}` }, text);
  for (let decade = low; decade <= high; decade++) {
    put("path", { d: `M${left} ${y(10 ** decade)}H${right}`, stroke: "currentColor", "stroke-opacity": 0.15 });
    word(isTime ? (decade < 3 ? `${10 ** decade} µs` : `${10 ** (decade - 3)} ms`) : `${10 ** decade} GB/s`, left - 5, y(10 ** decade) + 4, "end");
  }
  for (let power = FROM; power <= TO; power += wide < 520 ? 10 : 5) {
    put("path", { d: `M${x(power)} ${top}V${bottom + 5}`, stroke: "currentColor", "stroke-opacity": 0.15 });
    word(binary(2 ** power), x(power), bottom + 19, power === TO ? "end" : "middle");
  }
  const labels = [];
  for (const [a, p] of t.pairs) {
    const hue = `var(${HUES[a === "NVLS" ? a : p]})`, line = grid.map(power => `${x(power).toFixed(1)} ${y(value(2 ** power, a, p)).toFixed(1)}`);
    put("path", { class: "ddp-line", d: `M${line.join("L")}`, fill: "none", "stroke-width": a === "Tree" ? 1.6 : 2.4, "stroke-dasharray": DASHES[a], style: `stroke: ${hue}` }, svg("title", {}, named([a, p])));
    labels.push([y(value(2 ** TO, a, p)) + 4, named([a, p]), hue]);
  }
  labels.sort((one, two) => one[0] - two[0]);
  labels.reduce((above, label) => (label[0] = Math.max(label[0], above + 13)), -99);
  const over = Math.max(0, labels.at(-1)[0] - bottom - 4);
  for (const [at, text] of labels) word(text, right + 5, at - over, "start", "font-size: 11.5px;");
  const at = x(Math.log2(sizeOf(model)));
  put("path", { d: `M${at} ${top}V${bottom + 5}M${at} ${strip - 8}V${strip + 16}`, stroke: "currentColor", "stroke-width": 1.4, "stroke-dasharray": "3 3" });
  word("choice", left - 5, strip + 12, "end");
  let begin = FROM;
  grid.forEach((power, i) => {  // a band an algorithm and protocol that the model chooses
    const here = t.choose(2 ** power), next = i + 1 < grid.length ? t.choose(2 ** grid[i + 1]) : null;
    if (named(here) === named(next)) return;
    const end = next ? power + 1 / 8 : TO, width = x(end) - x(begin), hue = HUES[here[0] === "NVLS" ? "NVLS" : here[1]];
    put("rect", { class: "ddp-band", x: x(begin), y: strip, width, height: 17, stroke: "currentColor", "stroke-opacity": 0.5, style: `fill: color-mix(in srgb, var(${hue}) 35%, var(--ddp-ground))` }, svg("title", {}, named(here)));
    if (named(here).length * 6.6 < width) word(named(here), x((begin + end) / 2), strip + 13, "middle");
    begin = end;
  });
  return svg("svg", { class: "ddp-chart", viewBox: `0 0 ${wide} ${strip + 22}`, width: wide, height: strip + 22, style: "display: block; max-width: 100%; font-family: inherit", role: "img", "aria-label": name }, parts);
}

function words(t, model) {
  const size = sizeOf(model), free = t.choose(size);
  const protocols = model.get("protocol") === "unset" ? null : [model.get("protocol")], algorithms = model.get("algorithm") === "unset" ? null : [model.get("algorithm")];
  const forced = t.choose(size, algorithms, protocols), best = t.seconds(size, ...free);
  const lines = [`${machineOf(model).ranks} GPUs, ${binary(size)}: NCCL would choose ${named(free)}, ${micro(best)}.`];
  if (protocols || algorithms) {
    const set = [protocols && `NCCL_PROTO=${protocols}`, algorithms && `NCCL_ALGO=${algorithms}`].filter(Boolean).join(" ");
    lines.push(forced ? `With ${set}: ${named(forced)}, ${micro(t.seconds(size, ...forced))}, ${(t.seconds(size, ...forced) / best).toFixed(2)} times as long.` : `With ${set}: nothing is left, and NCCL stops with an error.`);
  }
  return lines;
}

function table(t, size) {
  const head = ["", "latency", "busbw, large", `time at ${binary(size)}`];
  const rows = t.pairs.map(([a, p]) => [named([a, p]), `${t.latency(a, p).toFixed(1)} µs`, `${t.busbw(a, p).toFixed(1)} GB/s`, micro(t.seconds(size, a, p))]);
  return h("div", { class: "ddp-scroll", tabindex: "0", role: "region", "aria-label": "The model in numbers" }, h("table", { class: "ddp-data" },
    h("thead", {}, h("tr", {}, head.map(text => h("th", { scope: "col" }, text)))),
    h("tbody", {}, rows.map(row => h("tr", {}, row.map((text, i) => (i ? h("td", {}, text) : h("th", { scope: "row" }, text))))))));
}

/** A colour a protocol and a line an algorithm, of those that this node has. NVLS has a colour of its own. */
function legend(t) {
  const key = hue => h("i", { style: `display: inline-block; width: 1.4em; height: 4px; margin-right: .3em; vertical-align: middle; background: var(${hue})` });
  return [...PROTOCOLS.map(p => h("span", {}, key(HUES[p]), p)), h("span", {}, "Ring: solid"), h("span", {}, "Tree: dashed"),
    t.pairs.some(([a]) => a === "NVLS") && h("span", {}, key(HUES.NVLS), "NVLS: dotted")].filter(Boolean);
}

function render({ model, el }) {
  const chart = h("div", { class: "ddp-pictures" }), signs = h("p", { class: "ddp-legend" }), said = h("div", { "aria-live": "polite" }), details = h("div", {});
  const draw = () => {
    const t = tuning(model.get("facts"), machineOf(model)), lines = words(t, model);
    signs.replaceChildren(...legend(t));
    chart.replaceChildren(picture(t, model, Math.round(Math.max(320, Math.min(900, el.clientWidth || 720))), lines.join(" ")));
    said.replaceChildren(...lines.map(line => h("p", {}, line)));
    details.replaceChildren(table(t, sizeOf(model)));
  };
  const options = list => list.map(one => [one, one]);
  const gpus = h("div", {});
  const offer = () => {  // the numbers of GPUs that are known differ from node to node
    const graphs = graphsOf(model);
    if (model.get("graph") > graphs.length - 1) model.set("graph", graphs.length - 1);
    gpus.replaceChildren(range(model, "graph", "GPUs", { max: Math.max(1, graphs.length - 1), text: i => String(graphs[Math.min(i, graphs.length - 1)].ranks) }));
    gpus.querySelector("input").disabled = graphs.length < 2;
  };
  el.append(
    h("div", { class: "ddp-controls" },
      choice(model, "machine", "Node", options(model.get("names"))),
      choice(model, "show", "Show", [["time", "time"], ["bandwidth", "bus bandwidth"]]),
      choice(model, "protocol", "NCCL_PROTO", options(["unset", ...PROTOCOLS])),
      choice(model, "algorithm", "NCCL_ALGO", options(["unset", "Ring", "Tree"]))),
    h("div", { class: "ddp-sliders" },
      range(model, "size_at", "Message", { max: model.get("sizes").length - 1, text: i => binary(model.get("sizes")[i]) }),
      gpus),
    chart,
    signs, said, h("details", {}, h("summary", {}, "The model in numbers"), details));
  model.on("change:machine", () => { model.set("graph", graphsOf(model).length - 1); offer(); });
  for (const key of ["machine", "show", "protocol", "algorithm", "size_at", "graph"]) model.on(`change:${key}`, draw);
  offer();
  draw();
  let before = el.clientWidth;
  new ResizeObserver(() => { if (Math.abs(el.clientWidth - before) > 1) { before = el.clientWidth; draw(); } }).observe(el);
}
export default { render, tuning };
