"""What a party must not forget: "already answered" is written down here before an answer leaves."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from secure_fvi.aggregation.prg import derive_key
from secure_fvi.errors import InputError, RecordError
from secure_fvi.files import sync_folder

#: No slots that rise.
NONE: Mapping[str, int] = MappingProxyType({})
#: What a write rests on: by slot the number that it holds, of those that rise (-1: none), or None for one that is not
#: set. It is looked at in the transaction that writes.
Still = Mapping[str, int | None]


class Overtaken(OSError):
    """Another process wrote what a write rested on, and nothing was written: a store's failure, and nobody's data's."""


class Store(Protocol):
    """A small map from slots to bytes. Every write but an unsettled claim is durable when the call returns."""

    def claim(self, slot: str, value: bytes, settle: bool = True, still: Still = NONE) -> bytes:
        """Set `slot` unless it is set; return what it then holds. The first value wins, for ever. Raises Overtaken, and
        claims nothing, where something is no longer as `still` has it.

        settle: without it the claim binds all processes at once, and is durable only with this process' next `put` or
        settled claim: enough where nothing that rests on it leaves before that.
        """
        ...

    def put(self, slots: Mapping[str, bytes], rising: Mapping[str, int] = NONE, still: Still = NONE) -> None:
        """Set all `slots`, whatever they held, or none of them. rising: along with them, slots of their own that hold a
        number, which goes up alone, whichever process writes last. Raises Overtaken where something is no longer as
        `still` has it."""
        ...

    def get(self, slot: str) -> bytes | None:
        """What `slot` holds."""
        ...

    def risen(self, slot: str) -> int:
        """The number in a slot of those that rise; -1 before any."""
        ...

    def drop(self, slots: Iterable[str]) -> None:
        """Forget those of `slots` that are set."""
        ...


class MemoryStore:
    """A store that lives as long as the process: for the local engine and for tests."""

    _one_at_a_time = threading.Lock()

    def __init__(self) -> None:
        self._slots: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return "MemoryStore(...)"

    def claim(self, slot: str, value: bytes, settle: bool = True, still: Still = NONE) -> bytes:
        with self._one_at_a_time:
            _check_still(self._slots.get, still)
            return self._slots.setdefault(slot, value)

    def put(self, slots: Mapping[str, bytes], rising: Mapping[str, int] = NONE, still: Still = NONE) -> None:
        with self._one_at_a_time:
            _check_still(self._slots.get, still)
            self._slots.update(slots)
            for slot, number in rising.items():
                self._slots[slot] = _packed(max(number, _number(self._slots.get(slot))))

    def get(self, slot: str) -> bytes | None:
        return self._slots.get(slot)

    def risen(self, slot: str) -> int:
        return _number(self._slots.get(slot))

    def drop(self, slots: Iterable[str]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)


class SqliteStore:
    """A store in one SQLite file, readable by its owner only: write-ahead log, one fsync a write. All that it does
    raises RecordError where the file cannot be written or read.

    Without power_safe a claim outlives the process and not the machine; what is `put` outlives both, with all that was
    claimed before it. It holds private keys and shares in clear unless wrapped. A file restored from a backup must not
    be used: it has forgotten answers; start a new session instead.
    """

    def __init__(self, path: str | os.PathLike[str], power_safe: bool = True) -> None:
        """power_safe: without it a claim outlives the process, but not the machine: the caller must notice a restart
        of the machine and open a new session then."""
        self._path, begun = Path(path), Path(path).exists()
        self._path.touch(mode=0o600)
        if not begun:
            sync_folder(self._path.absolute().parent)
        self._power_safe, self._full = power_safe, True
        with self._errors():
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("PRAGMA secure_delete = ON")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS slots (slot TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID"
            )

    def __repr__(self) -> str:
        return "SqliteStore(...)"

    def claim(self, slot: str, value: bytes, settle: bool = True, still: Still = NONE) -> bytes:
        # One statement is one transaction, so that of two processes over one file only one can be first.
        with self._transaction(self._power_safe and settle) if still else self._errors():
            if not still:
                self._synchronous(self._power_safe and settle)
            _check_still(self.get, still)
            self._connection.execute("INSERT OR IGNORE INTO slots VALUES (?, ?)", (slot, value))
            held = self.get(slot)
        assert held is not None
        return held

    def put(self, slots: Mapping[str, bytes], rising: Mapping[str, int] = NONE, still: Still = NONE) -> None:
        with self._transaction():
            _check_still(self.get, still)
            self._connection.executemany("INSERT OR REPLACE INTO slots VALUES (?, ?)", list(slots.items()))
            self._connection.executemany(
                "INSERT INTO slots VALUES (?, ?) ON CONFLICT DO UPDATE SET value = max(value, excluded.value)",
                [(slot, _packed(number)) for slot, number in rising.items()],
            )

    def get(self, slot: str) -> bytes | None:
        with self._errors():
            row = self._connection.execute("SELECT value FROM slots WHERE slot = ?", (slot,)).fetchone()
        return None if row is None else bytes(row[0])

    def risen(self, slot: str) -> int:
        return _number(self.get(slot))

    def drop(self, slots: Iterable[str]) -> None:
        with self._transaction():
            self._connection.executemany("DELETE FROM slots WHERE slot = ?", [(s,) for s in slots])
        # The log still has the pages as they were. It stays where the disk is full or another process is at it; the
        # next time does it.
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    def close(self) -> None:
        """Let go of the file; what was written stays."""
        self._connection.close()

    def _synchronous(self, full: bool) -> None:
        """Whether the next transaction is to be on the disk when it ends, and with it all that were before."""
        if full != self._full:
            self._connection.execute(f"PRAGMA synchronous = {'FULL' if full else 'NORMAL'}")
            self._full = full

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """SQLite's errors as ours: of a disk, and so nobody's data's."""
        try:
            yield
        except sqlite3.Error as error:
            raise RecordError(f"the store '{self._path}': {error}") from None

    @contextmanager
    def _transaction(self, full: bool = True) -> Iterator[None]:
        with self._errors():
            self._synchronous(full)
            with committed(self._connection):
                yield


