// A cloud under attention: x ← contraction(x + τ attention(x)), all points at once.
{
  const N = 120, TAIL = 28, HISTORY = 48, SETTLED = 1e-6, FAR = 1e6;
  const host = byId("cloud-panel"), canvas = byId("cloud-canvas"), pen = canvas.getContext("2d");
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const control = (name) => byId(`cloud-${name}`);

  const uniform = (seed) => () => {
    seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
    return (seed + 0.5) / 4294967296;
  };
  const normal = (draw) => {
    const r = Math.sqrt(-2 * Math.log(draw())), a = 2 * Math.PI * draw();
    return [r * Math.cos(a), r * Math.sin(a)];
  };
  const circle = (a) => [Math.cos(a), Math.sin(a)];
  const each = (make) => Array.from({ length: N }, (_, i) => make(i));
  const STARTS = {
    gaussian: () => { const draw = uniform(3); return each(() => normal(draw)); },
    uniform: () => { const draw = uniform(5); return each(() => circle(2 * Math.PI * draw())); },
    ring: () => each((i) => circle((2 * Math.PI * i) / N)),
    groups: () => { const draw = uniform(9); return each((i) => normal(draw).map((v, c) => 0.25 * v + (c ? 0.2 : (i % 2 ? 1 : -1)))); },
  };

  function attention(points, beta) {
    const scores = new Float64Array(N);
    return points.map(([x, y]) => {
      let top = -Infinity;
      for (let j = 0; j < N; j++) {
        scores[j] = beta * (points[j][0] * x + points[j][1] * y);
        if (scores[j] > top) top = scores[j];
      }
      let total = 0, u = 0, v = 0;
      for (let j = 0; j < N; j++) {
        const mass = Math.exp(scores[j] - top);
        total += mass; u += mass * points[j][0]; v += mass * points[j][1];
      }
      return [u / total, v / total];
    });
  }
  const length = (x, y) => Math.sqrt(x * x + y * y); // a tenth of the time of Math.hypot
  const onto = (radius) => (points) => points.map(([x, y]) => { const r = radius / length(x, y); return [r * x, r * y]; });
  function whiten(points) {
    const mean = [0, 1].map((c) => points.reduce((s, p) => s + p[c], 0) / N);
    const away = points.map(([x, y]) => [x - mean[0], y - mean[1]]);
    const moment = (c, d) => away.reduce((s, p) => s + p[c] * p[d], 0) / N;
    // The root of a symmetric 2 by 2 matrix S is (S + √det I) / √(tr + 2 √det).
    const [a, b, c] = [moment(0, 0), moment(0, 1), moment(1, 1)], s = Math.sqrt(Math.max(0, a * c - b * b)), t = Math.sqrt(a + c + 2 * s);
    if (!(s > 1e-12 * (a + c))) return null; // flat
    const [p, q, r] = [(a + s) / t, b / t, (c + s) / t], det = p * r - q * q;
    return away.map(([x, y]) => [(r * x - q * y) / det, (p * y - q * x) / det]);
  }
  const CONTRACTIONS = { none: (points) => points, sphere: onto(1), rms: onto(Math.SQRT2), whiten };

  const distances = (points) => {
    const found = new Float64Array((N * (N - 1)) / 2);
    for (let i = 0, k = 0; i < N; i++) for (let j = i + 1; j < N; j++, k++)
      found[k] = length(points[i][0] - points[j][0], points[i][1] - points[j][1]);
    return found;
  };
  const average = (list) => list.reduce((a, b) => a + b, 0) / list.length;
  const sizeOf = (points) => Math.sqrt(average(points.map(([x, y]) => x * x + y * y)));
  function spreadOf(points) {
    const [mx, my] = [0, 1].map((c) => average(points.map((p) => p[c])));
    return sizeOf(points.map(([x, y]) => [x - mx, y - my]));
  }
  // Groups of points connected by links no longer than the reach.
  function clustersOf(points, reach) {
    const label = new Int32Array(N).fill(-1);
    let count = 0;
    for (let i = 0; i < N; i++) {
      if (label[i] >= 0) continue;
      label[i] = count;
      for (const stack = [i]; stack.length;) {
        const [x, y] = points[stack.pop()];
        for (let j = 0; j < N; j++) if (label[j] < 0 && length(points[j][0] - x, points[j][1] - y) <= reach) {
          label[j] = count;
          stack.push(j);
        }
      }
      count++;
    }
    return { count, label };
  }

  let points, before, between, tails, steps, ratios, history, view, target, hues, trouble, groups;
  let playing = false, phase = 1, last = 0, frame = 0, visible = true, measured = 0;

  function start() {
    points = STARTS[control("start").value]();
    hues = points.map(([x, y]) => Math.floor(((Math.atan2(y, x) / (2 * Math.PI) + 1) % 1) * 6));
    before = between = points;
    tails = points.map((p) => [p]);
    steps = 0; phase = 1; ratios = null; trouble = ""; measured = 0;
    history = [average(distances(points))];
    view = target = frameOf(points);
    measure();
  }
  const frameOf = (list) => 1.22 * Math.max(...list.map(([x, y]) => Math.max(Math.abs(x), Math.abs(y))), 1e-3);

  // One step is computed at once; the picture then follows, first half and second half.
  function advance() {
    const beta = Number(control("beta").value), size = Number(control("size").value);
    const pull = attention(points, beta), moved = points.map(([x, y], i) => [x + size * pull[i][0], y + size * pull[i][1]]);
    const after = CONTRACTIONS[control("contraction").value](moved);
    if (!after || !after.flat().every(Number.isFinite)) return stop("This contraction is undefined here: the cloud is flat, or a point lies at the origin. Reset, or choose another.");
    const [d0, d1, d2] = [points, moved, after].map(distances), means = [d0, d1, d2].map(average);
    let smallest = Infinity;
    const noise = 1e-9 * sizeOf(points); // of points nearer than this, rounding decides
    for (let k = 0; k < d0.length; k++) if (d0[k] > noise) smallest = Math.min(smallest, d1[k] / d0[k]);
    ratios = { attention: means[1] / means[0], contraction: means[2] / means[1], smallest };
    const shift = Math.max(...after.map(([x, y], i) => length(x - points[i][0], y - points[i][1]))) / sizeOf(after);
    before = points; between = moved; points = after;
    steps += 1; phase = 0;
    const room = Math.max(frameOf(points), frameOf(between) / 1.15);
    if (room > target || room < 0.75 * target) target = room;
    history.push(means[1], means[2]);
    history = history.slice(-2 * HISTORY - 1);
    tails.forEach((tail, i) => { tail.push(points[i]); if (tail.length > TAIL) tail.shift(); });
    measure();
    if (shift < SETTLED) stop(`At rest after ${steps} step${steps === 1 ? "" : "s"}.`);
    else if (room > FAR) stop("Without a contraction the cloud grows forever; it stops here, at a size of a million. Reset, or choose a contraction.");
  }

  const factor = (v) => Number.isFinite(v) ? `×${v.toFixed(3)}` : "–";
  function measure() {
    // The picture keeps its pace; numbers that change faster cannot be read.
    if (playing && performance.now() - measured < 60) return;
    measured = performance.now();
    groups = clustersOf(points, 0.1 * sizeOf(points));
    const spread = spreadOf(points), clusters = groups.count;
    const shown = { steps: String(steps), clusters: String(clusters), spread: format(Number(spread.toPrecision(3))),
      attention: ratios ? factor(ratios.attention) : "–", contracted: ratios ? factor(ratios.contraction) : "–",
      smallest: ratios ? factor(ratios.smallest) : "–" };
    for (const [name, text] of Object.entries(shown)) control(name).textContent = text;
    const exact = { steps, spread, clusters, ...(ratios || {}) };
    for (const [name, value] of Object.entries(exact)) host.dataset[name] = String(value);
    if (!playing) host.dataset.points = JSON.stringify(points);
    if (drawHalves) drawHalves();
  }
  const say = (text) => { control("said").textContent = text; };
  const summary = () => `Step ${steps}: ${control("clusters").textContent} clusters, spread ${control("spread").textContent}.`;

  function stop(why) {
    trouble = why || "";
    playing = false;
    control("play").textContent = "Play";
    measure();
    say(why || summary());
  }
  function play() {
    if (trouble) start(); // with the same settings it would stop at once
    trouble = "";
    playing = true;
    control("play").textContent = "Pause";
    say("");
    wake();
  }

  // Colors as the theme has them now: a canvas knows no variables.
  let inks = {};
  const probe = host.appendChild(html("span", { class: "quiet", "aria-hidden": "true" }));
  function dye() {
    for (const name of ["page", "ink", "muted", "line", "c0", "c1", "c2", "c3", "c4", "c5"]) {
      probe.style.color = `var(--${name})`;
      inks[name] = getComputedStyle(probe).color;
    }
    wake();
  }

  const HUES = ["c0", "c5", "c2", "c4", "c1", "c3"]; // around the circle, as figures/ does
  const ease = (t) => t * t * (3 - 2 * t);
  function paint() {
    const width = canvas.clientWidth, ratio = Math.min(2, window.devicePixelRatio || 1);
    if (!width) return;
    const size = Math.round(width * ratio);
    if (canvas.width !== size) canvas.width = canvas.height = size;
    view += (target - view) * (still.matches ? 1 : 0.12);
    const unit = size / (2 * view), px = (x) => size / 2 + x * unit, py = (y) => size / 2 - y * unit;
    pen.clearRect(0, 0, size, size);
    pen.lineWidth = ratio;
    pen.strokeStyle = inks.line;
    pen.beginPath();
    pen.moveTo(0, size / 2); pen.lineTo(size, size / 2); pen.moveTo(size / 2, 0); pen.lineTo(size / 2, size);
    const radius = { sphere: 1, rms: Math.SQRT2 }[control("contraction").value];
    if (radius) { pen.moveTo(px(radius), size / 2); pen.arc(size / 2, size / 2, radius * unit, 0, 2 * Math.PI); }
    pen.stroke();
    // First the half of attention, then that of the contraction.
    const half = phase < 0.5 ? [before, between, ease(2 * phase)] : [between, points, ease(2 * phase - 1)];
    const now = points.map((_, i) => [0, 1].map((c) => half[0][i][c] + (half[1][i][c] - half[0][i][c]) * half[2]));
    pen.lineWidth = 1.3 * ratio;
    pen.globalAlpha = 0.3;
    for (let hue = 0; hue < HUES.length; hue++) { // one stroke for each color is much faster than one for each tail
      pen.strokeStyle = inks[HUES[hue]];
      pen.beginPath();
      tails.forEach((tail, i) => {
        if (hues[i] !== hue) return;
        const end = tail.length - (phase < 1 ? 1 : 0);
        for (let k = 0; k < end; k++) pen[k ? "lineTo" : "moveTo"](px(tail[k][0]), py(tail[k][1]));
        pen.lineTo(px(now[i][0]), py(now[i][1]));
      });
      pen.stroke();
    }
    pen.globalAlpha = 0.9;
    now.forEach(([x, y], i) => {
      pen.fillStyle = inks[HUES[hues[i]]];
      pen.beginPath();
      pen.arc(px(x), py(y), 4 * ratio, 0, 2 * Math.PI);
      pen.fill();
    });
    pen.globalAlpha = 1;
    pen.font = `${12 * ratio}px system-ui, sans-serif`;
    pen.fillStyle = inks.muted;
    if (groups.count <= 12 && steps) crowds(now, size, px, py, ratio);
    // A bar says how large the view is.
    const power = 10 ** Math.floor(Math.log10(view / 2)), bar = [5, 2, 1].find((m) => m * power <= view / 2) * power;
    pen.strokeStyle = pen.fillStyle = inks.muted;
    pen.lineWidth = 1.5 * ratio;
    const [left, foot] = [14 * ratio, size - 14 * ratio];
    pen.beginPath();
    pen.moveTo(left, foot - 4 * ratio); pen.lineTo(left, foot); pen.lineTo(left + bar * unit, foot); pen.lineTo(left + bar * unit, foot - 4 * ratio);
    pen.stroke();
    pen.fillText(format(bar, "tick"), left + 4 * ratio, foot - 7 * ratio);
    host.dataset.view = String(view);
  }

  // Points that have run together look like one: their number stands beside them, outward.
  function crowds(now, size, px, py, ratio) {
    pen.textAlign = "center";
    for (let k = 0; k < groups.count; k++) {
      const members = now.filter((_, i) => groups.label[i] === k), [x, y] = [0, 1].map((c) => average(members.map((p) => p[c])));
      const reach = Math.max(...members.map((p) => length(p[0] - x, p[1] - y))) * (size / (2 * view));
      const far = length(x, y), out = 17 * ratio + Math.min(reach, 14 * ratio);
      if (members.length < 2 || reach > 18 * ratio || !(far > 0)) continue;
      pen.fillText(String(members.length), px(x) + (x / far) * out, py(y) - (y / far) * out + 4 * ratio);
    }
    pen.textAlign = "start";
  }

  function tick(time) {
    frame = 0;
    const speed = Number(control("speed").value), passed = Math.min(100, time - last) / 1000;
    last = time;
    if (phase < 1) phase = still.matches ? 1 : Math.min(1, phase + passed * (playing ? speed : 2));
    if (playing && visible && phase >= 1) advance();
    paint();
    if ((playing && visible) || phase < 1 || Math.abs(target - view) > 1e-3 * target) wake();
  }
  function wake() { if (!frame) frame = requestAnimationFrame(tick); }

  // The mean distance between points at every half step.
  let drawHalves = null;
  const halves = (box, width) => {
    const height = 84, left = 34, right = 8, top = 20, foot = 8;
    const low = Math.min(...history), high = Math.max(...history), most = 2 * HISTORY;
    // Without a contraction it grows without end: a logarithmic scale then.
    const wide = low > 0 && high > 20 * low, bend = wide ? Math.log : (v) => v;
    const up = (v) => height - foot - ((bend(v) - bend(low)) / (bend(high) - bend(low) || 1)) * (height - top - foot), across = (k) => left + (k / most) * (width - left - right);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" },
      svg("text", { x: left, y: 11 }, `mean distance between points${wide ? " (log scale)" : history.length < 2 ? ": press Play" : ""}`),
      svg("text", { x: left - 6, y: up(high) + 4, "text-anchor": "end" }, format(Number(high.toPrecision(2)), "tick")),
      high > low ? svg("text", { x: left - 6, y: up(low) + 4, "text-anchor": "end" }, format(Number(low.toPrecision(2)), "tick")) : null,
      svg("line", { class: "grid", x1: left, x2: width - right, y1: up(low), y2: up(low) }),
      svg("path", { class: "curve s0", d: `M${history.map((v, k) => `${across(k).toFixed(1)},${up(v).toFixed(1)}`).join("L")}` }));
    box.replaceChildren(root);
  };

  const label = (name, digits) => { control(`${name}-shown`).textContent = Number(control(name).value).toFixed(digits); };
  for (const [name, digits] of [["beta", 1], ["size", 2]]) {
    control(name).addEventListener("input", () => { label(name, digits); trouble = ""; });
    label(name, digits);
  }
  control("play").addEventListener("click", () => { if (playing) stop(); else play(); });
  control("step").addEventListener("click", () => {
    if (playing) stop();
    trouble = "";
    advance();
    if (!trouble) say(summary());
    wake();
  });
  const again = () => { start(); if (!playing) say(""); wake(); };
  control("reset").addEventListener("click", again);
  control("start").addEventListener("change", again);
  control("contraction").addEventListener("change", () => { trouble = ""; wake(); });

  start();
  drawHalves = plot("halves", halves);
  dye();
  whenThemed.push(dye);
  matchMedia("print").addEventListener("change", () => { dye(); paint(); });
  new ResizeObserver(wake).observe(canvas);
  // It plays where it can be seen, and nowhere else.
  let greeted = still.matches;
  new IntersectionObserver(([entry]) => {
    visible = entry.isIntersecting;
    if (visible && !greeted) { greeted = true; play(); } else if (visible) wake();
  }, { threshold: 0.4 }).observe(canvas);
  host.dataset.ready = "true";
}
