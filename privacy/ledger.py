"""The ledger by which a silo enforces its own privacy budget, over all jobs, whoever asks for them.

    ledger = Ledger.open("ledger.sqlite", "hospital-a")      the silo's chain; one file may hold several
    job = ledger.open_job(Job(...))                          charged whole, or refused with BudgetError
    job.charge("gradient", index, digest)                    on disk before the message leaves
    job.close("finished")                                    refunds nothing

Spend before release: a crash may over-count and never under-counts. Several processes may use one file; each write is
one transaction that reads the rows of the others first. Everything in a ledger is public within the federation (terms,
counts, times, digests of messages that left); the signing key is not, and is not in it. docs/ledger.md.

The ledger that enforces and the verifier that checks read rows through `Chain`, so they cannot disagree on what a row
means. Reading checks form, links and counts; whether budgets held is the question of `ledger_account.verify`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import BudgetError, InputError, ProtocolError
from secure_fvi.key_files import create_key, key_path, load_key
from secure_fvi.privacy.accounting import admitted, job_curve, refusal
from secure_fvi.privacy.chain import ChainReader, Row, check_keys
from secure_fvi.privacy.chain_file import Book, ChainFile, follow_rows
from secure_fvi.privacy.ledger_terms import (
    BUDGET,
    CLOSE,
    JOB,
    LEDGER,
    RELEASE,
    Budget,
    Job,
    Term,
    check_name,
    warn_of_large_delta,
)


class BudgetRecord(NamedTuple):
    """A budget as its row set it. seq: of the row, which alone orders rows: many may have the same time."""

    seq: int
    time: int  # microseconds since 1970, UTC
    budget: Budget


@dataclass
class JobRecord:
    """A charged job: what it declared, under which budget, what it released. Times: microseconds since 1970, UTC."""

    job: Job
    budget: Budget
    seq: int
    opened: int
    released: dict[str, int] = field(default_factory=dict)  # by phase; reserved blocks count whole
    last: dict[str, int] = field(default_factory=dict)  # the largest index by phase
    # Of the releases by phase and index, where a row names one.
    digests: dict[tuple[str, int], bytes | None] = field(default_factory=dict, repr=False)
    outcome: str | None = None
    closed: int | None = None


class Chain(ChainReader):
    """One silo's ledger up to its row `length`. Public within the federation."""

    def __init__(self, silo: str) -> None:
        super().__init__(LEDGER, silo)
        self.budgets: dict[str, list[BudgetRecord]] = {}  # by data set, the last in force
        self.jobs: dict[str, JobRecord] = {}

    def budget(self, data_set: str) -> Budget | None:
        """The budget in force."""
        history = self.budgets.get(data_set)
        return history[-1].budget if history else None

    def charged(self, data_set: str) -> list[JobRecord]:
        """The jobs charged to `data_set`, in order."""
        return [r for r in self.jobs.values() if r.job.data_set == data_set]

    def apply(self, row: Row, fields: dict[str, Any]) -> None:
        if row.kind == BUDGET:
            self._budget(row, Budget.from_body(fields))
        elif row.kind == JOB:
            self._job(row, Job.from_body(fields))
        elif row.kind == RELEASE:
            self._release(fields)
        elif row.kind == CLOSE:
            check_keys(fields, "job", "outcome")
            record = self._record(fields)
            record.outcome, record.closed = str(fields["outcome"]), row.time
        else:
            raise InputError(f"its kind '{row.kind}' is unknown to this version; a newer one may have written it")

    def _budget(self, row: Row, budget: Budget) -> None:
        before = self.budget(budget.data_set)
        if before is not None and before.unit != budget.unit:
            raise ProtocolError(f"it changes the unit of data set '{budget.data_set}'")
        self.budgets.setdefault(budget.data_set, []).append(BudgetRecord(row.seq, row.time, budget))

    def _job(self, row: Row, job: Job) -> None:
        budget = self.budget(job.data_set)
        if budget is None or budget.unit != job.unit:
            raise ProtocolError(f"job '{job.job}' has no budget of its unit")
        if job.job in self.jobs:
            raise ProtocolError(f"job '{job.job}' is charged twice")
        self.jobs[job.job] = JobRecord(job, budget, row.seq, row.time)

    def _release(self, fields: dict[str, Any]) -> None:
        check_keys(fields, "job", "phase", "index", "digest", "count")
        record = self._record(fields)
        phase, index, digest, count = (fields[name] for name in ("phase", "index", "digest", "count"))
        declared = record.job.term(phase).count
        if type(index) is not int or index < 0 or type(count) is not int or count < 1:
            raise ProtocolError("a release has an index of at least 0 and a count of at least 1")
        if digest is not None and type(digest) is not bytes:
            raise ProtocolError("a digest is bytes")
        if index <= record.last.get(phase, -1):
            raise ProtocolError(f"index {index} of '{phase}' is not above the one before")
        if record.released.get(phase, 0) + count > declared:
            raise ProtocolError(f"job '{record.job.job}' released '{phase}' more often than the {declared} declared")
        record.released[phase] = record.released.get(phase, 0) + count
        record.last[phase] = index
        record.digests[phase, index] = digest

    def _record(self, fields: dict[str, Any]) -> JobRecord:
        name = fields["job"]
        record = self.jobs.get(name) if isinstance(name, str) else None
        if record is None:
            raise ProtocolError("it speaks of a job that was not charged")
        return record


