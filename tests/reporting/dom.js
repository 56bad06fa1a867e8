// SPDX-License-Identifier: Apache-2.0
// Runs the script of a page without a browser: node dom.js PAGE.html. The document is as
// much of one as page.js uses. Prints {"plots": [...], "views": [{"svg", "selects",
// "texts", "mean", "said"}]}, what was drawn into each box.
"use strict";
const page = require("fs").readFileSync(process.argv[2], "utf8");

class Element {
  constructor(dataset = {}) {
    this.dataset = dataset;
    this.children = [];
    this.attributes = {};
    this.style = {};
    this.html = "";
    this.clientWidth = 400;
    this.clientHeight = 230;
    this.value = "0"; // of a select: its first option
  }
  append(...more) { this.children.push(...more); }
  add(option) { this.children.push(option); }
  replaceChildren(...more) { this.children = more; this.html = ""; }
  remove() {}
  setAttribute(name, value) { this.attributes[name] = value; }
  getBoundingClientRect() { return { left: 0 }; }
  get firstChild() { return this.children[0]; }
  get lastChild() { return this.children.at(-1); }
  get innerHTML() { return this.html; }
  set innerHTML(html) { // svg > its last child; and every text in it
    this.html = html;
    const svg = new Element();
    svg.append(new Element());
    this.children = [svg];
    this.texts = [...html.matchAll(/<text\b/g)].map(() => new Element());
  }
  querySelectorAll(wanted) {
    if (wanted !== "text") throw new Error(wanted);
    return this.texts;
  }
}

const boxes = (name, key) =>
  [...page.matchAll(new RegExp(`class='${name}' data-${key}='(\\d+)'`, "g"))].map(
    ([, value]) => new Element({ [key]: value }));
const found = {
  ".plot": boxes("plot", "chart"),
  ".attention": boxes("attention", "view"),
  "[data-run]": boxes("none", "run"),
};
const [json, script] = [...page.matchAll(/<script[^>]*>([^]*?)<\/script>/g)].map((m) => m[1]);
globalThis.document = {
  getElementById: (id) => (id === "data" ? { textContent: json } : null),
  querySelectorAll: (wanted) => found[wanted],
  createElement: () => new Element(),
};
globalThis.Option = class { constructor(text, value) { Object.assign(this, { text, value }); } };
globalThis.ResizeObserver = class {
  constructor(call) { this.call = call; }
  observe(target) { this.call([{ target }]); }
};
(0, eval)(script);

const plots = found[".plot"].map((box) => {
  box.firstChild.onpointermove({ clientX: 100 }); // the tip, which must not fail
  return box.innerHTML;
});
const views = found[".attention"].map((box) => {
  const holder = box.lastChild, said = box.children.at(-2);
  const selects = box.children.slice(0, -2).map((label) => label.children[1]);
  const view = { svg: holder.innerHTML, texts: holder.texts.map((t) => t.textContent) };
  holder.onpointerover({ target: { dataset: { q: "1", k: "2" } } });
  view.said = said.textContent;
  view.selects = selects.map((select) => select.children.map((option) => option.text));
  const [layer, head] = selects; // the mean of the last layer's heads
  layer.value = String(layer.children.length - 1);
  head.value = String(head.children.length - 1);
  head.onchange();
  return { ...view, mean: holder.innerHTML };
});
console.log(JSON.stringify({ plots, views }));
