"""What each party of a run could see, as plain data that attacks are run on again and again.

    server        every message to and from silos and key holder, and every total
    a silo        what it was sent and what it sent
    key-holder    what it was sent and what it sent
    network       who sent how many bytes to whom, and when: all that mutual TLS leaves in sight

A transcript is what the adversary holds, so whoever holds a transcript is the adversary: `worlds.Recorder` makes one on
real data only on an explicit word. It stays in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from secure_fvi.aggregation.base import BlockTable, FloatArray
from secure_fvi.aggregation.key_holder import KEY_HOLDER
from secure_fvi.algorithms.base import Broadcast
from secure_fvi.errors import InputError
from secure_fvi.messages import ROUND, decode_broadcast

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


def _is_round(entry: Entry) -> bool:
    return entry.body[:1] == ROUND and entry.party != KEY_HOLDER
