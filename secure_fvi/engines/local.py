"""All parties in one process: every message is still made, carried and checked as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from secure_fvi.aggregation.base import Exchanges, carry
from secure_fvi.silo import Silo

T = TypeVar("T")


@dataclass
class LocalEngine:
    """Delivers the server's messages to the silos' `handle` in turn and counts the bytes."""

    silos: Mapping[str, Silo]
    exchanges: int = 0
    bytes_up: dict[str, int] = field(default_factory=dict)  # by silo
    bytes_down: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bytes_up = self.bytes_up or dict.fromkeys(self.silos, 0)
        self.bytes_down = self.bytes_down or dict.fromkeys(self.silos, 0)

    def exchange(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        """One message to each named silo, one reply from each."""
        self.exchanges += 1
        replies = {}
        for silo, message in messages.items():
            reply = self.silos[silo].handle(message)
            self.bytes_down[silo] += len(message)
            self.bytes_up[silo] += len(reply)
            replies[silo] = reply
        return replies

    def run(self, exchanges: Exchanges[T]) -> T:
        """Drive a server's generator to its result."""
        return carry(exchanges, self.exchange)
