"""A network in one process: carries the bytes of one sum, loses what a test wants lost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from secure_fvi.aggregation import Block, BlockTable, Total
from secure_fvi.aggregation.base import Exchanges, FloatArray, SumServer, SumSilo, T
from secure_fvi.errors import ProtocolError

CONTEXT = bytes(range(32))

#: Called with (silo, message); returns the reply, or None where it is lost.
Carrier = Callable[[str, bytes], bytes | None]


def carry(exchanges: Exchanges[T], silos: Mapping[str, SumSilo], lost: Collection[Collection[str]] = ()) -> T:
    """Run `exchanges`; `lost` are the silos that do not answer in the first, second, ... of them."""
    gone = list(lost)
    reply: Mapping[str, bytes] = {}
    step = 0
    try:
        messages = next(exchanges)
        while True:
            away = gone[step] if step < len(gone) else ()
            reply = {}
            for silo, message in messages.items():
                if silo in away or silo not in silos:
                    continue
                try:
                    reply[silo] = silos[silo].handle(message)
                except ProtocolError:
                    continue
            step += 1
            messages = exchanges.send(reply)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def contribute(
    silos: Mapping[str, SumSilo],
    index: int,
    table: BlockTable,
    values: Mapping[str, FloatArray],
    cohort: Sequence[str] | None = None,
    context: bytes = CONTEXT,
) -> dict[str, bytes]:
    """Contributions of those in `values`."""
    cohort = sorted(silos) if cohort is None else cohort
    return {s: silos[s].contribute(index, cohort, table, v, context) for s, v in values.items()}


def run_sum(
    server: SumServer,
    silos: Mapping[str, SumSilo],
    index: int,
    table: BlockTable,
    values: Mapping[str, FloatArray],
    cohort: Sequence[str] | None = None,
    lost: Collection[Collection[str]] = (),
) -> Total:
    """One whole sum; silos of the cohort that have no values drop out before they contribute."""
    carry(server.prepare(index), silos)
    cohort = sorted(silos) if cohort is None else cohort
    messages = contribute(silos, index, table, values, cohort)
    return carry(server.total(index, cohort, table, messages, CONTEXT), silos, lost)


def names(count: int) -> list[str]:
    """`count` silo ids whose order is not the order of their numbers."""
    return [f"silo-{(7 * i) % 1009:04d}" for i in range(count)]


def table_of(size: int, bound: float = 10.0) -> BlockTable:
    """One real block and one integer block."""
    return BlockTable((Block("gradient", (size - 1,), bound), Block("count", (1,), 1e6, integer=True)))


def random_values(ids: Sequence[str], table: BlockTable, seed: int = 0, bound: float = 10.0) -> dict[str, FloatArray]:
    """Values within `table_of`'s bounds."""
    rng = np.random.default_rng(seed)
    return {s: np.append(rng.uniform(-bound, bound, table.size - 1), float(rng.integers(0, 1000))) for s in ids}
