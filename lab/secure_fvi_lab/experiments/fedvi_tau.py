"""What the weight of the clients' regulariser, tau, does: Figure 5 of Vedadi et al. (2023), on simulated writers.

Accuracy is the mean over the last third of the rounds, as the paper's is over its last 100. Beside it what the figure
does not show: the rate, how much of a client's unlabelled records its beta holds, and the bound for new clients.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from secure_fvi.compiled import threads
from secure_fvi.models.fedvi import personal_classifier
from secure_fvi.models.writers import write
from secure_fvi_lab.experiments import Request, Tell, as_png, spread
from secure_fvi_lab.experiments.fedvi_experiment import Dealt, Plan, Row, fedvi, fit, new_clients_bound, scores
from secure_fvi_lab.experiments.fedvi_writers import plan
from secure_fvi_lab.machine import machine

TAUS = (0.0, 1e-6, 1e-3, 1e-2, 0.1, 1.0, 10.0)
_SEEDS = (0, 1)
_QUICK_TAUS, _QUICK_SEEDS = (0.0, 1e-3, 10.0), (0,)
#: Where tau = 0 stands on a logarithmic axis.
_ZERO = 1e-8


def reproduce(request: Request) -> tuple[Row, bytes]:
    """The content of fedvi-tau.json, and the plot as PNG. Raises InputError where --data holds no `mnist`."""
    began, base = time.monotonic(), plan(request.quick)
    taus, seeds = (_QUICK_TAUS, _QUICK_SEEDS) if request.quick else (TAUS, _SEEDS)
    rows: list[Row] = []
    for seed in seeds:
        seeded = base._replace(network=replace(base.network, seed=seed))
        dealt = cache(partial(write, request.data, base.taking_part + base.new, seed=seed))
        for tau in taus:
            chosen = seeded._replace(fedvi=replace(base.fedvi, tau=tau))
            options = (chosen.network, chosen.fedvi, base.taking_part, base.new)
            made = partial(_row, chosen, dealt, seed, request.folder(options), request.tell)
            rows.append(request.once(f"seed {seed}: tau = {tau:g}, {base.fedvi.rounds} rounds", options, made))
    lines = [_line(tau, [row for row in rows if row["tau"] == tau]) for tau in taus]
    best = max(lines, key=lambda line: float(line["new"]["mean"]))
    content = {
        "name": "fedvi-tau",
        "paper": "Figure 5, no table: best at tau = 1e-9 (FEMNIST) and 1e-3 (CIFAR-100); with tau > 0 clients that "
        "took no part are less behind than with tau = 0",
        "ours": {**best["new"], "what": f"accuracy on clients that took no part at the best tau, {best['tau']:g}"},
        "lines": lines,
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "seconds_since_start": round(time.monotonic() - began, 1),
        "bytes": rows[0]["bytes"],
        "machine": machine(),
        "setting": base.setting + "; accuracy is the mean over the last third of the rounds",
        "rows": rows,
    }
    return content, plot(content)


def _row(chosen: Plan, dealt: Dealt, seed: int, keep: Path | None, tell: Tell) -> Row:
    network, config, clients = chosen.network, chosen.fedvi, dealt()
    with threads(1):
        fitted = fit(
            personal_classifier(network), config, chosen, clients, seed, keep, tell, lambda w: fedvi(network, w)
        )
        new = clients[chosen.taking_part :]
        bound = new_clients_bound(network, fitted.weights, new)
        loss = scores(fedvi(network, fitted.weights), new).log_loss
    last = [point for point in fitted.curve if 3 * point["round"] > 2 * config.rounds]
    return {
        "tau": config.tau, "seed": seed,
        **{who: statistics.mean(point[who] for point in last) for who in ("taking_part", "new")},
        "log_loss": loss, "rate": fitted.metrics["rate_per_client"], "bound": bound, "curve": fitted.curve,
        "seconds": fitted.costs["seconds"], "bytes": fitted.costs["bytes_up"] + fitted.costs["bytes_down"],
    }  # fmt: skip


def _line(tau: float, rows: Sequence[Row]) -> Row:
    """Means and sds over seeds. gap: by how much clients that took no part are behind, seed by seed."""
    return {
        "tau": tau,
        **{key: spread([row[key] for row in rows]) for key in ("taking_part", "new", "log_loss", "rate")},
        "gap": spread([row["taking_part"] - row["new"] for row in rows]),
        "bound": spread([row["bound"]["value"] for row in rows]),
        "test": spread([row["bound"]["test"] for row in rows]),
    }


def table(content: Row) -> str:
    """A line a tau."""
    lines = [
        f"{'tau':<8}{'taking part, %':>16}{'new, %':>14}{'behind, %':>14}{'log loss, new':>15}"
        f"{'rate, nats':>12}{'bound, nats':>13}{'on test':>9}"
    ]
    for line in content["lines"]:
        part, new, gap = (
            f"{100 * line[key]['mean']:.1f} ({100 * line[key]['sd']:.1f})" for key in ("taking_part", "new", "gap")
        )
        rest = "".join(
            f"{line[key]['mean']:>{width}.{digits}f}"
            for key, width, digits in (("log_loss", 15, 3), ("rate", 12, 1), ("bound", 13, 2), ("test", 9, 2))
        )
        lines.append(f"{line['tau']:<8g}{part:>16}{new:>14}{gap:>14}{rest}")
    lines += [
        "behind: new clients, by accuracy; rate: KL(q(beta) to r) a client; bound: PAC-Bayes, of the smoothed log loss "
        "of new clients",
        f"mean (sd) over {content['ours']['seeds']} seeds; {content['seconds']} s on {content['machine']}",
        content["setting"],
    ]
    return "\n".join(lines)


def plot(content: Row) -> bytes:
    """Accuracy by tau, as the figure has it, with tau = 0 at the left; rate and bound beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    lines, rates = content["lines"], right.twinx()
    at = [line["tau"] or _ZERO for line in lines]
    drawn = []
    for axis, key, scale, colour, name in (
        (left, "taking_part", 100, "#94a3b8", "took part"),
        (left, "new", 100, "#2563eb", "new"),
        (right, "bound", 1, "#2563eb", "bound"),
        (right, "test", 1, "#94a3b8", "on test images"),
        (rates, "rate", 1, "#d97706", "rate"),
    ):
        mean, sd = ([scale * line[key][part] for line in lines] for part in ("mean", "sd"))
        drawn.append(axis.errorbar(at, mean, sd, color=colour, marker="o", ms=4, lw=1.2, capsize=2, label=name))
    for axis in (left, right):
        axis.set(xscale="log", xlabel="tau (0 at the left)")
    left.set(ylabel="test accuracy, %")
    right.set(ylabel="smoothed log loss of new clients, nats", ylim=(0, None))
    rates.set(ylabel="rate, nats a client", yscale="log")
    left.legend(frameon=False, fontsize=8)
    right.legend(handles=drawn[2:], frameon=False, fontsize=8)
    return as_png(figure)
