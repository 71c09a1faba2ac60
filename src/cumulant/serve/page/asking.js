// Questions to the server. Answers are kept by question, and go with a saved page.
const answers = new Map(Object.entries(data.answers || {}));
const MOST_KEPT = 60;
let asking = 0;
const secret = new URLSearchParams(location.search).get("token") || "";

function busy(change) {
  asking += change;
  byId("status").textContent = asking > 0 ? "Computing …" : "";
  document.body.toggleAttribute("data-busy", asking > 0);
}
function problem(text) {
  byId("problem").hidden = !text;
  byId("problem").textContent = text || "";
}

async function ask(question, given, signal) {
  const key = `${question} ${JSON.stringify(given)}`;
  if (answers.has(key)) return answers.get(key);
  if (!data.live) throw new Error("This is a saved page; what it did not show when it was saved needs cumulant serve.");
  busy(1);
  try {
    const answer = await fetch(`api/${question}`, {
      method: "POST", signal, body: JSON.stringify(given),
      headers: { "Content-Type": "application/json", "X-Cumulant-Token": secret },
    });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error || `The server answered ${answer.status}.`);
    answers.set(key, found);
    while (answers.size > MOST_KEPT) answers.delete(answers.keys().next().value);
    return found;
  } catch (error) {
    if (error instanceof TypeError) throw new Error("The server does not answer. Is cumulant serve still running?");
    throw error;
  } finally { busy(-1); }
}

// The latest call of a slot wins: what it replaces is cancelled, here and on the server.
const slots = new Map();
async function latest(slot, work) {
  if (slots.has(slot)) slots.get(slot).abort();
  const control = new AbortController();
  slots.set(slot, control);
  try {
    const found = await work(control.signal);
    return control.signal.aborted ? undefined : found;
  } catch (error) {
    if (!control.signal.aborted) problem(error.message);
    return undefined;
  } finally { if (slots.get(slot) === control) slots.delete(slot); }
}

// One file with everything on screen: this page, with the answers it has been given.
async function save() {
  const source = await (await fetch(location.href.split("#")[0])).text();
  const whole = new DOMParser().parseFromString(source, "text/html");
  const kept = {};
  for (const key of shownNow) if (answers.has(key)) kept[key] = answers.get(key);
  const carried = { ...data, live: false, state, answers: kept };
  const json = JSON.stringify(carried).replace(/[<>&\u2028\u2029]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
  whole.getElementById("data").textContent = json;
  const policy = whole.querySelector("meta[http-equiv]");
  policy.setAttribute("content", policy.getAttribute("content").replace("; connect-src 'self'", ""));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([`<!doctype html>\n${whole.documentElement.outerHTML}`], { type: "text/html" }));
  link.download = "cumulant-view.html";
  link.click();
  URL.revokeObjectURL(link.href);
}
const shownNow = new Set();
const showing = async (question, given, signal) => {
  const found = await ask(question, given, signal);
  shownNow.add(`${question} ${JSON.stringify(given)}`);
  return found;
};
