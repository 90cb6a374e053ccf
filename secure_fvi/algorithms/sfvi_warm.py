"""SFVI after a few rounds of SFVI-Avg (Hassan et al. 2023, S3.2: five such rounds halved the steps to convergence).

    phases of SFVI-Avg:  count once; merge, `warm_start.rounds` times
    phase of SFVI:       round, from the merged q(Z_G) and theta

A silo's own latents, and its optimiser's state for them, carry over: at the first broadcast of SFVI, which tells the
mean of the merged q, their conditionals are written around it. Both halves are the programs of the two algorithms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from secure_fvi.aggregation.base import BlockTable, FloatArray
from secure_fvi.algorithms.base import (
    ROUND_PHASE,
    Broadcast,
    LocalFit,
    Order,
    Pending,
    Phase,
    Posterior,
    Problem,
    SiloView,
    Step,
    Verdict,
    adopt_if_used,
)
from secure_fvi.algorithms.sfvi import SFVI, WarmStart
from secure_fvi.algorithms.sfvi_avg import FINISH, MERGE
from secure_fvi.algorithms.sfvi_avg_frame import SFVIAvgFrame
from secure_fvi.algorithms.sfvi_avg_server import SFVIAvgServer, SFVIAvgState
from secure_fvi.algorithms.sfvi_avg_silo import SFVIAvgLocal, SFVIAvgSilo
from secure_fvi.algorithms.sfvi_frame import SFVIFrame
from secure_fvi.algorithms.sfvi_server import SFVIServer, SFVIState
from secure_fvi.algorithms.sfvi_silo import SFVILocal, SFVISilo
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.families import Params
from secure_fvi.privacy.gate import Gate, Release
from secure_fvi.privacy.settings import RecordDP
from secure_fvi.privacy.terms import Terms, agree

#: Numbers of SFVI's draws at a silo, after a warm start, begin here.
OWN_DRAWS = 2**31


def _check(problem: Problem) -> None:
    if isinstance(problem.privacy, RecordDP):
        raise InputError("a warm start by sfvi-avg takes no record privacy; leave warm_start.rounds at 0")


def _phases(warm: SFVIAvgFrame, own: SFVIFrame) -> tuple[dict[str, BlockTable], dict[str, Terms]]:
    """The blocks and terms of all phases. The sum that finishes SFVI-Avg is left out: SFVI's first broadcast serves.

    Under privacy one noise multiplier serves both algorithms, so that all their releases together cost the epsilon
    asked for. It is planned for the longer contribution: with Skellam noise that costs no less.
    """
    tables = {**{phase: t for phase, t in warm.tables.items() if phase != FINISH}, **own.tables}
    if own.terms is None:
        return tables, {}
    parts, settings = {ROUND_PHASE: own.terms, MERGE: warm.terms[MERGE]}, own.terms.settings
    longest = max((t.extent for t in parts.values()), key=sum)
    rounds = sum(t.rounds for t in parts.values()) + settings.retries  # each phase has retries of its own
    joint = agree(settings, own.terms.cohort, 1.0, rounds, longest)
    terms = {phase: replace(joint, rounds=t.rounds, extent=t.extent) for phase, t in parts.items()}
    tables = {
        ROUND_PHASE: terms[ROUND_PHASE].table(own.gradient_blocks, []),
        MERGE: terms[MERGE].table(warm.changes, []),
    }
    return tables, terms


class WarmState(NamedTuple):
    """The server's state: of SFVI-Avg, and of SFVI, which starts where that ends."""

    warm: SFVIAvgState
    own: SFVIState


