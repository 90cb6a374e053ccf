"""What a chain says: its rows, read one after the other, as budgets, jobs and counts of releases.

Both the ledger that enforces and the verifier that checks read rows through here, so they cannot disagree on what a row
means. Reading checks form, links and counts; whether budgets held is `ledger_verify`'s question, since it
needs the accountant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.chain import ChainReader, Row, check_keys
from secure_fvi.privacy.chain_file import ChainFile, follow_rows
from secure_fvi.privacy.ledger_terms import BUDGET, CLOSE, JOB, LEDGER, RELEASE, Budget, Job


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


def read_chain(file: ChainFile, silo: str) -> Chain:
    """The ledger of `silo`, checked by links and the newest signature; of length 0 where there is none."""
    chain = Chain(silo)
    follow_rows(file, chain)
    return chain
