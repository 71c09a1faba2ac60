// Figures that stand in a small place can be seen as large as they were drawn.
for (const button of document.querySelectorAll(".enlarge")) {
  button.addEventListener("click", () => {
    const large = button.closest("figure").classList.toggle("large");
    button.setAttribute("aria-pressed", String(large));
    button.textContent = large ? "Make smaller" : "Enlarge";
  });
}

// The ledger: filter by verdict and by evidence, open by link, all open in print.
if (byId("ledger")) {
  const entries = [...document.querySelectorAll(".entry")], chips = [...document.querySelectorAll(".chips li")];
  const everything = byId("ledger-open"), chosen = { kind: "", evidence: "" };
  const folded = (entry) => entry.querySelector("details");
  const filters = (name) => [...document.querySelectorAll(`#ledger-controls [data-${name}]`)];

  function show(choice) {
    Object.assign(chosen, choice);
    for (const name in chosen) {
      for (const button of filters(name)) button.setAttribute("aria-pressed", String(button.dataset[name] === chosen[name]));
    }
    const left = (x) => Object.keys(chosen).some((name) => chosen[name] !== "" && x.dataset[name] !== chosen[name]);
    for (const x of [...entries, ...chips]) x.hidden = left(x);
    const shown = entries.filter((e) => !e.hidden).length;
    byId("ledger-said").textContent = `${shown} of ${entries.length} claims shown`;
  }
  for (const name in chosen) {
    for (const button of filters(name)) button.addEventListener("click", () => show({ [name]: button.dataset[name] }));
  }

  everything.addEventListener("click", () => {
    const open = everything.getAttribute("aria-pressed") !== "true";
    everything.setAttribute("aria-pressed", String(open));
    everything.textContent = open ? "Close all" : "Open all";
    for (const entry of entries) folded(entry).open = open;
  });

  // #T14 opens T14, whatever the filter.
  function follow() {
    const entry = entries.find((e) => [e.id, encodeURIComponent(e.id)].includes(location.hash.slice(1)));
    if (!entry) return;
    if (entry.hidden) show({ kind: "", evidence: "" });
    folded(entry).open = true;
    entry.scrollIntoView({ block: "start" });
  }
  window.addEventListener("hashchange", follow);
  // The same link a second time changes no address.
  document.addEventListener("click", (event) => {
    const link = event.target.closest && event.target.closest('a[href^="#"]');
    if (link && link.getAttribute("href") === location.hash) follow();
  });
  follow();

  let closed = [];
  window.addEventListener("beforeprint", () => {
    closed = entries.filter((e) => !folded(e).open);
    for (const entry of closed) folded(entry).open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const entry of closed) folded(entry).open = false;
    closed = [];
  });
}
