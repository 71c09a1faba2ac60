// The text as tokens, colored by a statistic of one head or of all.
const views = { original: null, a: null, b: null }; // answers: as it is, as changed, the other side
const statisticNow = () => data.statistics.find((s) => s.column === state.statistic);
const CLASS_OF = (value) => typeof value === "number" ? CLASSES[Math.max(0, Math.min(3, Math.round(value)))] : null;

function tokenValues(view, statistic) {
  const table = view.statistics[statistic.column];
  if (!state.averaged) {
    const layer = table[Math.min(state.layer, table.length - 1)];
    return layer[Math.min(state.head, layer.length - 1)];
  }
  return view.tokens.map((_, i) => {
    let total = 0, count = 0;
    for (const layer of table) for (const head of layer) if (typeof head[i] === "number") { total += head[i]; count += 1; }
    return count ? total / count : null;
  });
}
const shownToken = (text) => text.replace(/\n/g, "⏎").replace(/^ /, "·") || "∅";
const worth = (statistic, value) => statistic.kind === "class" ? CLASS_OF(value) ?? "–" : format(value, statistic.kind === "share" ? "share" : "number");

function tokenStrip(view, title, side) {
  const statistic = statisticNow(), values = tokenValues(view, statistic);
  const listed = statistic.kind === "class" ? values.map(CLASS_OF) : values;
  const scale = scaleOf(listed, statistic.kind), box = html("div", { class: "tokens", role: "group", "aria-label": `${title}: tokens; arrow keys move` });
  const swapped = new Set((side.swaps || []).map(([i]) => i));
  const marks = view.tokens.map((text, i) => {
    const color = colorOf(scale, listed[i]);
    const node = html("span", { class: `token mark ${color.name}`, role: "button", "aria-pressed": String(i === state.token),
      css: { "--t": color.t }, "data-swapped": swapped.has(i) }, shownToken(text));
    box.append(node);
    return { node, i, text };
  });
  explore(box, marks, { start: Math.min(state.token, marks.length - 1), move: alongLine,
    describe: ({ i, text }) => [`Token ${i}: ${shownToken(text)}`, data.statistics.map((s) => [s.label, worth(s, tokenValues(view, s)[i])])],
    choose: ({ i }) => { state.token = i; refresh({ head: true }); },
  });
  return html("div", { class: "strip" }, html("h3", {}, title), legend(scale, `${statistic.label}, ${state.averaged ? "mean over heads" : `layer ${state.layer}, head ${state.head}`}`), box);
}

function drawTokens(box) {
  if (!views.a) { box.replaceChildren(); return; }
  const held = box.contains(document.activeElement);
  const strips = [tokenStrip(views.a, state.a.changes.length || state.a.swaps.length ? "Changed" : data.models[state.a.model].name, state.a)];
  if (views.b && state.b) strips.push(tokenStrip(views.b, `${data.models[state.b.model].name}, compared`, state.b));
  box.replaceChildren(...strips);
  if (held) { const own = box.querySelector('.token[tabindex="0"]'); if (own) own.focus({ preventScroll: true }); }
}
