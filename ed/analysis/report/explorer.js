"use strict";

// --- the mathematics, as in ed/core: basis, damped least squares, effective degree

const BASES = {
  chebyshev: (t, k, last, before) => 2 * t * last - before,
  // Bonnet: (k + 1) P_{k+1} = (2k + 1) t P_k - k P_{k-1}
  legendre: (t, k, last, before) => ((2 * k + 1) * t * last - k * before) / (k + 1),
};

function basisRow(t, degree, basis) {
  const row = [1, t];
  for (let k = 1; k < degree; k += 1) row.push(BASES[basis](t, k, row[k], row[k - 1]));
  return row.slice(0, degree + 1);
}

// Cholesky factor of a symmetric positive definite matrix, in place in its lower triangle
function factorise(matrix) {
  for (let i = 0; i < matrix.length; i += 1) {
    for (let j = 0; j <= i; j += 1) {
      let sum = matrix[i][j];
      for (let k = 0; k < j; k += 1) sum -= matrix[i][k] * matrix[j][k];
      matrix[i][j] = i === j ? Math.sqrt(sum) : sum / matrix[j][j];
    }
  }
  return matrix;
}

function solve(factor, right) {
  const x = [...right];
  for (let i = 0; i < x.length; i += 1) {
    for (let k = 0; k < i; k += 1) x[i] -= factor[i][k] * x[k];
    x[i] /= factor[i][i];
  }
  for (let i = x.length - 1; i >= 0; i -= 1) {
    for (let k = i + 1; k < x.length; k += 1) x[i] -= factor[k][i] * x[k];
    x[i] /= factor[i][i];
  }
  return x;
}

// values [node][output] at nodes in [0, 1] -> coefficients [output][k]
function fit(values, nodes, degree, basis, damping) {
  const design = nodes.map((alpha) => basisRow(2 * alpha - 1, degree, basis));
  const size = degree + 1;
  const normal = Array.from({ length: size }, (_, i) => Array.from({ length: size }, (_, j) =>
    design.reduce((sum, row) => sum + row[i] * row[j], i === j ? damping : 0)));
  const factor = factorise(normal);
  return values[0].map((_, output) => solve(factor, Array.from({ length: size }, (_, k) =>
    design.reduce((sum, row, node) => sum + row[k] * values[node][output], 0))));
}

const mean = (numbers) => numbers.reduce((sum, x) => sum + x, 0) / numbers.length;
const weighed = (c) => c.reduce((sum, x, k) => sum + k * Math.abs(x), 0);
const size = (c) => c.reduce((sum, x) => sum + Math.abs(x), 0);

function degrees(coefficients) {
  return {
    raw: mean(coefficients.map(weighed)),
    normalised: mean(coefficients.map((c) => weighed(c) / (size(c) || 1))),
    spectrum: coefficients[0].map((_, k) => mean(coefficients.map((c) => Math.abs(c[k])))),
  };
}

// --- drawing

const SVG = "http://www.w3.org/2000/svg";
const PLOT = { width: 460, height: 238, left: 34, right: 10, top: 8, bottom: 40 };
const BARS = { width: 460, height: 160, left: 34, right: 10, top: 8, bottom: 40 };
const SHOWN = 3; // outputs drawn per model; all of them count
const MARKS = ["circle", "square", "diamond", "triangle", "cross", "ring"];

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
const short = (x) => x.toFixed(1);

function axes(box, yTicks, xTicks, xLabel) {
  const parts = [];
  for (const [part, text] of yTicks) {
    const y = short(vertical(box, part));
    parts.push(svg("line", { x1: box.left, x2: box.width - box.right, y1: y, y2: y, class: "grid" }));
    parts.push(svg("text", { x: box.left - 6, y: Number(y) + 4, "text-anchor": "end" }, text));
  }
  for (const [x, text] of xTicks) {
    parts.push(svg("text", { x: short(x), y: box.height - 22, "text-anchor": "middle" }, text));
  }
  const middle = short(horizontal(box, 0.5));
  parts.push(svg("text", { x: middle, y: box.height - 4, "text-anchor": "middle" }, xLabel));
  return parts;
}

// marks differ in shape as well as in colour
function markPath(kind, x, y) {
  const shapes = {
    circle: `M${x - 2} ${y}a2 2 0 1 0 4 0a2 2 0 1 0 -4 0`,
    square: `M${x - 2} ${y - 2}h4v4h-4z`,
    diamond: `M${x} ${y - 2.8}l2.8 2.8l-2.8 2.8l-2.8 -2.8z`,
    triangle: `M${x} ${y - 2.6}l2.6 4.6h-5.2z`,
    cross: `M${x - 2} ${y - 2}l4 4m0 -4l-4 4`,
    ring: `M${x - 2} ${y}a2 2 0 1 0 4 0a2 2 0 1 0 -4 0`,
  };
  return shapes[kind];
}

function drawOutputs(state, values, coefficients, shown) {
  const parts = axes(PLOT, [[0, "0"], [0.5, "0.5"], [1, "1"]],
    [0, 0.25, 0.5, 0.75, 1].map((a) => [horizontal(PLOT, a), String(a)]), "α, from left to right picture");
  const clip = (y) => Math.min(1.03, Math.max(-0.03, y));
  for (const output of shown) {
    const style = state.styles.get(output);
    const curve = Array.from({ length: 161 }, (_, i) => {
      const row = basisRow(i / 80 - 1, state.degree, state.basis);
      const y = row.reduce((sum, phi, k) => sum + phi * coefficients[output][k], 0);
      return `${short(horizontal(PLOT, i / 160))} ${short(vertical(PLOT, clip(y)))}`;
    });
    parts.push(svg("path", { d: `M${curve.join("L")}`, class: `line s${style}` }));
    const dots = state.data.nodes.map((alpha, node) => markPath(MARKS[style],
      Number(short(horizontal(PLOT, alpha))), Number(short(vertical(PLOT, values[node][output])))));
    parts.push(svg("path", { d: dots.join(""), class: `mark ${MARKS[style]} s${style}` }));
  }
  const names = shown.map((output) => state.data.classes[output]).join(", ");
  return svg("svg", { viewBox: `0 0 ${PLOT.width} ${PLOT.height}`, role: "img",
    "aria-label": `probabilities of ${names} along the path, and the fitted polynomial` }, ...parts);
}

