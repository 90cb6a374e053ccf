"""A silo's own latents under PVI: q(Z_L | Z_G) is relative to a mean of Z_G that changes from fit to fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from secure_fvi.families import LocalFamily, Params
from secure_fvi.families.gaussian import unit_lower

#: Longest step of a latent's mean and gains, in its sds, and of its log sd.
_MEAN_STEP, _SCALE_STEP = 0.5, 0.3
#: Largest change of a log sd with one sd of Z_G: a fit that begins far off learns any slope from its way.
_GAIN = 0.7


def reanchored_silo(silo: Params, moved: Tensor, n_silo: int) -> tuple[Params, Tensor]:
    """q(Z_S | Z_G) relative to a mean of Z_G that lies by `moved` (n_global,) further on, and `moved` with what that
    does to the mean of Z_S appended, (n_global + n_silo,). Scales stay: what they follow Z_G by holds near its mean."""
    new = dict(silo)
    silo_moved = moved.new_zeros(n_silo)
    if "coupling" in silo:
        silo_moved = (silo["coupling"] @ moved).reshape(-1)
        new["loc"] = silo["loc"] + silo_moved
    return new, torch.cat([moved, silo_moved])


def reanchored_records(record: Params, moved: Tensor) -> Params:
    """q(Z_L | Z_G, Z_S) relative to means that lie by `moved` (n_global + n_silo,) further on."""
    return {**record, "loc": record["loc"] + record["coupling"] @ moved} if "coupling" in record else dict(record)


def gains_times(params: Params, root: Tensor, spread: Tensor) -> Params:
    """Parameters of q(Z_L | Z_G, Z_S), or their gradient, with every gain, by which a mean or log sd follows
    d = (Z_G - mu, Z_S - m), times `root` (n, n), or (n,) of a diagonal one, and `spread`, as many as d has of Z_S."""
    new = dict(params)
    for name in ("coupling", "scale_coupling"):
        if name in params:
            on_global, on_silo = params[name].split([root.shape[0], spread.shape[0]], -1)
            new[name] = torch.cat([on_global @ root if root.dim() == 2 else on_global * root, on_silo * spread], -1)
    return new


def natural_step(params: Params, gradient: Params, rate: Tensor) -> Params:
    """All of q(Z_L | Z_G, Z_S), a row a record, after a step along the natural gradient, gains as of white noise; no
    longer than `_MEAN_STEP` sds for a mean and its gains, and `_SCALE_STEP` in logs for a scale and its own.

    With white noise u in Z_L = m + L u, Fisher's information is 1 for L^-1 dm and what dm follows Z_G by, and 1 below
    and 2 on the diagonal of L^-1 dL. Steps so need nothing to learn their lengths from, and come to rest where
    gradients that stick the landing do.
    """
    sd = params["log_scale"].exp().unsqueeze(-1)
    n = sd.shape[-2]
    # A draw has one direction of d: along it all gains move at once, and would overshoot where there are many.
    rate = rate / (1 + rate * params["coupling"].shape[-1]) if "coupling" in params else rate
    unit = unit_lower(params["lower"], n) if "lower" in params else None
    slopes: Params = {"loc": gradient["loc"].unsqueeze(-1)}
    slopes |= {name: gradient[name] for name in ("coupling", "scale_coupling") if name in params}
    means: Params = {
        name: rate * _turned(sd * slopes[name], unit, True) for name in ("loc", "coupling") if name in slopes
    }
    scales: Params = {"factor": rate * _factor_slope(gradient, params, unit)}
    if "scale_coupling" in slopes:
        scales["scale_coupling"] = rate * slopes["scale_coupling"] / _scale_information(unit)
    new = dict(params)
    for name, step in _shortened(means, _MEAN_STEP).items():
        new[name] = params[name] + (sd * _turned(step, unit, False)).reshape(params[name].shape)
    scales = _shortened(scales, _SCALE_STEP)
    if unit is None:
        new["log_scale"] = params["log_scale"] + scales["factor"].squeeze(-1)
    else:
        step = scales["factor"]
        grown = (unit + unit @ torch.tril(step, -1)) * step.diagonal(dim1=-2, dim2=-1).exp().unsqueeze(-2)
        diagonal = grown.diagonal(dim1=-2, dim2=-1)
        rows, cols = torch.tril_indices(n, n, -1)
        new["log_scale"] = params["log_scale"] + diagonal.log()
        new["lower"] = (grown / diagonal.unsqueeze(-1))[..., rows, cols]
    if "scale_coupling" in scales:
        gain = params["scale_coupling"] + scales["scale_coupling"]
        new["scale_coupling"] = gain * (_GAIN / gain.norm(dim=-1, keepdim=True).clamp(min=_GAIN))
    return new


def _factor_slope(gradient: Params, params: Params, unit: Tensor | None) -> Tensor:
    """The natural gradient of L^-1 dL: (N, n, 1), its diagonal, where latents are independent, else (N, n, n)."""
    if unit is None:
        return 0.5 * gradient["log_scale"].unsqueeze(-1)
    below = _matrix(gradient["lower"], unit.shape[-1])  # of T in L = D T; of L it is this over D, row by row
    on = gradient["log_scale"] - (below * unit).sum(-1)
    slope = torch.tril(unit.mT @ (below + torch.diag_embed(on)))
    return slope - 0.5 * torch.diag_embed(slope.diagonal(dim1=-2, dim2=-1))


def _scale_information(unit: Tensor | None) -> Tensor | float:
    """(N, n, 1) Fisher's information of each log sd alone: 1 + its variance times its precision."""
    if unit is None:
        return 2.0
    eye = torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device).expand_as(unit)
    back = torch.linalg.solve_triangular(unit, eye, upper=False, unitriangular=True)
    return (1 + unit.square().sum(-1) * back.square().sum(-2)).unsqueeze(-1)


