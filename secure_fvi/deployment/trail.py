"""The paper trail of a site: what it was asked, what left, under which roster, policy and job.

A chain of signed rows in `audit-log.sqlite`, built as the privacy ledger's: append-only, each row hashed over the one
before, the head countersigned by other members. It holds names, times, sizes and SHA-256 digests, never a message.

Every row is written before the answer leaves, and a server's before it asks as well, so that a killed process has no
gap. The last row of a write is signed, and answers for those before it. A row of an exchange is forced to the disk with
a later one, at the latest after `SYNC_ROWS` rows, `SYNC_SECONDS` or the job's end: a loss of power can cost that many
rows of evidence (never of privacy: the ledger forces its own). All other rows are forced at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import HomeError, InputError, ProtocolError, SecureFVIError
from secure_fvi.privacy.chain import ChainKind, ChainReader, Row, check_keys
from secure_fvi.privacy.chain_file import Book, ChainFile

SYNC_ROWS, SYNC_SECONDS = 100, 1.0
#: Rows a day, of jobs and notes together, that a server can make by asking: it does not fill a site's disk.
MOST_ASKED = 1000


class Exchange(NamedTuple):
    """One message in, one out, with one peer; None where there was none: of a server's question before it goes out, by
    a row that another follows once it is answered.

    step: of the protocol, for readers, such as "Contribution".
    release: what the ledger charged for what left ("gradient 17"), or nothing.
    """

    peer: str
    step: str
    received: bytes | None
    sent: bytes | None
    release: str = ""


@dataclass(frozen=True)
class JobEntry:
    """A job as it was decided on. Digests of 32 bytes; reason: of a refusal; epsilon: what the ledger charged."""

    job: str
    offer: bytes
    roster: bytes
    model: bytes
    policy: bytes
    accepted: bool
    reason: str = ""
    data_set: str = ""
    epsilon: float | None = None
    delta: float | None = None


class Trail(Book["TrailChain"]):
    """One party's log. Made by `open`."""

    def __init__(self, file: ChainFile, chain: TrailChain, identity: Identity, clock: Callable[[], float]) -> None:
        super().__init__(file, chain, identity, clock)
        self._unsynced, self._synced_at = 0, time.monotonic()
        self._more, self._more_since = 0, 0  # refusals without a row, and the day of the first

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        party: str,
        identity: Identity | Callable[[bytes], Identity],
        *,
        create: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> Trail:
        """The log of `party` in the file `path`: `Book.opened`."""
        missing = f"'{path}' holds no audit log of '{party}'"
        return cls.opened(path, TrailChain(party), identity, missing, create=create, clock=clock)

    def roster(self, serial: int, roster: bytes) -> None:
        """The roster that is in force. Raises HomeError for one that another has replaced since, as this log has it: a
        copy of `accepted.json` was put back, by which members who left are members, and keys that were lost count."""
        if roster != self.chain.roster and roster in self.chain.rosters:
            raise HomeError(
                f"roster {serial} is in force at this site, but its log has a later one: accepted.json was put back "
                "from a copy; put the newest roster in force again (`secure-fvi roster verify`)"
            )
        self._durable(ROSTER, {"serial": serial, "roster": roster})

    def policy(self, policy: bytes) -> None:
        """The policy that is in force, by `deciding.logged_policy`."""
        self._durable(POLICY, {"policy": policy})

    def job(self, entry: JobEntry) -> None:
        """A job that was accepted or refused; of refusals, at most `MOST_ASKED` rows a day."""
        if entry.accepted:
            self._durable(JOB, dict(vars(entry)))
        else:
            self._asked(JOB, dict(vars(entry)))

    def note(self, job: str, what: str, *, always: bool = False) -> None:
        """An event: a lost connection, a resumed session, a message that was refused and why. At most `MOST_ASKED` rows
        a day, but those that are there `always`."""
        if always:
            self._durable(NOTE, {"job": job, "what": what})
        else:
            self._asked(NOTE, {"job": job, "what": what})

    @property
    def full(self) -> bool:
        """Whether what a server asks has no more rows today."""
        return self.chain.asked(self._now()) >= MOST_ASKED

    def omission(self, job: str, kind: str, what: str) -> None:
        """What a server did not use or get: this silo's answer ("left out"), silos of a cohort ("difference"), an
        answer ("refused"), a question that the data could not answer ("unanswerable"). And that a silo's people were
        matched for the job ("matched"), which its policy counts; that a server's own ledger is charged ("charged")."""
        self._chain.check_known(job)
        self._durable(OMISSION, {"job": job, "kind": kind, "what": what})

    def close_job(self, job: str, outcome: str) -> None:
        """How a job ended."""
        self._chain.check_known(job)
        self._durable(CLOSE, {"job": job, "outcome": outcome})

    def exchanges(self, job: str, seen: Sequence[Exchange]) -> None:
        """What was exchanged, in one write: before a site's answer leaves; before a server asks, and after.

        Raises SecureFVIError where it cannot be written, or the job was not accepted; nothing may leave then.
        """
        now = time.monotonic()
        self._unsynced += len(seen)
        durable = self._unsynced >= SYNC_ROWS or now - self._synced_at >= SYNC_SECONDS
        with self._transaction(durable):
            self._chain.check_open(job)
            known: dict[int, list[Any]] = {}
            for e in seen:
                self._append(EXCHANGE, _body(job, e, known))
        if durable:
            self._unsynced, self._synced_at = 0, now

    def statement(self, since: int = 0) -> bytes:
        self._sync()
        return super().statement(since)

    def close(self) -> None:
        """Force what was written to the disk and let go of the file."""
        with contextlib.suppress(SecureFVIError, OSError):
            self._tell_more()
        self._sync()
        super().close()

    def _asked(self, kind: str, body: dict[str, Any]) -> None:
        """A row that a server's message makes; once the day has `MOST_ASKED`, one that says so, and afterwards how many
        more there were."""
        today = self._now() // DAY
        if self._more and self._more_since != today:
            self._tell_more()
        if not self.full:
            self._durable(kind, body)
            if self.full:
                self._durable(
                    NOTE, {"job": "", "what": f"{MOST_ASKED} rows of offers and notes today: no more of them"}
                )
            return
        self._more, self._more_since = self._more + 1, today

    def _tell_more(self) -> None:
        if self._more:
            self._durable(NOTE, {"job": "", "what": f"{self._more} more refusals and notes of one day have no row"})
            self._more = 0

    def _durable(self, kind: str, body: dict[str, Any]) -> None:
        with self._transaction():
            self._append(kind, body)
        self._unsynced, self._synced_at = 0, time.monotonic()

    def _sync(self) -> None:
        if self._unsynced:
            self._file.sync()
            self._unsynced, self._synced_at = 0, time.monotonic()


