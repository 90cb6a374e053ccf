"""Gaussian factors in natural parameters: what approximate likelihoods (sites), cavities and q are in partitioned VI.

A factor is exp(shift . z - z . precision z / 2), up to a constant. Products add parameters, quotients subtract them. A
factor need not be proper: a site's precision may have negative eigenvalues as long as q's has none. `quadratic` finds
the factor that a function is, `matching` the one that stands for it around q; `prior` does so for p(Z_G).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev

from secure_fvi.compiled import over_draws
from secure_fvi.families.gaussian import Params, eta_of, from_lower, lower
from secure_fvi.randomness import server_draws

#: Relative size up to which second derivatives at two points count as the same, and at least how many roundings.
_SAME, _ROUNDINGS = 1e-7, 64
#: Fixed draws, in antithetic pairs.
_PAIRS = 64
#: A step may take at most this share of q's precision in any direction.
MOST_LOST = 0.75
#: Halvings of a step after which q stays where it is.
HALVINGS = 30


class Natural(NamedTuple):
    """One factor, float64."""

    shift: Tensor  # (n,) precision times mean
    precision: Tensor  # (n, n) symmetric, or (n,): its diagonal, all others zero

    @property
    def n(self) -> int:
        return self.shift.shape[0]

    @property
    def full(self) -> bool:
        return self.precision.dim() == 2

    def plus(self, other: Natural, factor: float = 1.0) -> Natural:
        """The product with another factor to the power `factor`."""
        return Natural(self.shift + factor * other.shift, self.precision + factor * other.precision)

    def minus(self, other: Natural) -> Natural:
        return self.plus(other, -1.0)

    def within(self, kept: Tensor) -> Natural:
        """Without what it says of other dimensions than `kept` (n,): where a likelihood does not depend on a dimension,
        its site is exactly nothing there, and what a fit leaves is noise."""
        if self.full:
            return Natural(self.shift * kept, self.precision * kept * kept.unsqueeze(-1))
        return Natural(self.shift * kept, self.precision * kept)

    @property
    def proper(self) -> bool:
        """Whether it can be normalised, and has a mean and a `factor` as far as numbers of 64 bits hold them: of a
        precision that is all but singular the covariance may be none."""
        if not bool(torch.isfinite(self.shift).all() and torch.isfinite(self.precision).all()):
            return False
        if not self.full:
            return bool((self.precision > 0).all() and torch.isfinite(1 / self.precision).all())
        root, failed = torch.linalg.cholesky_ex(self.precision)
        if int(failed):
            return False
        covariance = torch.cholesky_inverse(root)
        return bool(torch.isfinite(covariance).all()) and int(torch.linalg.cholesky_ex(covariance).info) == 0

    def mean(self) -> Tensor:
        """(n,), of a proper factor."""
        if not self.full:
            return self.shift / self.precision
        return torch.cholesky_solve(self.shift.unsqueeze(-1), torch.linalg.cholesky(self.precision)).squeeze(-1)

    def covariance(self) -> Tensor:
        """(n, n), or (n,) variances, of a proper factor."""
        return torch.cholesky_inverse(torch.linalg.cholesky(self.precision)) if self.full else 1 / self.precision

    def stddev(self) -> Tensor:
        """(n,) marginal standard deviations of a proper factor."""
        covariance = self.covariance()
        return (covariance.diagonal() if self.full else covariance).sqrt()

    def factor(self) -> Tensor:
        """F with covariance F F', lower triangular (n, n), or (n,) standard deviations."""
        return torch.linalg.cholesky(self.covariance()) if self.full else self.precision.rsqrt()

    def log_normaliser(self) -> Tensor:
        """log of the integral of exp(shift . z - z . precision z / 2), in nats, of a proper factor."""
        root = torch.linalg.cholesky(self.precision).diagonal() if self.full else self.precision.sqrt()
        return 0.5 * (self.shift @ self.mean()) - root.log().sum() + 0.5 * self.n * math.log(2 * math.pi)

    def least_kept(self, change: Natural, step: float) -> float:
        """Smallest ratio of the new to the old precision over all directions, after a `step` of `change`."""
        if not self.full:
            return float((1 + step * change.precision / self.precision).min())
        factor = self.factor()
        return float(torch.linalg.eigvalsh(factor.mT @ change.precision @ factor).min()) * step + 1

    def pack(self) -> Tensor:
        """All numbers in one vector: (n + n (n + 1) / 2,) for a full precision, its lower half, else (2 n,)."""
        return torch.cat([self.shift, lower(self.precision) if self.full else self.precision])


def times(matrix: Tensor, x: Tensor) -> Tensor:
    """A x for x (..., n), A (n, n), or (n,): its diagonal."""
    if matrix.dim() == 1:
        return matrix * x
    return matrix @ x if x.dim() == 1 else x @ matrix.mT


def unpack(flat: Tensor, n: int, full: bool) -> Natural:
    """The inverse of `pack`."""
    return Natural(flat[:n], from_lower(flat[n:], n, True) if full else flat[n:])


