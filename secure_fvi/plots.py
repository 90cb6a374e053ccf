"""The plots of reports, as SVG text without fonts or links."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_INK, _MUTED, _GRID = "#1f2937", "#6b7280", "#e5e7eb"
_RUN, _REFERENCE, _SECOND, _LIMIT = "#2563eb", "#9ca3af", "#d97706", "#b45309"
_STYLE = {
    "svg.fonttype": "path",
    "svg.hashsalt": "secure-fvi",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.titlesize": 10,
    "axes.titlecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "legend.frameon": False,
}
_MOST_PANELS = 12

Densities = Mapping[str, Mapping[str, Sequence[float]]]


def marginal_panels(run: Densities, reference: Densities | None = None, reference_name: str = "") -> Figure:
    """Marginal posteriors side by side; the reference, where there is one, as a grey area behind the run."""
    names = list(run)[:_MOST_PANELS]
    columns = min(len(names), 5 if len(names) == 5 else 4) or 1
    rows = -(-len(names) // columns)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(2.35 * columns, 2.0 * rows + 0.35), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis, name in zip(axes.flat, names, strict=False):
            if reference is not None and name in reference:
                x, y = reference[name]["x"], reference[name]["density"]
                axis.fill_between(x, y, color=_REFERENCE, alpha=0.45, lw=0, label=reference_name)
            axis.plot(run[name]["x"], run[name]["density"], color=_RUN, lw=1.8, label="federated run")
            axis.set_title(name, parse_math=False)  # a name is what somebody wrote
            axis.set(yticks=[], ylim=(0, None))
            axis.spines["left"].set_visible(False)
            axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(4))
        for axis in axes.flat[len(names) :]:
            axis.set_visible(False)
        if reference is not None:
            handles, texts = axes[0, 0].get_legend_handles_labels()
            figure.legend(handles, texts, loc="outside lower center", ncols=2)
    return figure


def objective(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """The bound over the rounds with the learning rate below; the scale leaves out the first descent."""
    rounds = [row["round"] for row in metrics]
    values = [row["objective"] for row in metrics]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 3.0), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        upper.plot(rounds, values, color=_RUN, lw=1.1, marker=_marker(rounds), ms=3)
        upper.set(ylabel="bound (nats)")
        _tight(upper, values)
        lower.step(
            rounds,
            [row["learning_rate"] for row in metrics],
            color=_SECOND,
            lw=1.3,
            where="post",
            marker=_marker(rounds),
            ms=3,
        )
        lower.set(ylabel="rate", xlabel="round", yscale="log")
        for axis in (upper, lower):
            axis.grid(axis="y", color=_GRID, lw=0.6)
            axis.margins(x=0.01)
    return figure


def traffic(metrics: Sequence[Mapping[str, Any]], silos: int) -> Figure:
    """Megabytes that an average silo sent and received, over the rounds."""
    rounds = [row["round"] for row in metrics]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(3.7, 3.0), layout="constrained")
        axis = figure.subplots()
        for key, name, color in (("bytes_up", "sent", _RUN), ("bytes_down", "received", _SECOND)):
            axis.plot(
                rounds,
                [row[key] / silos / 1e6 for row in metrics],
                color=color,
                lw=1.8,
                label=name,
                marker=_marker(rounds),
                ms=3,
            )
        axis.set(ylabel="MB a silo, in total", xlabel="round", ylim=(0, None))
        axis.grid(axis="y", color=_GRID, lw=0.6)
        axis.margins(x=0.01)
        axis.legend(loc="upper left")
    return figure


def spent(after_each: Sequence[float], budget: float, delta: float) -> Figure:
    """Epsilon spent after each job, below the budget as it was."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.0, 3.0), layout="constrained")
        axis = figure.subplots()
        axis.step(range(len(after_each) + 1), [0.0, *after_each], where="post", color=_RUN, lw=1.8)
        axis.scatter(range(1, len(after_each) + 1), after_each, color=_RUN, s=18, zorder=3)
        axis.axhline(budget, color=_LIMIT, lw=1.2, ls="--")
        axis.annotate("budget", (0, budget), color=_LIMIT, xytext=(2, 3), textcoords="offset points")
        axis.set(xlabel="jobs charged", ylabel=f"epsilon at delta {delta:.2g}")
        axis.set_ylim(0, 1.12 * max(budget, *after_each))
        axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True))
    return figure


def image(figure: Figure) -> Markup:
    """The figure as a data address, which a page holds within itself."""
    return Markup("data:image/svg+xml;base64,") + base64.b64encode(svg(figure).encode()).decode()


def svg(figure: Figure) -> str:
    """The figure as one `<svg>` element, without the metadata and the document type that name web addresses."""
    buffer = io.StringIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    start, end = text.find("<metadata>"), text.find("</metadata>")
    return text if start < 0 else text[:start] + text[end + len("</metadata>") :]


def _marker(rounds: Sequence[int]) -> str | None:
    """Of few rounds each is seen, one alone too."""
    return "o" if len(rounds) <= 20 else None


def _tight(axis: Axes, values: Sequence[float]) -> None:
    """Limits from the later half of the run, so that the first descent does not flatten the rest."""
    later = sorted(values[len(values) // 3 :])
    if len(later) >= 3:
        low, high = later[0], later[-1]
        room = max(0.6 * (high - low), 1e-9 + 1e-6 * abs(high))
        axis.set_ylim(low - 2 * room, high + room)
