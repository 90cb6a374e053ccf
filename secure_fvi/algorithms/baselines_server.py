"""The server's half of a baseline: it adds the sum of changes to q, and keeps nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import ROUND_PHASE, Broadcast, Posterior, Problem, Step, Verdict
from secure_fvi.algorithms.baselines import COUNT, Baseline
from secure_fvi.algorithms.baselines_frame import BaselineFrame
from secure_fvi.algorithms.natural import Natural, to_eta
from secure_fvi.algorithms.pvi_prior import Prior
from secure_fvi.errors import InputError, SecureFVIError


class BaselineState(NamedTuple):
    """The server's state. All of it follows from totals."""

    round: int  # sums of changes used
    q: Natural  # the prior, times what silos changed so far
    records: int  # N; 0 where it is not known, or not yet
    skipped: int  # local fits that ran off
    lost: bool  # whether a silo that was asked is missing in q


class BaselineServer:
    """`algorithms.base.ServerProgram`."""

    def __init__(self, config: Baseline, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.frame = BaselineFrame(config, problem)
        self.tables, self.terms = self.frame.tables, self.frame.terms

    @property
    def most_rounds(self) -> int:
        """Rounds of the run, for its progress."""
        return self.frame.rounds

    def init(self) -> BaselineState:
        prior = Prior(self.frame.base).start({})
        if not prior.proper:
            raise InputError(
                f"the prior of the global sites has no Gaussian approximation; {self.config.name} cannot start from it"
            )
        return BaselineState(0, prior, self.frame.public_records or 0, 0, False)

    def broadcast(self, state: BaselineState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        counting = self.frame.counts_first and not state.records
        cohort = self.problem.silos if counting else self.frame.base.cohort(state.round)
        phase = COUNT if counting else ROUND_PHASE
        scalars = {"records": float(state.records)} if self.frame.split else {}
        return Broadcast(state.round, index, accepted, cohort, scalars, {"q": state.q.pack()}, phase)

    def update(
        self, state: BaselineState, message: Broadcast, total: FloatArray, scale: float
    ) -> tuple[BaselineState, Step]:
        sums = self.tables[message.phase].split(total)
        if message.phase == COUNT:
            state = state._replace(records=round(scale * float(sums["records"])))
            return state, Step(math.nan, 1.0, None, COUNT, False)
        q = state.q.plus(self.frame.base.unpack(torch.from_numpy(sums["change"])))
        if not q.proper:
            raise SecureFVIError(
                f"{self.config.name}, round {state.round + 1}: the product of the silos' approximations is no "
                "distribution, and nothing here damps it; use PVI"
            )
        state = BaselineState(
            round=state.round + 1,
            q=q,
            records=state.records,
            skipped=state.skipped + int(sums.get("skipped", 0)),
            lost=state.lost or scale > len(self.problem.silos) / len(message.cohort),
        )
        return state, Step(math.nan, 1.0, None, self.config.name, state.round >= self.frame.rounds)

    def posterior(self, state: BaselineState) -> Posterior:
        base = self.frame.base
        return Posterior(base.family, {name: base.move(value) for name, value in to_eta(state.q).items()}, {})

    def rounds(self, state: BaselineState) -> int:
        return state.round

    def verdict(self, state: BaselineState) -> Verdict:
        """Not whether q is good: there is nothing to converge to. Whether every silo's part is in it."""
        name, details = self.config.name, self.metrics(state)
        if state.skipped or state.lost:
            part = "a local fit ran off and changed nothing" if state.skipped else "a silo that was asked is missing"
            advice = "lower learning_rate, standardise the columns, or use pvi" if state.skipped else "run it again"
            return Verdict(False, f"{part}; {advice}", details)
        what = (
            "one pass over the silos, approximate by construction" if self._single else "passes that count records anew"
        )
        return Verdict(None, f"{name} is {what}; nothing in it tells how far q is from the posterior: use pvi", details)

    @property
    def _single(self) -> bool:
        return self.config.most_rounds == 1

    def metrics(self, state: BaselineState) -> dict[str, float | None]:
        return {"skipped_fits": state.skipped}
