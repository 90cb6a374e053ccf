"""Structured federated variational inference (Hassan et al. 2023, Algorithm 1): one secure sum a round.

    server:  draws eps_G, sends Z_G, d = Z_G - mu_G and theta
    silo:    draws eps_L, takes a step on its own eta_L, contributes gradients in Z_G, d and theta
    server:  adds L0 = log p(Z_G) / q(Z_G), pulls the total back through f_G, takes a step on eta_G and theta

The result does not depend on how records are spread over silos. The paper's Algorithm 1 writes the silo's term with
p(y | ...); it is p(y, Z_L | Z_G) / q(Z_L | Z_G), and the server's L0 enters its own step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable, FloatArray
from secure_fvi.algorithms import stopping
from secure_fvi.algorithms.base import Broadcast, LocalFit, Posterior, Problem, SiloView, Step, choose_cohort
from secure_fvi.compiled import Traced
from secure_fvi.errors import InputError
from secure_fvi.families import Amortised, Conditional, Params, global_family
from secure_fvi.families.amortised import ENCODER
from secure_fvi.objective import ServerGradient, SiloGradient, server_gradient, silo_gradient
from secure_fvi.optimizers import Optimizer
from secure_fvi.randomness import server_draws
from secure_fvi.trees import merge, part, put, running_average, take, to_numpy

#: Factor on the learning rate after a share `t` in [0, 1) of the rounds.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1.0 - 0.99 * t,
    "cosine": lambda t: 0.005 + 0.4975 * (1 + math.cos(math.pi * t)),
    "exponential": lambda t: 0.01**t,
}


@dataclass(frozen=True)
class SFVI:
    """Configuration. With every option at its default a model of moderate size converges and stops by itself.

    family: q(Z_G), "auto" is full up to 256 dimensions and diagonal above. importance_samples: K; 1 is the ELBO.
    iterations: rounds to run; None runs until the rule of `stopping` is met, at most max_iterations.
    schedule: of the learning rate over `iterations`, a name or a function of the share done; needs `iterations`.
    average_last: with `iterations` set, the share of last iterates that is averaged (0 keeps the last one).
    sampling_rate: each record joins a round with this probability. participation: share of silos asked a round.
    bound: largest absolute value of any element of a contribution; past it a silo refuses.
    """

    family: Literal["auto", "diagonal", "full", "low_rank"] = "auto"
    rank: int = 8
    importance_samples: int = 1
    iterations: int | None = None
    max_iterations: int = 30_000
    optimizer: str = "adam"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.05
    schedule: str | Callable[[float], float] = "constant"
    average_last: float = 0.25
    sampling_rate: float = 1.0
    participation: float = 1.0
    bound: float = 2.0**30
    local_family: Conditional | Amortised = field(default_factory=Conditional)
    silo_family: Conditional = field(default_factory=Conditional)

    name = "sfvi"

    def __post_init__(self) -> None:
        if self.family not in ("auto", "diagonal", "full", "low_rank"):
            raise InputError(f"family '{self.family}' is unknown; choose auto, diagonal, full or low_rank")
        for option, least in (
            ("rank", 1),
            ("importance_samples", 1),
            ("iterations", 1),
            ("max_iterations", 1),
        ):
            value = getattr(self, option)
            if not (value is None and option == "iterations") and (type(value) is not int or value < least):
                raise InputError(f"{option} must be a whole number of at least {least}, not {value!r}")
        for option in ("sampling_rate", "participation"):
            if not 0 < getattr(self, option) <= 1:
                raise InputError(f"{option} must lie in (0, 1], not {getattr(self, option)}")
        if not 0 <= self.average_last <= 1:
            raise InputError(f"average_last must lie in [0, 1], not {self.average_last}")
        if isinstance(self.schedule, str) and self.schedule not in SCHEDULES:
            raise InputError(f"schedule '{self.schedule}' is unknown; choose {', '.join(SCHEDULES)}, or a function")
        if self.schedule != "constant" and self.iterations is None:
            raise InputError("a learning-rate schedule needs `iterations`; without it the stopping rule sets the rate")
        Optimizer(self.optimizer, self.learning_rate, self.optimizer_options)
        if not (math.isfinite(self.bound) and self.bound > 0):
            raise InputError(f"bound must be positive and finite, not {self.bound}")

    @property
    def most_rounds(self) -> int:
        return self.iterations or self.max_iterations

    def multiplier(self, round_: int) -> float:
        """Of the learning rate in a run of fixed length."""
        schedule = SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule
        return float(schedule(round_ / self.most_rounds))

    def program(self, problem: Problem) -> SFVIProgram:
        return SFVIProgram(self, problem)


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


class SFVILocal(NamedTuple):
    """A silo's state. Never leaves the silo."""

    record: Params  # variational parameters of its records, (N + 1, ...) each
    record_moments: Params
    silo: Params  # of its silo-level latents, (1, ...) each
    silo_moments: Params
    record_average: Params
    silo_average: Params
    averaged: int  # iterates in the averages
    stage: int  # to which they belong


