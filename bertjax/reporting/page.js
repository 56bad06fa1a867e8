// SPDX-License-Identifier: Apache-2.0
// Draws the charts and heat maps from the data in the page. Names go in as text only.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const shown = { axis: "step", log: false, smooth: false, runs: data.runs.map(() => true) };
const MARGIN = { left: 54, right: 16, top: 10, bottom: 22 };
const UNITS = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

function short(x) {
  if (x === null) return "not finite";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return x.toExponential(1).replace(".0e", "e");
  for (const [unit, name] of UNITS)
    if (size >= unit) return +(x / unit).toPrecision(4) + name;
  return String(+x.toPrecision(4));
}

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++)
    found.push(i * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const digits = last - first > 3 ? [1] : [1, 2, 5];
  const every = Math.ceil((last - first) / 8);
  for (let e = first; e <= last; e += every)
    for (const m of digits)
      if (m * 10 ** e >= low * 0.999 && m * 10 ** e <= high * 1.001) found.push(m * 10 ** e);
  return found.length > 1 ? found : ticks(low, high, 4).filter((v) => v > 0);
}

// Convert points to an SVG path; a value that cannot be drawn breaks the line.
function path(xs, ys, x, y) {
  let d = "", drawn = false;
  xs.forEach((at, i) => {
    const ok = usable(ys[i]);
    if (ok) d += (drawn ? "L" : "M") + x(at).toFixed(1) + " " + y(ys[i]).toFixed(1);
    drawn = ok;
  });
  return d;
}

function usable(value) {
  return value !== null && (!shown.log || value > 0);
}

function draw(box) {
  const width = box.clientWidth, height = box.clientHeight;
  if (!width) return;
  const chart = data.charts[box.dataset.chart], axis = chart.axis || shown.axis;
  const curves = chart.curves.filter((c) => chart.axis || shown.runs[c.run]);
  const values = curves.flatMap((c) => c.value.filter(usable));
  const places = curves.flatMap((c) => c[axis]);
  box.replaceChildren();
  if (!places.length) return;
  const extent = (list) => list.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  let [left, right] = extent(places), [low, high] = values.length ? extent(values) : [1, 2];
  if (left === right) [left, right] = [left - 1, right + 1];
  if (low === high) {
    const room = Math.abs(low) / 2 || 1;
    [low, high] = shown.log ? [low / 2, low * 2] : [low - room, high + room];
  }
  const scale = shown.log ? Math.log10 : (v) => v;
  const room = 0.04 * (scale(high) - scale(low));
  const bottom = scale(low) - room, top = scale(high) + room;
  const x = (v) => MARGIN.left + ((v - left) / (right - left)) * (width - MARGIN.left - MARGIN.right);
  const y = (v) => height - MARGIN.bottom - ((scale(v) - bottom) / (top - bottom)) * (height - MARGIN.top - MARGIN.bottom);
  let out = "";
  for (const v of shown.log ? logTicks(low, high) : ticks(low, high, 4))
    out += `<line class="grid" x1="${MARGIN.left}" x2="${width - MARGIN.right}" y1="${y(v)}" y2="${y(v)}"/>` +
      `<text x="${MARGIN.left - 7}" y="${y(v) + 4}" text-anchor="end">${short(v)}</text>`;
  const most = axis === "layer" ? right - left : Infinity; // there is no half layer
  for (const v of ticks(left, right, Math.min(most, Math.max(2, width / 90))))
    out += `<text x="${x(v)}" y="${height - 5}" text-anchor="middle">${short(v)}</text>`;
  for (const c of curves) {
    const xs = c[axis], calm = shown.smooth && c.smooth;
    const dash = c.run > 9 ? 'stroke-dasharray="6 3"' : "";
    const line = (ys, more) => `<path class="curve c${c.run % 10} ${more}" ${dash} d="${path(xs, ys, x, y)}"/>`;
    out += line(c.value, calm ? "pale" : "") + (calm ? line(c.smooth, "") : "");
    xs.forEach((at, i) => {
      const alone = usable(c.value[i]) && !usable(c.value[i - 1] ?? null) && !usable(c.value[i + 1] ?? null);
      if (alone || (xs.length < 30 && usable(c.value[i])))
        out += `<circle class="c${c.run % 10}" cx="${x(at)}" cy="${y(c.value[i])}" r="2.5" fill="currentColor"/>`;
      if (c.value[i] === null) // a mark at the bottom: not finite here
        out += `<path class="c3" fill="currentColor" d="M${x(at) - 4} ${height - MARGIN.bottom}h8l-4 -7z"/>`;
    });
  }
  box.innerHTML = `<svg viewBox="0 0 ${width} ${height}">${out}<line class="cursor" y1="${MARGIN.top}" y2="${height - MARGIN.bottom}" visibility="hidden"/></svg>`;
  const svg = box.firstChild, cursor = svg.lastChild;
  const tip = document.createElement("div");
  tip.className = "tip";
  svg.onpointermove = (event) => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const wanted = left + ((at - MARGIN.left) / (width - MARGIN.left - MARGIN.right)) * (right - left);
    read(tip, curves, axis, Math.min(right, Math.max(left, wanted)));
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.setAttribute("visibility", "visible");
    tip.style.left = at < width / 2 ? at + 12 + "px" : "";
    tip.style.right = at < width / 2 ? "" : width - at + 12 + "px";
    tip.style.maxWidth = Math.max(at, width - at) - 12 + "px";
    box.append(tip);
  };
  svg.onpointerleave = () => {
    tip.remove();
    cursor.setAttribute("visibility", "hidden");
  };
}

