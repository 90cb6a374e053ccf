"""Messages between server and silos: MessagePack of a fixed schema, with tensors as raw bytes. Nothing is unpickled."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from secure_fvi import wire
from secure_fvi.algorithms.base import Broadcast
from secure_fvi.errors import ProtocolError

VERSION = 5
#: First byte of what the server sends: an algorithm's broadcast, or a message of the secure sum.
ROUND, SUM = b"R", b"S"
#: Bytes of a broadcast besides its tensors, at most: what was used of each silo, and ids where not all are asked.
_HEAD_BYTES = 1 << 23

_DTYPES: dict[str, np.dtype[Any]] = {"f8": np.dtype("<f8"), "f4": np.dtype("<f4")}
_NAMES = {torch.float64: "f8", torch.float32: "f4"}
_NAME = wire.text(200)
_TENSOR = wire.Row(wire.text(2), wire.Listed(wire.whole(), 16), wire.binary())
_BROADCAST = wire.Row(
    wire.whole(),  # version
    wire.whole(),  # round
    wire.whole(),  # sum index
    wire.Listed(wire.whole()),  # sums used, in the cohort's order; one number where it is the same of all
    wire.binary(32),  # digest of the cohort
    wire.Listed(_NAME),  # the cohort, where it is not all whom the job asks
    wire.Mapped(wire.real, _NAME),
    wire.Mapped(_TENSOR, _NAME),
    _NAME,  # phase
    wire.Listed(wire.Row(wire.whole(), wire.whole(), _NAME, wire.whole())),  # what the sums used answered
)


def pack_tensors(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """{name: [dtype, shape, bytes]}, little endian."""
    return {name: [_NAMES[t.dtype], list(t.shape), t.cpu().numpy().tobytes()] for name, t in tensors.items()}


def _unpack_tensors(packed: Mapping[str, list[Any]]) -> dict[str, Tensor]:
    """The inverse of `pack_tensors`, of what has the form `_TENSOR`; raises ProtocolError for what is none of it."""
    out: dict[str, Tensor] = {}
    for name, (kind, shape, raw) in packed.items():
        _require(kind in _DTYPES, "a tensor of an unknown kind")
        dtype = _DTYPES[kind]
        _require(len(raw) == math.prod(shape) * dtype.itemsize, "tensor of the wrong length")
        try:
            out[name] = torch.from_numpy(np.frombuffer(bytearray(raw), dtype).reshape(shape))
        except ValueError:  # of no elements, and of longer sides than any array has
            raise ProtocolError("a tensor of an impossible shape") from None
    return out


def encode_broadcast(message: Broadcast, asked: tuple[str, ...] | None = None) -> bytes:
    """Their SHA-256 is the context that a contribution answers. asked: whom the job asks: a cohort of just these is not
    named, since every party knows them, so that a broadcast grows with the silos only where it has to say more."""
    used = [message.accepted.get(silo, 0) for silo in message.cohort]
    packed: bytes = msgpack.packb(
        [
            VERSION,
            message.round,
            message.sum_index,
            used[:1] if len(set(used)) == 1 else used,
            _of_cohort(message.cohort),
            [] if message.cohort == asked else list(message.cohort),
            dict(message.scalars),
            pack_tensors(message.tensors),
            message.phase,
            [list(row) for row in message.sums],
        ]
    )
    return packed


def question_digest(message: Broadcast) -> bytes:
    """SHA-256 of what a broadcast asks, and of whom: all of it but the sum's index and what it says of past sums."""
    tensors = sorted(message.tensors.items())
    head = [message.round, message.phase, message.cohort, sorted(message.scalars.items())]
    shapes = [[name, _NAMES[t.dtype], list(t.shape)] for name, t in tensors]
    digest = hashlib.sha256(b"secure-fvi/question/1" + msgpack.packb([*head, shapes]))
    for _, tensor in tensors:
        digest.update(np.ascontiguousarray(tensor.cpu().numpy()).data)
    return digest.digest()


def decode_broadcast(
    raw: bytes, asked: Callable[[int, str], tuple[str, ...]] | None = None, tensors: int | None = None
) -> Broadcast:
    """Raises ProtocolError unless `raw` has exactly the schema, and tensors of no more bytes than `tensors`.

    asked: whom the job asks, by round and phase. Without it `cohort` and `accepted` are empty of a broadcast that names
    nobody: for who reads the rest."""
    limit = None if tensors is None else wire.Limit(tensors + _HEAD_BYTES)
    fields = wire.decode(raw, _BROADCAST, limit, "a broadcast")
    version, round_, index, used, digest, named, scalars, packed, phase, sums = fields
    _require(version == VERSION, f"a broadcast of version {VERSION} is expected")
    _require(all(math.isfinite(v) for v in scalars.values()), "malformed scalars")
    cohort, accepted = tuple(named), dict[str, int]()
    if not named and asked is not None:
        cohort = asked(round_, phase)
    if cohort:
        _require(digest == _of_cohort(cohort), "the cohort is not the one that the job asks in this round")
        _require(len(used) in (1, len(cohort)), "as many sums used as silos asked, or one for all, are expected")
        accepted = dict(zip(cohort, used if len(used) == len(cohort) else used * len(cohort), strict=True))
    told = cohort, scalars, _unpack_tensors(packed), phase
    return Broadcast(round_, index, accepted, *told, tuple(map(tuple, sums)))


def _of_cohort(cohort: tuple[str, ...]) -> bytes:
    return hashlib.sha256(b"secure-fvi/cohort/1" + msgpack.packb(cohort)).digest()


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ProtocolError(what)
