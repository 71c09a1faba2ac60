// Changes of the model and the text, and what they do.
const KIND = { temperature: "temperature", no_sink: "first token hidden", uniform: "uniform", gaussian: "Gaussian", skip: "left out" };
const told = (c) => c.kind === "skip" ? `layer ${c.layer} left out`
  : `layer ${c.layer}, head ${c.head}: ${KIND[c.kind] || c.kind}${c.kind === "temperature" ? ` ${format(c.value)}` : ""}`;
const same = (x, y) => x.kind === y.kind && x.layer === y.layer && (x.kind === "skip" || x.head === y.head);

function change(kind, value) {
  const made = kind === "skip" ? { kind, layer: state.layer } : { kind, layer: state.layer, head: state.head };
  if (kind === "temperature") made.value = value;
  const others = state.a.changes.filter((c) => !same(c, made));
  const there = others.length < state.a.changes.length;
  // A temperature of 1 is no change; a button pressed again takes its change back.
  state.a.changes = (kind === "temperature" ? value === 1 : there) ? others : [...others, made];
  refresh({ view: true });
}

function tellChanges() {
  const items = [
    ...state.a.changes.map((c) => [told(c), () => { state.a.changes = state.a.changes.filter((x) => x !== c); }]),
    ...state.a.swaps.map((s) => [`token ${s[0]} swapped for “${s[1]}”`, () => { state.a.swaps = state.a.swaps.filter((x) => x !== s); }]),
  ];
  byId("changes").replaceChildren(...items.map(([text, drop]) => {
    const button = html("button", { type: "button", "aria-label": `Undo: ${text}` }, "×");
    button.addEventListener("click", () => { drop(); refresh({ view: true }); });
    return html("li", {}, text, button);
  }));
  const here = (kind) => state.a.changes.find((c) => same(c, { kind, layer: state.layer, head: state.head }));
  for (const button of document.querySelectorAll("[data-change]")) button.setAttribute("aria-pressed", String(Boolean(here(button.dataset.change))));
  const heat = here("temperature"), value = heat ? heat.value : 1;
  byId("temperature").value = Math.log2(value);
  byId("temperature-shown").textContent = format(value);
}

// Means over tokens and heads, before and after, and the heads that moved most.
function tellDifference() {
  const box = byId("difference"), before = views.original, after = views.a;
  const changed = state.a.changes.length || state.a.swaps.length;
  if (!changed || !before || !after || before.tokens.length !== after.tokens.length) {
    box.replaceChildren(html("p", { class: "hint" }, "Choose a head and change it, or swap a token: the differences appear here."));
    return;
  }
  const mean = (list) => { const known = list.filter((v) => typeof v === "number"); return known.length ? known.reduce((x, y) => x + y, 0) / known.length : null; };
  const rows = data.statistics.filter((s) => s.kind !== "class").map((s) => {
    const was = before.heads[s.column], is = after.heads[s.column];
    const shifts = is.flatMap((r, l) => r.map((v, h) => [l, h, typeof v === "number" && typeof was[l][h] === "number" ? v - was[l][h] : 0]));
    const most = shifts.reduce((x, y) => Math.abs(y[2]) > Math.abs(x[2]) ? y : x);
    const own = typeof is[state.layer][state.head] === "number" ? is[state.layer][state.head] - was[state.layer][state.head] : null;
    return [s, mean(was.flat()), mean(is.flat()), own, most];
  });
  const moved = after.heads.class.flatMap((r, l) => r.map((v, h) => CLASS_OF(v) !== CLASS_OF(before.heads.class[l][h]))).filter(Boolean).length;
  const ownClass = [before, after].map((v) => CLASS_OF(v.heads.class[state.layer][state.head]));
  const signed = (v) => v === null ? "–" : `${v > 0 ? "+" : ""}${format(v)}`;
  const head = (text, number) => html("th", { scope: "col", class: number ? "number" : null }, text);
  box.replaceChildren(html("div", { class: "table-scroll", tabindex: 0, role: "region", "aria-label": "Differences by statistic" }, html("table", { class: "rows" },
    html("thead", {}, html("tr", {}, head("statistic, mean over tokens"), head("original", 1), head("changed", 1), head("in the chosen head", 1), head("largest change in a head", 1))),
    html("tbody", {}, ...rows.map(([s, was, is, own, [l, h, d]]) => html("tr", {}, html("td", {}, s.label), html("td", { class: "number" }, format(was)),
      html("td", { class: "number" }, format(is)), html("td", { class: "number" }, signed(own)),
      html("td", { class: "number" }, d === 0 ? "none" : `${signed(d)} (layer ${l}, head ${h})`))),
      html("tr", {}, html("td", {}, "Class of a head"), html("td", { class: "number" }, "–"), html("td", { class: "number" }, "–"),
        html("td", { class: "number" }, ownClass[0] === ownClass[1] ? "none" : ownClass.join(" to ")),
        html("td", { class: "number" }, `${moved} head${moved === 1 ? "" : "s"} in another class`))))));
}

function drawNext(box, width) {
  const after = views.a && views.a.next, before = views.original && views.original.next;
  byId("next-box").hidden = !after;
  if (!after) { box.replaceChildren(); return; }
  const changed = (state.a.changes.length || state.a.swaps.length) && before;
  const names = [...new Map([...(changed ? before : []), ...after].map((x) => [x.id, x.token]))].slice(0, 14);
  const most = Math.max(...after.map((x) => x.p), ...(changed ? before.map((x) => x.p) : [0]));
  const left = Math.min(110, width * 0.3), high = changed ? 34 : 22, root = svg("svg", { class: "bars", viewBox: `0 0 ${width} ${names.length * high + 4}`, width, height: names.length * high + 4,
    role: "img", "aria-label": `Next token: ${after.slice(0, 3).map((x) => `${shownToken(x.token)} ${format(x.p, "share")}`).join(", ")}` });
  names.forEach(([id, text], i) => {
    root.append(svg("text", { class: "word", x: left - 8, y: i * high + 15, "text-anchor": "end" }, shownToken(text).slice(0, 14)));
    (changed ? [before, after] : [after]).forEach((list, k) => {
      const found = list.find((x) => x.id === id), p = found ? found.p : null, y = i * high + 3 + k * 15;
      const wide = p === null ? 0 : (p / most) * (width - left - 64);
      root.append(svg("rect", { class: changed && k === 0 ? "p1" : "p0", x: left, y, width: Math.max(1, wide), height: 13, rx: 2 }),
        svg("text", { x: left + wide + 6, y: y + 11 }, p === null ? "not among the first" : format(p, "share")));
    });
  });
  const key = changed ? html("div", { class: "legend" }, html("span", { class: "key-item s1" }, html("i", { class: "line" }), "original"), html("span", { class: "key-item s0" }, html("i", { class: "line" }), "changed")) : null;
  box.replaceChildren(...[key, root].filter(Boolean));
}
