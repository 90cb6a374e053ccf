"use strict";
// Asks for the state of the run every two seconds and writes it down, as text only: nothing is parsed as HTML.
const token = document.body.dataset.token;
const by = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const LEFT = 64, RIGHT = 24, TOP = 10, BOTTOM = 40; // of a chart: pixels around what is drawn

function part(kind, attributes, text = "") {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

// Round numbers from low to high, about `count` of them.
function ticks(low, high, count, whole) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 5, 10].find((m) => m * power >= rough) * power, whole ? 1 : 0);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push((k * step).toFixed(digits));
  return found;
}

// A curve with its axes; `limit`: a line across, where it is in sight.
function draw(id, points, unit, limit) {
  const svg = by(id), xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const width = svg.clientWidth || 600, height = 220;
  let [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  if (limit !== undefined) [y0, y1] = [Math.min(y0, limit), Math.max(y1, limit)];
  const room = 0.06 * (y1 - y0) || 0.01 * Math.abs(y1) || 1;
  [x1, y0, y1] = [x1 > x0 ? x1 : x0 + 1, y0 - room, y1 + room];
  const x = (v) => LEFT + ((width - LEFT - RIGHT) * (v - x0)) / (x1 - x0);
  const y = (v) => height - BOTTOM - ((height - TOP - BOTTOM) * (v - y0)) / (y1 - y0);
  const parts = [];
  for (const tick of ticks(y0, y1, 4, false)) {
    parts.push(part("line", { x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
    parts.push(part("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end", class: "y" }, tick));
  }
  for (const tick of ticks(x0, x1, width / 110, true))
    parts.push(part("text", { x: x(tick), y: height - BOTTOM + 18, "text-anchor": "middle", class: "x" }, tick));
  parts.push(part("text", { x: width - RIGHT, y: height - 6, "text-anchor": "end" }, "round"));
  parts.push(part("text", { x: 4, y: height - 6 }, unit));
  if (limit !== undefined)
    parts.push(part("line", { x1: LEFT, x2: width - RIGHT, y1: y(limit), y2: y(limit), class: "limit" }));
  parts.push(part("polyline", { points: points.map(([a, b]) => `${x(a)},${y(b)}`).join(" ") }));
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...parts);
}

function chart(id, points, unit, about, limit) {
  const shown = points.length >= 2;
  by(`${id}-about`).textContent = shown ? about(points) : points.length ? "one value so far" : "none was told";
  by(id).style.display = shown ? "block" : "none";
  if (shown) draw(id, points, unit, limit);
}

function charts(state) {
  // The approach would flatten what follows: the first quarter is left out.
  const kept = state.objective.slice(Math.floor(state.objective.length / 4));
  const now = (points) => points[points.length - 1][1];
  chart("objective", kept, "nats", (points) => `now ${now(points).toFixed(1)} nats; the first quarter is left out`);
  const about = (points) => `now ${now(points).toFixed(3)}; at rest below ${state.r_hat_below}`;
  chart("r_hats", state.r_hats, "R-hat", about, state.r_hat_below);
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

function write(state) {
  document.title = `${state.name}: ${state.standing}`;
  for (const id of ["name", "state", "standing", "algorithm", "aggregation", "phase", "cohort"])
    by(id).textContent = state[id] ?? "not told";
  by("job").textContent = `job ${state.job}`;
  by("standing").dataset.standing = state.standing;
  by("reason").textContent = state.reason && `: ${state.reason}`;
  by("round").textContent = state.rounds ? `${state.round} of at most ${state.rounds}` : `${state.round}`;
  by("r_hat").textContent = state.r_hat === null ? "not told" : state.r_hat.toFixed(3);
  by("seconds").textContent = `${state.seconds.toFixed(0)} s`;
  charts(state);
  budgets(state.budgets, state.no_budgets);
}

let last = null;

async function refresh() {
  let again = 2000;
  try {
    const answer = await fetch(`/state?token=${token}`, { cache: "no-store" });
    const state = await answer.json();
    by("problem").textContent = state.error ?? "";
    if (!state.error) {
      write((last = state));
      if (state.state === "finished") again = 30000;
    }
  } catch {
    by("problem").textContent = "secure-fvi watch no longer answers";
  }
  setTimeout(refresh, again);
}

addEventListener("resize", () => last && charts(last));
refresh();
