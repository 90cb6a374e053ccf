"""The lines of multinomial-mnist and hbnn-mnist for a terminal, and their plot: the paper's tables beside ours."""

from __future__ import annotations

from typing import Any

from secure_fvi_lab.figures import as_png

Row = dict[str, Any]
_COLOURS = (
    "#2563eb", "#059669", "#d97706", "#dc2626", "#7c3aed", "#6b7280", "#0891b2", "#be185d", "#65a30d",
)  # fmt: skip


def table(content: Row) -> str:
    """A line a setting and method: test accuracy over seeds, the paper's beside it, rounds and bytes."""
    width = max(len(line["setting"]) for line in content["lines"]) + 2
    room = max(len(line["method"]) for line in content["lines"])
    lines = [
        f"{'setting':<{width}}{'method':<{room}}{'test, %':>15}{'paper':>8}{'train, %':>10}{'paper':>8}{'rounds':>8}"
        f"{'MB a silo':>11}{'seconds':>9}"
    ]
    for line in content["lines"]:
        test, train, paper = line["test"], line["train"], line["paper"]
        spread = f" ({100 * test['sd']:.1f})" if test["seeds"] > 1 else ""
        found = f"{100 * test['mean']:.1f}{spread}"
        theirs = [f"{paper[key]:.1f}" if key in paper else "" for key in ("test", "train")]
        lines.append(
            f"{line['setting']:<{width}}{line['method']:<{room}}{found:>15}{theirs[0]:>8}{100 * train['mean']:>10.1f}"
            f"{theirs[1]:>8}{line['rounds']:>8}{line['bytes'] / 1e6:>11.1f}{line['seconds']:>9.0f}"
        )
    seeds = sorted({line["test"]["seeds"] for line in content["lines"]})
    over = f"mean (sd) over {' or '.join(map(str, seeds))} fits" if seeds != [1] else "one fit each"
    lines.append(f"{over}; {content['seconds']} s on {content['machine']}")
    lines.append(content["setting"])
    return "\n".join(lines)


def plot(content: Row) -> bytes:
    """For each setting test accuracy by method, the paper's as a line across the bar; beside it accuracy by round."""
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys(line["setting"] for line in content["lines"]))
    most = max(sum(line["setting"] == setting for line in content["lines"]) for setting in settings)
    figure = Figure(figsize=(max(10, 1.6 * most), 3.4 * len(settings)), layout="constrained")
    for (left, right), setting in zip(figure.subplots(len(settings), 2, squeeze=False), settings, strict=True):
        lines = [line for line in content["lines"] if line["setting"] == setting]
        colours = {line["method"]: _COLOURS[k % len(_COLOURS)] for k, line in enumerate(lines)}
        for k, line in enumerate(lines):
            test = line["test"]
            left.bar(k, 100 * test["mean"], yerr=100 * test["sd"], color=colours[line["method"]], width=0.7)
            if "test" in line["paper"]:
                left.hlines(line["paper"]["test"], k - 0.45, k + 0.45, color="#111827", lw=1.5)
        lows = [min(100 * line["test"]["mean"], line["paper"].get("test", 100.0)) for line in lines]
        left.set_xticks(range(len(lines)), [line["method"].replace(", ", "\n") for line in lines], fontsize=6.5)
        left.set(ylabel="test accuracy, %", ylim=(max(0.0, min(lows) - 4), 100), title=f"{setting}; black: the paper's")
        for row in content["rows"]:
            if row["setting"] == setting and len(row["curve"]) > 1 and "silo" not in row:
                at = [point["round"] for point in row["curve"]]
                right.plot(at, [100 * point["test"] for point in row["curve"]], color=colours[row["method"]], lw=1.2)
        right.set(xlabel="round", ylabel="test accuracy, %", xscale="log", title=setting)
    return as_png(figure)
