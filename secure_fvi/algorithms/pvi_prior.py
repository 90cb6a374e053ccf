"""The prior p(Z_G) as a Gaussian factor of q, at the server: exact where it is one, else a site of its own.

In unconstrained space normal and log-normal sites are Gaussian, and then nothing is approximated. Any other prior is
treated as one more likelihood whose site the server refits after every round by damped fixed-point steps
(paper, equation 4), with expectations over fixed draws: precision = -E_q[Hessian of log p], shift = E_q[gradient] +
precision x mean.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, hessian, vmap

from secure_fvi.algorithms.natural import Natural, kl, quadratic
from secure_fvi.algorithms.pvi_frame import PVIFrame
from secure_fvi.compiled import over_draws
from secure_fvi.errors import InputError
from secure_fvi.families import Params
from secure_fvi.randomness import server_draws

_DRAWS = 64  # antithetic pairs
_START_STEPS = 40
_DAMPING = 0.5
#: Smallest precision of the first q, as a share of the largest, where the prior is not log-concave.
_FLOOR = 1e-6
#: Dimensions up to which the curvature of such a prior, n x n for every draw, fits into memory.
_CURVED_UP_TO = 2000


class Prior:
    """log p_theta(Z_G) in natural parameters."""

    def __init__(self, frame: PVIFrame) -> None:
        self.frame = frame
        half = server_draws(frame.problem.seed).normals(0, _DRAWS * frame.n)[0].reshape(_DRAWS, frame.n)
        self._eps = torch.cat([half, -half])
        self._known: tuple[Natural, float] | None = None  # of a Gaussian prior without theta, and log p's constant
        if not frame.theta_start:
            fixed = self._find({})
            if fixed is not None:
                at = self._centre
                inner = fixed.precision @ at @ at if fixed.full else (fixed.precision * at.square()).sum()
                self._known = fixed, float(self.log_prob(at, {}) - fixed.shift @ at + 0.5 * inner)

    def log_prob(self, z: Tensor, theta: Params) -> Tensor:
        return self.frame.problem.density.log_prior(self.frame.move(z), theta).to("cpu", torch.float64)

    def draws(self, q: Natural) -> Tensor:
        """(S, n) fixed draws of q."""
        factor = q.factor()
        return q.mean() + (self._eps @ factor.mT if q.full else self._eps * factor)

    def exact(self, theta: Params) -> Natural | None:
        """Its parameters where it is Gaussian within the family, else None."""
        if self._known is not None:
            return self._known[0]
        return self._find(theta) if theta else None

    @property
    def _centre(self) -> Tensor:
        return self.frame.problem.start.z_global.to("cpu", torch.float64)

    def _find(self, theta: Params) -> Natural | None:
        return quadratic(lambda z: self.log_prob(z, theta), self._centre, self.frame.full, self.frame.problem.dtype)

    def start(self, theta: Params) -> Natural:
        """The site before the first round, when q is the prior's approximation alone. Raises InputError as `target`."""
        exact = self.exact(theta)
        if exact is not None:
            return exact
        one = torch.ones(self.frame.n, dtype=torch.float64)
        q = Natural(self._centre, torch.diag(one) if self.frame.full else one)
        for _ in range(_START_STEPS):
            target = _floored(self.target(q, theta))
            q = q.plus(target.minus(q), _DAMPING)
        return q

    def refit(self, q: Natural, site: Natural, theta: Params) -> tuple[Natural, Natural]:
        """q and the prior's site after a damped step, or an exact one; as they were where q would be improper."""
        if self._known is not None:
            return q, site
        exact = self.exact(theta)
        damping = _DAMPING if exact is None else 1.0
        target = exact if exact is not None else self.target(q, theta)
        change = target.minus(site)
        for _ in range(8):
            after = q.plus(change, damping)
            if after.proper:
                return after, site.plus(change, damping)
            damping /= 2
        return q, site

    def target(self, q: Natural, theta: Params) -> Natural:
        """The fixed-point update at q. Raises InputError where a prior that is not Gaussian has many dimensions."""
        if self.frame.n > _CURVED_UP_TO:
            raise InputError(
                f"the prior of the {self.frame.n} global dimensions is not Gaussian in unconstrained space; PVI takes "
                f"such a prior up to {_CURVED_UP_TO} dimensions. Take normal or log-normal priors (log-normal in place "
                "of half normal, say), or SFVI"
            )
        z = self.draws(q)
        log_prob: Callable[[Tensor], Tensor] = lambda z: self.log_prob(z, theta)  # noqa: E731
        gradient: Tensor = over_draws(grad(log_prob), z).mean(0)
        curvature: Tensor = over_draws(hessian(log_prob), z).mean(0)
        precision = -0.5 * (curvature + curvature.T) if q.full else -curvature.diagonal()
        mean = q.mean()
        return Natural(gradient + (precision @ mean if q.full else precision * mean), precision)

    def theta_gradient(self, q: Natural, theta: Params) -> Params:
        """E_q of the gradient of log p_theta(Z_G) in theta."""
        if not theta:
            return {}
        gradients = vmap(grad(lambda theta, z: self.log_prob(z, theta)), in_dims=(None, 0))(theta, self.draws(q))
        return {name: value.mean(0) for name, value in gradients.items()}

    def minus_kl(self, q: Natural, theta: Params) -> float:
        """E_q[log p] + entropy of q, nats."""
        if self._known is not None:
            prior, constant = self._known
            return float(constant + prior.log_normaliser() - kl(q, prior))
        expected = over_draws(lambda z: self.log_prob(z, theta), self.draws(q)).mean()
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
