"""A silo's own latents under PVI: q(Z_L | Z_G) is relative to a mean of Z_G that changes from fit to fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from secure_fvi.families import LocalFamily, Params


def reanchored(record: Params, silo: Params, moved: Tensor) -> tuple[Params, Params]:
    """The same conditionals, relative to a mean of Z_G that lies by `moved` (n_global,) further on."""
    n = moved.shape[0]
    new_silo, silo_moved = dict(silo), moved[:0]
    if "coupling" in silo:
        silo_moved = (silo["coupling"] @ moved).reshape(-1)
        new_silo["loc"] = silo["loc"] + silo_moved
    if "scale_coupling" in silo:
        new_silo["log_scale"] = silo["log_scale"] + silo["scale_coupling"] @ moved
    new_record = dict(record)
    for name, target in (("coupling", "loc"), ("scale_coupling", "log_scale")):
        if name in record:
            width = record[name].shape[-1] - n
            whole = torch.cat([moved, silo_moved if len(silo_moved) else moved.new_zeros(width)])
            new_record[target] = record[target] + record[name] @ whole
    return new_record, new_silo


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
