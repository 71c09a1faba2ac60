// Ratios against the alternative on one logarithmic scale, bench after bench, 1 marked.
if (data.benchmarks.length) {
  const rows = data.benchmarks.filter((r) => typeof r.ratio === "number" && r.ratio > 0);
  const groups = [...new Set(rows.map((r) => r.bench))];
  const ratio = (v) => v >= 10 ? format(v) : v >= 0.1 ? v.toFixed(2) : String(Number(v.toPrecision(2)));
  const known = (v) => typeof v === "number" && v > 0;

  function draw(box, width) {
    // Beside the scale where there is room, above their lines where there is none.
    const beside = width >= 640, left = beside ? Math.min(520, Math.round(width * 0.52)) : 8, right = 54;
    const room = beside ? left - 20 : width - 20, line = 17, head = 38, top = 6;
    const told = rows.map((r) => lines(`${r.quantity} / ${r.against}`, `${r.shape}${r.unit === "MB" ? ", memory" : ""}`, room));
    const heights = told.map((list) => beside ? 8 + line * list.length : 28 + line * list.length);
    const height = top + groups.length * head + heights.reduce((a, b) => a + b, 0) + 34, foot = height - 28;
    const range = rangeOf(rows.flatMap((r) => [r.ratio, r.recorded].filter(known)), "log", [1]);
    const across = axis(...range, left + 8, width - right, "log");
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Ratios; arrow keys move" });
    let last = -Infinity;
    const sparse = across.ticks.filter((t) => across.place(t) - last > 32 && ((last = across.place(t)), true));
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
      rows.forEach((r, i) => {
        if (r.bench !== name) return;
        const list = told[i], step = heights[i], middle = beside ? y + step / 2 : y + line * list.length + 12;
        const at = across.place(r.ratio), side = r.ratio < 1 ? "less" : "more";
        const words = list.map(([text, muted], k) => svg("text", { class: muted ? null : "plain", x: beside ? left - 6 : 8,
          y: beside ? y + 4 + line * (k + 0.75) : y + line * (k + 0.8), "text-anchor": beside ? "end" : "start" }, text));
        const node = svg("g", { class: `mark ${side}`, role: "img" },
          svg("path", { class: "row-hit", d: `M0,${y}h${width}v${step}h${-width}Z` }), ...words,
          svg("line", { class: "stem", x1: across.place(1), x2: at, y1: middle, y2: middle }),
          known(r.recorded) ? svg("circle", { class: "recorded", cx: across.place(r.recorded), cy: middle, r: 5 }) : null,
          svg("circle", { class: "dot", cx: at, cy: middle, r: 5 }),
          svg("text", { class: "plain", x: width - right + 46, y: middle + 4, "text-anchor": "end" }, ratio(r.ratio)));
        root.append(node);
        marks.push({ node, r });
        y += step;
      });
    }
    explore(root, marks, { move: alongLine, describe: ({ r }) => [`${r.quantity} against ${r.against}`, [["shape", r.shape],
      ["ours", `${format(r.amount)} ${r.unit}`], ["theirs", `${format(r.baseline)} ${r.unit}`], ["ratio", ratio(r.ratio)],
      ...(known(r.recorded) ? [["recorded", ratio(r.recorded)]] : [])]] });
    const key = (name, text, kind = "spot") => html("span", { class: `key-item ${name}` }, html("i", { class: kind }), text);
    box.replaceChildren(html("div", { class: "legend" }, key("less", "the library takes less"), key("more", "the alternative takes less"),
      rows.some((r) => known(r.recorded)) ? key("quiet-mark", "recorded (README)", "ring") : null), root);
  }
  // A label that is too long goes on in a second line; the shape stands behind it, or below.
  const ruler = document.createElement("canvas").getContext("2d");
  function lines(what, where, room) {
    ruler.font = "12px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";
    const fits = (text) => ruler.measureText(text).width <= room;
    const out = [];
    for (const [text, muted] of [[what, false], [where, true]]) {
      let now = "";
      for (const word of text.split(" ")) {
        if (now && !fits(`${now} ${word}`)) { out.push([now, muted]); now = word; } else now = now ? `${now} ${word}` : word;
      }
      out.push([now, muted]);
    }
    return out;
  }
  plot("benchmarks", draw);
}
