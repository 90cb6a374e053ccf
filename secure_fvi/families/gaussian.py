"""Gaussian families for the global latent variables: diagonal, full and low rank.

Parameters eta_G are dicts of tensors that everyone may see. `loc` is always the mean, and the only parameter
through which a translation acts; the conditional local families rely on that.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.trees import Params as Params

LOG_2PI = math.log(2 * math.pi)
#: `family="auto"` is full covariance up to this many dimensions (about 33,000 parameters), diagonal above.
FULL_UP_TO = 256
INITIAL_SCALE = 0.1


class GlobalFamily(Protocol):
    """q(Z_G; eta_G) over R^n. All functions are pure and can be traced."""

    name: str
    n: int

    @property
    def noise_size(self) -> int:
        """Length of eps_G."""
        ...

    def init(self, loc: Tensor) -> Params:
        """eta_G centred at `loc` (n,), with standard deviation INITIAL_SCALE."""
        ...

    def transform(self, eta: Params, eps: Tensor) -> Tensor:
        """Z_G = f(eps_G) (n,)."""
        ...

    def log_prob(self, eta: Params, z: Tensor) -> Tensor:
        """log q(z), in nats, for z (n,)."""
        ...

    def covariance(self, eta: Params) -> Tensor:
        """(n, n)."""
        ...

    def stddev(self, eta: Params) -> Tensor:
        """Marginal standard deviations (n,)."""
        ...


class Diagonal:
    """z = loc + exp(log_scale) * eps."""

    name = "diagonal"

    def __init__(self, n: int) -> None:
        self.n = n

    @property
    def noise_size(self) -> int:
        return self.n

    def init(self, loc: Tensor) -> Params:
        return {"loc": loc.clone(), "log_scale": torch.full_like(loc, math.log(INITIAL_SCALE))}

    def transform(self, eta: Params, eps: Tensor) -> Tensor:
        return eta["loc"] + eta["log_scale"].exp() * eps

    def log_prob(self, eta: Params, z: Tensor) -> Tensor:
        u = (z - eta["loc"]) * (-eta["log_scale"]).exp()
        return _standard_log_prob(u) - eta["log_scale"].sum()

    def covariance(self, eta: Params) -> Tensor:
        return torch.diag((2 * eta["log_scale"]).exp())

    def stddev(self, eta: Params) -> Tensor:
        return eta["log_scale"].exp()


class Full:
    """z = loc + exp(log_scale) * (L eps), L unit lower triangular with rows packed in `lower`."""

    name = "full"

    def __init__(self, n: int) -> None:
        self.n = n

    @property
    def noise_size(self) -> int:
        return self.n

    def init(self, loc: Tensor) -> Params:
        return {
            "loc": loc.clone(),
            "log_scale": torch.full_like(loc, math.log(INITIAL_SCALE)),
            "lower": loc.new_zeros(self.n * (self.n - 1) // 2),
        }

    def transform(self, eta: Params, eps: Tensor) -> Tensor:
        return eta["loc"] + eta["log_scale"].exp() * (unit_lower(eta["lower"], self.n) @ eps)

    def log_prob(self, eta: Params, z: Tensor) -> Tensor:
        scaled = (z - eta["loc"]) * (-eta["log_scale"]).exp()
        u = torch.linalg.solve_triangular(
            unit_lower(eta["lower"], self.n), scaled.unsqueeze(-1), upper=False, unitriangular=True
        )
        return _standard_log_prob(u) - eta["log_scale"].sum()

    def root(self, eta: Params) -> Tensor:
        """R with covariance R R' (n, n)."""
        return eta["log_scale"].exp().unsqueeze(-1) * unit_lower(eta["lower"], self.n)

    def covariance(self, eta: Params) -> Tensor:
        factor = self.root(eta)
        return factor @ factor.T

    def stddev(self, eta: Params) -> Tensor:
        return torch.linalg.vector_norm(self.root(eta), dim=-1)


