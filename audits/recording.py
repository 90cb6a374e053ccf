"""Runs the parties of a job and notes every message between them, without touching the protocol's own code."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from secure_fvi.aggregation.base import BlockTable, Exchanges, FloatArray, SumServer, Total, carry
from secure_fvi.aggregation.homomorphic import WithHolder
from secure_fvi.aggregation.key_holder import KEY_HOLDER
from secure_fvi.algorithms.base import Broadcast, ServerProgram, Step
from secure_fvi.audits.transcript import SET_UP, Entry, Sum, Transcript
from secure_fvi.engines.local import LocalEngine
from secure_fvi.errors import InputError
from secure_fvi.messages import ROUND, decode_broadcast
from secure_fvi.server import Server


class Recorder:
    """A server and its engine (from `fitting.build_parties`), watched. Use `step` in place of `engine.run`.

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
        self._round, self._phase = 0, SET_UP
        server.program = _WatchedProgram(server.program, self._note_release)
        server._sum = _WatchedSum(server._sum, self._note_total)
        if isinstance(server._sum.inner, WithHolder):
            server._sum.inner._holder = self._watched_holder(server._sum.inner._holder)

    def step(self) -> Step:
        """One secure sum, as `engine.run(server.round())`."""
        self._round, self._phase = self._server.rounds, SET_UP
        return carry(self._server.round(), self._exchange)

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

    def _exchange(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        first = next(iter(messages.values()), b"")
        if first[:1] == ROUND:  # the same bytes for all
            self._phase = decode_broadcast(first[1:]).phase
        for silo, message in messages.items():
            self._note("down", silo, message)
        replies = self._engine.exchange(messages)
        for silo, reply in replies.items():
            self._note("up", silo, reply)
        return replies

    def _note(self, direction: Any, party: str, body: bytes) -> None:
        seconds = time.monotonic() - self._began
        self._entries.append(Entry(self._round, self._phase, direction, party, body, len(body), seconds))

    def _note_total(self, index: int, total: Total) -> None:
        values = total.values.copy()
        self._sums.append(Sum(self._round, index, self._phase, total.survivors, values, values))

    def _note_release(self, values: FloatArray) -> None:
        self._sums[-1] = self._sums[-1]._replace(released=values.copy())

    def _watched_holder(self, holder: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
        def handle(message: bytes) -> bytes:
            self._note("down", KEY_HOLDER, message)
            reply = holder(message)
            self._note("up", KEY_HOLDER, reply)
            return reply

        return handle


class _WatchedSum:
    """`aggregation.base.SumServer` that tells what it ended with."""

    def __init__(self, inner: SumServer, note: Callable[[int, Total], None]) -> None:
        self.inner, self._note = inner, note

    def prepare(self, index: int) -> Exchanges[None]:
        return self.inner.prepare(index)

    def total(
        self,
        index: int,
        cohort: Sequence[str],
        table: BlockTable,
        contributions: Mapping[str, bytes],
        context: bytes,
    ) -> Exchanges[Total]:
        total = yield from self.inner.total(index, cohort, table, contributions, context)
        self._note(index, total)
        return total


class _WatchedProgram:
    """`algorithms.base.ServerProgram` that tells what it was given; the program itself may be shared by many runs."""

    def __init__(self, inner: ServerProgram, note: Callable[[FloatArray], None]) -> None:
        self._inner, self._note = inner, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def update(self, state: Any, message: Broadcast, total: FloatArray, scale: float) -> tuple[Any, Step]:
        self._note(total)
        return self._inner.update(state, message, total, scale)


def replay(transcript: Transcript, server: Server) -> list[FloatArray]:
    """Feed a fresh server the recorded replies; the totals it arrives at.

    Raises InputError where it asks for something else than was recorded: with keys drawn at random, which is every sum
    but the plain one, only the server that was recorded asks for the same.
    """
    recorded = [e for e in transcript.entries if e.party != KEY_HOLDER]
    totals: list[FloatArray] = []
    server.program = _WatchedProgram(server.program, totals.append)
    at = 0

    def exchange(messages: Mapping[str, bytes]) -> dict[str, bytes]:
        nonlocal at
        down, up = recorded[at : at + len(messages)], recorded[at + len(messages) : at + 2 * len(messages)]
        at += 2 * len(messages)
        if {e.party: e.body for e in down if e.direction == "down"} != dict(messages):
            raise InputError("the server asks for something else than was recorded; give it the same start")
        return {e.party: e.body for e in up}

    for _ in transcript.sums:
        carry(server.round(), exchange)
    return totals
