// Figures by training step: of all layers, or of the heads of one.
const layerSelect = byId("curve-layer");
layerSelect.append(html("option", { value: "" }, "all layers"),
  ...data.layers.map((l, i) => html("option", { value: i }, `layer ${l.number} (${l.module})`)));
const mean = (xs) => xs.reduce((a, b) => a + b, 0) / xs.length;
const summaries = { mean, max: (xs) => Math.max(...xs) };

// Points of one figure: in the middle the layer's (or model's) value, the band from least to most.
function pointsOf(figure, groups, what) {
  return data.steps.map((step, t) => {
    const values = groups.map((g) => g[t]).filter((v) => typeof v === "number");
    if (!values.length) return { x: step, y: null };
    const y = summaries[figure.summary](values), low = Math.min(...values), high = Math.max(...values);
    return { x: step, y, low, high, title: `Step ${format(step)}`,
      rows: [[figure.label, format(y)], [`least ${what}`, format(low)], [`largest ${what}`, format(high)]] };
  });
}

function drawCurves(box, width) {
  const chosen = layerSelect.value === "" ? null : data.layers[Number(layerSelect.value)];
  const what = chosen ? "head" : "layer";
  const steps = [Math.min(...data.steps), Math.max(...data.steps)];
  if (steps[0] === steps[1]) steps[1] = steps[0] + 1;
  const list = data.figures.map((figure) => {
    // By head of a layer, or one row per layer.
    const groups = chosen ? chosen.heads[figure.column] : data.layers.map((l) => l.whole[figure.column]);
    const points = pointsOf(figure, groups, what);
    const values = points.flatMap((p) => [p.low, p.high]).filter((v) => typeof v === "number");
    const kind = figure.log && values.every((v) => v > 0) ? "log" : "linear";
    const must = figure.line !== null && figure.show(values) ? [figure.line] : [];
    const range = rangeOf(values, kind, must);
    return range && { title: figure.label + (kind === "log" ? " (log scale)" : ""), label: "step",
      series: [{ color: figure.color, points }], x: { range: steps },
      y: { range, kind, line: figure.line === null ? undefined : figure.line } };
  }).filter((x) => x);
  if (data.losses.some((v) => typeof v === "number")) {
    const points = data.steps.map((x, t) => ({ x, y: data.losses[t], title: `Step ${format(x)}`, rows: [["loss", format(data.losses[t])]] }));
    list.push({ title: "Loss", label: "step", series: [{ color: 4, points }], x: { range: steps }, y: { range: rangeOf(data.losses, "linear") } });
  }
  byId("curve-meaning").textContent = chosen
    ? `Lines are means over the heads of layer ${chosen.number} (of scores, the largest); bands reach from the least head to the largest.`
    : "Lines are means over the layers (of scores, the largest); bands reach from the least layer to the largest.";
  panels(box, width, list);
}
// A threshold is drawn if the curve comes near it; otherwise it would flatten the curve.
for (const figure of data.figures) {
  figure.show = (values) => values.some((v) => figure.below ? v < 4 * figure.line : v > figure.line / 4);
}
const redraw = plot("curves", drawCurves);
layerSelect.addEventListener("change", redraw);
