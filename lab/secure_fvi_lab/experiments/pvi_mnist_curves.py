"""The lines of pvi-mnist for a terminal, and its plot: test error by communications, as the paper's figures 6 and 8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from secure_fvi_lab.figures import as_png

Row = dict[str, Any]
_COLOURS = ("#2563eb", "#d97706", "#059669")


def table(content: Row) -> str:
    """A line a split: error over seeds, the aim, and what it took."""
    lines = [
        f"{'setting':<24}{'test error':>12}{'sd':>8}{'seeds':>7}{'aim':>7}{'log lik':>9}{'rounds':>8}"
        f"{'communications':>16}{'aim met at':>12}{'MB a silo':>11}{'seconds':>9}"
    ]
    for line in content["lines"]:
        error = line["error"]
        sd = f"{error['sd']:.4f}" if error["seeds"] > 1 else ""
        lines.append(
            f"{line['setting']:<24}{error['mean']:>12.4f}{sd:>8}{error['seeds']:>7}{line['aim']:>7.3f}"
            f"{line['log_likelihood']['mean']:>9.3f}{line['rounds']:>8}{line['communications']:>16}"
            f"{line['aim_met_at'] or 'not met':>12}{line['bytes'] / 1e6:>11.1f}{line['seconds']:>9.0f}"
        )
    return "\n".join(
        [
            *lines,
            "log lik: nats an image; communications: rounds times silos; aim met at: communications",
            content["setting"],
        ]
    )


def curves(rows: Sequence[Row], aims: Mapping[str, float]) -> bytes:
    """Test error and log-likelihood by communications; a line a seed, dotted what was aimed at."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = dict(zip(aims, _COLOURS, strict=False))
    for row in rows:
        at = [point["round"] * row["silos"] for point in row["curve"]]
        colour = colours[row["split"]]
        left.plot(at, [1 - point["test"] for point in row["curve"]], color=colour, lw=1.2, label=row["setting"])
        right.plot(at, [-point["log_likelihood"] for point in row["curve"]], color=colour, lw=1.2)
        left.axhline(aims[row["split"]], color=colour, lw=0.8, ls=":")
    left.set(xlabel="communications", ylabel="test error", xscale="log", yscale="log")
    right.set(xlabel="communications", ylabel="minus test log-likelihood, nats an image", xscale="log", yscale="log")
    handles, labels = left.get_legend_handles_labels()
    one_each = dict(zip(labels, handles, strict=True))
    left.legend(one_each.values(), one_each.keys(), frameon=False, fontsize=8)
    return as_png(figure)
