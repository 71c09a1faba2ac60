// A statistic of each patch, drawn on the picture that the model saw.
if (byId("picture-image")) {
  const pick = { image: byId("picture-image"), layer: byId("picture-layer"), head: byId("picture-head"), statistic: byId("picture-statistic") };
  const plain = byId("picture-plain");
  const refill = (select, options) => {
    const before = select.value;
    select.replaceChildren(...options.map(([value, label]) => html("option", { value }, label)));
    if (options.some(([value]) => String(value) === before)) select.value = before;
  };
  const call = () => data.texts[Number(pick.image.value)].calls[pick.layer.value];
  const mean = (rows) => rows[0].map((_, t) => rows.reduce((sum, row) => sum + row[t], 0) / rows.length);
  // Of a head, or the mean over heads.
  const valuesOf = (column) => {
    const rows = call().statistics[column];
    return pick.head.value === "" ? mean(rows) : rows[call().heads.indexOf(Number(pick.head.value))];
  };

  function choices() {
    const text = data.texts[Number(pick.image.value)];
    refill(pick.layer, Object.keys(text.calls).map(Number).sort((a, b) => a - b).map((l) => [l, `layer ${l}`]));
    refill(pick.head, [["", "mean of all"], ...call().heads.map((h) => [h, `head ${h}`])]);
    refill(pick.statistic, data.statistics.tokens.filter((s) => call().statistics[s.column]).map((s) => [s.column, s.label]));
  }

  function draw(box, width) {
    const picture = data.pictures[Number(pick.image.value)], tokens = data.texts[Number(pick.image.value)].tokens;
    const statistic = data.statistics.tokens.find((s) => s.column === pick.statistic.value);
    const values = valuesOf(statistic.column), patches = values.slice(picture.special);
    // From the least patch to the most: what matters here is where, not how much.
    const scale = { ...scaleOf(patches, statistic.kind) }, least = Math.min(...patches);
    if (scale.kind === "share" && least < scale.high) scale.low = least;
    const side = Math.min(width, 520) / Math.max(picture.columns, picture.rows);
    const w = side * picture.columns, h = side * picture.rows;
    const root = svg("svg", { viewBox: `0 0 ${w} ${h}`, width: w, height: h, role: "group", "aria-label": "Patches; arrow keys move" },
      svg("image", { class: plain.checked ? null : "beneath", href: `data:image/png;base64,${picture.png}`, width: w, height: h, preserveAspectRatio: "none" }));
    const marks = patches.map((value, i) => {
      const color = colorOf(scale, value), row = Math.floor(i / picture.columns), column = i % picture.columns;
      const node = svg("g", { class: `mark patch ${color.name}${plain.checked ? " plain" : ""}`, role: "img", css: { "--t": color.t } },
        svg("rect", { x: column * side, y: row * side, width: side, height: side }));
      root.append(node);
      return { node, value, name: tokens[picture.special + i] };
    });
    const move = (i, key) => key === "ArrowDown" ? i + picture.columns : key === "ArrowUp" ? i - picture.columns : alongLine(i, key);
    explore(root, marks, { move, describe: ({ value, name }) => [name, [[statistic.label, format(value, statistic.kind)]]] });
    const special = values.slice(0, picture.special).map((v, i) =>
      html("span", { class: "key-item" }, `${tokens[i]}: ${format(v, statistic.kind)}`));
    box.replaceChildren(root, html("div", { class: "legend" }, ...special));
    byId("picture-legend").replaceChildren(legend(scale, statistic.label));
    byId("picture-meaning").replaceChildren(html("b", {}, statistic.label), ": ", ...formula(statistic.definition), ".");
  }

  refill(pick.image, data.texts.map((t, i) => [i, t.name]));
  choices();
  const redraw = plot("picture", draw);
  for (const select of Object.values(pick)) select.addEventListener("change", () => { choices(); redraw(); });
  plain.addEventListener("change", redraw);
}
