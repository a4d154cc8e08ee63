import { h, bytes, choice, select, transport } from "./kit.js";
import { VARIANTS, ring, states, finished, letter, span, terms } from "./collective.js";
import { ringPicture } from "./ringpicture.js";
import { hostPicture } from "./hostpicture.js";
import { notes } from "./notes.js";
// The stepper: the reader drives a collective step by step. Ranks and variant are chosen in the figure, unless a schedule came as data.
const NAMES = { article: "article", textbook: "textbook", nccl: "NCCL", gloo: "gloo" };
const NARROW = 5; // with more chunks than this a cell has no room for a long sum
const SIZES = [1000, 1e6, 25.6e6, 102.4e6, 1e9];

/** All that a frame shows, from the model alone. */
function frame(model) {
  const schedule = model.get("schedule") || ring(model.get("ranks"), model.get("variant"));
  const variant = model.get("schedule") ? null : model.get("variant");
  const step = Math.max(0, Math.min(model.get("step"), schedule.steps)), history = states(schedule);
  const sent = schedule.transfers.filter(t => t[0] === step - 1), part = model.get("nbytes") / schedule.chunks;
  const counts = Array.from({ length: schedule.ranks }, () => 0);
  for (const [when, src] of schedule.transfers) if (when < step) counts[src] += 1;
  return {
    schedule, variant, step, sent, part, counts, held: history[step],
    before: history[Math.max(0, step - 1)], owned: history[schedule.reduce_steps], direction: schedule.direction,
  };
}

/** [name, steps] of each phase, in order. */
function phasesOf(schedule) {
  const [first, second] = schedule.scatters ? ["reduce-scatter", "all-gather"] : ["reduce", "broadcast"];
  return schedule.phases || [[first, schedule.reduce_steps], [second, schedule.steps - schedule.reduce_steps]];
}

/** Which phase a step belongs to, -1 at the start. */
function phaseIndex(schedule, step) {
  let end = 0;
  return step === 0 ? -1 : phasesOf(schedule).findIndex(([, length]) => (end += length) >= step);
}

const phase = (schedule, step) => phasesOf(schedule)[phaseIndex(schedule, step)]?.[0] ?? "start";

/** What became of one slot of one rank in this step. */
function slot({ schedule, variant, step, sent, held, owned, direction }, rank, chunk) {
  const { ranks, chunks, reduce_steps } = schedule, ours = held[rank][chunk], full = finished(ours, ranks);
  const arrived = sent.find(([, , dst, c]) => dst === rank && c === chunk);
  const left = sent.some(([, src, , c]) => src === rank && c === chunk);
  return {
    ours, full, words: terms(ours, chunk, ranks),
    ends: chunks > NARROW && span(ours, chunk, ranks, direction),
    event: arrived ? (arrived[4] ? "added" : "copied") : left ? "sent" : "",
    owner: full && step >= reduce_steps && finished(owned[rank][chunk], ranks),
    // the article's picture after reduce-scatter: GPU r holds the full sum of chunk r
    wrong: variant === "article" && step === reduce_steps && rank === chunk && !full,
  };
}

const SIGNS = { added: "+", copied: "=", sent: "↗" };

function cell(view, rank, chunk) {
  const s = slot(view, rank, chunk), status = s.wrong ? "✗" : s.owner ? "★" : s.full ? "✓" : "";
  const kinds = [s.event, s.full && "full", s.owner && "owner", s.wrong && "wrong", s.wrong && rank === 0 && "first"].filter(Boolean).join(" ");
  const [joint, visible] = s.ends ? ["…", s.ends] : ["+", s.words], whole = s.words.join("+");
  const words = visible.flatMap((word, i) => (i ? [joint, h("wbr"), word] : [word]));
  const stripe = Array.from({ length: view.schedule.ranks }, (_, r) =>
    h("i", { class: s.ours.includes(r) && "on", style: `--ddp-rank: var(--ddp-${r % 8})` }));
  const spoken = [s.ends && whole, s.event && `${s.event} in this step`, s.owner && "owned", s.wrong && "not the full sum that the article shows"].filter(Boolean).join(", ");
  return h("div", { role: "cell", class: `ddp-cell ${kinds}`, title: whole },
    h("span", { class: "ddp-words" }, words), spoken && h("span", { class: "ddp-spoken" }, ` (${spoken})`),
    h("span", { class: "ddp-stripe", "aria-hidden": "true" }, stripe),
    h("span", { class: "ddp-event", "aria-hidden": "true" }, SIGNS[s.event] || ""), h("span", { class: "ddp-status", "aria-hidden": "true" }, status));
}

function table(view) {
  const { ranks, chunks } = view.schedule, wide = chunks > 8;
  const head = h("div", { role: "row" }, h("div", { role: "columnheader", class: "ddp-head" }, "sent so far"),
    Array.from({ length: chunks }, (_, c) => h("div", { role: "columnheader", class: "ddp-head" }, chunks > 4 ? h("span", { class: "ddp-spoken" }, "chunk ") : "chunk ", c + 1)));
  const rows = view.held.map((row, rank) => h("div", { role: "row" },
    h("div", { role: "rowheader", class: "ddp-who", style: `--ddp-rank: var(--ddp-${rank % 8})` },
      h("b", {}, `GPU${rank} `, h("span", { class: "ddp-letter" }, letter(rank))), h("span", {}, bytes(view.counts[rank] * view.part))),
    row.map((_, chunk) => cell(view, rank, chunk))));
  return h("div", { class: "ddp-scroll", tabindex: wide && "0", role: wide && "region", "aria-label": wide && "Chunks of every rank" },
    h("div", { role: "table", class: `ddp-table ${chunks > NARROW ? "narrow" : ""}`, "aria-label": "What every rank holds", style: `--ddp-chunks: ${chunks}; --ddp-lines: ${chunks >= NARROW ? 2 : 1}` }, head, rows));
}

