"""What each party of a run could see, as plain data that attacks are run on again and again.

    server        every message to and from silos and key holder, and every total
    a silo        what it was sent and what it sent
    key-holder    what it was sent and what it sent
    network       who sent how many bytes to whom, and when: all that mutual TLS leaves in sight

A transcript is what the adversary holds, so whoever holds a transcript is the adversary: `recording.Recorder` makes one
on real data only on an explicit word, and `save` encrypts it at rest.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgpack
import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from secure_fvi import wire
from secure_fvi.aggregation.base import Block, BlockTable, FloatArray
from secure_fvi.aggregation.key_holder import KEY_HOLDER
from secure_fvi.algorithms.base import Broadcast
from secure_fvi.errors import InputError
from secure_fvi.files import write_atomically
from secure_fvi.messages import ROUND, decode_broadcast

VERSION = 1
SERVER, NETWORK = "server", "network"
#: Phase of the secure sum's own messages before the broadcast of a sum.
SET_UP = "set-up"
Direction = Literal["down", "up"]


class Entry(NamedTuple):
    """One message. `body` is empty where the onlooker sees the size alone; then round is -1 and phase empty."""

    round: int
    phase: str
    direction: Direction  # "down": from the server
    party: str  # the silo, or the key holder
    body: bytes
    size: int  # bytes
    seconds: float  # since the recording began


class Sum(NamedTuple):
    """One secure sum's outcome."""

    round: int
    sum_index: int
    phase: str
    survivors: tuple[str, ...]
    values: FloatArray  # (table.size,) as the server saw it
    released: FloatArray  # the same after noise that the server itself adds; equal to `values` without


@dataclass(frozen=True)
class Transcript:
    """A run as one onlooker saw it. Only the server has `sums`."""

    algorithm: str
    aggregation: str  # kind of the secure sum
    silos: tuple[str, ...]
    tables: Mapping[str, BlockTable]  # by phase; every party knows them
    entries: tuple[Entry, ...]
    sums: tuple[Sum, ...]
    simulated: bool  # the recording party's own statement: made, resampled or published data
    seen_by: str = SERVER

    def view(self, who: str) -> Transcript:
        """The part that `who` sees: "server", "network", "key-holder" or a silo's id."""
        if self.seen_by != SERVER:
            raise InputError(f"this transcript is what '{self.seen_by}' saw; views are taken from the server's")
        if who == SERVER:
            return self
        if who == NETWORK:
            hidden = tuple(e._replace(round=-1, phase="", body=b"") for e in self.entries)
            return replace(self, entries=hidden, sums=(), seen_by=who)
        if who not in (*self.silos, KEY_HOLDER):
            known = ", ".join((SERVER, NETWORK, KEY_HOLDER, *self.silos[:5]))
            raise InputError(f"nobody is called '{who}'; a transcript is seen by {known}, ...")
        return replace(self, entries=tuple(e for e in self.entries if e.party == who), sums=(), seen_by=who)

    def broadcasts(self) -> list[Broadcast]:
        """The algorithm's messages, one a sum, in order."""
        found: dict[bytes, Broadcast] = {}
        for entry in self.entries:
            if entry.direction == "down" and _is_round(entry) and entry.body not in found:
                found[entry.body] = decode_broadcast(entry.body[1:])
        return list(found.values())

    def contributions(self) -> list[dict[str, bytes]]:
        """What each silo answered to each broadcast, in the order of `broadcasts`, as the secure sum packed it."""
        found: dict[bytes, dict[str, bytes]] = {}
        asked: dict[str, bytes] = {}
        for entry in self.entries:
            if entry.direction == "down":
                asked[entry.party] = entry.body if _is_round(entry) else b""
                if _is_round(entry):
                    found.setdefault(entry.body, {})
            elif asked.get(entry.party):
                found[asked.pop(entry.party)][entry.party] = entry.body
        return list(found.values())

    def pack(self) -> bytes:
        """MessagePack of a fixed schema; `unpack` reads it."""
        packed: bytes = msgpack.packb(
            [
                VERSION,
                self.algorithm,
                self.aggregation,
                list(self.silos),
                {phase: [_pack_block(b) for b in table.blocks] for phase, table in self.tables.items()},
                [list(entry) for entry in self.entries],
                [[*s[:3], list(s.survivors), _pack_array(s.values), _pack_array(s.released)] for s in self.sums],
                self.simulated,
                self.seen_by,
            ]
        )
        return packed

    @classmethod
    def unpack(cls, raw: bytes) -> Transcript:
        """Raises InputError unless `raw` has exactly the schema."""
        try:
            version, algorithm, aggregation, silos, tables, entries, sums, simulated, seen_by = wire.own(
                raw, "a transcript"
            )
            if version != VERSION:
                raise InputError(f"a transcript of version {version}; this program reads version {VERSION}")
            text = all(isinstance(s, str) for s in (algorithm, aggregation, seen_by, *silos))
            if not (text and type(simulated) is bool):
                raise ValueError("names and flags")
            return cls(
                algorithm,
                aggregation,
                tuple(silos),
                {phase: BlockTable(tuple(_unpack_block(b) for b in blocks)) for phase, blocks in tables.items()},
                tuple(_unpack_entry(e) for e in entries),
                tuple(_unpack_sum(s) for s in sums),
                simulated,
                seen_by,
            )
        except InputError:
            raise
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError("this is no transcript: its content has another form") from error


