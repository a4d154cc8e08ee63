import { h, svg, choice, range, transport } from "./kit.js";
// The compression explorer: a worker's values, their codes, what is decoded and left over; and the error of the sum so far.

/** To the nearest whole number, halves to the even one, as numpy does. */
const rint = x => { const low = Math.floor(x), over = x - low; return over < 0.5 || (over === 0.5 && low % 2 === 0) ? low : low + 1; };
/** The 16 bits of the nearest fp16 number. */
function halfBits(x) {
  const sign = x < 0 || Object.is(x, -0) ? 0x8000 : 0, size = Math.abs(x);
  if (size === 0) return sign;
  const power = Math.max(-14, Math.floor(Math.log2(size))), unit = 2 ** (power - 10);
  let steps = rint(size / unit), from = power;  // log2 may be off by one next to a power of two
  if (steps >= 2048) { steps = rint(size / (2 * unit)); from += 1; } else if (steps < 1024 && power > -14) { steps = rint(size / (unit / 2)); from -= 1; }
  if (steps >= 2048) { steps /= 2; from += 1; }
  return from > 15 ? sign | 0x7c00 : sign | (steps < 1024 ? steps : ((from + 15) << 10) | (steps - 1024));
}
function halfValue(bits) {
  const sign = bits & 0x8000 ? -1 : 1, power = (bits >> 10) & 31, rest = bits & 1023;
  return sign * (power === 31 ? Infinity : power ? 2 ** (power - 15) * (1 + rest / 1024) : 2 ** -14 * rest / 1024);
}

/** `encode` of ddplab/figures/compression.py. */
function encodeValues(x, method, k) {
  const n = x.length;
  if (method === "fp16") { const codes = x.map(halfBits); return { codes, scale: 1, decoded: codes.map(halfValue), nbytes: 2 * n }; }
  if (method === "int8") {
    const scale = Math.max(...x.map(Math.abs)) / 127 || 1, codes = x.map(v => rint(v / scale));
    return { codes, scale, decoded: codes.map(c => c * scale), nbytes: n + 4 };
  }
  if (method === "1-bit") {
    const scale = x.reduce((sum, v) => sum + Math.abs(v), 0) / n, codes = x.map(v => (v >= 0 ? 1 : 0));
    return { codes, scale, decoded: codes.map(b => (b ? scale : -scale)), nbytes: Math.ceil(n / 8) + 4 };
  }
  const chosen = new Set(x.map((v, i) => [Math.abs(v), i]).sort((a, b) => b[0] - a[0]).slice(0, k).map(([, i]) => i));
  return { codes: x.map((_, i) => (chosen.has(i) ? 1 : 0)), scale: 1, decoded: x.map((v, i) => (chosen.has(i) ? v : 0)), nbytes: 8 * chosen.size };
}

const norm = x => Math.sqrt(x.reduce((sum, v) => sum + v * v, 0));
const meanOf = rows => rows[0].map((_, i) => rows.reduce((sum, row) => sum + row[i], 0) / rows.length);
const plus = (a, b) => a.map((v, i) => v + b[i]);

/** `walk` of ddplab/figures/compression.py, with what was carried in and the sums so far. */
function walkSteps(gradients, method, feedback, k) {
  const zeros = gradients[0][0].map(() => 0);
  let carried = gradients[0].map(() => zeros), sumSent = zeros, sumTrue = zeros;
  return gradients.map(gradient => {
    const corrected = gradient.map((g, w) => plus(g, carried[w])), messages = corrected.map(x => encodeValues(x, method, k));
    const residual = corrected.map((x, w) => x.map((v, i) => v - messages[w].decoded[i])), before = carried;
    carried = feedback ? residual : carried;
    const sent = meanOf(messages.map(m => m.decoded));
    sumSent = plus(sumSent, sent);
    sumTrue = plus(sumTrue, meanOf(gradient));
    const size = norm(sumTrue), off = norm(sumSent.map((v, i) => v - sumTrue[i]));
    return { gradient, carried: before, corrected, messages, residual, sent, sumSent, sumTrue, error: size > 0 ? off / size : 0 };
  });
}

