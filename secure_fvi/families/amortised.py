"""Amortised local families: a network maps a record and Z_G to q(Z_i | y_i, Z_G).

The network's weights phi are part of theta (Hassan et al. 2023, section 3.2, remark): they are learned from
secure sums like any other theta, and a silo keeps no variational parameter of its own records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secure_fvi.errors import InputError
from secure_fvi.families.gaussian import Params, unit_lower

#: Marks the network's weights in theta; no pyro.param may start with it.
ENCODER = "encoder."


@dataclass(frozen=True)
class Amortised:
    """q(Z_i | y_i, Z_G) by `encoder`.

    `features(rows) -> (N, d)` picks and scales the encoder's inputs from a silo's rows (tensors with N first);
    the encoder maps (N, d), or (N, d + n_global) when `see_global`, to (N, k): n_local means, n_local log scales
    and, when `block`, n_local (n_local - 1) / 2 entries of a unit lower triangular factor.
    """

    encoder: nn.Module
    features: Callable[[Mapping[str, Tensor]], Tensor]
    see_global: bool = False
    block: bool = False

    def build(self, n_local: int, n_shift: int, importance_samples: int, marginal: bool = False) -> AmortisedGaussian:
        """The family for a model's sizes."""
        return AmortisedGaussian(self, n_local)


class AmortisedGaussian:
    """`Amortised` for fixed sizes."""

    couples_records = False
    sees_shift = False

    def __init__(self, config: Amortised, n_local: int) -> None:
        self.config, self.n_local = config, n_local
        self.n_out = 2 * n_local + (n_local * (n_local - 1) // 2 if config.block else 0)

    def init(self, loc: Tensor) -> Params:
        return {}

    def init_theta(self, dtype: torch.dtype) -> Params:
        weights = self.config.encoder.named_parameters()
        return {ENCODER + name: p.detach().to(dtype).clone() for name, p in weights}

    def moments(
        self, params: Params, theta: Params, rows: Mapping[str, Tensor], z_global: Tensor, shift: Tensor
    ) -> Params:
        weights = {name.removeprefix(ENCODER): v for name, v in theta.items() if name.startswith(ENCODER)}
        inputs = self.config.features(rows)
        if self.config.see_global:
            inputs = torch.cat([inputs, z_global.expand(inputs.shape[0], -1)], -1)
        out = torch.func.functional_call(self.config.encoder, weights, (inputs,))
        if out.shape[-1] != self.n_out:
            raise InputError(f"the encoder returns {out.shape[-1]} numbers a record; this model needs {self.n_out}")
        n = self.n_local
        moments = {"loc": out[..., :n], "log_scale": out[..., n : 2 * n]}
        if self.config.block:
            moments["lower"] = unit_lower(out[..., 2 * n :], n)
        return moments
