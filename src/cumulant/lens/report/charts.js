// Depth, energy, shape, partition function, link: what each panel shows.
const layerRows = rowsOf(data.layers), expansionRows = rowsOf(data.expansions), partitionRows = rowsOf(data.partition);
const depthRange = (xs) => { const low = Math.min(...xs), high = Math.max(...xs); return [low - 0.5, high + 0.5]; };
const wholeTicks = (xs) => {
  const all = [...new Set(xs.map(Math.floor))].sort((a, b) => a - b), every = Math.ceil(all.length / 8);
  return all.filter((_, i) => i % every === 0);
};

function drawDepth(box, width) {
  const which = byId("without-sinks").checked ? "without_sinks" : "all";
  const rows = expansionRows.filter((r) => (r.tokens || "all") === which && typeof r.median === "number");
  const range = rangeOf(rows.flatMap((r) => [r.q05, r.q95, r.median]), "log", [1]);
  const across = depthRange(expansionRows.map((r) => r.layer));
  const list = [];
  data.sublayers.forEach(([sublayer, title], i) => {
    const mine = rows.filter((r) => r.sublayer === sublayer);
    if (!mine.length) return;
    // A block's normalizations stand side by side between its layer and the next.
    const points = mine.map((r) => {
      const same = mine.filter((o) => o.layer === r.layer), k = same.indexOf(r);
      const place = r.layer + (same.length > 1 ? (k - (same.length - 1) / 2) * 0.36 : 0);
      return { x: place, y: r.median, low: r.q05, high: r.q95, title: `Layer ${r.layer}, ${r.name || title.toLowerCase()}`,
        rows: [["median ratio", format(r.median)], ["5 to 95%", `${format(r.q05)} to ${format(r.q95)}`],
          ["pairs", format(r.pairs)]] };
    });
    points.sort((a, b) => a.x - b.x);
    list.push({ title, series: [{ color: [0, 3, 2, 0, 1][i], points }], label: "layer",
      x: { range: across, ticks: wholeTicks(expansionRows.map((r) => r.layer)) }, y: { range, kind: "log", line: 1 } });
  });
  panels(box, width, list);
}

// A dot for each head, spread within its layer by head, and the layer's median as a line.
function headDots(column, { color = 0, clip = -Infinity } = {}) {
  const most = Math.max(...heads.map((h) => h.head)) || 1;
  const rows = heads.filter((h) => typeof h[column] === "number");
  const dots = rows.map((h) => ({ x: h.layer + (h.head / most - 0.5) * 0.6, y: h[column], title: headTitle(h), rows: headRows(h) }));
  const middle = layerNumbers.map((layer) => {
    const values = rows.filter((h) => h.layer === layer).map((h) => h[column]).sort((a, b) => a - b);
    if (!values.length) return { x: layer, y: null };
    const half = (values.length - 1) / 2;
    return { x: layer, y: Math.max(clip, (values[Math.floor(half)] + values[Math.ceil(half)]) / 2) };
  });
  return [{ color, dots: true, points: dots }, { color, quiet: true, points: middle }];
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

function drawShape(box, width) {
  const xs = layerRows.map((r) => r.layer);
  const line = (column, extra) => ({ ...extra, points: layerRows.map((r) => ({ x: r.layer, y: r[column],
    title: `Layer ${r.layer}`, rows: [[(extra && extra.name) || column.replaceAll("_", " "), format(r[column])]] })) });
  const has = (...columns) => columns.some((c) => layerRows.some((r) => typeof r[c] === "number"));
  const one = (title, columns, kind, must) => has(...columns.map((c) => c[0])) ? {
    title, label: "layer", series: columns.map(([c, extra]) => line(c, extra)), x: { range: depthRange(xs), ticks: wholeTicks(xs) },
    y: { kind, range: rangeOf(layerRows.flatMap((r) => columns.map(([c]) => r[c])), kind, must) } } : null;
  panels(box, width, [
    one("Participation ratio", [["participation_ratio", {}]], "linear", [0]),
    one("Anisotropy: mean cosine of token pairs", [["anisotropy", { color: 3 }]], "linear", [0]),
    one("Rank residual", [["rank_residual", { color: 2 }]], "linear", [0]),
    one("Gaussianity statistic", [["gaussianity", { name: "statistic", color: 0 }],
      ["gaussianity_null", { name: "95% of the null", color: 1, dashed: true }]], "linear", [0]),
    one("Sensitivity to weights", [["sensitivity_qk", { name: "query and key", color: 0 }],
      ["sensitivity_vo", { name: "value and output", color: 1 }]], "linear", [0]),
  ].filter((p) => p !== null && p.y.range));
}

function drawPartition(box, width) {
  const groups = [...new Set(partitionRows.map((r) => r.directions || ""))];
  const line = (column, band) => groups.map((g, i) => ({ color: i % 4, name: groups.length > 1 ? g : "",
    points: partitionRows.filter((r) => (r.directions || "") === g).sort((a, b) => a.radius - b.radius).map((r) => ({
      x: r.radius, y: r[column], low: band ? r.q025 : null, high: band ? r.q975 : null, title: `Radius ${format(r.radius, "tick")}`,
      rows: [["mean of log Z", format(r.mean)], ["95% of directions", `${format(r.q025)} to ${format(r.q975)}`],
        ["relative sd of Z", format(r.relative_sd, "share")]] })) }));
  const radii = partitionRows.map((r) => r.radius), kind = Math.min(...radii) > 0 ? "log" : "linear";
  const x = { kind, range: rangeOf(radii, kind), ticks: radii.length <= 8 ? [...new Set(radii)] : undefined };
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

if (expansionRows.some((r) => r.tokens === "without_sinks") && byId("depth-controls")) byId("depth-controls").hidden = false;
const redrawDepth = plot("depth", drawDepth);
if (redrawDepth) byId("without-sinks").addEventListener("change", redrawDepth);
plot("energy", drawEnergy);
plot("shape", drawShape);
plot("partition", drawPartition);
plot("link", drawLink);
