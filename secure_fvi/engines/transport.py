"""What stands between the parties: bytes to each silo, bytes back from each that answered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from secure_fvi.aggregation.base import Exchanges, carry

if TYPE_CHECKING:
    from secure_fvi.silo import Kept, Silo

T = TypeVar("T")


class Transport(ABC):
    """Carries a server's exchanges and counts them. The parties do not know which kind carries them."""

    #: The silos that live in this process; none where they are elsewhere and keep their own state.
    silos: Mapping[str, Silo]

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: ids of all silos."""
        self.exchanges = 0
        self.bytes_up: dict[str, int] = dict.fromkeys(names, 0)  # by silo
        self.bytes_down: dict[str, int] = dict.fromkeys(names, 0)

    #: Told of what is sent, before it is.
    sends: Callable[[Mapping[str, bytes]], None] | None = None
    #: Told of every exchange that comes about, once it is over: what was sent and what came back.
    watch: Callable[[Mapping[str, bytes], Mapping[str, bytes]], None] | None = None

    @property
    def traffic(self) -> dict[str, int]:
        """Exchanges, and the bytes of the silo that sent and got the most."""
        up, down = max(self.bytes_up.values()), max(self.bytes_down.values())
        return {"exchanges": self.exchanges, "bytes_up_per_silo": up, "bytes_down_per_silo": down}

    def exchange(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        """One message to each named silo, one reply from each that answered in time."""
        self.exchanges += 1
        if self.sends is not None:
            self.sends(messages)
        replies = self._deliver(messages)
        for silo, message in messages.items():
            self.bytes_down[silo] += len(message)
        for silo, reply in replies.items():
            self.bytes_up[silo] += len(reply)
        if self.watch is not None:
            self.watch(messages, replies)
        return replies

    def run(self, exchanges: Exchanges[T]) -> T:
        """Drive a server's generator to its result."""
        done = carry(exchanges, self.exchange)
        for silo in self.silos.values():
            silo.forget()
        return done

    def silo_states(self, accepted: Mapping[str, int]) -> dict[str, Kept]:
        """The states, by silo, that a checkpoint of this process has to hold, once `accepted` has settled them."""
        for silo in self.silos.values():
            silo.settle(accepted)
        return {name: silo.kept for name, silo in self.silos.items()}

    def restore_silos(self, states: Mapping[str, Kept]) -> None:
        """Put back what `silo_states` gave."""
        for name, silo in self.silos.items():
            silo.restore(states[name])

    def close(self) -> None:  # noqa: B027 - a carrier without connections has nothing to close
        """Let go of connections."""

    @abstractmethod
    def _deliver(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        """The replies of those that answered; who did not is left out."""