def read_ledger(path: str | os.PathLike[str], silo: str | None = None) -> dict[str, Chain]:
    """The chains in the file, or that of `silo`, by silo id; links and newest signatures are checked.

    Raises InputError where there is none, ProtocolError for one that was tampered with.
    """
    file = ChainFile(Path(path), LEDGER, read_only=True)
    try:
        chains = {s: Chain(s) for s in (file.silos() if silo is None else [silo])}
        for chain in chains.values():
            follow_rows(file, chain)
    finally:
        file.close()
    if not chains or any(not c.length for c in chains.values()):
        raise InputError(f"'{path}' holds no ledger" + (f" of silo '{silo}'" if silo is not None else ""))
    return chains


# ---- Budgets enforced ----

__all__ = ["Budget", "Job", "Ledger", "OpenJob", "Term"]


class Ledger(Book[Chain]):
    """One silo's chain in a ledger file. Made by `open`."""

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        silo: str,
        identity: Identity | Callable[[bytes], Identity] | None = None,
        *,
        create: bool = False,
        passphrase: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Ledger:
        """The chain of `silo` in the file `path`.

        identity: the silo's signing key, or a function to it from the public key that the chain began with (b"" for a
        new one); by default the one in `key_files.key_path(path, silo)`, opened with `passphrase` or
        SECURE_FVI_PASSPHRASE. create: make file, key and chain where they are missing. clock: seconds
        since 1970. Raises InputError for a missing chain, a chain of another key or a file that is no ledger, and
        ProtocolError for a chain that was tampered with.
        """
        check_name("silo", silo)

        def beside(begun: bytes) -> Identity:
            file = key_path(path, silo)
            return load_key(file, passphrase) if begun else create_key(file, passphrase, unsealed=True)

        missing = f"'{path}' holds no ledger of silo '{silo}'; `secure-fvi budget set` makes one"
        return cls.opened(
            path, Chain(silo), beside if identity is None else identity, missing, create=create, clock=clock
        )

    def set_budget(self, budget: Budget, records: int | None = None) -> None:
        """Set, raise or lower what a data set may spend. What was spent stays spent; the unit cannot change.

        records: size of the population, if known; a delta of 1 / records or more is warned about.
        """
        if records is not None and budget.unit == "record":
            warn_of_large_delta(budget.delta, records)
        with self._transaction():
            before = self._chain.budget(budget.data_set)
            if before is not None and before.unit != budget.unit:
                raise InputError(
                    f"the unit of data set '{budget.data_set}' is '{before.unit}' and cannot become '{budget.unit}'"
                )
            if before != budget:
                self._append(BUDGET, budget.to_body())

    def open_job(self, job: Job, *, default_budget: Budget | None = None, block: int = 1) -> OpenJob:
        """Charge the whole of `job`, at the most that it declared, or go on with it if it is charged already.

        default_budget: set first where the data set has none (a simulation, whose jobs bring their own). block:
        releases reserved by one write; a crash loses what is left of a block.
        Raises BudgetError when it does not fit or the site has set no budget, and writes nothing then; InputError when
        the id was used with other terms or the data set counts another unit.
        """
        check_block(block)
        with self._asking(job):
            budget = self._admit(job, default_budget)
            if budget is not None:
                if self._chain.budget(job.data_set) is None:
                    self._append(BUDGET, budget.to_body())
                self._append(JOB, job.to_body())
        return OpenJob(self, self._chain.jobs[job.job], block)

    def check_job(self, job: Job, *, default_budget: Budget | None = None) -> None:
        """Raise what `open_job` would raise by now, and write nothing: to ask all silos before one is charged."""
        with self._asking(job):
            self._admit(job, default_budget)

    def _admit(self, job: Job, default_budget: Budget | None) -> Budget | None:
        """The budget under which `job` fits; None for a job that is charged already."""
        if default_budget is not None and default_budget.data_set != job.data_set:
            raise InputError(f"default_budget is for data set '{default_budget.data_set}', the job on '{job.data_set}'")
        chain = self._chain
        record = chain.jobs.get(job.job)
        if record is not None:
            changed = record.job.difference(job)
            if changed is not None:
                raise InputError(
                    f"job '{job.job}' was charged with another '{changed}'; give a new job a new id, "
                    "or resume with the settings that it had"
                )
            return None
        budget = chain.budget(job.data_set) or default_budget
        if budget is None:
            raise BudgetError(
                f"silo '{chain.silo}' has set no budget for data set '{job.data_set}'; set one with "
                f"`secure-fvi budget set {self._file.path} --silo {chain.silo} --data-set {job.data_set} "
                f"--epsilon E --delta D --unit {job.unit}`"
            )
        if budget.unit != job.unit:
            raise InputError(
                f"job '{job.job}' protects the unit '{job.unit}', the budget of data set '{job.data_set}' counts "
                f"'{budget.unit}'"
            )
        charged = [r.job for r in chain.charged(job.data_set)]
        asked = job_curve(job)
        if not admitted(budget, charged, asked):
            raise _DoesNotFitError(budget, charged)
        return budget

    @contextmanager
    def _asking(self, job: Job) -> Iterator[None]:
        """A transaction about `job`. Curves, and what would still fit, are worked out while others may write."""
        if job.job not in self.chain.jobs:
            job_curve(job)
        try:
            with self._transaction():
                yield
        except _DoesNotFitError as error:
            text = refusal(error.budget, error.charged, job)
            raise BudgetError(f"silo '{self._chain.silo}' refuses: {text}") from None


