"""What a job between sites should have found: the same job in one process, without crashes or with the losses that the
server's log tells of."""

from __future__ import annotations

import hashlib
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from secure_fvi.compiled import threads as with_threads
from secure_fvi.deployment.trail import EXCHANGE, read_exchange
from secure_fvi.deployment.trail_verify import rows
from secure_fvi.driving import Parties, Run
from secure_fvi.engines.local import LocalEngine
from secure_fvi.errors import ProtocolError, SecureFVIWarning
from secure_fvi.fitting import build_parties, result_of
from secure_fvi.messages import ROUND
from secure_fvi.results import Result
from secure_fvi.runs.config import Config
from secure_fvi.runs.federation import Federation, federate
from secure_fvi.silo import Silo

#: Silos that answered a broadcast, by its SHA-256.
Answered = Mapping[bytes, frozenset[str]]


class Replayed(LocalEngine):
    """A local engine in which a broadcast reaches only the silos that answered it between sites."""

    def __init__(self, silos: Mapping[str, Silo], answered: Answered) -> None:
        super().__init__(silos)
        self._answered = answered

    def _deliver(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        first = next(iter(messages.values()))
        if first[:1] == ROUND:
            digest = hashlib.sha256(first).digest()
            if digest not in self._answered:
                raise ProtocolError("the job took another course: its server's log has no such broadcast")
            messages = {silo: m for silo, m in messages.items() if silo in self._answered[digest]}
        return super()._deliver(messages)


def answered(log: Path) -> Answered:
    """From the server's log. A broadcast that was sent again after a crash counts as it went the last time."""
    found: dict[bytes, dict[str, bool]] = {}
    for row in rows(log)[1]:
        if row.kind != EXCHANGE:
            continue
        seen = read_exchange(row.fields())
        if seen.step == "broadcast" and seen.sent is not None:
            found.setdefault(seen.sent.digest, {})[seen.peer] = seen.received is not None
    return {digest: frozenset(s for s, came in by.items() if came) for digest, by in found.items()}


def posterior(config: Config, answers: Answered | None = None) -> bytes:
    """posterior.safetensors of the job with all parties in this process. Raises ProtocolError where `answers` belong
    to a job that went otherwise."""
    began, federation = time.monotonic(), federate(config)
    assert isinstance(federation, Federation)
    with (
        warnings.catch_warnings(),
        with_threads(federation.threads),
        tempfile.TemporaryDirectory() as folder,
    ):
        warnings.simplefilter("ignore", SecureFVIWarning)
        server, engine, guards = build_parties(
            federation.model, federation.silos, federation.algorithm, federation.aggregation, config.seed,
            silo_ids=federation.silo_ids, record_ids=federation.record_ids, dtype=federation.dtype,
            compile=config.run.compile,
        )  # fmt: skip
        carrier = engine if answers is None else Replayed(engine.silos, answers)
        going: Run[Result] = Run(
            Parties(server, carrier, guards), federation.algorithm.most_rounds,
            lambda done: result_of(server, carrier, federation.algorithm, federation.aggregation, done), began=began,
        )  # fmt: skip
        going.result().save(Path(folder))
        return (Path(folder) / "posterior.safetensors").read_bytes()
