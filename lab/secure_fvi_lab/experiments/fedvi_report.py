"""The table of FedVI beside its baselines for a terminal, and the plot that mirrors the paper's Figure 4."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from secure_fvi_lab.experiments.spread import spread
from secure_fvi_lab.figures import as_png

Row = dict[str, Any]
_COLOURS = {"FedVI": "#2563eb", "FedAvg": "#d97706"}


def table(content: Row) -> str:
    """A line a method: accuracy of clients that took part and that did not, the paper's beside ours."""
    ours, paper = content["ours"], content["paper"]
    lines = [
        f"{'method':<10}{'paper':>15}{'taking part, %':>18}{'new, %':>16}{'log loss, new':>16}{'calibration error':>19}"
    ]
    for method, found in ours["accuracy"].items():
        theirs = paper.get(method)
        named = f"{theirs[0]:.1f} / {theirs[1]:.1f}" if theirs else ""
        part, new = (f"{100 * found[who]['mean']:.1f} ({100 * found[who]['sd']:.1f})" for who in ("taking_part", "new"))
        loss, gap = (ours[key][method]["new"]["mean"] for key in ("log_loss", "calibration"))
        lines.append(f"{method:<10}{named:>15}{part:>18}{new:>16}{loss:>16.3f}{gap:>19.3f}")
    for who, k in (("taking_part", 0), ("new", 1)):
        mine = margin(content["rows"], who)
        lines.append(
            f"FedVI above FedAvg, {who.replace('_', ' ')}: {100 * mine['mean']:.1f} points ({100 * mine['sd']:.1f}); "
            f"paper: {paper['FedVI'][k] - paper['FedAvg'][k]:.1f}"
        )
    fits = [row for row in content["rows"] if row["method"] == "FedVI"]
    rate = fmean(row["metrics"]["rate_per_client"] for row in fits)
    bound = {key: fmean(row["bound"][key] for row in fits) for key in fits[0]["bound"]}
    lines += [
        f"rate {rate:.1f} nats a client; over new clients the PAC-Bayes bound of the smoothed log loss is "
        f"{bound['value']:.2f} nats ({bound['test']:.2f} on test images; worst {bound['largest_loss']:.2f}), of which "
        f"{bound['complexity']:.2f} KL and {bound['slack']:.2f} slack",
        "for the clients that took part KL is infinite under a point estimate of theta: no finite bound",
        f"mean (sd) over {len(fits)} seeds; {content['seconds']} s on {content['machine']}",
        content["setting"],
    ]
    return "\n".join(lines)


def margin(rows: Sequence[Row], who: str) -> Row:
    """FedVI's accuracy less FedAvg's on the same clients, seed by seed: mean and sd."""
    fedvi, fedavg = (
        {row["seed"]: row[who]["accuracy"] for row in rows if row["method"] == method} for method in ("FedVI", "FedAvg")
    )
    return spread([fedvi[seed] - fedavg[seed] for seed in fedvi])


def plot(content: Row) -> bytes:
    """Accuracy by round, a line a seed, solid for clients that took no part; beside it each method at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows: Sequence[Row] = [row for row in content["rows"] if row.get("curve")]
    for row in rows:
        rounds = [point["round"] for point in row["curve"]]
        for who, style in (("new", "-"), ("taking_part", ":")):
            name = f"{row['method']}, {who.replace('_', ' ')}" if row["seed"] == rows[0]["seed"] else None
            accuracy = [100 * point[who] for point in row["curve"]]
            left.plot(rounds, accuracy, style, color=_COLOURS[row["method"]], lw=1.2, label=name)
    left.set(xlabel="round", ylabel="test accuracy, %")
    left.legend(frameon=False, fontsize=8)
    accuracy = content["ours"]["accuracy"]
    for k, (who, colour) in enumerate((("taking_part", "#94a3b8"), ("new", "#2563eb"))):
        heights = [100 * found[who]["mean"] for found in accuracy.values()]
        errors = [100 * found[who]["sd"] for found in accuracy.values()]
        at = [i + 0.4 * k for i in range(len(accuracy))]
        right.bar(at, heights, 0.4, yerr=errors, color=colour, label=who.replace("_", " "))
    right.set_xticks([i + 0.2 for i in range(len(accuracy))], list(accuracy), fontsize=8)
    right.set(ylabel="test accuracy, %", ylim=(0, None))
    right.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return as_png(figure)
