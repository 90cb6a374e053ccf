"""How long a homomorphic sum takes, beside TenSEAL alone in the same run: for `secure-fvi bench secure-sum`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from secure_fvi.aggregation.base import Block, BlockTable, Exchanges, SumSilo, T
from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.aggregation.homomorphic_schemes import DEGREE
from secure_fvi.aggregation.key_holder import KEY_HOLDER, KeyHolder
from secure_fvi.aggregation.modular import BFV_HALF, BFV_PRIME

_CONTEXT = bytes(32)


class HomomorphicTiming(NamedTuple):
    """The fastest repetition of one sum in the steady state, milliseconds; all parties on one thread.

    The fastest, since other work on the machine only ever adds.
    """

    silo_ms: float  # one silo: encoding, masks, encryption, serialisation, signature, shares
    server_ms: float
    holder_ms: float
    total_ms: float  # all silos, server and key holder
    tenseal_ms: float  # TenSEAL alone for as many silos: encrypt, serialise, read, add, decrypt
    ratio: float  # total_ms / tenseal_ms
    bytes_up_per_silo: int  # the contribution


def time_bfv(length: int = 100_000, silos: int = 3, repeats: int = 7, masks: bool = True) -> HomomorphicTiming:
    """Time BFV sums of `length` values over `silos`, each repetition next to one of TenSEAL alone."""
    ids = [f"silo-{at:04d}" for at in range(silos)]
    server, parties, holder = Homomorphic(masks=masks, min_cohort=min(3, silos)).parties(ids)
    table = BlockTable((Block("values", (length,), 1.0),))
    rng = np.random.default_rng(0)
    values = {silo: rng.uniform(-1, 1, length) for silo in ids}
    bare = _Bare(length, silos)
    rows = []
    clock = _Clock()
    _carry(server.prepare(0), parties, holder, clock)
    for index in range(repeats + 1):
        clock.spent.clear()
        start = time.perf_counter()
        _carry(server.prepare(index), parties, holder, clock)
        messages = {
            silo: clock("silos", partial(parties[silo].contribute, index, ids, table, values[silo], _CONTEXT))
            for silo in ids
        }
        result = _carry(server.total(index, ids, table, messages, _CONTEXT), parties, holder, clock)
        elapsed = time.perf_counter() - start
        assert np.allclose(result.values, sum(values.values()), atol=1e-9)
        alone = bare.run()
        at_silos, at_holder = clock.spent["silos"], clock.spent["holder"]
        rows.append((at_silos / silos, elapsed - at_silos - at_holder, at_holder, elapsed, alone))
    # The first repetition warms caches and is left out.
    silo, at_server, at_holder, total, tenseal = (1000 * min(column) for column in zip(*rows[1:], strict=True))
    return HomomorphicTiming(silo, at_server, at_holder, total, tenseal, total / tenseal, len(messages[ids[0]]))


class _Clock:
    """Adds up the time spent in each party."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def __call__(self, party: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        self.spent[party] = self.spent.get(party, 0.0) + time.perf_counter() - start
        return result


def _carry(exchanges: Exchanges[T], parties: Mapping[str, SumSilo], holder: KeyHolder, clock: _Clock) -> T:
    """Run `exchanges` with every party in this process."""
    try:
        messages = next(exchanges)
        while True:
            replies = {}
            for peer, message in messages.items():
                party: Any = holder if peer == KEY_HOLDER else parties[peer]
                name = "holder" if peer == KEY_HOLDER else "silos"
                replies[peer] = clock(name, partial(party.handle, message))
            messages = exchanges.send(replies)
    except StopIteration as end:
        result: T = end.value
        return result


class _Bare:
    """TenSEAL as its own documentation uses it, with this package's parameters, and nothing around it."""

    def __init__(self, length: int, silos: int) -> None:
        import tenseal

        self._ts = tenseal
        self._secret = tenseal.context(tenseal.SCHEME_TYPE.BFV, DEGREE, BFV_PRIME, n_threads=1)
        self._public = tenseal.context_from(self._secret.serialize(True, False, False, False), n_threads=1)
        rng = np.random.default_rng(1)
        self._values = [rng.integers(-BFV_HALF, BFV_HALF, length) for _ in range(silos)]

    def run(self) -> float:
        """Seconds to encrypt, serialise, read, add and decrypt, from and to arrays."""
        ts, start = self._ts, time.perf_counter()
        total: list[Any] = []
        for values in self._values:
            parts = (values[at : at + DEGREE] for at in range(0, values.size, DEGREE))
            sent = [ts.bfv_vector(self._public, part).serialize() for part in parts]
            vectors = [ts.bfv_vector_from(self._public, data) for data in sent]
            if total:
                for left, right in zip(total, vectors, strict=True):
                    left.add_(right)
            else:
                total = vectors
        for vector in total:
            vector.link_context(self._secret)
        np.concatenate([np.array(vector.decrypt(), np.int64) for vector in total])
        return time.perf_counter() - start
