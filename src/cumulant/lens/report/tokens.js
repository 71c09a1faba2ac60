// The text, token by token: colored by a statistic, and on pointing, by what a token attends to.
const SHOWN = { "\n": "↵", "\t": "⇥", " ": "␣", "": "∅" };

// Word pieces as people read them: markers of word starts become gaps, invisible signs visible.
function pieces(tokens) {
  const marked = tokens.some((t) => /^[Ġ▁]/.test(t)), hashed = tokens.some((t) => t.startsWith("##"));
  return tokens.map((raw, i) => {
    let text = raw, gap = i > 0 && !marked;
    if (marked && /^[Ġ▁]/.test(raw) && raw.length > 1) { text = raw.slice(1); gap = i > 0; }
    if (hashed && raw.startsWith("##") && raw.length > 2) { text = raw.slice(2); gap = false; }
    text = text.replace(/^ (?=.)/, "").replace(/Ċ/g, "↵").replace(/^[Ġ▁]$/, "␣");
    text = text.replace(/[\n\t]/g, (c) => SHOWN[c]).replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g,
      (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
    return { raw, text: text.trim() === "" ? SHOWN[text] || "␣" : text, gap };
  });
}

if (byId("token-text")) {
  const box = byId("token-text-box"), others = byId("token-keys-box"), detail = byId("token-detail");
  const hint = detail.firstElementChild;
  const state = { text: 0 };
  // A sink logit is a key without a token: it stands before the text.
  const sink = html("span", { class: "token none sink", "aria-hidden": "true" }, "sink logit");
  let nodes = [], keyNodes = [], queries = [], keys = [], call = null, row = 0;

  const labels = (side, size) => side === "numbers"
    ? Array.from({ length: size }, (_, i) => ({ raw: `#${i}`, text: `#${i}`, gap: i > 0 }))
    : pieces(data.texts[state.text][side].slice(0, side === "tokens" ? undefined : size));
  const name = (index) => index < 0 ? "sink logit" : keys[index] ? keys[index].text : `#${index}`;
  const layerNames = () => Object.keys(data.texts[state.text].calls).map(Number).sort((a, b) => a - b);

  const calm = () => {
    for (const holder of [box, others]) holder.classList.remove("focused");
    for (const node of [sink, ...nodes, ...keyNodes]) node.classList.remove("key", "current");
  };
  function attend({ node, index }, focused) {
    calm();
    for (const holder of [box, others]) holder.classList.add("focused");
    node.classList.add("current");
    const pairs = [], flat = call.top[row][index] || [];
    for (let i = 0; i < flat.length; i += 2) pairs.push([flat[i], flat[i + 1]]);
    const targets = keyNodes.length ? keyNodes : nodes;
    for (const [key, weight] of pairs) {
      const target = key < 0 ? sink : targets[key];
      if (!target) continue;
      target.classList.add("key");
      target.style.setProperty("--w", (0.18 + 0.82 * weight).toFixed(3));
    }
    const rows = data.statistics.tokens.filter((s) => call.statistics[s.column])
      .map((s) => [s.label, format(call.statistics[s.column][row][index], s.kind)]);
    if (call.statistics.visible) rows.push(["Visible keys", format(call.statistics.visible[row][index])]);
    detail.replaceChildren(
      html("h3", {}, `${queries[index].text} `, html("small", {}, `token ${index}`)),
      html("table", { class: "detail" }, ...rows.map(([n, v]) => html("tr", {}, html("td", {}, n), html("td", {}, v)))),
      pairs.length ? html("ul", { class: "weights", "aria-label": "Largest weights" }, ...pairs.map(([key, weight]) => html("li", {},
        html("span", {}, `${name(key)} ${key < 0 ? "" : `(${key})`}`), html("span", {}, format(weight, "share")),
        html("div", { class: "amount", css: { width: `${(100 * weight).toFixed(1)}%` } })))) : hint);
    if (focused) uncover(node); // pointing must not scroll
  }

  // On a narrow screen the panel stands over the text: scroll the token out from under it.
  function uncover(node) {
    if (getComputedStyle(detail).position !== "sticky" || getComputedStyle(detail).bottom === "auto") return;
    const hidden = node.getBoundingClientRect().bottom + 12 - (window.innerHeight - detail.offsetHeight);
    if (hidden > 0) window.scrollBy(0, hidden);
  }

  // The token above or below: nearest in x on the neighboring line.
  function vertical(i, down) {
    const here = nodes[i].getBoundingClientRect();
    let best = null, bestTop = null, bestGap = Infinity;
    for (let j = i; j >= 0 && j < nodes.length; j += down ? 1 : -1) {
      const there = nodes[j].getBoundingClientRect();
      if (down ? there.top < here.bottom - 2 : there.bottom > here.top + 2) continue;
      if (bestTop !== null && Math.abs(there.top - bestTop) > 4) break;
      bestTop = there.top;
      const apart = Math.abs(there.left - here.left);
      if (apart < bestGap) [best, bestGap] = [j, apart];
    }
    return best;
  }

  function draw() {
    const text = data.texts[state.text];
    call = text.calls[chosen.layer];
    row = call ? call.heads.indexOf(chosen.head) : -1;
    if (row < 0) return;
    queries = labels(call.queries, call.size);
    keys = labels(call.keys, Infinity);
    const statistic = data.statistics.tokens.find((s) => s.column === byId("token-statistic").value);
    const values = call.statistics[statistic.column] ? call.statistics[statistic.column][row] : [];
    const scale = scaleOf(values, statistic.kind);
    const spans = (list, colored) => list.map((token, i) => {
      const color = colored ? colorOf(scale, values[i]) : { name: "none", t: 0 };
      return html("span", { class: `token ${color.name} ${token.gap ? "gap" : ""}`,
        title: colored ? null : token.raw, role: colored ? "option" : null, css: { "--t": color.t } }, token.text);
    });
    nodes = spans(queries, true);
    keyNodes = call.keys === call.queries ? [] : spans(keys, false);
    const sinks = call.top.some((of) => of.some((flat) => flat.some((x, i) => i % 2 === 0 && x < 0)));
    box.replaceChildren(...(sinks ? [sink] : []), ...nodes);
    others.hidden = !keyNodes.length;
    others.replaceChildren(...keyNodes);
    byId("token-legend").replaceChildren(legend(scale, `${layerTitle(chosen.layer)}, head ${chosen.head}: ${statistic.label}`));
    detail.replaceChildren(hint);
    calm();
    const marks = nodes.map((node, index) => ({ node, index }));
    marks.forEach(({ node, index }) => node.setAttribute("aria-label",
      `${queries[index].text}, token ${index}, ${statistic.label} ${format(values[index], statistic.kind)}`));
    explore(box, marks, { enter: attend, leave: calm,
      move: (i, key) => key === "ArrowDown" ? vertical(i, true) : key === "ArrowUp" ? vertical(i, false) : alongLine(i, key) });
  }

  function menus() {
    const calls = data.texts[state.text].calls, layers = layerNames();
    if (!layers.includes(chosen.layer)) chosen.layer = layers[0];
    if (!calls[chosen.layer].heads.includes(chosen.head)) chosen.head = calls[chosen.layer].heads[0];
    options(byId("token-layer"), layers.map((l) => [l, layerName(l)]), chosen.layer);
    options(byId("token-head"), calls[chosen.layer].heads.map((h) => [h, String(h)]), chosen.head);
  }

  options(byId("token-text"), data.texts.map((t, i) => [i, t.name]), 0);
  byId("token-text").parentElement.hidden = data.texts.length < 2;
  options(byId("token-statistic"), data.statistics.tokens.map((s) => [s.column, s.label]));
  const all = () => { menus(); draw(); };
  byId("token-text").addEventListener("change", (e) => { state.text = Number(e.target.value); all(); });
  byId("token-layer").addEventListener("change", (e) => choose(Number(e.target.value), chosen.head, "tokens"));
  byId("token-head").addEventListener("change", (e) => choose(chosen.layer, Number(e.target.value), "tokens"));
  byId("token-statistic").addEventListener("change", draw);
  whenChosen.push(all);
  all();
}
