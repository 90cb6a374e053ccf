"""What the rows of a paper trail say, read one after the other. Writer and verifier read through here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.chain import ChainKind, ChainReader, Row, check_keys

TRAIL = ChainKind(
    name="audit-log",
    remedy="a site begins one with its first job",
    on_failure="what is not written down may not leave",
    otherwise="rotate the identity and begin a new log under it",
    each_signed=False,
)
ROSTER, POLICY, JOB, EXCHANGE, NOTE, CLOSE = "roster", "policy", "job", "exchange", "note", "close"
#: What a server left out of a sum. A version that does not know such rows says so, and reads no log with them.
OMISSION = "omission"
DAY = 86_400_000_000  # microseconds


class Seen(NamedTuple):
    """A message by its size in bytes and its SHA-256."""

    size: int
    digest: bytes


class Exchanged(NamedTuple):
    """One exchange as a log has it."""

    job: str
    peer: str
    step: str
    received: Seen | None
    sent: Seen | None
    release: str


@dataclass
class JobRecord:
    """A job in a log. Bytes are of messages; exchanges counts those of all peers."""

    job: str
    accepted: bool
    fields: Mapping[str, Any] = field(repr=False)
    exchanges: int = 0
    releases: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    omissions: dict[str, int] = field(default_factory=dict)  # rows by kind
    outcome: str | None = None


class TrailChain(ChainReader):
    """One party's log up to its row `length`."""

    def __init__(self, party: str) -> None:
        super().__init__(TRAIL, party)
        self.jobs: dict[str, JobRecord] = {}
        self.roster: bytes | None = None
        self.policy: bytes | None = None
        self.last: Exchanged | None = None  # of the newest row, where it is an exchange
        self._asked: tuple[int, int] = (0, 0)  # a day since 1970, its rows of jobs and notes

    def apply(self, row: Row, fields: dict[str, Any]) -> None:
        self.last = None
        if row.kind in (JOB, NOTE):
            self._asked = (row.time // DAY, self.asked(row.time) + 1)
        if row.kind == EXCHANGE:
            self._exchange(read_exchange(fields))
        elif row.kind == ROSTER:
            check_keys(fields, "serial", "roster")
            self.roster = _bytes(fields["roster"])
        elif row.kind == POLICY:
            check_keys(fields, "policy")
            self.policy = _bytes(fields["policy"])
        elif row.kind == JOB:
            check_keys(fields, *JOB_FIELDS)
            # A job that goes on after a crash is offered again.
            record = self.jobs.setdefault(str(fields["job"]), JobRecord(str(fields["job"]), False, fields))
            record.accepted, record.fields = fields["accepted"] is True, fields
        elif row.kind == NOTE:
            check_keys(fields, "job", "what")
        elif row.kind == OMISSION:
            check_keys(fields, "job", "kind", "what")
            omitted = self.check_known(fields["job"]).omissions
            omitted[str(fields["kind"])] = omitted.get(str(fields["kind"]), 0) + 1
        elif row.kind == CLOSE:
            check_keys(fields, "job", "outcome")
            self.check_known(fields["job"]).outcome = str(fields["outcome"])
        else:
            raise InputError(f"its kind '{row.kind}' is unknown to this version; a newer one may have written it")

    def asked(self, time: int) -> int:
        """Rows of jobs and notes on the day of `time` (microseconds since 1970, UTC)."""
        day, count = self._asked
        return count if day == time // DAY else 0

    def _exchange(self, e: Exchanged) -> None:
        record = self.check_open(e.job)
        record.exchanges += 1
        record.releases += bool(e.release)
        record.bytes_received += e.received.size if e.received else 0
        record.bytes_sent += e.sent.size if e.sent else 0
        self.last = e

    def check_open(self, job: object) -> JobRecord:
        """The record of a job that may exchange messages; raises ProtocolError for one that was not accepted."""
        record = self.check_known(job)
        if not record.accepted:
            raise ProtocolError(f"an exchange of job '{record.job}', which was refused")
        return record

    def check_known(self, job: object) -> JobRecord:
        """The record of a job; raises ProtocolError for one that was never decided on."""
        found = self.jobs.get(job) if isinstance(job, str) else None
        if found is None:
            raise ProtocolError("it speaks of a job that was not decided on")
        return found


JOB_FIELDS = (
    "job", "offer", "roster", "model", "policy", "accepted", "reason", "data_set", "epsilon", "delta",
)  # fmt: skip


def read_exchange(fields: dict[str, Any]) -> Exchanged:
    """An exchange from a row's content. Raises ProtocolError or InputError where it is none."""
    check_keys(fields, "job", "peer", "step", "received", "sent", "release")
    for name in ("job", "peer", "step", "release"):
        if type(fields[name]) is not str:
            raise ProtocolError(f"'{name}' must be text")
    return Exchanged(
        fields["job"],
        fields["peer"],
        fields["step"],
        _seen(fields["received"]),
        _seen(fields["sent"]),
        fields["release"],
    )


def _seen(value: object) -> Seen | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or type(value[0]) is not int or value[0] < 0:
        raise ProtocolError("a message is its size and its digest")
    return Seen(value[0], _bytes(value[1]))


def _bytes(value: object) -> bytes:
    if type(value) is not bytes or len(value) != 32:
        raise ProtocolError("a digest has 32 bytes")
    return value
