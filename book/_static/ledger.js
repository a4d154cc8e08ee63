// Filters above the table of all claims: by verdict and by chapter. They are made here, so that a page whose scripts
// do not run shows every row and no dead control.
const table = document.querySelector("table.claim-ledger");
const rows = [...table.tBodies[0].rows].map((row) => ({
  row,
  verdict: row.querySelector(".verdict").textContent,
  chapter: row.querySelector(".chapter")?.textContent.trim() ?? "",
  colours: [...row.classList].filter((name) => name.startsWith("claim-")),
}));

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const count = (key, value) => rows.filter((each) => each[key] === value).length;
const values = (key) => [...new Set(rows.map((each) => each[key]))].filter(Boolean);

const boxes = values("verdict").map((verdict) => make("input", { type: "checkbox", value: verdict, defaultChecked: true }));
const chapters = make("select", {}, make("option", { value: "", textContent: `all chapters (${rows.length})` }));
for (const chapter of values("chapter"))
  chapters.append(make("option", { value: chapter, textContent: `${chapter} (${count("chapter", chapter)})` }));
const status = make("p", { role: "status" });
status.setAttribute("aria-live", "polite");

const labels = boxes.map((box) => {
  const { colours } = rows.find(({ verdict }) => verdict === box.value);
  return make("label", { className: colours.join(" ") }, box, " ", make("span", { className: "verdict" }, box.value),
    ` (${count("verdict", box.value)})`);
});
const form = make("form", { className: "ledger-filter" },
  make("fieldset", {}, make("legend", {}, "Show claims with the verdict"), ...labels),
  make("fieldset", {}, make("legend", {}, "Show claims of a chapter"), make("label", {}, "chapter", chapters), make("button", { type: "reset" }, "Show all claims")),
  status);

function show() {
  const wanted = new Set(boxes.filter((box) => box.checked).map((box) => box.value));
  let shown = 0;
  for (const { row, verdict, chapter } of rows) {
    row.hidden = !wanted.has(verdict) || Boolean(chapters.value && chapters.value !== chapter);
    shown += !row.hidden;
  }
  status.textContent = `${shown} of ${rows.length} claims are shown.`;
}

form.addEventListener("change", show);
form.addEventListener("reset", () => setTimeout(show)); // after the controls have their old values
form.addEventListener("submit", (event) => event.preventDefault());
// On a phone the cells stand below each other (ddplab.css); a table must still be announced as one.
table.setAttribute("role", "table");
for (const row of table.rows) {
  row.setAttribute("role", "row");
  for (const cell of row.cells) cell.setAttribute("role", cell.tagName === "TH" ? "columnheader" : "cell");
}
(table.closest(".pst-scrollable-table-container") ?? table).before(form);
show();
