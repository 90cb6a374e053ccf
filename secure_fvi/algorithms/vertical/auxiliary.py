"""Variational families for the auxiliary variables, q(z_j | theta_j); their parameters never leave the silo.

Amortised (Hassan et al. 2024, eq. 9): a network of the predictor, and of the response where silos know it; its size
does not grow with the records. Mean field (eq. 10): a mean and a scale for every record, free of theta_j.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.families.gaussian import LOG_2PI
from secure_fvi.trees import Params


class AuxiliaryFamily(Protocol):
    """Pure functions for fixed sizes; N records of C columns."""

    @property
    def integrated(self) -> bool:
        """Whether z is integrated out elsewhere, so that the silo sends eta itself."""
        ...

    def init(self, records: int, generator: torch.Generator, dtype: torch.dtype) -> tuple[Params, Params]:
        """Parameters of the silo, and parameters with one row a record."""
        ...

    def moments(self, shared: Params, record: Params, eta: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log scale (N, C) of z, given the predictor eta (N, C) and the response's features (N, k)."""
        ...


@dataclass(frozen=True)
class Amortised:
    """z = eta + rho m + rho exp(t) tau with (m, t) by a network of eta and the response's features.

    `hidden` units a layer, tanh. The last layer starts at zero, so that q(z | theta) starts as the prior.
    """

    hidden: tuple[int, ...] = (16,)

    def __post_init__(self) -> None:
        if any(type(h) is not int or h < 1 for h in self.hidden):
            raise InputError(f"hidden holds the units of each layer, whole numbers from 1 on, not {self.hidden!r}")

    def build(self, columns: int, features: int, rho: float) -> AmortisedAuxiliary:
        return AmortisedAuxiliary((columns + features, *self.hidden, 2 * columns), rho)


class AmortisedAuxiliary:
    """`Amortised` for fixed sizes."""

    integrated = False

    def __init__(self, widths: tuple[int, ...], rho: float) -> None:
        self.widths, self.log_rho, self.rho = widths, math.log(rho), rho

    def init(self, records: int, generator: torch.Generator, dtype: torch.dtype) -> tuple[Params, Params]:
        shared, last = {}, len(self.widths) - 2
        for layer, (n_in, n_out) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            weight = torch.randn(n_in, n_out, generator=generator, dtype=dtype) / math.sqrt(n_in)
            shared[f"weight{layer}"] = torch.zeros_like(weight) if layer == last else weight
            shared[f"bias{layer}"] = weight.new_zeros(n_out)
        return shared, {}

    def moments(self, shared: Params, record: Params, eta: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        hidden, layers = torch.cat([eta, features], -1), len(self.widths) - 1
        for layer in range(layers):
            hidden = hidden @ shared[f"weight{layer}"] + shared[f"bias{layer}"]
            hidden = hidden.tanh() if layer < layers - 1 else hidden
        shift, log_ratio = hidden.chunk(2, -1)
        return eta + self.rho * shift, self.log_rho + log_ratio


@dataclass(frozen=True)
class MeanField:
    """z = loc + exp(log_scale) tau, one of each a record and column; starts at mean 0 with scale rho."""

    def build(self, columns: int, features: int, rho: float) -> MeanFieldAuxiliary:
        return MeanFieldAuxiliary(columns, rho)


class MeanFieldAuxiliary:
    """`MeanField` for fixed sizes."""

    integrated = False

    def __init__(self, columns: int, rho: float) -> None:
        self.columns, self.rho = columns, rho

    def init(self, records: int, generator: torch.Generator, dtype: torch.dtype) -> tuple[Params, Params]:
        loc = torch.zeros(records, self.columns, dtype=dtype)
        return {}, {"loc": loc, "log_scale": torch.full_like(loc, math.log(self.rho))}

    def moments(self, shared: Params, record: Params, eta: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        return record["loc"], record["log_scale"]


@dataclass(frozen=True)
class Integrated:
    """No q(z_j | theta_j): silos send eta_j, and the holder of the response integrates the sum of z_j out.

    By quadrature with `nodes` (`vertical.marginal`); augmented-variable model, responses of one column.
    """

    nodes: int = 32

    def __post_init__(self) -> None:
        if type(self.nodes) is not int or self.nodes < 2:
            raise InputError(f"nodes of a quadrature must be a whole number of at least 2, not {self.nodes!r}")

    def build(self, columns: int, features: int, rho: float) -> IntegratedAuxiliary:
        return IntegratedAuxiliary()


class IntegratedAuxiliary:
    """`Integrated`: nothing to fit."""

    integrated = True

    def init(self, records: int, generator: torch.Generator, dtype: torch.dtype) -> tuple[Params, Params]:
        return {}, {}

    def moments(self, shared: Params, record: Params, eta: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        return eta, torch.full_like(eta, -math.inf)


@dataclass(frozen=True)
class Auto:
    """`Integrated` in a fit where the likelihood has it, the paper's `Amortised` otherwise."""

    def build(self, columns: int, features: int, rho: float) -> AmortisedAuxiliary:
        return Amortised().build(columns, features, rho)


def log_normal(x: Tensor, loc: Tensor, log_scale: Tensor) -> Tensor:
    """log density of independent normals over the columns of x (N, C): (N,), nats."""
    return (-0.5 * (((x - loc) * (-log_scale).exp()).square() + LOG_2PI) - log_scale).sum(-1)
