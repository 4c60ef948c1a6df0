"use strict";

// --- numerics, as in ed/core: basis, damped least squares, effective degree

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

const PLOT = { width: 460, height: 238, left: 34, right: 10, top: 8, bottom: 40 };
const BARS = { width: 460, height: 160, left: 34, right: 10, top: 8, bottom: 40 };
const LOW = -0.3; // of the fitted polynomials; a test checks that none leaves the axes
const HIGH = 1.1;
const SHOWN = 3; // outputs drawn per model; all of them count
const MARKS = ["circle", "square", "diamond", "triangle", "cross", "ring"];
const PAUSE = 450; // milliseconds per degree of the animation

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

function polynomial(coefficients, alpha, basis) {
  const row = basisRow(2 * alpha - 1, coefficients.length - 1, basis);
  return row.reduce((sum, phi, k) => sum + phi * coefficients[k], 0);
}

function drawOutputs(state, values, coefficients, shown) {
  const height = (y) => short(vertical(PLOT, (y - LOW) / (HIGH - LOW)));
  const parts = axes(PLOT, [0, 0.5, 1].map((y) => [(y - LOW) / (HIGH - LOW), String(y)]),
    [0, 0.25, 0.5, 0.75, 1].map((a) => [a, String(a)]), "α, from the left to the right image");
  const x = short(horizontal(PLOT, state.alpha));
  parts.push(svg("line", { x1: x, x2: x, y1: PLOT.top, y2: PLOT.height - PLOT.bottom, class: "cursor" }));
  for (const output of shown) {
    const style = state.styles.get(output);
    const curve = Array.from({ length: 161 }, (_, i) => {
      const y = polynomial(coefficients[output], i / 160, state.basis);
      return `${short(horizontal(PLOT, i / 160))} ${height(y)}`;
    });
    parts.push(svg("path", { d: `M${curve.join("L")}`, class: `line s${style}` }));
    const dots = state.data.nodes.map((alpha, node) =>
      markPath(MARKS[style], short(horizontal(PLOT, alpha)), height(values[node][output])));
    parts.push(svg("path", { d: dots.join(""), class: `mark ${MARKS[style]} s${style}` }));
  }
  const names = shown.map((output) => state.data.classes[output]).join(", ");
  return svg("svg", { viewBox: `0 0 ${PLOT.width} ${PLOT.height}`, role: "img",
    "aria-label": `probabilities of ${names} along the path, and the fitted polynomial` }, ...parts);
}

function drawBars(state, spectrum) {
  const count = state.data.degree + 1;
  const place = (k) => (k + 0.5) / count;
  const width = (0.7 / count) * (BARS.width - BARS.left - BARS.right);
  const even = Array.from({ length: count }, (_, k) => k).filter((k) => k % 2 === 0);
  const rises = ticks(0, state.top).map((y) => [y / state.top, concise(y)]);
  const parts = axes(BARS, rises, even.map((k) => [place(k), String(k)]), "degree k");
  spectrum.forEach((value, k) => {
    const y = vertical(BARS, value / state.top);
    parts.push(svg("rect", { x: short(horizontal(BARS, place(k)) - width / 2), y: short(y),
      width: short(width), height: short(BARS.height - BARS.bottom - y),
      class: k ? "column" : "column constant" },
    svg("title", {}, `|c_${k}| = ${value.toPrecision(3)}, mean of all outputs`)));
  });
  return svg("svg", { viewBox: `0 0 ${BARS.width} ${BARS.height}`, role: "img",
    "aria-label": "mean absolute coefficient of each degree" }, ...parts);
}

function number(label, sub, value) {
  const name = html("dt", {}, label);
  if (sub) name.append(html("sub", {}, sub));
  const shown = html("dd", {}, value.toFixed(4));
  shown.dataset.name = sub || "raw";
  return html("div", {}, name, shown);
}

function panel(state, model, place) {
  const values = state.data.paths[state.path].values[place];
  const coefficients = fit(values, state.data.nodes, state.degree, state.basis, state.data.damping);
  const result = degrees(coefficients);
  const about = `test accuracy ${model.accuracy.toFixed(1)} %; ED over 200 paths (Chebyshev, `
    + `K = ${state.data.degree}) ${model.degree.toFixed(3)} ± ${model.standard_error.toFixed(3)}`;
  return html("article", { className: place ? "panel ed" : "panel" },
    html("h3", {}, model.label),
    html("p", { className: "quiet" }, about),
    html("dl", { className: "numbers" }, number("ED", "", result.raw),
      number("ED", "norm", result.normalised)),
    html("h4", {}, "Outputs on this path"),
    drawOutputs(state, values, coefficients, leading(values)),
    html("h4", {}, "Coefficients |c", html("sub", {}, "k"), "|, mean of all ten outputs"),
    drawBars(state, result.spectrum));
}

