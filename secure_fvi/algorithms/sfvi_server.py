"""The server's half of SFVI: it draws eps_G, adds L0 and takes the step on eta_G and theta."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms import stopping
from secure_fvi.algorithms.base import (
    PRIVATE,
    ROUND_PHASE,
    Broadcast,
    Posterior,
    Problem,
    Step,
    Verdict,
    fixed_length,
)
from secure_fvi.algorithms.sfvi import FINISH, SFVI
from secure_fvi.algorithms.sfvi_frame import SFVIFrame, mean_units
from secure_fvi.algorithms.stationarity import Rest, as_natural, at_rest, final_draws, verdict
from secure_fvi.compiled import Traced
from secure_fvi.errors import InputError
from secure_fvi.families import Params
from secure_fvi.objective import ServerGradient, server_gradient
from secure_fvi.randomness import server_draws
from secure_fvi.trees import merge, part, to_numpy


class SFVIState(NamedTuple):
    """The server's state. All of it follows from broadcasts and totals."""

    round: int
    eta: Params
    theta: Params
    moments: Params  # optimiser state
    average: Params  # running average of eta and theta, keys "eta/..." and "theta/..."
    averaged: int  # iterates in it
    eps: Tensor  # (noise_size,) eps_G of the round to come
    z_global: Tensor  # (n_global,) and its Z_G
    shift: Tensor  # (n_global,) d = Z_G - mu_G
    monitor: stopping.Monitor
    lost: int  # rounds since the averaging began in which a silo that was asked was missing
    phase: str  # of the sum to come
    rest: Rest  # what the final sum told of q, where all silos were in it


