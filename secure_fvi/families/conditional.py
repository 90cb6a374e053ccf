"""Conditional Gaussian families for local latent variables, q(Z_L | Z_G).

Z_i = m_i + C_i d + exp(a_i + D_i d) * (T_i eps_i),   d = (Z_G - mu_G, Z_S - m_S)

(Tan, Bhaskaran and Nott 2020 for the conditional mean; Hassan et al. 2023, section 3). One row of every
parameter belongs to one record, is seen by its silo only and never leaves it. Silo-level latents use the same
family with a single row and d = Z_G - mu_G.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from secure_fvi.errors import InputError
from secure_fvi.families.gaussian import INITIAL_SCALE, LOG_2PI, Params, unit_lower
from secure_fvi.options import check

#: With a longer d than this, `coupling="auto"` leaves C_i out, which has n_local times as many numbers a record.
COUPLED_UP_TO = 256
#: With more latents than this in a record or silo, `scale="auto"` leaves out their covariance.
CORRELATED_UP_TO = 256


class LocalFamily(Protocol):
    """q(Z_L | Z_G) for fixed sizes. All functions are pure and can be traced; N is the number of rows."""

    #: One record's distribution depends on the other records of its silo.
    couples_records: bool
    #: Its moments depend on d = Z_G - mu_G.
    sees_shift: bool

    def init(self, loc: Tensor) -> Params:
        """The silo's own parameters, rows centred at `loc` (N, n_local)."""
        ...

    def init_theta(self, dtype: torch.dtype) -> Params:
        """Parameters that all silos share and that are fitted as part of theta."""
        ...

    def moments(
        self, params: Params, theta: Params, rows: Mapping[str, Tensor], z_global: Tensor, shift: Tensor
    ) -> Params:
        """Moments (families.rows) given Z_G (n_global,) and the shift d that the family was built for."""
        ...


@dataclass(frozen=True)
class Conditional:
    """Choices for q(Z_L | Z_G).

    `scale`: "diagonal"; "block" for a full covariance within a record; "auto" is block up to 256 latents and diagonal
    above; "dense" for one covariance over all records of a silo, which couples records (full-batch only, no
    record-level privacy) and suits small silos only.
    `coupling`: the mean depends on Z_G.
    `varying_scale`: the scale does as well; "auto" turns it on for the importance-weighted bound, and where the bound
    has to follow the marginal likelihood as Z_G moves (partitioned VI).
    """

    scale: Literal["auto", "diagonal", "block", "dense"] = "auto"
    coupling: bool | Literal["auto"] = "auto"
    varying_scale: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        check(self)

    def build(self, n_local: int, n_shift: int, importance_samples: int, marginal: bool = False) -> ConditionalGaussian:
        """The family for a model's sizes; raises InputError for a combination that has no meaning."""
        coupling = n_shift <= COUPLED_UP_TO if self.coupling == "auto" else self.coupling
        varying = (
            coupling and (importance_samples > 1 or marginal) if self.varying_scale == "auto" else self.varying_scale
        )
        if self.scale == "dense" and importance_samples > 1:
            raise InputError("a dense local scale couples records, so they cannot be importance-weighted one by one")
        automatic = "block" if n_local <= CORRELATED_UP_TO else "diagonal"
        return ConditionalGaussian(
            n_local, n_shift, automatic if self.scale == "auto" else self.scale, coupling, varying
        )


