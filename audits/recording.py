"""Notes every message and total of a run (`sf.run`), without touching the protocol's own code."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from secure_fvi.aggregation.base import FloatArray, Total
from secure_fvi.aggregation.homomorphic import WithHolder
from secure_fvi.aggregation.key_holder import KEY_HOLDER
from secure_fvi.audits.transcript import SET_UP, Entry, Sum, Transcript
from secure_fvi.engines.local import LocalEngine
from secure_fvi.errors import InputError
from secure_fvi.messages import ROUND, decode_broadcast
from secure_fvi.server import Server


class Recorder:
    """A server and its engine, of `sf.run` or `fitting.build_parties`, watched from now on.

    `simulated` is the caller's statement that the data are made, resampled from published data, or published. On
    anything else a transcript is refused unless `real_data` is set, since it holds all that the audits warn of.
    """

    def __init__(
        self, server: Server, engine: LocalEngine, aggregation: str, *, simulated: bool, real_data: bool = False
    ) -> None:
        if not simulated and not real_data:
            raise InputError(
                "a transcript of a run on real data holds what the server could attack; say so with real_data = True "
                "(--real-data) after the institutions have agreed, or audit a run on simulated data"
            )
        self._server, self._engine, self._aggregation = server, engine, aggregation
        self._simulated = simulated
        self._entries: list[Entry] = []
        self._sums: list[Sum] = []
        self._began = time.monotonic()
        self._phase = SET_UP
        server.observe(self)
        engine.watch = self._exchanged
        if isinstance(server.secure_sum, WithHolder):
            server.secure_sum.observe(lambda direction, body: self._note(direction, KEY_HOLDER, body))

    def transcript(self) -> Transcript:
        """All so far, as the server saw it."""
        program, problem = self._server.program, self._server.problem
        return Transcript(
            getattr(program, "name", type(getattr(program, "config", program)).__name__),
            self._aggregation,
            problem.silos,
            dict(program.tables),
            tuple(self._entries),
            tuple(self._sums),
            self._simulated,
        )

    def _exchanged(self, messages: Mapping[str, bytes], replies: Mapping[str, bytes]) -> None:
        first = next(iter(messages.values()), b"")
        if first[:1] == ROUND:  # the same bytes for all
            self._phase = decode_broadcast(first[1:]).phase
        for direction, bodies in (("down", messages), ("up", replies)):
            for silo, body in bodies.items():
                self._note(direction, silo, body)

    def _note(self, direction: Any, party: str, body: bytes) -> None:
        seconds = time.monotonic() - self._began
        self._entries.append(Entry(self._server.rounds, self._phase, direction, party, body, len(body), seconds))

    def total(self, index: int, total: Total) -> None:
        """Called by the server."""
        values = total.values.copy()
        self._sums.append(Sum(self._server.rounds, index, self._phase, total.survivors, values, values))

    def released(self, index: int, values: FloatArray) -> None:
        """Called by the server."""
        self._sums[-1] = self._sums[-1]._replace(released=values.copy())
        self._phase = SET_UP
