// Ratios against the alternative on one logarithmic scale, bench after bench, 1 marked.
if (data.benchmarks.length) {
  const rows = data.benchmarks.filter((r) => typeof r.ratio === "number" && r.ratio > 0);
  const groups = [...new Set(rows.map((r) => r.bench))];
  const ratio = (v) => v >= 10 ? format(v) : v >= 0.1 ? v.toFixed(2) : String(Number(v.toPrecision(2)));

  function draw(box, width) {
    // Beside the scale where there is room, above their lines where there is none.
    const beside = width >= 640, left = beside ? Math.min(520, Math.round(width * 0.52)) : 8, right = 54;
    const step = beside ? 25 : 44, head = 38, top = 6;
    const height = top + groups.length * head + rows.length * step + 34, foot = height - 28;
    const range = rangeOf(rows.map((r) => r.ratio), "log", [1]);
    const across = axis(...range, left + 8, width - right, "log");
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Ratios; arrow keys move" });
    const sparse = across.ticks.filter((t, i, all) => i === 0 || Math.abs(across.place(t) - across.place(all[i - 1])) > 26);
    for (const tick of sparse) {
      const x = across.place(tick);
      root.append(svg("line", { class: "grid", x1: x, x2: x, y1: top, y2: foot }),
        svg("text", { x, y: foot + 18, "text-anchor": "middle" }, format(tick, "tick")));
    }
    root.append(svg("line", { class: "one", x1: across.place(1), x2: across.place(1), y1: top, y2: foot }));
    const marks = [];
    let y = top;
    for (const name of groups) {
      root.append(svg("text", { class: "strong", x: 0, y: y + 26 }, name));
      y += head;
      for (const r of rows.filter((x) => x.bench === name)) {
        const middle = y + (beside ? step / 2 : 30), at = across.place(r.ratio), side = r.ratio < 1 ? "less" : "more";
        const what = svg("text", { class: "plain", x: beside ? left - 6 : 8, y: beside ? middle + 4 : y + 14, "text-anchor": beside ? "end" : "start" });
        const node = svg("g", { class: `mark ${side}`, role: "img" },
          svg("path", { class: "row-hit", d: `M0,${y}h${width}v${step}h${-width}Z` }), what,
          svg("line", { class: "stem", x1: across.place(1), x2: at, y1: middle, y2: middle }),
          svg("circle", { class: "dot", cx: at, cy: middle, r: 5 }),
          svg("text", { class: "plain", x: width - right + 46, y: middle + 4, "text-anchor": "end" }, ratio(r.ratio)));
        root.append(node);
        label(what, `${r.quantity} / ${r.against}`, ` · ${r.shape}`, beside ? left - 20 : width - 20);
        marks.push({ node, r });
        y += step;
      }
    }
    explore(root, marks, { move: alongLine, describe: ({ r }) => [`${r.quantity} against ${r.against}`, [["shape", r.shape],
      ["ours", `${format(r.amount)} ${r.unit}`], ["theirs", `${format(r.baseline)} ${r.unit}`], ["ratio", ratio(r.ratio)]]] });
    box.replaceChildren(root);
  }
  // A label that would not fit loses its end; what it says in full is in the tip.
  const ruler = document.createElement("canvas").getContext("2d");
  function label(node, what, where, room) {
    ruler.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";
    let text = what + where;
    while (text.length > 4 && ruler.measureText(text).width > room) text = `${text.slice(0, -2).trimEnd()}…`;
    node.append(text.slice(0, what.length), svg("tspan", {}, text.slice(what.length)));
  }
  plot("benchmarks", draw);
}