class LowRank:
    """z = loc + exp(log_scale) * eps_1 + W eps_2, W of shape (n, rank) (Ong, Nott and Smith 2018)."""

    name = "low_rank"

    def __init__(self, n: int, rank: int) -> None:
        if not 1 <= rank <= n:
            raise InputError(f"rank must lie between 1 and the {n} global dimensions, not {rank}")
        self.n, self.rank = n, rank

    @property
    def noise_size(self) -> int:
        return self.n + self.rank

    def init(self, loc: Tensor) -> Params:
        # A zero factor would stay zero: its gradient is odd in eps_2. A small fixed pattern breaks the symmetry.
        grid = torch.arange(self.n * self.rank, dtype=loc.dtype, device=loc.device)
        return {
            "loc": loc.clone(),
            "log_scale": torch.full_like(loc, math.log(INITIAL_SCALE)),
            "factor": 0.1 * INITIAL_SCALE * torch.cos(1.0 + grid).reshape(self.n, self.rank),
        }

    def transform(self, eta: Params, eps: Tensor) -> Tensor:
        return eta["loc"] + eta["log_scale"].exp() * eps[: self.n] + eta["factor"] @ eps[self.n :]

    def log_prob(self, eta: Params, z: Tensor) -> Tensor:
        # Woodbury with D = diag(scale), V = D^-1 W: the covariance is D (I + V V') D.
        inverse = (-eta["log_scale"]).exp()
        x, v = (z - eta["loc"]) * inverse, eta["factor"] * inverse.unsqueeze(-1)
        capacitance = torch.linalg.cholesky(torch.eye(self.rank, dtype=z.dtype, device=z.device) + v.T @ v)
        w = torch.linalg.solve_triangular(capacitance, (v.T @ x).unsqueeze(-1), upper=False)
        log_det = eta["log_scale"].sum() + capacitance.diagonal().log().sum()
        return -0.5 * (x.square().sum() - w.square().sum() + self.n * LOG_2PI) - log_det

    def covariance(self, eta: Params) -> Tensor:
        return torch.diag((2 * eta["log_scale"]).exp()) + eta["factor"] @ eta["factor"].T

    def stddev(self, eta: Params) -> Tensor:
        return ((2 * eta["log_scale"]).exp() + eta["factor"].square().sum(-1)).sqrt()


def global_family(name: str, n: int, rank: int = 8) -> GlobalFamily:
    """The family that a configuration names: "auto", "diagonal", "full" or "low_rank"."""
    if name == "auto":
        name = "full" if n <= FULL_UP_TO else "diagonal"
    if name == "diagonal":
        return Diagonal(n)
    if name == "full":
        return Full(n)
    if name == "low_rank":
        return LowRank(n, min(rank, n))
    raise InputError(f"family '{name}' is unknown; choose auto, diagonal, full or low_rank")


def lower(matrix: Tensor, diagonal: int = 0) -> Tensor:
    """(..., k): of matrices (..., n, n) the rows of their lower triangles, up to this diagonal."""
    rows, cols = torch.tril_indices(matrix.shape[-2], matrix.shape[-1], diagonal, device=matrix.device)
    return matrix[..., rows, cols]


def from_lower(packed: Tensor, n: int, symmetric: bool = False) -> Tensor:
    """The inverse of `lower` (n (n + 1) / 2,): a lower triangular matrix (n, n), or a symmetric one."""
    rows, cols = torch.tril_indices(n, n, device=packed.device)
    found = packed.new_zeros(n, n)
    found[rows, cols] = packed
    return found + found.tril(-1).mT if symmetric else found


def eta_of(loc: Tensor, factor: Tensor) -> Params:
    """Parameters of `Full` with this mean (..., n) and lower triangular factor (..., n, n) of the covariance."""
    scale = factor.diagonal(dim1=-2, dim2=-1)
    return {"loc": loc, "log_scale": scale.log(), "lower": lower(factor / scale.unsqueeze(-1), -1)}


def unit_lower(packed: Tensor, n: int) -> Tensor:
    """Unit lower triangular matrices (..., n, n) from their rows below the diagonal (..., n (n - 1) / 2)."""
    rows, cols = torch.tril_indices(n, n, -1, device=packed.device)
    eye = torch.eye(n, dtype=packed.dtype, device=packed.device).expand(*packed.shape[:-1], n, n)
    flat = torch.cat([packed, packed.new_zeros(*packed.shape[:-1], 1)], -1)
    # A gather, not a scatter: it compiles to one fused read. Entries off the triangle read the appended zero.
    index = torch.full((n, n), packed.shape[-1], dtype=torch.long, device=packed.device)
    index[rows, cols] = torch.arange(packed.shape[-1], device=packed.device)
    return eye + flat[..., index]


def _standard_log_prob(u: Tensor) -> Tensor:
    return -0.5 * (u.square().sum() + u.numel() * LOG_2PI)


# ---- A point in place of a distribution: what algorithms without uncertainty return ----


class Point:
    """All mass at `loc` (n,). `families.gaussian.GlobalFamily`; it needs no noise, and every draw is the point."""

    name = "point"

    def __init__(self, n: int) -> None:
        self.n = n

    @property
    def noise_size(self) -> int:
        return 0

    def init(self, loc: Tensor) -> Params:
        return {"loc": loc.clone()}

    def transform(self, eta: Params, eps: Tensor) -> Tensor:
        return eta["loc"].clone()

    def log_prob(self, eta: Params, z: Tensor) -> Tensor:
        """0 () at the point, -inf elsewhere: against the counting measure, not Lebesgue's."""
        return z.new_zeros(()).masked_fill((z != eta["loc"]).any(), -math.inf)

    def covariance(self, eta: Params) -> Tensor:
        return eta["loc"].new_zeros(self.n, self.n)

    def stddev(self, eta: Params) -> Tensor:
        return eta["loc"].new_zeros(self.n)
