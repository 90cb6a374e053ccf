"use strict";
// Asks for the state of the run every two seconds and writes it down, as text only: nothing is parsed as HTML.
const token = document.body.dataset.token;
const by = (id) => document.getElementById(id);

function draw(points) {
  // The approach would flatten what follows: the lower end is the worst of the last three quarters.
  const kept = points.slice(Math.floor(points.length / 4));
  if (kept.length < 2) return;
  const xs = kept.map((p) => p[0]), ys = kept.map((p) => p[1]);
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const place = ([x, y]) => `${(100 * (x - x0)) / (x1 - x0 || 1)},${95 - (90 * (y - y0)) / (y1 - y0 || 1)}`;
  by("curve").setAttribute("points", kept.map(place).join(" "));
  by("range").textContent = `rounds ${x0} to ${x1}, from ${y0.toFixed(1)} to ${y1.toFixed(1)} nats; now ${ys[ys.length - 1].toFixed(1)}`;
}

function budgets(rows, none) {
  by("no-budgets").textContent = none;
  by("no-budgets").hidden = rows.length > 0;
  by("budgets").hidden = rows.length === 0;
  const lines = rows.map((row) => {
    const line = document.createElement("tr");
    const cells = row.error ? [row.silo, row.error, ""] : [row.silo, row.epsilon.toFixed(3), row.remaining.toFixed(3)];
    for (const text of cells) line.appendChild(document.createElement("td")).textContent = text;
    return line;
  });
  by("budgets").tBodies[0].replaceChildren(...lines);
}

async function refresh() {
  let again = 2000;
  try {
    const answer = await fetch(`/state?token=${token}`, { cache: "no-store" });
    const state = await answer.json();
    by("problem").textContent = state.error ?? "";
    if (!state.error) {
      for (const id of ["state", "convergence", "algorithm", "aggregation", "round", "phase", "cohort", "seconds"])
        by(id).textContent = state[id] ?? "not told";
      draw(state.objective);
      budgets(state.budgets, state.no_budgets);
      if (state.state === "finished") again = 30000;
    }
  } catch {
    by("problem").textContent = "secure-fvi watch no longer answers";
  }
  setTimeout(refresh, again);
}

refresh();
