"""An audit's bound stands beside the claim that it was held against, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click.testing
import pytest

from secure_fvi.cli.budget import budget
from secure_fvi.errors import InputError
from secure_fvi.privacy.events import Gaussian
from secure_fvi.privacy.ledger import Budget, Job, Ledger, Term
from secure_fvi.privacy.report import Report, read_audit, read_report, with_audit
from secure_fvi.privacy.report_html import report_html, report_text

DELTA = 1e-6


OF = {"noise": "server", "algorithm": "sfvi", "clipping_norm": 2.0}


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    book = Ledger.open(path, "hospital-a", create=True)
    book.set_budget(Budget("adults", 9.0, DELTA))
    for name, sigma in (("gentle", 10.0), ("harsh", 1.0)):
        book.open_job(Job(name, "adults", "record", DELTA, (Term("round", Gaussian(sigma), 1),), OF)).close("finished")
    book.close()
    return path


@pytest.fixture
def report(ledger: Path) -> Report:
    return read_report(ledger)


def row(claim: float, low: float, method: str = "one run", assumption: str = "none", **change: Any) -> dict[str, Any]:
    detail = {
        "claim": claim, "unit": "record", "delta": DELTA, "noise": "server", "method": method,
        "assumption": assumption, "algorithm": "sfvi", "clipping_norm": 2.0,
    }  # fmt: skip
    found = {"attack": "x", "score": "epsilon (lower bound)", "value": low, "low": low, "high": claim, "valid": True}
    return {**found, "detail": {**detail, **change.pop("detail", {})}, **change}


def audit_file(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "audit.json"
    path.write_text(json.dumps({"rows": [{"score": "advantage", "valid": True}, *rows]}))
    return path


def test_the_strongest_bound_without_assumptions_is_the_jobs(report: Report, tmp_path: Path) -> None:
    claim = report.jobs[0].epsilon
    rows = [
        row(claim, 0.1),
        row(claim, 0.2, "clopper-pearson"),
        row(claim, 0.3, "gaussian", "its curve is a Gaussian's"),
        row(claim, 50.0, valid=False),
    ]
    after = with_audit(report, read_audit(audit_file(tmp_path, *rows)))
    gentle, harsh = after.jobs
    assert (gentle.audit_lower_bound, harsh.audit_lower_bound) == (0.2, None)
    assert gentle.audit == {
        "claim": claim,
        "method": "clopper-pearson",
        "if": {"assumption": "its curve is a Gaussian's", "epsilon": 0.3},
    }
    for page in (report_text(after), report_html(after)):
        assert "at least 0.2, or 0.3 if its curve is a" in page
        assert page.count("not audited") == 1
    assert after.not_covered == report.not_covered
    json.dumps(after.to_dict(), allow_nan=False)


def test_a_broken_claim_is_said_first(report: Report, tmp_path: Path) -> None:
    claim = report.jobs[1].epsilon
    after = with_audit(report, read_audit(audit_file(tmp_path, row(claim, claim + 1))))
    assert after.not_covered[0] == "THE CLAIM ITSELF of 'harsh': an audit proves a larger epsilon."
    assert after.jobs[0].audit_lower_bound is None


@pytest.mark.parametrize(
    "change",
    [
        {"unit": "silo"},
        {"delta": 1e-5},
        {"noise": "distributed"},
        {"claim": 2.0},
        {"algorithm": "pvi"},
        {"clipping_norm": 50.0},
    ],
)
def test_an_audit_of_something_else_is_refused(report: Report, tmp_path: Path, change: dict[str, Any]) -> None:
    rows = read_audit(audit_file(tmp_path, row(report.jobs[0].epsilon, 0.1, detail=change)))
    with pytest.raises(InputError, match="no job in this ledger claims what was audited"):
        with_audit(report, rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(1.0, 0.5, valid=False)], "no valid row"),
        ([row("one", 0.5)], "claim must be a number"),  # type: ignore[arg-type]
        ([row(1.0, 0.5, detail={"unit": None})], "unit must be a text"),
    ],
)
def test_bad_files(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_audit(audit_file(tmp_path, *rows))
    (tmp_path / "audit.json").write_text("[1")
    with pytest.raises(InputError, match="cannot read"):
        read_audit(tmp_path / "audit.json")
    (tmp_path / "audit.json").write_text("[1]")
    with pytest.raises(InputError, match="no audit"):
        read_audit(tmp_path / "audit.json")


def test_on_the_command_line(ledger: Path, report: Report, tmp_path: Path) -> None:
    audit = audit_file(tmp_path, row(report.jobs[0].epsilon, 0.25))
    arguments = ["report", str(ledger), "--audit", str(audit), "--format", "json"]
    found = click.testing.CliRunner().invoke(budget, arguments, catch_exceptions=False)
    assert [job["audit_lower_bound"] for job in json.loads(found.output)["jobs"]] == [0.25, None]
