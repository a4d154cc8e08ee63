import { h, range } from "./kit.js";
// Accumulation windows: what each optimizer step adds up, in the right loop and in the article's, over two epochs.
const EPOCHS = 2, MOST_BATCHES = 16, MOST_EVERY = 8, SEVEN = [0, 1, 2, 3, 5, 6, 7]; // the red one means lost
const LOOPS = [["right", "Right windows"], ["article", "The article's loop"]];
const CSS = `
.ddp-windows .ddp-both { display: grid; gap: .8rem 2rem; margin-top: .8rem; }
@container (min-width: 700px) { .ddplab-figure .ddp-windows .ddp-both { grid-template-columns: 1fr 1fr; } }
.ddp-windows .ddp-loop { min-width: 0; }
.ddp-windows .ddp-loop > b { display: block; }
.ddp-windows .ddp-epoch { font-size: 12px; display: block; margin-top: .4rem; }
.ddp-windows .ddp-micros { display: grid; grid-template-columns: repeat(var(--ddp-n), minmax(0, 32px)); gap: 3px 2px; font-size: 12px; font-variant-numeric: tabular-nums; text-align: center; }
.ddp-windows .ddp-micro { border: 1.5px dashed var(--ddp-rank); border-radius: 4px; background: color-mix(in srgb, var(--ddp-rank) 10%, transparent); line-height: 1.2; padding: 2px 0; }
.ddp-windows .ddp-micro span { display: block; min-height: 1.2em; }
.ddp-windows .ddp-sync { border-style: solid; border-width: 2px; background: color-mix(in srgb, var(--ddp-rank) 38%, transparent); font-weight: 700; }
.ddp-windows .ddp-lost { --ddp-rank: var(--ddp-bad); background: repeating-linear-gradient(135deg, color-mix(in srgb, var(--ddp-bad) 45%, transparent) 0 1.5px, transparent 1.5px 6px); }
.ddp-windows .ddp-span { border-top: 3px solid var(--ddp-rank); white-space: nowrap; font-size: 12px; min-width: 0; }
.ddp-windows .ddp-span.ddp-step { font-weight: 700; }
.ddp-windows .ddp-facts { font-size: 14px; }`;

/** As `windows` in windows.py: [{ members: [[epoch, i], ...], applied, factor }, ...]. */
function windowsOf(batches, every, loop, epochs = EPOCHS) {
  const found = [];
  let open = [];
  for (let epoch = 0; epoch < epochs; epoch++) {
    for (let i = 0; i < batches; i++) {
      open.push([epoch, i]);
      const ends = loop === "article" ? i % every === 0 : (i + 1) % every === 0 || i === batches - 1;
      if (ends) { found.push({ members: open, applied: true, factor: loop === "article" ? open.length : 1 }); open = []; }
    }
  }
  return open.length ? [...found, { members: open, applied: false, factor: open.length }] : found;
}

/** The micro-batches of one epoch and, below them, a line for each piece of a window. */
function epochRow(found, epoch, batches) {
  const cells = [], spans = [];
  found.forEach((window, w) => {
    const here = window.members.filter(([e]) => e === epoch).map(([, i]) => i);
    if (!here.length) return;
    const [lastEpoch, last] = window.members.at(-1), steps = window.applied && lastEpoch === epoch;
    const colour = `--ddp-rank: var(--ddp-${window.applied ? SEVEN[w % 7] : "bad"})`, first = here[0];
    here.forEach(i => cells.push(h("div", { style: colour, class: `ddp-micro ${steps && i === last ? "ddp-sync" : ""} ${window.applied ? "" : "ddp-lost"}`,
      title: steps && i === last ? `micro-batch ${i}: all-reduce, then the optimizer steps` : `micro-batch ${i}: under no_sync` }, i, h("span", {}, steps && i === last ? "⇄" : ""))));
    const said = steps ? `×${window.factor}` : window.applied ? "→" : "lost";
    spans.push(h("div", { class: `ddp-span ${steps ? "ddp-step" : ""}`, style: `${colour}; grid-row: 2; grid-column: ${first + 1} / span ${here.length}` }, said));
  });
  return h("div", { class: "ddp-micros", style: `--ddp-n: ${batches}` }, cells, spans);
}

/** What the loop does, in two sentences. */
function facts(found) {
  const steps = found.filter(w => w.applied), left = found.filter(w => !w.applied).reduce((sum, w) => sum + w.members.length, 0);
  const across = steps.filter(w => w.members[0][0] !== w.members.at(-1)[0]).length;
  return [`Windows of ${steps.map(w => w.members.length).join(", ")}. Mean gradient times ${[...new Set(steps.map(w => w.factor))].sort((a, b) => a - b).join(", ")}.`,
    across ? ` ${across} window${across > 1 ? "s" : ""} across an epoch's end.` : "", left ? ` Lost: ${left} micro-batch${left > 1 ? "es" : ""}.` : " Nothing lost."].join("");
}

function render({ model, el }) {
  const both = h("div", { class: "ddp-both" }), spoken = h("p", { class: "ddp-spoken", "aria-live": "polite" });
  const draw = () => {
    const batches = model.get("batches"), every = model.get("every"), words = [];
    both.replaceChildren(...LOOPS.map(([loop, title]) => {
      const found = windowsOf(batches, every, loop), said = facts(found);
      words.push(`${title}: ${said}`);
      const rows = Array.from({ length: EPOCHS }, (_, epoch) => [h("span", { class: "ddp-epoch" }, `epoch ${epoch + 1}`), epochRow(found, epoch, batches)]);
      return h("div", { class: "ddp-loop", role: "group", "aria-label": title }, h("b", {}, title), rows, h("p", { class: "ddp-facts" }, said));
    }));
    if (spoken.dataset.drawn) spoken.textContent = `${batches} micro-batches, every ${every}. ${words.join(" ")}`;
    spoken.dataset.drawn = "yes";
  };
  for (const key of ["batches", "every"]) model.on(`change:${key}`, draw);
  el.classList.add("ddp-windows");
  el.append(h("style", {}, CSS),
    h("div", { class: "ddp-sliders" }, range(model, "batches", "Batches", { min: 1, max: MOST_BATCHES, text: n => `${n} in an epoch` }),
      range(model, "every", "every", { min: 1, max: MOST_EVERY, text: k => `${k} in a window` })), both,
    h("p", { class: "ddp-legend" }, h("span", {}, "dashed: under no_sync"), h("span", {}, h("b", {}, "⇄"), " all-reduce, then the optimizer steps"),
      h("span", {}, h("b", {}, "×4"), " the gradient is 4 times the window's mean"), h("span", {}, h("b", {}, "→"), " goes on in the next epoch")), spoken);
  draw();
}
export default { render, windowsOf };