class SFVIProgram:
    """SFVI bound to a problem."""

    def __init__(self, config: SFVI, problem: Problem) -> None:
        self.config, self.problem = config, problem
        layout, samples = problem.layout, config.importance_samples
        n_global, n_record, n_silo = (layout.size(r) for r in ("global", "record", "silo"))
        self.n_record, self.n_silo = n_record, n_silo
        self.family = global_family(config.family, n_global, config.rank)
        self.local_family = config.local_family.build(n_record, n_global + n_silo, samples)
        self.silo_family = config.silo_family.build(n_silo, n_global, 1)
        self.optimizer = Optimizer(config.optimizer, config.learning_rate, config.optimizer_options)
        self.samples = samples if n_record else 1
        self._draws = server_draws(problem.seed)
        self.minibatch = config.sampling_rate < 1
        if self.minibatch and self.local_family.couples_records:
            raise InputError(
                "a dense local scale couples all records of a silo; use sampling_rate = 1 or another scale"
            )
        if self.minibatch and not self.optimizer.traceable:
            raise InputError(
                f"optimizer '{config.optimizer}' has no step count by record; for minibatches use adam or sgd"
            )
        self.theta_start = {**problem.start.theta, **self.local_family.init_theta(problem.dtype)}
        if any(name.startswith(ENCODER) for name in problem.start.theta):
            raise InputError(f"no pyro.param may start with '{ENCODER}'")
        self.couples = self.local_family.sees_shift or self.silo_family.sees_shift
        self._gradient: Callable[..., SiloGradient] = silo_gradient(
            problem.density, self.local_family, self.silo_family, self.samples
        )
        self._server_gradient: Callable[..., ServerGradient] = server_gradient(problem.density, self.family)
        by_shape = self.local_family.couples_records
        record, draws = (None, None) if by_shape else (0, 1)
        axes = (None, None, None, record, None, record, record, draws, None)
        self._table = self._make_table()
        self._silo_step: Callable[..., Any] = self._silo_step_function
        self._server_step: Callable[..., Any] = self._server_step_function
        if self.optimizer.traceable:
            self._silo_step = Traced(self._silo_step_function, (*axes, record, None, None), problem.mode, by_shape)
            self._server_step = Traced(self._server_step_function, (None,) * 8, problem.mode)
        else:
            self._gradient = Traced(self._gradient, axes, problem.mode, by_shape)
            self._server_gradient = Traced(self._server_gradient, (None,) * 6, problem.mode)

    # ---- shared ----

    def table(self) -> BlockTable:
        return self._table

    def _make_table(self) -> BlockTable:
        bound, n = self.config.bound, self.family.n
        blocks = [Block("direct", (n,), bound)]
        blocks += [Block("path", (n,), bound)] if self.couples else []
        blocks += [Block(f"theta/{name}", tuple(v.shape), bound) for name, v in sorted(self.theta_start.items())]
        blocks += [Block("objective", (), bound), Block("records", (), 2.0**31, integer=True)]
        return BlockTable(tuple(blocks))

    # ---- server ----

    def init(self) -> SFVIState:
        eta = self.family.init(self._move(self.problem.start.z_global))
        theta = {name: self._move(value) for name, value in self.theta_start.items()}
        merged = merge(eta=eta, theta=theta)
        eps = self._noise(0)
        z_global, shift = self._draw(eta, eps)
        return SFVIState(0, eta, theta, self.optimizer.init(merged), merged, 0, eps, z_global, shift, stopping.start())

    def broadcast(self, state: SFVIState, index: int, accepted: int) -> Broadcast:
        tensors = {"z_global": state.z_global, "shift": state.shift}
        tensors |= {f"theta/{name}": value for name, value in state.theta.items()}
        scalars = {
            "scale": self._scale(state),
            "averaging": float(self._averages(state)),
            "stage": float(state.monitor.stage),
        }
        cohort = choose_cohort(self.problem.silos, self.config.participation, self.problem.seed, state.round)
        return Broadcast(state.round, index, accepted, cohort, scalars, tensors)

    def update(self, state: SFVIState, message: Broadcast, total: FloatArray, scale: float) -> tuple[SFVIState, Step]:
        averages = self._averages(state)
        averaged = state.averaged + 1 if averages else 0
        factors = torch.tensor([scale, message.scalars["scale"], 1.0 / max(averaged, 1)], dtype=self.problem.dtype)
        eps = self._noise(state.round + 1)
        eta, theta, moments, average, z_global, shift, watched = self._server_step(
            state.eta, state.theta, state.moments, state.average, state.eps, eps,
            self._move(torch.from_numpy(total)), self._move(factors),
        )  # fmt: skip
        objective, *iterate = np.split(to_numpy(watched), [1, 1 + self.family.n])
        if not math.isfinite(objective[0]):
            raise InputError(
                f"the objective is not finite in round {state.round}; lower learning_rate or rescale the data"
            )
        monitor = stopping.observe(state.monitor, *iterate)
        finished = message.round + 1 >= self.config.most_rounds
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
        step = Step(float(objective[0]), rate, monitor.r_hat, self._phase(state), finished)
        return SFVIState(state.round + 1, eta, theta, moments, average, averaged, eps, z_global, shift, monitor), step

    def posterior(self, state: SFVIState) -> Posterior:
        if state.averaged:
            return Posterior(self.family, part(state.average, "eta"), part(state.average, "theta"))
        return Posterior(self.family, state.eta, state.theta)

    def converged(self, state: SFVIState) -> bool:
        """Whether the stopping rule was met, or, in a run of fixed length, whether the iterates stopped drifting."""
        if self.config.iterations is None:
            return state.monitor.converged
        return state.monitor.r_hat is not None and state.monitor.r_hat < stopping.R_HAT_BELOW

    def _noise(self, round_: int) -> Tensor:
        return self._move(self._draws.normals(round_, self.family.noise_size)[0])

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.problem.device, self.problem.dtype)

    def _scalar(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self.problem.dtype, device=self.problem.device)

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

    def _server_step_function(
        self,
        eta: Params, theta: Params, moments: Params, average: Params, eps: Tensor, eps_next: Tensor,
        total: Tensor, factors: Tensor,
    ) -> tuple[Params, Params, Params, Params, Tensor, Tensor, Tensor]:  # fmt: skip
        """`factors`: on the total, on the learning rate, and the weight of this iterate in the average."""
        blocks = self._table.blocks
        parts = torch.split(total * factors[0], [b.size for b in blocks])
        sums = {b.name: value.reshape(b.shape) for b, value in zip(blocks, parts, strict=True)}
        path = sums["path"] if self.couples else torch.zeros_like(sums["direct"])
        theta_total = {name: sums[f"theta/{name}"] for name in theta}
        gradient = self._server_gradient(eta, theta, eps, sums["direct"], path, theta_total)
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
        objective = (gradient.value + sums["objective"]).reshape(1)
        watched = torch.cat([objective, eta["loc"], self.family.stddev(eta).log()])
        return eta, part(params, "theta"), moments, average, z_global, shift, watched

    # ---- silo ----

    def init_local(self, view: SiloView) -> SFVILocal:
        record = self.local_family.init(self._move(view.start.z_record))
        silo = self.silo_family.init(self._move(view.start.z_silo).unsqueeze(0))
        record_moments = self.optimizer.init(record, by_row=self.minibatch)
        return SFVILocal(record, record_moments, silo, self.optimizer.init(silo), record, silo, 0, 0)

    def contribute(self, message: Broadcast, local: SFVILocal, view: SiloView) -> tuple[FloatArray, SFVILocal]:
        t = {name: self._move(value) for name, value in message.tensors.items()}
        theta = {name: t[f"theta/{name}"] for name in self.theta_start}
        n = self.n_record
        scale = self._scalar(message.scalars["scale"])
        batch = self._batch(message.round, view)
        at = None if batch is None else torch.from_numpy(batch).to(self.problem.device)
        eps = view.record_draws.normals(message.round, self.samples * n, batch)
        eps_record = eps.reshape(len(eps), self.samples, n).transpose(0, 1).contiguous()
        eps_silo = view.silo_draws.normals(message.round, self.n_silo)
        weights = view.weights if at is None else view.weights[at] / self.config.sampling_rate
        flat, record, record_moments, silo, silo_moments = self._silo_step(
            t["z_global"], t["shift"], theta, take(local.record, at), local.silo, take(view.rows, at), weights,
            self._move(eps_record), self._move(eps_silo),
            take(local.record_moments, at), local.silo_moments, scale,
        )  # fmt: skip
        record, record_moments = (
            put(local.record, at, record),
            put(local.record_moments, at, record_moments),
        )

        stage, averages = int(message.scalars["stage"]), message.scalars["averaging"] > 0
        averaged = (local.averaged + 1 if stage == local.stage else 1) if averages else 0
        after = SFVILocal(
            record, record_moments, silo, silo_moments,
            running_average(local.record_average, record, averaged),
            running_average(local.silo_average, silo, averaged), averaged, stage,
        )  # fmt: skip
        return np.append(flat.cpu().numpy().astype(np.float64), float(view.size)), after

    def local_fit(self, local: SFVILocal) -> LocalFit:
        return LocalFit(self.local_family, local.record_average, self.silo_family, local.silo_average, self.samples)

    def _batch(self, round_: int, view: SiloView) -> npt.NDArray[np.int64] | None:
        """Rows of this round's Poisson sample; drawn from the silo's secret, so nobody else knows who took part."""
        if not self.minibatch:
            return None
        joined = view.batch_draws.uniforms(round_, 1)[0, : view.size, 0] < self.config.sampling_rate
        rows = np.flatnonzero(joined)
        # At least two rows, filled up with the spare one: a traced graph treats sizes 0 and 1 as special.
        return np.concatenate([rows, np.full(max(2 - len(rows), 0), view.size, np.int64)])

    def _silo_step_function(
        self,
        z_global: Tensor, shift: Tensor, theta: Params, record: Params, silo: Params, rows: Params, weights: Tensor,
        eps_record: Tensor, eps_silo: Tensor, record_moments: Params, silo_moments: Params, scale: Tensor,
    ) -> tuple[Tensor, Params, Params, Params, Params]:  # fmt: skip
        g = self._gradient(z_global, shift, theta, record, silo, rows, weights, eps_record, eps_silo)
        parts = [g.direct] + ([g.path] if self.couples else []) + [g.theta[k].reshape(-1) for k in sorted(theta)]
        flat = torch.cat([*parts, g.value.reshape(1)])
        return (
            flat,
            *self.optimizer.step(record, g.local, record_moments, scale, _units(record)),
            *self.optimizer.step(silo, g.silo, silo_moments, scale, _units(silo)),
        )


def mean_units(stddev: Tensor) -> Tensor:
    """The unit in which a mean takes its steps: 1, or the posterior sd where that is larger.

    Means of wide posteriors would otherwise creep, since an adaptive optimiser's steps have the length of the
    learning rate whatever the scale of the parameter.
    """
    return stddev.clamp(min=1.0)


def _units(params: Params) -> Params:
    return {"loc": mean_units(params["log_scale"].exp())} if params else {}