// draws the blend at alpha: the right image over the left one
function blend(state) {
  const context = document.getElementById("blend").getContext("2d");
  const [left, right] = state.images[state.path];
  context.globalAlpha = 1;
  context.drawImage(left, 0, 0);
  context.globalAlpha = state.alpha;
  context.drawImage(right, 0, 0);
  const [first, second] = state.data.paths[state.path].ends.map((end) => end.label);
  const part = Math.round(100 * state.alpha);
  document.getElementById("blend-label").textContent =
    `${100 - part} % ${first}, ${part} % ${second}`;
}

// --- state and controls

const largest = (values, output) => Math.max(...values.map((row) => row[output]));

function leading(values) {
  const outputs = values[0].map((_, output) => output);
  return outputs.sort((a, b) => largest(values, b) - largest(values, a)).slice(0, SHOWN);
}

// one scale for all pairs, models, bases and K, so that bars stay comparable
function highestBar(data) {
  const fits = data.paths.flatMap((path) => path.values).flatMap((values) =>
    Object.keys(BASES).flatMap((basis) => [3, data.degree].map((degree) =>
      degrees(fit(values, data.nodes, degree, basis, data.damping)).spectrum)));
  return 1.15 * Math.max(...fits.flat());
}

function show(state) {
  const { data } = state;
  const union = [...new Set(data.paths[state.path].values.flatMap(leading))].sort((a, b) => a - b);
  state.styles = new Map(union.map((output, place) => [output, place]));
  const items = union.map((output, style) => keyItem(data.classes[output], `line s${style}`,
    svg("path", { d: markPath(MARKS[style], 11, 4), class: `mark ${MARKS[style]} s${style}` })));
  document.getElementById("class-legend").replaceChildren(...items);
  document.getElementById("degree").value = state.degree;
  document.getElementById("degree-shown").value = state.degree;
  document.getElementById("alpha-shown").value = state.alpha.toFixed(2);
  document.querySelector("#explorer .panels").replaceChildren(
    ...data.models.map((model, place) => panel(state, model, place)));
  blend(state);
}

function pairButton(state, path, index) {
  const ends = path.ends.map((end, side) => html("span", { className: "end" },
    state.images[index][side].cloneNode(), end.label));
  const button = html("button", { type: "button" }, ...ends);
  button.setAttribute("aria-pressed", String(index === state.path));
  button.addEventListener("click", () => {
    state.path = index;
    for (const other of button.parentNode.children) other.ariaPressed = String(other === button);
    show(state);
  });
  return button;
}

function animateDegree(state) {
  const button = document.getElementById("animate");
  let timer = null;
  const stop = () => {
    clearInterval(timer);
    timer = null;
    button.ariaPressed = "false";
  };
  button.addEventListener("click", () => {
    if (timer !== null) { stop(); return; }
    button.ariaPressed = "true";
    timer = setInterval(() => {
      state.degree = (state.degree + 1) % (state.data.degree + 1);
      show(state);
    }, PAUSE);
  });
  return stop;
}

function startExplorer(data) {
  const decoded = ({ image: src }) => html("img", { src, alt: "", width: 48, height: 48 });
  const state = { data, path: 0, degree: 3, alpha: 0.5, basis: "chebyshev", top: highestBar(data),
    images: data.paths.map((path) => path.ends.map(decoded)) };
  const stop = animateDegree(state);
  const [degree, alpha] = ["degree", "alpha"].map((id) => document.getElementById(id));
  degree.max = data.degree;
  alpha.value = state.alpha;
  degree.addEventListener("input", () => { stop(); state.degree = Number(degree.value); show(state); });
  alpha.addEventListener("input", () => { state.alpha = Number(alpha.value); show(state); });
  for (const input of document.querySelectorAll("#basis input")) {
    input.checked = input.value === state.basis; // a reload may have kept another choice
    input.addEventListener("change", () => { state.basis = input.value; show(state); });
  }
  document.querySelector("#explorer .pairs").append(
    ...data.paths.map((path, index) => pairButton(state, path, index)));
  show(state);
  // images are decoded asynchronously
  Promise.all(state.images.flat().map((image) => image.decode())).then(() => blend(state));
}

if (document.getElementById("samples")) {
  startExplorer(JSON.parse(document.getElementById("samples").textContent));
}
