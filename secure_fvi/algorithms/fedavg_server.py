"""The server's half of FedAvg: the average change from totals, and SGD with momentum along it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import PRIVATE, Broadcast, Posterior, Step, Verdict
from secure_fvi.algorithms.fedavg import AVERAGE, COUNT
from secure_fvi.algorithms.fedavg_frame import RECORDS, SILOS, FedAvgFrame
from secure_fvi.algorithms.schedules import SCHEDULES
from secure_fvi.errors import AggregationError, InputError
from secure_fvi.families import Params


class FedAvgState(NamedTuple):
    """The server's state. All of it follows from broadcasts and totals."""

    round: int
    phase: str  # of the sum to come
    point: Params  # w: "eta/..." of the family, "theta/..." of pyro.params, unconstrained
    velocity: Params
    records: int  # N; 0 where nothing needs it
    movement: float | None  # of the last round, as `tolerance` measures it
    reported: dict[str, float]  # totals at the w last sent, nats, scaled to all silos; empty where not released
    objective: float  # of them, at the w last sent, nats; NaN where it is not released


class FedAvgServer:
    """`algorithms.base.ServerProgram`."""

    def __init__(self, frame: FedAvgFrame) -> None:
        self.frame, self.config, self.problem = frame, frame.config, frame.problem
        self.tables, self.terms = self.frame.tables, self.frame.terms

    def init(self) -> FedAvgState:
        start = self.frame.start
        still = {name: torch.zeros_like(value) for name, value in start.items()}
        first = COUNT if self.frame.counts_first else AVERAGE
        return FedAvgState(0, first, start, still, self.config.total_records or 0, None, {}, math.nan)

    def broadcast(self, state: FedAvgState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        config, cohort = self.config, self.problem.silos
        if state.phase == AVERAGE:
            cohort = self.frame.cohort(state.round)
        prior = 1 / state.records if config.prior and state.records else 0.0
        return Broadcast(state.round, index, accepted, cohort, {"prior": prior}, dict(state.point), state.phase)

    def update(
        self, state: FedAvgState, message: Broadcast, total: FloatArray, scale: float
    ) -> tuple[FedAvgState, Step]:
        config, blocks = self.config, self.tables[message.phase].split(total)
        if message.phase == COUNT:
            state = state._replace(records=round(scale * float(blocks[RECORDS])), phase=AVERAGE)
            return state, Step(math.nan, config.learning_rate, None, COUNT, False)
        if self.terms:
            weight = float(round(len(self.problem.silos) / scale))  # the silos that answered
        else:
            weight = float(blocks[RECORDS if self.frame.by_records else SILOS])
        if weight <= 0:
            raise AggregationError("the weights of an average add up to nothing")
        change = {name: torch.as_tensor(blocks[name] / weight).to(value) for name, value in state.point.items()}
        velocity = {name: config.server_momentum * v + change[name] for name, v in state.velocity.items()}
        rate = config.server_learning_rate * SCHEDULES[config.server_schedule](state.round / config.rounds)
        point = {name: w + rate * velocity[name] for name, w in state.point.items()}
        largest = max(float(c.abs().max()) for c in change.values() if c.numel())
        movement = largest / config.reach
        if not all(bool(value.isfinite().all()) for value in point.values()):
            raise InputError(
                f"the average of round {state.round} is not finite; lower learning_rate or rescale the data"
            )
        reported = {name: scale * float(blocks[name]) for name in self.frame.reported if name in blocks}
        objective = self.frame.objective(state.point, reported) if reported else math.nan
        state = FedAvgState(state.round + 1, AVERAGE, point, velocity, state.records, movement, reported, objective)
        finished = self.converged(state) or state.round >= config.rounds
        return state, Step(objective, config.learning_rate, None, AVERAGE, finished)

    def posterior(self, state: FedAvgState) -> Posterior:
        return self.frame.posterior(state.point)

    def converged(self, state: FedAvgState) -> bool:
        """Whether averages have come to rest; with several local steps that need not be at the maximum."""
        return state.movement is not None and state.movement < self.config.tolerance

    def verdict(self, state: FedAvgState) -> Verdict:
        """Of the averages, which are what it can see; under privacy they are noise."""
        if self.terms:
            return Verdict(None, PRIVATE, {})
        details = {"movement": state.movement}
        if self.converged(state):
            found = "averages have come to rest, with several local steps near the maximum rather than at it"
            return Verdict(True, f"{found}: a point estimate, no posterior", details)
        advice = f"raise rounds (now {self.config.rounds}), lower learning_rate, or standardise the columns"
        return Verdict(False, f"averages were still moving when the rounds were over; {advice}", details)

    def rounds(self, state: FedAvgState) -> int:
        return state.round

    def metrics(self, state: FedAvgState) -> dict[str, float | None]:
        """`log_posterior`: log p(y, w) at the w last sent, nats (log p(y | w) without the prior). There is no bound."""
        objective = None if math.isnan(state.objective) else state.objective
        return {"bound": None, "log_posterior": objective, "movement": state.movement}
