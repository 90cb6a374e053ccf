"""Gates for the silos of a job: its terms agreed, its whole cost checked against every silo's ledger, its sum strong
enough for the noise that it carries."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from secure_fvi.aggregation.base import BlockTable, SecureSum
from secure_fvi.aggregation.store import SqliteStore
from secure_fvi.disclosure import Disclosure
from secure_fvi.errors import BudgetError, InputError, SecureFVIWarning
from secure_fvi.key_files import key_path, load_key
from secure_fvi.options import Count, check
from secure_fvi.privacy.accounting import smallest_budget
from secure_fvi.privacy.gate import Charge, Gate
from secure_fvi.privacy.ledger import Job, Ledger, OpenJob, Term
from secure_fvi.privacy.ledger_terms import Budget
from secure_fvi.privacy.noise import NoiseSource
from secure_fvi.privacy.terms import Terms, description
from secure_fvi.privacy.witness import Witness


@dataclass(frozen=True)
class Books:
    """Where a job is charged.

    path: the ledger's file; None stands for one in the folder that the run is kept in, and where it is kept nowhere for
    a count in memory, of this run alone. data_set: the id under which each silo's
    policy knows the population; its budget holds across jobs, and where none was set the job brings its own. job: the
    job's id; a job that goes on after a crash has the same one. block: releases reserved by one durable row, and
    rounds between two checkpoints; a crash loses what is left of a block.
    """

    path: Path | None = None
    data_set: str = "data"
    job: str = "job"
    block: Count = 8

    def __post_init__(self) -> None:
        if isinstance(self.path, str):
            object.__setattr__(self, "path", Path(self.path))
        check(self)


class Guards(NamedTuple):
    """The gates of all silos in this process, with their open jobs where there is a ledger."""

    gates: Mapping[str, Gate]
    jobs: Sequence[OpenJob] = ()
    ledgers: Mapping[str, Ledger] = {}
    path: Path | None = None
    holder: Guards | None = None  # of a party that is no silo and releases too: it holds a private response

    @property
    def last_index(self) -> int:
        """The largest sum index that any silo has charged: a resumed job goes on above it."""
        return max((job.last_index(term.phase) for job in self.jobs for term in job.job.terms), default=-1)

    def released(self, silo: str) -> int:
        """How many answers of `silo` its ledger has reserved: below that no count of questions is drawn from again.
        A sum that a silo keeps to itself comes with an answer."""
        job, phases = dict(zip(self.gates, self.jobs, strict=False)).get(silo), self.gates[silo].phases
        return 0 if job is None else sum(t.count - job.left(t.phase) for t in job.job.terms if t.phase in phases)

    def close(self, outcome: str) -> None:
        for job in self.jobs:
            job.close(outcome)
        if self.path is not None:
            countersign(self.path, self.ledgers)
        for ledger in self.ledgers.values():
            ledger.close()
        if self.holder is not None:
            self.holder.close(outcome)


def strong_enough(aggregation: SecureSum, found: Disclosure) -> SecureSum:
    """The sum, made to refuse fewer survivors than the job's noise counts on, as its disclosure says."""
    if found.exact or found.kind == "plain":
        return aggregation
    least = max(found.at_least, aggregation.min_cohort)  # type: ignore[attr-defined]
    return dataclasses.replace(aggregation, min_cohort=least, max_missing=found.missing)  # type: ignore[type-var]


def build_guards(
    silos: Sequence[str],
    tables: Mapping[str, BlockTable],
    terms: Mapping[str, Terms],
    algorithm: str,
    books: Books,
    noise: NoiseSource,
    rows_of_silos: bool = False,
    going_on: bool = False,
) -> Guards:
    """One gate a silo. Raises BudgetError, and charges nothing, where the budget of any silo does not hold the job.
    rows_of_silos: as the job's disclosure says (see `Gate`). going_on: the job has rounds behind it, which its ledger
    must know of; raises InputError where it does not."""

    def gate(silo: str, charge: Charge | None) -> Gate:
        return Gate(silo, tables, terms, charge, noise, silos=silos, rows_of_silos=rows_of_silos)

    if not terms:
        return Guards({silo: gate(silo, None) for silo in silos})
    if books.path is None:
        return Guards({silo: gate(silo, _in_memory(terms)) for silo in silos})
    job, own_budget = declared_job(books.job, books.data_set, terms, algorithm, noise)
    if going_on and not books.path.exists():
        raise InputError(_unknown(books))
    ledgers = {silo: Ledger.open(books.path, silo, create=not going_on) for silo in silos}
    if going_on and any(books.job not in ledger.chain.jobs for ledger in ledgers.values()):
        raise InputError(_unknown(books))
    countersign(books.path, ledgers)
    for ledger in ledgers.values():
        ledger.check_job(job, default_budget=own_budget)
    jobs = {
        silo: ledger.open_job(job, default_budget=own_budget, block=books.block) for silo, ledger in ledgers.items()
    }
    gates = {silo: gate(silo, jobs[silo].charge) for silo in silos}
    return Guards(gates, tuple(jobs.values()), ledgers, books.path)


