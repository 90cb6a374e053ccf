"""What secure sums are measured against, in the same process: the floor, Flower's SecAgg+, TenSEAL alone."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from secure_fvi.errors import AggregationError

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
        """All parties, one after another."""
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
