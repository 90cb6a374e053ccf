"""Likelihoods of a summed predictor, log p(y | s + offset + intercept, gamma) with s = sum_j z_j.

A predictor has shape (N, C), C = 1 unless the response is categorical. gamma (n_gamma,) are the parameters that all
silos share, unconstrained in one vector: the intercept (C,) first, then what the likelihood adds. In the
augmented-variable model only the holder of the response evaluates a likelihood; in the power-likelihood model every
silo does (Hassan et al. 2024, sections 3.2 and 3.3).

With the auxiliary variables integrated out: given theta, the sum of J of them is normal around the sum f of the
predictors with variance J rho^2, so that p(y | f) = E p(y | f + sqrt(J) rho e). Silos then send eta_j in place of z_j:
q(z | theta) is exact, whereas a q that factorises over silos cannot say that the data fix the sum and little else
(docs/vertical-poisson.md). Not in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, distributions
from torch.distributions import Distribution
from torch.nn.functional import logsigmoid

from secure_fvi.algorithms.vertical.predictors import each_alone
from secure_fvi.errors import InputError
from secure_fvi.families.gaussian import LOG_2PI
from secure_fvi.options import Positive, check
from secure_fvi.trees import Params


class Likelihood(Protocol):
    """Pure functions that can be traced."""

    @property
    def columns(self) -> int:
        """C, the columns of a predictor."""
        ...

    @property
    def gamma_size(self) -> int: ...

    @property
    def slope_bound(self) -> float | None:
        """Largest absolute value of d log p / d predictor for one record; None where there is none."""
        ...

    def check(self, y: Tensor) -> None:
        """Raise InputError when `y` (N,) is no response of this kind; no value is quoted."""
        ...

    def features(self, y: Tensor) -> Tensor:
        """What a network is shown of the response, (N, k)."""
        ...

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        """log p(y_i | predictor_i, gamma) in nats, (N,); `predictor` (N, C) without the intercept."""
        ...

    def distribution(self, predictor: Tensor, gamma: Tensor) -> Distribution:
        """p(y | predictor, gamma) for predictor (..., N, C) and gamma (..., n_gamma); batch shape (..., N)."""
        ...

    def log_prior(self, gamma: Tensor) -> Tensor:
        """log p(gamma) in nats, (), the Jacobian of its transforms included."""
        ...

    def curvature(self, predictor: Tensor, gamma: Tensor) -> Tensor:
        """An upper bound on minus the second derivative of log p in a record's predictor, ()."""
        ...

    def constrain(self, gamma: Tensor) -> Params:
        """gamma (..., n_gamma) by name, in the model's own space."""
        ...


@dataclass(frozen=True)
class Bernoulli:
    """y in {0, 1}, logit link; intercept ~ N(0, intercept_scale^2)."""

    intercept_scale: Positive = 1.0
    columns = 1
    gamma_size = 1
    slope_bound: float | None = 1.0

    def __post_init__(self) -> None:
        check(self)

    def check(self, y: Tensor) -> None:
        _check_shape(y)
        if not bool(((y == 0) | (y == 1)).all()):
            raise InputError("a Bernoulli response holds only 0 and 1")

    def features(self, y: Tensor) -> Tensor:
        return (2 * y - 1).unsqueeze(-1)

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        return logsigmoid((2 * y - 1) * (predictor[:, 0] + gamma[0]))

    def distribution(self, predictor: Tensor, gamma: Tensor) -> Distribution:
        return distributions.Bernoulli(logits=predictor[..., 0] + gamma[..., :1])

    def log_prior(self, gamma: Tensor) -> Tensor:
        return _normal(gamma, self.intercept_scale)

    def curvature(self, predictor: Tensor, gamma: Tensor) -> Tensor:
        return predictor.new_tensor(0.25)

    def constrain(self, gamma: Tensor) -> Params:
        return {"intercept": gamma[..., 0]}


@dataclass(frozen=True)
class Gaussian:
    """y ~ N(predictor, sigma^2); intercept ~ N(0, intercept_scale^2), sigma half-normal with scale `sigma_scale`.

    gamma is the intercept and log sigma.
    """

    intercept_scale: Positive = 1.0
    sigma_scale: Positive = 1.0
    columns = 1
    gamma_size = 2
    slope_bound: float | None = None

    def __post_init__(self) -> None:
        check(self)

    def check(self, y: Tensor) -> None:
        _check_shape(y)

    def features(self, y: Tensor) -> Tensor:
        return y.unsqueeze(-1)

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        u = (y - predictor[:, 0] - gamma[0]) * (-gamma[1]).exp()
        return -0.5 * (u.square() + LOG_2PI) - gamma[1]

    def distribution(self, predictor: Tensor, gamma: Tensor) -> Distribution:
        return distributions.Normal(predictor[..., 0] + gamma[..., :1], gamma[..., 1:].exp())

    def log_prior(self, gamma: Tensor) -> Tensor:
        return _normal(gamma[:1], self.intercept_scale) + _log_half_normal(gamma[1], self.sigma_scale)

    def curvature(self, predictor: Tensor, gamma: Tensor) -> Tensor:
        return (-2 * gamma[1]).exp()

    def constrain(self, gamma: Tensor) -> Params:
        return {"intercept": gamma[..., 0], "sigma": gamma[..., 1].exp()}


