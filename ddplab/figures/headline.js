import { h, choice, entry } from "./kit.js";
// Three measured steps and what they say. As ddplab/headline.py: computing, exposed and hidden communication, the link.
const HEADLINE_CSS = `
.ddp-headline .ddp-entries { display: grid; gap: .3rem 1.2rem; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); margin-top: .6rem; }
.ddp-headline .ddp-entries .ddp-field { justify-content: space-between; gap: .6rem; font-size: 13px; }
.ddp-headline .ddp-entries input { font: inherit; font-size: 14px; color: inherit; background: var(--ddp-ground); border: 1px solid var(--ddp-line); border-radius: 6px; min-height: 34px; width: 7.2em; padding: 0 .5em; text-align: right; }
.ddp-headline .ddp-bars { display: grid; grid-template-columns: max-content 1fr; gap: 5px 10px; align-items: center; margin-top: .8rem; font-size: 13px; font-variant-numeric: tabular-nums; }
.ddp-headline .ddp-bar { display: flex; align-items: center; white-space: nowrap; }
.ddp-headline .ddp-bar i { display: block; height: 18px; flex: none; background: color-mix(in srgb, var(--ddp-accent) 35%, var(--ddp-ground)); border: 1px solid var(--ddp-accent); }
.ddp-headline .ddp-bar i + i { border: 1px solid var(--ddp-bad); border-left: 0; background: repeating-linear-gradient(135deg, var(--ddp-bad) 0 1.5px, transparent 1.5px 5px); }
.ddp-headline .ddp-bar span { padding-left: 7px; }
.ddp-headline .ddp-measured { font-weight: 700; }`;

/** As `three_runs` in headline.py; seconds. Throws a sentence where the three contradict each other. */
function threeRuns(noop, fp32, fp16, nbytes, ranks) {
  if (noop >= fp32) throw new Error("fp32 is no slower than no communication at all: nothing is exposed, and nothing about the link can be read off");
  if (fp16 >= fp32) throw new Error("fp16 is no faster than fp32: its cast costs more than its bytes save, and the link's speed cannot be read off");
  const exposed = fp32 - noop, communication = 2 * (fp32 - Math.max(fp16, noop)), hidden = Math.max(0, communication - exposed);
  return {
    noop, fp32, exposed, communication, hidden, ceiling: fp32 / noop, efficiency: noop / fp32,
    busbw: 2 * (ranks - 1) / ranks * nbytes / communication,
    step: bits => noop + Math.max(0, communication * bits / 32 - hidden),
    bitsFor: speedup => { const left = fp32 / speedup - noop; return left >= 0 ? 32 * (left + hidden) / communication : null; },
  };
}

const milli = seconds => `${+(seconds * 1e3).toPrecision(4)} ms`;

function told(runs) {
  const bits = runs.bitsFor(1.7), lines = [
    `Computing takes ${milli(runs.noop)}, and an fp32 step waits ${milli(runs.exposed)} for communication. That takes ${milli(runs.communication)} in all, ${milli(runs.hidden)} of them hidden: a bus bandwidth of ${+(runs.busbw * 8 / 1e9).toPrecision(4)} Gbit/s.`,
    `Scaling efficiency ${+(runs.efficiency * 100).toPrecision(3)}%. Communication for nothing would be ${+runs.ceiling.toPrecision(3)} times faster.`];
  lines.push(bits === null ? "No compression makes this step 1.7 times faster: its computing is too long." : `1.7 times faster needs ${bits > 32 ? "no compression at all" : `${+bits.toPrecision(3)} bits a value, if the codec costs nothing`}.`);
  return lines;
}

function bars(runs, methods) {
  const part = seconds => `calc((100% - 140px) * ${seconds / runs.fp32})`;
  return h("div", { class: "ddp-bars", role: "table", "aria-label": "Steps by what is sent" }, methods.map(([name, bits]) => {
    const step = runs.step(bits), waits = step - runs.noop, measured = bits === 32 || bits === 16 || bits === 0;
    return h("div", { role: "row", style: "display: contents" },
      h("span", { role: "rowheader", class: measured ? "ddp-measured" : "" }, name),
      h("div", { role: "cell", class: "ddp-bar" }, h("i", { style: `width: ${part(runs.noop)}` }), waits > 0 && h("i", { style: `width: ${part(waits)}` }),
        h("span", {}, `${milli(step)}, ${+(runs.fp32 / step).toPrecision(3)} ×`)));
  }));
}

function render({ model, el }) {
  const picture = h("div"), said = h("div", { "aria-live": "polite" });
  const draw = () => {
    try {
      const runs = threeRuns(...["noop_ms", "fp32_ms", "fp16_ms"].map(key => model.get(key) / 1e3), model.get("megabytes") * 1e6, model.get("ranks"));
      picture.replaceChildren(bars(runs, model.get("methods")));
      said.replaceChildren(...told(runs).map(line => h("p", {}, line)));
    } catch (problem) {
      picture.replaceChildren();
      said.replaceChildren(h("p", { class: "ddp-alarm" }, `These three steps contradict each other: ${problem.message}.`));
    }
  };
  const presets = new Map(model.get("presets"));
  model.on("change:preset", () => { for (const [key, value] of Object.entries(presets.get(model.get("preset")) || {})) model.set(key, value); });
  for (const key of ["noop_ms", "fp32_ms", "fp16_ms", "megabytes", "ranks"]) model.on(`change:${key}`, draw);
  const ms = { min: 0.001, max: 1e6 };
  el.classList.add("ddp-headline");
  el.append(h("style", {}, HEADLINE_CSS),
    h("div", { class: "ddp-controls" }, choice(model, "preset", "Numbers of", [...presets.keys()].map(name => [name, name]))),
    h("div", { class: "ddp-entries" },
      entry(model, "noop_ms", "sends nothing, ms", ms), entry(model, "fp32_ms", "fp32, ms", ms), entry(model, "fp16_ms", "fp16, ms", ms),
      entry(model, "megabytes", "gradients, MB", ms), entry(model, "ranks", "ranks", { min: 2, max: 100000, whole: true })),
    picture,
    h("p", { class: "ddp-legend" }, h("span", {}, "plain: computing"), h("span", {}, "hatched: waits for communication"), h("span", {}, "bold: measured, the others follow")),
    said);
  draw();
}
export default { render, threeRuns };
