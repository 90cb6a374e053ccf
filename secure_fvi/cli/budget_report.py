"""The work behind `secure-fvi budget report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from secure_fvi.errors import InputError
from secure_fvi.privacy.report import Report, read_report


def command(
    ledger: Path,
    silo: str | None,
    data_set: str | None,
    form: str,
    facts: Path | None,
    curators: tuple[str, ...],
    intended_use: str | None,
    out: Path | None,
    audit: Path | None = None,
) -> None:
    """Read the ledger and write the report to `out`, or print it."""
    if form != "yaml" and (facts or curators or intended_use):
        raise InputError("--facts, --curator and --use are fields of the registry: add --format yaml")
    report = read_report(ledger, silo, data_set)
    if audit is not None:
        from secure_fvi.privacy.report_audit import read_audit, with_audit

        report = with_audit(report, read_audit(audit))
    text = _render(report, form, facts, curators, intended_use)
    if out is None:
        # What a ledger says may be another's, and a page is not made for terminals.
        click.echo("".join(c if c.isprintable() or c == "\n" else "?" for c in text), nl=False)
        return
    from secure_fvi.files import write_atomically

    try:
        write_atomically(out, text.encode())
    except OSError as error:
        raise InputError(f"cannot write '{out}': {error.strerror}") from None


def _render(report: Report, form: str, facts: Path | None, curators: tuple[str, ...], use: str | None) -> str:
    if form == "json":
        return json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n"
    if form == "html":
        from secure_fvi.privacy.report_html import report_html

        return report_html(report)
    if form == "yaml":
        from secure_fvi.privacy.report_registry import read_facts, report_registry

        answers: dict[str, Any] = read_facts(facts) if facts else {}
        basic: dict[str, Any] = {}
        if curators:
            basic["data_curators"] = [{"data_curator_name": c, "data_curator_type": None} for c in curators]
        if use:
            basic["intended_use"] = use
        if basic:
            deployment = answers.setdefault("deployment", {})
            if not isinstance(deployment, dict) or not isinstance(deployment.setdefault("basic", {}), dict):
                raise InputError("in the facts, 'deployment' and 'deployment/basic' must be tables")
            deployment["basic"].update(basic)
        return report_registry(report, answers)
    from secure_fvi.privacy.report_html import report_text

    return report_text(report)
