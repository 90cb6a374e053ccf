"""All parties in one process: every message is still made, carried and checked as bytes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from secure_fvi.compiled import run_together
from secure_fvi.engines.transport import Transport
from secure_fvi.silo import Silo


class LocalEngine(Transport):
    """Delivers the server's messages to the silos' `handle`: in turn, or so that they compute together (`batching`)."""

    def __init__(self, silos: Mapping[str, Silo], batched: bool = False) -> None:
        super().__init__(list(silos))
        self.silos, self.batched = silos, batched

    def _deliver(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        work = {silo: partial(self.silos[silo].handle, message) for silo, message in messages.items()}
        return run_together(work) if self.batched else {silo: handle() for silo, handle in work.items()}
