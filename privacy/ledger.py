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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import BudgetError, InputError
from secure_fvi.privacy.accounting import admitted, job_curve, refusal
from secure_fvi.privacy.chain_writer import Writer
from secure_fvi.privacy.ledger_chain import BUDGET, JOB
from secure_fvi.privacy.ledger_job import OpenJob, check_block
from secure_fvi.privacy.ledger_keys import create_key, key_path, load_key
from secure_fvi.privacy.ledger_state import Chain
from secure_fvi.privacy.ledger_terms import Budget, Job, Term, check_name, warn_of_large_delta

__all__ = ["Budget", "Job", "Ledger", "OpenJob", "Term"]


class Ledger:
    """One silo's chain in a ledger file. Made by `open`; for one thread at a time."""

    def __init__(self, writer: Writer[Chain]) -> None:
        self._writer = writer

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

        identity: the silo's signing key; by default the one in `ledger_keys.key_path(path, silo)`, opened with
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

    def __repr__(self) -> str:
        return f"Ledger({str(self._writer.file.path)!r}, {self._writer.chain!r})"

    @property
    def chain(self) -> Chain:
        """What the chain says by now, the rows of other processes included. For reading only."""
        self._writer.catch_up()
        return self._writer.chain

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

    def statement(self, since: int = 0) -> bytes:
        """What a witness countersigns: `Writer.statement`."""
        return self._writer.statement(since)

    def add_receipt(self, receipt: bytes, witness_key: bytes) -> None:
        """Keep a witness's receipt: `Writer.add_receipt`."""
        self._writer.add_receipt(receipt, witness_key)

    def check_receipts(self, receipts: Iterable[bytes], witness_keys: Iterable[bytes]) -> None:
        """Refuse all writes if a receipt shows rows that this ledger does not have: `Writer.check_receipts`."""
        self._writer.check_receipts(receipts, witness_keys)

    def close(self) -> None:
        """Let go of the file; what was written stays."""
        self._writer.file.close()

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
