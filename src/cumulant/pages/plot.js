// One panel of points, lines and bands against two axes, each linear, logarithmic or of both signs.
function axis(low, high, from, to, kind) {
  // "both" is linear near zero and logarithmic away from it.
  const unit = kind === "both" ? Math.max(Math.abs(low), Math.abs(high)) / 300 : 1;
  const bend = kind === "log" ? Math.log10 : kind === "both" ? (x) => Math.asinh(x / unit) : (x) => x;
  const a = bend(low), b = bend(high);
  const place = (x) => from + ((bend(x) - a) / (b - a || 1)) * (to - from);
  return { low, high, place, ticks: ticksOf(low, high, kind, Math.abs(to - from)) };
}

function ticksOf(low, high, kind, room) {
  const most = Math.max(2, Math.floor(room / 30));
  if (kind === "log" && high / low > 5) {
    const of = (digits) => {
      const found = [];
      for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
        for (const m of digits) found.push(Number((m * 10 ** e).toPrecision(3)));
      return found.filter((x) => x >= low * 0.9999 && x <= high * 1.0001);
    };
    const chosen = [high / low < 30 ? [1, 2, 5] : [1, 3], [1, 3], [1]].map(of).find((x) => x.length <= most);
    if (chosen) return chosen;
    const decades = of([1]), every = Math.ceil(decades.length / most);
    return decades.filter((x) => Math.round(Math.log10(x)) % every === 0);
  }
  if (kind === "both") {
    const top = Math.max(Math.abs(low), Math.abs(high));
    const sizes = [0, 1, 2, 3].map((k) => 10 ** (Math.floor(Math.log10(top)) - k));
    return [...sizes.map((x) => -x), 0, ...sizes].filter((x) => x >= low && x <= high).slice(-most);
  }
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
  const first = Math.ceil(low / step), last = Math.floor(high / step + 1e-6);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(8)));
}

// The range of a list of numbers with air around it.
function rangeOf(values, kind, must = []) {
  const known = [...values, ...must].filter((v) => typeof v === "number" && (kind !== "log" || v > 0));
  if (!known.length) return null;
  let low = Math.min(...known), high = Math.max(...known);
  if (kind === "log") {
    const air = Math.max(1.05, (high / low) ** 0.06);
    return [low / air, high * air];
  }
  const air = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - air, high + air];
}

// Where the stack changes, from encoder to decoder, a line begins anew.
function runs(points) {
  const found = [];
  points.forEach((p, i) => {
    if (i && p.stack === points[i - 1].stack) found[found.length - 1].push(p);
    else found.push([p]);
  });
  return found;
}

// series: [{name, color, dashed, dots, points: [{x, y, low, high, stack, title, rows}]}]
function panel({ width, height = 230, series, x, y, title, label }) {
  const left = 58, right = 12, top = 10, bottom = 38;
  const across = axis(...x.range, left, width - right, x.kind || "linear");
  const up = axis(...y.range, height - bottom, top, y.kind || "linear");
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group",
    "aria-label": `${title}; arrow keys move among the points` });
  for (const tick of up.ticks) {
    const at = up.place(tick);
    root.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }),
      svg("text", { x: left - 8, y: at + 4, "text-anchor": "end" }, format(tick, "tick")));
  }
  for (const tick of x.ticks || across.ticks) {
    root.append(svg("text", { x: across.place(tick), y: height - bottom + 18, "text-anchor": "middle" }, format(tick, "tick")));
  }
  root.append(svg("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, label));
  if (y.line !== undefined && y.line >= y.range[0] && y.line <= y.range[1]) {
    root.append(svg("line", { class: "one", x1: left, x2: width - right, y1: up.place(y.line), y2: up.place(y.line) }));
  }
  const clip = (v) => Math.max(y.range[0], Math.min(y.range[1], v));
  const marks = [];
  for (const one of series) {
    const points = one.points.filter((p) => typeof p.y === "number");
    const color = `s${one.color || 0}`;
    const banded = points.filter((p) => typeof p.low === "number" && typeof p.high === "number");
    const line = (edge, list) => list.map((p) => `${across.place(p.x)},${up.place(clip(p[edge]))}`).join(" L");
    for (const run of runs(banded)) {
      // A band of one point would have no width: a whisker then.
      root.append(svg("path", { class: `${run.length > 1 ? "band" : "whisker"} ${color}`,
        d: `M${line("high", run)} L${line("low", [...run].reverse())} Z` }));
    }
    if (!one.dots) {
      for (const run of runs(points).filter((r) => r.length > 1))
        root.append(svg("path", { class: `curve ${color}${one.dashed ? " dashed" : ""}`, d: `M${line("y", run)}` }));
    }
    for (const point of points) {
      if (one.quiet) continue;
      const cx = across.place(point.x), cy = up.place(clip(point.y));
      const shape = point.y < y.range[0]
        ? svg("path", { class: `dot ${color}`, d: `M${cx - 4.5},${cy - 8} h9 l-4.5,8 Z` })
        : svg("circle", { class: `dot ${color}${one.dots ? " faint" : ""}`, cx, cy, r: one.dots ? (points.length > 400 ? 2.5 : 4) : points.length > 24 ? 3.5 : 4.5 });
      const node = svg("g", { class: "mark", role: "img" }, shape);
      root.append(node);
      marks.push({ node, point });
    }
  }
  marks.sort((a, b) => a.point.x - b.point.x);
  explore(root, marks, { move: alongLine, describe: ({ point }) => [point.title, point.rows] });
  return root;
}

function panels(box, width, list) {
  // Four stand two by two; a row of three with one left over looks unfinished.
  const columns = width >= 640 ? (width >= 940 && list.length >= 3 && list.length !== 4 ? 3 : Math.min(2, list.length)) : 1;
  const each = Math.floor((width - 20 * (columns - 1)) / columns);
  const grid = html("div", { class: "panels", css: { "grid-template-columns": `repeat(${columns}, minmax(0, 1fr))` } });
  for (const one of list) {
    const named = one.series.filter((s) => s.name);
    grid.append(html("div", { class: "panel" }, html("h3", {}, one.title),
      named.length ? html("div", { class: "legend" }, ...named.map((s) => html("span", { class: `key-item s${s.color || 0}` },
        html("i", { class: `line${s.dashed ? " dashed" : ""}` }), s.name))) : null,
      panel({ ...one, width: each })));
  }
  box.replaceChildren(grid);
}