const short = v => {
  const size = Math.abs(v), text = size === 0 ? "0" : size >= 100 ? v.toFixed(0) : size >= 10 ? v.toFixed(1) : size >= 0.0095 ? v.toFixed(2) : size >= 0.00095 ? v.toFixed(3) : v.toExponential(0);
  return text.replace("e-", "e−").replace(/^-/, "−");
};
const percent = v => `${+(100 * v).toPrecision(v >= 0.1 ? 3 : 2)}%`;
const codeText = (code, method) => (method === "fp16" ? code.toString(16).toUpperCase().padStart(4, "0") : method === "int8" ? String(code).replace("-", "−") : method === "1-bit" ? String(code) : code ? "sent" : "·");
const wireText = (m, method, n) => ({
  fp16: `${n} × 2 bytes, in hexadecimal`,
  int8: `${n} bytes and a scale of ${m.scale.toPrecision(3)}`,
  "1-bit": `${n} bits and a scale of ${m.scale.toPrecision(3)}`,
  "top-k": `${m.nbytes / 8} × (value and index)`,
})[method];

/** One worker at one step: rows of bars with their numbers, one column a value. */
function lattice(steps, step, worker, method, wide, name) {
  const now = steps[step], n = now.gradient[0].length, column = wide / n, message = now.messages[worker], high = 70, parts = [];
  const highest = rows => Math.max(1e-12, ...rows.flat().map(Math.abs));
  let top = highest([now.gradient[worker], now.carried[worker], now.corrected[worker], message.decoded, now.residual[worker]]);
  const size = n > 10 || wide < 420 ? 10.5 : 12;
  const word = (text, x, y, extra = "", anchor = "middle") => parts.push(svg("text", { x, y, style: `text-anchor: ${anchor}; fill: currentColor; font-size: ${size}px; ${extra}` }, text));
  let y = 0;
  const head = text => { word(text, 1, y + 13, "font-size: 12.5px; font-weight: 600;", "start"); y += 18; };
  const bars = (title, hue, row, beside) => {
    head(title);
    const middle = y + high / 2, scale = (high / 2 - 13) / top;
    parts.push(svg("path", { d: `M0 ${middle}H${wide}`, stroke: "currentColor", "stroke-opacity": 0.4 }));
    row.forEach((v, i) => {
      const x = column * i + column * 0.16, width = column * 0.68, height = Math.abs(v) * scale;
      parts.push(svg("rect", { class: "ddp-bar", x, width, y: v >= 0 ? middle - height : middle, height, style: `fill: ${hue}` }, svg("title", {}, String(v))));
      if (beside) {
        const tall = beside[i] * scale;
        parts.push(svg("path", { d: `M${x - 2} ${middle - tall}h${width + 4}`, stroke: "currentColor", "stroke-width": 2.5 }, svg("title", {}, String(beside[i]))));
      }
      const edge = beside ? Math.max(height, v * beside[i] > 0 ? Math.abs(beside[i]) * scale : 0) : height;
      word(short(v), column * (i + 0.5), v >= 0 ? middle - edge - (beside ? 5 : 3) : middle + edge + (beside ? 13 : 11));
    });
    y += high;
  };
  bars("gradient of this step", "var(--ddp-0)", now.gradient[worker]);
  bars("+ carried over from the step before", "var(--ddp-1)", now.carried[worker]);
  bars("= what is encoded", "var(--ddp-3)", now.corrected[worker]);
  head(`on the wire: ${wireText(message, method, n)}`);
  message.codes.forEach((code, i) => {
    parts.push(svg("rect", { x: column * i + 2, y, width: column - 4, height: 24, rx: 3, style: `fill: ${code && method === "top-k" ? "color-mix(in srgb, var(--ddp-2) 30%, var(--ddp-ground))" : "var(--ddp-soft)"}; stroke: currentColor; stroke-opacity: .4` }));
    word(codeText(code, method), column * (i + 0.5), y + 16, "font-weight: 600;");
  });
  y += 30;
  bars("decoded by the others", "var(--ddp-2)", message.decoded);
  bars("left over: encoded minus decoded", "var(--ddp-1)", now.residual[worker]);
  const means = [now.sumSent, now.sumTrue].map(sum => sum.map(v => v / (step + 1)));
  top = highest(means);
  bars(`mean of ${step + 1} step${step ? "s" : ""}${wide < 420 ? "" : ", all workers"}: sent (bar) and true (line)`, "var(--ddp-2)", ...means);
  y += 4;
  return svg("svg", { class: "ddp-lattice", viewBox: `0 0 ${wide} ${y}`, width: wide, height: y, style: "display: block; max-width: 100%; font-family: inherit", role: "img", "aria-label": name }, parts);
}

