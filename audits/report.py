"""audit.json and audit.html: what the attacks found, for programs and for readers without any."""

from __future__ import annotations

import io
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.audits import epsilon
from secure_fvi.audits.base import CONFIDENCE, AuditRow
from secure_fvi.files import write_atomically
from secure_fvi.plots import image

_TEMPLATE = Path(__file__).with_name("audit.html.j2")
_COLOURS = {"leaks": "#d97706", "nothing found": "#2563eb", "invalid": "#9ca3af"}
_WORDS = {
    "leaks": "The attack learns this much.",
    "nothing found": "This attack, of this size, found nothing. Another might.",
    "invalid": "The attack missed its own control, or found what is not there: this row says nothing.",
}


def write(rows: Sequence[AuditRow], about: dict[str, Any], directory: Path) -> None:
    """Write both files, each whole or not at all. `about`: what was audited, keys and values for the page's head."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {"confidence": CONFIDENCE, "about": about, "rows": [row.to_json() for row in rows]}
    write_atomically(directory / "audit.json", json.dumps(content, indent=2).encode())
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    attacks = list(dict.fromkeys(row.attack for row in rows))
    groups = [(name, _picture([r for r in rows if r.attack == name]), [r for r in rows if r.attack == name])
              for name in attacks]  # fmt: skip
    found = {finding: [row for row in rows if row.finding == finding] for finding in _WORDS}
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(
        groups=groups, about=about, words=_WORDS, confidence=CONFIDENCE, notes=_notes, found=found,
        protections=list(dict.fromkeys(row.protection for row in rows)),
        forest=_forest(found["leaks"]) if found["leaks"] else None,
    )  # fmt: skip
    write_atomically(directory / "audit.html", text.encode())


#: False-positive rates at which LeakPro's results state true-positive rates.
_LEAKPRO_RATES = (0.0, 0.0001, 0.001, 0.01, 0.1)
#: Of a file's name, and what stands for anything else.
_UNSAFE = re.compile(r"[^A-Za-z0-9]+")


def export(rows: Sequence[AuditRow], about: dict[str, Any], directory: Path) -> int:
    """Write each row that tells two kinds apart as other auditors keep an attack's result; how many there were.

    leakpro/NAME.json: what LeakPro's `MIAResult.load` reads. privacy_meter/attack_result_K.npz: the arrays of Privacy
    Meter's report folder. Both hold one score and one truth for each record or run that was attacked.
    """
    found = [row for row in rows if row.scored is not None]
    for folder in ("leakpro", "privacy_meter"):
        (directory / folder).mkdir(parents=True, exist_ok=True)
    for place, row in enumerate(found):
        assert row.scored is not None
        truth, scores = row.scored
        inside, outside = int((truth > 0.5).sum()), int((truth <= 0.5).sum())
        ends = np.flatnonzero(np.diff(np.sort(scores)[::-1], append=-np.inf)) + 1  # a threshold below each score
        hits = np.concatenate([[0], np.cumsum(truth[np.argsort(-scores, kind="stable")] > 0.5)[ends - 1]])
        alarms = np.concatenate([[0], ends]) - hits
        tpr, fpr = hits / inside, alarms / outside
        area = float(np.diff(fpr) @ (tpr[1:] + tpr[:-1]) / 2)

        def at(rate: float, tpr: FloatArray = tpr, fpr: FloatArray = fpr) -> float:
            return float(tpr[fpr <= rate].max())

        name = _UNSAFE.sub("-", f"{place} {row.attack} {row.protection}").strip("-")
        result = {
            "result_name": row.attack,
            "result_type": "MIAResult",
            "id": name,
            "tpr": tpr.tolist(),
            "fpr": fpr.tolist(),
            "roc_auc": area,
            "accuracy": ((hits + outside - alarms) / len(truth)).tolist(),
            "fixed_fpr": {f"TPR@{100 * rate:.8g}%FPR": at(rate) for rate in _LEAKPRO_RATES},
            "signal_values": scores.tolist(),
            "true_labels": truth.astype(int).tolist(),
            "config": {"tool": "secure-fvi", "about": about, "row": row.to_json()},
            "tp": hits.tolist(),
            "fp": alarms.tolist(),
            "tn": (outside - alarms).tolist(),
            "fn": (inside - hits).tolist(),
        }
        write_atomically(directory / "leakpro" / f"{name}.json", json.dumps(result).encode())
        arrays = io.BytesIO()
        np.savez(
            arrays, fpr=fpr, tpr=tpr, auc=area, one_fpr=at(0.01), one_tenth_fpr=at(0.001), zero_fpr=at(0.0),
            scores=scores, memberships=truth > 0.5,
        )  # fmt: skip
        write_atomically(directory / "privacy_meter" / f"attack_result_{place}.npz", arrays.getvalue())
    return len(found)


def _notes(row: AuditRow) -> list[str]:
    """What a reader needs beside the numbers of a row."""
    detail, notes = row.detail, []
    if detail.get("bound") is not None:
        notes.append(f"No attack can exceed {detail['bound']:.3f} under the stated epsilon and delta.")
    if "claim" in detail:
        rests = "" if detail["assumption"] == "none" else f" The bound holds if {detail['assumption']}."
        notes.append(f"Claimed: epsilon {detail['claim']:.3g} at delta {detail['delta']:g}.{rests}")
    if "wasserstein" in detail:
        notes.append(
            f"Mean distance from the posterior, in the latent's own units: {detail['wasserstein']:.3g} of the attack's "
            f"guess, {detail['wasserstein_plain']:.3g} without protection, {detail['wasserstein_of_nothing']:.3g} of a "
            "guess blind."
        )
    return notes + [str(detail[key]) for key in ("note", "why_invalid") if key in detail]


def table(rows: Sequence[AuditRow]) -> str:
    lines = [f"{'attack':<58} {'protection':<14} {'score':>7}  {'interval':<17} {'control':>8}  finding"]
    for row in rows:
        interval = f"[{row.low:.3f}, {row.high:.3f}]"
        lines.append(
            f"{row.attack:<58} {row.protection:<14} {row.value:>7.3f}  {interval:<17} "
            f"{row.positive_control:>8.3f}  {row.finding}"
        )
    return "\n".join(lines)


#: Shares of the control's score between which the forest plot reaches.
_REACH = (-0.35, 1.35)
#: Characters of a line that names an attack.
_WIDEST = 72


def _forest(rows: Sequence[AuditRow]) -> Markup:
    """What leaks, by protection: each score and its interval on the way from what guessing gives (or from the claim, of
    an empirical epsilon) to the same attack without the protection. Names stand above their lines, so that none is cut
    off and the plot stays narrow."""
    groups = {name: [r for r in rows if r.protection == name] for name in dict.fromkeys(r.protection for r in rows)}
    names = {id(row): textwrap.wrap(f"{row.attack}: {row.score} {row.value:.3g}", _WIDEST) for row in rows}
    lines = sum(0.4 + 0.4 * len(name) for name in names.values()) + len(groups)
    figure = Figure(figsize=(5.2, 0.4 * lines + 0.8), layout="constrained")
    axis = figure.subplots()
    axis.axvline(0, color="#6b7280", lw=0.8)
    axis.axvline(1, color="#1f2937", lw=0.8, ls=":")
    place = 0.0
    for protection, some in groups.items():
        place += 1
        axis.text(_REACH[0], place - 0.2, protection, weight="bold", fontsize=9, in_layout=False)
        for row in some:
            place += 0.4 + 0.4 * len(names[id(row)])
            width = row.positive_control - row.nothing
            low, value, high = (
                min(max((v - row.nothing) / width, _REACH[0]), _REACH[1]) for v in (row.low, row.value, row.high)
            )
            axis.text(_REACH[0], place - 0.2, "\n".join(names[id(row)]), fontsize=8, in_layout=False)
            axis.plot([low, high], [place, place], color=_COLOURS["leaks"], lw=2.2, solid_capstyle="butt")
            axis.scatter([value], [place], color=_COLOURS["leaks"], s=26, zorder=3)
    axis.set_xlim(*_REACH)
    axis.set_ylim(place + 0.5, 0.3)
    axis.set_yticks([])
    axis.set_xticks([0, 0.5, 1], ["guessing,\nor the claim", "", "as without\nprotection"])
    axis.spines[["top", "right", "left"]].set_visible(False)
    return image(figure)


def _picture(rows: Sequence[AuditRow]) -> Markup:
    """One attack under every protection: score with its interval, the control as a cross."""
    figure = Figure(figsize=(5.6, 0.34 * len(rows) + 0.8), layout="constrained")
    axis = figure.subplots()
    axis.axvline(rows[0].nothing, color="#6b7280", lw=0.8)
    for place, row in enumerate(rows):
        colour = _COLOURS[row.finding]
        axis.plot([row.low, row.high], [place, place], color=colour, lw=2.2)
        axis.scatter([row.value], [place], color=colour, s=30, zorder=3)
        axis.scatter([row.positive_control], [place], color="#1f2937", marker="x", s=26, zorder=2)
    axis.set_yticks(range(len(rows)), [row.protection for row in rows])
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    line = "claim" if rows[0].score == epsilon.SCORE else "guessing"
    axis.set_xlabel(f"{rows[0].score} (line: {line}; cross: positive control)")
    return image(figure)
