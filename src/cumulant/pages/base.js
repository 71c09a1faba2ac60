// Data, elements, numbers, the tooltip, the theme, and moving among marks with the keyboard.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "css") {
      for (const [property, x] of Object.entries(value)) node.style.setProperty(property, x);
    } else node.setAttribute(name, value === true ? "" : value);
  }
  // Strings become text nodes, so nothing in the data is ever markup.
  node.append(...children.filter((child) => child !== null));
  return node;
}
const html = (name, attributes, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
function format(value, kind) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (kind === "share") return `${Number((100 * value).toPrecision(3))}%`.replace("-", "−");
  const size = Math.abs(value);
  let text;
  if (value !== 0 && (size < 1e-3 || size >= 1e6)) {
    const [mantissa, exponent] = value.toExponential(2).split("e");
    const digits = [...String(Math.abs(Number(exponent)))].map((d) => SUPERSCRIPTS[d]).join("");
    text = `${mantissa}·10${exponent.startsWith("-") ? "⁻" : ""}${digits}`;
  } else if (size >= 1000) text = Math.round(value).toLocaleString("en-US");
  else text = kind === "tick" || Number.isInteger(value) ? String(Number(value.toPrecision(3))) : value.toPrecision(3);
  return text.replace("-", "−");
}

// Relative deviations above 200% read better as factors.
const deviation = (value) => value >= 2 ? `×${format(value)}` : format(value, "share");

const rowsOf = (table) => {
  if (!table) return [];
  const names = Object.keys(table);
  return table[names[0]].map((_, i) => Object.fromEntries(names.map((n) => [n, table[n][i]])));
};

// Where a value lies on a statistic's color scale.
function scaleOf(values, kind) {
  const known = values.filter((v) => typeof v === "number");
  if (kind === "class") return { kind, low: 0, high: 3 };
  if (kind === "signed") return { kind, low: -1, high: 1 };
  if (!known.length) return { kind: "number", low: 0, high: 1 };
  let low = Math.min(...known), high = Math.max(...known);
  // A share starts at nothing, so that a faint map means small shares.
  if (kind === "share") low = Math.min(0, low);
  if (kind === "log" && low <= 0) kind = "number";
  if (low === high) return { kind: "number", low, high: low + 1, only: format(low, kind) };
  return { kind, low, high };
}
const CLASSES = ["I", "II", "III", "IV"];
function colorOf(scale, value) {
  if (value === null || value === undefined) return { name: "none", t: 0 };
  if (scale.kind === "class") return { name: "seq", t: CLASSES.indexOf(value) / 3 };
  if (scale.kind === "signed") {
    const t = Math.max(-1, Math.min(1, value));
    return { name: t < 0 ? "neg" : "pos", t: Math.abs(t) };
  }
  const along = scale.kind === "log" ? Math.log : (x) => x;
  const t = (along(value) - along(scale.low)) / (along(scale.high) - along(scale.low));
  return { name: "seq", t: Math.max(0, Math.min(1, t)) };
}

function legend(scale, label) {
  const bar = html("span", { class: "bar", "aria-hidden": "true" });
  if (scale.kind === "class") {
    const items = CLASSES.map((c, i) =>
      html("span", { class: "key-item" }, html("i", { class: "seq swatch", css: { "--t": i / 3 } }), c));
    return html("div", { class: "legend" }, html("span", {}, label), ...items);
  }
  for (let i = 0; i < 24; i++) {
    const at = scale.kind === "signed" ? -1 + (2 * i) / 23 : i / 23;
    const color = scale.kind === "signed" ? colorOf(scale, at) : { name: "seq", t: at };
    bar.append(html("span", { class: `${color.name} swatch`, css: { "--t": color.t } }));
  }
  if (scale.only) return html("div", { class: "legend" }, html("span", {}, `${label}: ${scale.only} everywhere`));
  const kind = scale.kind === "share" ? "share" : "number";
  const note = scale.kind === "log" ? " (log scale)" : "";
  return html("div", { class: "legend" }, html("span", {}, label + note), html("span", { class: "key-item" },
    html("span", {}, format(scale.low, kind)), bar, html("span", {}, format(scale.high, kind))));
}

// A formula that came as pieces [element, text].
const formula = (pieces) => pieces.map(([element, text]) => element ? html(element, {}, text) : text);

const tip = byId("tip");
let tipped = null;
// On a phone a long list would hide the chart that it belongs to.
const MOST_ON_A_PHONE = 8;
function showTip(node, title, all) {
  tipped = { node, title, rows: all };
  const rest = document.documentElement.clientWidth < 700 ? all.length - MOST_ON_A_PHONE : 0;
  const rows = rest > 1 ? [...all.slice(0, MOST_ON_A_PHONE), [`${rest} more in a wider window`, ""]] : all;
  tip.replaceChildren(html("b", {}, title), html("table", { class: "detail" },
    ...rows.map(([name, value]) => html("tr", {}, html("td", {}, name), html("td", {}, value)))));
  tip.hidden = false;
  const mark = node.getBoundingClientRect(), box = tip.getBoundingClientRect();
  const width = document.documentElement.clientWidth;
  const within = (at, size, room) => Math.max(8, Math.min(room - size - 8, at));
  let x, y;
  if (rows.length <= 4) {
    x = mark.left + mark.width / 2 - box.width / 2;
    y = mark.top - box.height - 10 > 8 ? mark.top - box.height - 10 : mark.bottom + 10;
  } else if (width >= 700) {
    // A tall one stands beside its mark, so that the row and its neighbors stay in view.
    x = mark.right + 12 + box.width < width - 8 ? mark.right + 12 : mark.left - 12 - box.width;
    y = mark.top + mark.height / 2 - box.height / 2;
  } else {
    const whole = (node.ownerSVGElement || node).getBoundingClientRect();
    x = mark.left + mark.width / 2 - box.width / 2;
    y = whole.bottom + 8 + box.height < window.innerHeight ? whole.bottom + 8
      : whole.top - 8 - box.height > 0 ? whole.top - 8 - box.height : mark.bottom + 10;
  }
  x = within(x, box.width, width);
  y = within(y, box.height, window.innerHeight);
  tip.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
}
const hideTip = () => { tip.hidden = true; };
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
// Moving on with the keyboard scrolls: the tip goes along with its mark.
window.addEventListener("scroll", () => {
  if (!tip.hidden && tipped.node === document.activeElement) showTip(tipped.node, tipped.title, tipped.rows);
  else hideTip();
}, { passive: true });

