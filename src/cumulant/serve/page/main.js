// Controls, and the one function that brings the screen up to date.
const redraws = {};
const question = (side) => ({ model: side.model, text: side.text, swaps: side.swaps, changes: side.changes });
const plainOf = (side) => ({ model: side.model, text: side.text, swaps: [], changes: [] });

function draw() {
  for (const name of ["tokens", "map", "arcs", "plane", "next"]) redraws[name]();
  tellWeights();
  tellChanges();
  tellDifference();
}

async function refresh({ view = false, head = false, b = false } = {}) {
  remember();
  problem("");
  if (view) {
    const found = await latest("view", async (signal) => {
      const original = await showing("view", plainOf(state.a), signal);
      return [original, await showing("view", question(state.a), signal)];
    });
    if (!found) return;
    [views.original, views.a] = found;
    const about = data.models[state.a.model];
    state.token = Math.min(state.token, views.a.tokens.length - 1);
    state.layer = Math.min(state.layer, about.layers - 1);
    state.head = Math.min(state.head, about.heads - 1);
    remember();
  }
  if (view || b) {
    views.b = state.b ? await latest("b", (signal) => showing("view", question(state.b), signal)) || null : null;
  }
  if (view || head) {
    const asked = { ...question(state.a), layer: state.layer, head: state.head, token: state.token };
    const found = await latest("head", (signal) => showing("head", asked, signal));
    if (!found) return;
    headNow = found;
  }
  draw();
  if (state.depth && (view || !depthNow)) askDepth();
  document.body.dataset.ready = String(Number(document.body.dataset.ready || 0) + 1);
}

async function askDepth() {
  state.depth = true;
  remember();
  const found = await latest("depth", (signal) => showing("depth", question(state.a), signal));
  if (found) { depthNow = found; redraws.depth(); }
}
async function askTangent() {
  state.toward = byId("toward").value.trim();
  remember();
  if (!state.toward) return;
  problem("");
  const asked = { ...plainOf(state.a), token: state.token, toward: state.toward };
  const found = await latest("tangent", (signal) => showing("tangent", asked, signal));
  if (found) { tangentNow = found; redraws.tangent(); }
}

function options(select, list, value) {
  select.replaceChildren(...list.map(([v, text]) => html("option", { value: v }, text)));
  select.value = value;
}
// While somebody types, the text is looked at when the typing rests.
function typed(box, act) {
  let waiting = 0;
  box.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(act, 220); });
}

function fillControls() {
  const names = data.models.map((m, i) => [i, m.name]);
  options(byId("model-a"), names, state.a.model);
  options(byId("model-b"), names, state.b ? state.b.model : Math.min(1, names.length - 1));
  options(byId("statistic"), data.statistics.map((s) => [s.column, s.label]), state.statistic);
  for (const id of ["text-a", "text-b"]) byId(id).setAttribute("maxlength", data.most_characters);
  byId("text-a").value = state.a.text;
  byId("text-b").value = state.b ? state.b.text : state.a.text;
  byId("averaged").checked = state.averaged;
  byId("compare").checked = Boolean(state.b);
  byId("side-b").hidden = !state.b;
  byId("toward").value = state.toward;
}

function listen() {
  const on = (id, event, act) => byId(id).addEventListener(event, act);
  typed(byId("text-a"), () => { state.a = { ...state.a, text: byId("text-a").value, swaps: [] }; if (state.a.text.trim()) refresh({ view: true }); });
  typed(byId("text-b"), () => { if (state.b) { state.b.text = byId("text-b").value; if (state.b.text.trim()) refresh({ b: true }); } });
  on("model-a", "change", () => { state.a = { ...state.a, model: Number(byId("model-a").value), swaps: [], changes: [] }; depthNow = tangentNow = null; redraws.depth(); redraws.tangent(); refresh({ view: true }); });
  on("model-b", "change", () => { state.b.model = Number(byId("model-b").value); refresh({ b: true }); });
  on("statistic", "change", () => { state.statistic = byId("statistic").value; refresh(); });
  on("averaged", "change", () => { state.averaged = byId("averaged").checked; refresh(); });
  on("compare", "change", () => {
    state.b = byId("compare").checked ? { model: Number(byId("model-b").value), text: byId("text-b").value || state.a.text, swaps: [], changes: [] } : null;
    byId("side-b").hidden = !state.b;
    refresh({ b: true });
  });
  on("temperature", "input", () => { byId("temperature-shown").textContent = format(Number((2 ** Number(byId("temperature").value)).toFixed(3))); });
  on("temperature", "change", () => change("temperature", Number((2 ** Number(byId("temperature").value)).toFixed(3))));
  for (const button of document.querySelectorAll("[data-change]")) button.addEventListener("click", () => change(button.dataset.change));
  const swap = () => {
    const word = byId("swap").value.trim();
    if (!word) return;
    state.a.swaps = [...state.a.swaps.filter(([i]) => i !== state.token), [state.token, word]];
    refresh({ view: true });
  };
  on("swap-do", "click", swap);
  on("swap", "keydown", (e) => { if (e.key === "Enter") swap(); });
  on("depth-ask", "click", askDepth);
  on("tangent-ask", "click", askTangent);
  on("toward", "keydown", (e) => { if (e.key === "Enter") askTangent(); });
  on("save", "click", () => save().catch((error) => problem(error.message)));
  on("link", "click", async () => {
    try { await navigator.clipboard.writeText(location.href); byId("status").textContent = "Link copied."; }
    catch { byId("status").textContent = "Copy the address of this page: it holds the view."; }
  });
  window.addEventListener("hashchange", () => { state = fromAddress(); fillControls(); refresh({ view: true }); });
}

if (!data.live) {
  const inert = "#text textarea, #text select:not(#statistic), #compare, #save, #link, #change button, #change input, #depth button, #tangent button, #tangent input";
  for (const node of document.querySelectorAll(inert)) node.disabled = true;
  byId("status").textContent = "A saved view. Run cumulant serve to change it.";
}
fillControls();
for (const [name, act] of Object.entries({ tokens: drawTokens, map: drawMap, arcs: drawArcs, plane: drawPlane, next: drawNext, depth: drawDepth, tangent: drawTangent })) redraws[name] = plot(name, act);
listen();
refresh({ view: true }).then(() => { if (state.toward) askTangent(); });
