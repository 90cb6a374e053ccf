"""A silo's chain of rows: what a row is, how rows hang together, and where they lie.

    content  = SHA-256(label, silo, seq, time, kind, body)
    hash     = SHA-256(label, hash of the row before, content)
    signature = Ed25519 over (label, hash), by the key that row 1 (`genesis`) names

Rows are counted from 1. The head's signature therefore answers for every row before it; the contents' digests alone
prove that one head continues another (`witness`). A body is MessagePack, hashed as the bytes that are stored.
"""

from __future__ import annotations

import datetime
import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import msgpack
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from secure_fvi.errors import InputError, ProtocolError, SecureFVIError

LABEL_CONTENT = b"secure-fvi/ledger/1/content"
LABEL_LINK = b"secure-fvi/ledger/1/link"
LABEL_ROW = b"secure-fvi/ledger/1/row"
#: What the first row follows.
NOTHING = bytes(32)

GENESIS, BUDGET, JOB, RELEASE, CLOSE, RECEIPT = "genesis", "budget", "job", "release", "close", "receipt"
_FORMAT = 1
_BUSY_SECONDS, _RETRY_SECONDS = 60.0, 0.02
_COLUMNS = "seq, previous, time, kind, body, hash, signature"


class Row(NamedTuple):
    """One row of one silo's chain. time: microseconds since 1970, UTC."""

    seq: int
    previous: bytes
    time: int
    kind: str
    body: bytes
    hash: bytes
    signature: bytes

    def content(self, silo: str) -> bytes:
        """The digest of what the row says: 32 bytes."""
        return _sha256(LABEL_CONTENT, msgpack.packb([silo, self.seq, self.time, self.kind, self.body]))

    def fields(self) -> dict[str, Any]:
        """What the row says. Raises ProtocolError when its body is no MessagePack table."""
        try:
            body = msgpack.unpackb(self.body)
        except (ValueError, RecursionError):  # msgpack's errors may hold the content
            body = None
        if not isinstance(body, dict):
            raise ProtocolError("its content is not well-formed")
        return body


def link(previous: bytes, content: bytes) -> bytes:
    """The hash of the row whose content has this digest and which follows the row of hash `previous`."""
    return _sha256(LABEL_LINK, previous, content)


def make_row(silo: str, seq: int, previous: bytes, time: int, kind: str, body: dict[str, Any], sign: Any) -> Row:
    """The next row; `sign` maps bytes to the silo's signature of 64 bytes."""
    row = Row(seq, previous, time, kind, bytes(msgpack.packb(body)), b"", b"")
    digest = link(previous, row.content(silo))
    return row._replace(hash=digest, signature=sign(LABEL_ROW + digest))


def signed(public_key: bytes, label: bytes, statement: bytes, signature: bytes) -> bool:
    """Whether the holder of `public_key` (32 bytes) signed `statement` under `label`."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, label + statement)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


class LedgerFile:
    """The SQLite file that holds chains: write-ahead log, one fsync a transaction, one writer at a time."""

    def __init__(self, path: Path, create: bool = False, read_only: bool = False) -> None:
        self.path = path
        if create:
            self.path.touch(mode=0o600)
        elif not self.path.is_file():
            raise InputError(f"there is no ledger '{path}'; `secure-fvi budget set` makes one")
        uri = f"{self.path.resolve().as_uri()}?mode=rw"
        with self.errors():
            self._connection = sqlite3.connect(uri, timeout=_BUSY_SECONDS, isolation_level=None, uri=True)
            if read_only:
                self._connection.execute("PRAGMA query_only = ON")
            else:
                self._write_ahead()
                self._connection.execute("PRAGMA synchronous = FULL")
            if create:
                self._prepare()
            if self._connection.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
                raise InputError(f"'{path}' is no ledger of this version")

    def __repr__(self) -> str:
        return f"LedgerFile({str(self.path)!r})"

    def _write_ahead(self) -> None:
        """Switch the file to a write-ahead log. SQLite waits for a lock everywhere but here, where two processes that
        make the same file may meet."""
        until = monotonic() + _BUSY_SECONDS
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if monotonic() > until:
                    raise
                sleep(_RETRY_SECONDS)

    def _prepare(self) -> None:
        with self.transaction():
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            tables = self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version == 0 and tables == 0:
                self._connection.execute(
                    "CREATE TABLE rows (silo TEXT NOT NULL, seq INTEGER NOT NULL, previous BLOB NOT NULL, "
                    "time INTEGER NOT NULL, kind TEXT NOT NULL, body BLOB NOT NULL, hash BLOB NOT NULL, "
                    "signature BLOB NOT NULL, PRIMARY KEY (silo, seq)) WITHOUT ROWID"
                )
                self._connection.execute(f"PRAGMA user_version = {_FORMAT}")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """SQLite's errors as ours, naming the file."""
        try:
            yield
        except sqlite3.Error as error:
            if type(error) is sqlite3.DatabaseError:  # what SQLite says of a file that it cannot read as its own
                raise InputError(f"'{self.path}' is no ledger: {error}") from None
            raise SecureFVIError(f"ledger '{self.path}': {error}; nothing was charged, so nothing may leave") from None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is appended inside becomes durable together when the block ends, or nothing does."""
        with self.errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

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


def timestamp(microseconds: int) -> str:
    """The time of a row, for people: UTC, to the second."""
    return datetime.datetime.fromtimestamp(microseconds / 1e6, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _sha256(label: bytes, *fields: bytes) -> bytes:
    state = hashlib.sha256(len(label).to_bytes(2, "big") + label)
    for f in fields:
        state.update(len(f).to_bytes(8, "big"))
        state.update(f)
    return state.digest()