class _DoesNotFitError(Exception):
    def __init__(self, budget: Budget, charged: list[Job]) -> None:
        self.budget, self.charged = budget, charged


# ---- A charged job, from which releases are taken one by one or in blocks ----

MAX_BLOCK = 1_000_000


def check_block(block: object) -> None:
    """Raises InputError for a block of releases of no usable length."""
    if type(block) is not int or not 1 <= block <= MAX_BLOCK:
        raise InputError(f"block must lie in 1..{MAX_BLOCK} releases, not {block!r}")


class OpenJob:
    """Made by `Ledger.open_job`. block: releases that one durable row reserves; a crash loses the rest of a block."""

    def __init__(self, ledger: Ledger, record: JobRecord, block: int) -> None:
        self._ledger, self._record, self._block = ledger, record, block
        # Of the blocks that this process reserved: what is left, the largest index, and what was sent, by phase.
        self._left: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._sent: dict[tuple[str, int], bytes] = {}

    def __repr__(self) -> str:
        return f"OpenJob({self.job.job!r}, data_set={self.job.data_set!r})"

    @property
    def job(self) -> Job:
        return self._record.job

    def charge(self, phase: str, index: int, digest: bytes | None = None) -> None:
        """Count the release of `phase` in secure sum number `index`: on disk when this returns, before it leaves.

        Indices ascend within a phase. digest: of the bytes that leave (1 to 64 bytes); a retry of the same index with
        the same digest is free. Raises ProtocolError for an index used with other bytes or out of order,
        BudgetError beyond the declared count. Nothing may leave after an error.
        """
        if type(index) is not int or not 0 <= index < 2**63:
            raise InputError(f"the index of a release must be a whole number of at least 0, not {index!r}")
        if digest is not None and not (type(digest) is bytes and 1 <= len(digest) <= 64):
            raise InputError("the digest of a release must be 1 to 64 bytes")
        self.job.term(phase)
        self._ledger._check_usable()
        if self._is_retry(phase, index, digest):
            return
        if not self._left.get(phase):
            self._left[phase] = self._reserve(phase, index, digest)
            if not self._left[phase]:
                return
        self._left[phase] -= 1
        self._last[phase] = index
        if digest is not None:
            self._sent[phase, index] = digest

    def paid_for(self, phase: str, digest: bytes) -> bool:
        """Whether bytes of this digest were charged as a release of `phase`, in whatever sum."""
        return any(one == digest for (name, _), one in {**self._record.digests, **self._sent}.items() if name == phase)

    def left(self, phase: str) -> int:
        """How many releases of `phase` can still be charged, the unused ones of this process' blocks included."""
        return self.job.term(phase).count - self._record.released.get(phase, 0) + self._left.get(phase, 0)

    def last_index(self, phase: str) -> int:
        """The largest index known to be charged, -1 before the first: new releases need larger ones."""
        return max(self._last.get(phase, -1), self._record.last.get(phase, -1))

    def close(self, outcome: str) -> None:
        """Write down how the job ended. Refunds nothing; a job that is resumed later may use what it has left."""
        check_name("outcome", outcome)
        with self._ledger._transaction():
            self._ledger._append(CLOSE, {"job": self.job.job, "outcome": outcome})

    def _reserve(self, phase: str, index: int, digest: bytes | None) -> int:
        """Reserve a block from `index` on, durably; how many. 0 if another process just sent the same bytes."""
        with self._ledger._transaction():
            if self._is_retry(phase, index, digest):
                return 0
            declared, released = self.job.term(phase).count, self._record.released.get(phase, 0)
            if released >= declared:
                raise BudgetError(
                    f"job '{self.job.job}' declared {declared} releases of '{phase}', and all of them are used; "
                    "release no more, or open another job"
                )
            count = min(self._block, declared - released)
            body = {"job": self.job.job, "phase": phase, "index": index, "digest": digest, "count": count}
            self._ledger._append(RELEASE, body)
        return count

    def _is_retry(self, phase: str, index: int, digest: bytes | None) -> bool:
        before = self._sent.get((phase, index), self._record.digests.get((phase, index)))
        if before is not None and before == digest:
            return True
        last = self.last_index(phase)
        if before is not None or index <= last:
            raise ProtocolError(
                f"job '{self.job.job}': release {index} of '{phase}' was charged already"
                + (", for other bytes" if before is not None and digest is not None else "")
                + f"; a new release needs an index above {last}, a retry the same bytes"
            )
        return False
