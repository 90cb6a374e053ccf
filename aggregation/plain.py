"""Plain sums: no protection. The server sees every contribution; the reference for the other kinds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from secure_fvi.aggregation.base import (
    BlockTable,
    Exchanges,
    FloatArray,
    Form,
    Seat,
    SumSilo,
    Total,
)
from secure_fvi.errors import AggregationError, ProtocolError

_log = logging.getLogger(__name__)
_WIRE = np.dtype("<f8")


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
        """One silo's half, which needs its name alone."""
        return PlainSilo(seat.silo)


class PlainSilo:
    """A silo's half: checks the values as every kind does, then sends them as they are."""

    def __init__(self, silo_id: str) -> None:
        self.silo_id = silo_id
        self._last_index = -1

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
    ) -> bytes:
        """The values as little-endian float64; errors as in `SumSilo.contribute`."""
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
        return values.astype(_WIRE, copy=False).tobytes()

    @property
    def whole(self) -> bool:
        """The server adds what came in."""
        return False

    @property
    def keys(self) -> bytes:
        """There are none."""
        return b""

    def absent_from(self, question: bytes) -> tuple[str, ...] | None:
        """Nothing is signed; the server has every term anyway."""
        return None

    def shown(self, question: bytes) -> bool | None:
        """Nothing is signed."""
        return None

    def left_out(self, question: bytes) -> bool | None:
        """Nothing is signed."""
        return None

    def handle(self, message: bytes) -> bytes:
        """Plain sums exchange nothing besides the contributions."""
        raise ProtocolError("a plain sum has no further messages")


class PlainServer:
    """The server's half: adds in the order of the silo ids, so that the float total is deterministic."""

    def __init__(self, silo_ids: Sequence[str]) -> None:
        self._ids = frozenset(silo_ids)

    def prepare(self, index: int) -> Exchanges[None]:
        """Nothing to prepare."""
        yield from ()

    def total(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        contributions: Mapping[str, bytes],
        context: bytes,
        question: bytes | None = None,
    ) -> Exchanges[Total]:
        """Add what arrived from the cohort; raises AggregationError when nothing did."""
        yield from ()
        survivors, left_out = list[str](), list[str]()
        values = np.zeros(table.size)
        for silo in sorted(set(cohort) & self._ids):
            data = contributions.get(silo)
            if data is None:
                continue
            wrong = _misfit(data, table)
            if wrong:
                left_out.append(silo)
                _log.warning("sum %d: silo '%s' is left out: %s", index, silo, wrong)
                continue
            values += np.frombuffer(data, _WIRE)
            survivors.append(silo)
        if not survivors:
            named = "".join(f"; silo '{silo}' sent what does not fit" for silo in left_out[:3])
            raise AggregationError(f"sum {index}: no silo answered{named}")
        return Total(values, tuple(survivors))


def _misfit(data: bytes, table: BlockTable) -> str:
    """Why `data` is no contribution by this table; empty where it is one. Quotes none of it."""
    if len(data) != table.size * _WIRE.itemsize:
        return f"{len(data)} bytes, where {table.size * _WIRE.itemsize} are expected"
    for name, inside in table.split((np.abs(np.frombuffer(data, _WIRE)) <= table.bounds).astype(np.float64)).items():
        if not inside.all():
            return f"its part of '{name}' is not finite or past the bound"
    return ""
