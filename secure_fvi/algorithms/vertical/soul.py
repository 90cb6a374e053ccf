"""SOUL: unadjusted Langevin draws of theta_j at the silos, a point estimate of z (Hassan et al. 2024, appendix A).

One round, in the shape of the variational rounds:

    silos:   z_j into a secure sum; the server broadcasts dlog p(y | s)/ds (augmented) or s and gamma (power)
    silos:   `langevin`: M draws of theta_j given z_j; `slope` (power only): the draws' mean of d_j, into a second sum
    silos:   `move`: z_j along its pull, less (z_j - mean eta_j) / rho^2, by a step that falls over the rounds
    server:  a step on gamma along its gradient (A.3)

Draws never leave a silo. z is a posterior mode (De Bortoli et al. 2021), so that theta's posterior comes out narrower
than with z integrated out. The text's (18) and (19) print minus signs before log densities: they are plus here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.func import vmap

from secure_fvi.aggregation.base import BlockTable
from secure_fvi.algorithms.vertical.auxiliary import log_normal
from secure_fvi.algorithms.vertical.config import RunShape, block_tables, check_response, row_sums
from secure_fvi.algorithms.vertical.likelihoods import Likelihood, slopes
from secure_fvi.algorithms.vertical.predictors import Predictor
from secure_fvi.algorithms.vertical.silo import Response
from secure_fvi.disclosure import Declaration
from secure_fvi.errors import InputError
from secure_fvi.optimizers import Optimizer
from secure_fvi.trees import Params

_POWER_ITERATIONS = 30


@dataclass(frozen=True)
class Soul(RunShape):
    """Choices of SOUL.

    draws: Langevin steps a round, M. step: their length times the largest curvature of theta_j's density; a direction
    with that curvature comes out with its variance too large by a factor 1 / (1 - step / 2).
    settle: rounds after which the steps on z begin to fall, with the power `decay` of the round.
    response, rounds, learning_rate (of gamma), optimizer and bound as in `Vertical`. burn_in: the share of rounds whose
    draws are thrown away; of the later ones `keep` are kept at the silo, evenly spread.
    """

    model: Literal["augmented", "power"] = "augmented"
    rho: float = 1.0
    draws: int = 5
    step: float = 0.2
    settle: int = 200
    decay: float = 0.8
    response: Literal["shared", "private"] = "shared"
    rounds: int = 4000
    learning_rate: float = 0.02
    optimizer: str = "adam"
    burn_in: float = 0.5
    keep: int = 1000
    bound: float = 2.0**20

    name: ClassVar[str] = "soul"
    importance_samples: ClassVar[int] = 1
    # What `Vertical` offers and SOUL does not: every silo and every record in each round, gamma a point, equal weights.
    family: ClassVar[str] = "point"
    batch_size: ClassVar[None] = None
    weight_concentration: ClassVar[None] = None
    participation: ClassVar[float] = 1.0
    max_staleness: ClassVar[int] = 0
    local_steps: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_response(self.model, self.response)
        if not 0 < self.rho < math.inf:
            raise InputError(f"rho must be positive and finite, not {self.rho}")
        Optimizer(self.optimizer, self.learning_rate)
        if not 0 <= self.burn_in < 1:
            raise InputError(f"burn_in lies in [0, 1), not {self.burn_in}")
        for name in ("draws", "settle", "rounds", "keep"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise InputError(f"{name} must be a whole number of at least 1, not {getattr(self, name)!r}")
        if not 0 < self.step < 2:
            raise InputError(f"step, relative to the stable length, lies in (0, 2), not {self.step}")
        if not 0.5 < self.decay <= 1:
            raise InputError(f"decay lies in (0.5, 1] for the steps to converge, not {self.decay}")

    def multiplier(self, round_: int) -> float:
        """Of the learning rate of gamma."""
        return self.rate(round_)

    def averages(self, round_: int) -> bool:
        """Whether draws of `round_` are kept, and gamma averaged."""
        return round_ >= self.rounds * self.burn_in

    def declare(self, silos: int, private: bool) -> Declaration:
        return row_sums(self.phases, self.rounds, silos, self.participation, private)

    def resolved(self, likelihood: Likelihood) -> Soul:
        return self

    def seen_by_holder(self, likelihood: Likelihood, silos: int) -> Likelihood:
        return likelihood

    def tables(self, records: int, columns: int, gamma_size: int) -> dict[str, BlockTable]:
        return block_tables(self.model, records, columns, gamma_size, self.bound, weights=False)

    def rate(self, round_: int) -> float:
        """Factor on the steps of z and gamma in a round."""
        return min(1.0, (self.settle / (round_ + 1)) ** self.decay)


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
        v = torch.randn(start.shape, generator=generator, dtype=start.dtype)
        for _ in range(_POWER_ITERATIONS):
            product = torch.func.jvp(gradient, (start,), (v / v.norm(),))[1]
            v = product
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


def gamma_step(
    likelihood: Likelihood, optimizer: Optimizer, gamma: Tensor, moments: Params, gradient: Tensor, rate: Tensor
) -> tuple[Tensor, Params]:
    """The server's step on gamma (n_gamma,), from the likelihood's gradient (A.3, eqs. 26 and 30)."""
    total = gradient + torch.func.grad(likelihood.log_prior)(gamma)
    stepped, moments = optimizer.step({"gamma": gamma}, {"gamma": total}, moments, rate)
    return stepped["gamma"], moments
