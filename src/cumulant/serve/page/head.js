// One head: arcs from the chosen token to its keys, its weights, and the plane of the keys.
let headNow = null;
const TOP = 8;

function drawArcs(box, width) {
  if (!headNow || !views.a) { box.replaceChildren(); return; }
  const tokens = views.a.tokens, row = headNow.weights[headNow.token], n = tokens.length;
  const step = 19, mid = Math.min(150, width * 0.4), root = svg("svg", { viewBox: `0 0 ${width} ${n * step + 10}`, width, height: n * step + 10,
    role: "img", "aria-label": `Token ${headNow.token} attends to ${topKeys().slice(0, 3).map(([w, j]) => `${shownToken(tokens[j])} ${format(w, "share")}`).join(", ")}` });
  const y = (i) => 14 + i * step, from = y(headNow.token);
  row.forEach((w, j) => {
    if (!(w > 0.004)) return;
    const bend = Math.min(width - mid - 12, 26 + 0.55 * Math.abs(y(j) - from)), to = y(j);
    root.append(svg("path", { class: "arc", d: j === headNow.token
      ? `M${mid + 4},${from - 3} c${bend},-14 ${bend},20 0,6` : `M${mid + 4},${from - 4} C${mid + bend},${from - 4} ${mid + bend},${to - 4} ${mid + 4},${to - 4}`,
      "stroke-width": (0.7 + 9 * w).toFixed(2), "stroke-opacity": (0.25 + 0.7 * Math.min(1, 2 * w)).toFixed(2) }));
  });
  tokens.forEach((text, j) => root.append(svg("text", { class: `word${j === headNow.token ? " own" : ""}`, x: mid, y: y(j), "text-anchor": "end" }, shownToken(text).slice(0, 18))));
  box.replaceChildren(root);
}
const topKeys = () => headNow.weights[headNow.token].map((w, j) => [w, j]).sort((a, b) => b[0] - a[0] || a[1] - b[1]).slice(0, TOP);

function tellWeights() {
  const box = byId("weights");
  if (!headNow || !views.a) { box.replaceChildren(); return; }
  const facts = [["G", headNow.log_normalizer], ["Entropy", headNow.entropy], ["Largest score", headNow.score_max], ["Variance of the scores", headNow.score_variance]];
  byId("head-title").textContent = `Layer ${headNow.layer}, head ${headNow.head}, token ${headNow.token}: ${shownToken(views.a.tokens[headNow.token])}`;
  box.replaceChildren(
    html("table", { class: "rows" }, html("thead", {}, html("tr", {}, ...["key", "", "weight"].map((t, i) => html("th", { scope: "col", class: i === 2 ? "number" : null }, t)))),
      html("tbody", {}, ...topKeys().map(([w, j]) => html("tr", {}, html("td", {}, `${j} ${shownToken(views.a.tokens[j])}`),
        html("td", { class: "bar-cell", "aria-hidden": "true" }, html("span", { class: "bar", css: { width: `${(100 * w).toFixed(1)}%` } })),
        html("td", { class: "number" }, format(w, "share")))))),
    html("dl", { class: "facts" }, ...facts.map(([name, value]) => html("div", {}, html("dt", {}, name), html("dd", {}, format(value))))));
}

function drawPlane(box, width) {
  if (!headNow || !views.a) { box.replaceChildren(); return; }
  const size = Math.min(width, 460), seen = headNow.keys.map((k, j) => [k, j]).filter(([, j]) => headNow.visible[j]);
  const [[a, b], [, c]] = headNow.covariance, half = (a + c) / 2, apart = Math.hypot((a - c) / 2, b);
  const long = Math.sqrt(Math.max(0, half + apart)), short = Math.sqrt(Math.max(0, half - apart)), angle = Math.atan2(2 * b, a - c) / 2;
  const reach = 1.12 * Math.max(1e-6, ...seen.flatMap(([k]) => k.map(Math.abs)), ...headNow.mean.map((m) => Math.abs(m) + long));
  const px = (x) => size * (0.5 + x / (2 * reach)), py = (y) => size * (0.5 - y / (2 * reach)), unit = size / (2 * reach);
  const root = svg("svg", { class: "plane", viewBox: `0 0 ${size} ${size}`, width: size, height: size, role: "group", "aria-label": "Keys in their two leading directions; arrow keys move among them" });
  root.append(svg("line", { class: "axis", x1: 0, x2: size, y1: py(0), y2: py(0) }), svg("line", { class: "axis", x1: px(0), x2: px(0), y1: 0, y2: size }));
  for (const [k, name] of [[2, "ellipse far"], [1, "ellipse"]]) root.append(svg("ellipse", { class: name, rx: Math.max(0.5, k * long * unit), ry: Math.max(0.5, k * short * unit),
    transform: `translate(${px(headNow.mean[0])} ${py(headNow.mean[1])}) rotate(${(-angle * 180) / Math.PI})` }));
  const row = headNow.weights[headNow.token], marks = [];
  for (const [k, j] of seen) {
    const node = svg("g", { class: "mark", role: "img" }, svg("circle", { class: "key-point", cx: px(k[0]), cy: py(k[1]), r: (3 + 0.05 * size * Math.sqrt(row[j] || 0)).toFixed(1), "fill-opacity": (0.3 + 0.6 * Math.min(1, 4 * (row[j] || 0))).toFixed(2) }));
    root.append(node);
    marks.push({ node, j });
  }
  // The query as a direction: it tilts the measure that way, however long it is.
  const length = Math.hypot(...headNow.query) || 1, tilt = headNow.query.map((v) => (0.45 * reach * v) / length);
  root.append(svg("line", { class: "tilt", x1: px(0), y1: py(0), x2: px(tilt[0]), y2: py(tilt[1]) }), svg("text", { x: px(tilt[0]) + 5, y: py(tilt[1]) }, "q"));
  root.append(svg("path", { class: "mean-mark", d: "M0,-7 L7,0 L0,7 L-7,0 Z", transform: `translate(${px(headNow.mean[0])} ${py(headNow.mean[1])})` }),
    svg("text", { x: px(headNow.mean[0]) + 10, y: py(headNow.mean[1]) - 6 }, "E[k]"));
  explore(root, marks, { move: alongLine, describe: ({ j }) => [`Key ${j}: ${shownToken(views.a.tokens[j])}`, [["weight", format(row[j], "share")]]] });
  box.replaceChildren(root);
  byId("plane-caption").textContent = `Keys in the two directions in which they vary most, ${format(headNow.explained, "share")} of their variance; area shows weight. ` +
    `The ellipses are Cov[k] under the weights, at one and two standard deviations; the diamond is E[k]; the line is the query's direction, ${format(headNow.gain, "share")} of whose length lies in this plane.`;
}