/** The error of the sum so far over steps, with feedback and without, on a logarithmic axis. */
function errors(both, step, feedback, wide, name) {
  const left = 68, right = wide - 8, top = 10, bottom = 150, parts = [], last = both[0].length - 1;
  const all = both.flatMap(steps => steps.map(s => s.error)).filter(v => v > 0);
  const low = all.length ? Math.floor(Math.log10(Math.max(1e-8, Math.min(...all)))) : -1, high = Math.max(low + 1, all.length ? Math.ceil(Math.log10(Math.max(...all))) : 0);
  const x = i => left + (last ? i / last : 0) * (right - left), y = v => bottom - (Math.log10(Math.max(v, 10 ** low)) - low) / (high - low) * (bottom - top);
  const word = (text, px, py, anchor, extra = "") => parts.push(svg("text", { x: px, y: py, style: `text-anchor: ${anchor}; fill: currentColor; font-size: 12px; ${extra}` }, text));
  for (let decade = low; decade <= high; decade += high - low > 4 ? 2 : 1) {
    parts.push(svg("path", { d: `M${left} ${y(10 ** decade)}H${right}`, stroke: "currentColor", "stroke-opacity": 0.15 }));
    word(`${+(10 ** (decade + 2)).toPrecision(1)}%`, left - 5, y(10 ** decade) + 4, "end");
  }
  word("step 1", left, bottom + 17, "start");
  word(String(last + 1), right, bottom + 17, "end");
  parts.push(svg("path", { d: `M${x(step)} ${top}V${bottom + 4}`, stroke: "currentColor", "stroke-dasharray": "3 3" }));
  both.forEach((steps, off) => {
    const hue = `var(--ddp-${off ? 4 : 2})`, chosen = feedback === !off;
    parts.push(svg("path", { class: "ddp-line", d: `M${steps.map((s, i) => `${x(i).toFixed(1)} ${y(s.error).toFixed(1)}`).join("L")}`, fill: "none", "stroke-width": chosen ? 3 : 1.8, "stroke-dasharray": off ? "6 4" : "", style: `stroke: ${hue}` }));
    parts.push(svg("circle", { cx: x(step), cy: y(steps[step].error), r: chosen ? 5 : 3.5, style: `fill: ${hue}; stroke: currentColor` }));
  });
  return svg("svg", { class: "ddp-errors", viewBox: `0 0 ${wide} ${bottom + 22}`, width: wide, height: bottom + 22, style: "display: block; max-width: 100%; font-family: inherit", role: "img", "aria-label": name }, parts);
}

