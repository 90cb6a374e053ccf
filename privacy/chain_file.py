"""The SQLite file that holds chains."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from secure_fvi.errors import InputError, SecureFVIError
from secure_fvi.privacy.chain import NOTHING, ChainKind, ChainReader, Row

_FORMAT = 1
_BUSY_SECONDS, _RETRY_SECONDS = 60.0, 0.02
_COLUMNS = "seq, previous, time, kind, body, hash, signature"


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
            if read_only:
                self._connection.execute("PRAGMA query_only = ON")
            else:
                self._write_ahead()
                self._connection.execute("PRAGMA synchronous = FULL")
            if create:
                self._prepare()
            if self._connection.execute("PRAGMA user_version").fetchone()[0] != _FORMAT:
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
                raise InputError(f"'{self.path}' is no {self.kind.name}: {error}") from None
            raise SecureFVIError(f"{self.kind.name} '{self.path}': {error}; {self.kind.on_failure}") from None

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
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

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
