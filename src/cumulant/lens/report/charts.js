// Depth, energy, shape, partition function, link: what each panel shows.
const layerRows = rowsOf(data.layers), expansionRows = rowsOf(data.expansions), partitionRows = rowsOf(data.partition);
const depthRange = (xs) => { const low = Math.min(...xs), high = Math.max(...xs); return [low - 0.5, high + 0.5]; };
const wholeTicks = (xs) => {
  const all = [...new Set(xs.map(Math.floor))].sort((a, b) => a - b), every = Math.ceil(all.length / 8);
  return all.filter((_, i) => i % every === 0);
};

// The encoder's blocks and the decoder's: module names up to the block's number.
const stackOf = (row) => (row.module || "").replace(/\d+$/, "");
const COLORS = { attention: 0, cross_attention: 3, feed_forward: 2, norm: 1, block: 4 };

function drawDepth(box, width) {
  const which = byId("without-sinks").checked ? "without_sinks" : "all";
  const rows = expansionRows.filter((r) => (r.tokens || "all") === which && typeof r.median === "number");
  const rangeFor = (list) => rangeOf(list.flatMap((r) => [r.q05, r.q95, r.median]), "log", [1]);
  const layers = expansionRows.map((r) => r.layer);
  const list = [];
  for (const [sublayer, title] of data.sublayers) {
    const mine = rows.filter((r) => r.sublayer === sublayer);
    if (!mine.length) continue;
    // A block has several normalizations: a line for each, a little apart.
    const names = [...new Set(mine.map((r) => r.name || ""))];
    const series = names.map((name, i) => ({ name: names.length > 1 ? name : "",
      color: names.length > 1 ? (COLORS[sublayer] + i) % 5 : COLORS[sublayer],
      points: mine.filter((r) => (r.name || "") === name).sort((a, b) => a.layer - b.layer).map((r) => ({
        x: r.layer + (i - (names.length - 1) / 2) * 0.08, y: r.median, low: r.q05, high: r.q95, stack: stackOf(r),
        title: `Layer ${r.layer}, ${r.name || title.toLowerCase()}`,
        rows: [["median ratio", format(r.median)], ["5 to 95%", `${format(r.q05)} to ${format(r.q95)}`],
          ["pairs", format(r.pairs)]] })) }));
    list.push({ title, series, label: "layer", x: { range: depthRange(layers), ticks: wholeTicks(layers) },
      y: { range: rangeFor(byId("same-scale").checked ? rows : mine), kind: "log", line: 1 } });
  }
  panels(box, width, list);
}

// A dot for each head, spread within its layer by head, and the layer's median as a line.
function headDots(column, { color = 0, clip = -Infinity } = {}) {
  const most = Math.max(...heads.map((h) => h.head));
  const rows = heads.filter((h) => typeof h[column] === "number");
  const dots = rows.map((h) => ({ x: h.layer + (most ? h.head / most - 0.5 : 0) * 0.6, y: h[column], title: headTitle(h), rows: headRows(h, column) }));
  const middle = layerNumbers.map((layer) => {
    const values = rows.filter((h) => h.layer === layer).map((h) => h[column]).sort((a, b) => a - b);
    if (!values.length) return { x: layer, y: null };
    const half = (values.length - 1) / 2;
    return { x: layer, y: Math.max(clip, (values[Math.floor(half)] + values[Math.ceil(half)]) / 2) };
  });
  // Encoder, decoder and cross-attention have each their own line.
  const lines = [...new Set(layerNumbers.map((l) => sides.get(l)))].map((side) => ({ color: 4, quiet: true,
    points: middle.filter((p) => sides.get(p.x) === side) }));
  return [{ color, dots: true, points: dots }, ...lines];
}
const headAxis = () => ({ range: depthRange(layerNumbers), ticks: wholeTicks(layerNumbers) });

function drawEnergy(box, width) {
  const values = heads.map((h) => h.energy_change).filter((v) => typeof v === "number");
  const sizes = values.map(Math.abs).sort((a, b) => a - b);
  const wide = sizes[sizes.length - 1] > 20 * (sizes[Math.floor(sizes.length / 2)] || 1e-12);
  const list = [{ title: `Mean energy change${wide ? " (bent scale)" : ""}`, series: headDots("energy_change"), label: "layer", x: headAxis(),
    y: { range: rangeOf(values, "linear", [0]), kind: wide ? "both" : "linear", line: 0 } }];
  if (heads.some((h) => h.energy_rises > 0)) {
    list.push({ title: "Share of tokens whose energy rose", series: headDots("energy_rises", { color: 1 }), label: "layer", x: headAxis(),
      y: { range: [-0.03, Math.max(0.1, ...heads.map((h) => h.energy_rises || 0)) * 1.06] } });
  }
  panels(box, width, list);
}

