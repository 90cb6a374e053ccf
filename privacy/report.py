"""The privacy-budget report of one data set of one silo: what was charged, what it adds up to, what is left.

Read from a ledger without any key. Everything in it is public within the federation: declarations, counts and times.
As data, as text, and as one HTML file: plots inside, nothing fetched.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np

from secure_fvi.errors import InputError
from secure_fvi.plots import image, spent
from secure_fvi.privacy.accountants import best_guess, epsilon
from secure_fvi.privacy.accounting import ORDERS, Single, epsilon_of_rdp, grouped, job_curve
from secure_fvi.privacy.events import Composed, Event, Gaussian, PoissonSampled, Repeated, to_dict
from secure_fvi.privacy.ledger import JobRecord, read_ledger
from secure_fvi.privacy.ledger_account import Account, account
from secure_fvi.privacy.ledger_terms import Budget, Job
from secure_fvi.privacy.terms import REPLACE


@dataclass(frozen=True)
class JobReport:
    """One charged job. epsilon: of all that it declared, at its delta."""

    job: str
    algorithm: str | None
    opened: str
    closed: str | None
    outcome: str | None
    epsilon: float
    delta: float
    accountant: str
    terms: list[dict[str, Any]]
    noise: str | None
    declared_public: list[str] | None
    rng: str | None
    description: dict[str, Any]
    epsilon_so_far: float  # of this job and all before it, by RDP at the budget's delta


@dataclass(frozen=True)
class Report:
    """What the officer of a silo reads. epsilon: of all jobs together, at delta, by RDP."""

    data_set: str
    silo: str
    unit: str
    adjacency: str
    jobs: list[JobReport]
    epsilon: float
    delta: float
    accountant: str
    accountant_version: str
    composition: str
    adversary: str
    budget: dict[str, Any]
    remaining: float
    best_guess: float  # see `accountants.best_guess`, at what bounds all jobs
    not_covered: list[str]
    ledger_head: str
    ledger_length: int
    made: str
    software: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_report(path: str | os.PathLike[str], silo: str | None = None, data_set: str | None = None) -> Report:
    """The report of `data_set` of `silo`; either may be left out where the file holds only one.

    Raises InputError where there is none or a choice is missing, ProtocolError for a ledger that was tampered with.
    """
    chains = read_ledger(path, silo)
    if len(chains) > 1:
        raise InputError(f"'{path}' holds ledgers of {', '.join(chains)}; choose one with --silo")
    chain = next(iter(chains.values()))
    if data_set is None:
        if len(chain.budgets) != 1:
            known = ", ".join(chain.budgets) or "none"
            raise InputError(f"the ledger of silo '{chain.silo}' has data sets {known}; choose one with --data-set")
        data_set = next(iter(chain.budgets))
    return make_report(account(chain, data_set))


def make_report(of: Account) -> Report:
    """The report of an account."""
    curve = np.zeros(len(ORDERS))
    # Those that a job may have met: what was taken back before the first was charged promises nothing.
    begun = of.jobs[0].seq if of.jobs else math.inf
    before, after = ([b.budget for b in of.history if (b.seq > begun) == late] for late in (False, True))
    jobs, budgets = [], [*before[-1:], *after]
    bound = bound_of(budgets)
    for record in of.jobs:
        curve = curve + job_curve(record.job)
        jobs.append(_job(record, epsilon_of_rdp(curve, of.budget.delta)))
    return Report(
        data_set=of.data_set,
        silo=of.silo,
        unit=of.budget.unit,
        adjacency=adjacency(of.budget.unit, [record.job.description for record in of.jobs]),
        jobs=jobs,
        epsilon=of.epsilon,
        delta=of.budget.delta,
        accountant="rdp",
        accountant_version=f"secure-fvi {version('secure-fvi')} (Renyi DP; jobs alone: dp-accounting "
        f"{version('dp-accounting')})",
        composition=composition(budgets, _kinds(record.job.description for record in of.jobs)),
        adversary=adversary([_facts(record.job) for record in of.jobs]),
        budget={
            "epsilon": of.budget.epsilon,
            "delta": of.budget.delta,
            "bound": bound._asdict(),
            "history": [{"set": _time(at), "epsilon": b.epsilon, "delta": b.delta} for _, at, b in of.history],
        },
        remaining=of.remaining,
        best_guess=best_guess(*bound),
        not_covered=not_covered(of.budget.unit, [_facts(record.job) for record in of.jobs]),
        ledger_head=of.head.hex(),
        ledger_length=of.length,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        software=f"secure-fvi {version('secure-fvi')}",
    )


def job_event(job: Job) -> Event:
    """All releases that `job` declared, equal ones together."""
    counts: Counter[Single] = Counter()
    for term in job.terms:
        for single, count in grouped(term.event).items():
            counts[single] += count * term.count
    return Composed(tuple(Repeated(single, count) for single, count in counts.items()))


def _job(record: JobRecord, so_far: float) -> JobReport:
    job, about = record.job, dict(record.job.description)
    whole = job_event(job)
    accountant = "pld" if all(_is_gaussian(single) for single in grouped(whole)) else "rdp"
    public = about.get("public")
    return JobReport(
        job=job.job,
        algorithm=_text(about.get("algorithm")),
        opened=_time(record.opened),
        closed=None if record.closed is None else _time(record.closed),
        outcome=record.outcome,
        epsilon=epsilon(whole, job.delta, accountant),
        delta=job.delta,
        accountant=accountant,
        terms=[
            {
                "phase": t.phase,
                "event": to_dict(t.event),
                "count": t.count,
                "released": record.released.get(t.phase, 0),
            }
            for t in job.terms
        ],
        noise=_text(about.get("noise")),
        declared_public=[str(p) for p in public] if isinstance(public, list | tuple) else None,
        rng=_text(about.get("rng")),
        description=about,
        epsilon_so_far=so_far,
    )


def _facts(job: Job) -> dict[str, Any]:
    singles = list(grouped(job_event(job)))
    return {
        "noise": job.description.get("noise"),
        "public": job.description.get("public"),
        "people": job.description.get("adjacency") == REPLACE,
        "rng": job.description.get("rng"),
        "sampled": any(isinstance(s, PoissonSampled) and s.rate < 1 for s in singles),
        "floating": any(_is_gaussian(s) for s in singles),
        "clipped": "clipping_norm" in job.description,
        "colluders": job.description.get("colluders"),
        "dropouts": job.description.get("dropouts"),
        "exact_jobs": job.description.get("exact_jobs"),
    }


def _is_gaussian(single: Single) -> bool:
    return isinstance(single.event if isinstance(single, PoissonSampled) else single, Gaussian)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _time(microseconds: int) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat(timespec="seconds")


# ---- What the numbers of a report mean, and what they do not cover, for readers who are not statisticians ----

_ALWAYS = (
    "Other data sets. This account is of one data set of one institution. A person who is also in another data set, "
    "here or elsewhere, has those losses on top.",
    "The same person in several institutions. Each institution's guarantee is about its own records; someone in m "
    "of them is a group of m records. Where noise was not made for as many, epsilon is m times as large and delta up "
    "to (exp(m epsilon) - 1) / (exp(epsilon) - 1) times, since institutions that share the noise of one total do not "
    "add it m times. No ledger sees the others'.",
    "What can be learned about people in general. A model that shows that smoking causes cancer says something about "
    "a smoker, whether or not that person's record was used.",
    "The institution's own staff and computers, which hold the data in the clear.",
    "Wrong or malicious inputs. A participant that sends made-up numbers can spoil the result; privacy accounting "
    "neither prevents nor detects it.",
    "Side channels: how long computations take, when messages arrive, how much memory is used, what crashes and logs "
    "elsewhere show.",
    "Releases that are not charged here: jobs without differential privacy, in one process or before this account "
    "began; summary tables, figures, talks and earlier studies on the same data; and clipping norms, learning rates or "
    "models that were chosen by trying them on these data outside of this ledger.",
)


def adjacency(unit: str, described: Sequence[Mapping[str, Any]] = ()) -> str:
    """What neighbouring data sets are, for jobs that are `described` so in the ledger."""
    declared = {about.get("adjacency") for about in described}
    if unit == "silo":
        return "Two federations are neighbours if one has one institution more, with everything in it."
    replaced = (
        "Two data sets are neighbours if the values that this institution holds of one person differ: its columns, and "
        "the response where a job keeps it from the others; one that is shared, as between sites, is not protected. "
        "Who is in the data is known to all institutions."
    )
    linked = [about.get("linked_records", 1) for about in described]
    together = min((n if isinstance(n, int) else 1 for n in linked), default=1)
    records = sorted({str(about["record"]) for about in described if "record" in about}) or ["a row or a group of rows"]
    added = f"Two data sets are neighbours if one has one record more: {' or, by job, '.join(records)}. " + (
        f"A person in several records, up to {together} here and elsewhere, counts as one: noise was made for that."
        if together > 1
        else "A person in several records counts as several."
    )
    if REPLACE not in declared:
        return added
    if set(declared) == {REPLACE}:
        return replaced
    return (
        f"Of jobs over different columns of the same people: {replaced} Of all others: {added} A changed person is one "
        "removed and one added: for it those others count as for a group of two."
    )


def adversary(jobs: Sequence[Mapping[str, Any]]) -> str:
    """Against whom the numbers hold, and whether the number of records is among what jobs told (see `_facts`)."""
    placed = {job["noise"] for job in jobs}
    most = [job["colluders"] for job in jobs if job["noise"] == "distributed" and isinstance(job["colluders"], int)]
    said = (
        "The numbers hold against whoever sees everything that was released, knows all other data and chooses what the "
        "institution is asked"
    )
    if most:
        said += f", with up to {min(most)} other institution{'s' * (min(most) != 1)} in league"
    if "server" in placed:
        said += ", but not against the server of jobs whose noise it adds itself"
    if any("number of records" in (job["public"] or ()) for job in jobs):
        return f"{said}. The number of records of this data set was declared public by a job."
    if any(job["people"] for job in jobs):  # whose rows all parties have in one order
        return f"{said}. Their number is known to all parties of a job over different columns of the same people."
    return (
        f"{said}. The number of records of this data set was not released without noise, and this report does not know "
        "it."
    )


def _kinds(described: Iterable[Mapping[str, Any]]) -> int:
    """How many kinds of neighbours jobs have that are `described` so in the ledger; one that says nothing has any."""
    told = {(about.get("adjacency"), about.get("record")) for about in described}
    return len(told - {(None, None)})


def composition(budgets: Sequence[Budget], kinds: int = 1) -> str:
    """How jobs add up, and which statement is the guarantee; all budgets that a job may have met, the last in force.
    kinds: of neighbours that the jobs have."""
    bound = bound_of(budgets)
    epsilons, deltas = ", ".join(f"{b.epsilon:g}" for b in budgets), ", ".join(f"{b.delta:g}" for b in budgets)
    held = (
        f"total fits. The budget was changed after the first job (epsilon {epsilons}; delta {deltas}): all jobs so far "
        f"are within {bound}, the largest epsilon and the sum of the deltas of these {len(budgets)} budgets, provided "
        "that their changes did not depend on results; where one did, no theorem covers them. What is asked later is "
        "bounded by it only if nobody changes the budget again."
        if len(budgets) > 1
        else f"total fits: whatever was and will be asked, all jobs that are charged here are together within {bound}."
    )
    return (
        "Within a job every release was declared before the first, and its epsilon is for all of them. Across jobs, "
        f"each of which may depend on earlier results, Renyi DP curves add up and a filter admits a job only while the "
        f"{held} The epsilon spent so far is the same sum converted at the same delta, as if this list of jobs had "
        "been fixed beforehand."
        + (
            f" But these jobs have {kinds} kinds of neighbours (above): the numbers bound the jobs of each kind by "
            "themselves. For someone who is one record to some jobs and several, or a changed one, to others, no "
            "theorem adds these costs up as they stand; give such jobs data sets of their own, and add a group's cost."
            if kinds > 1
            else ""
        )
    )


class Bound(NamedTuple):
    """What all jobs of a data set together are within: (epsilon, delta)."""

    epsilon: float
    delta: float

    def __str__(self) -> str:
        nothing = ", which promises nothing" if self.delta >= 1 else ""
        return f"epsilon {self.epsilon:.6g} at delta {self.delta:.3g}{nothing}"


def bound_of(budgets: Sequence[Budget]) -> Bound:
    """What bounds everything that was charged under these budgets (docs/ledger.md, "A budget that is changed").

    One that was lowered bounds none of what was charged before, and each may fail with its own delta.
    """
    return Bound(max(b.epsilon for b in budgets), min(1.0, math.fsum(b.delta for b in budgets)))


def not_covered(unit: str, jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the guarantee leaves open, in general and for these jobs' declarations (see `report._facts`)."""
    found = list(_ALWAYS)
    if exact := max((job["exact_jobs"] for job in jobs if isinstance(job["exact_jobs"], int)), default=0):
        found.insert(
            0,
            f"EXACT TOTALS: {exact} job{'s' * (exact > 1)} without differential privacy had been answered on this data "
            "set when a job here was let in. No epsilon covers what they told; the institution's log has them.",
        )
    if unit == "record":
        found.append("Groups. For a family of k records the epsilon is k times as large, and the delta grows further.")
    if any(job["clipped"] for job in jobs):
        found.append(
            "Equal service. Gradients are cut at the clipping norm, those of unusual records most, so that the answer "
            "may be further off for a small group than for others. Nothing that is released says by how much."
        )
    if any(job["sampled"] for job in jobs):
        found.append(
            "Anyone who can see who took part in a round. The epsilon counts on batches that are drawn in secret; "
            "against the institution's own machines, or anyone who watches them, it is that of unsampled rounds."
        )
    if any(job["noise"] == "server" for job in jobs):
        found.append(
            "The server. It adds the noise itself and sees totals before that; the guarantee holds against everyone "
            "who sees results, not against the server or whoever breaks into it."
        )
    if any(job["noise"] == "distributed" for job in jobs):
        most = max((job["colluders"] for job in jobs if isinstance(job["colluders"], int)), default=None)
        counted = f"no more than {most} of them" if most is not None else "no more of them than declared"
        found.append(
            "More collusion than was planned for. Institutions share the noise; the epsilon assumes that "
            f"{counted} subtract their own share from the result or leave it out."
        )
    if any(job["noise"] is None for job in jobs):
        found.append("Jobs that did not declare where their noise is added: ask who could see totals without it.")
    public = sorted({str(p) for job in jobs for p in job["public"] or ()})
    if public:
        found.append(f"What was declared public and left without noise: {', '.join(public)}.")
    if any(job["floating"] for job in jobs):
        found.append(
            "Gaussian noise that was not rounded. It is made in floating point, whose last bits may say more than the "
            "epsilon allows; from version 0.2.0 on what it covers is rounded to a millionth of its standard "
            "deviation. Noise on integers ('distributed') never had such a gap."
        )
    if any(isinstance(job["rng"], str) and "TEST" in job["rng"] for job in jobs):
        found.insert(0, "ANYTHING AT ALL where noise was made with a test key: it can be replayed and subtracted.")
    return found


