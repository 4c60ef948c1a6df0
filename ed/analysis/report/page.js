"use strict";

// --- theme switch

for (const input of document.querySelectorAll("#theme input")) {
  input.checked = input.value === themes.get();
  input.addEventListener("change", () => themes.set(input.value));
}

// --- sorting: rising, falling, then the order of the file again

function compareFields(a, b) {
  const [first, second] = [a, b].map((field) => field.dataset.key);
  if (first === undefined || second === undefined) {
    return (first === undefined) - (second === undefined); // empty fields come last
  }
  const [x, y] = [Number(first), Number(second)];
  if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
  return first.localeCompare(second, "en", { numeric: true });
}

function sortTable(table, column, direction) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  rows.forEach((row, place) => { row.dataset.place ??= place; });
  rows.sort((a, b) => {
    const order = Number(a.dataset.place) - Number(b.dataset.place);
    if (direction === "none") return order;
    const [x, y] = [a.cells[column], b.cells[column]];
    const sign = direction === "descending" && x.dataset.key && y.dataset.key ? -1 : 1;
    return sign * compareFields(x, y) || order;
  });
  body.append(...rows);
}

const NEXT = { none: "ascending", ascending: "descending", descending: "none" };
for (const head of document.querySelectorAll("th[scope=col]")) {
  head.setAttribute("aria-sort", "none");
  head.querySelector("button").addEventListener("click", () => {
    const direction = NEXT[head.getAttribute("aria-sort")];
    for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", direction);
    sortTable(head.closest("table"), head.cellIndex, direction);
  });
}

// --- a link to something folded unfolds it

function unfold() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) {
    fold.open = true;
  }
  target.scrollIntoView();
}
window.addEventListener("hashchange", unfold);
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='#']");
  // the hash does not change when the same link is followed twice, but the fold may be closed
  if (link && link.getAttribute("href") === location.hash) unfold();
});
unfold();
