// From a folder on disk a page may not read its neighbours: search without excerpts instead of failing on each hit.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// A long name may break behind _ . / = , and the browser does not know.
const joints = name => name.split(/(?<=[A-Za-z)\]"][_./=,]+)(?=[A-Za-z0-9])/).flatMap((part, at) => at ? [document.createElement("wbr"), part] : [part]);

// Numbers stand right, words left: pandas does not say which column holds which.
addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("table.dataframe")) {
    const rows = [...(table.tBodies[0]?.rows ?? [])].map(row => [...row.cells].filter(cell => cell.tagName === "TD"));
    const names = Math.max(0, ...[...(table.tBodies[0]?.rows ?? [])].map(row => row.querySelectorAll("th").length));  // of rows
    for (const row of table.tHead?.rows ?? []) for (const cell of [...row.cells].slice(0, names)) cell.classList.add("words");
    for (let back = 1; back <= (rows[0]?.length ?? 0); back++) {  // from the right: on the left stand names of rows
      const column = rows.map(cells => cells.at(-back)).filter(cell => cell), full = column.filter(cell => cell.textContent.trim());
      if (!full.some(cell => /^[a-z]{2}/i.test(cell.textContent) && !/^(none|true|false|nan|nat|inf)$/i.test(cell.textContent))) continue;
      for (const row of table.tHead?.rows ?? []) if (![...row.cells].some(cell => cell.colSpan > 1)) column.push(row.cells[row.cells.length - back]);
      for (const cell of column) cell?.classList.add("words");
    }
    for (const cell of table.querySelectorAll("tbody :is(th, td), thead th:first-child")) {
      const text = cell.textContent.trim();
      cell.classList.add(...(text.length > 60 ? ["sentence", "paragraph"] : text.length > 16 ? ["sentence"] : []));
      if (/\S{25}/.test(text) && !cell.children.length) cell.replaceChildren(...joints(text));
    }
  }
  for (const part of document.querySelectorAll("article code.literal span.pre")) {
    const text = part.textContent;
    if (part.children.length) continue;
    if (text.startsWith("-") && text.length < 24) part.style.whiteSpace = "nowrap";  // an option is no hyphenated word
    else if (text.length > (innerWidth > 600 ? 20 : 12) && part.closest("th, td")) part.replaceChildren(...joints(text));
  }
});

// What unfolds may scroll: the theme finds boxes that scroll, and gives them to the keyboard, at a change of size only.
// And not formulas: those are found here.
addEventListener("toggle", () => dispatchEvent(new Event("resize")), true);
for (const change of ["load", "resize"]) addEventListener(change, () => {
  for (const box of document.querySelectorAll("article div.math")) box.tabIndex = box.scrollWidth > box.clientWidth ? 0 : -1;
});

// Paper is white, and code that is folded on the screen is wanted on paper.
let before = null;
addEventListener("beforeprint", () => {
  const root = document.documentElement;
  before = { theme: root.dataset.theme, folded: [...document.querySelectorAll("article details:not([open])")] };
  root.dataset.theme = "light";
  for (const details of before.folded) details.open = true;
});
addEventListener("afterprint", () => {
  if (!before) return;
  document.documentElement.dataset.theme = before.theme;
  for (const details of before.folded) details.open = false;
  before = null;
});
