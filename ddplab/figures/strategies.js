import { h, choice, entry, bytes } from "./kit.js";
// Memory and traffic of each strategy, as `strategies` in ddplab/strategies.py.
const STRATEGY_CSS = `
.ddp-strategies .ddp-entries { display: grid; gap: .3rem 1.2rem; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); margin-top: .6rem; }
.ddp-strategies .ddp-entries .ddp-field { justify-content: space-between; gap: .6rem; font-size: 13px; }
.ddp-strategies .ddp-entries input { font: inherit; font-size: 14px; color: inherit; background: var(--ddp-ground); border: 1px solid var(--ddp-line); border-radius: 6px; min-height: 34px; width: 7.2em; padding: 0 .5em; text-align: right; }
.ddp-strategies .ddp-scroll { overflow-x: auto; margin-top: .8rem; }
.ddp-strategies table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; margin: 0; }
.ddp-strategies :is(th, td) { padding: .25rem .5rem; border-bottom: 1px solid var(--ddp-line); text-align: right; background: none; color: inherit; }
.ddp-strategies :is(th, td):first-child { text-align: left; }
.ddp-strategies .ddp-room { display: inline-block; width: 80px; height: 10px; border: 1px solid var(--ddp-line); vertical-align: middle; margin-right: 7px; }
.ddp-strategies .ddp-room i { display: block; height: 100%; background: var(--ddp-accent); }
.ddp-strategies .ddp-full .ddp-room i { background: repeating-linear-gradient(135deg, var(--ddp-bad) 0 2px, transparent 2px 5px); }
.ddp-strategies .ddp-full td:nth-child(2) { font-weight: 700; }
@media (max-width: 600px) { .ddp-strategies .ddp-room { display: none; } .ddp-strategies :is(th, td) { padding: .25rem .3rem; font-size: 12px; } }`;

/** Rows of { name, held, sent, leaving } in bytes. given: parameters, hosts, perHost, p, g, s (bytes each), blocks, every. */
function strategyRows({ parameters, hosts, perHost, p, g, s, blocks, every }) {
  const P = parameters * p, G = parameters * g, S = parameters * s, ranks = hosts * perHost;
  const part = n => (n - 1) / n, far = hosts > 1 ? 1 : 0, gathered = Math.min(2 / blocks, 1) * P + G / blocks;
  const flat = (name, held, volume) => ({ name, held, sent: part(ranks) * volume, leaving: part(ranks) * volume * far });
  return [
    flat("DDP", P + G + S + G, 2 * G),
    flat("ZeRO-1", P + G + S / ranks + G, G + P),
    flat("ZeroRedundancyOptimizer", P + G + S / ranks + G, 2 * G + P),
    flat("FSDP2, parameters kept", (P + G + S) / ranks + P + G / blocks, P + G),
    flat("FSDP2", (P + G + S) / ranks + gathered, 2 * P + G),
    { name: "HSDP", held: (P + G + S) / perHost + (perHost > 1 ? gathered : 0),
      sent: part(perHost) * (2 * P + G) + 2 * part(hosts) * G / perHost, leaving: 2 * part(hosts) * G },
    flat("local SGD", P + G + S, 2 * P / every),
    flat("DiLoCo", P + G + S + 2 * P, 2 * P / every),
  ];
}

const SIMPLEST = ["DDP", "ZeRO-1", "HSDP", "FSDP2"];
const span = seconds => seconds >= 1 ? `${+seconds.toPrecision(3)} s` : `${+(seconds * 1e3).toPrecision(3)} ms`;

function verdict(rows, memory, hosts, rate) {
  const fits = rows.filter(row => row.held <= memory).map(row => row.name);
  const first = SIMPLEST.find(name => fits.includes(name) && !(name === "HSDP" && hosts === 1));
  if (!first) return `Nothing fits into ${bytes(memory)}, even without activations: more ranks, smaller numbers, or a model that is itself cut up.`;
  const left = memory - rows.find(row => row.name === first).held;
  const lines = [`The simplest that fits is ${first}; it leaves ${bytes(left)} for activations.`];
  if (hosts > 1) lines.push(`Its bytes need ${span(rows.find(row => row.name === first).leaving / rate)} between hosts for each optimizer step. Hold that against your backward: what is longer than it stays exposed.`);
  return lines.join(" ");
}

function render({ model, el }) {
  const body = h("tbody"), said = h("p", { "aria-live": "polite" });
  const given = () => ({ parameters: model.get("billions") * 1e9, hosts: model.get("hosts"), perHost: model.get("per_host"),
    ...Object.fromEntries(["p", "g", "s"].map((key, i) => [key, model.get("kinds")[model.get("kind")][i]])), blocks: model.get("blocks"), every: model.get("every") });
  const draw = () => {
    const rows = strategyRows(given()), memory = model.get("memory_GB") * 1e9, rate = model.get("gbit") * 1e9 / 8;
    body.replaceChildren(...rows.map(row => h("tr", { class: row.held > memory ? "ddp-full" : "" },
      h("th", { scope: "row" }, row.name),
      h("td", {}, h("span", { class: "ddp-room", "aria-hidden": "true" }, h("i", { style: `width: ${Math.min(100, 100 * row.held / memory)}%` })),
        bytes(row.held), row.held > memory ? ", too much" : ""),
      h("td", {}, bytes(row.sent)), h("td", {}, bytes(row.leaving)), h("td", {}, model.get("hosts") > 1 ? span(row.leaving / rate) : "–"))));
    said.textContent = verdict(rows, memory, model.get("hosts"), rate);
  };
  const fields = [["billions", "parameters, billions", 0.001, 1e5], ["per_host", "GPUs a host", 1, 1024, true], ["hosts", "hosts", 1, 1e5, true],
    ["memory_GB", "memory of a GPU, GB", 0.1, 1e5], ["gbit", "link of a host, Gbit/s", 0.01, 1e5], ["blocks", "FSDP's blocks", 1, 1e4, true], ["every", "local steps", 1, 1e6, true]];
  for (const [key] of [...fields, ["kind"]]) model.on(`change:${key}`, draw);
  el.classList.add("ddp-strategies");
  el.append(h("style", {}, STRATEGY_CSS),
    h("div", { class: "ddp-controls" }, choice(model, "kind", "Numbers", Object.keys(model.get("kinds")).map(name => [name, name]))),
    h("div", { class: "ddp-entries" }, fields.map(([key, label, min, max, whole]) => entry(model, key, label, { min, max, whole }))),
    h("div", { class: "ddp-scroll", tabindex: "0", role: "region", "aria-label": "Strategies" }, h("table", {},
      h("thead", {}, h("tr", {}, ["strategy", "held by a GPU", "sent by a GPU", "leaves a host", "time between hosts"].map(name => h("th", { scope: "col" }, name)))), body)),
    said);
  draw();
}
export default { render, strategyRows, verdict };
