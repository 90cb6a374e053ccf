"""SOUL: unadjusted Langevin draws of theta_j at the silos, a point estimate of z (Hassan et al. 2024, appendix A).

One round, in the shape of the variational rounds:

    silos:   z_j into a secure sum; the server broadcasts dlog p(y | s)/ds (augmented) or s and gamma (power)
    silos:   `langevin`: M draws of theta_j given z_j; `slope` (power only): the draws' mean of d_j, into a second sum
    silos:   `move`: z_j along its pull, less (z_j - mean eta_j) / rho^2, by a step that falls over the rounds
    server:  a step on gamma along its gradient (A.3)

Draws never leave a silo. z is a posterior mode (De Bortoli et al. 2021), so that theta's posterior comes out narrower
than with z integrated out. The text's (18) and (19) print minus signs before log densities: they are plus here.

A silo answers the broadcast of a round when it knows the pull on the z_j of the last one: in the augmented-variable
model it then draws theta_j given that z_j, moves it, and sends the new one. In the power model theta_j is drawn when s
and gamma are known, in the sum of slopes, and z_j moves with the next broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.func import vmap

from secure_fvi.algorithms import stopping
from secure_fvi.algorithms.base import Broadcast
from secure_fvi.algorithms.kit import Answer, Sum
from secure_fvi.algorithms.vertical.likelihoods import Likelihood, slopes
from secure_fvi.algorithms.vertical.predictors import Predictor, log_normal
from secure_fvi.algorithms.vertical.steps import Response
from secure_fvi.algorithms.vertical.vertical import (
    AUXILIARY,
    GAMMA,
    LOCAL,
    SLOPE,
    SLOPE_PHASE,
    UNSETTLED,
    VALUE,
    ColumnsProgram,
    Held,
    RunShape,
    VerticalProblem,
    VerticalView,
    settled,
)
from secure_fvi.compiled import Traced
from secure_fvi.errors import InputError
from secure_fvi.optimizers import Optimizer
from secure_fvi.options import Bound, Count, Momentum, Positive, Says, check
from secure_fvi.privacy.terms import Terms
from secure_fvi.trees import Params, to_numpy

_POWER_ITERATIONS = 30


@dataclass(frozen=True)
class Soul(RunShape):
    """Options of SOUL. Unlike `Vertical` it asks every silo for every record in each round, takes gamma as a point, and
    weighs all silos alike."""

    model: Literal["augmented", "power"] = "augmented"
    """As in `Vertical`, like rho, response, rounds, optimizer and bound."""
    rho: Positive = 1.0
    """Standard deviation of z_j given eta_j."""
    draws: Count = 5
    """Langevin steps a round, M."""
    step: Annotated[float, Field(gt=0, lt=2), Says("relative to the stable length must lie in (0, 2)")] = 0.2
    """Their length times the largest curvature of theta_j's density; a direction with that curvature comes out with its
    variance too large by a factor 1 / (1 - step / 2)."""
    settle: Count = 200
    """Rounds after which the steps on z begin to fall,"""
    decay: Annotated[float, Field(gt=0.5, le=1), Says("must lie in (0.5, 1] for the steps to converge")] = 0.8
    """with this power of the round."""
    response: Literal["shared", "private"] = "shared"
    """Who knows y."""
    rounds: Count = 4000
    """How many."""
    learning_rate: float = 0.02
    """Of gamma."""
    optimizer: str = "adam"
    """Of gamma."""
    burn_in: Momentum = 0.5
    """The share of rounds whose draws are thrown away."""
    keep: Count = 1000
    """Draws of the later ones that are kept at the silo, evenly spread."""
    bound: Bound = 2.0**20
    """Largest absolute value of an element of a contribution."""

    name: ClassVar[str] = "soul"
    importance_samples: ClassVar[int] = 1
    family: ClassVar[str] = "point"
    batch_size: ClassVar[None] = None
    max_staleness: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check(self)
        self.check_response()
        Optimizer(self.optimizer, self.learning_rate)

    def multiplier(self, round_: int) -> float:
        """Of the learning rate of gamma."""
        return self.rate(round_)

    def averages(self, round_: int) -> bool:
        """Whether draws of `round_` are kept, and gamma averaged."""
        return round_ >= self.rounds * self.burn_in

    def resolved(self, likelihood: Likelihood) -> Soul:
        return self

    def seen_by_holder(self, likelihood: Likelihood, silos: int) -> Likelihood:
        return likelihood

    def rate(self, round_: int) -> float:
        """Factor on the steps of z and gamma in a round."""
        return min(1.0, (self.settle / (round_ + 1)) ** self.decay)

    def program(self, problem: VerticalProblem, held: Predictor | Held | None = None) -> SoulProgram:
        """As `Vertical.program`."""
        return SoulProgram(self, problem, held)


class SoulLocal(NamedTuple):
    """A silo's state. It never leaves the silo."""

    theta: Tensor  # (n,) the last draw
    z: Tensor  # (N, C)
    mean_eta: Tensor  # (N, C) over the last round's draws
    own: Tensor  # (N, C) power: its own slope in the last sum
    length: Tensor  # () of a Langevin step
    rounds: int  # rounds whose z_j the server has
    kept: Tensor  # (kept, n) draws after burn-in
    monitor: stopping.Monitor  # of the draws


