// A filtered series: observations, the mean with its band, and below how probable each regime is.
if (data.series) {
  const { dates, observed, mean, low, high, modes, probabilities } = data.series;
  const known = (v) => typeof v === "number";

  // Dates that begin a year whose number is a multiple of a round number of years; else every so many.
  function ticks(most) {
    const years = dates.map((d) => (/^(\d{4})/.exec(d) || [])[1]);
    if (years.every(Boolean)) {
      const starts = years.map((y, i) => [Number(y), i]).filter(([y], i) => i === 0 || String(y) !== years[i - 1]);
      for (const every of [1, 2, 5, 10, 20, 50, 100]) {
        const chosen = starts.filter(([y]) => y % every === 0);
        if (chosen.length <= most && chosen.length) return chosen.map(([y, i]) => [i, String(y)]);
      }
    }
    const every = Math.max(1, Math.ceil(dates.length / most));
    return dates.map((d, i) => [i, d]).filter((_, i) => i % every === 0);
  }

  function draw(box, width) {
    const left = 44, right = 10, top = 12, tall = Math.round(Math.max(190, Math.min(320, width * 0.32))), gap = 26, low_ = 92, foot = 26;
    const height = top + tall + gap + low_ + foot, base = top + tall + gap + low_;
    const across = axis(0, Math.max(1, dates.length - 1), left, width - right, "linear");
    const range = rangeOf([...observed, ...mean, ...low, ...high], "linear") || [0, 1];
    const up = axis(...range, top + tall, top, "linear");
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Series; arrow keys move in time" });
    for (const tick of up.ticks.filter((_, i, all) => all.length <= 7 || i % 2 === 0)) {
      root.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: up.place(tick), y2: up.place(tick) }),
        svg("text", { x: left - 8, y: up.place(tick) + 4, "text-anchor": "end" }, format(tick, "tick")));
    }
    for (const [i, name] of ticks(Math.floor((width - left) / 64))) {
      root.append(svg("line", { class: "grid", x1: across.place(i), x2: across.place(i), y1: top, y2: base }),
        svg("text", { x: across.place(i), y: base + 18, "text-anchor": "middle" }, name));
    }
    const at = (i, y) => `${across.place(i).toFixed(1)},${y.toFixed(1)}`;
    const banded = dates.map((_, i) => i).filter((i) => known(low[i]) && known(high[i]));
    if (banded.length > 1) root.append(svg("path", { class: "band s0",
      d: `M${banded.map((i) => at(i, up.place(high[i]))).join("L")}L${[...banded].reverse().map((i) => at(i, up.place(low[i]))).join("L")}Z` }));
    const line = dates.map((_, i) => i).filter((i) => known(mean[i]));
    if (line.length > 1) root.append(svg("path", { class: "curve s0", d: `M${line.map((i) => at(i, up.place(mean[i]))).join("L")}` }));
    observed.forEach((y, i) => { if (known(y)) root.append(svg("circle", { class: "seen", cx: across.place(i), cy: up.place(y), r: 2.4 })); });
    // Probabilities stand on one another and fill the strip.
    const colors = ["s0", "s1", "s2", "s3", "s4"], filled = dates.map(() => 0), strip = top + tall + gap;
    modes.forEach((mode, m) => {
      const floor = filled.slice();
      dates.forEach((_, i) => { filled[i] += probabilities[m][i] || 0; });
      const y = (share) => strip + low_ * Math.min(1, share);
      root.append(svg("path", { class: `regime ${colors[m % 5]}`,
        d: `M${dates.map((_, i) => at(i, y(filled[i]))).join("L")}L${dates.map((_, i) => dates.length - 1 - i).map((i) => at(i, y(floor[i]))).join("L")}Z` }));
    });
    for (const [share, name] of [[0, "1"], [1, "0"]])
      root.append(svg("text", { x: left - 8, y: strip + low_ * share + 4, "text-anchor": "end" }, name));
    root.append(svg("text", { x: left, y: strip - 8 }, "probability of each regime"));
    const cross = svg("line", { class: "crosshair", y1: top, y2: base, visibility: "hidden" });
    root.append(cross);
    const wide = (width - left - right) / Math.max(1, dates.length - 1);
    const marks = dates.map((_, i) => ({ i, node: svg("rect", { class: "slot", role: "img",
      x: across.place(i) - wide / 2, y: top, width: wide, height: base - top }) }));
    root.append(svg("g", {}, ...marks.map((mark) => mark.node)));
    explore(root, marks, {
      move: alongLine,
      describe: ({ i }) => [dates[i], [["observed", known(observed[i]) ? format(observed[i]) : "missing"], ["mean", format(mean[i])],
        ["band", `${format(low[i])} to ${format(high[i])}`], ...modes.map((mode, m) => [mode, format(probabilities[m][i], "share")])]],
      enter: ({ i }) => {
        cross.setAttribute("visibility", "visible");
        for (const end of ["x1", "x2"]) cross.setAttribute(end, across.place(i));
      },
      leave: () => cross.setAttribute("visibility", "hidden"),
    });
    const keys = html("div", { class: "legend" }, html("span", { class: "key-item s4" }, html("i", { class: "spot" }), "observed"),
      html("span", { class: "key-item s0" }, html("i", { class: "line" }), "mean and band"),
      ...modes.map((mode, m) => html("span", { class: `key-item ${colors[m % 5]}` }, html("i", { class: "area" }), mode)));
    box.replaceChildren(keys, root);
  }
  plot("series", draw);
}
