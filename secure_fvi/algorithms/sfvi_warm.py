"""SFVI after a warm start: a few rounds of SFVI-Avg first (Hassan et al. 2023, S3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from secure_fvi.algorithms.base import (
    FINISH,
    ROUND_PHASE,
    Broadcast,
    LocalFit,
    Pending,
    Posterior,
    SiloView,
    Step,
    Verdict,
)
from secure_fvi.algorithms.kit import Answer, Program, Sum, Totals
from secure_fvi.algorithms.refining import REFINE
from secure_fvi.algorithms.sfvi import OWN_DRAWS, SFVI, SFVILocal, SFVIProgram, SFVIState, WarmStart
from secure_fvi.algorithms.sfvi_avg import MERGE, SFVIAvg, SFVIAvgLocal, SFVIAvgProgram, SFVIAvgState
from secure_fvi.algorithms.structured import Latents
from secure_fvi.errors import ProtocolError
from secure_fvi.families import Params
from secure_fvi.privacy.terms import Terms, agree
from secure_fvi.states import Moved


def averaging(of: SFVI) -> SFVIAvg:
    """The warm start as an algorithm. Raises InputError for what SFVI-Avg refuses."""
    return SFVIAvg(
        rounds=of.warm_start.rounds,
        local_steps=of.warm_start.local_steps,
        importance_samples=of.importance_samples,
        family=of.family,  # type: ignore[arg-type]  # it refuses the one that it lacks
        weights=of.warm_start.weights,
        tolerance=0.0,  # so that it makes all its rounds
        optimizer=of.optimizer,
        optimizer_options=of.optimizer_options,
        learning_rate=of.learning_rate,
        local_learning_rate=of.local_learning_rate,
        start_spread=of.start_spread,
        sampling_rate=of.sampling_rate,
        participation=of.participation,
        total_records=of.warm_start.total_records,
        bound=of.bound,
        local_family=of.local_family,
        silo_family=of.silo_family,
    )


class WarmState(NamedTuple):
    """The server's state: of SFVI-Avg, and of SFVI, which starts where that ends."""

    warm: SFVIAvgState
    own: SFVIState


class WarmLocal(NamedTuple):
    """A silo's state. Never leaves the silo."""

    warm: SFVIAvgLocal  # emptied once SFVI has begun
    own: SFVILocal
    begun: bool


