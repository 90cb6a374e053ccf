"""A charged job, from which releases are taken one by one or in blocks."""

from __future__ import annotations

from secure_fvi.errors import BudgetError, InputError, ProtocolError
from secure_fvi.privacy.chain_writer import Writer
from secure_fvi.privacy.ledger_chain import CLOSE, RELEASE
from secure_fvi.privacy.ledger_state import Chain, JobRecord
from secure_fvi.privacy.ledger_terms import Job, check_name

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
