"""A silo's own latents under PVI: q(Z_L | Z_G) is relative to a mean of Z_G that changes from fit to fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from secure_fvi.families import LocalFamily, Params

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
    """The means, log sds and gains of q(Z_L | Z_G, Z_S), a row a record, after a step along the natural gradient of
    each, gains as of white noise; no longer than `_MEAN_STEP` sds, and `_SCALE_STEP` in logs.

    In these coordinates Fisher's information is 1 / sd^2 of a mean and its gains and 2 of a log sd and its own, between
    which it is zero: steps need no learning of scales, and end where gradients that stick the landing do.
    """
    if "lower" in params or "dense" in params:
        return {}
    sd, new = params["log_scale"].exp(), {}
    for names, unit, longest in (
        (("loc", "coupling"), sd, _MEAN_STEP),
        (("log_scale", "scale_coupling"), 0.5**0.5, _SCALE_STEP),
    ):
        there = [name for name in names if name in params]
        steps = [rate * _columns(unit, gradient[name]) * gradient[name] for name in there]
        length = torch.cat([s.reshape(*sd.shape, -1) for s in steps], -1).norm(dim=-1)
        share = longest / length.clamp(min=longest)
        for name, step in zip(there, steps, strict=True):
            new[name] = params[name] + _columns(unit, step) * _columns(share, step) * step
    if "scale_coupling" in new:
        gain = new["scale_coupling"]
        new["scale_coupling"] = gain * (_GAIN / gain.norm(dim=-1, keepdim=True).clamp(min=_GAIN))
    return new


def _columns(value: Tensor | float, like: Tensor) -> Tensor | float:
    """Of each latent (N, n), for its gains (N, n, d) where `like` is of these."""
    return value.unsqueeze(-1) if isinstance(value, Tensor) and like.dim() > value.dim() else value


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
