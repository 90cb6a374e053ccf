"""The one way to add rows: signed, after the newest row of any process, on disk before anyone goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.chain import GENESIS, NOTHING, ChainReader, make_row, timestamp
from secure_fvi.privacy.chain_file import ChainFile, follow_rows

C = TypeVar("C", bound=ChainReader)

#: A clock that was set back by this much (a step of NTP) is waited out: rows keep the time of the row before.
TOLERANCE_SECONDS = 300.0


class Writer(Generic[C]):
    """One party's chain with the key that signs it. clock: seconds since 1970."""

    def __init__(self, file: ChainFile, chain: C, identity: Identity, clock: Callable[[], float]) -> None:
        self.file, self.chain = file, chain
        self._identity, self._clock = identity, clock
        self._rolled_back = False

    def __repr__(self) -> str:
        return f"Writer({self.chain!r})"

    @property
    def _whose(self) -> str:
        return f"{self.chain.kind.name} of silo '{self.chain.silo}'"

    def begin(self) -> None:
        """Make the chain if there is none; raises InputError if it is another key's."""
        if not self.chain.length:
            with self.transaction():
                if not self.chain.length:  # no other process was faster
                    self.append(GENESIS, {"silo": self.chain.silo, "public_key": self._identity.public_key})
        if self.chain.public_key != self._identity.public_key:
            raise InputError(
                f"'{self.file.path}' holds a {self.chain.kind.name} of another silo: the chain of "
                f"'{self.chain.silo}' was created with another key"
            )

    @contextmanager
    def transaction(self, durable: bool = True) -> Iterator[None]:
        """Starts from the newest rows, under the file's lock; what is appended is on disk at the end, or nothing is.

        durable: see `ChainFile.transaction`.
        """
        self.check_usable()
        with self.file.transaction(durable):
            self.catch_up()
            if self.file.tail(self.chain.silo) != (self.chain.length, self.chain.head):
                raise ProtocolError(f"{self._whose}: rows vanished from under a running process")
            yield
        self.catch_up()

    def append(self, kind: str, body: dict[str, Any]) -> None:
        """Add a row; within a transaction."""
        seq, previous = self.file.tail(self.chain.silo)
        chain = self.chain
        row = make_row(chain.kind, chain.silo, seq + 1, previous, self.now(), kind, body, self._identity.sign)
        self.file.append(self.chain.silo, row)

    def catch_up(self) -> None:
        """Take in the rows that were added since, by whichever process."""
        follow_rows(self.file, self.chain)

    def hash_at(self, length: int) -> bytes | None:
        """The hash of row `length`; None where there is no such row."""
        if length == 0:
            return NOTHING
        return next((row.hash for row in self.file.rows(self.chain.silo, length - 1, length)), None)

    def now(self) -> int:
        """Microseconds since 1970, never before the newest row. Raises InputError for a clock that was set back."""
        now, last = int(self._clock() * 1e6), self.chain.time
        if now < last - TOLERANCE_SECONDS * 1e6:
            raise InputError(
                f"the clock runs backwards: it reads {timestamp(now)}, the newest row of the {self._whose} "
                f"is of {timestamp(last)}; set the clock right"
            )
        return max(now, last)

    def sign(self, statement: bytes) -> bytes:
        return self._identity.sign(statement)

    def mark_rolled_back(self) -> None:
        """Refuse everything from here on: somebody has seen rows that this file does not hold."""
        self._rolled_back = True
        self.check_usable()

    def check_usable(self) -> None:
        if self._rolled_back:
            raise ProtocolError(
                f"the {self._whose} was rolled back: a witness has seen rows that it does not hold; "
                f"restore the newest copy, or {self.chain.kind.otherwise}"
            )
