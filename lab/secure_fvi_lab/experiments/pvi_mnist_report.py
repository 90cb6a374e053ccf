"""The lines of pvi-mnist-shards for a terminal, and its plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from secure_fvi_lab.figures import as_png

Row = dict[str, Any]
_COLOURS = ("#2563eb", "#059669", "#d97706", "#dc2626", "#7c3aed", "#6b7280")


def table(content: Row) -> str:
    """A line a run: where it ended, which damping it took, and what happened to q on the way."""
    lines = [
        f"{'split':<14}{'silos':>6}{'damping':>9}{'seed':>6}{'rounds':>8}{'error':>8}{'log lik':>9}"
        f"{'smallest to largest':>21}{'halved':>8}{'improper':>10}{'skipped':>9}"
    ]
    for row in content["rows"]:
        taken = f"{min(row['damping']):.3f} to {max(row['damping']):.3f}"
        lines.append(
            f"{row['split']:<14}{row['silos']:>6}{row['asked_damping']:>9}{row['seed']:>6}{len(row['error']):>8}"
            f"{row['error'][-1]:>8.3f}{row['log_likelihood'][-1]:>9.2f}{taken:>21}{sum(row['halvings']):>8}"
            f"{sum(row['improper']):>10}{sum(row['skipped']):>9}"
        )
    ours = content["ours"]
    lines.append(
        f"damping found during the run: test error {ours['mean']:.3f} (sd {ours['sd']:.3f} over {ours['seeds']} "
        f"seeds), {ours['diverged']} diverged"
    )
    lines.append("improper: rounds in which the whole step would have left q improper; skipped: silos with an improper")
    lines.append("cavity, over rounds")
    lines.append(content["setting"])
    return "\n".join(lines)


def plot(rows: Sequence[Row]) -> bytes:
    """Test error, log-likelihood and damping by round; a colour a damping, a line a seed, dashed for silos alike."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    panels = figure.subplots(1, 3)
    kinds = list(dict.fromkeys(_kind(row) for row in rows if row["split"] != "pooled"))
    for axes, (key, label, scale) in zip(
        panels,
        (
            ("error", "test error", "log"),
            ("log_likelihood", "test log-likelihood, nats an image", "linear"),
            ("damping", "damping taken", "log"),
        ),
        strict=True,
    ):
        for kind, colour in zip(kinds, _COLOURS, strict=False):
            for row in (r for r in rows if _kind(r) == kind):
                style = "--" if row["split"] == "alike" else "-"
                axes.plot(range(1, len(row[key]) + 1), row[key], style, color=colour, lw=1.2, label=kind)
        for row in (r for r in rows if r["split"] == "pooled" and key != "damping"):
            axes.axhline(row[key][-1], color="#111827", lw=0.8, ls=":", label="global VI, pooled")
        axes.set(xlabel="round", ylabel=label, yscale=scale)
    panels[1].set_ylim(-4, 0)
    handles, labels = panels[0].get_legend_handles_labels()
    one_each = dict(zip(labels, handles, strict=True))
    figure.legend(one_each.values(), one_each.keys(), frameon=False, loc="outside lower center", ncols=4, fontsize=8)
    return as_png(figure)


def _kind(row: Row) -> str:
    return f"{row['silos']} silos, {row['split']}, damping {row['asked_damping']}"
