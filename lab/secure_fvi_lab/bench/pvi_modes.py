"""How wide the intervals of each way to make partitioned VI private are at equal epsilon, and of SFVI beside them.

Linear regression on ten coefficients, N(0, 1) a priori, rows of standard normal columns (`coverage.drawn`). Each mode
leaves a noised estimate of X'y, whose noise has a known variance, and the posterior is exact for whoever knows the
curvature X'X as well, which flatters modes that release sites most: they release it with as much noise.

changes   each silo's site, clipped as a whole, in one round of shares: what `sf.PVI` does of one part
parts     a site for each of 4, 16 or 64 parts of a silo, or of each record, clipped by itself, in one round of shares
averaged  the same over 60 rounds, one site for all parts of all silos: what `sf.PVI` does of several parts
by silo   one site for the 16 parts of a silo, which follows what it released; each silo adds all of the noise
steps     noised gradient steps inside each silo's local fit, which leaves a site; each silo adds all of the noise
sfvi      the same steps on the total, with the noise in shares

Parts with sites of their own, which follow their own clipped changes without noise, are "parts" again: rounds that
together let a site go as far as one did cost as much noise as the one, since a sum of them is what counts.

Nothing else than these releases enters. Sites of one round are clipped at a norm that all but one in forty are within,
which nobody knows: no run could choose better. Of several rounds, at what all but one in forty deviate from the mean
site by, and at as much more as the site's own noise asks for; there is no such norm where that noise grows as it does.
"by silo", "steps" and the SFVI of this file are prototypes. `given` and `by run` are of the posterior that a run gives,
to which the curvature is not known (`noise_aware.of_sites`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from secure_fvi.algorithms.natural import Natural, packed_size, unpack
from secure_fvi.algorithms.noise_aware import of_sites
from secure_fvi.algorithms.pvi import _SETTLING, _TURNOVERS, MOST_SITE_NOISE, moved_by, site_noise
from secure_fvi.privacy.settings import Placement, RecordDP
from secure_fvi.privacy.terms import Extent, agree
from secure_fvi_lab.bench.coverage import DELTA, DIMENSIONS, Data, drawn, of_intervals
from secure_fvi_lab.machine import machine

#: By name: how, and how many parts a silo has; 0: a part a record.
MODES = {
    "changes": ("once", 1), "parts 4": ("once", 4), "parts 16": ("once", 16), "parts 64": ("once", 64),
    "records": ("once", 0),
    "averaged 4": ("averaged", 4), "averaged 16": ("averaged", 16), "averaged 64": ("averaged", 64),
    "by silo 16": ("by silo", 16), "steps": ("steps", 1), "sfvi": ("sfvi", 1),
}  # fmt: skip
RECORDS, SILOS, EPSILONS, STEPS, ROUNDS = 3000, (10, 200), (1.0, 3.0), 300, 60
#: Parts in all at most: of more records are parts.
MOST_PARTS = 1000
#: Of a row's gradient: one that few reach even where steps stray far. Steps before the last so many find the way.
CLIP, COUNTED = 10.0, 200
#: Share of the parts that are within the norm, and the largest noise of a site, in norms, for which there is one.
WITHIN, MOST_NOISE = 0.975, 0.4
_EYE = torch.eye(DIMENSIONS, dtype=torch.float64)
_ROWS, _COLS = torch.tril_indices(DIMENSIONS, DIMENSIONS)
_PACKED = packed_size(DIMENSIONS, True)
_PRIOR = Natural(torch.zeros(DIMENSIONS, dtype=torch.float64), _EYE)


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{'mode':12} {'silos':>5} {'epsilon':>7} {'norm':>6} {'width':>6} {'covered':>8} {'given':>8} {'by run':>20}"
    for row in found["rows"]:
        told = f"{row['mode']:12} {row['silos']:5d} {row['epsilon']:7g}"
        if "width" not in row:
            yield told + "  no norm at which sites settle"
            continue
        told += f" {row['norm']:6.0f} {row['width']:6.2f} {row['covered']:8.3f}"
        if "given" in row:
            told += f" {row['given']:8d}"
        if row.get("given"):
            low, high = row["interval"]
            told += f" {row['by_run_width']:6.2f} {row['by_run']:.3f} ({low:.3f}, {high:.3f})"
        yield told


def measure(fits: int, seed: int = 0, modes: tuple[str, ...] = (), records: int = RECORDS) -> dict[str, Any]:
    """width: mean sd over that of the exact posterior without privacy. covered: of 95% intervals, ten a fit. modes:
    none for all."""
    rng = torch.Generator().manual_seed(seed)
    data = drawn("linear", records, fits, rng)
    rows = [_row(m, silos, e, data, rng) for silos in SILOS for e in EPSILONS for m in modes or MODES if _few(m, silos)]
    return {"machine": machine(), "records": records, "steps": STEPS, "delta": DELTA, "fits": fits, "rows": rows}


def _few(mode: str, silos: int) -> bool:
    return silos * MODES[mode][1] <= MOST_PARTS


def _row(mode: str, silos: int, epsilon: float, data: Data, rng: torch.Generator) -> dict[str, Any]:
    how, parts = MODES[mode]
    row: dict[str, Any] = {"mode": mode, "silos": silos, "epsilon": epsilon}
    curvature = data.x.mT @ data.x
    exact = torch.linalg.inv(_EYE + curvature).diagonal(dim1=1, dim2=2).sqrt()
    if how in ("steps", "sfvi"):
        norm = CLIP
        found, variance = _by_steps(how, silos, epsilon, data, rng)
    elif how == "once":
        sites = _sites(data, silos, parts, rng)
        norm = 2 * _within(sites.norm(dim=-1), rng)  # of a part that is another's
        variance = _variance(epsilon, "distributed", silos, 1, norm, _PACKED)
        found = _cut(sites, norm / 2).sum(1) + math.sqrt(variance) * _normal(sites[:, 0].shape, rng)
        row |= _by_run(found, variance, data.beta, exact)
    else:
        settled = _settled(_sites(data, silos, parts, rng), silos, epsilon, how == "by silo", rng)
        if settled is None:
            return row
        found, variance, norm, noise = settled
        row |= _by_run(found, variance, data.beta, exact) if noise <= MOST_SITE_NOISE else {"given": 0}
    seen = curvature @ torch.linalg.inv(curvature + variance * _EYE)
    covariance = torch.linalg.inv(_EYE + seen @ curvature)
    mean = (covariance @ seen @ found[:, :DIMENSIONS].unsqueeze(-1)).squeeze(-1)
    sd = covariance.diagonal(dim1=1, dim2=2).sqrt()
    covered = ((mean - data.beta).abs() < 1.96 * sd).double().mean()
    return row | {"norm": norm, "width": float((sd / exact).mean()), "covered": float(covered)}


def _by_run(found: Tensor, variance: float, beta: Tensor, exact: Tensor) -> dict[str, Any]:
    """What a run says, which knows the totals alone."""
    answers = [of_sites(unpack(total, DIMENSIONS, True), variance, _PRIOR) for total in found]
    names = {"covered": "by_run", "width": "by_run_width"}
    return {names.get(name, name): value for name, value in of_intervals(answers, beta, exact).items()}


def _sites(data: Data, silos: int, parts: int, rng: torch.Generator) -> Tensor:
    """(B, silos x parts, packed) the sites of parts, to which records are dealt at random; parts = 0: of records."""
    fits, records = data.y.shape
    of_records = torch.cat([data.x * data.y.unsqueeze(-1), data.x[..., _ROWS] * data.x[..., _COLS]], -1)
    if not parts:
        return of_records
    part = torch.randint(0, parts, (fits, records), generator=rng)
    at = (torch.arange(records) * silos // records * parts + part).unsqueeze(-1).expand_as(of_records)
    return torch.zeros(fits, silos * parts, _PACKED, dtype=torch.float64).scatter_add_(1, at, of_records)


def _settled(
    sites: Tensor, silos: int, epsilon: float, by_silo: bool, rng: torch.Generator
) -> tuple[Tensor, float, float, float] | None:
    """(B, packed) the mean over rounds of what a total says of all sites, its noise's variance, the norm, and the noise
    in a site, in norms; None for none."""
    places = silos if by_silo else 1  # that have a site each
    t = sites.unflatten(1, (places, -1))
    parts, damping = t.shape[2], min(1.0, _TURNOVERS / ROUNDS)
    quantile = _within((t - t.mean(2, keepdim=True)).norm(dim=-1), rng)
    placement: Placement = "silo" if by_silo else "distributed"
    one = _variance(epsilon, placement, silos, ROUNDS, 1.0, _PACKED) / places  # of a place's total, norms as units
    noise = site_noise(one, _PACKED, damping, parts)
    if noise > MOST_NOISE:
        return None
    norm = 2 * quantile / (1 - 2 * noise)
    variance = one * norm**2
    site = torch.zeros(len(t), places, _PACKED, dtype=torch.float64)
    said, counted = torch.zeros_like(site), 0
    for round_ in range(ROUNDS):
        cut = _cut(t - (site / parts).unsqueeze(2), norm / 2).sum(2)
        total = cut + math.sqrt(variance) * _normal(cut.shape, rng)
        if round_ >= _SETTLING * ROUNDS:
            said += total + site
            counted += 1
        site = site + damping * total if by_silo else vmap(vmap(_moved))(site, damping * total)
    return (said / counted).sum(1), variance * places / counted, norm, noise


def _within(norms: Tensor, rng: torch.Generator) -> float:
    """Of some of them, if there are many."""
    norms = norms.flatten()
    return float(norms[torch.randperm(len(norms), generator=rng)[:100_000]].quantile(WITHIN))


def _cut(rows: Tensor, norm: float) -> Tensor:
    return rows * (norm / rows.norm(dim=-1, keepdim=True).clamp(min=1e-300)).clamp(max=1.0)


def _moved(site: Tensor, step: Tensor) -> Tensor:
    """All sites after a step of the server, (packed,)."""
    q = unpack(site, DIMENSIONS, True).plus(_PRIOR)
    return moved_by(q, unpack(step, DIMENSIONS, True), 1.0).minus(_PRIOR).pack()


def _by_steps(mode: str, silos: int, epsilon: float, data: Data, rng: torch.Generator) -> tuple[Tensor, float]:
    """(B, n) the mean over the last steps of gradient + curvature x point, which is X'y and the mean noise, and the
    noise's variance; points follow the noised gradients."""
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
    return agree(privacy, silos, 1.0, rounds, Extent(numbers, 0, 0)).variance(silos, norm)


def _normal(shape: torch.Size, rng: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)
