"""The server's half of a round: pure functions of totals, and of the response in the augmented-variable model.

    gamma     a draw of the shared parameters from q(gamma), broadcast with every round
    respond   augmented: dlog p(y | s, gamma)/ds, the same (N, C) for all silos, and the gradient in gamma
    update    an ascent step on q(gamma), from that gradient or from the second sum of the power-likelihood model

The server learns s, in the power-likelihood model D and the gradient in gamma, and the bound's terms in sum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from secure_fvi.algorithms.structured import mean_units
from secure_fvi.algorithms.vertical.likelihoods import Likelihood, slopes
from secure_fvi.algorithms.vertical.silo import Response
from secure_fvi.families import GlobalFamily, Params, global_family
from secure_fvi.families.gaussian import Point
from secure_fvi.optimizers import Optimizer


class ServerParams(NamedTuple):
    """q(gamma) and the optimiser's state for it. Follows from broadcasts and totals; everyone may see it."""

    eta: Params
    moments: Params


class Answer(NamedTuple):
    """The server's view of one s in the augmented-variable model."""

    pull: Tensor  # (N, C) dlog p(y | s, gamma)/ds, unweighted; broadcast: it gives labels away
    curvature: Tensor  # () bound on minus the second derivative; broadcast
    gamma: Tensor  # (n_gamma,) weighted gradient of log p in gamma
    value: Tensor  # () weighted log p(y | s, gamma), nats


class VerticalServer:
    """The halves of a round at the server, for one likelihood."""

    def __init__(self, likelihood: Likelihood, optimizer: Optimizer, dtype: torch.dtype, family: str = "auto") -> None:
        """`family` as in `families.global_family`, or "point" for a point estimate of gamma."""
        self.likelihood, self.optimizer, self.dtype = likelihood, optimizer, dtype
        n = likelihood.gamma_size
        self.family: GlobalFamily = Point(n) if family == "point" else global_family(family, n)

    def init(self) -> ServerParams:
        eta = self.family.init(torch.zeros(self.likelihood.gamma_size, dtype=self.dtype))
        return ServerParams(eta, self.optimizer.init(eta))

    def gamma(self, eta: Params, eps: Tensor) -> Tensor:
        """(n_gamma,) from public noise eps (noise_size,)."""
        return self.family.transform(eta, eps)

    def respond(self, response: Response, predictor_sum: Tensor, gamma: Tensor, weights: Tensor) -> Answer:
        """From s (N, C), the records' weights (N,) and the response, which the server holds."""
        found = slopes(self.likelihood, response.y, response.offset, predictor_sum, gamma, weights)
        return Answer(found.predictor, self.curvature(response.offset, predictor_sum, gamma), found.gamma, found.value)

    def curvature(self, offset: Tensor, predictor_sum: Tensor, gamma: Tensor) -> Tensor:
        """The bound that several local steps use; any party can compute it from s."""
        return self.likelihood.curvature(predictor_sum + offset.unsqueeze(-1), gamma)

    def update(
        self, params: ServerParams, gamma_gradient: Tensor, eps: Tensor, scale: Tensor
    ) -> tuple[ServerParams, Tensor]:
        """q(gamma) after one step, and log p(gamma) / q(gamma) before it, () nats."""
        gradient, value = self.gradient(params.eta, gamma_gradient, eps)
        return self.ascend(params, gradient, self.units(params.eta), scale), value

    def gradient(self, eta: Params, gamma_gradient: Tensor, eps: Tensor) -> tuple[Params, Tensor]:
        """Sticking-the-landing gradient of the bound in eta, and log p(gamma) / q(gamma), () nats."""

        def bound(free: Params) -> tuple[Tensor, Tensor]:
            gamma = self.family.transform(free, eps)
            value = self.likelihood.log_prior(gamma) - self.family.log_prob(eta, gamma)
            return value + gamma @ gamma_gradient, value

        return torch.func.grad(bound, has_aux=True)(eta)

    def ascend(self, params: ServerParams, gradient: Params, units: Params, scale: Tensor) -> ServerParams:
        """One step of the optimiser: element by element, so that runs can be stacked."""
        return ServerParams(*self.optimizer.step(params.eta, gradient, params.moments, scale, units))

    def units(self, eta: Params) -> Params:
        """Means take longer steps where q is wide (`structured.mean_units`)."""
        return {"loc": mean_units(self.family.stddev(eta))}