def packed_size(n: int, full: bool) -> int:
    return n + (n * (n + 1) // 2 if full else n)


def nothing(n: int, full: bool) -> Natural:
    """The factor 1."""
    zeros = torch.zeros(n, dtype=torch.float64)
    return Natural(zeros, torch.zeros(n, n, dtype=torch.float64) if full else zeros)


def from_moments(mean: Tensor, covariance: Tensor) -> Natural:
    """From (n,) and (n, n), or (n,) variances."""
    if covariance.dim() == 1:
        return Natural(mean / covariance, 1 / covariance)
    precision = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
    precision = 0.5 * (precision + precision.T)
    return Natural(precision @ mean, precision)


def to_eta(q: Natural) -> Params:
    """Parameters of `families.Full` or `families.Diagonal` for the same distribution."""
    if not q.full:
        return {"loc": q.mean(), "log_scale": -0.5 * q.precision.log()}
    return eta_of(q.mean(), q.factor())


def kl(q: Natural, p: Natural) -> Tensor:
    """KL(q || p) in nats, both proper."""
    mean, covariance = q.mean(), q.covariance()
    change = q.minus(p)
    spread = (change.precision * covariance).sum() + times(change.precision, mean) @ mean
    return change.shift @ mean - 0.5 * spread - q.log_normaliser() + p.log_normaliser()


def accept(
    q: Natural, change: Natural, damping: float, safe: float, halvings: int = HALVINGS
) -> tuple[Natural, float, int]:
    """q after the largest step of `damping`, `damping` / 2, ... that is proper and leaves q a part of its precision
    (`MOST_LOST`), its size (0 for none), and the halvings it took.

    A step up to `safe` need only be proper: one over the silos asked is an average of their local posteriors.
    """
    for halving in range(halvings):
        step = damping * 0.5**halving
        after = q.plus(change, step)
        if after.proper and (step <= safe or q.least_kept(change, step) > 1 - MOST_LOST):
            return after, step, halving
    return q, 0.0, halvings


def distance(q: Natural, other: Natural) -> float:
    """How far apart two are, in standard deviations of the first: the largest difference of marginal means, or of the
    logarithms of marginal standard deviations. Infinite where one is improper."""
    if not (q.proper and other.proper):
        return math.inf
    sd = q.stddev()
    means = ((other.mean() - q.mean()) / sd).abs().max()
    return float(torch.maximum(means, (other.stddev() / sd).log().abs().max()))


def quadratic(fn: Callable[[Tensor], Tensor], at: Tensor, full: bool, dtype: torch.dtype) -> Natural | None:
    """The factor that exp(fn) is, where `fn` has constant second derivatives, without cross terms if not `full`.

    Looked at in four points, the last ones far out; None where it is no such function. dtype: of what `fn` computes
    with, whatever the type of `at` and of its value.
    """
    gradient = torch.func.grad(fn)

    def along(z: Tensor, v: Tensor) -> Tensor:
        pull: Any = torch.func.vjp(gradient, z)[1]
        return pull(v)[0]

    curvature = jacrev(gradient)(at) if full else along(at, torch.ones_like(at))
    rng, same = torch.Generator().manual_seed(0), max(_SAME, _ROUNDINGS * torch.finfo(dtype).eps)
    v, step = torch.randn(4, 2, at.shape[0], generator=rng, dtype=torch.float64).to(at).unbind(1)
    radius = torch.tensor([0.0, 0.3, 1.0, 3.0]).to(at).unsqueeze(1)
    got, want = over_draws(along, at + radius * step, v), times(curvature, v)
    scale = same * want.abs().amax(1, keepdim=True).clamp(min=max(float(curvature.abs().max()), 1e-12))
    if not bool(((got - want).abs() <= scale).all()):
        return None
    precision = -curvature.double()
    precision = 0.5 * (precision + precision.T) if full else precision
    centre = at.double()
    shift = gradient(at).double() + times(precision, centre)
    return Natural(shift, precision)


def fixed_noise(seed: int, n: int) -> Tensor:
    """(S, n) standard normals in antithetic pairs, the same at all parties."""
    half = server_draws(seed).normals(0, _PAIRS * n)[0].reshape(_PAIRS, n)
    return torch.cat([half, -half])


def draws(q: Natural, eps: Tensor) -> Tensor:
    """(S, n) of q, from `eps` (S, n)."""
    return q.mean() + times(q.factor(), eps)


def matching(q: Natural, gradient: Tensor, curvature: Tensor) -> Natural:
    """The gradient of E_q[f] in q's mean parameters (Ashman et al. 2022, equation 3), from E_q of f's gradient (n,) and
    Hessian (n, n): precision -E[Hessian], shift E[gradient] + precision x mean; no cross terms in a diagonal family."""
    precision = -0.5 * (curvature + curvature.T) if q.full else -curvature.diagonal()
    return Natural(gradient + times(precision, q.mean()), precision)
