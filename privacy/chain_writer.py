"""The one way to add rows: signed, after the newest row of any process, on disk before anyone goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.chain import GENESIS, NOTHING, RECEIPT, ChainReader, Row, make_row, timestamp
from secure_fvi.privacy.chain_file import ChainFile, follow_rows
from secure_fvi.privacy.witness import check_receipt, make_statement

C = TypeVar("C", bound=ChainReader)

#: A clock that was set back by this much (a step of NTP) is waited out: rows keep the time of the row before.
TOLERANCE_SECONDS = 300.0


class Writer(Generic[C]):
    """One party's chain with the key that signs it. clock: seconds since 1970."""

    def __init__(self, file: ChainFile, chain: C, identity: Identity, clock: Callable[[], float]) -> None:
        self.file, self.chain = file, chain
        self._identity, self._clock = identity, clock
        self._rolled_back = False
        self._rows: list[Row] = []  # of the transaction that is open

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        chain: C,
        signer: Callable[[bytes], Identity],
        missing: str,
        *,
        create: bool,
        clock: Callable[[], float],
    ) -> Writer[C]:
        """The records in the file `path` of the party whose `chain`, still empty, is given.

        signer: the key for the public key with which the records began (b"" for new ones). Raises InputError saying
        what is `missing` where there are none and `create` is False, and for another key's, ProtocolError for records
        that were tampered with.
        """
        file = ChainFile(Path(path), chain.kind, create)
        try:
            follow_rows(file, chain)
            if not (chain.length or create):
                raise InputError(missing)
            writer = cls(file, chain, signer(chain.public_key), clock)
            writer.begin()
        except BaseException:
            file.close()
            raise
        return writer

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
        self._rows = []
        with self.file.transaction(durable):
            if not self._newest():
                self.catch_up()
                if not self._newest():
                    raise ProtocolError(f"{self._whose}: rows vanished from under a running process")
            yield
            self._write()
        written, self._rows = self._rows, []
        for row in written:  # need not be read back
            self.chain.follow(row)

    def append(self, kind: str, body: dict[str, Any]) -> None:
        """Add a row; within a transaction."""
        chain = self.chain
        seq, previous = (self._rows[-1].seq, self._rows[-1].hash) if self._rows else (chain.length, chain.head)
        self._rows.append(make_row(chain.kind, chain.silo, seq + 1, previous, self.now(), kind, body))

    def _newest(self) -> bool:
        return self.file.tail(self.chain.silo) == (self.chain.length, self.chain.head)

    def _write(self) -> None:
        """Sign and store the rows of a transaction."""
        label = self.chain.kind.label("row")
        for at, row in enumerate(self._rows):
            if self.chain.kind.each_signed or row is self._rows[-1]:
                self._rows[at] = row._replace(signature=self._identity.sign(label + row.hash))
            self.file.append(self.chain.silo, self._rows[at])

    def catch_up(self) -> None:
        """Take in the rows that were added since, by whichever process."""
        follow_rows(self.file, self.chain)

    def _hash_at(self, length: int) -> bytes | None:
        if length == 0:
            return NOTHING
        return next((row.hash for row in self.file.rows(self.chain.silo, length - 1, length)), None)

    def now(self) -> int:
        """Microseconds since 1970, never before the newest row. Raises InputError for a clock that was set back."""
        now, last = int(self._clock() * 1e6), self._rows[-1].time if self._rows else self.chain.time
        if now < last - TOLERANCE_SECONDS * 1e6:
            raise InputError(
                f"the clock runs backwards: it reads {timestamp(now)}, the newest row of the {self._whose} "
                f"is of {timestamp(last)}; set the clock right"
            )
        return max(now, last)

    def statement(self, since: int = 0) -> bytes:
        """The signed length and head of this chain, with the proof that it continues its first `since` rows.

        For a witness, which says by `Witness.length` since where; all parties may see it.
        """
        self.catch_up()
        c = self.chain
        links = [row.content(c.kind, c.silo) for row in self.file.rows(c.silo, since, c.length)]
        return make_statement(
            c.kind, c.silo, c.public_key, c.length, c.head, self.now(), since, links, self._identity.sign
        )

    def add_receipt(self, receipt: bytes, witness_key: bytes) -> None:
        """Keep a witness's receipt as a row. Raises ProtocolError if it is forged or shows more than this chain."""
        self.check_receipts([receipt], [witness_key])
        with self.transaction():
            self.append(RECEIPT, {"receipt": receipt})

    def check_receipts(self, receipts: Iterable[bytes], witness_keys: Iterable[bytes]) -> None:
        """Raise ProtocolError and refuse all further writes if a receipt shows rows that this chain does not have.

        To be called whenever a job starts: the refusal lasts as long as this object. witness_keys: the public keys that
        the site accepts. A receipt by any other, or one that this chain's own key never signed, is refused as forged
        (WitnessFault for the latter), which leaves the chain usable.
        """
        self.catch_up()
        keys, chain = frozenset(witness_keys), self.chain
        for data in receipts:
            receipt = check_receipt(data, keys, chain.kind)
            if receipt.public_key != chain.public_key:
                raise ProtocolError(f"a receipt of witness '{receipt.witness}' is about another {chain.kind.name}")
            if self._hash_at(receipt.length) != receipt.head:
                self._rolled_back = True
                self.check_usable()

    def check_usable(self) -> None:
        """Raises ProtocolError once somebody has seen rows that this file does not hold."""
        if self._rolled_back:
            raise ProtocolError(
                f"the {self._whose} was rolled back: a witness has seen rows that it does not hold; "
                f"restore the newest copy, or {self.chain.kind.otherwise}"
            )