class SoulProgram(ColumnsProgram):
    """SOUL on one problem."""

    def agreed(self, sums: Mapping[str, Sum]) -> dict[str, Terms]:
        raise InputError("SOUL's draws of theta_j are not private, and z_j follows them; use the vertical rounds")

    def set_silo(self, predictor: Predictor) -> None:
        config, problem, mode = self.config, self.problem, self.problem.mode
        self.predictor = predictor
        self.core = SoulSilo(config, problem.likelihood, predictor, len(problem.silos))
        self._langevin = Traced(self.core.langevin, (None,) * 8, mode, by_shape=True)
        self._mean_eta = Traced(self.core.mean_eta, (None,) * 2, mode, by_shape=True)
        self._slope = Traced(self.core.slope, (None,) * 5, mode, by_shape=True)
        self._density = Traced(self.core.log_density, (None,) * 6, mode, by_shape=True)
        late = config.rounds - int(np.ceil(config.rounds * config.burn_in))
        self._every = max(1, late // config.keep)

    def init_local(self, view: Any) -> SoulLocal:
        theta = self.move(self.predictor.start)
        z = self.move(torch.zeros(view.size, self.columns))
        gamma, generator = z.new_zeros(self.gamma_size), torch.Generator().manual_seed(view.start_seed)
        zero = torch.zeros_like(z)
        curvature = self.core.largest_curvature(z, zero, view.rows, view.response, gamma, generator)
        kept = theta.new_zeros(0, len(theta))
        return SoulLocal(theta, z, zero, zero, self.config.step / curvature, 0, kept, stopping.start())

    def answer(self, message: Broadcast, local: SoulLocal, view: Any) -> Answer:
        if message.phase == SLOPE_PHASE:
            return self._slopes_of(message, local, view)
        if local.rounds:
            local = self._moved(message, local, view)
        told = {AUXILIARY: local.z, LOCAL: 0.0, UNSETTLED: float(not settled(local.monitor))}
        if not self.config.is_power:
            gamma = local.z.new_zeros(self.gamma_size)  # the likelihood's part of the density is the server's
            zero = torch.zeros_like(local.z)
            told[LOCAL] = self._density(local.theta, local.z, zero, view.rows, (), gamma)
        return Answer(told, local._replace(rounds=message.round + 1))

    def local_fit(self, local: SoulLocal) -> Any:
        """Mean and sd of the kept draws: "theta/loc", "theta/sd"."""
        kept = local.kept if len(local.kept) else local.theta.unsqueeze(0)
        return {"theta/loc": kept.mean(0), "theta/sd": kept.std(0, correction=0)}

    def thetas(self, local: SoulLocal, n: int, seed: int) -> Tensor:
        """Of the kept ones, with replacement."""
        kept = local.kept if len(local.kept) else local.theta.unsqueeze(0)
        return kept[torch.randint(len(kept), (n,), generator=torch.Generator().manual_seed(seed))]

    def _slopes_of(self, message: Broadcast, local: SoulLocal, view: VerticalView) -> Answer:
        s, gamma = self.move(message.tensors["sum"]), self.move(message.tensors["gamma"])
        others, response = s - local.z, view.response
        assert isinstance(response, Response)
        thetas, local = self._draw(message.round, local, view, others, gamma)
        own, in_gamma = self._slope(thetas, others, view.rows, response, gamma)
        density = self._density(local.theta, local.z, others, view.rows, response, gamma)
        return Answer({SLOPE: own, GAMMA: in_gamma, VALUE: density}, local._replace(own=own))

    def _moved(self, message: Broadcast, local: SoulLocal, view: VerticalView) -> SoulLocal:
        """z_j after the pull on it is known; in the augmented-variable model theta_j is drawn first."""
        round_ = local.rounds - 1
        pull, h = self.move(message.tensors["pull"]), self.move(message.tensors["curvature"])
        if not self.config.is_power:
            gamma = pull.new_zeros(self.gamma_size)
            _, local = self._draw(round_, local, view, torch.zeros_like(pull), gamma)
        rate = pull.new_tensor(self.config.rate(round_))
        return local._replace(z=self.core.move(local.z, local.mean_eta, pull - local.own, h, rate))

    def _draw(
        self, round_: int, local: SoulLocal, view: VerticalView, others: Tensor, gamma: Tensor
    ) -> tuple[Tensor, SoulLocal]:
        """The Langevin draws of a round (M, n); the last one is kept after burn-in."""
        noise = self.move(view.silo_draws.normals(view.turn, self.config.draws * len(local.theta))[0])
        noise = noise.reshape(self.config.draws, -1)
        response = view.response if self.config.is_power else ()
        thetas = self._langevin(local.theta, local.z, others, view.rows, response, gamma, noise, local.length)
        last = thetas[-1]
        kept = local.kept
        if self.config.averages(round_) and round_ % self._every == 0:
            kept = torch.cat([kept, last.unsqueeze(0)])
        where = to_numpy(last)
        # The draws' own spread is the unit in which they may drift.
        sd = np.maximum(to_numpy(kept).std(0), 1e-3) if len(kept) > 1 else np.ones_like(where)
        monitor = stopping.watch(stopping.observe(local.monitor, where, np.log(sd)))
        mean_eta = self._mean_eta(thetas, view.rows)
        return thetas, local._replace(theta=last, mean_eta=mean_eta, kept=kept, monitor=monitor)


# ---- A silo's columns alone: pure functions ----


class SoulSilo:
    """Pure functions of one silo's columns. `response` arguments are () in the augmented-variable model."""

    def __init__(self, config: Soul, likelihood: Likelihood, predictor: Predictor, silos: int) -> None:
        if predictor.points:
            raise InputError("SOUL has no step for pyro.param sites; sample them, or use the variational rounds")
        self.config, self.likelihood, self.predictor, self.silos = config, likelihood, predictor, silos
        self.share = 1.0 / silos

    def eta(self, theta: Tensor, rows: Params) -> Tensor:
        """(N, C)."""
        return self.predictor.evaluate(theta, {}, rows)[0]

    def log_density(
        self, theta: Tensor, z: Tensor, others: Tensor, rows: Params, response: Any, gamma: Tensor
    ) -> Tensor:
        """log p(theta_j | z, y) up to a constant, (): z (N, C) is the silo's own, `others` (N, C) is s - z_j."""
        eta, value = self.predictor.evaluate(theta, {}, rows)
        value = value + log_normal(z, eta, torch.full_like(eta, math.log(self.config.rho))).sum()
        if self.config.is_power:
            at = eta + others + response.offset.unsqueeze(-1)
            value = value + self.share * self.likelihood.log_prob(response.y, at, gamma).sum()
        return value

    def largest_curvature(
        self, z: Tensor, others: Tensor, rows: Params, response: Any, gamma: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Of theta_j's log density at the prior's centre, (), by power iteration."""
        start = self.predictor.start
        gradient = torch.func.grad(lambda t: self.log_density(t, z, others, rows, response, gamma))
        pulled: Any = torch.func.vjp(gradient, start)[1]  # a Hessian is symmetric: the program is run once
        v = torch.randn(start.shape, generator=generator, dtype=start.dtype)
        for _ in range(_POWER_ITERATIONS):
            (v,) = pulled(v / v.norm())
        return v.norm()

    def langevin(
        self,
        theta: Tensor,
        z: Tensor,
        others: Tensor,
        rows: Params,
        response: Any,
        gamma: Tensor,
        noise: Tensor,
        step: Tensor,
    ) -> Tensor:
        """Draws (M, n) that follow theta (n,): noise (M, n) is standard normal, `step` () the length gamma of
        theta + gamma grad + sqrt(2 gamma) noise."""
        gradient = torch.func.grad(self.log_density)
        found = []
        for xi in noise.unbind():
            theta = theta + step * gradient(theta, z, others, rows, response, gamma) + (2 * step).sqrt() * xi
            found.append(theta)
        return torch.stack(found)

    def mean_eta(self, thetas: Tensor, rows: Params) -> Tensor:
        """Mean predictor (N, C) of draws (M, n)."""
        return vmap(lambda t: self.eta(t, rows))(thetas).mean(0)

    def slope(
        self, thetas: Tensor, others: Tensor, rows: Params, response: Response, gamma: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Power likelihood: means over the draws of d_j (N, C) and of its gradient in gamma (n_gamma,)."""

        def one(theta: Tensor) -> tuple[Tensor, Tensor]:
            at = self.eta(theta, rows) + others
            found = slopes(self.likelihood, response.y, response.offset, at, gamma, torch.ones_like(response.y))
            return found.predictor, found.gamma

        predictor, in_gamma = vmap(one)(thetas)
        return self.share * predictor.mean(0), self.share * in_gamma.mean(0)

    def move(self, z: Tensor, mean_eta: Tensor, pull: Tensor, curvature: Tensor, rate: Tensor) -> Tensor:
        """z_j after one ascent step. J silos answer the same s at once, hence J times the curvature."""
        precision = 1.0 / self.config.rho**2
        gradient = pull - precision * (z - mean_eta)
        return z + rate * gradient / (self.silos * curvature + precision)