# ---- As a page, and as text ----

_TEMPLATE = Path(__file__).with_name("report.html.j2")


def report_html(report: Report) -> str:
    """The page; names from the ledger are escaped."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["declared"] = declared
    environment.filters["number"] = lambda value: f"{value:.4g}"
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    after_each = [job.epsilon_so_far for job in report.jobs]
    picture = image(spent(after_each, report.budget["epsilon"], report.delta)) if after_each else None
    return template.render(report=report, over_jobs=picture)


# ---- The budget report for a terminal ----

_WIDTH = 100


def report_text(report: Report) -> str:
    """The report in plain text, ending in a newline. What a ledger says moves no cursor and makes no line of its own:
    it may be another's."""
    budget = report.budget
    share = report.epsilon / budget["epsilon"]
    lines = [
        f"Privacy budget of data set '{report.data_set}', silo '{report.silo}', as of {report.made}",
        "",
        f"  spent      epsilon {report.epsilon:.4g} of {budget['epsilon']:.4g} ({share:.0%}), delta {report.delta:.2g}",
        f"  remaining  epsilon {report.remaining:.4g}, as one more release with Gaussian noise",
        f"  protects   {'a record' if report.unit == 'record' else 'a whole silo'}",
        *(f"  budget set {b['set']}: epsilon {b['epsilon']:.4g}, delta {b['delta']:.2g}" for b in budget["history"]),
        f"  jobs       {len(report.jobs)}",
        f"  accountant {report.accountant}, {report.accountant_version}",
        f"  ledger     {report.ledger_length} rows, head {report.ledger_head}",
        "",
        *_wrapped(report.adjacency),
        *_wrapped(
            f"At the whole budget, someone who gives even odds to a {report.unit} being in the data, and guesses "
            f"whether it is from all that was released, is right at most {report.best_guess:.0%} of the time."
        ),
        "",
        *_table(report.jobs),
        *_wrapped(report.composition),
        *_wrapped(report.adversary),
        "",
        "Not covered:",
        *(line for item in report.not_covered for line in _wrapped(item, "  - ", "    ")),
    ]
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines) + "\n"


