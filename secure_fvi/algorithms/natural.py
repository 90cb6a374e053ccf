"""Gaussian factors in natural parameters: what approximate likelihoods (sites), cavities and q are in partitioned VI.

A factor is exp(shift . z - z . precision z / 2), up to a constant. Products add parameters, quotients subtract them. A
factor need not be proper: a site's precision may have negative eigenvalues as long as q's has none. `quadratic` finds
the factor that a function is, `matching` the one that stands for it around q, and `Prior` does so for p(Z_G).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from secure_fvi.algorithms.base import Problem
from secure_fvi.compiled import over_draws
from secure_fvi.errors import InputError
from secure_fvi.families.gaussian import Params
from secure_fvi.randomness import server_draws

#: Relative size up to which second derivatives at two points count as the same, and at least how many roundings.
_SAME, _ROUNDINGS = 1e-7, 64
#: Fixed draws, in antithetic pairs.
_PAIRS = 64
#: Damped steps to a prior's first factor, and their damping, which later ones have too.
_START_STEPS, _DAMPING = 40, 0.5
#: Smallest precision of the first q, as a share of the largest, where the prior is not log-concave.
_FLOOR = 1e-6
#: A step may take at most this share of q's precision in any direction.
MOST_LOST = 0.75
#: Dimensions up to which the curvature of such a prior, n x n for every draw, fits into memory.
_CURVED_UP_TO = 2000


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
        """Whether it can be normalised."""
        if not bool(torch.isfinite(self.shift).all() and torch.isfinite(self.precision).all()):
            return False
        if not self.full:
            return bool((self.precision > 0).all())
        return int(torch.linalg.cholesky_ex(self.precision).info) == 0

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
        if not self.full:
            return torch.cat([self.shift, self.precision])
        rows, cols = torch.tril_indices(self.n, self.n)
        return torch.cat([self.shift, self.precision[rows, cols]])


def unpack(flat: Tensor, n: int, full: bool) -> Natural:
    """The inverse of `pack`."""
    shift, rest = flat[:n], flat[n:]
    if not full:
        return Natural(shift, rest)
    rows, cols = torch.tril_indices(n, n)
    precision = rest.new_zeros(n, n)
    precision[rows, cols] = rest
    precision[cols, rows] = rest
    return Natural(shift, precision)


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
    factor = q.factor()
    scale = factor.diagonal()
    rows, cols = torch.tril_indices(q.n, q.n, -1)
    lower = (factor / scale.unsqueeze(-1))[rows, cols]
    return {"loc": q.mean(), "log_scale": scale.log(), "lower": lower}


def kl(q: Natural, p: Natural) -> Tensor:
    """KL(q || p) in nats, both proper."""
    mean, covariance = q.mean(), q.covariance()
    change = q.minus(p)
    spread = (change.precision * covariance).sum()
    inner = change.precision @ mean @ mean if q.full else (change.precision * mean.square()).sum()
    return change.shift @ mean - 0.5 * (spread + inner) - q.log_normaliser() + p.log_normaliser()


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
    for radius in (0.0, 0.3, 1.0, 3.0):
        v, step = torch.randn(2, at.shape[0], generator=rng, dtype=torch.float64).to(at)
        got, want = along(at + radius * step, v), curvature @ v if full else curvature * v
        scale = same * max(float(want.abs().max()), float(curvature.abs().max()), 1e-12)
        if not bool(((got - want).abs() <= scale).all()):
            return None
    precision = -curvature.double()
    precision = 0.5 * (precision + precision.T) if full else precision
    centre = at.double()
    shift = gradient(at).double() + (precision @ centre if full else precision * centre)
    return Natural(shift, precision)


def fixed_noise(seed: int, n: int) -> Tensor:
    """(S, n) standard normals in antithetic pairs, the same at all parties."""
    half = server_draws(seed).normals(0, _PAIRS * n)[0].reshape(_PAIRS, n)
    return torch.cat([half, -half])


def draws(q: Natural, eps: Tensor) -> Tensor:
    """(S, n) of q, from `eps` (S, n)."""
    factor = q.factor()
    return q.mean() + (eps @ factor.mT if q.full else eps * factor)


def matching(q: Natural, gradient: Tensor, curvature: Tensor) -> Natural:
    """The gradient of E_q[f] in q's mean parameters (Ashman et al. 2022, equation 3), from E_q of f's gradient (n,) and
    Hessian (n, n): precision -E[Hessian], shift E[gradient] + precision x mean; no cross terms in a diagonal family."""
    precision = -0.5 * (curvature + curvature.T) if q.full else -curvature.diagonal()
    mean = q.mean()
    return Natural(gradient + (precision @ mean if q.full else precision * mean), precision)


class NoStart(InputError):
    """A prior that q cannot start from: SFVI takes it."""


class Prior:
    """log p_theta(Z_G) as a factor of q, at the server: exact where it is Gaussian, else a site of its own.

    In unconstrained space normal and log-normal sites are Gaussian, and then nothing is approximated. Any other prior
    is treated as one more likelihood whose site the server refits after every round by damped fixed-point steps
    (equation 4), with expectations over fixed draws.
    """

    def __init__(self, problem: Problem, full: bool) -> None:
        """full: whether q has a full precision."""
        self.problem, self.n, self.full = problem, problem.layout.size("global"), full
        self._eps = fixed_noise(problem.seed, self.n)
        self._known: tuple[Natural, float] | None = None  # of a Gaussian prior without theta, and log p's constant
        if not problem.start.theta:
            fixed = self._find({})
            if fixed is not None:
                at = self._centre
                inner = fixed.precision @ at @ at if full else (fixed.precision * at.square()).sum()
                self._known = fixed, float(self.log_prob(at, {}) - fixed.shift @ at + 0.5 * inner)

    def log_prob(self, z: Tensor, theta: Params) -> Tensor:
        z = z.to(self.problem.device, self.problem.dtype)
        return self.problem.density.log_prior(z, theta).to("cpu", torch.float64)

    def exact(self, theta: Params) -> Natural | None:
        """Its parameters where it is Gaussian within the family, else None."""
        if self._known is not None:
            return self._known[0]
        return self._find(theta) if theta else None

    @property
    def _centre(self) -> Tensor:
        return self.problem.start.z_global.to("cpu", torch.float64)

    def _find(self, theta: Params) -> Natural | None:
        return quadratic(lambda z: self.log_prob(z, theta), self._centre, self.full, self.problem.dtype)

    def start(self, theta: Params, algorithm: str) -> Natural:
        """The site before the first round, when q is the prior's approximation alone. Raises InputError as `target`,
        and where there is none for `algorithm` to begin with."""
        exact = self.exact(theta)
        q = exact if exact is not None else self._approached(theta)
        if not q.proper:
            raise NoStart(
                f"the prior of the global sites has no Gaussian approximation, as a flat one: {algorithm} cannot start "
                "from it; SFVI can"
            )
        return q

    def _approached(self, theta: Params) -> Natural:
        one = torch.ones(self.n, dtype=torch.float64)
        q = Natural(self._centre, torch.diag(one) if self.full else one)
        for _ in range(_START_STEPS):
            q = q.plus(_floored(self.target(q, theta)).minus(q), _DAMPING)
        return q

    def refit(self, q: Natural, site: Natural, theta: Params) -> tuple[Natural, Natural]:
        """q and the prior's site after a damped step that leaves q a part of its precision (`MOST_LOST`), or an exact
        one; as they were where q would be improper.

        Where records say little of a direction, half of a Cauchy prior's step can take all but a twelfth of what is
        known there, and q goes where neither prior nor records are.
        """
        if self._known is not None:
            return q, site
        exact = self.exact(theta)
        damping = _DAMPING if exact is None else 1.0
        target = exact if exact is not None else self.target(q, theta)
        change = target.minus(site)
        for _ in range(8):
            after = q.plus(change, damping)
            if after.proper and (exact is not None or q.least_kept(change, damping) > 1 - MOST_LOST):
                return after, site.plus(change, damping)
            damping /= 2
        return q, site

    def target(self, q: Natural, theta: Params) -> Natural:
        """The fixed-point update at q. Raises InputError where a prior that is not Gaussian has many dimensions."""
        if self.n > _CURVED_UP_TO:
            raise NoStart(
                f"the prior of the {self.n} global dimensions is not Gaussian in unconstrained space; PVI takes such a "
                f"prior up to {_CURVED_UP_TO} dimensions. Take normal or log-normal priors (log-normal in place of "
                "half normal, say), or SFVI"
            )
        z = draws(q, self._eps)
        slope = grad(lambda z: self.log_prob(z, theta))
        # Both from one run of the program a draw, which is what they cost.
        curvature, gradient = over_draws(jacrev(lambda z: (slope(z),) * 2, has_aux=True), z)
        return matching(q, gradient.mean(0), curvature.mean(0))

    def theta_gradient(self, q: Natural, theta: Params) -> Params:
        """E_q of the gradient of log p_theta(Z_G) in theta."""
        if not theta:
            return {}
        of_theta = vmap(grad(lambda theta, z: self.log_prob(z, theta)), in_dims=(None, 0))
        return {name: value.mean(0) for name, value in of_theta(theta, draws(q, self._eps)).items()}

    def minus_kl(self, q: Natural, theta: Params) -> float:
        """E_q[log p] + entropy of q, nats."""
        if self._known is not None:
            prior, constant = self._known
            return float(constant + prior.log_normaliser() - kl(q, prior))
        expected = over_draws(lambda z: self.log_prob(z, theta), draws(q, self._eps)).mean()
        mean = q.mean()
        inner = q.precision @ mean @ mean if q.full else (q.precision * mean.square()).sum()
        entropy = q.log_normaliser() - q.shift @ mean + 0.5 * (inner + q.n)
        return float(expected + entropy)


def _floored(target: Natural) -> Natural:
    """With all precisions positive; the mean that it implies is kept."""
    if not target.full:
        floor = _FLOOR * target.precision.abs().max()
        precision = target.precision.clamp(min=float(floor))
        return Natural(target.shift, precision)
    values, vectors = torch.linalg.eigh(target.precision)
    values = values.clamp(min=float(_FLOOR * values.abs().max()))
    return Natural(target.shift, (vectors * values) @ vectors.T)
