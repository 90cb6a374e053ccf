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
from secure_fvi.families.gaussian import eta_of, unit_lower

#: Silo latents up to which they are eliminated: a Hessian is as many backward passes, at each draw.
UP_TO = 64
#: Newton's steps from anywhere; the shares of one that are tried before none is taken.
FROM_AFAR, SHARES = 12, (1.0, 0.4, 0.1)


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


def to_mode(joint: Joint, start: Tensor, z_global: Tensor) -> tuple[Tensor, Curved]:
    """The mode in Z_S (n,), to rounding, by the best of `SHARES` of each of Newton's steps; and `curved` there. From
    `start`, or from 0 where that is likelier: what `start` is derived from may hold at another Z_G alone."""
    at = near_mode(joint, start, z_global, FROM_AFAR)[0]
    return at, curved(joint, at, z_global)


def near_mode(joint: Joint, start: Tensor, z_global: Tensor, steps: int = 1) -> tuple[Tensor, Curved]:
    """As `to_mode`, after so many steps, with `curved` where the last begins: for where to look, not what is there."""
    at, height = _begun(joint, start, z_global)
    for _ in range(steps):
        found = curved(joint, at, z_global)
        at, height = _stepped(joint, at, height, solved(found.lower, found.slope), z_global)
    return at, found


def nearer_mode(joint: Joint, start: Tensor, z_global: Tensor, silo: Params) -> tuple[Tensor, Curved]:
    """As `to_mode`, near enough that one more of Newton's steps leaves 1e-4 of an sd, from a `start` that is an sd or
    less off: one step by the covariance of `silo`, q(Z_S | Z_G) around another Z_G, which is there already."""
    at, height = _begun(joint, start, z_global)
    slope = torch.func.grad(joint)(at, z_global)
    factor = _factor(silo)
    at = _stepped(joint, at, height, factor @ (factor.mT @ slope), z_global)[0]
    return at, curved(joint, at, z_global)


def _begun(joint: Joint, start: Tensor, z_global: Tensor) -> tuple[Tensor, Tensor]:
    height = joint(start, z_global).nan_to_num(nan=-math.inf)
    return _likelier(joint, z_global, start, height, torch.zeros_like(start)[None])


def _stepped(joint: Joint, at: Tensor, height: Tensor, step: Tensor, z_global: Tensor) -> tuple[Tensor, Tensor]:
    return _likelier(joint, z_global, at, height, torch.stack([at + share * step for share in SHARES]))


def _factor(silo: Params) -> Tensor:
    """(n, n) of a silo's covariance."""
    scale = silo["log_scale"][0].exp()
    return scale[:, None] * unit_lower(silo["lower"][0], len(scale)) if "lower" in silo else torch.diag(scale)


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
    near = eta_of(at, factor)
    new = {name: near[name][None] if name in near else torch.zeros_like(value) for name, value in like.items()}
    if "coupling" in like:
        new["coupling"] = torch.cholesky_solve(found.cross, found.lower)[None]
    return new


def solved(lower: Tensor, right: Tensor) -> Tensor:
    return torch.cholesky_solve(right.unsqueeze(-1), lower).squeeze(-1)


def joint_of(density: LogDensity, theta: Params, rows: Params, weights: Tensor) -> Joint:
    """log p(y_j, Z_S | Z_G) of a silo without latents of records."""

    def joint(z_silo: Tensor, z_global: Tensor) -> Tensor:
        terms = density.evaluate(z_global, z_silo, z_global.new_zeros(len(weights), 0), theta, rows)
        return (torch.where(weights > 0, terms.records, 0.0) * weights).sum() + terms.silo

    return joint