def _is_round(entry: Entry) -> bool:
    return entry.body[:1] == ROUND and entry.party != KEY_HOLDER


def _pack_block(block: Block) -> list[Any]:
    return [block.name, list(block.shape), block.bound, block.integer]


def _unpack_block(fields: Any) -> Block:
    name, shape, bound, integer = fields
    return Block(str(name), tuple(int(n) for n in shape), float(bound), bool(integer))


def _unpack_entry(fields: Any) -> Entry:
    round_, phase, direction, party, body, size, seconds = fields
    kinds = (int, str, str, str, bytes, int, float)
    if direction not in ("down", "up") or any(type(v) is not k for v, k in zip(fields, kinds, strict=True)):
        raise ValueError("an entry")
    return Entry(round_, phase, direction, party, body, size, seconds)


def _unpack_sum(fields: Any) -> Sum:
    round_, index, phase, survivors, values, released = fields
    if type(round_) is not int or type(index) is not int or type(phase) is not str:
        raise ValueError("a sum")
    return Sum(round_, index, phase, tuple(map(str, survivors)), _unpack_array(values), _unpack_array(released))


def _pack_array(values: FloatArray) -> bytes:
    return values.astype("<f8").tobytes()


def _unpack_array(raw: bytes) -> FloatArray:
    values = np.frombuffer(raw, "<f8").copy()
    if not math.isfinite(float(np.abs(values).sum())):
        raise ValueError("a total that is not finite")
    return values


# ---- Transcripts at rest: ChaCha20-Poly1305 under a key that lies in a file of its own ----

_LABEL = b"secure-fvi/transcript/1\n"
_NONCE = 12


def new_key(path: Path) -> None:
    """Write a fresh key that only its owner can read. Raises InputError where the file exists."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(f"'{path}' exists; a key is never written over") from None
    with os.fdopen(handle, "wb") as file:
        file.write(ChaCha20Poly1305.generate_key())


def save(transcript: Transcript, path: Path, key_file: Path) -> None:
    """Encrypt and write, whole or not at all."""
    nonce = os.urandom(_NONCE)
    sealed = _cipher(key_file).encrypt(nonce, transcript.pack(), _LABEL)
    write_atomically(path, _LABEL + nonce + sealed)


def load(path: Path, key_file: Path) -> Transcript:
    """Raises InputError for another key, a changed file, or no transcript at all."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the transcript '{path}': {error.strerror}") from error
    if not raw.startswith(_LABEL):
        raise InputError(f"'{path}' is no transcript")
    nonce, sealed = raw[len(_LABEL) :][:_NONCE], raw[len(_LABEL) + _NONCE :]
    try:
        packed = _cipher(key_file).decrypt(nonce, sealed, _LABEL)
    except (InvalidTag, ValueError):
        raise InputError(f"'{path}' cannot be opened: another key, or a changed file") from None
    return Transcript.unpack(packed)


def _cipher(key_file: Path) -> ChaCha20Poly1305:
    try:
        key = key_file.read_bytes()
        mode = key_file.stat().st_mode
    except OSError as error:
        raise InputError(f"cannot read the key '{key_file}': {error.strerror}; `new_key` makes one") from error
    if len(key) != 32:
        raise InputError(f"'{key_file}' holds {len(key)} bytes, not a key of 32")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(f"others than its owner can use the key '{key_file}'; set its mode to 600")
    return ChaCha20Poly1305(key)
