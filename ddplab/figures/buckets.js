import { h, bytes, choice, range } from "./kit.js";
import { fillBuckets, firstBuckets } from "./lanes.js";
// Which parameter travels in which bucket: a strip a bucket, a piece a parameter, in the order of the buffer.
const MIBS = count => `${(count / 2 ** 20).toFixed(2)} MiB`;
const percent = share => `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)}%`;

function render({ model, el }) {
  const gradients = model.get("gradients"), names = model.get("names"), positions = model.get("positions"), backward = model.get("backward") || 1;
  const size = i => gradients[i][0] * gradients[i][1], ready = i => gradients[i][2] / backward;
  const capText = cap => (cap === null ? "1, then 25 MiB" : `${cap} MiB`);
  const strips = h("div", { class: "ddp-strips" }), said = h("p", { "aria-live": "polite" }), touched = h("p", { class: "ddp-cost" }), table = h("div", {});
  const first = () => model.get("iteration") === 0;
  const buckets = () => (first() ? firstBuckets(gradients, positions) : fillBuckets(gradients, model.get("caps")[model.get("cap_at")]));
  const about = (i, b) => `${names[i]}: ${bytes(size(i))}, ready at ${percent(ready(i))} of backward, bucket ${b}`;

  const draw = () => {
    const now = buckets(), sizes = now.map(b => b.reduce((sum, i) => sum + size(i), 0)), most = Math.max(...sizes);
    strips.replaceChildren(...now.flatMap((members, b) => {
      const complete = Math.max(...members.map(ready));
      const pieces = members.map(i => h("i", { style: `flex-grow: ${size(i)}; --ddp-depth: ${positions[i] / Math.max(1, names.length - 1)}`, title: about(i, b),
        onmouseenter: () => { touched.textContent = about(i, b); } }));
      return [h("div", { class: "ddp-tag" }, h("b", {}, `bucket ${b}`), h("span", {}, MIBS(sizes[b])), h("span", {}, `leaves at ${percent(complete)}`)),
        h("div", { class: "ddp-strip", role: "img", "aria-label": `bucket ${b}: ${members.length} parameters, ${names[members[0]]} to ${names[members.at(-1)]}`,
          style: `width: ${100 * sizes[b] / most}%; --ddp-rank: var(--ddp-${b % 8})` }, pieces)];
    }));
    const total = sizes.reduce((a, b) => a + b, 0), start = Math.max(...now[0].map(ready));
    said.textContent = first()
      ? `Iteration 0: ${now.length === 1 ? "one bucket" : `${now.length} buckets, one a dtype,`} for all ${names.length} parameters, ${MIBS(total)}, in the order of the module. It leaves when backward is over: nothing overlaps.`
      : `From iteration 1 on: ${now.length} bucket${now.length === 1 ? "" : "s"}, ${MIBS(total)}, filled in the order in which gradients became ready. The first leaves at ${percent(start)} of backward; the last holds ${MIBS(sizes.at(-1))}.`;
    const of = [];
    now.forEach((members, b) => members.forEach((i, place) => { of[i] = [b, place]; }));
    const head = ["parameter", "size", "ready", "bucket", "place"];
    table.replaceChildren(h("div", { class: "ddp-long", tabindex: "0", role: "region", "aria-label": "Parameters" }, h("table", { class: "ddp-data" },
      h("thead", {}, h("tr", {}, head.map((t, c) => h("th", { scope: "col", class: !c && "left" }, t)))),
      h("tbody", {}, names.map((name, i) => h("tr", {}, h("td", { class: "left" }, name), [bytes(size(i)), percent(ready(i)), ...of[i]].map(t => h("td", {}, t))))))));
    touched.textContent = "";
  };
  const caps = model.get("caps");
  el.append(h("div", { class: "ddp-sliders" },
    choice(model, "iteration", "Iteration", [[0, "0", "torch does not know the order yet"], [1, "1 and later", "the order of readiness was recorded"]]),
    range(model, "cap_at", "Bucket cap", { max: caps.length - 1, text: i => capText(caps[i]) })), strips,
  h("p", { class: "ddp-legend" }, h("span", {}, "Width: bytes. One piece a parameter; faint: near the input, strong: near the output. "), h("span", {}, "leaves at: part of backward that is over when the bucket is complete")),
  said, touched, h("details", {}, h("summary", {}, "The parameters as a table, in the order of readiness"), table));
  model.on("change:iteration", draw);
  model.on("change:cap_at", draw);
  draw();
}
export default { render, fillBuckets, firstBuckets };