class WarmServer:
    """`algorithms.base.ServerProgram`."""

    def __init__(self, config: SFVI, problem: Problem) -> None:
        _check(problem)
        self._rounds = config.warm_start.rounds
        self._warm = SFVIAvgServer(config.averaging(), problem)
        self._own = SFVIServer(replace(config, warm_start=WarmStart()), problem)
        self.tables, self.terms = _phases(self._warm.frame, self._own.frame)

    def init(self) -> WarmState:
        return WarmState(self._warm.init(), self._own.init())

    def broadcast(self, state: WarmState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        if not self._begun(state):
            return self._warm.broadcast(state.warm, index, accepted)
        message = self._own.broadcast(state.own, index, accepted)
        return message._replace(round=self._rounds + message.round)

    def update(self, state: WarmState, message: Broadcast, total: FloatArray, scale: float) -> tuple[WarmState, Step]:
        if self._begun(state):
            own, step = self._own.update(state.own, message, total, scale)
            return state._replace(own=own), step
        warm, step = self._warm.update(state.warm, message, total, scale)
        state = WarmState(warm, state.own)
        if self._begun(state):
            state = state._replace(own=self._own.init_at(warm.eta, warm.theta))
        return state, step._replace(finished=False)

    def rounds(self, state: WarmState) -> int:
        return state.warm.round + state.own.round

    def posterior(self, state: WarmState) -> Posterior:
        return self._own.posterior(state.own) if self._begun(state) else self._warm.posterior(state.warm)

    def verdict(self, state: WarmState) -> Verdict:
        return self._own.verdict(state.own)

    def metrics(self, state: WarmState) -> dict[str, float | None]:
        return self._own.metrics(state.own)

    def _begun(self, state: WarmState) -> bool:
        """Whether it is SFVI's turn."""
        return state.warm.round >= self._rounds


class WarmLocal(NamedTuple):
    """A silo's state. Never leaves the silo."""

    warm: SFVIAvgLocal  # emptied once SFVI has begun
    own: SFVILocal
    begun: bool


class WarmSilo:
    """`algorithms.base.SiloProgram`."""

    def __init__(self, config: SFVI, problem: Problem) -> None:
        _check(problem)
        averaging = config.averaging()
        self._warm = SFVIAvgSilo(averaging, problem)
        self._own = SFVISilo(replace(config, warm_start=WarmStart()), problem)
        self.tables, self.terms = _phases(self._warm.frame, self._own.frame)
        self._last_turn = OWN_DRAWS // averaging.keys_a_round - 1
        rounds, before = config.warm_start.rounds, self._warm.order
        phases = {name: phase for name, phase in before.phases.items() if name in self.tables and name != FINISH}
        phases[ROUND_PHASE] = Phase(range(rounds, rounds + config.own_rounds), config.own_rounds)
        own = self._own.order.phases
        phases |= {
            n: own[n]._replace(rounds=range(rounds + 1, rounds + config.own_rounds + 1))
            for n in own
            if n != ROUND_PHASE
        }

        def cohort(round_: int, phase: str) -> tuple[str, ...]:
            if phase in self._own.tables:
                return self._own.order.cohort(round_ - rounds, phase)
            return before.cohort(round_, phase)

        own_forms = self._own.order.forms
        self.order = Order(phases, cohort, {p: own_forms[p] if p in own else before.forms[p] for p in phases})

    def init_local(self, view: SiloView) -> WarmLocal:
        return WarmLocal(self._warm.init_local(view), self._own.init_local(view), False)

    def contribute(self, message: Broadcast, local: WarmLocal, view: SiloView, gate: Gate) -> tuple[Release, WarmLocal]:
        if view.turn > self._last_turn:
            raise ProtocolError(f"question {view.turn} of a warm start is past the last; begin another job")
        if message.phase not in self._own.tables:
            release, warm = self._warm.contribute(message, local.warm, view, gate)
            return release, local._replace(warm=warm)
        local = local if local.begun else self._handed_over(message, local)
        # The draws of SFVI-Avg are numbered by its local steps; these lie above all of them.
        release, own = self._own.contribute(message, local.own, view._replace(turn=OWN_DRAWS + view.turn), gate)
        return release, local._replace(own=own)

    def commit(self, local: WarmLocal, pending: Pending, accepted: int) -> WarmLocal:
        kept: WarmLocal = adopt_if_used(local, pending, accepted)
        return kept

    def local_fit(self, local: WarmLocal) -> LocalFit:
        return self._own.local_fit(local.own) if local.begun else self._warm.local_fit(local.warm)

    def _handed_over(self, message: Broadcast, local: WarmLocal) -> WarmLocal:
        """SFVI's local state from SFVI-Avg's, around the mean of the q(Z_G) that SFVI starts from."""
        move = self._own.frame.move
        loc = move(message.tensors["z_global"]) - move(message.tensors["shift"])
        warm = self._warm.anchored(local.warm, loc)
        own = local.own._replace(
            record=warm.record,
            record_moments=warm.record_moments,
            silo=warm.silo,
            silo_moments=warm.silo_moments,
            record_average=warm.record,
            silo_average=warm.silo,
        )
        emptied: Params = {}
        warm = warm._replace(
            record=emptied, record_moments=emptied, silo=emptied, silo_moments=emptied, moments=emptied
        )
        return WarmLocal(warm, own, True)
