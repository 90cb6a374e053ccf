"""The server of a vertical run as `algorithms.base.ServerProgram`: it sees totals, and the response where it holds it.

    augmented   the total of `auxiliary` is s; the next round's broadcast carries dlog p(y | s)/ds
    power       s and gamma are broadcast for the sum of `slope`; the next round's broadcast carries D

With `max_staleness` silos send the change of their z_j, and s is the running total: an absent silo's last z_j stays in.
Under privacy the pulls on a private response pass the holder's own gate before they are broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms import stopping
from secure_fvi.algorithms.base import PRIVATE, Broadcast, Posterior, Step, Verdict
from secure_fvi.algorithms.by_record import ByRecord
from secure_fvi.algorithms.vertical.config import AUXILIARY_PHASE, SLOPE_PHASE, Vertical
from secure_fvi.algorithms.vertical.frame import HIDDEN_PHASE, PULL_PHASE, VerticalFrame, VerticalProblem
from secure_fvi.algorithms.vertical.likelihoods import RecordSlopes, slopes_by_record
from secure_fvi.algorithms.vertical.server import ServerParams, VerticalServer
from secure_fvi.algorithms.vertical.silo import Response
from secure_fvi.algorithms.vertical.soul import Soul
from secure_fvi.compiled import Traced
from secure_fvi.errors import AggregationError, InputError
from secure_fvi.optimizers import Optimizer
from secure_fvi.privacy.gate import Gate
from secure_fvi.randomness import server_draws
from secure_fvi.trees import Params, running_average, take, to_numpy


class VerticalState(NamedTuple):
    """The server's state. All of it follows from totals, and from the response where the server holds it."""

    round: int
    phase: str
    gamma: ServerParams  # q(gamma)
    average: Params
    averaged: int
    pull: Tensor  # (B, C) what the next round's broadcast carries: dlog p(y | s)/ds, or D
    curvature: Tensor  # ()
    value: float  # power: sum_j w_j log p, nats
    total: Tensor  # (B, C) s: of this round between two phases, the running total under staleness
    mass: float  # power with learned weights: normaliser of the silos' weights
    local: float  # nats: the silos' part of the bound of this round
    objective: float  # the bound as estimated in the last round, nats
    unsettled: float  # silos whose parameters still drifted, nan where it is not released
    monitor: stopping.Monitor  # of gamma


