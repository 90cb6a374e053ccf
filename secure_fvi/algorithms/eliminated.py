"""A silo's own latents integrated out around their mode, at each Z_G anew: Laplace's approximation.

    log p(y_j | Z_G) = f(m) - log det H(m) / 2 + n log(2 pi) / 2,   f = log p(y_j, Z_S | Z_G),  m its mode,  H = -f''(m)

It is exact where f is quadratic in Z_S, as in effects of groups under a normal likelihood, and asks for no step size:
q(Z_S | Z_G) = N(m, H^-1) follows Z_G by its own curve. A linear map of Z_G - mu has to be learned by steps that are the
shorter the more Z_S and Z_G go together, and follows no effect u / sd in units of an sd that is uncertain.

For models that say that f is concave in Z_S (`FederatedModel.concave`): one mode, which Newton's steps find.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vjp, vmap

from secure_fvi.algorithms.base import Problem
from secure_fvi.compiled import over_draws
from secure_fvi.density import LogDensity
from secure_fvi.families import Params
from secure_fvi.objective import SiloFunction, SiloGradient

#: Silo latents up to which they are eliminated: a Hessian is as many backward passes, at each draw.
UP_TO = 64
#: Newton's steps from where the last draws' modes say that this one's is, and from elsewhere; the shares of one that
#: are tried before none is taken.
STEPS, FROM_AFAR, SHARES = 1, 12, (1.0, 0.4, 0.1)


def eliminates(problem: Problem) -> bool:
    """Whether silos' own latents are integrated out around their mode."""
    layout = problem.layout
    return problem.model.concave and 0 < layout.size("silo") <= UP_TO and not layout.size("record")


class Curved(NamedTuple):
    """A function of Z_S (n,) and Z_G (n_global,) at a point."""

    slope: Tensor  # (n,)
    lower: Tensor  # (n, n) with lower lower' = minus the curvature in Z_S
    cross: Tensor  # (n, n_global) derivative of the slope in Z_G


Joint = Callable[[Tensor, Tensor], Tensor]


def curved(joint: Joint, z_silo: Tensor, z_global: Tensor) -> Curved:
    """By one backward pass a latent, which `vjp` maps over."""
    slope, pull = vjp(torch.func.grad(joint), z_silo, z_global)[:2]
    eye = torch.eye(len(z_silo), dtype=z_silo.dtype, device=z_silo.device)
    hessian, cross = vmap(pull)(eye)
    lower = torch.linalg.cholesky_ex(-0.5 * (hessian + hessian.mT))[0]
    return Curved(slope, lower, cross)


def to_mode(joint: Joint, start: Tensor, z_global: Tensor, steps: int) -> tuple[Tensor, Curved]:
    """The mode in Z_S (n,) near enough that one more of Newton's steps is exact to rounding, by the best of `SHARES`
    of each; and `curved` there. From `start`, or from 0 where that is likelier: what `start` is derived from may hold
    at another Z_G alone."""
    at, height = start, joint(start, z_global).nan_to_num(nan=-math.inf)
    at, height = _likelier(joint, z_global, at, height, torch.zeros_like(start)[None])
    found = curved(joint, at, z_global)
    for _ in range(steps):
        step = _solved(found.lower, found.slope)
        tried = torch.stack([at + share * step for share in SHARES])
        at, height = _likelier(joint, z_global, at, height, tried)
        found = curved(joint, at, z_global)
    return at, found


