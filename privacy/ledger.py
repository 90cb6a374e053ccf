"""The ledger by which a silo enforces its own privacy budget, over all jobs, whoever asks for them.

    ledger = Ledger.open("ledger.sqlite", "hospital-a")      the silo's chain; one file may hold several
    job = ledger.open_job(Job(...))                          charged whole, or refused with BudgetError
    job.charge("gradient", index, digest)                    on disk before the message leaves
    job.close("finished")                                    refunds nothing

Spend before release: a crash may over-count and never under-counts. Several processes may use one file; each write is
one transaction that reads the rows of the others first. Everything in a ledger is public within the federation (terms,
counts, times, digests of messages that left); the signing key is not, and is not in it. docs/ledger.md.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import BudgetError, InputError, ProtocolError
from secure_fvi.key_files import create_key, key_path, load_key
from secure_fvi.privacy.accounting import admitted, job_curve, refusal
from secure_fvi.privacy.chain_file import Book, Writer
from secure_fvi.privacy.ledger_state import Chain, JobRecord
from secure_fvi.privacy.ledger_terms import (
    BUDGET,
    CLOSE,
    JOB,
    RELEASE,
    Budget,
    Job,
    Term,
    check_name,
    warn_of_large_delta,
)

__all__ = ["Budget", "Job", "Ledger", "OpenJob", "Term"]


class Ledger(Book[Chain]):
    """One silo's chain in a ledger file. Made by `open`."""

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        silo: str,
        identity: Identity | None = None,
        *,
        create: bool = False,
        passphrase: str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> Ledger:
        """The chain of `silo` in the file `path`.

        identity: the silo's signing key; by default the one in `key_files.key_path(path, silo)`, opened with
        `passphrase` or SECURE_FVI_PASSPHRASE. create: make file, key and chain where they are missing. clock: seconds
        since 1970. Raises InputError for a missing chain, a chain of another key or a file that is no ledger, and
        ProtocolError for a chain that was tampered with.
        """
        check_name("silo", silo)

        def signer(begun: bytes) -> Identity:
            file = key_path(path, silo)
            return identity or (load_key(file, passphrase) if begun else create_key(file, passphrase, unsealed=True))

        missing = f"'{path}' holds no ledger of silo '{silo}'; `secure-fvi budget set` makes one"
        return cls(Writer.open(path, Chain(silo), signer, missing, create=create, clock=clock))

    def set_budget(self, budget: Budget, records: int | None = None) -> None:
        """Set, raise or lower what a data set may spend. What was spent stays spent; the unit cannot change.

        records: size of the population, if known; a delta of 1 / records or more is warned about.
        """
        if records is not None and budget.unit == "record":
            warn_of_large_delta(budget.delta, records)
        with self._writer.transaction():
            before = self._writer.chain.budget(budget.data_set)
            if before is not None and before.unit != budget.unit:
                raise InputError(
                    f"the unit of data set '{budget.data_set}' is '{before.unit}' and cannot become '{budget.unit}'"
                )
            if before != budget:
                self._writer.append(BUDGET, budget.to_body())

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
                if self._writer.chain.budget(job.data_set) is None:
                    self._writer.append(BUDGET, budget.to_body())
                self._writer.append(JOB, job.to_body())
        return OpenJob(self._writer, self._writer.chain.jobs[job.job], block)

    def check_job(self, job: Job, *, default_budget: Budget | None = None) -> None:
        """Raise what `open_job` would raise by now, and write nothing: to ask all silos before one is charged."""
        with self._asking(job):
            self._admit(job, default_budget)

    def _admit(self, job: Job, default_budget: Budget | None) -> Budget | None:
        """The budget under which `job` fits; None for a job that is charged already."""
        if default_budget is not None and default_budget.data_set != job.data_set:
            raise InputError(f"default_budget is for data set '{default_budget.data_set}', the job on '{job.data_set}'")
        chain = self._writer.chain
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
                f"`secure-fvi budget set {self._writer.file.path} --silo {chain.silo} --data-set {job.data_set} "
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
            with self._writer.transaction():
                yield
        except _DoesNotFitError as error:
            text = refusal(error.budget, error.charged, job)
            raise BudgetError(f"silo '{self._writer.chain.silo}' refuses: {text}") from None


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

    def __init__(self, writer: Writer[Chain], record: JobRecord, block: int) -> None:
        self._writer, self._record, self._block = writer, record, block
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
        self._writer.check_usable()
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
        with self._writer.transaction():
            self._writer.append(CLOSE, {"job": self.job.job, "outcome": outcome})

    def _reserve(self, phase: str, index: int, digest: bytes | None) -> int:
        """Reserve a block from `index` on, durably; how many. 0 if another process just sent the same bytes."""
        with self._writer.transaction():
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
            self._writer.append(RELEASE, body)
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
