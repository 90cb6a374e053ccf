"""Random numbers that depend on who a record is, not on where it stands.

eps_L comes from a counter-based generator: AES-256 under a key derived from the silo's secret, applied to
(record id, number, position). The number follows from the silo's own count of the questions that it was asked, never
from one that the server names. The same records under another partition get the same draws (SFVI's invariance),
and a server without the secret can never replay them. Distinct counters in, independent 64-bit words out: this
is AES as a pseudorandom function, which is what "ECB" computes; no message is encrypted here.

Id, number and position have 64, 32 and 32 bits of the 128 that enter. What does not fit is refused: a number cut to its
last bits would meet the draws of another one.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from secure_fvi.errors import ProtocolError

_LABEL = b"secure-fvi/draws/1/"
_AHEAD = 16_000  # numbers drawn ahead at most, so few that they stay in the processor's cache
UNIT_ID = -1  # the "record" that stands for the silo itself
#: Numbers that name draws lie below, and so do positions in a draw, in pairs.
LARGEST = 2**32


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """What PyTorch draws by itself follows from `seed`, and from nothing of it afterwards. On a machine without a GPU
    `torch.manual_seed` keeps its caller's stack for good, each time."""
    with torch.random.fork_rng(devices=[]):
        (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(seed)
        yield


def derive_key(secret: bytes, purpose: bytes) -> bytes:
    """A 32-byte key for one purpose."""
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=_LABEL + purpose).derive(secret)


class KeyedDraws:
    """Draws for a fixed set of ids under one key. `ids` is int64 (N,)."""

    def __init__(self, secret: bytes, purpose: bytes, ids: npt.NDArray[np.int64]) -> None:
        self._cipher = Cipher(algorithms.AES(derive_key(secret, purpose)), modes.ECB())
        self._ids = ids.astype(np.int64).view(np.uint64)
        self._ahead: tuple[int, int, tuple[Tensor, ...]] = (0, -1, ())  # first number, width, draws

    def __repr__(self) -> str:
        return f"KeyedDraws({len(self._ids)} ids)"

    def subset(self, rows: npt.NDArray[np.int64]) -> KeyedDraws:
        """The draws of some of the ids."""
        chosen = copy.copy(self)
        chosen._ids, chosen._ahead = self._ids[rows], (0, -1, ())
        return chosen

    def uniforms(
        self, number: int, width: int, rows: npt.NDArray[np.int64] | None = None, count: int = 1
    ) -> npt.NDArray[np.float64]:
        """Numbers in (0, 1) of 53 bits for `count` draws from `number` on: (count, N or len(rows), width).

        Raises ProtocolError where the draws' numbers or positions do not fit: no other draw may be met.
        """
        ids = self._ids if rows is None else self._ids[rows]
        blocks = (width + 1) // 2
        if not (number >= 0 and number + count <= LARGEST and 0 <= blocks <= LARGEST):
            raise ProtocolError(f"draw {number} with {width} numbers an id is past the last; begin another job")
        counters = np.empty((count, len(ids), blocks, 2), np.uint64)
        counters[..., 0] = ids[:, None]
        at = np.arange(number, number + count, dtype=np.uint64)[:, None, None] << np.uint64(32)
        counters[..., 1] = at | np.arange(blocks, dtype=np.uint64)
        words = np.frombuffer(self._cipher.encryptor().update(counters.tobytes()), np.uint64)
        words = words.reshape(count, len(ids), 2 * blocks)[..., :width]
        return ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53

    def poisson(self, number: int, size: int, rate: float) -> npt.NDArray[np.int64]:
        """Places below `size` of a Poisson sample (B,), rising: each is in it with probability `rate`, whatever others
        are. Of one id. It costs what is drawn: of independent coins the waits between two heads are geometric, and
        follow from one number each, to the last bits of a float64."""
        expected, found = size * rate, np.empty(0, np.int64)
        width = math.ceil(expected + 6 * math.sqrt(expected)) + 16
        while not len(found) or found[-1] < size:  # seldom twice: then the same numbers begin the longer draw
            waits = np.log(self.uniforms(number, width)[0, 0]) / math.log1p(-rate)
            found = np.cumsum(np.minimum(waits, size).astype(np.int64) + 1) - 1
            width *= 2
        return found[: np.searchsorted(found, size)]

    def normals(self, number: int, width: int, rows: npt.NDArray[np.int64] | None = None) -> Tensor:
        """Standard normals, float64 (N or len(rows), width)."""
        if rows is not None:
            return torch.special.ndtri(torch.from_numpy(self.uniforms(number, width, rows)[0]))
        # Numbers come one after the other, so small draws are made for several at once.
        start, drawn, ahead = self._ahead
        if drawn != width or not start <= number < start + len(ahead):
            count = max(1, min(64, _AHEAD // max(len(self._ids) * width, 1), LARGEST - number))
            drawn_ahead = torch.from_numpy(self.uniforms(number, width, None, count))
            start, ahead = number, torch.special.ndtri(drawn_ahead).unbind()
            self._ahead = (start, width, ahead)
        return ahead[number - start]

    def stratified(self, number: int, width: int, count: int) -> Tensor:
        """Standard normals, float64 (count, N, width), Latin hypercube over the draws: for every id and position one
        in each of `count` strata of equal probability, in random order. Means over the draws vary less than with
        independent draws; each alone is an ordinary draw."""
        u = self.uniforms(number, 2 * width, None, count)
        order, jitter = u[..., :width], u[..., width:]
        strata = np.argsort(np.argsort(order, 0), 0)
        return torch.special.ndtri(torch.from_numpy((strata + jitter) / count))


def server_draws(seed: int) -> KeyedDraws:
    """The source of eps_G. Everyone may see the draws; they depend on the seed and the round alone."""
    return KeyedDraws(seed.to_bytes(16, "big", signed=True), b"global", np.array([UNIT_ID]))


def start_draws(seed: int, width: int) -> Tensor:
    """Standard normals, float64 (width,), for a start that all parties share. Everyone may see them."""
    return KeyedDraws(seed.to_bytes(16, "big", signed=True), b"start", np.array([UNIT_ID])).normals(0, width)[0]