class SFVIWarmProgram(Program):
    """Sums of SFVI-Avg, then those of SFVI from the merged q(Z_G) and theta.

    A silo's own latents, and its optimiser's state for them, carry over: at the first broadcast of SFVI, which tells
    the mean of the merged q, their conditionals are written around it.
    """

    no_record_privacy = " after a warm start by sfvi-avg; leave warm_start.rounds at 0"

    def setup(self) -> None:
        first = averaging(self.config)
        self._warm = SFVIAvgProgram(first, self.problem)
        self._own = SFVIProgram(replace(self.config, warm_start=WarmStart()), self.problem)
        self._rounds = first.rounds
        self._last_turn = OWN_DRAWS // first.keys_a_round - 1

    def sums(self) -> dict[str, Sum]:
        """The one that finishes SFVI-Avg is left out: SFVI's first broadcast serves."""
        found = {phase: one for phase, one in self._warm.parts.items() if phase not in (FINISH, REFINE)}
        for phase, one in self._own.parts.items():
            rounds = one.when.rounds
            later = range(self._rounds + rounds.start, self._rounds + rounds.stop)
            found[phase] = one._replace(when=one.when._replace(rounds=later))
        return found

    def agreed(self, sums: Mapping[str, Sum]) -> dict[str, Terms]:
        """One noise multiplier serves both algorithms, so that all their releases together cost the epsilon asked for.
        It is planned for the longer contribution: with Skellam noise that costs no less."""
        parts = {ROUND_PHASE: self._own.terms[ROUND_PHASE], MERGE: self._warm.terms[MERGE]}
        settings, cohort = parts[ROUND_PHASE].settings, parts[ROUND_PHASE].cohort
        longest = max((t.extent for t in parts.values()), key=sum)
        rounds = sum(t.rounds for t in parts.values()) + settings.retries  # each phase has retries of its own
        joint = agree(settings, cohort, 1.0, rounds, longest)
        return {phase: replace(joint, rounds=t.rounds, extent=t.extent, record=t.record) for phase, t in parts.items()}

    def asked(self, round_: int, phase: str) -> tuple[str, ...]:
        if phase in self._own.parts:
            return self._own.asked(round_ - self._rounds, phase)
        return self._warm.asked(round_, phase)

    def _begun(self, state: WarmState) -> bool:
        """Whether it is SFVI's turn."""
        return state.warm.round >= self._rounds

    # ---- server ----

    def init(self) -> WarmState:
        return WarmState(self._warm.init(), self._own.init())

    def broadcast(self, state: WarmState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        if not self._begun(state):
            return self._warm.broadcast(state.warm, index, accepted)
        message = self._own.broadcast(state.own, index, accepted)
        return message._replace(round=self._rounds + message.round)

    def step(self, state: WarmState, message: Broadcast, sums: Totals, scale: float) -> tuple[WarmState, Step]:
        if self._begun(state):
            own, step = self._own.step(state.own, message, sums, scale)
            return state._replace(own=own), step
        warm, step = self._warm.step(state.warm, message, sums, scale)
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

    # ---- silo ----

    def init_local(self, view: SiloView) -> WarmLocal:
        return WarmLocal(self._warm.init_local(view), self._own.init_local(view), False)

    def local_fit(self, local: WarmLocal) -> LocalFit:
        return self._own.local_fit(local.own) if local.begun else self._warm.local_fit(local.warm)

    def answer(self, message: Broadcast, local: WarmLocal, view: SiloView) -> Answer:
        if message.phase not in self._own.parts:
            if view.turn > self._last_turn:  # its draws would be SFVI's
                raise ProtocolError(f"question {view.turn} of a warm start is past the last; begin another job")
            found = self._warm.answer(message, local.warm, view)
            return found._replace(local=local._replace(warm=found.local))
        begun = local.begun
        local = local if begun else self._handed_over(message, local)
        # The draws of SFVI-Avg are numbered by its local steps; these lie above all of them.
        answer = self._own.answer(message, local.own, view._replace(turn=OWN_DRAWS + view.turn))
        assert isinstance(answer, Answer)  # no record privacy
        own = answer.local
        if isinstance(own, Moved) and not begun:  # it is over a state that is new as well
            own = own.into(local.own, True)
        return answer._replace(local=local._replace(own=own))

    def commit(self, local: WarmLocal, pending: Pending, accepted: int) -> WarmLocal:
        after: WarmLocal = pending.local
        if not isinstance(after.own, Moved):
            return super().commit(local, pending, accepted)
        counts = pending.sum_index == accepted
        own = after.own.into(local.own, counts)
        return after._replace(own=own) if counts else local

    def _handed_over(self, message: Broadcast, local: WarmLocal) -> WarmLocal:
        """SFVI's local state from SFVI-Avg's, around the mean of the q(Z_G) that SFVI starts from."""
        loc = self.move(message.tensors["z_global"]) - self.move(message.tensors["shift"])
        warm = self._warm.anchored(local.warm, loc)
        record, moments, silo, silo_moments = warm.latents
        copies = [{name: value.clone() for name, value in rows.items()} for rows in (record, moments)]
        own = self._own.begun(Latents(copies[0], copies[1], silo, silo_moments), local.own.averaged, local.own.stage)
        emptied: Params = {}
        warm = warm._replace(
            record=emptied, record_moments=emptied, silo=emptied, silo_moments=emptied, moments=emptied
        )
        return WarmLocal(warm, own, True)
