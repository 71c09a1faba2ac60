// Layers by heads: the map of one statistic, and how many heads of each class a layer has.
const heads = rowsOf(data.heads);
const layerNumbers = [...new Set(heads.map((h) => h.layer))].sort((a, b) => a - b);
const kindOf = Object.fromEntries(data.statistics.heads.map((s) => [s.column, s]));
const chosen = { layer: heads.length ? heads[0].layer : 0, head: heads.length ? heads[0].head : 0 };
const whenChosen = [];

function choose(layer, head, from) {
  Object.assign(chosen, { layer, head });
  for (const tell of whenChosen) tell(from);
}

// Of an encoder-decoder model, which side a layer is on, from the name of its module.
const sides = new Map(heads.some((h) => h.attention === "cross") ? heads.map((h) => [h.layer,
  h.attention === "cross" ? "cross" : /decoder/.test(h.module || "") ? "decoder" : "encoder"]) : []);
const layerName = (layer) => sides.has(layer) ? `${sides.get(layer)} ${layer}` : String(layer);
const layerTitle = (layer) => `Layer ${layer}${sides.has(layer) ? ` (${sides.get(layer)})` : ""}`;
const layerRoom = sides.size ? 94 : 50;
// What the rows are, along the left edge of a map.
const rowsName = (height) => svg("text", { x: 12, y: height / 2, transform: `rotate(-90 12 ${height / 2})`, "text-anchor": "middle" }, "layer");

const headTitle = (h) => `${layerTitle(h.layer)}, head ${h.head}`;
// The statistic on display stands first.
const headRows = (h, column) => [...data.statistics.heads]
  .sort((a, b) => (b.column === column) - (a.column === column))
  .filter((s) => h[s.column] !== null && h[s.column] !== undefined)
  .map((s) => [s.label, format(h[s.column], s.kind)]);

function drawMap(box, width) {
  const statistic = kindOf[byId("map-statistic").value];
  const scale = scaleOf(heads.map((h) => h[statistic.column]), statistic.kind);
  const columns = Math.max(...heads.map((h) => h.head)) + 1;
  const left = layerRoom, top = 40;
  const cellWidth = Math.max(20, Math.min(76, Math.floor((width - left - 8) / columns)));
  const cellHeight = Math.max(20, Math.min(34, cellWidth));
  const size = [left + columns * cellWidth + 2, top + layerNumbers.length * cellHeight + 2];
  const root = svg("svg", { viewBox: `0 0 ${size[0]} ${size[1]}`, width: size[0], height: size[1], role: "group",
    "aria-label": `${statistic.label} by layer and head; arrow keys move, Enter chooses a head for the token view` });
  root.append(rowsName(top * 2 + layerNumbers.length * cellHeight - top),
    svg("text", { x: left + columns * cellWidth / 2, y: 13, "text-anchor": "middle" }, "head"));
  const every = cellWidth < 26 && columns > 12 ? 2 : 1;
  for (let h = 0; h < columns; h += every)
    root.append(svg("text", { x: left + (h + 0.5) * cellWidth, y: top - 8, "text-anchor": "middle" }, String(h)));
  layerNumbers.forEach((layer, row) =>
    root.append(svg("text", { x: left - 8, y: top + (row + 0.5) * cellHeight + 4, "text-anchor": "end" }, layerName(layer))));
  const marks = heads.map((h) => {
    const value = h[statistic.column], color = colorOf(scale, value);
    const x = left + h.head * cellWidth, y = top + layerNumbers.indexOf(h.layer) * cellHeight;
    const node = svg("g", { class: `cell ${color.name}`, role: "button", css: { "--t": color.t } },
      svg("rect", { x: x + 1, y: y + 1, width: cellWidth - 2, height: cellHeight - 2, rx: 2 }));
    if (cellWidth >= 44 || statistic.kind === "class") {
      node.append(svg("text", { x: x + cellWidth / 2, y: y + cellHeight / 2 + 4,
        "text-anchor": "middle" }, format(value, statistic.kind)));
    }
    root.append(node);
    return { node, head: h };
  });
  const place = new Map(marks.map((m, i) => [`${m.head.layer}/${m.head.head}`, i]));
  const steps = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  const press = () => marks.forEach(({ node, head }) =>
    node.setAttribute("aria-pressed", String(head.layer === chosen.layer && head.head === chosen.head)));
  press();
  explore(root, marks, {
    start: place.get(`${chosen.layer}/${chosen.head}`) || 0,
    move: (i, key) => {
      if (!steps[key]) return null;
      const { layer, head } = marks[i].head;
      const next = layerNumbers[layerNumbers.indexOf(layer) + steps[key][0]];
      return place.get(`${next}/${head + steps[key][1]}`);
    },
    describe: ({ head }) => [headTitle(head), headRows(head, statistic.column)],
    choose: ({ head }) => { choose(head.layer, head.head, "map"); press(); },
  });
  box.pressed = press;
  byId("map-meaning").replaceChildren(html("b", {}, statistic.label), ": ", ...formula(statistic.definition), ".");
  box.replaceChildren(legend(scale, statistic.label), html("div", { class: "scroll" }, root));
}

