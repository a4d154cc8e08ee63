// From a folder on disk a page may not read its neighbours: search without excerpts instead of failing on each hit.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

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
