import { h, svg, range } from "./kit.js";
// One step as its link sees it: bursts, the mean against 85%, and what the article's rules and ours make of it.
const RANKS = 8, FORWARD = 1 / 3;
const HEALTH_CSS = `
.ddp-health .ddp-sliders { display: grid; gap: 0 1.4rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); }
.ddp-health .ddp-sliders .ddp-field { grid-template-columns: 6.8em 1fr 9.4em; }
.ddp-health svg { display: block; width: 100%; height: auto; margin-top: .6rem; }
.ddp-health svg text { fill: currentColor; font-size: 13px; }
.ddp-health .ddp-bars { display: grid; gap: .5rem 1.4rem; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr)); margin-top: .6rem; }
.ddp-health .ddp-bar { position: relative; height: 14px; border: 1px solid var(--ddp-line); border-radius: 3px; overflow: hidden; }
.ddp-health .ddp-bar i { position: absolute; inset: 0 auto 0 0; background: var(--ddp-accent); opacity: .65; }
.ddp-health .ddp-bar b { position: absolute; top: 0; bottom: 0; width: 2px; background: currentColor; }
.ddp-health .ddp-rule { font-size: 14px; display: flex; justify-content: space-between; gap: 1rem; }
.ddp-health .ddp-rule b { white-space: nowrap; }
.ddp-health .ddp-says { font-weight: 600; min-height: 3em; }`;

/** As `step_on` and `judged` in linkhealth.py; times in seconds, buckets are [start, end] since backward began. */
function judge(compute_ms, gradient_MB, buckets, peak, usable, health) {
  const backward = compute_ms / 1e3 * (1 - FORWARD), forward = compute_ms / 1e3 * FORWARD;
  const sent = gradient_MB * 1e6 * 2 * (RANKS - 1) / RANKS, transfer = sent / buckets / (usable * 1e9 * health / 100);
  const spans = [];
  let end = 0;
  for (let k = 0; k < buckets; k++) {
    const start = Math.max(end, backward * (k + 1) / buckets);
    end = start + transfer;
    spans.push([start, end]);
  }
  const done = Math.max(backward, end), step = forward + done, busy = transfer * buckets;
  const values = [sent / step / 1e9 / peak, transfer / backward, sent / busy / 1e9 / usable, (done - backward) / step];
  const holds = [values[0] >= 0.85, values[1] < 1 / 3, values[2] >= 0.8 - 1e-9, values[3] <= 0.1 + 1e-9];
  return { forward, backward, done, step, spans, values, holds };
}

const RULES = [["article", "link busy, on average", "at least", 0.85], ["article", "one all-reduce over backward", "below", 1 / 3],
  ["ours", "busbw over reference", "at least", 0.8], ["ours", "exposed over step", "at most", 0.1]];
const percent = part => `${+(part * 100).toPrecision(part < 0.1 ? 2 : 3)}%`;

/** The two lanes of a step, `across` pixels wide. */
function lanesOf(found, across) {
  const scale = (across - 72) / found.step, at = t => 64 + (found.forward + t) * scale;
  const box = (from, to, y, fill, label) => [
    svg("rect", { x: at(from), y, width: Math.max(1, (to - from) * scale), height: 24, fill, "fill-opacity": 0.45, stroke: "currentColor", "stroke-opacity": 0.5 }),
    (to - from) * scale > label.length * 8 + 4 && svg("text", { x: (at(from) + at(to)) / 2, y: y + 17, "text-anchor": "middle" }, label)];
  return svg("svg", { viewBox: `0 0 ${across} 84`, "aria-hidden": "true" }, svg("text", { x: 0, y: 21 }, "compute"), svg("text", { x: 0, y: 59 }, "link"),
    box(-found.forward, 0, 4, "var(--ddp-line)", "forward"), box(0, found.backward, 4, "var(--ddp-0)", "backward"),
    found.done > found.backward && box(found.backward, found.done, 4, "var(--ddp-bad)", "waits"),
    found.spans.map(([from, to], k) => box(from, to, 42, `var(--ddp-${k % 8})`, `${k}`)));
}

function render({ model, el }) {
  const lanes = h("div"), bars = h("div", { class: "ddp-bars" }), says = h("p", { class: "ddp-says" });
  const spoken = h("p", { class: "ddp-spoken", "aria-live": "polite" });
  const draw = () => {
    const [name, peak, usable] = model.get("links")[model.get("link")], health = model.get("health");
    const found = judge(model.get("computes")[model.get("compute")], model.get("gradients")[model.get("gradient")], model.get("buckets"), peak, usable, health);
    lanes.replaceChildren(lanesOf(found, Math.max(300, Math.min(900, el.clientWidth || 712))));
    bars.replaceChildren(...RULES.map(([whose, rule, word, limit], i) => {
      const most = Math.max(1, found.values[i]), share = part => `${100 * Math.min(1, part / most)}%`;
      return h("div", {}, h("div", { class: "ddp-rule" }, h("span", {}, `${whose}: ${rule} ${word} ${percent(limit)}`),
        h("b", {}, `${percent(found.values[i])} ${found.holds[i] ? "✓" : "✗"}`)),
      h("div", { class: "ddp-bar", "aria-hidden": "true" }, h("i", { style: `width: ${share(found.values[i])}` }), h("b", { style: `left: ${share(limit)}` })));
    }));
    const sentence = model.get("says")[+found.holds[2]][+found.holds[3]];
    says.textContent = sentence[0].toUpperCase() + sentence.slice(1) + ".";
    if (spoken.dataset.drawn) spoken.textContent = `${name}. ${RULES.map(([whose, rule], i) => `${whose}: ${rule} ${percent(found.values[i])}, ${found.holds[i] ? "holds" : "fails"}`).join("; ")}. ${sentence}`;
    spoken.dataset.drawn = "yes";
  };
  for (const key of ["compute", "gradient", "buckets", "link", "health"]) model.on(`change:${key}`, draw);
  const list = (key, label, values, text) => range(model, key, label, { max: values.length - 1, text: i => text(values[i]) });
  el.classList.add("ddp-health");
  el.append(h("style", {}, HEALTH_CSS), h("div", { class: "ddp-sliders" },
    list("compute", "Computing", model.get("computes"), ms => `${ms} ms a step`),
    list("gradient", "Gradients", model.get("gradients"), mb => `${mb} MB`),
    range(model, "buckets", "Buckets", { min: 1, max: 16, text: k => `${k}` }),
    list("link", "Link", model.get("links"), ([name]) => name),
    range(model, "health", "Link runs at", { min: 10, max: 100, step: 5, text: p => `${p}% of reference` })),
  lanes, bars, says, spoken);
  draw();
  let before = el.clientWidth;
  new ResizeObserver(() => { if (Math.abs(el.clientWidth - before) > 1) { before = el.clientWidth; draw(); } }).observe(el);
}
export default { render, judge };
