"""The SQLite file that holds chains."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Generic, Self, TypeVar

from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import committed
from secure_fvi.errors import InputError, ProtocolError, RecordError
from secure_fvi.privacy.chain import (
    GENESIS,
    NOTHING,
    RECEIPT,
    ChainKind,
    ChainReader,
    Row,
    is_time,
    make_row,
    timestamp,
)
from secure_fvi.privacy.witness import Countersignature, check_receipt, make_statement

_FORMAT = 1
_BUSY_SECONDS, _RETRY_SECONDS = 60.0, 0.02
_FOLDER = " (this user has to be able to write to the file and to its folder, to read it too)"
#: By SQLite's code of an error, what to look at.
_CURES = {
    sqlite3.SQLITE_READONLY: _FOLDER,
    sqlite3.SQLITE_CANTOPEN: _FOLDER,
    sqlite3.SQLITE_IOERR: " (is the disk full?)",
    sqlite3.SQLITE_FULL: " (make room on the disk)",
}
_COLUMNS = "seq, previous, time, kind, body, hash, signature"
_TABLE = (
    "CREATE TABLE rows (silo TEXT NOT NULL, seq INTEGER NOT NULL, previous BLOB NOT NULL, "
    "time INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL, hash BLOB NOT NULL, "
    "signature BLOB NOT NULL, PRIMARY KEY (silo, seq)) WITHOUT ROWID"
)


class ChainFile:
    """The SQLite file that holds chains: write-ahead log, one fsync a durable transaction, one writer at a time."""

    def __init__(self, path: Path, kind: ChainKind, create: bool = False, read_only: bool = False) -> None:
        self.path, self.kind, self._durable = path, kind, True
        if create:
            self.path.touch(mode=0o600)
        elif not self.path.is_file():
            raise InputError(f"there is no {kind.name} '{path}'; {kind.remedy}")
        uri = f"{self.path.resolve().as_uri()}?mode=rw"
        with self.errors():
            self._connection = sqlite3.connect(uri, timeout=_BUSY_SECONDS, isolation_level=None, uri=True)
            # A cell that somebody made text is named with its row, by who checks the chain.
            self._connection.text_factory = lambda text: text.decode(errors="replace")
            if read_only:
                self._connection.execute("PRAGMA query_only = ON")
            else:
                self._write_ahead()
                self._connection.execute("PRAGMA synchronous = FULL")
            if create:
                self._prepare()
            # Another party's file may call a view `rows`, of rows without end.
            made = self._connection.execute("SELECT sql FROM sqlite_master").fetchmany(2)
            if self._connection.execute("PRAGMA user_version").fetchone()[0] != _FORMAT or made != [(_TABLE,)]:
                raise InputError(f"'{path}' is no {kind.name} of this version")

    def __repr__(self) -> str:
        return f"ChainFile({str(self.path)!r})"

    def _write_ahead(self) -> None:
        """Switch the file to a write-ahead log. SQLite waits for a lock everywhere but here, where two processes that
        make the same file may meet."""
        until = monotonic() + _BUSY_SECONDS
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                # A full disk, or a folder that may not be written to, is none that another process leaves again.
                if (error.sqlite_errorcode & 0xFF) not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise
                if monotonic() > until:
                    raise
                sleep(_RETRY_SECONDS)

    def _prepare(self) -> None:
        with self.transaction():
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            tables = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version == 0 and tables == 0:
                self._connection.execute(_TABLE)
                self._connection.execute(f"PRAGMA user_version = {_FORMAT}")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """SQLite's errors as ours, naming the file."""
        try:
            yield
        except sqlite3.Error as error:
            if type(error) is sqlite3.DatabaseError:  # what SQLite says of a file that it cannot read as its own
                raise InputError(f"'{self.path}' is no {self.kind.name}: {error}") from None
            cure = _CURES.get((getattr(error, "sqlite_errorcode", None) or 0) & 0xFF, "")
            raise RecordError(f"{self.kind.name} '{self.path}': {error}{cure}; {self.kind.on_failure}") from None

    @contextmanager
    def transaction(self, durable: bool = True) -> Iterator[None]:
        """All that is appended inside becomes durable together when the block ends, or nothing does.

        durable: on the disk. Otherwise it is in the operating system's hands, which outlives this process and not a
        loss of power; the next durable transaction puts it on the disk too.
        """
        with self.errors():
            if durable != self._durable:
                self._connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._durable = durable
            with committed(self._connection):
                yield

    def sync(self) -> None:
        """Force to the disk what transactions that were not durable have written."""
        with self.errors():
            self._connection.execute("PRAGMA wal_checkpoint(FULL)").fetchone()

    def silos(self) -> list[str]:
        """The silos that have a chain here."""
        with self.errors():
            return [s for (s,) in self._connection.execute("SELECT DISTINCT silo FROM rows ORDER BY silo")]

    def rows(self, silo: str, after: int = 0, upto: int = 2**62) -> Iterator[Row]:
        """The rows of `silo` with seq in (after, upto], as they are stored: nothing is checked."""
        query = f"SELECT {_COLUMNS} FROM rows WHERE silo = ? AND seq > ? AND seq <= ? ORDER BY seq"
        with self.errors():
            for row in self._connection.execute(query, (silo, after, upto)):
                yield Row(*row)

    def tail(self, silo: str) -> tuple[int, bytes]:
        """(seq, hash) of the newest row of `silo`; (0, NOTHING) where there is none."""
        query = "SELECT seq, hash FROM rows WHERE silo = ? ORDER BY seq DESC LIMIT 1"
        with self.errors():
            row = self._connection.execute(query, (silo,)).fetchone()
        return (0, NOTHING) if row is None else row

    def append(self, silo: str, row: Row) -> None:
        """Add `row`; within a transaction."""
        self._connection.execute("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (silo, *row))

    def close(self) -> None:
        """Let go of the file; what was written stays."""
        self._connection.close()


def follow_rows(file: ChainFile, chain: ChainReader) -> None:
    """Take in what `file` holds beyond `chain`, checked by links and by the signature of the newest row."""
    before = chain.length
    for row in file.rows(chain.silo, before):
        chain.follow(row)
    if chain.length > before:
        chain.check_head()


# ---- Checking a chain from the outside: every row, every signature, every receipt. Needs no private key ----

C = TypeVar("C", bound=ChainReader)


def verify_chain(
    file: ChainFile,
    chain: C,
    public_key: bytes | None,
    shown: Iterable[Countersignature],
    after_row: Callable[[C, Row], None] = lambda chain, row: None,
) -> C:
    """Follow all rows of the empty `chain` in `file`, then compare with the receipts in it and with those `shown`.

    public_key: pins its key. after_row: called with the chain and each row that it took in. Raises ProtocolError that
    names the first bad row.
    """
    heads = [NOTHING]
    for row in file.rows(chain.silo):
        chain.follow(row, public_key, each_signature=True)
        heads.append(row.hash)
        after_row(chain, row)
    chain.check_head()
    kind = chain.kind
    if not chain.length:
        raise InputError(f"'{file.path}' holds no {kind.name} of silo '{chain.silo}'")
    for receipt in [*(check_receipt(data, None, kind) for data in chain.receipts), *shown]:
        if receipt.public_key != chain.public_key:
            raise ProtocolError(
                f"{kind.name} of silo '{chain.silo}': {shown_by(receipt)} is about a {kind.name} of another key"
            )
        if receipt.length > chain.length:
            raise ProtocolError(
                f"{chain.where(chain.length + 1)}: missing; {shown_by(receipt)} shows {receipt.length} "
                f"rows, {chain.length} are here: rows were cut off, or an old copy was put back"
            )
        if heads[receipt.length] != receipt.head:
            raise ProtocolError(
                f"{chain.where(receipt.length)}: not the row that {shown_by(receipt)} shows; the {kind.name} was "
                "written anew"
            )
    return chain


def shown_by(receipt: Countersignature) -> str:
    """Whose word it is, for messages."""
    return f"the receipt of witness '{receipt.witness}'"


# ---- The one way to add rows: signed, after the newest row of any process, on disk before anyone goes on ----


#: A clock that was set back by this much (a step of NTP) is waited out: rows keep the time of the row before.
TOLERANCE_SECONDS = 300.0


_WAIT = (
    "set the clock right; where it is, and was ahead when that row was written, no other is written before that time: "
    "a row cannot be taken back"
)


def ahead(chain: ChainReader, now: float) -> str:
    """What is wrong where the newest row is of a time that is yet to come, so that none can follow; empty where it is
    not. now: seconds since 1970."""
    if chain.time <= (now + TOLERANCE_SECONDS) * 1e6:
        return ""
    return (
        f"the newest row of the {chain.kind.name} is of {timestamp(chain.time)}, which is yet to come, so that nothing "
        f"is answered; {_WAIT}"
    )


class Book(Generic[C]):
    """One party's chain with the key that signs it, to write to and to have countersigned. For one thread at a time,
    while other processes may write the same file. clock: seconds since 1970."""

    def __init__(self, file: ChainFile, chain: C, identity: Identity, clock: Callable[[], float]) -> None:
        self._file, self._chain = file, chain
        self._identity, self._clock = identity, clock
        self._rolled_back = False
        self._rows: list[Row] = []  # of the transaction that is open

    @classmethod
    def opened(
        cls,
        path: str | os.PathLike[str],
        chain: C,
        identity: Identity | Callable[[bytes], Identity],
        missing: str,
        *,
        create: bool,
        clock: Callable[[], float],
    ) -> Self:
        """The records in the file `path` of the party whose `chain`, still empty, is given.

        identity: the key that signs it, or a function to it from the public key with which the records began (b"" for
        new ones), since they stay with their first. Raises InputError saying what is `missing` where there are none and
        `create` is False, and for another key's, ProtocolError for records that were tampered with.
        """
        file = ChainFile(Path(path), chain.kind, create)
        try:
            follow_rows(file, chain)
            if not (chain.length or create):
                raise InputError(missing)
            own = identity if isinstance(identity, Identity) else identity(chain.public_key)
            book = cls(file, chain, own, clock)
            book._begin()
        except BaseException:
            file.close()
            raise
        return book

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._file.path)!r}, {self._chain!r})"

    @property
    def chain(self) -> C:
        """What the chain says by now, the rows of other processes included. For reading only."""
        self._catch_up()
        return self._chain

    @property
    def _whose(self) -> str:
        return f"{self._chain.kind.name} of silo '{self._chain.silo}'"

    def _begin(self) -> None:
        """Make the chain if there is none; raises InputError if it is another key's."""
        if not self._chain.length:
            with self._transaction():
                if not self._chain.length:  # no other process was faster
                    self._append(GENESIS, {"silo": self._chain.silo, "public_key": self._identity.public_key})
        if self._chain.public_key != self._identity.public_key:
            raise InputError(
                f"'{self._file.path}' holds a {self._chain.kind.name} of another silo: the chain of "
                f"'{self._chain.silo}' was created with another key"
            )

    @contextmanager
    def _transaction(self, durable: bool = True) -> Iterator[None]:
        """Starts from the newest rows, under the file's lock; what is appended is on disk at the end, or nothing is.

        durable: see `ChainFile.transaction`.
        """
        self._check_usable()
        self._rows = []
        with self._file.transaction(durable):
            if not self._newest():
                self._catch_up()
                if not self._newest():
                    raise ProtocolError(f"{self._whose}: rows vanished from under a running process")
            yield
            self._write()
        written, self._rows = self._rows, []
        for row in written:  # need not be read back
            self._chain.follow(row)

    def _append(self, kind: str, body: dict[str, Any]) -> None:
        """Add a row; within a transaction."""
        chain = self._chain
        seq, previous = (self._rows[-1].seq, self._rows[-1].hash) if self._rows else (chain.length, chain.head)
        self._rows.append(make_row(chain.kind, chain.silo, seq + 1, previous, self._now(), kind, body))

    def _newest(self) -> bool:
        return self._file.tail(self._chain.silo) == (self._chain.length, self._chain.head)

    def _write(self) -> None:
        """Sign and store the rows of a transaction."""
        label = self._chain.kind.label("row")
        for at, row in enumerate(self._rows):
            if self._chain.kind.each_signed or row is self._rows[-1]:
                self._rows[at] = row._replace(signature=self._identity.sign(label + row.hash))
            self._file.append(self._chain.silo, self._rows[at])

    def _catch_up(self) -> None:
        """Take in the rows that were added since, by whichever process."""
        follow_rows(self._file, self._chain)

    def _hash_at(self, length: int) -> bytes | None:
        if length == 0:
            return NOTHING
        return next((row.hash for row in self._file.rows(self._chain.silo, length - 1, length)), None)

    def _now(self) -> int:
        """Microseconds since 1970, never before the newest row. Raises RecordError for a clock that was set back."""
        now, last = int(self._clock() * 1e6), self._rows[-1].time if self._rows else self._chain.time
        if not is_time(now):  # a row of that time is read by nobody
            raise RecordError(
                f"the clock reads {now // 10**6} seconds since 1970, which is no date; set the clock right"
            )
        if now < last - TOLERANCE_SECONDS * 1e6:
            raise RecordError(
                f"the clock runs backwards: it reads {timestamp(now)}, the newest row of the {self._whose} "
                f"is of {timestamp(last)}; {_WAIT}"
            )
        return max(now, last)

    def statement(self, since: int = 0) -> bytes:
        """The signed length and head of this chain, with the proof that it continues its first `since` rows.

        For a witness, which says by `Witness.length` since where; all parties may see it.
        """
        self._catch_up()
        c = self._chain
        links = [row.content(c.kind, c.silo) for row in self._file.rows(c.silo, since, c.length)]
        return make_statement(
            c.kind, c.silo, c.public_key, c.length, c.head, self._now(), since, links, self._identity.sign
        )

    def add_receipt(self, receipt: bytes, witness_key: bytes) -> None:
        """Keep a witness's receipt as a row. Raises ProtocolError if it is forged or shows more than this chain."""
        self.check_receipts([receipt], [witness_key])
        with self._transaction():
            self._append(RECEIPT, {"receipt": receipt})

    def check_receipts(self, receipts: Iterable[bytes], witness_keys: Iterable[bytes]) -> None:
        """Raise ProtocolError and refuse all further writes if a receipt shows rows that this chain does not have.

        To be called whenever a job starts: the refusal lasts as long as this object. witness_keys: the public keys that
        the site accepts. A receipt by any other, or one that this chain's own key never signed, is refused as forged
        (WitnessFault for the latter), which leaves the chain usable.
        """
        self._catch_up()
        keys, chain = frozenset(witness_keys), self._chain
        for data in receipts:
            receipt = check_receipt(data, keys, chain.kind)
            if receipt.public_key != chain.public_key:
                raise ProtocolError(f"a receipt of witness '{receipt.witness}' is about another {chain.kind.name}")
            self.check_holds(receipt.length, receipt.head)

    def check_holds(self, length: int, head: bytes) -> None:
        """Raise ProtocolError and refuse all further writes unless row `length` of this chain has the hash `head`."""
        self._catch_up()
        if self._hash_at(length) != head:
            self._rolled_back = True
            self._check_usable()

    def _check_usable(self) -> None:
        """Raises ProtocolError once somebody has seen rows that this file does not hold."""
        if self._rolled_back:
            raise ProtocolError(
                f"the {self._whose} was rolled back: a witness has seen rows that it does not hold; "
                f"restore the newest copy, or {self._chain.kind.otherwise}"
            )

    def close(self) -> None:
        """Let go of the file; what was written stays."""
        self._file.close()