def _turned(value: Tensor, factor: Tensor | None, transposed: bool) -> Tensor:
    """T or T' times (N, n, d)."""
    if factor is None:
        return value
    return (factor.mT if transposed else factor) @ value


def _matrix(packed: Tensor, n: int) -> Tensor:
    """(..., n, n), zero but below the diagonal."""
    return torch.tril(unit_lower(packed, n), -1)


def _shortened(steps: Params, longest: float) -> Params:
    """Steps (N, ...) that are together no longer than that by latent, sqrt(n) times that by record."""
    n = next(iter(steps.values())).shape[-2]
    most = longest * n**0.5
    length = torch.cat([step.flatten(-2) for step in steps.values()], -1).norm(dim=-1)[:, None, None]
    return {name: step * (most / length.clamp(min=most)) for name, step in steps.items()}


def split_theta(gradient: Params, shared: Params) -> tuple[Params, Params]:
    """What is shared, and what stays: the weights of the silo's own encoder."""
    return {n: v for n, v in gradient.items() if n in shared}, {n: v for n, v in gradient.items() if n not in shared}


class Anchored:
    """A local family whose parameters hold the mean of Z_G that they are relative to, and the encoder's weights.

    It is what `LocalPosterior` draws from: q's final mean is not the one that the silo fitted against.
    """

    ANCHOR = "anchor"

    def __init__(self, family: LocalFamily, n_global: int) -> None:
        self.family, self.n_global = family, n_global
        self.couples_records, self.sees_shift = family.couples_records, family.sees_shift

    def init(self, loc: Tensor) -> Params:
        return self.family.init(loc)

    def init_theta(self, dtype: torch.dtype) -> Params:
        return self.family.init_theta(dtype)

    def moments(
        self, params: Params, theta: Params, rows: Mapping[str, Tensor], z_global: Tensor, shift: Tensor
    ) -> Params:
        if self.ANCHOR in params:
            shift = torch.cat([z_global - params[self.ANCHOR], shift[self.n_global :]])
        inner = {name: value for name, value in params.items() if name != self.ANCHOR}
        return self.family.moments(inner, {**theta, **inner}, rows, z_global, shift)