class ConditionalGaussian:
    """`Conditional` for fixed sizes."""

    def __init__(self, n_local: int, n_shift: int, scale: str, coupling: bool, varying: bool) -> None:
        self.n_local, self.n_shift = n_local, n_shift
        self.coupling, self.varying = coupling, varying
        self.couples_records = scale == "dense" and n_local > 0
        self.correlated = scale == "block" and n_local > 1
        self.sees_shift = (coupling or varying) and n_local > 0

    def init(self, loc: Tensor) -> Params:
        rows, n = loc.shape
        if n == 0:
            return {}
        params = {"loc": loc.clone(), "log_scale": torch.full_like(loc, math.log(INITIAL_SCALE))}
        if self.coupling:
            params["coupling"] = loc.new_zeros(rows, n, self.n_shift)
        if self.varying:
            params["scale_coupling"] = loc.new_zeros(rows, n, self.n_shift)
        if self.correlated:
            params["lower"] = loc.new_zeros(rows, n * (n - 1) // 2)
        if self.couples_records:
            # One matrix over the silo, stored a row a record: row i holds the factor's rows of record i.
            params["dense"] = loc.new_zeros(rows, n, rows * n)
        return params

    def init_theta(self, dtype: torch.dtype) -> Params:
        return {}

    def moments(
        self, params: Params, theta: Params, rows: Mapping[str, Tensor], z_global: Tensor, shift: Tensor
    ) -> Params:
        if self.n_local == 0:
            nothing = z_global.new_zeros(1, 0)
            return {"loc": nothing, "log_scale": nothing}
        out = {"loc": params["loc"], "log_scale": params["log_scale"]}
        if self.coupling:
            out["loc"] = out["loc"] + (params["coupling"] * shift).sum(-1)
        if self.varying:
            out["log_scale"] = out["log_scale"] + (params["scale_coupling"] * shift).sum(-1)
        if self.correlated:
            out["lower"] = unit_lower(params["lower"], self.n_local)
        if self.couples_records:
            square = params["dense"].flatten(0, 1)
            out["dense"] = torch.tril(square, -1) + torch.eye(square.shape[0], dtype=square.dtype, device=square.device)
        return out


# ---- What every local family shares: a Gaussian a row, given its moments ----
#
# Moments are a dict: `loc` and `log_scale` (N, n), and optionally `lower` (N, n, n), a unit lower triangular
# factor within each record, or `dense` (N n, N n), one over all records.


def transform(moments: Params, eps: Tensor) -> Tensor:
    """Z_L (..., N, n) = loc + exp(log_scale) * (T eps)."""
    if "dense" in moments:
        eps = (moments["dense"] @ eps.flatten(-2).unsqueeze(-1)).reshape(eps.shape)
    elif "lower" in moments:
        eps = (moments["lower"] * eps.unsqueeze(-2)).sum(-1)
    return moments["loc"] + moments["log_scale"].exp() * eps


def log_prob(moments: Params, z: Tensor) -> Tensor:
    """log q(z_i) of each row (..., N), in nats."""
    u = (z - moments["loc"]) * (-moments["log_scale"]).exp()
    if "dense" in moments:
        u = _solve(moments["dense"], u.flatten(-2)).reshape(u.shape)
    elif "lower" in moments:
        u = _solve(moments["lower"], u)
    return (-0.5 * (u.square() + LOG_2PI) - moments["log_scale"]).sum(-1)


def _solve(lower: Tensor, x: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(lower, x.unsqueeze(-1), upper=False, unitriangular=True).squeeze(-1)


# ---- Amortised local families: a network maps a record and Z_G to q(Z_i | y_i, Z_G) ----
#
# The network's weights phi are part of theta (Hassan et al. 2023, section 3.2, remark): they are learned from
# secure sums like any other theta, and a silo keeps no variational parameter of its own records.

#: Marks the network's weights in theta; no pyro.param may start with it.
ENCODER = "encoder."


@dataclass(frozen=True)
class Amortised:
    """q(Z_i | y_i, Z_G) by `encoder`.

    `features(rows) -> (N, d)` picks and scales the encoder's inputs from a silo's rows (tensors with N first);
    the encoder maps (N, d), or (N, d + n_global) when `see_global`, to (N, k): n_local means, n_local log scales
    and, when `block`, n_local (n_local - 1) / 2 entries of a unit lower triangular factor. Neither draws random
    numbers: one with Dropout is given as `encoder.eval()` leaves it.
    """

    encoder: nn.Module
    features: Callable[[Mapping[str, Tensor]], Tensor]
    see_global: bool = False
    block: bool = False

    def __post_init__(self) -> None:
        check(self)

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