function listing(now, worker, method) {
  const exact = v => +v.toPrecision(5), message = now.messages[worker];
  const rows = [["gradient", now.gradient[worker].map(exact)], ["carried over", now.carried[worker].map(exact)], ["encoded", now.corrected[worker].map(exact)],
    ["on the wire", message.codes.map(code => codeText(code, method))], ["decoded", message.decoded.map(exact)], ["left over", now.residual[worker].map(exact)]];
  return h("div", { class: "ddp-scroll", tabindex: "0", role: "region", "aria-label": "The values in numbers" }, h("table", { class: "ddp-data" },
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "value"), now.gradient[worker].map((_, i) => h("th", { scope: "col" }, String(i + 1))))),
    h("tbody", {}, rows.map(([title, row]) => h("tr", {}, h("th", { scope: "row" }, title), row.map(v => h("td", {}, String(v))))))));
}

function render({ model, el }) {
  const gradients = model.get("gradients"), workers = gradients[0].length, n = gradients[0][0].length, last = gradients.length - 1;
  const place = h("div", { class: "ddp-pictures" }), under = h("div", {}), said = h("div", { "aria-live": "polite" }), details = h("div", {});
  const stepText = i => `step ${i + 1} of ${last + 1}`;
  const bar = transport(model, { last: () => last, say: stepText, pace: 700 });
  const keepK = range(model, "k", "k", { min: 1, max: n, text: k => `${k} of ${n} sent` });
  const draw = () => {
    const method = model.get("method"), feedback = model.get("feedback"), step = model.get("step"), worker = model.get("worker"), wide = Math.round(Math.max(300, Math.min(900, el.clientWidth || 720)));
    const both = [true, false].map(on => walkSteps(gradients, method, on, model.get("k"))), steps = both[feedback ? 0 : 1], now = steps[step], sent = now.messages[worker].nbytes;
    const lines = [
      `Worker ${worker + 1}, ${stepText(step)}: ${method} sends ${sent} bytes instead of ${4 * n}. What is left over has a norm of ${norm(now.residual[worker]).toPrecision(3)}; ${feedback ? "it is added to the next gradient." : "it is lost."}`,
      `After ${step + 1} step${step ? "s" : ""} the sum of what was sent is ${percent(now.error)} off the sum of the gradients; ${feedback ? "without" : "with"} error feedback it would be ${percent(both[feedback ? 1 : 0][step].error)}.`,
    ];
    keepK.hidden = method !== "top-k";
    keepK.style.display = method === "top-k" ? "" : "none";
    place.replaceChildren(lattice(steps, step, worker, method, wide, lines[0]));
    under.replaceChildren(errors(both, step, feedback, wide, lines[1]));
    said.replaceChildren(...lines.map(line => h("p", {}, line)));
    details.replaceChildren(listing(now, worker, method));
    bar.show();
  };
  const listed = list => list.map(one => [one, one]);
  el.append(
    h("div", { class: "ddp-controls" },
      choice(model, "method", "Method", listed(["fp16", "int8", "1-bit", "top-k"])),
      choice(model, "feedback", "Error feedback", [[true, "on"], [false, "off"]]),
      workers > 1 && choice(model, "worker", "Worker", Array.from({ length: workers }, (_, i) => [i, String(i + 1)]))),
    h("div", { class: "ddp-sliders" }, keepK),
    bar.bar, said, place,
    h("p", { class: "ddp-kind" }, "How far the sum of all steps is off"), under,
    h("p", { class: "ddp-legend" }, [["2", "solid: with error feedback"], ["4", "dashed: without"]].map(([hue, text]) => h("span", {}, h("i", { style: `display: inline-block; width: 1.4em; height: 4px; margin-right: .3em; vertical-align: middle; background: var(--ddp-${hue})` }), text))),
    h("details", {}, h("summary", {}, "The values in numbers"), details));
  for (const key of ["method", "feedback", "worker", "k", "step"]) model.on(`change:${key}`, draw);
  draw();
  let before = el.clientWidth;
  new ResizeObserver(() => { if (Math.abs(el.clientWidth - before) > 1) { before = el.clientWidth; draw(); } }).observe(el);
}
export default { render, encodeValues, walkSteps };
