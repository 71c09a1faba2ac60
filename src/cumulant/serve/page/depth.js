// Expansion and contraction along depth, and the first-order change beside the true one.
let depthNow = null, tangentNow = null;
const SUBLAYERS = { attention: "attention", feed_forward: "feed-forward", norm: "normalization", block: "whole block" };

function drawDepth(box, width) {
  if (!depthNow) { box.replaceChildren(); return; }
  const series = Object.entries(SUBLAYERS).map(([kind, name], color) => {
    const rows = depthNow.expansions.filter((r) => r.sublayer === kind && typeof r.median === "number");
    // Several norms of one layer stand side by side.
    const count = new Map();
    return { name, color, dashed: kind === "norm", dots: kind === "norm", points: rows.map((r) => {
      const k = count.get(r.layer) || 0;
      count.set(r.layer, k + 1);
      return { x: r.layer + 0.25 * k, y: r.median, low: kind === "norm" ? null : r.q25, high: kind === "norm" ? null : r.q75, title: `Layer ${r.layer}, ${name}`,
        rows: [["median ratio", format(r.median)], ["quartiles", `${format(r.q25)} to ${format(r.q75)}`], ...(r.name ? [["module", r.name]] : [])] };
    }) };
  }).filter((s) => s.points.length);
  const values = series.flatMap((s) => s.points.flatMap((p) => [p.y, p.low, p.high]));
  const layers = [...new Set(depthNow.expansions.map((r) => r.layer))];
  panels(box, width, [{ title: "Ratio of distances", series, height: 300, label: "layer", x: { range: [-0.4, Math.max(...layers) + 0.6], ticks: layers.length > 14 ? undefined : layers },
    y: { range: rangeOf(values, "log", [1]), kind: "log", line: 1 } }]);
}

function drawTangent(box, width) {
  if (!tangentNow || !views.a) { box.replaceChildren(); return; }
  const whole = (rows) => rows.map((r) => Math.hypot(...r));
  const points = (list, name) => [{ x: 0, y: 0, title: name, rows: [["step", "0"], ["change", "0"]] },
    ...list.map((y, i) => ({ x: tangentNow.steps[i], y, title: name, rows: [["step", format(tangentNow.steps[i])], ["length of the change", format(y)]] }))];
  const one = (title, list) => {
    const series = list.map(([name, color, dashed, values]) => ({ name, color, dashed, points: points(values, name) }));
    return { title, series, label: "step toward the other word", x: { range: [0, 1.04] }, y: { range: rangeOf(list.flatMap((x) => x[3]), "linear", [0]) } };
  };
  const last = tangentNow.true[0].length - 1, shown = [one("Change of the output, all tokens", [["true", 0, false, whole(tangentNow.true)], ["first order", 1, true, whole(tangentNow.predicted)]])];
  const column = (rows, i) => rows.map((r) => r[i]);
  if (tangentNow.next) {
    const name = shownToken(tangentNow.next_tokens[0]);
    shown.push(one(`Logit of the next token ${name}`, [["true", 0, false, column(tangentNow.next.true, 0)], ["first order", 1, true, column(tangentNow.next.predicted, 0)]]));
  } else shown.push(one(`Change of token ${tangentNow.token} alone`, [["true", 0, false, column(tangentNow.true, tangentNow.token)], ["first order", 1, true, column(tangentNow.predicted, tangentNow.token)]]));
  panels(box, width, shown);
  byId("tangent-caption").textContent = `Token ${tangentNow.token}, ${shownToken(views.original.tokens[tangentNow.token])}, moved toward ${shownToken(tangentNow.toward)}. ` +
    `At a step of ${tangentNow.steps[0]} the first-order change misses ${format(tangentNow.missed[0], "share")} of the true one, at the other word ${deviation(tangentNow.missed[tangentNow.missed.length - 1])}.`;
}