@dataclass(frozen=True)
class Poisson:
    """y in {0, 1, ...}, log link, log exposure as the offset; intercept ~ N(0, intercept_scale^2)."""

    intercept_scale: Positive = 1.0
    columns = 1
    gamma_size = 1
    slope_bound: float | None = None

    def __post_init__(self) -> None:
        check(self)

    def check(self, y: Tensor) -> None:
        _check_shape(y)
        if not bool(((y >= 0) & (y == y.floor())).all()):
            raise InputError("a Poisson response holds whole numbers of at least 0")

    def features(self, y: Tensor) -> Tensor:
        return torch.log1p(y).unsqueeze(-1)

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        log_rate = predictor[:, 0] + gamma[0]
        return y * log_rate - log_rate.exp() - torch.lgamma(y + 1)

    def distribution(self, predictor: Tensor, gamma: Tensor) -> Distribution:
        return distributions.Poisson((predictor[..., 0] + gamma[..., :1]).exp())

    def log_prior(self, gamma: Tensor) -> Tensor:
        return _normal(gamma, self.intercept_scale)

    def curvature(self, predictor: Tensor, gamma: Tensor) -> Tensor:
        # No constant bounds it everywhere: this one holds at the current predictor and below.
        return (predictor[:, 0] + gamma[0]).exp().amax()

    def constrain(self, gamma: Tensor) -> Params:
        return {"intercept": gamma[..., 0]}


@dataclass(frozen=True)
class Categorical:
    """y in {0, ..., C - 1}, softmax of C predictors; intercepts ~ N(0, intercept_scale^2)."""

    columns: int
    intercept_scale: Positive = 1.0
    slope_bound: float | None = 1.0

    def __post_init__(self) -> None:
        if type(self.columns) is not int or self.columns < 2:
            raise InputError(f"columns, the number of classes, must be a whole number from 2 on, not {self.columns!r}")
        check(self)

    @property
    def gamma_size(self) -> int:
        return self.columns

    def check(self, y: Tensor) -> None:
        _check_shape(y)
        if not bool(((y >= 0) & (y < self.columns) & (y == y.floor())).all()):
            raise InputError(f"a categorical response holds whole numbers from 0 to {self.columns - 1}")

    def features(self, y: Tensor) -> Tensor:
        return (y.unsqueeze(-1) == torch.arange(self.columns, device=y.device)).to(y.dtype)  # one_hot cannot be mapped

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        logits = torch.log_softmax(predictor + gamma, -1)
        return logits.gather(-1, y.long().unsqueeze(-1)).squeeze(-1)

    def distribution(self, predictor: Tensor, gamma: Tensor) -> Distribution:
        return distributions.Categorical(logits=predictor + gamma.unsqueeze(-2))

    def log_prior(self, gamma: Tensor) -> Tensor:
        return _normal(gamma, self.intercept_scale)

    def curvature(self, predictor: Tensor, gamma: Tensor) -> Tensor:
        # The largest eigenvalue of diag(p) - p p' is at most 1/2.
        return predictor.new_tensor(0.5)

    def constrain(self, gamma: Tensor) -> Params:
        return {"intercept": gamma}


class Slopes(NamedTuple):
    """The likelihood and its derivatives, unweighted by record except where it says so."""

    value: Tensor  # () weighted sum of log p, nats
    predictor: Tensor  # (N, C) d log p_i / d predictor_i
    gamma: Tensor  # (n_gamma,) weighted sum of d log p_i / d gamma