// A panel of columns of the table of layers, null where none of them holds a number.
function layerPanel(title, columns) {
  const xs = layerRows.map((r) => r.layer), known = columns.filter(([c]) => layerRows.some((r) => typeof r[c] === "number"));
  if (!known.length) return null;
  const series = known.map(([column, extra]) => ({ ...extra, points: layerRows.map((r) => ({ x: r.layer, y: r[column], stack: stackOf(r),
    title: `Layer ${r.layer}`, rows: [[extra.name || column.replaceAll("_", " "), format(r[column])]] })) }));
  return { title, label: "layer", series, x: { range: depthRange(xs), ticks: wholeTicks(xs) },
    y: { range: rangeOf(layerRows.flatMap((r) => known.map(([c]) => r[c])), "linear", [0]) } };
}

const drawShape = (box, width) => panels(box, width, [
  layerPanel("Participation ratio", [["participation_ratio", {}]]),
  layerPanel("Anisotropy: mean cosine", [["anisotropy", { color: 3 }]]),
  layerPanel("Rank residual", [["rank_residual", { color: 2 }]]),
  layerPanel("Gaussianity statistic", [["gaussianity", { name: "statistic", color: 0 }],
    ["gaussianity_null", { name: "95% of the null", color: 1, dashed: true }]]),
].filter((p) => p !== null));

const drawSensitivity = (box, width) => panels(box, width, [
  layerPanel("Relative change of the output over that of the weights", [["sensitivity_qk", { name: "query and key", color: 0 }],
    ["sensitivity_vo", { name: "value and output", color: 1 }]])]);

function drawPartition(box, width) {
  const kinds = [...new Set(partitionRows.map((r) => r.centered ?? null))];
  const names = { false: "embeddings as they are", true: "about their mean" };
  const line = (column, band) => kinds.map((kind) => ({ color: kind ? 1 : 0, dashed: kind === false, name: names[kind] || "",
    points: partitionRows.filter((r) => (r.centered ?? null) === kind).sort((a, b) => a.radius - b.radius).map((r) => ({
      x: r.radius, y: r[column], low: band ? r.q025 : null, high: band ? r.q975 : null,
      title: `Radius ${format(r.radius, "tick")}${kind === null ? "" : `, ${names[kind]}`}`,
      rows: [["mean of log Z", format(r.mean)], ["95% of directions", `${format(r.q025)} to ${format(r.q975)}`],
        ["relative sd of Z", deviation(r.relative_sd)]] })) }));
  const radii = [...new Set(partitionRows.map((r) => r.radius))], kind = Math.min(...radii) > 0 ? "log" : "linear";
  const x = { kind, range: rangeOf(radii, kind), ticks: radii.length <= 8 ? radii : undefined };
  const list = [{ title: "log Z: mean and 95% of directions", label: "radius of c", series: line("mean", true), x,
    y: { range: rangeOf(partitionRows.flatMap((r) => [r.mean, r.q025, r.q975]), "linear") } }];
  const spread = partitionRows.map((r) => r.relative_sd).filter((v) => v > 0);
  if (spread.length) {
    list.push({ title: "Relative standard deviation of Z", label: "radius of c", series: line("relative_sd", false)
      .map((s) => ({ ...s, points: s.points.filter((p) => p.y > 0) })), x, y: { kind: "log", range: rangeOf(spread, "log") } });
  }
  panels(box, width, list);
}

function drawLink(box, width) {
  const list = [];
  for (const [column, title, color] of [["link_linear", "Best linear map, R²", 0], ["link_trained", "Trained map, R²", 1]]) {
    const values = heads.map((h) => h[column]).filter((v) => typeof v === "number");
    if (!values.length) continue;
    list.push({ title, series: headDots(column, { color, clip: -1 }), label: "layer", x: headAxis(),
      y: { range: [Math.min(-0.05, Math.max(-1, Math.min(...values) - 0.05)), 1.05], line: 0 } });
  }
  panels(box, width, list);
}

const redrawDepth = plot("depth", drawDepth);
if (redrawDepth) {
  for (const id of ["without-sinks", "same-scale"]) byId(id).addEventListener("change", redrawDepth);
  byId("without-sinks").parentElement.hidden = !expansionRows.some((r) => r.tokens === "without_sinks");
}
plot("energy", drawEnergy);
plot("shape", drawShape);
plot("sensitivity", drawSensitivity);
plot("partition", drawPartition);
plot("link", drawLink);