function drawClasses(box, width) {
  const left = layerRoom, row = 30, full = width - left - 4;
  const root = svg("svg", { viewBox: `0 0 ${width} ${layerNumbers.length * row + 4}`, width, height: layerNumbers.length * row + 4,
    role: "group", "aria-label": "Heads of each class by layer; arrow keys move" });
  root.append(rowsName(layerNumbers.length * row));
  const marks = [], counts = [];
  layerNumbers.forEach((layer, i) => {
    const here = heads.filter((h) => h.layer === layer && h.class);
    let from = left;
    const found = CLASSES.map((c) => here.filter((h) => h.class === c).length);
    counts.push([layer, ...found]);
    root.append(svg("text", { x: left - 8, y: i * row + 19, "text-anchor": "end" }, layerName(layer)));
    found.forEach((n, c) => {
      if (!n) return;
      const wide = (n / here.length) * full, bar = { x: from + 1, y: i * row + 2, width: Math.max(1, wide - 2), height: row - 4, rx: 2 };
      const node = svg("g", { class: "cell mark seq", role: "img", css: { "--t": c / 3 } }, svg("rect", bar));
      if (wide > 34) node.append(svg("text", { x: from + wide / 2, y: i * row + 19, "text-anchor": "middle" }, `${CLASSES[c]}: ${n}`));
      root.append(node);
      marks.push({ node, layer, c, n, all: here.length });
      from += wide;
    });
  });
  explore(root, marks, { move: alongLine,
    describe: (m) => [`Layer ${m.layer}, class ${CLASSES[m.c]}`, [["heads", `${m.n} of ${m.all}`]]] });
  const table = html("table", { class: "counts" },
    html("thead", {}, html("tr", {}, ...["layer", ...CLASSES].map((n) => html("th", { scope: "col" }, n)))),
    html("tbody", {}, ...counts.map((r) => html("tr", {}, ...r.map((n) => html("td", {}, String(n)))))));
  box.replaceChildren(legend({ kind: "class" }, "Class"), root,
    html("details", {}, html("summary", {}, "The counts as a table"), table));
}

function options(select, list, value) {
  select.replaceChildren(...list.map(([v, text]) => html("option", { value: v }, text)));
  if (value !== undefined) select.value = value;
}

if (byId("map-statistic")) {
  options(byId("map-statistic"), data.statistics.heads.map((s) => [s.column, s.label]));
  const redraw = plot("map", drawMap);
  byId("map-statistic").addEventListener("change", redraw);
  whenChosen.push((from) => { if (from !== "map") document.querySelector('[data-plot="map"]').pressed(); });
  // A finding leads to its statistic, and to the head that it names.
  for (const link of document.querySelectorAll("a[data-statistic]")) {
    const { statistic, layer, head } = link.dataset;
    link.addEventListener("click", () => {
      if (kindOf[statistic]) { byId("map-statistic").value = statistic; redraw(); }
      if (layer) choose(Number(layer), Number(head), "finding");
    });
  }
}
plot("classes", drawClasses);