class SFVIServer:
    """`algorithms.base.ServerProgram`."""

    def __init__(self, config: SFVI, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.frame = SFVIFrame(config, problem)
        self.family, self.optimizer = self.frame.family, self.frame.optimizer
        self.table = self.frame.table
        self.tables, self.terms = self.frame.tables, self.frame.terms_by_phase
        self._releases_objective = any(b.name == "objective" for b in self.table.blocks)
        self._draws = server_draws(problem.seed)
        self._gradient: Callable[..., ServerGradient] = server_gradient(problem.density, self.family)
        self._step: Callable[..., Any] = self._step_function
        if self.optimizer.traceable:
            self._step = Traced(self._step_function, (None,) * 8, problem.mode)
        else:
            self._gradient = Traced(self._gradient, (None,) * 6, problem.mode)

    def init(self) -> SFVIState:
        theta = {name: self.frame.move(value) for name, value in self.frame.theta_start.items()}
        return self.init_at(self.frame.start(), theta)

    def init_at(self, eta: Params, theta: Params) -> SFVIState:
        """The state before the first round, from given parameters."""
        merged = merge(eta=eta, theta=theta)
        eps = self._noise(0)
        z_global, shift = self._draw(eta, eps)
        moments, monitor = self.optimizer.init(merged), stopping.start()
        return SFVIState(0, eta, theta, moments, merged, 0, eps, z_global, shift, monitor, 0, ROUND_PHASE, Rest())

    def broadcast(self, state: SFVIState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        if state.phase == FINISH:
            found = self.posterior(state)
            shared = merge(eta=found.eta, theta=found.theta)
            return Broadcast(state.round, index, accepted, self.problem.silos, {}, shared, FINISH)
        tensors = {"z_global": state.z_global, "shift": state.shift}
        tensors |= {f"theta/{name}": value for name, value in state.theta.items()}
        scalars = {
            "scale": self._scale(state),
            "averaging": float(self._averages(state)),
            "stage": float(state.monitor.stage),
        }
        return Broadcast(state.round, index, accepted, self.frame.cohort(state.round), scalars, tensors)

    def update(self, state: SFVIState, message: Broadcast, total: FloatArray, scale: float) -> tuple[SFVIState, Step]:
        absent = scale * len(message.cohort) > len(self.problem.silos) * (1 + 1e-9)
        if message.phase == FINISH:
            return self._checked(state, total, absent)
        averages = self._averages(state)
        lost = state.lost + absent if averages else 0
        averaged = state.averaged + 1 if averages else 0
        weights = [scale / self.frame.rate, message.scalars["scale"], 1.0 / max(averaged, 1)]
        factors = torch.tensor(weights, dtype=self.problem.dtype)
        eps = self._noise(state.round + 1)
        eta, theta, moments, average, z_global, shift, watched = self._step(
            state.eta, state.theta, state.moments, state.average, state.eps, eps,
            self.frame.move(torch.from_numpy(total)), self.frame.move(factors),
        )  # fmt: skip
        objective, *iterate = np.split(to_numpy(watched), [1, 1 + self.family.n])
        if not math.isfinite(objective[0]):
            raise InputError(
                f"the objective is not finite in round {state.round}; lower learning_rate or rescale the data"
            )
        monitor = stopping.observe(state.monitor, *iterate)
        finished = state.round + 1 >= self.config.own_rounds
        if self.config.iterations is None:
            monitor, stage_ended = stopping.assess(monitor)
            finished = finished or monitor.converged
            if stage_ended:  # the next stage starts from this one's average
                eta, theta = part(average, "eta"), part(average, "theta")
                z_global, shift = self._draw(eta, eps)
                averaged = averaged if monitor.converged else 0
        else:
            monitor = stopping.watch(monitor)
        rate = self.config.learning_rate * message.scalars["scale"]
        shown = float(objective[0]) if self._releases_objective else math.nan
        phase = FINISH if finished and FINISH in self.tables else ROUND_PHASE
        step = Step(shown, rate, monitor.r_hat, self._phase(state), finished and phase == ROUND_PHASE)
        after = SFVIState(
            state.round + 1, eta, theta, moments, average, averaged, eps, z_global, shift, monitor, lost, phase, Rest()
        )
        return after, step

    def posterior(self, state: SFVIState) -> Posterior:
        if state.averaged:
            return Posterior(self.family, part(state.average, "eta"), part(state.average, "theta"))
        return Posterior(self.family, state.eta, state.theta)

    def verdict(self, state: SFVIState) -> Verdict:
        """Of a run that stops by itself: whether the stopping rule was met with all silos, and q is stationary."""
        config, r_hat = self.config, state.monitor.r_hat
        still = r_hat is not None and r_hat < stopping.R_HAT_BELOW
        if self.terms:
            return Verdict(None, PRIVATE, {"r_hat": r_hat}, not still)
        if config.iterations is not None:
            seen = "" if still else ", and the iterates were still drifting when it ended"
            return fixed_length("iterations", config.iterations, seen, {"r_hat": r_hat}, not still)
        advice = f"raise max_iterations (now {config.max_iterations}), lower learning_rate, or standardise the columns"
        against = None
        if not state.monitor.converged:
            against = f"the iterates had not settled after {state.round} rounds"
        elif state.lost:
            against = f"silos were absent from {state.lost} of the rounds that the result averages"
        settled = "means and sds have settled in two stages"
        if FINISH in self.tables:
            return verdict(state.rest, against, settled, advice)
        return Verdict(against is None, settled if against is None else f"{against}; {advice}", {"r_hat": r_hat})

    def _checked(self, state: SFVIState, total: FloatArray, absent: bool) -> tuple[SFVIState, Step]:
        """After the final sum."""
        rest, found = Rest(), self.posterior(state)
        if not absent:
            q, sums = as_natural(self.family, found.eta), self.tables[FINISH].split(total)
            eps = final_draws(self.problem.seed, q.n, q.full)
            prior = lambda z: self._log_prior(z, found.theta)  # noqa: E731
            rest = at_rest(self.problem, q, found.theta, prior, eps, sums, self.config.bound)
        step = Step(rest.objective, 0.0, state.monitor.r_hat, FINISH, True)
        return state._replace(phase=ROUND_PHASE, rest=rest), step

    def _log_prior(self, z: Tensor, theta: Params) -> Tensor:
        return self.problem.density.log_prior(self.frame.move(z), theta).to("cpu", torch.float64)

    def rounds(self, state: SFVIState) -> int:
        return state.round

    def metrics(self, state: SFVIState) -> dict[str, float | None]:
        found: dict[str, float | None] = {"r_hat": state.monitor.r_hat}
        return found if FINISH not in self.tables else found | {"bound": state.rest.bound}

    def _noise(self, round_: int) -> Tensor:
        return self.frame.move(self._draws.normals(round_, self.family.noise_size)[0])

    def _scale(self, state: SFVIState) -> float:
        return state.monitor.scale if self.config.iterations is None else self.config.multiplier(state.round)

    def _averages(self, state: SFVIState) -> bool:
        """Whether this round's iterate enters the average."""
        if self.config.iterations is None:
            return state.monitor.averaging > 0
        return state.round >= self.config.iterations * (1 - self.config.average_last)

    def _phase(self, state: SFVIState) -> str:
        return "averaging" if self._averages(state) else "approach"

    def _draw(self, eta: Params, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Z_G and d."""
        z_global = self.family.transform(eta, eps)
        return z_global, z_global - eta["loc"]

    def _step_function(
        self,
        eta: Params, theta: Params, moments: Params, average: Params, eps: Tensor, eps_next: Tensor,
        total: Tensor, factors: Tensor,
    ) -> tuple[Params, Params, Params, Params, Tensor, Tensor, Tensor]:  # fmt: skip
        """`factors`: on the total, on the learning rate, and the weight of this iterate in the average."""
        blocks = self.table.blocks
        parts = torch.split(total * factors[0], [b.size for b in blocks])
        sums = {b.name: value.reshape(b.shape) for b, value in zip(blocks, parts, strict=True)}
        path = sums["path"] if self.frame.couples else torch.zeros_like(sums["direct"])
        theta_total = {name: sums[f"theta/{name}"] for name in theta}
        gradient = self._gradient(eta, theta, eps, sums["direct"], path, theta_total)
        params, moments = self.optimizer.step(
            merge(eta=eta, theta=theta),
            merge(eta=gradient.eta, theta=gradient.theta),
            moments,
            factors[1],
            {"eta/loc": mean_units(self.family.stddev(eta))},
        )
        average = {name: old + factors[2] * (params[name] - old) for name, old in average.items()}
        eta = part(params, "eta")
        z_global, shift = self._draw(eta, eps_next)
        # Where the silos' part is not released, L0 alone still shows an iterate that has blown up.
        objective = (gradient.value + sums.get("objective", 0.0)).reshape(1)
        watched = torch.cat([objective, eta["loc"], self.family.stddev(eta).log()])
        return eta, part(params, "theta"), moments, average, z_global, shift, watched
