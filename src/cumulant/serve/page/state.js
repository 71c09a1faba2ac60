// What is on screen, kept in the address after "#", so that a link reproduces it.
const START = {
  a: { model: 0, text: "The cat sat on the mat because it was tired.", swaps: [], changes: [] },
  b: null, statistic: "entropy", averaged: false, layer: 0, head: 0, token: 2, toward: "", depth: false,
};
const limit = (value, low, high) => Number.isInteger(value) ? Math.max(low, Math.min(high, value)) : low;

// A link comes from outside: every field is checked, and what does not fit falls back to the start.
function sound(given) {
  const side = (one, otherwise) => {
    if (!one || typeof one !== "object" || typeof one.text !== "string") return otherwise;
    return {
      model: limit(one.model, 0, data.models.length - 1), text: one.text.slice(0, data.most_characters),
      swaps: (Array.isArray(one.swaps) ? one.swaps : []).filter((s) => Array.isArray(s) && Number.isInteger(s[0]) && typeof s[1] === "string"),
      changes: (Array.isArray(one.changes) ? one.changes : []).filter((c) => c && typeof c.kind === "string" && Number.isInteger(c.layer)),
    };
  };
  const known = given && typeof given === "object" ? given : {};
  const a = side(known.a, START.a), about = data.models[a.model];
  return {
    a, b: side(known.b, null),
    statistic: data.statistics.some((s) => s.column === known.statistic) ? known.statistic : START.statistic,
    averaged: known.averaged === true, depth: known.depth === true,
    layer: limit(known.layer, 0, about.layers - 1), head: limit(known.head, 0, about.heads - 1),
    token: limit(known.token ?? START.token, 0, 4095), toward: typeof known.toward === "string" ? known.toward.slice(0, 100) : "",
  };
}
function fromAddress() {
  try { return sound(JSON.parse(decodeURIComponent(location.hash.slice(1)))); } catch { return sound(null); }
}
let state = sound(data.state || null);
if (data.live) state = fromAddress();

function remember() {
  if (data.live) history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(state))}`);
}
