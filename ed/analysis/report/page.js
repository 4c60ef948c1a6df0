"use strict";

// --- theme switch

for (const input of document.querySelectorAll("#theme input")) {
  input.checked = input.value === themes.get();
  input.addEventListener("change", () => themes.set(input.value));
}

// --- sorting: ascending, descending, then the original order

// "86.53 ± 0.43" and "1,950 of 3,900" are sorted by their first number
const NUMBER = /^[-+]?[\d.]+(e[-+]?\d+)?(?= ?(±|%|of|to|\[|$))/;
const sortText = (row, column) => row.cells[column].textContent.trim().replace("−", "-").replace(/,(?=\d)/g, "");

function compareTexts(first, second) {
  const [x, y] = [first, second].map((text) => parseFloat(text.match(NUMBER)));
  if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
  return first.localeCompare(second, "en", { numeric: true });
}

function sortTable(table, column, direction) {
  const rows = [...table.tBodies[0].rows];
  rows.forEach((row, place) => { row.dataset.place ??= place; });
  rows.sort((a, b) => {
    const order = Number(a.dataset.place) - Number(b.dataset.place);
    if (direction === "none") return order;
    const [x, y] = [a, b].map((row) => sortText(row, column));
    if (!x || !y) return !x - !y || order; // empty fields come last
    return (direction === "descending" ? -1 : 1) * compareTexts(x, y) || order;
  });
  table.tBodies[0].append(...rows);
}

const NEXT = { none: "ascending", ascending: "descending", descending: "none" };
for (const head of document.querySelectorAll(".wide thead th")) {
  if (!head.textContent.trim()) continue;
  head.setAttribute("aria-sort", "none");
  const button = html("button", { type: "button" }, ...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const direction = NEXT[head.getAttribute("aria-sort")];
    for (const other of head.parentNode.querySelectorAll("[aria-sort]")) other.ariaSort = "none";
    head.ariaSort = direction;
    sortTable(head.closest("table"), head.cellIndex, direction);
  });
}

// --- links open the collapsed element they point to

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
  // following the same link twice does not change the hash, but the element may be closed again
  if (link && link.getAttribute("href") === location.hash) unfold();
});
unfold();

// --- contents: collapsed on phones, with the visible section highlighted

const contents = document.querySelector(".contents details");
const narrow = matchMedia("(max-width: 64rem)");
const fold = () => { contents.open = !narrow.matches; };
narrow.addEventListener("change", fold);
fold();
contents.addEventListener("click", (event) => {
  if (narrow.matches && event.target.closest("a")) contents.open = false;
});

const links = [...contents.querySelectorAll("a")];
const targets = links.map((link) => document.querySelector(link.getAttribute("href")));

function markSection() {
  const passed = targets.filter((target) => target.getBoundingClientRect().top < innerHeight / 3);
  const end = scrollY + innerHeight >= document.documentElement.scrollHeight - 2;
  const current = end ? targets.at(-1) : passed.at(-1) || targets[0];
  links.forEach((link, i) => {
    if (targets[i] === current) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  });
}
let waiting = false;
addEventListener("scroll", () => {
  if (!waiting) requestAnimationFrame(() => { waiting = false; markSection(); });
  waiting = true;
}, { passive: true });
markSection();

// --- figures open larger

const dialog = document.getElementById("enlarged");
for (const button of document.querySelectorAll(".enlarge")) {
  button.addEventListener("click", () => {
    const image = button.querySelector("img").cloneNode();
    image.loading = "eager";
    for (const side of ["width", "height"]) image.removeAttribute(side); // shows all pixels
    dialog.querySelector("div").replaceChildren(image);
    dialog.showModal();
  });
}
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
