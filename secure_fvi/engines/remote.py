"""What carriers to silos elsewhere have in common: when an exchange is over, and what its answers mean."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from secure_fvi.engines.stream_messages import LONGEST, MESSAGE, REFUSAL, RESTART, Whole
from secure_fvi.engines.transport import Transport
from secure_fvi.errors import ProtocolError, SessionLost, visible

if TYPE_CHECKING:
    from secure_fvi.deployment.home import Home

_log = logging.getLogger(__name__)

OnLoss = Literal["wait", "drop"]


class Patience(NamedTuple):
    """What is done about a silo that does not answer.

    on_loss: "wait" for as long as it takes, or "drop" it after `deadline` seconds and go on with the others as long as
    there are `least` of them; a silo that was dropped is waited for again once it is back.
    """

    on_loss: OnLoss = "wait"
    deadline: float = 60.0
    least: int = 1


class Line(NamedTuple):
    """Whom a carrier carries, and whose letters. names: ids of the silos. others: who is reached by `ask` alone."""

    names: Sequence[str]
    job: str
    home: Home
    patience: Patience = Patience()
    others: Sequence[str] = ()


class Remote(Transport):
    """Asks silos elsewhere. A subclass carries: `_deliver` fills `_answers` until `_settled`."""

    def __init__(self, line: Line) -> None:
        super().__init__(line.names)
        self.silos = {}
        self._others = frozenset(line.others)
        self._job, self._home, self.patience = line.job, line.home, line.patience
        self.longest = LONGEST  # bytes of an answer; more where the job's tables are known
        self._asked: dict[str, bytes] = {}
        self._answers: dict[str, Whole] = {}
        self._absent: set[str] = set()  # missed a deadline and are not waited for

    def ask(self, party: str, message: bytes) -> bytes:
        """The reply of one of `others`, waited for as long as it takes; counted nowhere, but told to `sends`
        and `watch`.

        Raises ProtocolError where it refuses, SessionLost where it needs a new session.
        """
        if self.sends is not None:
            self.sends({party: message})
        patience, self.patience = self.patience, Patience("wait")
        try:
            replies = self._deliver({party: message})
        finally:
            self.patience = patience
        if self.watch is not None:
            self.watch({party: message}, replies)
        return replies[party]

    def waiting(self) -> tuple[int, list[str]]:
        """The number of the exchange that is open, and who has not answered it; for any thread."""
        return self.exchanges, sorted(set(self._asked) - set(self._answers))

    def _settled(self, began: float) -> bool:
        """Whether the exchange is over. Under `drop` it also ends with the deadline, given enough answers."""
        missing = self._asked.keys() - self._answers.keys()
        if not missing:
            return True
        if any(a.status == RESTART for a in self._answers.values()):
            return True
        if self.patience.on_loss == "wait":
            return any(a.status == REFUSAL for a in self._answers.values())
        if sum(a.status == MESSAGE for a in self._answers.values()) < min(self.patience.least, len(self._asked)):
            return False
        return missing <= self._absent or time.monotonic() - began >= self.patience.deadline

    def _usable(self, silo: str, answer: Whole | None) -> bool:
        if answer is None:
            return False
        if answer.status == RESTART:
            raise SessionLost(f"{self._named(silo)} needs a new session")
        if answer.status == REFUSAL:
            text = shown(answer.message)
            if self.patience.on_loss == "wait":
                raise ProtocolError(f"{self._named(silo)} refused: {text}")
            _log.warning("%s refused: %s", self._named(silo), text)
            return False
        return True

    def _named(self, party: str) -> str:
        return f"'{party}'" if party in self._others else f"silo '{party}'"


def shown(text: bytes) -> str:
    """What another party wrote, as it may stand in a log."""
    return visible(text.decode("utf-8", "replace"))
