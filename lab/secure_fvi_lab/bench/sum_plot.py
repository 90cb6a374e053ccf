"""The plot of `bench secure-sum`: time a silo against length, and against the number of silos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from secure_fvi_lab.figures import as_png

_INK, _MUTED, _GRID = "#1f2937", "#6b7280", "#e5e7eb"
_OURS, _OURS_64, _FLOWER, _BFV, _PLAIN = "#2563eb", "#7aa5f7", "#d97706", "#0f766e", "#9ca3af"
_SERVER = "#9333ea"
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _INK,
    "axes.titlesize": 10,
    "axes.titlecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 4,
}
_OF_LENGTH, _OF_SILOS = 11, 10**4

Row = dict[str, Any]


def png(rows: Sequence[Row]) -> bytes:
    """Both panels, as PNG."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 5.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _against_length(left, rows)
        _against_silos(right, rows)
        for axes in (left, right):
            axes.set(xscale="log", yscale="log")
            axes.grid(color=_GRID, lw=0.6)
            axes.set_axisbelow(True)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
        return as_png(figure)


def _against_length(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set(title="One silo, one sum: 10 neighbours (BFV: 3 silos)", xlabel="values", ylabel="ms")
    long = [row for row in rows if not row["dropout"] and row["length"] >= 1000]
    masked = [row for row in long if row["kind"] == "masked" and row["silos"] == _OF_LENGTH]
    narrow = [row for row in masked if row["bits"] == 32]
    wide = [row for row in masked if row["bits"] == 64]
    bfv = [row for row in long if row["kind"] == "homomorphic" and row["silos"] == 3]
    plain = [row for row in long if row["kind"] == "plain" and row["silos"] == _OF_LENGTH]
    _line(axes, bfv, "length", "silo_ms", "BFV and masks", color=_BFV, marker="o")
    _line(axes, bfv, "length", "tenseal_silo_ms", "TenSEAL alone", color=_BFV, ls=":")
    _line(axes, narrow, "length", "flower_ms", "Flower SecAgg+, one client", color=_FLOWER, marker="s")
    _line(axes, wide, "length", "silo_ms", "masked, w = 64", color=_OURS_64, marker="o")
    _line(axes, narrow, "length", "silo_ms", "masked, w = 32", color=_OURS, marker="o")
    _line(axes, narrow, "length", "floor_ms", "floor: AES-CTR, additions (w = 32)", color=_INK, ls=":")
    _line(axes, plain, "length", "silo_ms", "plain", color=_PLAIN, marker="o")


def _against_silos(axes: Axes, rows: Sequence[Row]) -> None:
    axes.set(title="Masked sums of 1e4 values, w = 32", xlabel="silos", ylabel="ms")
    swept = [row for row in rows if row["kind"] == "masked" and row["bits"] == 32 and row["length"] == _OF_SILOS]
    swept = [{**row, "own_ms": row["silo_ms"] - row["silo_checks_ms"]} for row in swept if row["silos"] != _OF_LENGTH]
    whole = [row for row in swept if not row["dropout"]]
    lost = [row for row in swept if row["dropout"]]
    _line(axes, lost, "silos", "server_ms", "server, 10% of the silos lost", color=_SERVER, marker="s")
    _line(axes, whole, "silos", "server_ms", "server, none lost", color=_SERVER, marker="s", ls="--", mfc="white")
    _line(axes, whole, "silos", "silo_ms", "one silo", color=_OURS, marker="o")
    _line(axes, whole, "silos", "own_ms", "one silo, signature checks apart", color=_OURS_64, marker="o")
    _line(axes, whole, "silos", "floor_ms", "floor", color=_INK, ls=":")


def _line(axes: Axes, rows: Sequence[Row], x: str, y: str, label: str, **style: Any) -> None:
    points = sorted({row[x]: row[y] for row in rows if row[y]}.items())
    if points:
        axes.plot([p[0] for p in points], [p[1] for p in points], label=label, **style)
