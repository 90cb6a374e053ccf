"""All parties of a secure sum in one process, each on its own stopwatch, and every total checked against NumPy's.

Values are multiples of 2^-10 in [-1, 1]: any ring and any order of float64 additions sums them without error, so that
a total is either equal to NumPy's to the last bit or wrong.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from secure_fvi.aggregation import Block, BlockTable, Masked, Plain
from secure_fvi.aggregation.base import Exchanges, FloatArray, SumServer, SumSilo, Total
from secure_fvi.aggregation.graph import neighbourhood
from secure_fvi.aggregation.homomorphic import Homomorphic, WithHolder
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.aggregation.roster import MAX_ATTEMPTS, Roster
from secure_fvi.aggregation.store import MemoryStore, SqliteStore, Store
from secure_fvi.errors import AggregationError, ProtocolError

P = ParamSpec("P")
T = TypeVar("T")

#: Above this many silos one process cannot check every signature once a silo in reasonable time; see `Stopwatch`.
CHECKED_ONE_BY_ONE = 32


@dataclass(frozen=True)
class Setting:
    """One session of parties. `bits` is the ring's width; `durable` keeps state in SQLite files."""

    kind: str  # "plain", "masked" (sums that recover), "whole" (masked ones that lack nobody), "homomorphic"
    silos: int
    bits: int = 64
    consistency_check: bool = True
    durable: bool = False

    @property
    def neighbours(self) -> int:
        """Silos with which each silo masks."""
        if self.kind == "plain":
            return 0
        return neighbourhood(self.silos, 0.1, 0.1, MAX_ATTEMPTS * self.silos if self.kind == "whole" else 1).k


class SumTimes(NamedTuple):
    """What one sum cost: seconds, exchanges, bytes. Signature checks are part of their party's time."""

    silo: float  # mean over contributing silos
    contribute: float  # of which encoding, masking, packing
    silo_checks: float  # of which signature checks
    server: float  # the key holder included
    server_checks: float
    holder: float
    together: float  # all parties, one after another
    refill: float  # one-time secrets that this sum happened to need, all parties; not in the above
    exchanges: int
    bytes_up: float  # mean over contributing silos


class PrepareTimes(NamedTuple):
    """Set-up and refills, seconds; signature checks included."""

    silo: float  # mean over silos
    server: float


