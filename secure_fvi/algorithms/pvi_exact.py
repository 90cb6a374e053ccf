"""Local fits of PVI without noise of their own, for models without local latents: closed form, and fixed-point or
gradient steps in natural parameters, with expectations over draws that are the same at every silo and in every step
(paper, sections 3.1 to 3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vmap

from secure_fvi.algorithms.base import Problem, SiloView
from secure_fvi.algorithms.local_fit_options import CLOSED_FORM, FIXED_POINT, LocalFitOptions
from secure_fvi.algorithms.natural import Natural, distance, from_moments, quadratic
from secure_fvi.algorithms.pvi_frame import PVIFrame
from secure_fvi.compiled import Traced
from secure_fvi.errors import InputError
from secure_fvi.families import Params
from secure_fvi.randomness import server_draws

_PAIRS = 64  # antithetic pairs of draws
_CHUNK = 32  # draws whose second derivatives are held at once
#: Standard deviations of a step from which on iterations change nothing.
_STILL = 1e-12
_NOT_QUADRATIC = "local_optimizer = 'closed_form' is for Gaussian likelihoods with known variance"


class ExactFit:
    """q for a silo, from its cavity and likelihood; the same call gives the same answer."""

    def __init__(self, config: LocalFitOptions, problem: Problem, frame: PVIFrame) -> None:
        self.config, self.problem, self.frame = config, problem, frame
        half = server_draws(problem.seed).normals(0, _PAIRS * frame.n)[0].reshape(_PAIRS, frame.n)
        self._eps = torch.cat([half, -half])
        self._moments = Traced(self._moments_function, (None, None, 0, 0), problem.mode)
        if config.local_optimizer == CLOSED_FORM:
            self._check_made()

    def __call__(self, q: Natural, cavity: Natural, theta: Params, view: SiloView) -> tuple[Natural, float, Params]:
        """The fitted q, E_q[log p(y)] in nats, and its gradient in theta."""
        if self.config.local_optimizer == CLOSED_FORM:
            end, value = self._closed_form(q, cavity, view)
            return end, value, {}
        end = q
        for _ in range(self.config.local_steps):
            before, end = end, self._stepped(end, cavity, theta, view)
            if not end.proper or distance(before, end) < _STILL:
                break
        if not end.proper:
            return end, math.nan, theta
        z, likelihood = self._draws(end), self.likelihood(view)
        value = float(vmap(lambda z: likelihood(z, theta))(z).mean())
        gradients = vmap(lambda z: grad(lambda theta: likelihood(z, theta))(theta))(z) if theta else {}
        return end, value, {name: v.mean(0) for name, v in gradients.items()}

    def target(self, q: Natural, theta: Params, view: SiloView) -> Natural:
        """Gradient of E_q[log p(y)] in q's mean parameters (paper, equation 3): precision -E[Hessian], shift
        E[gradient] + precision x mean, without cross terms in a diagonal family."""
        parts = [self._moments(z, theta, view.rows, view.weights) for z in self._draws(q).split(_CHUNK)]
        slope, curvature = (torch.stack(p).mean(0).to("cpu", torch.float64) for p in zip(*parts, strict=True))
        precision = -0.5 * (curvature + curvature.T) if q.full else -curvature.diagonal()
        mean = q.mean()
        return Natural(slope + (precision @ mean if q.full else precision * mean), precision)

    def _moments_function(self, z: Tensor, theta: Params, rows: Params, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Mean gradient (n,) and Hessian (n, n) of log p(y) over draws z (S, n)."""

        def log_likelihood(z: Tensor) -> Tensor:
            return self._log_likelihood(z, theta, rows, weights)

        return vmap(grad(log_likelihood))(z).mean(0), vmap(jacrev(grad(log_likelihood)))(z).mean(0)

    def _stepped(self, q: Natural, cavity: Natural, theta: Params, view: SiloView) -> Natural:
        """One damped fixed-point step of the site (equation 4), or one of gradient ascent on the local free energy in
        q's natural parameters, which is the same residual times the Fisher information."""
        residual = self.target(q, theta, view).minus(q.minus(cavity))
        if self.config.local_optimizer != FIXED_POINT:
            residual = fisher_times(q, residual)
        return q.plus(residual, self.config.first_rate)

    def _draws(self, q: Natural) -> Tensor:
        """(S, n) of q."""
        factor = q.factor()
        return self.frame.move(q.mean() + (self._eps @ factor.mT if q.full else self._eps * factor))

    def likelihood(self, view: SiloView) -> Callable[[Tensor, Params], Tensor]:
        """log p(y) of a silo, of Z_G (n,) and theta."""
        return lambda z, theta: self._log_likelihood(z, theta, view.rows, view.weights)

    def _log_likelihood(self, z: Tensor, theta: Params, rows: Params, weights: Tensor) -> Tensor:
        records = self.problem.density.evaluate(z, z.new_zeros(0), z.new_zeros(len(weights), 0), theta, rows).records
        return (weights * records).sum()

    def _check_made(self) -> None:
        """Raises InputError where the likelihood is not quadratic on made data: at all parties alike, and before a job
        under privacy could do no more than send noise."""
        problem, move = self.problem, self.frame.move
        made = problem.schema.dummy_rows(2).items()
        rows = {name: move(v) if v.is_floating_point() else v.to(problem.device) for name, v in made}
        at, weights = move(problem.start.z_global), move(torch.ones(2))
        if quadratic(lambda z: self._log_likelihood(z, {}, rows, weights), at, True, problem.dtype) is None:
            raise InputError(f"the log likelihood is not quadratic in the global latents; {_NOT_QUADRATIC}")

    def _closed_form(self, q: Natural, cavity: Natural, view: SiloView) -> tuple[Natural, float]:
        """The silo's likelihood is a Gaussian factor: q is cavity x likelihood, or its diagonal approximation, by
        divergence KL(q || .) or, for alpha > 0, by power EP's moments (paper, Algorithm 2 with damping 1)."""
        log_likelihood = self.likelihood(view)
        at = self.frame.move(self.problem.start.z_global)
        likelihood = quadratic(lambda z: log_likelihood(z, {}), at, True, self.problem.dtype)
        if likelihood is None:
            raise InputError(
                f"silo '{view.silo}': its log likelihood is not quadratic in the global latents; {_NOT_QUADRATIC}"
            )
        if self.frame.full:
            end = cavity.plus(likelihood)
        elif self.config.alpha:
            site = q.minus(cavity)
            replaced = likelihood.minus(Natural(site.shift, torch.diag(site.precision)))
            tilted = Natural(q.shift, torch.diag(q.precision)).plus(replaced, self.config.alpha)
            matched = from_moments(tilted.mean(), tilted.covariance().diagonal())
            end = q.plus(matched.minus(q), 1 / self.config.alpha)
        else:
            tilted = Natural(cavity.shift, torch.diag(cavity.precision)).plus(likelihood)
            diagonal = tilted.precision.diagonal()
            end = Natural(diagonal * tilted.mean(), diagonal)
        if not end.proper:
            return end, math.nan
        mean, covariance = end.mean(), end.covariance()
        spread = covariance if self.frame.full else torch.diag(covariance)
        value = float(log_likelihood(self.frame.move(mean), {})) - 0.5 * float((likelihood.precision * spread).sum())
        return end, value


def fisher_times(q: Natural, change: Natural) -> Natural:
    """The Fisher information of q in natural parameters times a change of them: the derivative of its mean parameters
    (E[z], -E[z z'] / 2) along the change. It turns a natural gradient into a gradient."""

    def mean_parameters(shift: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
        if not q.full:
            mean = shift / precision
            return mean, -0.5 * (1 / precision + mean.square())
        covariance = torch.linalg.inv(precision)
        mean = covariance @ shift
        return mean, -0.5 * (covariance + torch.outer(mean, mean))

    shift, precision = jvp(mean_parameters, (q.shift, q.precision), (change.shift, change.precision))[1]
    return Natural(shift, precision)