function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low && wanted - sorted[low - 1] < sorted[low] - wanted ? low - 1 : low;
}

// Show as text the value of each curve nearest to the pointer.
function read(tip, curves, axis, wanted) {
  const title = document.createElement("b");
  const at = Math.round(wanted).toLocaleString("en");
  title.textContent = axis === "tokens" ? `${short(wanted)} tokens` : `${axis} ${at}`;
  tip.replaceChildren(title);
  for (const c of curves) {
    const i = nearest(c[axis], wanted);
    const line = document.createElement("div"), dot = document.createElement("i");
    dot.className = `dot c${c.run % 10}`;
    const calm = shown.smooth && c.smooth ? `, smooth ${short(c.smooth[i])}` : "";
    line.append(dot, `${short(c.value[i])}${calm}  ${c.name || data.runs[c.run]}`);
    tip.append(line);
  }
}

// Draw one head's weights: a row attends to the columns. Bytes; 255 is all attention.
function drawAttention(box) {
  const view = data.views[box.dataset.view];
  if (!view) return;
  const { layers, heads, tokens } = view, n = tokens.length;
  const bytes = Uint8Array.from(atob(view.weights), (ch) => ch.charCodeAt(0));
  const choose = (name, count) => {
    const select = document.createElement("select"), label = document.createElement("label");
    for (let i = 0; i < count; i++) select.add(new Option(i + 1, i));
    if (name === "head") select.add(new Option("mean", count));
    label.append(`${name} `, select, "  ");
    box.append(label);
    return select;
  };
  const layer = choose("layer", layers), head = choose("head", heads);
  const said = document.createElement("span"), cell = Math.max(12, Math.min(26, 700 / n));
  const holder = document.createElement("div");
  said.className = "quiet";
  box.append(said, holder);
  const wide = 8 * Math.max(...tokens.map((t) => t.length)) + 12, size = wide + n * cell;
  const weight = (q, k) => {
    const of = (h) => bytes[((+layer.value * heads + h) * n + q) * n + k] / 255;
    if (+head.value < heads) return of(+head.value);
    let sum = 0;
    for (let h = 0; h < heads; h++) sum += of(h);
    return sum / heads;
  };
  const paint = () => {
    let out = "";
    for (let q = 0; q < n; q++) {
      const at = wide + (q + 0.5) * cell;
      out += `<text x="${wide - 6}" y="${at + 4}" text-anchor="end"></text>` +
        `<text transform="translate(${at + 4} ${wide - 6}) rotate(-90)"></text>`;
      for (let k = 0; k < n; k++)
        out += `<rect x="${wide + k * cell}" y="${wide + q * cell}" width="${cell - 1}" height="${cell - 1}" fill-opacity="${(0.04 + 0.96 * weight(q, k)).toFixed(3)}" data-q="${q}" data-k="${k}"/>`;
    }
    holder.innerHTML = `<svg width="${size}" viewBox="0 0 ${size} ${size}">${out}</svg>`;
    holder.querySelectorAll("text").forEach((t, i) => (t.textContent = tokens[i >> 1]));
  };
  holder.onpointerover = ({ target: { dataset } }) => {
    if (dataset.q === undefined) return;
    said.textContent = `${tokens[dataset.q]} looks at ${tokens[dataset.k]}: ${weight(+dataset.q, +dataset.k).toFixed(3)}`;
  };
  layer.onchange = head.onchange = paint;
  paint();
}

const boxes = [...document.querySelectorAll(".plot")];
const again = () => boxes.forEach(draw);
const on = (id, change) => {
  const input = document.getElementById(id);
  if (input) input.onchange = () => { change(input); again(); };
};
on("axis", (input) => (shown.axis = input.value));
on("log", (input) => (shown.log = input.checked));
on("smooth", (input) => (shown.smooth = input.checked));
for (const input of document.querySelectorAll("[data-run]"))
  input.onchange = () => { shown.runs[input.dataset.run] = input.checked; again(); };
const watch = new ResizeObserver((seen) => seen.forEach((entry) => draw(entry.target)));
boxes.forEach((box) => watch.observe(box));
document.querySelectorAll(".attention").forEach(drawAttention);
