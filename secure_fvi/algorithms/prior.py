"""p(Z_G) as a Gaussian factor of q, at the server: exact, or a site that stands for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from secure_fvi.algorithms.base import Problem
from secure_fvi.algorithms.natural import (
    Natural,
    accept,
    draws,
    fixed_noise,
    from_moments,
    kl,
    matching,
    quadratic,
    times,
)
from secure_fvi.compiled import over_draws
from secure_fvi.errors import InputError
from secure_fvi.families.gaussian import Params

#: Damped steps to a prior's first factor, and their damping, which later ones have too.
_START_STEPS, _DAMPING = 40, 0.5
#: Sizes of such a step that are tried, each half of the one before.
_TRIED = 8
#: Smallest precision of the first q, as a share of the largest, where the prior is not log-concave.
_FLOOR = 1e-6
#: Sd over q, nats, by which a prior may differ from the site that stands for it: a mean moves by no more of its sds.
_STANDS = 0.1
#: Dimensions up to which the curvature of such a prior, n x n for every draw, fits into memory.
_CURVED_UP_TO = 2000


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
                inner = times(fixed.precision, at) @ at
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
        change = (self.target(q, theta) if exact is None else exact).minus(site)
        damping, safe = (_DAMPING, 0.0) if exact is None else (1.0, 1.0)
        after, step, _ = accept(q, change, damping, safe, _TRIED)
        return (after, site.plus(change, step)) if step else (q, site)

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

    def site(self, mean: Tensor, covariance: Tensor) -> Natural:
        """What stands for a prior without theta where these are the posterior's, (n,) and (n, n) (`target`)."""
        return _floored(self.target(from_moments(mean, covariance), {}))

    def stands(self, site: Natural, mean: Tensor, covariance: Tensor) -> bool:
        """Whether it differs from the prior there by so little that no mean is moved by more than `_STANDS` sds."""
        z = draws(from_moments(mean, covariance), self._eps)
        inner = (times(site.precision, z) * z).sum(1)
        off = over_draws(lambda z: self.log_prob(z, {}), z) - (z @ site.shift - 0.5 * inner)
        return bool(off.std() <= _STANDS)

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
        entropy = q.log_normaliser() - q.shift @ mean + 0.5 * (times(q.precision, mean) @ mean + q.n)
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
