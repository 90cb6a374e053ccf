"""The budget report for a terminal."""

from __future__ import annotations

import textwrap

from secure_fvi.privacy.report import JobReport, Report

_WIDTH = 100


def report_text(report: Report) -> str:
    """The report in plain text, ending in a newline."""
    budget = report.budget
    share = report.epsilon / budget["epsilon"]
    lines = [
        f"Privacy budget of data set '{report.data_set}', silo '{report.silo}'",
        "",
        f"  spent      epsilon {report.epsilon:.4g} of {budget['epsilon']:.4g} ({share:.0%}), delta {report.delta:.2g}",
        f"  remaining  epsilon {report.remaining:.4g}, as one more release with Gaussian noise",
        f"  protects   {'a record' if report.unit == 'record' else 'a whole silo'}",
        f"  jobs       {len(report.jobs)}",
        f"  accountant {report.accountant}, {report.accountant_version}",
        f"  ledger     {report.ledger_length} rows, head {report.ledger_head}",
        "",
        *_wrapped(report.adjacency),
        *_wrapped(
            f"At the whole budget, someone who gives even odds to a {report.unit} being in the data cannot become "
            f"surer than {report.strongest_belief:.0%}, except with a probability of about delta."
        ),
        "",
        *_table(report.jobs),
        *_wrapped(report.composition),
        "",
        "Not covered:",
        *(line for item in report.not_covered for line in _wrapped(item, "  - ", "    ")),
    ]
    return "\n".join(lines) + "\n"


def _table(jobs: list[JobReport]) -> list[str]:
    if not jobs:
        return ["No job was charged.", ""]
    width = max(3, *(len(j.job) for j in jobs))
    lines = [f"{'job':{width}}  {'opened':20}  {'epsilon':>9}  {'by':4}  {'in total':>9}  released / declared, noise"]
    for j in jobs:
        counts = ", ".join(f"{t['phase']} {t['released']}/{t['count']}" for t in j.terms)
        about = [counts, f"{j.noise} noise" if j.noise else "noise placement undeclared"]
        about.append(audited(j))
        lines.append(
            f"{j.job:{width}}  {j.opened[:19]:20}  {j.epsilon:9.4g}  {j.accountant:4}  {j.epsilon_so_far:9.4g}  "
            + "; ".join(about)
        )
        lines.append(f"{'':{width}}  random numbers: {j.rng or 'source not declared'}")
    return [*lines, ""]


def audited(job: JobReport) -> str:
    """What an audit proved, in words."""
    if job.audit_lower_bound is None:
        return "not audited"
    text, about = f"audit: at least {job.audit_lower_bound:.3g}", job.audit or {}
    if about.get("if"):
        text += f", or {about['if']['epsilon']:.3g} if {about['if']['assumption']}"
    return text


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=rest)
