"""A silo's own latents under PVI: q(Z_L | Z_G) is relative to a mean of Z_G that changes from fit to fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from secure_fvi.families import LocalFamily, Params


def reanchored_silo(silo: Params, moved: Tensor, n_silo: int) -> tuple[Params, Tensor]:
    """q(Z_S | Z_G) relative to a mean of Z_G that lies by `moved` (n_global,) further on, and `moved` with what that
    does to the mean of Z_S appended, (n_global + n_silo,)."""
    new = dict(silo)
    silo_moved = moved.new_zeros(n_silo)
    if "coupling" in silo:
        silo_moved = (silo["coupling"] @ moved).reshape(-1)
        new["loc"] = silo["loc"] + silo_moved
    if "scale_coupling" in silo:
        new["log_scale"] = silo["log_scale"] + silo["scale_coupling"] @ moved
    return new, torch.cat([moved, silo_moved])


def reanchored_records(record: Params, moved: Tensor) -> Params:
    """q(Z_L | Z_G, Z_S) relative to means that lie by `moved` (n_global + n_silo,) further on."""
    new = dict(record)
    for name, target in (("coupling", "loc"), ("scale_coupling", "log_scale")):
        if name in record:
            new[target] = record[target] + record[name] @ moved
    return new


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