class VerticalServerProgram:
    """`response` is the server's own copy; `gate` guards it under privacy where it is private."""

    def __init__(
        self, config: Vertical | Soul, problem: VerticalProblem, response: Response, gate: Gate | None = None
    ) -> None:
        self.config, self.problem, self.response, self.gate = config, problem, response, gate
        self.frame = VerticalFrame(config, problem)
        self.tables, self.terms = self.frame.tables, self.frame.terms
        #: As the holder of the response sees the sum.
        self.likelihood = config.seen_by_holder(problem.likelihood, len(problem.silos))
        self.core = VerticalServer(
            self.likelihood, Optimizer(config.optimizer, config.learning_rate), problem.dtype, config.family
        )
        self._slopes = ByRecord(self._slopes_function, self._made, "eager", "the likelihood")
        if gate is not None:
            self._check_alone()
        self._draws = server_draws(problem.seed)
        self._respond = Traced(self.core.respond, (None,) * 4, problem.mode)
        self._update = Traced(self.core.update, (None,) * 4, problem.mode)

    def init(self) -> VerticalState:
        frame, gamma = self.frame, self.core.init()
        zero = frame.move(torch.zeros(frame.batch_records, frame.columns))
        gamma = ServerParams(*({k: v.to(self.problem.device) for k, v in d.items()} for d in gamma))
        return VerticalState(
            0, AUXILIARY_PHASE, gamma, gamma.eta, 0, zero, zero.new_zeros(()), 0.0, zero, 1.0, 0.0, math.nan, math.nan,
            stopping.start(),
        )  # fmt: skip

    def broadcast(self, state: VerticalState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        previous = state.round - 1  # silos now answer that round's pull
        scalars = {"scale": self.config.multiplier(max(previous, 0)), "averaging": float(self._averages(previous))}
        if state.phase == SLOPE_PHASE:
            scalars["mass"] = state.mass
            tensors = {"sum": state.total, "gamma": self._gamma(state)}
        else:
            scalars["value"] = state.value
            tensors = {"pull": state.pull, "curvature": state.curvature}
        return Broadcast(state.round, index, accepted, self.frame.cohort(state.round), scalars, tensors, state.phase)

    def update(
        self, state: VerticalState, message: Broadcast, total: FloatArray, scale: float
    ) -> tuple[VerticalState, Step]:
        silos = self.problem.silos
        if round(len(silos) / scale) != len(message.cohort):
            raise AggregationError(
                f"round {state.round}: a silo that was asked did not answer; the sum of the auxiliary variables is "
                "then no predictor. Ask again when it is back"
            )
        blocks = self.tables[message.phase].split(total)
        if message.phase == SLOPE_PHASE:
            return self._after_slopes(state, blocks)
        s = self.frame.move(blocks["auxiliary"])
        if self.config.max_staleness:
            s = s + state.total
        state = state._replace(
            total=s,
            local=scale * float(blocks["local"]) if "local" in blocks else math.nan,
            mass=float(blocks["mass"]) if "mass" in blocks else 1.0,
            unsettled=float(blocks["unsettled"]) if "unsettled" in blocks else math.nan,
        )
        if self.config.is_power:
            step = Step(state.objective, self._rate(state), state.monitor.r_hat, SLOPE_PHASE, False)
            return state._replace(phase=SLOPE_PHASE), step
        response = self._batch(state.round)
        gamma = self._gamma(state)
        if self.gate is not None:
            # The curvature, which several local steps would need, follows from every offset, and is not noised.
            pull, in_gamma = self._guarded(self.gate, message, response, s, gamma)
            return self._finish(state._replace(pull=pull, curvature=pull.new_zeros(())), in_gamma, math.nan)
        answer = self._respond(response, s, gamma, self.frame.weights())
        state = state._replace(pull=answer.pull, curvature=answer.curvature)
        return self._finish(state, answer.gamma, float(answer.value))

    def posterior(self, state: VerticalState) -> Posterior:
        """q(gamma); the silos' q(theta_j) stay with them."""
        return Posterior(self.core.family, state.average, {})

    def verdict(self, state: VerticalState) -> Verdict:
        """Whether gamma and, where silos say so, their own parameters stopped drifting."""
        still = state.monitor.r_hat is not None and state.monitor.r_hat < stopping.R_HAT_BELOW
        settled = still and (math.isnan(state.unsettled) or state.unsettled < 0.5)
        details = self.metrics(state)
        if self.terms:
            return Verdict(None, PRIVATE, details, not settled)
        if settled:
            return Verdict(True, "gamma and the silos' own parameters stopped drifting", details)
        who = "gamma was" if not still else f"{round(state.unsettled)} silos' own parameters were"
        advice = f"raise rounds (now {self.config.rounds}), lower learning_rate, or standardise the columns"
        return Verdict(False, f"{who} still drifting when the rounds were over; {advice}", details)

    def rounds(self, state: VerticalState) -> int:
        return state.round

    def metrics(self, state: VerticalState) -> dict[str, float | None]:
        unsettled = None if math.isnan(state.unsettled) else round(state.unsettled)
        return {"r_hat": state.monitor.r_hat, "silos_unsettled": unsettled}

    def _after_slopes(self, state: VerticalState, blocks: dict[str, FloatArray]) -> tuple[VerticalState, Step]:
        """Power likelihood: D, the gradient in gamma and the likelihood's value are totals."""
        move, value = self.frame.move, float(blocks["value"])
        offset = self._batch(state.round).offset
        curvature = self.core.curvature(offset, state.total, self._gamma(state))
        state = state._replace(phase=AUXILIARY_PHASE, pull=move(blocks["slope"]), curvature=curvature, value=value)
        return self._finish(state, move(blocks["gamma"]), value)

    def _finish(self, state: VerticalState, in_gamma: Tensor, value: float) -> tuple[VerticalState, Step]:
        """The step on q(gamma), and the end of the round."""
        scale = self.frame.move(self.config.multiplier(state.round))
        gamma, own = self._update(state.gamma, in_gamma, self._noise(state.round), scale)
        objective = state.local + value + float(own)
        if not self.terms and not math.isfinite(objective):
            raise InputError(
                f"the objective is not finite in round {state.round}; lower learning_rate or rescale the data"
            )
        averaged = state.averaged + 1 if self._averages(state.round) else 0
        average = running_average(state.average, gamma.eta, averaged)
        sd = self.core.family.stddev(gamma.eta)
        sd = torch.where(sd > 0, sd, 1.0)  # a point has none
        monitor = stopping.watch(stopping.observe(state.monitor, to_numpy(gamma.eta["loc"]), np.log(to_numpy(sd))))
        finished = state.round + 1 >= self.config.rounds
        step = Step(objective, self._rate(state), monitor.r_hat, "averaging" if averaged else "approach", finished)
        ahead = state._replace(
            round=state.round + 1, objective=objective, gamma=gamma, average=average, averaged=averaged, monitor=monitor
        )
        return ahead, step

    def _guarded(
        self, gate: Gate, message: Broadcast, response: Response, s: Tensor, gamma: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The response's part of a round, clipped, noised and charged: pulls and the gradient in gamma."""
        found = self._slopes_alone(response, s, gamma)
        gate.begin(message.sum_index, PULL_PHASE, len(message.cohort))
        in_gamma = gate.hidden_sum(HIDDEN_PHASE, found.gamma) * self.frame.weight
        pull = gate.release_rows(found.predictor)
        move = self.frame.move
        return move(pull.values).reshape(found.predictor.shape), move(in_gamma)

    def _slopes_alone(self, response: Response, s: Tensor, gamma: Tensor) -> RecordSlopes:
        """A record on which the likelihood fails is not a number, which the gate counts as nothing: to fail would tell
        of it without noise."""
        return RecordSlopes(*self._slopes(gamma, (*response, s)))

    def _slopes_function(self, gamma: Tensor, records: Any) -> RecordSlopes:
        y, offset, s = records
        return slopes_by_record(self.likelihood, y, offset, s, gamma)

    def _made(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Made labels, offsets (count,) and sums (count, C)."""
        s = self.frame.move(torch.zeros(count, self.frame.columns))
        return s[:, 0], s[:, 0], s

    def _check_alone(self) -> None:
        """Raise InputError for a likelihood that cannot be evaluated a record at a time, on made labels."""
        try:
            self._slopes.check(self.frame.move(torch.zeros(self.frame.gamma_size)))
        except Exception as error:  # the likelihood may be the user's
            raise InputError(
                "record-level privacy evaluates the likelihood of each record alone, which fails on labels of 0 "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            ) from error

    def _batch(self, round_: int) -> Response:
        return Response(**take(self.response._asdict(), self.frame.batch(round_)))

    def _noise(self, round_: int) -> Tensor:
        return self.frame.move(self._draws.normals(round_, self.core.family.noise_size)[0])

    def _gamma(self, state: VerticalState) -> Tensor:
        return self.core.gamma(state.gamma.eta, self._noise(state.round))

    def _averages(self, round_: int) -> bool:
        return round_ >= 0 and self.config.averages(round_)

    def _rate(self, state: VerticalState) -> float:
        return self.config.learning_rate * self.config.multiplier(state.round)