function drawBars(state, spectrum, top) {
  const count = state.data.degree + 1;
  const slot = 1 / count;
  const place = (k) => horizontal(BARS, (k + 0.5) * slot);
  const width = 0.7 * slot * (BARS.width - BARS.left - BARS.right);
  const ticks = Array.from({ length: count }, (_, k) => k).filter((k) => k % 2 === 0);
  const step = top > 0.1 ? 0.1 : 0.05;
  const rises = [0, step, 2 * step].filter((y) => y <= top).map((y) => [y / top, String(y)]);
  const parts = axes(BARS, rises, ticks.map((k) => [place(k), String(k)]), "degree k");
  spectrum.forEach((value, k) => {
    const y = vertical(BARS, value / top);
    parts.push(svg("rect", { x: short(place(k) - width / 2), y: short(y), width: short(width),
      height: short(BARS.height - BARS.bottom - y), class: k ? "column" : "column constant" },
    svg("title", {}, `|c_${k}| = ${value.toPrecision(3)}, mean of all outputs`)));
  });
  return svg("svg", { viewBox: `0 0 ${BARS.width} ${BARS.height}`, role: "img",
    "aria-label": "mean absolute coefficient of each degree" }, ...parts);
}

function number(label, sub, value) {
  const name = html("dt", {}, label);
  if (sub) name.append(html("sub", {}, sub));
  const shown = html("dd", {}, value.toFixed(4));
  shown.dataset.value = String(value);
  shown.dataset.name = sub || "raw";
  return html("div", {}, name, shown);
}

function panel(state, model, values, coefficients, top) {
  const result = degrees(coefficients);
  const about = `test accuracy ${model.accuracy.toFixed(1)} %; ED over 200 paths (Chebyshev, `
    + `K = ${state.data.degree}) ${model.degree.toFixed(3)} ± ${model.standard_error.toFixed(3)}`;
  return html("article", { className: "panel" },
    html("h3", {}, model.label),
    html("p", { className: "quiet" }, about),
    html("dl", { className: "numbers" }, number("ED", "", result.raw),
      number("ED", "norm", result.normalised)),
    html("h4", {}, "Outputs on this path"),
    drawOutputs(state, values, coefficients, leading(values)),
    html("h4", {}, "Coefficients |c", html("sub", {}, "k"), "|, mean of all ten outputs"),
    drawBars(state, result.spectrum, top));
}

// --- state and controls

const largest = (values, output) => Math.max(...values.map((row) => row[output]));

function leading(values) {
  const outputs = values[0].map((_, output) => output);
  return outputs.sort((a, b) => largest(values, b) - largest(values, a)).slice(0, SHOWN);
}

function legend(state) {
  const items = [...state.styles].map(([output, style]) => html("span", { className: "key-item" },
    svg("svg", { viewBox: "0 0 22 8", class: "key-line", "aria-hidden": "true" },
      svg("line", { x1: 1, x2: 21, y1: 4, y2: 4, class: `line s${style}` }),
      svg("path", { d: markPath(MARKS[style], 11, 4), class: `mark ${MARKS[style]} s${style}` })),
    state.data.classes[output]));
  document.getElementById("class-legend").replaceChildren(...items);
}

function show(state) {
  const { data, degree, basis } = state;
  const path = data.paths[state.path];
  const union = [...new Set(path.values.flatMap(leading))].sort((a, b) => a - b);
  state.styles = new Map(union.map((output, place) => [output, place]));
  const fitted = path.values.map((values) => fit(values, data.nodes, degree, basis, data.damping));
  // one scale for both models and every K, so that bars can be compared while K moves
  const top = 1.05 * Math.max(...path.values.flatMap((values) =>
    degrees(fit(values, data.nodes, data.degree, basis, data.damping)).spectrum));
  document.getElementById("degree-shown").value = degree;
  legend(state);
  document.querySelector("#explorer .panels").replaceChildren(...data.models.map((model, i) =>
    panel(state, model, path.values[i], fitted[i], top)));
}

function pairButton(state, path, index) {
  const pictures = path.ends.map((end) => html("span", { className: "end" },
    html("img", { src: end.picture, alt: "", width: 48, height: 48 }), end.label));
  const button = html("button", { type: "button" }, ...pictures);
  button.setAttribute("aria-pressed", String(index === state.path));
  button.addEventListener("click", () => {
    state.path = index;
    for (const other of button.parentNode.children) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    show(state);
  });
  return button;
}

function startExplorer(data) {
  const state = { data, path: 0, degree: data.degree, basis: "chebyshev" };
  const slider = document.getElementById("degree");
  slider.max = data.degree;
  slider.value = data.degree;
  slider.addEventListener("input", () => { state.degree = Number(slider.value); show(state); });
  for (const input of document.querySelectorAll("#basis input")) {
    input.checked = input.value === state.basis; // a reload may have kept another choice
    input.addEventListener("change", () => { state.basis = input.value; show(state); });
  }
  document.querySelector("#explorer .pairs").append(
    ...data.paths.map((path, index) => pairButton(state, path, index)));
  show(state);
}

if (document.getElementById("samples")) {
  startExplorer(JSON.parse(document.getElementById("samples").textContent));
}