const LEGEND = [["+", "added in this step"], ["=", "copied in this step"], ["↗", "sent in this step"], ["✓", "full sum"], ["★", "full sum, on its owner"], ["✗", "the article shows a full sum here"]];

function render({ model, el }) {
  const live = () => model.get("schedule") || ring(model.get("ranks"), model.get("variant"));
  const say = step => `step ${step} of ${live().steps}, ${phase(live(), step)}`;
  const spans = phasesOf(live()).map(() => h("span", {})), phases = h("div", { class: `ddp-phases ${spans.length > 2 ? "more" : ""}`, "aria-hidden": "true" }, spans);
  const { bar, show } = transport(model, { last: () => live().steps, say, above: phases });
  const picture = h("div", {}), chunks = h("div", {}), panes = h("div", { class: "ddp-panes" }, picture, chunks), note = h("div", { class: "ddp-note" }), cost = h("p", { class: "ddp-cost" });
  const legend = h("p", { class: "ddp-legend" }), spoken = h("p", { class: "ddp-spoken", "aria-live": "polite" });
  const sizes = [...new Set([...SIZES, model.get("nbytes")])].sort((a, b) => a - b).map(size => [size, bytes(size)]);
  const ranks = Array.from({ length: 7 }, (_, i) => [i + 2, String(i + 2)]);
  const hints = { article: "GPU0 first sends A2 to GPU1", textbook: "GPU0 first sends A1 to GPU1", nccl: "GPU0 first sends its last chunk to GPU1", gloo: "GPU0 first sends A2 to the last GPU" };

  let shown = null;
  const draw = () => {
    const view = frame(model), { schedule, step } = view;
    show();
    phasesOf(schedule).forEach(([name, length], i) => {
      spans[i].textContent = `${name}: ${length} step${length === 1 ? "" : "s"}`;
      spans[i].style.flexGrow = length;
      spans[i].className = phaseIndex(schedule, step) === i ? "on" : "";
    });
    const turn = view.direction > 0 ? "↻" : "↺", title = [step ? `step ${step} of ${schedule.steps}` : "start", `${step ? phase(schedule, step) : "ring"} ${turn}`];
    const stacked = schedule.ranks > 2 * (schedule.ranks_per_host || schedule.ranks); // three hosts and more want the whole width
    panes.classList.toggle("ddp-many", schedule.ranks > 4 || schedule.chunks > NARROW || stacked);
    panes.classList.toggle("ddp-stacked", stacked);
    const draw = schedule.ranks_per_host ? hostPicture : ringPicture;
    picture.replaceChildren(draw({ ...view, title, moved: shown !== null && step === shown + 1 }));
    chunks.replaceChildren(table(view));
    const { text, alarm, cost: price, full } = notes(view, phase(schedule, step));
    note.replaceChildren(h("p", {}, text), ...(alarm ? [h("p", { class: "ddp-alarm" }, alarm)] : []));
    cost.replaceChildren(...price);
    const signs = LEGEND.filter(([sign]) => sign !== "✗" || view.variant === "article");
    if (view.direction && schedule.chunks > NARROW) signs.push(["B1…E1", "the sum along the ring from B1 to E1"]);
    if (schedule.ranks_per_host) signs.push(["1, 2", "on an arrow: the chunks that it carries; thick: from host to host"]);
    legend.replaceChildren(...signs.map(([sign, meaning]) => h("span", {}, h("b", {}, sign), ` ${meaning}`)));
    if (shown !== null) spoken.textContent = full;
    shown = step;
  };
  // another number of ranks keeps the place in the story: the end of reduce-scatter stays the end of reduce-scatter
  let half = live().reduce_steps;
  const resize = () => {
    const { steps, reduce_steps } = live(), step = model.get("step");
    const next = step === half ? reduce_steps : Math.min(step, steps);
    half = reduce_steps;
    shown = null;
    if (next === step) draw(); else { model.set("step", next); model.save_changes(); }
  };
  model.on("change:step", draw);
  model.on("change:nbytes", draw);
  model.on("change:ranks", resize);
  model.on("change:variant", resize);

  const choices = model.get("schedule")
    ? [h("strong", { class: "ddp-name" }, model.get("schedule").name)]
    : [choice(model, "variant", "Ring", Object.keys(VARIANTS).map(key => [key, NAMES[key], hints[key]])), select(model, "ranks", "Ranks", ranks)];
  el.classList.add("ddp-stepper");
  el.append(h("div", { class: "ddp-controls" }, ...choices, select(model, "nbytes", "Gradient S", sizes)), bar,
    panes, note, cost,
    legend, spoken);
  draw();
}
export default { render, ring, states, VARIANTS };
