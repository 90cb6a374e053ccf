"""The server's half of FedVI: FedAvg's, and whether the objective has levelled off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import PRIVATE, Broadcast, Posterior, Problem, Step, Verdict
from secure_fvi.algorithms.fedavg_server import FedAvgServer, FedAvgState
from secure_fvi.algorithms.fedvi import FedVI
from secure_fvi.algorithms.fedvi_frame import DISTORTION, RATE, FedVIFrame

#: Standard errors by which the objective of the last quarter of the rounds may lie above the quarter before it.
_LEVEL = 3.0


class FedVIState(NamedTuple):
    """The server's state. All of it follows from broadcasts and totals."""

    average: FedAvgState
    objectives: Tensor  # (rounds,) float64, nats; NaN for rounds to come and where it is not released


class FedVIServer:
    """`algorithms.base.ServerProgram`."""

    def __init__(self, config: FedVI, problem: Problem) -> None:
        self.config, self.frame = config, FedVIFrame(config, problem)
        self.tables, self.terms = self.frame.tables, self.frame.terms
        self._average = FedAvgServer(self.frame)

    def init(self) -> FedVIState:
        return FedVIState(self._average.init(), torch.full((self.config.rounds,), math.nan, dtype=torch.float64))

    def broadcast(self, state: FedVIState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        return self._average.broadcast(state.average, index, accepted)

    def update(self, state: FedVIState, message: Broadcast, total: FloatArray, scale: float) -> tuple[FedVIState, Step]:
        average, step = self._average.update(state.average, message, total, scale)
        objectives = state.objectives.clone()
        if average.round > state.average.round:
            objectives[average.round - 1] = step.objective
        return FedVIState(average, objectives), step

    def posterior(self, state: FedVIState) -> Posterior:
        return self._average.posterior(state.average)

    def verdict(self, state: FedVIState) -> Verdict:
        """Of the objective of the last rounds. Where that is not released nothing is known of it."""
        if not state.average.reported:
            return Verdict(None, PRIVATE, {})
        if self._level(state):
            return Verdict(True, "the objective no longer rises: a point estimate of theta", {})
        advice = f"raise rounds (now {self.config.rounds})"
        return Verdict(False, f"the objective was still rising when the rounds were over; {advice}", {})

    def _level(self, state: FedVIState) -> bool:
        """Whether the mean objective of the last quarter of the rounds lies less than 3 standard errors above the
        quarter before."""
        if self._average.converged(state.average):
            return True
        done = state.objectives[: state.average.round]
        quarter = len(done) // 4
        if quarter < 2:
            return False
        late, before = done[-quarter:], done[-2 * quarter : -quarter]
        error = ((late.var() + before.var()) / quarter).sqrt()
        return bool(late.mean() - before.mean() < _LEVEL * error)

    def rounds(self, state: FedVIState) -> int:
        return state.average.round

    def metrics(self, state: FedVIState) -> dict[str, float | None]:
        """Of the last round's clients, scaled to all: `objective`, minus equation (8); `distortion`, the negative
        log-likelihood that queries cost; `rate_per_client`, KL(q(beta_k) || r); all in nats."""
        reported, clients = state.average.reported, len(self.frame.problem.silos)
        return {
            "bound": None,
            "objective": state.average.objective if reported else None,
            "distortion": reported.get(DISTORTION),
            "rate_per_client": reported[RATE] / clients if reported else None,
            "movement": state.average.movement,
        }
