// Layers and heads as a map.
function headMap(view, title, width, choose) {
  const statistic = statisticNow(), table = view.heads[statistic.column];
  const rows = table.length, columns = Math.max(...table.map((r) => r.length));
  const listed = table.flat().map((v) => statistic.kind === "class" ? CLASS_OF(v) : v);
  const scale = scaleOf(listed, statistic.kind), left = 30, top = 18;
  const cell = Math.max(14, Math.min(34, Math.floor((width - left - 4) / columns))), high = Math.min(cell, 24);
  const root = svg("svg", { viewBox: `0 0 ${left + columns * cell + 4} ${top + rows * high + 4}`, width: left + columns * cell + 4, height: top + rows * high + 4,
    role: "group", "aria-label": `${title}: layers (rows) and heads (columns); arrow keys move, Enter chooses` });
  for (let h = 0; h < columns; h++) if (cell >= 20 || h % 2 === 0) root.append(svg("text", { x: left + (h + 0.5) * cell, y: 12, "text-anchor": "middle" }, String(h)));
  const marks = [];
  table.forEach((row, l) => {
    if (high >= 12 || l % 2 === 0) root.append(svg("text", { x: left - 6, y: top + (l + 0.5) * high + 4, "text-anchor": "end" }, String(l)));
    row.forEach((value, h) => {
      const color = colorOf(scale, statistic.kind === "class" ? CLASS_OF(value) : value);
      const node = svg("g", { class: `cell mark ${color.name}`, role: "button", "aria-pressed": String(l === state.layer && h === state.head), css: { "--t": color.t } },
        svg("rect", { x: left + h * cell + 1, y: top + l * high + 1, width: cell - 2, height: high - 2, rx: 2 }));
      root.append(node);
      marks.push({ node, l, h });
    });
  });
  explore(root, marks, { start: Math.min(marks.length - 1, state.layer * columns + state.head),
    move: (i, key) => ({ ArrowRight: i + 1, ArrowLeft: i - 1, ArrowDown: i + columns, ArrowUp: i - columns }[key] ?? null),
    describe: ({ l, h }) => [`Layer ${l}, head ${h}`, data.statistics.map((s) => [s.label, worth(s, view.heads[s.column][l][h])])],
    choose: ({ l, h }) => choose(l, h) });
  return html("div", {}, html("h3", {}, title), legend(scale, statistic.label), html("div", { class: "scroll" }, root),
    html("div", { class: "legend" }, "Rows: layers. Columns: heads."));
}

function drawMap(box, width) {
  if (!views.a) { box.replaceChildren(); return; }
  const held = box.contains(document.activeElement);
  const pick = (layer, head) => { state.layer = layer; state.head = head; state.averaged = false; byId("averaged").checked = false; refresh({ head: true }); };
  const both = views.b && state.b, each = both && width > 700 ? width / 2 - 16 : width;
  const maps = [headMap(views.a, data.models[state.a.model].name, each, pick)];
  if (both) maps.push(headMap(views.b, `${data.models[state.b.model].name}, compared`, each, pick));
  box.replaceChildren(html("div", { class: "panels" }, ...maps));
  if (held) { const own = box.querySelector('.cell[tabindex="0"]'); if (own) own.focus({ preventScroll: true }); }
}