const listening = new WeakMap();
// One tab stop for many marks: arrows move, Enter or a click chooses.
function explore(box, marks, { start = 0, move, describe, choose, enter, leave }) {
  if (!marks.length) return;
  // Browsers make a drawing that listens for focus a tab stop of its own.
  if (box instanceof SVGElement) box.setAttribute("tabindex", -1);
  let current = Math.min(start, marks.length - 1);
  marks.forEach((mark, i) => {
    mark.node.dataset.mark = i;
    mark.node.setAttribute("tabindex", i === current ? 0 : -1);
    if (describe) {
      const [title, rows] = describe(mark);
      mark.node.setAttribute("aria-label", `${title}. ${rows.map((r) => r.join(" ")).join(", ")}`);
    }
  });
  const at = (event) => {
    const node = event.target.closest && event.target.closest("[data-mark]");
    return node && box.contains(node) ? Number(node.dataset.mark) : null;
  };
  const show = (i, focused) => {
    if (describe) showTip(marks[i].node, ...describe(marks[i]));
    if (enter) enter(marks[i], focused);
  };
  const go = (i) => {
    marks[current].node.setAttribute("tabindex", -1);
    current = i;
    marks[i].node.setAttribute("tabindex", 0);
    marks[i].node.focus({ preventScroll: false });
  };
  // A box that is filled anew, as the text is, forgets its former marks.
  if (listening.has(box)) listening.get(box).abort();
  const control = new AbortController();
  listening.set(box, control);
  const on = (event, act) => box.addEventListener(event, act, { signal: control.signal });
  // A mark that was chosen keeps what it shows when the pointer goes.
  const quiet = (i) => {
    if (i === null) return;
    // By now the tip may be another's: scrolling takes marks away from under a resting pointer.
    if (tipped && tipped.node === marks[i].node) hideTip();
    const held = at({ target: document.activeElement });
    if (held !== null && enter) enter(marks[held], false);
    else if (leave) leave();
  };
  // A finger does not hover: it clicks, before anything has moved under it.
  on("pointerover", (e) => { const i = at(e); if (i !== null && e.pointerType !== "touch") show(i, false); });
  on("pointerout", (e) => { if (e.pointerType !== "touch") quiet(at(e)); });
  on("focusin", (e) => { const i = at(e); if (i !== null) show(i, true); });
  on("focusout", (e) => quiet(at(e)));
  on("click", (e) => { const i = at(e); if (i !== null) { go(i); if (choose) choose(marks[i]); } });
  on("keydown", (e) => {
    const i = at(e);
    if (i === null || e.altKey || e.ctrlKey || e.metaKey) return;
    if (choose && (e.key === "Enter" || e.key === " ")) { e.preventDefault(); choose(marks[i]); return; }
    const last = marks.length - 1;
    const next = e.key === "Home" ? 0 : e.key === "End" ? last : move(i, e.key);
    if (next !== null && next !== undefined && next >= 0 && next <= last) { e.preventDefault(); go(next); }
  });
}
const alongLine = (i, key) =>
  key === "ArrowRight" || key === "ArrowDown" ? i + 1 : key === "ArrowLeft" || key === "ArrowUp" ? i - 1 : null;

// Redraws a plot for the width it has; `draw(box, width)` makes fresh content.
const drawings = new Map();
const watcher = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const drawing = drawings.get(target);
    const width = Math.floor(target.clientWidth);
    if (!drawing || !width || drawing.width === width) continue;
    drawing.width = width;
    drawing.draw(target, width);
  }
});
function plot(name, draw) {
  const box = document.querySelector(`[data-plot="${name}"]`);
  if (!box) return null;
  const drawing = { draw, width: Math.floor(box.clientWidth) };
  drawings.set(box, drawing);
  draw(box, drawing.width);
  watcher.observe(box);
  return () => draw(box, drawing.width);
}

// A formula that is wider than the window scrolls, so the keyboard must reach it; others are no stop.
const scrolls = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth + 1) target.setAttribute("tabindex", 0);
    else target.removeAttribute("tabindex");
  }
});
for (const box of document.querySelectorAll(".formula, .derivation")) scrolls.observe(box);

const themeButton = byId("theme"), whenThemed = [];
function theme(next) {
  const dark = next ? next === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (next) document.documentElement.dataset.theme = next;
  themeButton.setAttribute("aria-pressed", String(dark));
  themeButton.textContent = dark ? "Light" : "Dark";
  themeButton.setAttribute("aria-label", dark ? "Switch to the light theme" : "Switch to the dark theme");
  for (const tell of whenThemed) tell();
}
themeButton.addEventListener("click", () => theme(themeButton.getAttribute("aria-pressed") === "true" ? "light" : "dark"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  if (!document.documentElement.dataset.theme) theme();
});
theme();