def _likelier(joint: Joint, z_global: Tensor, at: Tensor, height: Tensor, tried: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest of `at` and `tried` (k, n), and how likely it is."""
    heights = over_draws(lambda z: joint(z, z_global), tried).nan_to_num(nan=-math.inf)
    return likeliest(at, height, tried.unbind(), heights.unbind())


def likeliest(at: Tensor, height: Tensor, tried: Iterable[Tensor], heights: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Of places (..., n) and others, those with the largest heights (...), the first of equal ones, and these."""
    # Comparisons cost a tenth of argmax along so short an axis.
    for other, its in zip(tried, heights, strict=True):
        higher = its > height
        at, height = torch.where(higher[..., None], other, at), torch.where(higher, its, height)
    return at, height


def silo_params(at: Tensor, found: Curved, like: Params) -> Params:
    """q(Z_S | Z_G) near there, in the parameters of its family: `like` is others of these."""
    eye = torch.eye(len(at), dtype=at.dtype, device=at.device)
    factor = torch.linalg.cholesky_ex(torch.cholesky_solve(eye, found.lower))[0]
    scale = factor.diagonal()
    new = {name: torch.zeros_like(value) for name, value in like.items()}
    new["loc"], new["log_scale"] = at[None], scale.log()[None]
    if "coupling" in like:
        new["coupling"] = torch.cholesky_solve(found.cross, found.lower)[None]
    if "lower" in like:
        rows, cols = torch.tril_indices(len(at), len(at), -1, device=at.device)
        new["lower"] = (factor / scale[:, None])[rows, cols][None]
    return new


def _solved(lower: Tensor, right: Tensor) -> Tensor:
    return torch.cholesky_solve(right.unsqueeze(-1), lower).squeeze(-1)


def joint_of(density: LogDensity, theta: Params, rows: Params, weights: Tensor) -> Joint:
    """log p(y_j, Z_S | Z_G) of a silo without latents of records."""

    def joint(z_silo: Tensor, z_global: Tensor) -> Tensor:
        terms = density.evaluate(z_global, z_silo, z_global.new_zeros(len(weights), 0), theta, rows)
        return (torch.where(weights > 0, terms.records, 0.0) * weights).sum() + terms.silo

    return joint


def marginal_gradient(density: LogDensity) -> SiloFunction:
    """As `objective.silo_gradient`, of log p(y_j | Z_G) itself. `silo` of what it gives is no gradient but q(Z_S | Z_G)
    as it is around this Z_G, relative to the mean of Z_G that what it was given is relative to.

    The slope of log det H is the mean of that of w' H w over w = H^(-1/2) signs (Hutchinson 1990), at the signs of
    eps_S: without noise where groups are apart from each other, as nested ones are, and at the cost of one latent.
    """

    def run(
        z_global: Tensor, shift: Tensor, theta: Params, local_params: Params, silo: Params, rows: Params,
        weights: Tensor, eps_local: Tensor, eps_silo: Tensor,
    ) -> SiloGradient:  # fmt: skip
        start = silo["loc"][0] + (silo["coupling"][0] @ shift if "coupling" in silo else 0.0)
        at, found = to_mode(joint_of(density, theta, rows, weights), start, z_global, STEPS)
        signs = torch.where(eps_silo[0] < 0, -1.0, 1.0).to(at).unsqueeze(-1)
        w = torch.linalg.solve_triangular(found.lower.mT, signs, upper=True).squeeze(-1)

        def slope_of(z_global: Tensor, theta: Params) -> tuple[Tensor, Tensor]:
            joint = joint_of(density, theta, rows, weights)
            slope = torch.func.grad(joint)(at, z_global)
            mode = at + _solved(found.lower, slope)  # whose derivatives in Z_G and theta are the mode's
            height = joint(mode, z_global)
            pull = vjp(lambda z: torch.func.grad(joint)(z, z_global), mode)[1]
            return height + 0.5 * (pull(w)[0] * w).sum(), height

        of_global, of_theta, height = _slopes(slope_of, z_global, theta)
        value = height - found.lower.diagonal().log().sum() + 0.5 * len(at) * math.log(2 * math.pi)
        new = silo_params(at, found, silo)
        if "coupling" in new:
            new["loc"] = new["loc"] - new["coupling"][0] @ shift
        return SiloGradient(value, of_global, torch.zeros_like(of_global), of_theta, {}, new)

    return run


def _slopes(
    fn: Callable[[Tensor, Params], tuple[Tensor, Tensor]], z: Tensor, theta: Params
) -> tuple[Tensor, Params, Tensor]:
    """The gradient of the first of what `fn` gives, in both, and the second."""
    (of_z, of_theta), second = torch.func.grad(fn, argnums=(0, 1), has_aux=True)(z, theta)
    return of_z, of_theta, second


def at_mean(density: LogDensity, mean: Tensor, theta: Params, silo: Params, rows: Params, weights: Tensor) -> Params:
    """q(Z_S | Z_G) around that mean of Z_G, from parameters that are relative to it."""
    at, found = to_mode(joint_of(density, theta, rows, weights), silo["loc"][0], mean, FROM_AFAR)
    return silo_params(at, found, silo)
