"""The table of ProdLDA's topics by method for a terminal, and the plot that mirrors the paper's Figure 4.2."""

from __future__ import annotations

from typing import Any

from secure_fvi_lab.figures import as_png

Row = dict[str, Any]
#: Figures of a method, and their names in the table.
_KEYS = {
    "coherence": "coherence", "test_coherence": "in test posts", "diversity": "diversity", "completion": "completion",
}  # fmt: skip
_COLOURS = ("#2563eb", "#0d9488", "#94a3b8", "#d97706", "#b45309")


def table(content: Row) -> str:
    """A line a method: coherence in training and test posts, diversity, completion in nats a word; some topics."""
    ours, rows = content["ours"], content["rows"]
    lines = [
        f"{'method':<24}" + "".join(f"{name:>16}" for name in _KEYS.values()) + f"{'s a seed':>10}{'MB a silo':>11}"
    ]
    for method in ours["coherence"]:
        cells = [f"{ours[key][method]['mean']:.3f} ({ours[key][method]['sd']:.3f})" for key in _KEYS]
        own = [row for row in rows if row["method"] == method]
        seconds = sum(row["seconds"] for row in own) / len(own)
        megabytes = (own[0]["bytes_up"] + own[0]["bytes_down"]) / 1e6
        sent = f"{megabytes:.0f}" if megabytes else ""
        lines.append(f"{method:<24}" + "".join(f"{cell:>16}" for cell in cells) + f"{seconds:>10.0f}{sent:>11}")
    first = next(row for row in rows if row["method"] == "SFVI")
    best = sorted(zip(first["coherence"], first["words"], strict=True), reverse=True)
    lines += [f"SFVI, seed {first['seed']}: {value:.2f} {words}" for value, words in (*best[:3], best[-1])]
    lines += [f"mean (sd) over {ours['seeds']} seeds; {content['seconds']} s on {content['machine']}"]
    return "\n".join([*lines, f"paper: {content['paper']}", content["setting"]])


def plot(content: Row) -> bytes:
    """Coherence of all topics of all seeds by method; the bound by steps, a line a seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    rows, methods = content["rows"], list(content["ours"]["coherence"])
    values = [[v for row in rows if row["method"] == method for v in row["coherence"]] for method in methods]
    boxes = left.boxplot(values, patch_artist=True, widths=0.6, medianprops={"color": "black"})
    for box, colour in zip(boxes["boxes"], _COLOURS, strict=True):
        box.set_facecolor(colour)
    left.set_xticks(
        range(1, len(methods) + 1), [m.replace(", ", ",\n").replace(" tut", "\ntut") for m in methods], fontsize=7
    )
    left.set(ylabel="UMass coherence of a topic")
    for method, colour in zip(methods, _COLOURS, strict=True):
        for row in rows:
            if row["method"] == method and row["curve"]:
                label = method if row["seed"] == rows[0]["seed"] else None
                right.plot(*zip(*row["curve"], strict=True), color=colour, lw=1.2, label=label)
    right.set(xlabel="steps", ylabel="bound, nats a word")
    right.legend(frameon=False, fontsize=8)
    return as_png(figure)