def slopes(
    likelihood: Likelihood, y: Tensor, offset: Tensor, predictor: Tensor, gamma: Tensor, weights: Tensor
) -> Slopes:
    """log p and its derivatives at `predictor` (N, C); `offset` (N,) is added to every column, `weights` (N,)."""

    def log_prob(predictor: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        terms = likelihood.log_prob(y, predictor + offset.unsqueeze(-1), gamma)
        return terms.sum(), (weights * terms).sum()

    (_, value), pull_back = torch.func.vjp(log_prob, predictor, gamma)[:2]
    one, zero = torch.ones_like(value), torch.zeros_like(value)
    return Slopes(value, pull_back((one, zero))[0], pull_back((zero, one))[1])


class RecordSlopes(NamedTuple):
    """Derivatives of log p record by record, unweighted."""

    predictor: Tensor  # (N, C)
    gamma: Tensor  # (N, n_gamma)


def slopes_by_record(
    likelihood: Likelihood, y: Tensor, offset: Tensor, predictor: Tensor, gamma: Tensor
) -> RecordSlopes:
    """d log p_i / d predictor_i and d log p_i / d gamma for each record, evaluated alone; arguments as in `slopes`."""

    def one(y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        return likelihood.log_prob(y.unsqueeze(0), predictor.unsqueeze(0), gamma).sum()

    at = predictor + offset.unsqueeze(-1)
    return RecordSlopes(*each_alone(torch.func.grad(one, argnums=(1, 2)), (0, 0, None), len(y))(y, at, gamma))


def _normal(x: Tensor, scale: float) -> Tensor:
    return (-0.5 * ((x / scale).square() + LOG_2PI) - math.log(scale)).sum()


def _log_half_normal(log_x: Tensor, scale: float) -> Tensor:
    """Of log x where x is half-normal, hence the Jacobian."""
    return math.log(2) - 0.5 * ((log_x.exp() / scale).square() + LOG_2PI) - math.log(scale) + log_x


def _check_shape(y: Tensor) -> None:
    if y.dim() != 1 or not y.is_floating_point():
        raise InputError("the response is one floating-point number a record, shape (N,)")
    if not bool(torch.isfinite(y).all()):
        raise InputError("the response holds NaN or infinite values; remove those records first")


# ---- The auxiliary variables integrated out: what the holder of the response can do alone ----

_NEWTON_STEPS = 5


def marginal(likelihood: Likelihood, sd: float, nodes: int = 32) -> Likelihood | None:
    """`likelihood` over f with normal noise of standard deviation `sd` integrated out; None where there is no way.

    Its `distribution` is given f + noise, not f: draws of the noise belong to whoever predicts. Its slope has the same
    bound: a derivative of log E p is a mean of derivatives of log p.
    """
    for base, found in ((Gaussian, GaussianMarginal), (Poisson, PoissonMarginal), (Bernoulli, BernoulliMarginal)):
        if type(likelihood) is base:
            made: Likelihood = found(**vars(likelihood), sd=sd, nodes=nodes)
            return made
    return None


@dataclass(frozen=True)
class BernoulliMarginal(Bernoulli):
    """log E sigmoid(+-(f + sd e)), by Gauss-Hermite quadrature."""

    sd: Positive = 1.0
    nodes: int = 32

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        nodes, log_weights = _quadrature(self.nodes, predictor)
        at = predictor[:, :1] + gamma[0] + self.sd * nodes
        return torch.logsumexp(log_weights + logsigmoid((2 * y - 1).unsqueeze(-1) * at), -1)


@dataclass(frozen=True)
class GaussianMarginal(Gaussian):
    """Variance sigma^2 + sd^2."""

    sd: Positive = 1.0
    nodes: int = 32

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        return super().log_prob(y, predictor, self._wider(gamma))

    def curvature(self, predictor: Tensor, gamma: Tensor) -> Tensor:
        return super().curvature(predictor, self._wider(gamma))

    def _wider(self, gamma: Tensor) -> Tensor:
        return torch.stack([gamma[0], 0.5 * ((2 * gamma[1]).exp() + self.sd**2).log()])


@dataclass(frozen=True)
class PoissonMarginal(Poisson):
    """Poisson-lognormal."""

    sd: Positive = 1.0
    nodes: int = 32

    def log_prob(self, y: Tensor, predictor: Tensor, gamma: Tensor) -> Tensor:
        return log_marginal(y, predictor[:, 0] + gamma[0], self.sd, self.nodes)

    def curvature(self, predictor: Tensor, gamma: Tensor) -> Tensor:
        # Minus the second derivative is (1 - Var(t | y, f) / sd^2) / sd^2.
        return predictor.new_tensor(1 / self.sd**2)


def log_marginal(y: Tensor, f: Tensor, sd: float, nodes: int = 32) -> Tensor:
    """log E Poisson(y | exp(f + sd e)), e ~ N(0, 1), elementwise, by Gauss-Hermite quadrature around the mode.

    In t = f + sd e the integrand is log-concave; its mode has exp(t) = w / sd^2 with w + log w = f + sd^2 y + 2 log sd.
    Nodes are held fixed for derivatives: the integral does not depend on them.
    """
    at, log_weights = _quadrature(nodes, f)
    w = _omega(f.detach() + sd**2 * y + 2 * math.log(sd))
    width = sd / (1 + w).sqrt()
    t = (w.log() - 2 * math.log(sd)).unsqueeze(-1) + width.unsqueeze(-1) * at
    u = (t - f.unsqueeze(-1)) / sd
    log_joint = y.unsqueeze(-1) * t - t.exp() - 0.5 * u.square() + 0.5 * at.square() + log_weights
    return torch.logsumexp(log_joint, -1) + width.log() - math.log(sd) - torch.lgamma(y + 1)


def _quadrature(nodes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and log weights (nodes,) of expectations over a standard normal."""
    at, weights = (torch.from_numpy(a).to(like) for a in np.polynomial.hermite_e.hermegauss(nodes))
    return at, weights.log() - 0.5 * LOG_2PI


def _omega(c: Tensor) -> Tensor:
    """w > 0 with w + log w = c, by Newton's method from an approximation on either side."""
    w = torch.where(c > 1, c - c.clamp(min=1.0).log(), (c.clamp(max=1.0) - 0.4 * (c.clamp(max=1.0)).exp()).exp())
    for _ in range(_NEWTON_STEPS):
        w = (w * (1 + c - w.log()) / (1 + w)).clamp(min=1e-300)
    return w
