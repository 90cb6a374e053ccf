"""Plain sums: no protection. The server sees every contribution; the reference for the other kinds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from secure_fvi.aggregation.base import BlockTable, FloatArray, Form, Seat, SumSilo
from secure_fvi.aggregation.store import Store
from secure_fvi.errors import AggregationError, ProtocolError

WIRE = np.dtype("<f8")
#: Bytes at random behind the values, others for each question, which the server alone sees. Logs have the SHA-256 of
#: what was sent and go from hand to hand: without these a guess at a silo's term, as at its number of records, could be
#: tried on it, and whether two terms are equal would be seen.
SALT = 32


@dataclass(frozen=True)
class Plain:
    """Sums in clear, in float64: the server, and whoever reads its transcript, sees each silo's term."""

    @property
    def kind(self) -> str:
        return "plain"

    @property
    def form(self) -> Form:
        return "plain"

    def codec(self, silos: int) -> None:
        """Values travel as they are."""

    def beneath(self, bits: Literal[32, 64]) -> None:
        """Nothing is masked or signed."""

    def at_silo(self, seat: Seat) -> SumSilo:
        """One silo's half."""
        return PlainSilo(seat.silo, seat.store)


class PlainSilo(SumSilo):
    """A silo's half: checks the values as every kind does, then sends them as they are, for the server alone to see."""

    def __init__(self, silo_id: str, store: Store | None = None) -> None:
        """store: for another process, which makes the same bytes again."""
        self.silo_id = silo_id
        self._last_index = -1
        self._secret = os.urandom(SALT) if store is None else store.claim("plain/salt", os.urandom(SALT))

    def contribute(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        values: FloatArray,
        context: bytes,
        question: bytes = b"",
        most_missing: int | None = None,
        past: Mapping[str, bytes] | None = None,
        spoiled: bool = False,
    ) -> bytes:
        """The values as little-endian float64, and `SALT`; errors as in `SumSilo.contribute`."""
        if self.silo_id not in cohort:
            raise ProtocolError(f"silo '{self.silo_id}' is not in the cohort of sum {index}")
        if index <= self._last_index:
            raise ProtocolError(f"sum index {index} was used already")
        if values.shape != (table.size,):
            raise AggregationError(f"expected {table.size} values in one dimension, got shape {values.shape}")
        if not (np.abs(values) <= table.bounds).all():
            for block, part in zip(table.blocks, table.split(values).values(), strict=True):
                if not (np.abs(part) <= block.bound).all():
                    what = "past its bound" if np.isfinite(part).all() else "that is not finite; its bound is"
                    raise AggregationError(f"block '{block.name}' holds a value {what} {block.bound:g}")
        self._last_index = index
        asked = question or index.to_bytes(8, "big", signed=True) + context
        salt = hashlib.blake2b(asked, key=self._secret, digest_size=SALT).digest()
        return values.astype(WIRE, copy=False).tobytes() + salt

    def handle(self, message: bytes) -> bytes:
        """Plain sums exchange nothing besides the contributions."""
        raise ProtocolError("a plain sum has no further messages")
