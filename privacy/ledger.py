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
from pathlib import Path
from typing import Any

from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import BudgetError, InputError, ProtocolError
from secure_fvi.privacy.ledger_chain import (
    BUDGET,
    CLOSE,
    GENESIS,
    JOB,
    NOTHING,
    RECEIPT,
    RELEASE,
    LedgerFile,
    make_row,
    timestamp,
)
from secure_fvi.privacy.ledger_keys import create_key, key_path, load_key
from secure_fvi.privacy.ledger_state import Chain, JobRecord, follow_rows, read_chain
from secure_fvi.privacy.ledger_terms import Budget, Job, Term, check_name
from secure_fvi.privacy.witness import check_receipt, make_statement

__all__ = ["Budget", "Job", "Ledger", "OpenJob", "Term"]

#: A clock that was set back by this much (a step of NTP) is waited out: rows keep the time of the row before.
TOLERANCE_SECONDS = 300.0
MAX_BLOCK = 1_000_000


class Ledger:
    """One silo's chain in a ledger file. Made by `open`; not for use by several threads at once."""

    def __init__(self, file: LedgerFile, chain: Chain, identity: Identity, clock: Callable[[], float]) -> None:
        self._file, self._chain, self._identity, self._clock = file, chain, identity, clock
        self._rolled_back = False

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
        file = LedgerFile(Path(path), create)
        try:
            chain = read_chain(file, silo)
            if not (chain.length or create):
                raise InputError(f"'{path}' holds no ledger of silo '{silo}'; `secure-fvi budget set` makes one")
            if identity is None:
                make = load_key if chain.length else create_key
                identity = make(key_path(path, silo), passphrase)
            ledger = cls(file, chain, identity, clock)
            ledger._begin()
        except BaseException:
            file.close()
            raise
        return ledger

    def __repr__(self) -> str:
        return f"Ledger({str(self._file.path)!r}, {self._chain!r})"

    @property
    def chain(self) -> Chain:
        """What the chain says by now, the rows of other processes included. For reading only."""
        self._catch_up()
        return self._chain

    def set_budget(self, budget: Budget) -> None:
        """Set, raise or lower what a data set may spend. What was spent stays spent; the unit cannot change."""
        with self._writing():
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
        if type(block) is not int or not 1 <= block <= MAX_BLOCK:
            raise InputError(f"block must lie in 1..{MAX_BLOCK} releases, not {block!r}")
        if default_budget is not None and default_budget.data_set != job.data_set:
            raise InputError(f"default_budget is for data set '{default_budget.data_set}', the job on '{job.data_set}'")
        with self._writing():
            record = self._chain.jobs.get(job.job)
            if record is not None:
                changed = record.job.difference(job)
                if changed is not None:
                    raise InputError(
                        f"job '{job.job}' was charged with another '{changed}'; give a new job a new id, "
                        "or resume with the settings that it had"
                    )
            else:
                self._charge_whole(job, default_budget)
        return OpenJob(self, self._chain.jobs[job.job], block)

    def statement(self, since: int = 0) -> bytes:
        """The signed length and head of this ledger, with the proof that it continues its first `since` rows.

        For a witness, which says by `Witness.length` since where; all parties may see it.
        """
        self._catch_up()
        c = self._chain
        links = [row.content(c.silo) for row in self._file.rows(c.silo, since, c.length)]
        return make_statement(c.silo, c.public_key, c.length, c.head, self._now(), since, links, self._identity.sign)

    def add_receipt(self, receipt: bytes, witness_key: bytes) -> None:
        """Keep a witness's receipt as a row. Raises ProtocolError if it is forged or shows more than this ledger."""
        self.check_receipts([receipt], {witness_key})
        with self._writing():
            self._append(RECEIPT, {"receipt": receipt})

    def check_receipts(self, receipts: Iterable[bytes], witness_keys: Iterable[bytes]) -> None:
        """Raise ProtocolError and refuse all further writes if a receipt shows rows that this ledger does not have.

        witness_keys: the public keys that the site accepts; a receipt by any other is refused as forged, which
        leaves the ledger usable.
        """
        self._catch_up()
        keys = frozenset(witness_keys)
        for data in receipts:
            receipt = check_receipt(data, keys)
            if receipt.public_key != self._chain.public_key:
                raise ProtocolError(f"a receipt of witness '{receipt.witness}' is about another ledger")
            if self._hash_at(receipt.length) != receipt.head:
                self._rolled_back = True
                self._check_usable()

    def close(self) -> None:
        """Let go of the file; what was written stays."""
        self._file.close()

    # What an open job needs.

    def _reserve(self, job: OpenJob, phase: str, index: int, digest: bytes | None) -> int:
        """Reserve a block of releases from `index` on, durably; how many. 0 if another process sent the same bytes."""
        with self._writing():
            if job._is_retry(phase, index, digest):
                return 0
            name, declared = job.job.job, job.job.term(phase).count
            released = self._chain.jobs[name].released.get(phase, 0)
            if released >= declared:
                raise BudgetError(
                    f"job '{name}' declared {declared} releases of '{phase}', and all of them are used; release no "
                    "more, or open another job"
                )
            count = min(job._block, declared - released)
            body = {"job": name, "phase": phase, "index": index, "digest": digest, "count": count}
            self._append(RELEASE, body)
        return count

    def _close_job(self, name: str, outcome: str) -> None:
        with self._writing():
            self._append(CLOSE, {"job": name, "outcome": outcome})

    # Rows.

    def _begin(self) -> None:
        if not self._chain.length:
            with self._writing():
                if not self._chain.length:  # no other process was faster
                    body = {"silo": self._chain.silo, "public_key": self._identity.public_key}
                    self._append(GENESIS, body)
        if self._chain.public_key != self._identity.public_key:
            raise InputError(
                f"'{self._file.path}' holds a ledger of another silo: the chain of '{self._chain.silo}' was created "
                "with another key"
            )

    def _charge_whole(self, job: Job, default_budget: Budget | None) -> None:
        from secure_fvi.privacy.ledger_filter import filter_of, job_curve, refusal

        budget = self._chain.budget(job.data_set) or default_budget
        if budget is None:
            raise BudgetError(
                f"silo '{self._chain.silo}' has set no budget for data set '{job.data_set}'; set one with "
                f"`secure-fvi budget set {self._file.path} --silo {self._chain.silo} --data-set {job.data_set} "
                f"--epsilon E --delta D --unit {job.unit}`"
            )
        if budget.unit != job.unit:
            raise InputError(
                f"job '{job.job}' protects the unit '{job.unit}', the budget of data set '{job.data_set}' counts "
                f"'{budget.unit}'"
            )
        charged = [r.job for r in self._chain.charged(job.data_set)]
        asked = job_curve(job)
        if filter_of(budget, charged, asked).order_for(asked) is None:
            raise BudgetError(f"silo '{self._chain.silo}' refuses: {refusal(budget, charged, job)}")
        if self._chain.budget(job.data_set) is None:
            self._append(BUDGET, budget.to_body())
        self._append(JOB, job.to_body())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction that starts from the newest rows; what is appended is on disk when it ends, or nothing is."""
        self._check_usable()
        with self._file.transaction():
            self._catch_up()
            if self._file.tail(self._chain.silo)[:2] != (self._chain.length, self._chain.head):
                raise ProtocolError(f"ledger of silo '{self._chain.silo}': rows vanished from under a running process")
            yield
        self._catch_up()

    def _append(self, kind: str, body: dict[str, Any]) -> None:
        seq, previous, _ = self._file.tail(self._chain.silo)
        row = make_row(self._chain.silo, seq + 1, previous, self._now(), kind, body, self._identity.sign)
        self._file.append(self._chain.silo, row)

    def _catch_up(self) -> None:
        follow_rows(self._file, self._chain)

    def _hash_at(self, length: int) -> bytes | None:
        if length == 0:
            return NOTHING
        return next((row.hash for row in self._file.rows(self._chain.silo, length - 1, length)), None)

    def _now(self) -> int:
        """Microseconds since 1970, never before the newest row. Raises InputError for a clock that was set back."""
        now, last = int(self._clock() * 1e6), self._chain.time
        if now < last - TOLERANCE_SECONDS * 1e6:
            raise InputError(
                f"the clock runs backwards: it reads {timestamp(now)}, the newest row of the ledger of silo "
                f"'{self._chain.silo}' is of {timestamp(last)}; set the clock right"
            )
        return max(now, last)

    def _check_usable(self) -> None:
        if self._rolled_back:
            raise ProtocolError(
                f"the ledger of silo '{self._chain.silo}' was rolled back: a witness has seen rows that it does not "
                "hold; restore the newest copy, or count the budget as spent"
            )


class OpenJob:
    """A charged job, from which releases are taken. Made by `Ledger.open_job`."""

    def __init__(self, ledger: Ledger, record: JobRecord, block: int) -> None:
        self.job = record.job
        self._ledger, self._record, self._block = ledger, record, block
        # Of the blocks that this process reserved: what is left, the largest index, and what was sent, by phase.
        self._left: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._sent: dict[tuple[str, int], bytes] = {}

    def __repr__(self) -> str:
        return f"OpenJob({self.job.job!r}, data_set={self.job.data_set!r})"

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
            self._left[phase] = self._ledger._reserve(self, phase, index, digest)
            if not self._left[phase]:  # another process of this job sent the same bytes meanwhile
                return
        self._left[phase] -= 1
        self._last[phase] = index
        if digest is not None:
            self._sent[phase, index] = digest

    def close(self, outcome: str) -> None:
        """Write down how the job ended. Refunds nothing; a job that is resumed later may use what it has left."""
        self._ledger._close_job(self.job.job, check_name("outcome", outcome))

    def _is_retry(self, phase: str, index: int, digest: bytes | None) -> bool:
        before = self._sent.get((phase, index), self._record.digests.get((phase, index)))
        if before is not None and before == digest:
            return True
        last = max(self._last.get(phase, -1), self._record.last.get(phase, -1))
        if before is not None or index <= last:
            raise ProtocolError(
                f"job '{self.job.job}': release {index} of '{phase}' was charged already"
                + (", for other bytes" if before is not None and digest is not None else "")
                + f"; a new release needs an index above {last}, a retry the same bytes"
            )
        return False
