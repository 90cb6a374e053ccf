"""audit.json and audit.html: what the attacks found, for programs and for readers without any."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from secure_fvi.audits import epsilon
from secure_fvi.audits.base import CONFIDENCE, AuditRow
from secure_fvi.files import write_atomically
from secure_fvi.plots import svg

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
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(groups=groups, about=about, words=_WORDS, confidence=CONFIDENCE, notes=_notes)
    write_atomically(directory / "audit.html", text.encode())


def _notes(row: AuditRow) -> list[str]:
    """What a reader needs beside the numbers of a row."""
    detail, notes = row.detail, []
    if detail.get("bound") is not None:
        notes.append(f"No attack can exceed {detail['bound']:.3f} under the stated epsilon and delta.")
    if "claim" in detail:
        rests = "" if detail["assumption"] == "none" else f" The bound holds if {detail['assumption']}."
        notes.append(f"Claimed: epsilon {detail['claim']:.3g} at delta {detail['delta']:g}.{rests}")
    if "cap" in detail:
        near = "; it is near it, and says no more than that" if detail.get("near_cap") else ""
        notes.append(f"The estimate cannot exceed {detail['cap']:.2f} nats{near}.")
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
    data = base64.b64encode(svg(figure).encode()).decode()
    return Markup(f"data:image/svg+xml;base64,{data}")