def _table(jobs: list[JobReport]) -> list[str]:
    if not jobs:
        return ["No job was charged.", ""]
    width = max(3, *(len(j.job) for j in jobs))
    lines = [
        f"{'job':{width}}  {'opened':20}  {'epsilon':>9}  {'by':4}  {'in total':>9}  released at most / declared, noise"
    ]
    for j in jobs:
        counts = ", ".join(f"{t['phase']} {t['released']}/{t['count']}" for t in j.terms)
        about = [counts, f"{j.noise} noise" if j.noise else "noise placement undeclared"]
        lines.append(
            f"{j.job:{width}}  {j.opened[:19]:20}  {j.epsilon:9.4g}  {j.accountant:4}  {j.epsilon_so_far:9.4g}  "
            + "; ".join(about)
        )
        lines += _wrapped(declared(j), "    ", "    ")
    return [*lines, ""]


#: What a job's row in the ledger may declare, in the order of the report.
_DECLARED = {
    "clipping_norm": "clipping norm",
    "clipping": "clipping",
    "noise_multiplier": "noise multiplier",
    "sampling_rate": "sampling rate",
    "silos_counted_on": "silos whose noise is counted on",
    "colluders": "colluders",
    "dropouts": "dropouts",
}


def declared(job: JobReport) -> str:
    """What `job` said of itself when it was let in, and how it ended."""
    about = [job.algorithm or "algorithm not declared", job.outcome or "open", f"its own delta {job.delta:.2g}"]
    for key, words in _DECLARED.items():
        value = job.description.get(key)
        if value is not None:
            about.append(f"{words} {value:.4g}" if isinstance(value, float) else f"{words} {value}")
    return "; ".join([*about, f"random numbers: {job.rng or 'source not declared'}"])


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=first, subsequent_indent=rest)
