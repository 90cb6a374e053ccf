"""The numbers of pvi-uci over seeds, its lines for a terminal, and its plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from secure_fvi_lab.figures import as_png

#: Nats a record within which a method counts as having reached global VI.
WITHIN = 0.003
_COLOURS = {
    "PVI, sequential": "#2563eb",
    "PVI, synchronous": "#059669",
    "PVI, synchronous, damping 0.2": "#84cc16",
    "BCM, same": "#d97706",
    "BCM, split": "#b45309",
    "VCL": "#7c3aed",
    "streaming VB": "#dc2626",
}
#: The plot's lowest difference; lines below it are cut.
_LOWEST, _HIGHEST = -0.1, 0.03
_WIDTH = 10  # communications with each of ten silos are one pass

Row = dict[str, Any]


def summaries(rows: Sequence[Row]) -> list[Row]:
    """By data set, split and method: mean and sd over seeds of the difference from global VI after one pass and at the
    end, the pass after which the mean stays within `WITHIN`, and what it cost a silo."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if "difference" in row:
            groups.setdefault((row["data"], row["split"], row["method"]), []).append(row)
    return [_summary(*key, group) for key, group in groups.items()]


def _summary(data: str, split: str, method: str, group: Sequence[Row]) -> Row:
    first = [_after_passes(row, 1) for row in group]
    last = [row["difference"][-1] for row in group]
    passes = max(1, group[0]["communications"][-1] // _WIDTH)
    within = [abs(statistics.mean(_after_passes(row, k) for row in group)) <= WITHIN for k in range(1, passes + 1)]
    stays = next((k + 1 for k in range(passes) if all(within[k:])), None)
    return {
        "data": data,
        "split": split,
        "method": method,
        "seeds": len(group),
        "first_pass": _moments(first),
        "end": _moments(last),
        "error": statistics.mean(row["error"][-1] for row in group),
        "within_from_pass": stays,
        "bound_gap": statistics.mean(row["bound_gap"] for row in group),
        "exchanges": group[0]["exchanges"],
        "bytes_per_silo": group[0]["bytes_up_per_silo"] + group[0]["bytes_down_per_silo"],
        "seconds": statistics.mean(row["seconds"] for row in group),
    }


def _after_passes(row: Row, passes: int) -> float:
    """The difference from global VI once every silo was communicated with so many times, or at the end."""
    at = row["communications"]
    value: float = row["difference"][at.index(passes * _WIDTH) if passes * _WIDTH in at else -1]
    return value


def _moments(values: Sequence[float]) -> Row:
    return {"mean": statistics.mean(values), "sd": statistics.stdev(values) if len(values) > 1 else 0.0}


def table(content: Row) -> str:
    """Differences from global VI in thousandths of a nat, mean (sd over seeds), narrow enough for a terminal."""
    lines = [
        "test log-likelihood less that of global VI, 1e-3 nats a record",
        f"{'data, split':<18}{'method':<32}{'first pass':>13}{'end':>13}{'within from':>12}{'gap':>9}{'exchanges':>11}",
    ]
    for row in content["summaries"]:
        first, end = (f"{1e3 * row[k]['mean']:.1f} ({1e3 * row[k]['sd']:.1f})" for k in ("first_pass", "end"))
        within = "-" if row["within_from_pass"] is None else f"pass {row['within_from_pass']}"
        where = f"{row['data']}, {row['split']}"
        gap = f"{row['bound_gap']:.1f}"
        lines.append(f"{where:<18}{row['method']:<32}{first:>13}{end:>13}{within:>12}{gap:>9}{row['exchanges']:>11}")
    lines.append("gap: nats of the bound, all records together, below global VI at the end")
    lines.append(content["setting"])
    return "\n".join(lines)


def plot(rows: Sequence[Row]) -> bytes:
    """As the paper's Figure 4: a panel a data set and split, the mean over seeds, a band of one sd."""
    from matplotlib.figure import Figure

    panels = sorted({(row["data"], row["split"]) for row in rows if row["split"] in ("A", "B")}, reverse=True)
    panels.sort(key=lambda panel: panel[1])
    columns = len({data for data, _ in panels})
    figure = Figure(figsize=(4.4 * columns + 1.5, 6.4), layout="constrained")
    grid = figure.subplots(2, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (data, split) in zip(grid.flat, panels, strict=True):
        for method, colour in _COLOURS.items():
            chosen = [r for r in rows if (r["data"], r["split"], r["method"]) == (data, split, method)]
            _line(axes, chosen, method, colour)
        axes.axhspan(-WITHIN, WITHIN, color="#e5e7eb", zorder=0)
        axes.axhline(0.0, color="#111827", lw=0.8, ls="--", label="global VI")
        axes.set(title=f"{data}, split {split}", ylim=(_LOWEST, _HIGHEST))
    for axes in grid[-1]:
        axes.set_xlabel("communications with a silo")
    figure.supylabel("test log-likelihood less that of global VI, nats")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=2 * columns, fontsize=8)
    return as_png(figure)


def _line(axes: Any, chosen: Sequence[Row], method: str, colour: str) -> None:
    at = chosen[0]["communications"]
    by_round = list(zip(*(row["difference"] for row in chosen), strict=True))
    mean = [statistics.mean(values) for values in by_round]
    sd = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in by_round]
    marker = "o" if len(at) == 1 else ("." if len(at) <= _WIDTH and method != "VCL" else None)
    axes.plot(at, mean, color=colour, lw=1.4, marker=marker, ms=5, label=method)
    band = ([m - s for m, s in zip(mean, sd, strict=True)], [m + s for m, s in zip(mean, sd, strict=True)])
    axes.fill_between(at, *band, color=colour, alpha=0.12, lw=0)
