"""Conditional Gaussian families for local latent variables, q(Z_L | Z_G).

Z_i = m_i + C_i d + exp(a_i + D_i d) * (T_i eps_i),   d = (Z_G - mu_G, Z_S - m_S)

(Tan, Bhaskaran and Nott 2020 for the conditional mean; Hassan et al. 2023, section 3). One row of every
parameter belongs to one record, is seen by its silo only and never leaves it. Silo-level latents use the same
family with a single row and d = Z_G - mu_G.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.families.gaussian import INITIAL_SCALE, Params, unit_lower

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
        if self.scale not in ("auto", "diagonal", "block", "dense"):
            raise InputError(f"local scale '{self.scale}' is unknown; choose auto, diagonal, block or dense")

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
