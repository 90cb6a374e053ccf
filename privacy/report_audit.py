"""What audits proved, beside what the jobs of a budget report claim.

An audit runs a configuration again and ends in audit.json; its rows of empirical epsilon name the unit, the delta, the
placement of the noise and the claim that they were held against. They are put beside the jobs that claim the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from secure_fvi.errors import InputError
from secure_fvi.privacy.report import JobReport, Report

#: The score of the rows that are read.
_SCORE = "epsilon (lower bound)"
#: Relative difference up to which an audited claim counts as the job's own: accountants differ by less.
_SAME_CLAIM = 0.1


class AuditBound(NamedTuple):
    """One valid row: with the audit's confidence epsilon is at least `epsilon`, if `assumption` holds."""

    epsilon: float
    claim: float
    unit: str
    delta: float
    noise: str
    method: str
    assumption: str


def read_audit(path: Path) -> list[AuditBound]:
    """The valid rows of empirical epsilon in an audit.json. Raises InputError if there are none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"cannot read the audit in '{path}': {error}") from None
    rows = content.get("rows") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"'{path}' is no audit: it should hold a list 'rows', as secure-fvi audit writes it")
    found = [_bound(row, path) for row in rows if row.get("score") == _SCORE and row.get("valid") is True]
    if not found:
        raise InputError(f"'{path}' has no valid row of empirical epsilon: run secure-fvi audit --attack epsilon")
    return found


def with_audit(report: Report, bounds: list[AuditBound]) -> Report:
    """The report with each job's lower bound where the audit was of such a job.

    Raises InputError where no job has the unit, the delta, the placement of the noise and, within a tenth, the claim.
    """
    jobs, broken = [], []
    for job in report.jobs:
        own = [bound for bound in bounds if _is_of(bound, job, report.unit)]
        jobs.append(replace(job, **_fields(own)) if own else job)
        if any(bound.epsilon > bound.claim for bound in own):
            broken.append(f"'{job.job}'")
    if jobs == report.jobs:
        audited = sorted({f"{b.unit}, noise {b.noise}, epsilon {b.claim:.3g}, delta {b.delta:.2g}" for b in bounds})
        raise InputError(f"no job in this ledger claims what was audited ({'; '.join(audited)})")
    not_covered = list(report.not_covered)
    if broken:
        not_covered.insert(0, f"THE CLAIM ITSELF of {', '.join(broken)}: an audit proves a larger epsilon.")
    return replace(report, jobs=jobs, not_covered=not_covered)


def _is_of(bound: AuditBound, job: JobReport, unit: str) -> bool:
    return (
        bound.unit == unit
        and bound.noise == job.noise
        and abs(bound.delta - job.delta) <= 1e-9 * job.delta
        and abs(bound.claim - job.epsilon) <= _SAME_CLAIM * job.epsilon
    )


def _fields(bounds: list[AuditBound]) -> dict[str, Any]:
    """The best bound that assumes nothing, and the better ones that assume something."""
    free = [b for b in bounds if b.assumption == "none"]
    best = max(free, key=lambda b: b.epsilon, default=None)
    least = best.epsilon if best is not None else 0.0
    more = max((b for b in bounds if b.epsilon > least and b not in free), key=lambda b: b.epsilon, default=None)
    return {
        "audit_lower_bound": least,
        "audit": {
            "claim": bounds[0].claim,
            "method": None if best is None else best.method,
            "if": None if more is None else {"assumption": more.assumption, "epsilon": more.epsilon},
        },
    }


def _bound(row: Mapping[str, Any], path: Path) -> AuditBound:
    detail = row.get("detail")
    values = {"epsilon": row.get("low"), **(detail if isinstance(detail, dict) else {})}
    for name in ("epsilon", "claim", "delta"):
        value = values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise InputError(f"'{path}': in the row '{row.get('attack')}' {name} must be a number, not {value!r}")
    for name in ("unit", "noise", "method", "assumption"):
        if not isinstance(values.get(name), str):
            raise InputError(f"'{path}': in the row '{row.get('attack')}' {name} must be a text")
    return AuditBound(*(values[name] for name in AuditBound._fields))