def _unknown(books: Books) -> str:
    return (
        f"the ledger '{books.path}' knows nothing of job '{books.job}', which has rounds behind it; resume with the "
        "books that it was charged to, or begin anew in another folder"
    )


def declared_job(
    name: str, data_set: str, terms: Mapping[str, Terms], algorithm: str, noise: NoiseSource, exact_jobs: int = 0
) -> tuple[Job, Budget]:
    """The job as a ledger charges it, and the budget that it brings where the data set has none. exact_jobs: without
    differential privacy that the data set is known to have answered before."""
    declared = tuple(Term(phase, t.event, t.releases) for phase, t in terms.items())
    settings = next(iter(terms.values())).settings
    about = {"algorithm": algorithm, **description(terms, noise), **({"exact_jobs": exact_jobs} if exact_jobs else {})}
    job = Job(name, data_set, settings.unit, settings.delta, declared, about)
    budget = smallest_budget(job)
    if settings.epsilon is not None:
        budget = dataclasses.replace(budget, epsilon=max(budget.epsilon, settings.epsilon))
    return job, budget


def warn_of_large_delta(terms: Mapping[str, Terms], sizes: Mapping[str, int]) -> None:
    """At the silos: a delta of 1 / N or more allows to publish a whole record. The warning gives no size away."""
    for silo, size in sizes.items():
        if any(t.settings.unit == "record" and t.settings.delta * size >= 1 for t in terms.values()):
            delta = next(iter(terms.values())).settings.delta
            warnings.warn(
                f"silo '{silo}': delta = {delta:g} is not below 1 / N, its number of records: such a guarantee allows "
                "to publish whole records; choose a far smaller one",
                SecureFVIWarning,
                stacklevel=4,
            )


def _in_memory(terms: Mapping[str, Terms]) -> Charge:
    left = {phase: t.releases for phase, t in terms.items()}

    def charge(phase: str, index: int) -> None:
        if not left[phase]:
            raise BudgetError(
                f"all {terms[phase].releases} releases of this job are spent; raise retries, or plan for more rounds"
            )
        left[phase] -= 1

    return charge


def silo_secret(derived: Callable[[], bytes], private: bool, noise_key: bytes | None) -> bytes:
    """A silo's sampling secret. Under privacy it never follows from the seed: who knows a batch knows too much."""
    return os.urandom(32) if private and noise_key is None else derived()


# ----
# Silos countersign each other's ledgers when a job starts and when it ends, where one process plays them all
#
# A chain cannot tell by itself that its tail was cut or that it is an old copy; another party that has seen it can. The
# statements and receipts are the bytes that institutions would exchange.

#: Others that countersign a ledger: enough that one of them is honest, few enough to cost nothing.
WITNESSES = 2


def countersign(path: Path, ledgers: Mapping[str, Ledger]) -> None:
    """Have each ledger in the file `path` countersigned by the silos that follow it in the order of their names.

    Raises ProtocolError, before anything is charged if called then, for a ledger that was cut or rolled back.
    """
    names = sorted(ledgers)
    others = {
        name: [names[(i + k) % len(names)] for k in range(1, min(WITNESSES, len(names) - 1) + 1)]
        for i, name in enumerate(names)
    }
    for witness_name in names:
        identity = load_key(key_path(path, witness_name))
        store = SqliteStore(key_path(path, witness_name).with_suffix(".seen"))
        witness = Witness(witness_name, identity, store)
        for name, asked in others.items():
            if witness_name in asked:
                ledger = ledgers[name]
                key = ledger.chain.public_key
                receipt = witness.countersign(ledger.statement(witness.length(key)), key)
                ledger.add_receipt(receipt, identity.public_key)
        store.close()