def _body(job: str, e: Exchange, known: dict[int, list[Any]]) -> dict[str, Any]:
    return {
        "job": job,
        "peer": e.peer,
        "step": e.step,
        "received": _seen(e.received, known),
        "sent": _seen(e.sent, known),
        "release": e.release,
    }


def _seen(message: bytes | None, known: dict[int, list[Any]]) -> list[Any] | None:
    """Size and digest. known: those of this write by object, since a broadcast is one object for all peers."""
    if message is None:
        return None
    if id(message) not in known:
        known[id(message)] = [len(message), hashlib.sha256(message).digest()]
    return known[id(message)]


# ---- What the rows of a paper trail say, read one after the other. Writer and verifier read through here ----

TRAIL = ChainKind(
    name="audit-log",
    remedy="a site begins one with its first job",
    on_failure="what is not written down may not leave",
    otherwise="rotate the identity and begin a new log under it",
    each_signed=False,
)
ROSTER, POLICY, JOB, EXCHANGE, NOTE, CLOSE = "roster", "policy", "job", "exchange", "note", "close"
#: The step of a round's question and its answer.
BROADCAST = "broadcast"
#: What a server left out of a sum. A version that does not know such rows says so, and reads no log with them.
OMISSION = "omission"
#: Of such a row: people were matched for the job.
MATCHED = "matched"
#: And: of a response that a server holds, what is told to silos is charged to the server's own ledger.
CHARGED = "charged"
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
    """A job in a log. Bytes are of messages; exchanges counts those of all peers, a question with its answer once."""

    job: str
    accepted: bool
    fields: Mapping[str, Any] = field(repr=False)
    exchanges: int = 0
    broadcasts: int = 0  # that were answered
    releases: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    omissions: dict[str, int] = field(default_factory=dict)  # rows by kind
    outcome: str | None = None

    @property
    def begun(self) -> bool:
        """Whether anything was exchanged about it, or noted of it."""
        return self.exchanges > 0 or bool(self.omissions)


class TrailChain(ChainReader):
    """One party's log up to its row `length`."""

    def __init__(self, party: str) -> None:
        super().__init__(TRAIL, party)
        self.jobs: dict[str, JobRecord] = {}
        self.roster: bytes | None = None
        self.rosters = set[bytes]()  # all that were in force
        self.policy: bytes | None = None
        self.last: Exchanged | None = None  # of the newest row, where it is an exchange
        self._open: dict[tuple[str, str], bytes] = {}  # by job and peer, the last question, until its answer comes
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
            self.rosters.add(self.roster)
        elif row.kind == POLICY:
            check_keys(fields, "policy")
            self.policy = _bytes(fields["policy"])
        elif row.kind == JOB:
            check_keys(fields, *JOB_FIELDS)
            # A job that goes on after a crash is offered again.
            record = self.jobs.setdefault(str(fields["job"]), JobRecord(str(fields["job"]), False, fields))
            record.accepted = fields["accepted"] is True
            if not record.begun or fields["offer"] == record.fields["offer"]:  # what was answered stays what it was
                record.fields = fields
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

    def on(self, data_set: str) -> dict[str, JobRecord]:
        """The jobs on a data set, by id."""
        return {name: record for name, record in self.jobs.items() if record.fields["data_set"] == data_set}

    def asked(self, time: int) -> int:
        """Rows of jobs and notes on the day of `time` (microseconds since 1970, UTC)."""
        day, count = self._asked
        return count if day == time // DAY else 0

    def _exchange(self, e: Exchanged) -> None:
        record = self.check_open(e.job)
        question = e.sent.digest if e.sent else b""
        known = e.received is not None and self._open.pop((e.job, e.peer), None) == question
        record.exchanges += not known
        record.broadcasts += e.step == BROADCAST and e.sent is not None and e.received is not None
        record.releases += bool(e.release)
        record.bytes_received += e.received.size if e.received else 0
        record.bytes_sent += e.sent.size if e.sent and not known else 0
        if e.received is None:
            self._open[e.job, e.peer] = question
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
        _read_seen(fields["received"]),
        _read_seen(fields["sent"]),
        fields["release"],
    )


def _read_seen(value: object) -> Seen | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or type(value[0]) is not int or value[0] < 0:
        raise ProtocolError("a message is its size and its digest")
    return Seen(value[0], _bytes(value[1]))


def _bytes(value: object) -> bytes:
    if type(value) is not bytes or len(value) != 32:
        raise ProtocolError("a digest has 32 bytes")
    return value
