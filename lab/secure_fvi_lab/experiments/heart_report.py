"""The lines of `secure-fvi reproduce heart` for a terminal, and its plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from secure_fvi_lab.figures import as_png

Row = dict[str, Any]
#: Methods whose test log-likelihood is drawn over the exchanges.
_CURVES = (
    "split NN", "points, rho 1", "points, rho 5", "points, rho 10", "sampled, rho 1", "sampled, rho 10",
    "sampled, rho 1, 5 steps", "linear + 8 units, marked, rho 0.2",
)  # fmt: skip
_COLOURS = ("#dc2626", "#d97706", "#f59e0b", "#fcd34d", "#2563eb", "#93c5fd", "#059669", "#7c3aed")


def table(content: Row) -> str:
    """Accuracy in %, log-likelihoods in nats, narrow enough for a terminal; the paper's beside ours."""
    lines = [f"{'method':<38}{'seeds':>6}{'accuracy (sd)':>16}{'log-lik':>9}{'wrong':>8}{'noisy':>8}{'paper':>16}"]
    for r in content["rows"]:
        accuracy = f"{r['accuracy']:.2f} ({r['sd_over_folds']:.2f})"
        paper = content["paper"].get(r["method"].replace("sampled", "points"))
        beside = f"{paper['accuracy']:.2f} / {paper['log_likelihood']:.2f}" if paper else ""
        lines.append(
            f"{r['method']:<38}{r['seeds']:>6}{accuracy:>16}{r['log_likelihood']:>9.3f}{r['wrong']:>8.2f}"
            f"{r['log_likelihood_noisy']:>8.3f}{beside:>16}"
        )
    lines.append("sd over folds; log-likelihoods in nats a patient; noisy: with the model's noise in z")
    return "\n".join(lines)


def png(rows: Sequence[Row], paper: Mapping[str, tuple[float, float, float, float]]) -> bytes:
    """Accuracy and log-likelihood by method beside the paper's, and the log-likelihood over the exchanges."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 10), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(1.2, 1))
    upper, lower = halves
    left, right = upper.subplots(1, 2, sharey=True)
    for y, row in enumerate(rows):
        known = paper.get(row["method"].replace("sampled", "points"))
        left.errorbar(row["accuracy"], y, xerr=row["sd_over_folds"], fmt="o", color="#2563eb", ms=5, lw=1)
        right.plot(row["log_likelihood"], y, "o", color="#2563eb", ms=5)
        if known:
            left.errorbar(known[0], y + 0.25, xerr=known[1], fmt="s", color="#9ca3af", ms=4, lw=1)
            right.plot(known[2], y + 0.25, "s", color="#9ca3af", ms=4)
    left.set(yticks=range(len(rows)), yticklabels=[r["method"] for r in rows], xlabel="accuracy, %, sd over folds")
    left.invert_yaxis()
    right.set(
        xlabel="test log-likelihood, nats a patient", xlim=(min(-1.0, *(p[2] for p in paper.values())) - 0.1, -0.25)
    )
    right.plot([], [], "o", color="#2563eb", label="ours")
    right.plot([], [], "s", color="#9ca3af", label="paper, table 3 (its model)")
    right.legend(frameon=False, fontsize=8, loc="lower left")
    _curves(lower.subplots(1, 1), rows)
    return as_png(figure, 120)


def _curves(axis: Any, rows: Sequence[Row]) -> None:
    by_name = {r["method"]: r for r in rows if "curve" in r}
    drawn = [by_name[name] for name in _CURVES if name in by_name]
    for row, colour in zip(drawn, _COLOURS, strict=False):
        curve = row["curve"]
        axis.plot(curve["exchanges"], curve["log_likelihood"], color=colour, lw=1.4, label=row["method"])
    axis.set(xscale="log", ylim=(-1.2, -0.3), xlabel="exchanges", ylabel="test log-likelihood, nats a patient")
    axis.legend(frameon=False, fontsize=8, ncols=2, loc="lower left")
