"""Gates for the silos of a job: its terms agreed, its whole cost checked against every silo's ledger, its sum strong
enough for the noise that it carries."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from secure_fvi.aggregation.base import SecureSum
from secure_fvi.disclosure import Disclosure
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.privacy.accounting import smallest_budget
from secure_fvi.privacy.gate import Gate
from secure_fvi.privacy.ledger import Job, Ledger, OpenJob, Term
from secure_fvi.privacy.ledger_terms import Budget
from secure_fvi.privacy.noise import NoiseSource
from secure_fvi.privacy.terms import Terms, description


class Guards(NamedTuple):
    """The gates of all silos in this process, with their open jobs where there is a ledger."""

    gates: Mapping[str, Gate]
    jobs: Sequence[OpenJob] = ()
    ledgers: Mapping[str, Ledger] = {}
    at_end: Callable[[], None] | None = None  # what becomes of ledgers that this process keeps for all
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
        if self.at_end is not None:
            self.at_end()
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


def silo_secret(derived: Callable[[], bytes], private: bool, noise_key: bytes | None) -> bytes:
    """A silo's sampling secret. Under privacy it never follows from the seed: who knows a batch knows too much."""
    return os.urandom(32) if private and noise_key is None else derived()