class Stopwatch:
    """Seconds by party. As a context it also times signature checks, wherever they happen.

    With `share`, a signature that several parties check is checked once, and what that took is charged to each
    of them: 1,000 silos that check 667 signatures each would take this process over a minute a sum.
    """

    def __init__(self) -> None:
        self.share = False
        self.seconds: dict[str, float] = defaultdict(float)
        self.checks: dict[str, float] = defaultdict(float)
        self.charged = 0.0  # seconds not spent, but charged
        self._checking = 0.0  # seconds of signature checks, spent or charged
        self._known: dict[tuple[int, bytes, bytes], tuple[bool, float]] = {}
        self._verify = Roster.verify

    def __enter__(self) -> Self:
        verify = self._verify

        def timed(roster: Roster, place: int, signature: bytes, statement: bytes) -> bool:
            key = (place, signature, statement)
            if self.share and (known := self._known.get(key)) is not None:
                self.charged += known[1]
                self._checking += known[1]
                return known[0]
            began = time.perf_counter()
            right = verify(roster, place, signature, statement)
            took = time.perf_counter() - began
            self._checking += took
            if self.share:
                self._known[key] = right, took
            return right

        Roster.verify = timed  # type: ignore[method-assign, assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Roster.verify = self._verify  # type: ignore[method-assign]

    def __call__(self, party: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Do `work` on `party`'s time."""
        charged, checking = self.charged, self._checking
        began = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            self.seconds[party] += time.perf_counter() - began + self.charged - charged
            self.checks[party] += self._checking - checking

    def reset(self) -> None:
        self.seconds.clear()
        self.checks.clear()

    def new_session(self, share: bool) -> None:
        """Forget the signatures of the session before."""
        self._known.clear()
        self.share = share


class Parties:
    """The parties of one `Setting`, from set-up to the last sum."""

    def __init__(self, setting: Setting, watch: Stopwatch, folder: Path | None = None) -> None:
        """`folder` takes the SQLite files of a durable setting."""
        self.setting = setting
        self.ids = [f"silo-{at:04d}" for at in range(setting.silos)]
        self._watch = watch
        self._server, self._silos, self.batch = self._make(folder)
        self._exchanges = 0
        self._bytes_up = 0
        self._tables: dict[int, tuple[BlockTable, FloatArray]] = {}
        self._expected: dict[tuple[int, int], FloatArray] = {}
        watch.new_session(share=setting.silos > CHECKED_ONE_BY_ONE)
        self.setup = self._prepare(0)
        # The first index of the second batch: no set-up, a refill alone.
        refill = self._prepare(self.batch)
        self.refill = PrepareTimes(refill.silo / self.batch, refill.server / self.batch)
        self._index = self.batch

    def _make(self, folder: Path | None) -> tuple[SumServer, Mapping[str, SumSilo], int]:
        """Server, silos by id, and the number of sums that one refill lasts."""
        setting = self.setting
        stores = iter(range(setting.silos + 2))

        def store(_: str) -> Store:
            return MemoryStore() if folder is None else SqliteStore(folder / f"{next(stores)}.sqlite")

        if setting.kind == "plain":
            server, silos = local_parties(Plain(), self.ids)
            return server, silos, 1
        if setting.kind in ("masked", "whole"):
            most = 0 if setting.kind == "whole" else max(len(self.ids) - 3, 1)
            bits: Any = setting.bits
            kind = Masked(max_missing=most, bits=bits, consistency_check=setting.consistency_check)
            server, silos = local_parties(kind, self.ids, store)
            # The batch follows from the number of silos; the keys of this second roster are nobody's.
            return server, silos, kind.roster({silo: silo.encode().ljust(32) for silo in self.ids}).batch
        inner, silos, holder = Homomorphic(batch=4, max_missing=max(len(self.ids) - 3, 0)).parties(self.ids, store)
        return WithHolder(inner, lambda message: self._watch("holder", holder.handle, message)), silos, 4

    def sum(self, length: int, lost: int = 0) -> SumTimes:
        """One sum of `length` values a silo; `lost` silos fall silent before they contribute.

        Raises AggregationError for a total that is not NumPy's.
        """
        watch, index = self._watch, self._index
        self._index += 1
        table, base = self._table(length)
        context = hashlib.sha256(index.to_bytes(8, "big")).digest()
        present = self.ids[lost:]
        watch.reset()
        began = time.perf_counter()
        self._carry(self._server.prepare(index), self.ids)
        refill = time.perf_counter() - began
        watch.reset()
        charged = watch.charged
        self._exchanges, self._bytes_up = 1, 0
        began = time.perf_counter()
        messages = {}
        for at, silo in enumerate(present, lost):
            values = base[at : at + length]
            messages[silo] = watch("silos", self._silos[silo].contribute, index, self.ids, table, values, context)
        contribute = watch.seconds["silos"]
        total = self._carry(self._server.total(index, self.ids, table, messages, context), present)
        together = time.perf_counter() - began + watch.charged - charged
        self._check(total, length, lost)
        count = len(present)
        return SumTimes(
            silo=watch.seconds["silos"] / count,
            contribute=contribute / count,
            silo_checks=watch.checks["silos"] / count,
            server=watch.seconds["server"],
            server_checks=watch.checks["server"],
            holder=watch.seconds["holder"],
            together=together,
            refill=refill,
            exchanges=self._exchanges,
            bytes_up=(self._bytes_up + sum(map(len, messages.values()))) / count,
        )

    def _prepare(self, index: int) -> PrepareTimes:
        self._watch.reset()
        self._carry(self._server.prepare(index), self.ids)
        return PrepareTimes(self._watch.seconds["silos"] / self.setting.silos, self._watch.seconds["server"])

    def _table(self, length: int) -> tuple[BlockTable, FloatArray]:
        """The table of `length` values, and the array of which silo j contributes [j, j + length)."""
        if length not in self._tables:
            rng = np.random.default_rng(length)
            base: FloatArray = np.ldexp(rng.integers(-1024, 1025, length + self.setting.silos), -10).astype(np.float64)
            self._tables[length] = BlockTable((Block("values", (length,), 1.0),)), base
        return self._tables[length]

    def _carry(self, exchanges: Exchanges[T], reachable: list[str]) -> T:
        """Run `exchanges` with the silos that are `reachable`."""
        within, watch = set(reachable), self._watch
        step: Callable[[], Mapping[str, bytes]] = partial(next, exchanges)
        try:
            while True:
                messages = watch("server", step)
                replies = {}
                for silo in messages.keys() & within:
                    try:
                        replies[silo] = watch("silos", self._silos[silo].handle, messages[silo])
                    except ProtocolError as error:
                        raise AggregationError(f"an honest message was refused: {error}") from error
                    self._bytes_up += len(replies[silo])
                self._exchanges += 1
                step = partial(exchanges.send, replies)
        except StopIteration as end:
            result: T = end.value
            return result

    def _check(self, total: Total, length: int, lost: int) -> None:
        """Raise AggregationError unless survivors and total are what they must be."""
        if (length, lost) not in self._expected:
            base = self._table(length)[1]
            expected = np.zeros(length)
            for at in range(lost, self.setting.silos):
                expected += base[at : at + length]
            self._expected[length, lost] = expected
        if total.survivors != tuple(self.ids[lost:]) or not np.array_equal(total.values, self._expected[length, lost]):
            raise AggregationError(f"the {self.setting.kind} sum of {length} values is wrong; its time means nothing")


# ---- What secure sums are measured against, in the same process: the floor, Flower's SecAgg+, TenSEAL alone ----

#: Keystream and sum of a chunk stay in the second-level cache together.
_CHUNK = 1 << 17
#: Defaults of Flower's SecAggPlusWorkflow.
_CLIPPING_RANGE, _QUANTIZATION_RANGE, _MODULUS_RANGE, _MAX_WEIGHT = 8.0, 1 << 22, 1 << 32, 1000.0
#: TenSEAL's parameters here: ring degree, and a plaintext prime of 58 bits.
_DEGREE = 8192


class Floor:
    """AES-256-CTR keystreams, added up in Z_2^bits: what masking cannot do without. No encoding, keys or messages."""

    def __init__(self, length: int, bits: int, masks: int) -> None:
        self._dtype = np.dtype(np.uint32 if bits == 32 else np.uint64)
        self._length = length
        self._keys = [os.urandom(32) for _ in range(masks)]
        self._zeros = bytes(min(_CHUNK, length * self._dtype.itemsize))
        self.total = np.zeros(0, self._dtype)

    def run(self) -> float:
        """Seconds. The sum of the keystreams is left in `total`, for tests."""
        began = time.perf_counter()
        encryptors = [Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor() for key in self._keys]
        total = np.zeros(self._length, self._dtype)
        buffer = bytearray(len(self._zeros) + 15)
        stream = np.frombuffer(buffer, self._dtype, len(self._zeros) // self._dtype.itemsize)
        for start in range(0, self._length, stream.size):
            part = total[start : start + stream.size]
            zeros = self._zeros if part.size == stream.size else self._zeros[: part.nbytes]
            for encryptor in encryptors:
                encryptor.update_into(zeros, buffer)
                np.add(part, stream[: part.size], out=part)
        took = time.perf_counter() - began
        self.total = total
        return took


class FlowerTimes(NamedTuple):
    """Seconds of one client."""

    client: float  # weighting, quantisation, masks, their addition, modulus, serialisation
    masks: float  # of which generating masks


class Flower:
    """A client's `collect masked vectors` stage of SecAgg+, by Flower's own functions in Flower's own order.

    Left out, in Flower's favour: key agreement with each neighbour, and the decryption of the shares it sent.
    """

    def __init__(self, length: int, neighbours: int) -> None:
        """Raises ImportError where Flower is not installed."""
        # Flower looks outside on its own account unless it is told not to.
        for name in ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK"):
            os.environ.setdefault(name, "0" if name.endswith("ENABLED") else "1")
        package = "flwr.common.secure_aggregation"
        self._arithmetic: Any = importlib.import_module(f"{package}.ndarrays_arithmetic")
        self._quantize: Any = importlib.import_module(f"{package}.quantization").quantize
        self._generate: Any = importlib.import_module(f"{package}.secaggplus_utils").pseudo_rand_gen
        self._serialise: Any = importlib.import_module("flwr.common").ndarray_to_bytes
        self._values = np.random.default_rng(2).uniform(-1, 1, length).astype(np.float32)
        self._seeds = [os.urandom(32) for _ in range(neighbours + 1)]

    def run(self) -> FlowerTimes:
        """Time one client. Half of its neighbours come before it in the order that decides signs."""
        arithmetic, masking = self._arithmetic, 0.0
        began = time.perf_counter()
        weight = round(1.0 / _MAX_WEIGHT * _QUANTIZATION_RANGE)
        weighted = arithmetic.parameters_multiply([self._values], weight / _QUANTIZATION_RANGE)
        vector = self._quantize(weighted, _CLIPPING_RANGE, _QUANTIZATION_RANGE)
        vector = arithmetic.factor_combine(weight, vector)
        shapes = [part.shape for part in vector]
        for at, seed in enumerate(self._seeds):
            start = time.perf_counter()
            mask = self._generate(seed, _MODULUS_RANGE, shapes)
            masking += time.perf_counter() - start
            # The first is the private mask, which is added.
            combine = arithmetic.parameters_subtraction if at % 2 else arithmetic.parameters_addition
            vector = combine(vector, mask)
        vector = arithmetic.parameters_mod(vector, _MODULUS_RANGE)
        for part in vector:
            self._serialise(part)
        return FlowerTimes(time.perf_counter() - began, masking)


class TenSEALTimes(NamedTuple):
    """Seconds of a sum by TenSEAL alone."""

    silo: float  # encrypt and serialise, mean over silos
    server: float  # read, add and decrypt

    def together(self, silos: int) -> float:
        return silos * self.silo + self.server


class TenSEAL:
    """BFV with this package's parameters on one thread, as TenSEAL's documentation uses it; no masks, no protocol."""

    def __init__(self, length: int, silos: int) -> None:
        """Raises ImportError where TenSEAL is not installed."""
        self._ts: Any = importlib.import_module("tenseal")
        prime = importlib.import_module("secure_fvi.aggregation.homomorphic_schemes").BFV_PRIME
        self._secret = self._ts.context(self._ts.SCHEME_TYPE.BFV, _DEGREE, prime, n_threads=1)
        self._public = self._ts.context_from(self._secret.serialize(True, False, False, False), n_threads=1)
        largest = prime // (2 * silos) - 1
        rng = np.random.default_rng(1)
        self._values = [rng.integers(-largest, largest + 1, length) for _ in range(silos)]

    def run(self) -> TenSEALTimes:
        """Time one sum. Raises AggregationError for a total that is not NumPy's."""
        ts, began, sent = self._ts, time.perf_counter(), []
        for values in self._values:
            parts = (values[at : at + _DEGREE] for at in range(0, values.size, _DEGREE))
            sent.append([ts.bfv_vector(self._public, part).serialize() for part in parts])
        encrypted = time.perf_counter()
        total: list[Any] = []
        for parts_sent in sent:
            vectors = [ts.bfv_vector_from(self._public, data) for data in parts_sent]
            if total:
                for left, right in zip(total, vectors, strict=True):
                    left.add_(right)
            else:
                total = vectors
        for vector in total:
            vector.link_context(self._secret)
        result = np.concatenate([np.array(vector.decrypt(), np.int64) for vector in total])
        ended = time.perf_counter()
        if not np.array_equal(result, np.sum(self._values, axis=0)):
            raise AggregationError("TenSEAL's own sum is wrong; its time means nothing")
        return TenSEALTimes((encrypted - began) / len(self._values), ended - encrypted)
