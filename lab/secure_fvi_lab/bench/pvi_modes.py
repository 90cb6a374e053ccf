"""How wide the intervals of each way to make partitioned VI private are at equal epsilon, and of SFVI beside them.

Linear regression on ten coefficients, N(0, 1) a priori, rows of standard normal columns (`coverage.drawn`). Each mode
leaves a noised estimate of X'y, whose noise has a known variance, and the posterior is exact for whoever knows the
curvature X'X as well, which flatters the first two modes most: they release it with as much noise.

changes   each silo's site, clipped as a whole, in one round of shares: what `sf.PVI` does
records   a site for each record, clipped by itself, in one round of shares: local averaging with parts of one record
steps     noised gradient steps inside each silo's local fit, which leaves a site; each silo adds all of the noise
sfvi      the same steps on the total, with the noise in shares

Nothing else than these releases enters. Sites are clipped at the largest norm there is, which nobody knows: no run
could choose better. A prototype: `sf.PVI` has the first alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from secure_fvi.algorithms.noise_aware import variance_of
from secure_fvi.privacy.settings import Placement, RecordDP
from secure_fvi.privacy.terms import Extent, agree
from secure_fvi_lab.bench.coverage import DELTA, DIMENSIONS, Data, drawn
from secure_fvi_lab.machine import machine

MODES = ("changes", "records", "steps", "sfvi")
RECORDS, SILOS, EPSILONS, STEPS = 3000, (10, 200), (1.0, 3.0), 300
#: Of a row's gradient: one that few reach even where steps stray far. Steps before the last so many find the way.
CLIP, COUNTED = 10.0, 200
_EYE = torch.eye(DIMENSIONS, dtype=torch.float64)


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{'mode':8} {'silos':>5} {'epsilon':>7} {'width':>6} {'covered':>8}"
    for row in found["rows"]:
        yield (f"{row['mode']:8} {row['silos']:5d} {row['epsilon']:7g} {row['width']:6.2f} {row['covered']:8.3f}")


def measure(fits: int, seed: int = 0) -> dict[str, Any]:
    """width: mean sd over that of the exact posterior without privacy. covered: of 95% intervals, ten a fit."""
    rng = torch.Generator().manual_seed(seed)
    data = drawn("linear", RECORDS, fits, rng)
    rows = [_row(mode, silos, e, data, rng) for silos in SILOS for e in EPSILONS for mode in MODES]
    return {"machine": machine(), "records": RECORDS, "steps": STEPS, "delta": DELTA, "fits": fits, "rows": rows}


def _row(mode: str, silos: int, epsilon: float, data: Data, rng: torch.Generator) -> dict[str, Any]:
    by_step = mode in ("steps", "sfvi")
    if by_step:
        found, variance = _by_steps(mode, silos, epsilon, data, rng)
    else:
        found, variance = _by_sites(RECORDS if mode == "records" else silos, silos, epsilon, data, rng)
    curvature = data.x.mT @ data.x
    seen = curvature @ torch.linalg.inv(curvature + variance * _EYE)
    covariance = torch.linalg.inv(_EYE + seen @ curvature)
    mean = (covariance @ seen @ found.unsqueeze(-1)).squeeze(-1)
    sd, exact = (c.diagonal(dim1=1, dim2=2).sqrt() for c in (covariance, torch.linalg.inv(_EYE + curvature)))
    covered = ((mean - data.beta).abs() < 1.96 * sd).double().mean()
    row = {"mode": mode, "silos": silos, "epsilon": epsilon}
    return row | {"width": float((sd / exact).mean()), "covered": float(covered)}


def _by_sites(parts: int, silos: int, epsilon: float, data: Data, rng: torch.Generator) -> tuple[Tensor, float]:
    """(B, n) the noised sum of parts' shifts, of sites of which none is cut, and the noise's variance."""
    x, y = (v.unflatten(1, (parts, -1)) for v in (data.x, data.y))
    shifts = (x.mT @ y.unsqueeze(-1)).squeeze(-1)
    rows, cols = torch.tril_indices(DIMENSIONS, DIMENSIONS)
    precisions = (x.mT @ x)[..., rows, cols]
    norm = 2 * float(torch.cat([shifts, precisions], -1).norm(dim=-1).max())  # of a part that is another's
    variance = _variance(epsilon, "distributed", silos, 1, norm, DIMENSIONS + len(rows))
    return shifts.sum(1) + math.sqrt(variance) * _normal(data.beta.shape, rng), variance


def _by_steps(mode: str, silos: int, epsilon: float, data: Data, rng: torch.Generator) -> tuple[Tensor, float]:
    """The same of the mean over the last steps of gradient + curvature x point, which is X'y and the mean noise; points
    follow the noised gradients."""
    places = silos if mode == "steps" else 1
    variance = _variance(epsilon, "silo" if mode == "steps" else "distributed", silos, STEPS, CLIP)
    of_place = variance / places
    x, y = (v.unflatten(1, (places, -1)) for v in (data.x, data.y))
    curvature, norms = x.mT @ x, x.norm(dim=-1)
    step = 0.05 * torch.linalg.inv(curvature + _EYE)
    z, total = torch.zeros(*curvature.shape[:-1], dtype=torch.float64), torch.zeros_like(curvature[..., 0])
    for at in range(STEPS):
        residual = y - (x @ z.unsqueeze(-1)).squeeze(-1)
        cut = residual * (CLIP / (residual.abs() * norms)).clamp(max=1.0)
        gradient = (x.mT @ cut.unsqueeze(-1)).squeeze(-1) + math.sqrt(of_place) * _normal(z.shape, rng)
        if at >= STEPS - COUNTED:
            total += (gradient + (curvature @ z.unsqueeze(-1)).squeeze(-1)) / COUNTED
        z = z + (step @ (gradient - z).unsqueeze(-1)).squeeze(-1)
    return total.sum(1), variance / COUNTED


def _variance(
    epsilon: float, noise: Placement, silos: int, rounds: int, norm: float, numbers: int = DIMENSIONS
) -> float:
    """Of the noise in each number of a round's total."""
    privacy = RecordDP(epsilon=epsilon, delta=DELTA, clipping_norm=norm, noise=noise, retries=0)
    return variance_of(agree(privacy, silos, 1.0, rounds, Extent(numbers, 0, 0)), silos, norm)


def _normal(shape: torch.Size, rng: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)
