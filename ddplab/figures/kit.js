// What every figure needs: elements, controls bound to the model, a transport bar. No library, no network, no globals.
const SVG = "http://www.w3.org/2000/svg";

const fill = (node, attrs, kids) => {
  for (const [key, value] of Object.entries(attrs || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...kids.flat(Infinity).filter(kid => kid != null && kid !== false));
  return node;
};

/** h("button", { class: "x", onclick }, "text", child): an HTML element. */
export const h = (tag, attrs, ...kids) => fill(document.createElement(tag), attrs, kids);

/** The same for SVG elements. */
export const svg = (tag, attrs, ...kids) => fill(document.createElementNS(SVG, tag), attrs, kids);

/** 76800000 -> "76.8 MB": decimal units, at most four digits. */
export const bytes = count => {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (count >= 999.95 && power < units.length - 1) { count /= 1000; power += 1; }
  return `${+count.toPrecision(4)} ${units[power]}`;
};

/** True where the reader asked the system for less motion. */
export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

const put = (model, key, value) => { model.set(key, value); model.save_changes(); };

// JupyterLab takes arrow keys from whatever has the focus inside an output, unless the control itself says no.
const own = { "data-lm-suppress-shortcuts": "true" };

/** Buttons of which one is pressed; options: [[value, text, hint], ...]. */
export function choice(model, key, label, options) {
  const buttons = options.map(([value, text, hint]) =>
    h("button", { type: "button", ...own, title: hint, onclick: () => put(model, key, value) }, text));
  const show = () => buttons.forEach((button, i) => button.setAttribute("aria-pressed", options[i][0] === model.get(key)));
  model.on(`change:${key}`, show);
  show();
  return h("div", { class: "ddp-choice", role: "group", "aria-label": label }, h("span", { class: "ddp-label" }, label), ...buttons);
}

/** A drop-down list for numbers; options: [[value, text], ...]. */
export function select(model, key, label, options) {
  const box = h("select", { ...own, "aria-label": label, onchange: () => put(model, key, +box.value) },
    options.map(([value, text]) => h("option", { value }, text)));
  const show = () => { box.value = model.get(key); };
  model.on(`change:${key}`, show);
  show();
  return h("label", { class: "ddp-field" }, h("span", { class: "ddp-label" }, label), box);
}

/** A slider for any number; text(value) is what is shown and read aloud. */
export function range(model, key, label, { min = 0, max, step = 1, text = String }) {
  const out = h("output", {});
  const input = h("input", { type: "range", ...own, min, max, step, "aria-label": label, oninput: () => put(model, key, +input.value) });
  const show = () => {
    input.value = model.get(key);
    input.style.setProperty("--ddp-at", (input.value - min) / (max - min));
    out.textContent = text(+input.value);
    input.setAttribute("aria-valuetext", out.textContent);
  };
  model.on(`change:${key}`, show);
  show();
  return h("label", { class: "ddp-field" }, h("span", { class: "ddp-label" }, label), input, out);
}

/** A field to type a number into; what lies outside of min to max is not taken and marked as wrong. */
export function entry(model, key, label, { min, max, whole = false }) {
  const input = h("input", { type: "number", ...own, min, max, step: whole ? 1 : "any", "aria-label": label });
  input.addEventListener("input", () => {
    const value = input.valueAsNumber, good = value >= min && value <= max && (!whole || Number.isInteger(value));
    input.setAttribute("aria-invalid", String(!good));
    if (good) put(model, key, value);
  });
  const show = () => { if (input.valueAsNumber !== model.get(key)) input.value = model.get(key); };
  model.on(`change:${key}`, show);
  show();
  return h("label", { class: "ddp-field" }, h("span", { class: "ddp-label" }, label), input);
}

const ICONS = { back: "M13 3 5 8l8 5z", play: "M4 2.5 13 8l-9 5.5z", pause: "M4 3h3v10H4zM9 3h3v10H9z", forward: "M3 3l8 5-8 5z" };
const icon = name => svg("svg", { viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" },
  svg("path", { d: ICONS[name], fill: "currentColor" }));

/** Back, play, forward and a slider that drive model "step" from 0 to last(); say(step) is what the slider announces.
 *  `above` stands over the slider. The caller draws it again with show(). */
export function transport(model, { last, say, above = [], pace = 1400 }) {
  let timer = null;
  const go = step => put(model, "step", Math.max(0, Math.min(last(), step)));
  const pause = () => { clearInterval(timer); timer = null; face(); };
  const tick = () => {
    if (!bar.isConnected || model.get("step") >= last()) return pause();
    go(model.get("step") + 1);
    if (model.get("step") >= last()) pause();
  };
  const start = () => {
    if (model.get("step") >= last()) go(0);
    timer = setInterval(tick, pace);
    face();
  };
  const face = () => play.replaceChildren(icon(timer ? "pause" : "play"), timer ? "Pause" : "Play");
  const button = (name, kids, onclick) => h("button", { type: "button", ...own, class: `ddp-${name}`, onclick }, kids);
  const play = button("play", [], () => (timer ? pause() : start()));
  const move = by => { if (timer) pause(); go(model.get("step") + by); };
  const back = button("back", icon("back"), () => move(-1));
  const forward = button("forward", icon("forward"), () => move(+1));
  back.setAttribute("aria-label", "One step back");
  forward.setAttribute("aria-label", "One step forward");
  const slider = h("input", { type: "range", ...own, class: "ddp-slider", min: 0, "aria-label": "Step",
    oninput: () => { if (timer) pause(); go(+slider.value); } });
  const bar = h("div", { class: "ddp-transport" }, back, play, forward, h("div", { class: "ddp-track" }, above, slider));
  const show = () => {
    slider.max = last();
    slider.value = model.get("step");
    slider.style.setProperty("--ddp-at", last() ? model.get("step") / last() : 0);
    slider.setAttribute("aria-valuetext", say(model.get("step")));
    back.disabled = model.get("step") <= 0;
    forward.disabled = model.get("step") >= last();
  };
  face();
  return { bar, show };
}