@contextmanager
def committed(connection: sqlite3.Connection) -> Iterator[None]:
    """One transaction, which nobody else's write comes between; nothing is written where anything is raised."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk has ended it already
            connection.execute("ROLLBACK")
        raise


def _packed(number: int) -> bytes:
    """Ordered as the numbers are."""
    return number.to_bytes(8, "big")


def _number(packed: bytes | None) -> int:
    return -1 if packed is None else int.from_bytes(packed, "big")


def _check_still(get: Callable[[str], bytes | None], still: Still) -> None:
    for slot, number in still.items():
        held = get(slot)
        if held is not None if number is None else _number(held) != number:
            raise Overtaken(f"'{slot}' was written by another process in the meantime")


# ---- Values at rest that are not in clear: AES-256-GCM, alone or around another store ----

LABEL_STORE = b"sealed-store"
_NONCE = 12


class Sealer:
    """Seals values under a name each, so that none passes for another's."""

    def __init__(self, secret: bytes, context: bytes) -> None:
        """`secret`: 32 bytes, of this party alone. `context`: names what is sealed among all that `secret` seals."""
        # 96-bit nonces at random: far below the 2^32 values of one context after which they could be feared to meet.
        self._cipher = AESGCM(derive_key(secret, LABEL_STORE, context))

    def __repr__(self) -> str:
        return "Sealer(...)"

    def seal(self, name: str, value: bytes) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher.encrypt(nonce, value, name.encode())

    def open(self, name: str, sealed: bytes) -> bytes:
        """Raises InputError where the value was sealed with another key, under another name, by another version, or
        altered."""
        try:
            return self._cipher.decrypt(sealed[:_NONCE], sealed[_NONCE:], name.encode())
        except (InvalidTag, ValueError):
            raise InputError(
                f"'{name}' was not sealed by this party and version for this place, or was altered"
            ) from None


class SealedStore:
    """Seals each value for its slot in this one store. Names of slots, sizes of values and numbers that rise stay
    visible.

    Whoever can write to the disk can still take values away or put a slot's older value back, as with any store that
    is restored from a backup; he cannot read one, change one, or move one to another slot or store.
    """

    def __init__(self, inner: Store, secret: bytes, context: bytes) -> None:
        """See `Sealer`. What `get` and `claim` read raises InputError where it was altered."""
        self._inner, self._sealer = inner, Sealer(secret, context)

    def __repr__(self) -> str:
        return "SealedStore(...)"

    def claim(self, slot: str, value: bytes, settle: bool = True, still: Still = NONE) -> bytes:
        return self._sealer.open(slot, self._inner.claim(slot, self._sealer.seal(slot, value), settle, still))

    def put(self, slots: Mapping[str, bytes], rising: Mapping[str, int] = NONE, still: Still = NONE) -> None:
        self._inner.put({slot: self._sealer.seal(slot, value) for slot, value in slots.items()}, rising, still)

    def get(self, slot: str) -> bytes | None:
        sealed = self._inner.get(slot)
        return None if sealed is None else self._sealer.open(slot, sealed)

    def risen(self, slot: str) -> int:
        return self._inner.risen(slot)

    def drop(self, slots: Iterable[str]) -> None:
        self._inner.drop(slots)
