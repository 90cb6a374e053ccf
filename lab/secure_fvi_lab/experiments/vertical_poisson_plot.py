"""Figure 4 of Hassan et al. (2024), and the coverage and width of every method's intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from secure_fvi.runs.marginals import density
from secure_fvi_lab.figures import as_png

#: Method, rho (0 for the true model) and draws of one mu and one beta.
Curve = tuple[str, float, Tensor, Tensor]

_STYLES = {
    "nuts, true model": ("#111827", "-"),
    "true model, mean field": ("#6b7280", "--"),
    "nuts, augmented": ("#2563eb", "-"),
    "amortised": ("#d97706", "-"),
    "z and mu integrated": ("#059669", "--"),
}


def png(
    curves: Sequence[Curve], truth: tuple[float, float], rhos: Sequence[float], summary: Sequence[dict[str, Any]]
) -> bytes:
    """Rows mu and beta, a column each rho; to the right the coverage on data from the augmented model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(rhos) + 4.6, 6.4), layout="constrained")
    blocks: Any = figure.subfigures(1, 2, width_ratios=(4.2 * len(rhos), 4.6))
    left, right = blocks
    axes: Any = left.subplots(2, len(rhos), sharex="row", squeeze=False)
    for column, rho in enumerate(rhos):
        for row, name in enumerate(("mu", "beta")):
            axis, top = axes[row, column], []
            for method, at, *draws in curves:
                if at not in (0.0, rho) or method not in _STYLES:
                    continue
                curve, (colour, dash) = density(draws[row].numpy()), _STYLES[method]
                axis.plot(curve["x"], curve["density"], color=colour, ls=dash, lw=1.3, label=method)
                top.append(max(curve["density"]))
            axis.axvline(truth[row], color="#60a5fa", lw=3, alpha=0.6, zorder=0)
            # Fits of the true model are so narrow that their tops would hide the others.
            axis.set(yticks=[], ylim=(0, min(max(top), 4 * sorted(top)[0]) * 1.05), xlabel=name)
        axes[0, column].set_title(f"data from the true model, rho = {rho:g}", fontsize=10)
    axes[0, 0].legend(frameon=False, fontsize=7)
    _coverage(right.subplots(), [s for s in summary if s["data"] == "augmented"])
    return as_png(figure, 110)


def _coverage(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    y = list(range(len(rows)))[::-1]
    for name, marker, colour in (("mu", "s", "#9333ea"), ("beta", "o", "#2563eb")):
        axis.plot([100 * r["coverage"][name] for r in rows], y, marker, color=colour, label=name)
    axis.axvspan(92, 98, color="#d1d5db", alpha=0.6, zorder=0)
    axis.set_yticks(y, [r["method"] for r in rows], fontsize=8)
    axis.set(xlim=(-3, 103), xlabel="coverage of 95% intervals, %", title="data from the augmented model, rho = 1")
    axis.title.set_fontsize(10)
    axis.legend(frameon=False, fontsize=8, loc="lower left")
