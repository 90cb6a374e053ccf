"""Figures 2 and 3 of Hassan et al. (2024): bounds over the rounds, one coefficient's marginal by model and method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from secure_fvi.runs.marginals import density
from secure_fvi_lab.figures import as_png

#: Model, method, silos, rho and the curve or the draws.
Entry = tuple[str, str, int, float, Tensor]

_COLOURS = {"pooled": "#111827", "augmented": "#2563eb", "power": "#d97706"}
_DASHES = {"nuts": "-", "mean field": "--", "amortised": "-", "integrated": "-.", "soul": ":"}
_RHO_COLOURS = ("#1d4ed8", "#059669", "#dc2626")


def png(
    bounds: Sequence[Entry], shown: Sequence[Entry], truth: float, silos: Sequence[int], rhos: Sequence[float]
) -> bytes:
    """For each number of silos a row of bounds, one of NUTS and one of the approximations."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.6 * len(silos)), layout="constrained")
    blocks: Any = figure.subfigures(len(silos), 1, squeeze=False)[:, 0]
    for block, count in zip(blocks, silos, strict=True):
        block.suptitle(f"{count} silos")
        upper, lower = block.subfigures(2, 1, height_ratios=(1, 2))
        _bounds(upper, [b for b in bounds if b[2] == count], rhos)
        _densities(lower, [s for s in shown if s[2] in (0, count)], truth, rhos)
    return as_png(figure, 110)


def _bounds(figure: Any, entries: Sequence[Entry], rhos: Sequence[float]) -> None:
    for axis, model in zip(figure.subplots(1, 2), ("augmented", "power"), strict=True):
        final = []
        for name, method, _, rho, curve in entries:
            if name not in ("pooled", model) or len(curve) == 0:
                continue
            colour = _COLOURS["pooled"] if name == "pooled" else _RHO_COLOURS[rhos.index(rho)]
            label = "pooled" if name == "pooled" else f"{method}, rho {rho:g}"
            x = np.linspace(0, 100, len(curve))
            axis.plot(x, curve.numpy(), color=colour, ls=_DASHES[method], lw=1.1, label=label)
            final.append(float(curve[len(curve) // 2 :].min()))
        top = max(float(e[4].max()) for e in entries if len(e[4]))
        axis.set(ylim=(min(final) - 40, top + 10), xlabel="% of rounds", title=f"{model}: bound, nats")
        axis.legend(frameon=False, fontsize=7, ncols=2, loc="lower right")


def _densities(figure: Any, entries: Sequence[Entry], truth: float, rhos: Sequence[float]) -> None:
    axes = figure.subplots(2, len(rhos), sharex=True, squeeze=False)
    for column, rho in enumerate(rhos):
        for name, method, _, at, draws in entries:
            if at not in (0.0, rho):
                continue
            axis = axes[0 if method == "nuts" else 1, column]
            curve = density(draws.numpy())
            label = f"{name}, {method}"
            axis.plot(curve["x"], curve["density"], color=_COLOURS[name], ls=_DASHES[method], lw=1.2, label=label)
        for axis in axes[:, column]:
            axis.axvline(truth, color="#60a5fa", lw=3, alpha=0.6, zorder=0)
            axis.set(yticks=[], ylim=(0, 8))
        axes[0, column].set_title(f"rho = {rho:g}")
    axes[0, 0].set_ylabel("NUTS")
    axes[1, 0].set_ylabel("VI and SOUL")
    for axis in axes[:, 0]:
        axis.legend(frameon=False, fontsize=7, loc="upper right")
