"""All parties in one process: every message is still made, carried and checked as bytes."""

from __future__ import annotations

from collections.abc import Mapping

from secure_fvi.engines.transport import Transport
from secure_fvi.silo import Silo


class LocalEngine(Transport):
    """Delivers the server's messages to the silos' `handle` in turn."""

    def __init__(self, silos: Mapping[str, Silo]) -> None:
        super().__init__(list(silos))
        self.silos = silos

    def _deliver(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        return {silo: self.silos[silo].handle(message) for silo, message in messages.items()}
