// A query among keys: G, its gradient and its Hessian, recomputed as the query is dragged.
{
  const HALF = 2.6, CELLS = 56; // the plane reaches from -HALF to HALF; contours come from a grid
  const host = byId("query-panel"), slider = byId("query-beta");

  // A small generator of uniform numbers, so that everybody sees the same keys.
  const uniform = (seed) => () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let t = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  const SETS = {
    clusters: () => {
      const draw = uniform(7), found = [];
      const centers = [[1.45, 0.95], [-0.2, 1.7], [-1.65, 0.25], [-0.75, -1.35], [1.2, -1.05]];
      for (let i = 0; i < 40; i++) {
        const [x, y] = centers[i % 5], r = 0.3 * Math.sqrt(-2 * Math.log(1 - draw())) * 0.75, a = 2 * Math.PI * draw();
        found.push([x + r * Math.cos(a), y + r * Math.sin(a)]);
      }
      return found;
    },
    ring: () => Array.from({ length: 40 }, (_, i) => [1.7 * Math.cos((Math.PI * i) / 20), 1.7 * Math.sin((Math.PI * i) / 20)]),
    line: () => Array.from({ length: 40 }, (_, i) => [1.9 * (i / 19.5 - 1), 0.8 * (i / 19.5 - 1)]),
  };

  const state = { keys: SETS.clusters(), query: [1.0, 0.75], beta: Number(slider.value) };

  function tilt(keys, beta, [x, y]) {
    const scores = keys.map(([a, b]) => beta * (a * x + b * y)), top = Math.max(...scores);
    const masses = scores.map((s) => Math.exp(s - top)), total = masses.reduce((a, b) => a + b, 0);
    const weights = masses.map((m) => m / total);
    const mean = [0, 1].map((c) => keys.reduce((sum, k, j) => sum + weights[j] * k[c], 0));
    const moment = (c, d) => keys.reduce((sum, k, j) => sum + weights[j] * (k[c] - mean[c]) * (k[d] - mean[d]), 0);
    const log = top + Math.log(total);
    // Shifted scores: the difference of G and the mean score would cancel.
    const entropy = Math.log(total) - weights.reduce((sum, p, j) => sum + p * (scores[j] - top), 0);
    return { weights, mean, log, entropy, covariance: [[moment(0, 0), moment(0, 1)], [moment(0, 1), moment(1, 1)]] };
  }

  // Half the trace and how far the eigenvalues lie from it; the angle is that of the larger one.
  function axes([[a, b], [, c]]) {
    const middle = (a + c) / 2, apart = Math.hypot((a - c) / 2, b);
    return { long: Math.sqrt(middle + apart), short: Math.sqrt(Math.max(0, middle - apart)), angle: Math.atan2(2 * b, a - c) / 2 };
  }

  // The lines on which values on the grid equal a level, as segments of one path.
  function contour(values, level, place) {
    const at = (i, j) => values[j * (CELLS + 1) + i] - level;
    const parts = [];
    for (let j = 0; j < CELLS; j++) for (let i = 0; i < CELLS; i++) {
      const corners = [[i, j], [i + 1, j], [i + 1, j + 1], [i, j + 1]], cuts = [];
      for (let k = 0; k < 4; k++) {
        const [p, q] = [corners[k], corners[(k + 1) % 4]], a = at(...p), b = at(...q);
        if (a < 0 === b < 0) continue;
        const t = a / (a - b);
        cuts.push(place(p[0] + t * (q[0] - p[0]), p[1] + t * (q[1] - p[1])));
      }
      for (let k = 0; k + 1 < cuts.length; k += 2) parts.push(`M${cuts[k]}L${cuts[k + 1]}`);
    }
    return parts.join("");
  }

  let grid = null;
  function field() {
    const values = new Float64Array((CELLS + 1) ** 2);
    for (let j = 0; j <= CELLS; j++) for (let i = 0; i <= CELLS; i++) {
      const at = [HALF * ((2 * i) / CELLS - 1), HALF * ((2 * j) / CELLS - 1)];
      let total = 0;
      for (const [a, b] of state.keys) total += Math.exp(state.beta * (a * at[0] + b * at[1]));
      values[j * (CELLS + 1) + i] = Math.log(total);
    }
    grid = values;
  }

  let parts = null;
  function draw(box, width) {
    const unit = width / (2 * HALF), px = (x) => (x + HALF) * unit, py = (y) => (HALF - y) * unit;
    const place = (i, j) => `${(i * width / CELLS).toFixed(1)},${(width - j * width / CELLS).toFixed(1)}`;
    const root = svg("svg", { class: "plane", viewBox: `0 0 ${width} ${width}`, width, height: width, role: "group",
      "aria-label": "The plane of keys and query" });
    const clip = svg("clipPath", { id: "plane-clip" }, svg("rect", { width, height: width, rx: 6 }));
    const levels = svg("g", {}), inside = svg("g", { "clip-path": "url(#plane-clip)" });
    inside.append(levels,
      svg("line", { class: "axis", x1: 0, x2: width, y1: py(0), y2: py(0) }),
      svg("line", { class: "axis", x1: px(0), x2: px(0), y1: 0, y2: width }));
    const through = svg("path", { class: "contour through" });
    const ties = svg("g", {}), far = svg("ellipse", { class: "ellipse far" }), near = svg("ellipse", { class: "ellipse" });
    const points = state.keys.map(([x, y]) => svg("circle", { class: "point", cx: px(x), cy: py(y) }));
    const mean = svg("path", { class: "mean", d: "M0,-8 L8,0 L0,8 L-8,0 Z" });
    const gradient = svg("path", { class: "gradient" }), head = svg("path", { class: "head", d: "M0,0 L-10,-5 L-10,5 Z" });
    const meanName = svg("text", { class: "of-mean" }, "E[k]"), queryName = svg("text", { class: "of-query" }, "q");
    const handle = svg("g", { class: "handle", tabindex: 0, role: "slider", "aria-roledescription": "point in the plane",
      "aria-label": "Query; arrow keys move it", "aria-valuemin": -HALF, "aria-valuemax": HALF },
      svg("circle", { class: "grip", r: 20 }), svg("circle", { class: "dot", r: 8.5 }));
    inside.append(through, ties, far, near, ...points, gradient, head);
    root.append(clip, inside, mean, meanName, queryName, handle);
    const held = document.activeElement && document.activeElement.classList.contains("handle");
    box.replaceChildren(root);
    if (held) handle.focus();

    parts = {
      contours() {
        const low = Math.min(...grid), high = Math.max(...grid), rough = (high - low) / 11;
        if (!(rough > 1e-9)) { levels.replaceChildren(); return; } // at β = 0, G is flat
        const power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find((m) => m * power >= rough) * power;
        const paths = [];
        for (let level = Math.ceil(low / step) * step; level < high; level += step)
          paths.push(svg("path", { class: "contour", d: contour(grid, level, place) }));
        levels.replaceChildren(...paths);
      },
      update() {
        const now = tilt(state.keys, state.beta, state.query), e = axes(now.covariance);
        through.setAttribute("d", state.beta > 0 ? contour(grid, now.log, place) : "");
        points.forEach((node, j) => {
          node.setAttribute("r", (2.5 + 0.06 * width * Math.sqrt(now.weights[j])).toFixed(2));
          node.setAttribute("fill-opacity", (0.22 + 0.6 * Math.min(1, 4 * now.weights[j])).toFixed(3));
        });
        const [x, y] = [px(state.query[0]), py(state.query[1])], [mx, my] = [px(now.mean[0]), py(now.mean[1])];
        const order = now.weights.map((p, j) => [p, j]).filter(([p]) => p > 1.5 / state.keys.length)
          .sort((a, b) => b[0] - a[0]).slice(0, 6);
        ties.replaceChildren(...order.map(([p, j]) => svg("line", { class: "tie", x1: x, y1: y,
          x2: px(state.keys[j][0]), y2: py(state.keys[j][1]), "stroke-width": (0.6 + 4 * p).toFixed(2), "stroke-opacity": (0.15 + 0.5 * p).toFixed(3) })));
        for (const [node, k] of [[near, 1], [far, 2]]) {
          node.setAttribute("rx", Math.max(0.5, k * e.long * unit));
          node.setAttribute("ry", Math.max(0.5, k * e.short * unit));
          node.setAttribute("transform", `translate(${mx} ${my}) rotate(${(-e.angle * 180) / Math.PI})`);
        }
        mean.setAttribute("transform", `translate(${mx} ${my})`);
        meanName.setAttribute("x", mx + 12); meanName.setAttribute("y", my + (my < y ? -8 : 18));
        queryName.setAttribute("x", x - 22); queryName.setAttribute("y", y - 8);
        // The gradient of β⁻¹ G(βq) is E[k]; half of it, so that it stays in view.
        const [gx, gy] = [x + 0.5 * now.mean[0] * unit, y - 0.5 * now.mean[1] * unit];
        const long = Math.hypot(gx - x, gy - y) > 14;
        gradient.setAttribute("d", long ? `M${x},${y} L${gx},${gy}` : "");
        head.setAttribute("transform", `translate(${gx} ${gy}) rotate(${(Math.atan2(gy - y, gx - x) * 180) / Math.PI})`);
        head.setAttribute("visibility", long ? "visible" : "hidden");
        handle.setAttribute("transform", `translate(${x} ${y})`);
        handle.setAttribute("aria-valuenow", state.query[0].toFixed(2));
        handle.setAttribute("aria-valuetext", `${words(state.query)}; mean ${words(now.mean)}`);
        tell(now, e);
      },
    };
    if (!grid) field();
    parts.contours();
    parts.update();

    const to = ([x, y]) => {
      const edge = (v) => Math.max(-HALF, Math.min(HALF, v));
      state.query = [edge(x), edge(y)];
      parts.update();
    };
    const where = (event) => {
      const b = root.getBoundingClientRect(), size = (2 * HALF) / b.width;
      return [(event.clientX - b.left) * size - HALF, HALF - (event.clientY - b.top) * size];
    };
    let dragging = false;
    root.addEventListener("pointerdown", (event) => {
      const grip = event.target.closest(".handle");
      if (event.button !== 0 || (event.pointerType === "touch" && !grip)) return; // a finger may be scrolling
      dragging = true;
      root.setPointerCapture(event.pointerId);
      if (!grip) to(where(event));
      handle.focus({ preventScroll: true });
      event.preventDefault();
    });
    root.addEventListener("pointermove", (event) => { if (dragging) to(where(event)); });
    for (const end of ["pointerup", "pointercancel"]) root.addEventListener(end, () => { dragging = false; });
    root.addEventListener("click", (event) => { if (event.pointerType === "touch") to(where(event)); });
    // On the query a finger drags, elsewhere it scrolls; touch-action does nothing inside a drawing.
    handle.addEventListener("touchstart", (event) => event.preventDefault(), { passive: false });
    handle.addEventListener("keydown", (event) => {
      const step = event.shiftKey ? 0.5 : 0.1, [x, y] = state.query;
      const next = { ArrowRight: [x + step, y], ArrowLeft: [x - step, y], ArrowUp: [x, y + step], ArrowDown: [x, y - step], Home: [0, 0] }[event.key];
      if (!next || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      to(next);
    });
  }

  const fixed = (v, digits = 2) => v.toFixed(digits).replace("-", "−");
  const words = ([x, y]) => `${fixed(x)}, ${fixed(y)}`;
  let speaking = 0;
  function tell(now, e) {
    const shown = {
      "log-normalizer": fixed(now.log, 3), mean: `(${words(now.mean)})`, deviations: `${fixed(e.long)}, ${fixed(e.short)}`,
      entropy: fixed(now.entropy, 3), effective: `${fixed(Math.exp(now.entropy), 1)} of ${state.keys.length}`,
      largest: format(Math.max(...now.weights), "share"),
    };
    for (const [name, text] of Object.entries(shown)) byId(`query-${name}`).textContent = text;
    const exact = { keys: state.keys, query: state.query, beta: state.beta, logNormalizer: now.log, entropy: now.entropy,
      effective: Math.exp(now.entropy), mean: now.mean, covariance: now.covariance };
    for (const [name, value] of Object.entries(exact)) host.dataset[name] = JSON.stringify(value);
    // Said once the query rests, not at every step of a drag.
    clearTimeout(speaking);
    speaking = setTimeout(() => {
      byId("query-said").textContent = `G ${shown["log-normalizer"]}, mean ${words(now.mean)}, ${shown.effective} keys`;
    }, 700);
  }

  const relabel = () => { byId("query-beta-shown").textContent = fixed(state.beta, 1); };
  slider.addEventListener("input", () => {
    state.beta = Number(slider.value);
    relabel();
    field();
    parts.contours();
    parts.update();
  });
  relabel();
  const redraw = plot("query", draw);
  const choices = [...host.querySelectorAll("[data-keys]")];
  for (const button of choices) button.addEventListener("click", () => {
    for (const other of choices) other.setAttribute("aria-pressed", String(other === button));
    state.keys = SETS[button.dataset.keys]();
    field();
    redraw();
  });
}
