"""What a party must not forget: "already answered" is written down here before an answer leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class Store(Protocol):
    """A small map from slots to bytes. Every write is durable when the call returns."""

    def claim(self, slot: str, value: bytes) -> bytes:
        """Set `slot` unless it is set; return what it then holds. The first value wins, for ever."""
        ...

    def put(self, slots: Mapping[str, bytes]) -> None:
        """Set all `slots`, whatever they held, or none of them."""
        ...

    def get(self, slot: str) -> bytes | None:
        """What `slot` holds."""
        ...

    def drop(self, slots: Iterable[str]) -> None:
        """Forget those of `slots` that are set."""
        ...


class MemoryStore:
    """A store that lives as long as the process: for the local engine and for tests."""

    def __init__(self) -> None:
        self._slots: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return "MemoryStore(...)"

    def claim(self, slot: str, value: bytes) -> bytes:
        return self._slots.setdefault(slot, value)

    def put(self, slots: Mapping[str, bytes]) -> None:
        self._slots.update(slots)

    def get(self, slot: str) -> bytes | None:
        return self._slots.get(slot)

    def drop(self, slots: Iterable[str]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)
