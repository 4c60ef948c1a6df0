"use strict";

// --- SVG helpers; learning curves are drawn when their cell is opened

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function html(name, attributes, ...children) {
  const element = document.createElement(name);
  Object.assign(element, attributes);
  element.append(...children);
  return element;
}

const horizontal = (box, part) => box.left + part * (box.width - box.left - box.right);
const vertical = (box, part) => box.height - box.bottom - part * (box.height - box.top - box.bottom);
const short = (x) => Number(x.toFixed(1));
const concise = (x) => String(Number(x.toPrecision(4)));

// the 1-2-5 step that divides a range into about four parts
function niceStep(size) {
  const power = 10 ** Math.floor(Math.log10(size / 4));
  return power * [1, 2, 5, 10].find((m) => power * m >= (size / 4) * 0.999);
}

function ticks(low, high) {
  const step = niceStep(high - low || 1);
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, i) => (first + i) * step);
}

// a linear or logarithmic map of values to [0, 1], with round ticks
function scale(values, log = false) {
  const change = log ? Math.log10 : (x) => x;
  const [low, high] = [Math.min(...values), Math.max(...values)].map(change);
  const part = (x) => (change(x) - low) / (high - low || 1);
  const powers = log ? ticks(low, high).filter(Number.isInteger).map((e) => 10 ** e) : [];
  const shown = log ? (powers.length > 1 ? powers : [10 ** low, 10 ** high]) : ticks(low, high);
  return { part, ticks: shown.map((x) => [part(x), concise(x)]) };
}

function axes(box, yTicks, xTicks, xLabel) {
  const parts = [];
  for (const [part, text] of yTicks) {
    const y = short(vertical(box, part));
    parts.push(svg("line", { x1: box.left, x2: box.width - box.right, y1: y, y2: y, class: "grid" }));
    parts.push(svg("text", { x: box.left - 6, y: y + 4, "text-anchor": "end" }, text));
  }
  for (const [part, text] of xTicks) {
    const x = short(horizontal(box, part));
    parts.push(svg("text", { x, y: box.height - 22, "text-anchor": "middle" }, text));
  }
  const middle = short(horizontal(box, 0.5));
  parts.push(svg("text", { x: middle, y: box.height - 4, "text-anchor": "middle" }, xLabel));
  return parts;
}

const CURVES = { width: 320, height: 190, left: 48, right: 14, top: 10, bottom: 40 };
const seriesStyle = (place) => `line s${place % 6}${place >= 6 ? " again" : ""}`;
const steps = ([part, text]) => [part, Number(text) >= 1000 ? `${Number(text) / 1000}k` : text];

function lineChart({ title, log, steps: at, lines: columns }, names) {
  const known = (values) => values.map((y, i) => [at[i], y]).filter(([, y]) => y !== null);
  const lines = Object.fromEntries(Object.entries(columns).map(([name, y]) => [name, known(y)]));
  const points = Object.values(lines).flat();
  const x = scale([0, ...points.map((p) => p[0])]);
  const y = scale(points.map((p) => p[1]), log);
  const parts = axes(CURVES, y.ticks, x.ticks.map(steps), "step");
  for (const [name, line] of Object.entries(lines)) {
    const path = line.map(([step, value]) =>
      `${short(horizontal(CURVES, x.part(step)))} ${short(vertical(CURVES, y.part(value)))}`);
    parts.push(svg("path", { d: `M${path.join("L")}`, class: seriesStyle(names.indexOf(name)) }));
  }
  const last = Object.entries(lines).map(([name, line]) => `${name}: ${concise(line.at(-1)[1])}`);
  const label = `${title} by step; at the end ${last.join(", ")}`;
  const drawing = svg("svg", { viewBox: `0 0 ${CURVES.width} ${CURVES.height}`, role: "img",
    "aria-label": label }, ...parts);
  return html("figure", {}, html("figcaption", {}, title + (log ? ", log scale" : "")), drawing);
}

function keyItem(name, line, mark) {
  const parts = [svg("line", { x1: 1, x2: 21, y1: 4, y2: 4, class: line }), ...(mark ? [mark] : [])];
  return html("span", { className: "key-item" },
    svg("svg", { viewBox: "0 0 22 8", class: "key-line", "aria-hidden": "true" }, ...parts), name);
}

function drawCurves(place) {
  const charts = JSON.parse(place.dataset.curves);
  const names = [...new Set(charts.flatMap((chart) => Object.keys(chart.lines)))];
  const key = names.map((name, i) => keyItem(name, seriesStyle(i)));
  place.replaceChildren(...charts.map((chart) => lineChart(chart, names)));
  if (names.length > 1) place.after(html("p", { className: "legend" }, ...key));
}

for (const cell of document.querySelectorAll("details.cell:has(> .charts)")) {
  cell.addEventListener("toggle", () => drawCurves(cell.querySelector(".charts")), { once: true });
}
