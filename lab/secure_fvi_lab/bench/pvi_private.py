"""Where whole private runs end, beside the exact posterior: the modes of private PVI as `sf.fit` runs them, and SFVI.

Ten coefficients, N(0, 1) a priori, 3,000 rows of standard normal columns, a linear or a logistic response
(`coverage.drawn`), dealt to silos of one size. All runs have the same data, epsilon and delta, and no retries.

changes   each silo's change, clipped as a whole, noise in shares, one round
parts     the same of 64 parts a silo, or 16, each clipped by itself
steps     noise in each step of the silos' fits, each silo's in full, one round
sfvi      300 rounds, noise in shares

Changes are clipped at a norm that all but one part in forty are within at the exact posterior, which nobody knows, and
rows' gradients at a norm that few reach.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from secure_fvi.aggregation import Masked, Plain, SecureSum
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.federated_model import FederatedModel
from secure_fvi.fitting import fit
from secure_fvi.privacy.settings import RecordDP
from secure_fvi_lab.bench.coverage import CLIPPING, DELTA, DIMENSIONS, Kind, drawn, laplace, linear, logistic
from secure_fvi_lab.machine import machine

MODES = ("changes", "parts", "steps", "sfvi")
KINDS: tuple[Kind, ...] = ("linear", "logistic")
RECORDS, SILOS, EPSILONS = 3000, (3, 10), (1.0, 3.0)
SFVI_ROUNDS = 300
#: Of a silo. Fits of logistic parts have no closed form, and are made one after the other.
PARTS = {"linear": 64, "logistic": 16}
#: Of noised steps, in one round: how many, the first rate, and the share of it by which scales move. Found on the data
#: of seed 77.
STEPS, RATE, SCALES = 300, 0.05, 0.2
#: Of a row's gradient in local fits, which begin further off than SFVI's broadcasts come.
NORM = {"linear": 10.0, "logistic": 4.0}
WITHIN = 0.975
_ROWS, _COLS = torch.tril_indices(DIMENSIONS, DIMENSIONS)
_PROGRAMS = {"linear": linear, "logistic": logistic}


def lines(found: dict[str, Any]) -> Iterator[str]:
    names = f"{'kind':8} {'mode':8} {'silos':>5} {'epsilon':>7} {'fits':>4}"
    yield f"{names} {'sd':>6} {'error':>6} {'covered':>7} {'counted':>7} {'s':>6}"
    for row in found["rows"]:
        yield (
            f"{row['kind']:8} {row['mode']:8} {row['silos']:5d} {row['epsilon']:7g} {row['fits']:4d} {row['sd']:6.2f} "
            f"{row['error']:6.2f} {row['covered']:7.2f} {row['counted']:7d} {row['seconds']:6.1f}"
        )


def measure(
    fits: int, seed: int = 0, kinds: tuple[Kind, ...] = (), modes: tuple[str, ...] = (), counts: tuple[int, ...] = ()
) -> dict[str, Any]:
    """sd: the geometric mean over coefficients of the reported sd over the exact posterior's. error: the median over
    fits of the root mean square distance of means, in sds of that. covered: of the reported intervals of 95%. counted:
    runs whose sds count the noise. No kinds, modes, counts: all."""
    rows = [
        _row(kind, mode, silos, epsilon, fits, seed)
        for kind in kinds or KINDS for silos in counts or SILOS for epsilon in EPSILONS for mode in modes or MODES
    ]  # fmt: skip
    return {"machine": machine(), "records": RECORDS, "delta": DELTA, "rows": rows}


def _row(kind: Kind, mode: str, silos: int, epsilon: float, fits: int, seed: int) -> dict[str, Any]:
    data = drawn(kind, RECORDS, fits, torch.Generator().manual_seed(seed))
    began, scales, errors, inside, counted = time.perf_counter(), [], [], [], 0
    for beta, x, y in zip(*data, strict=True):
        exact, covariance, curvatures = _posterior(kind, x, y)
        sites = torch.cat([curvatures @ exact, curvatures[:, _ROWS, _COLS]], 1)
        algorithm, sums, options = _mode(kind, mode, sites, silos)
        privacy = RecordDP(epsilon=epsilon, delta=DELTA, retries=0, **options)
        rows = [{"x": x[j::silos], "y": y[j::silos]} for j in range(silos)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecureFVIWarning)
            result = fit(
                FederatedModel(_PROGRAMS[kind], record_plate="row"),
                rows,
                algorithm,
                sums,
                privacy=privacy,
                compile=False,
            )
        site, sd = result.posterior["beta"], covariance.diagonal().sqrt()
        mean, own = (torch.as_tensor(v).double() for v in (site.mean, site.sd))
        scales.append((own / sd).log())
        errors.append(float(((mean - exact) / sd).square().mean().sqrt()))
        inside.append(((mean - beta).abs() < 1.96 * own).double())
        assert result.privacy is not None
        counted += result.privacy["sds"]["count_noise"]
    each = (time.perf_counter() - began) / fits
    return {
        "kind": kind, "mode": mode, "silos": silos, "epsilon": epsilon, "fits": fits,
        "sd": float(torch.stack(scales).mean().exp()), "error": statistics.median(errors),
        "covered": float(torch.stack(inside).mean()), "counted": counted, "seconds": each,
    }  # fmt: skip


def _mode(kind: Kind, mode: str, sites: Tensor, silos: int) -> tuple[PVI | SFVI, SecureSum, dict[str, Any]]:
    """The algorithm, its sums and options of its privacy. sites: those of single records (N, packed)."""
    if mode == "sfvi":
        of = SFVI(
            family="full",
            iterations=SFVI_ROUNDS,
            average_last=0.8,
            learning_rate=0.05,
            lengths_share=0,
            curvature_norm=0,
        )
        return of, Masked(), {"clipping_norm": CLIPPING[kind], "noise": "distributed"}
    if mode == "steps":
        options: dict[str, Any] = {
            "local_steps": STEPS,
            "learning_rate": RATE,
            "scale_rate": SCALES,
            "lengths_share": 0,
        }
        stepped = PVI(family="full", rounds=1, damping=1.0, private="steps", **options)
        return stepped, Plain(), {"clipping_norm": NORM[kind], "noise": "silo"}
    parts = PARTS[kind] if mode == "parts" else 1
    at = torch.arange(len(sites)) % (silos * parts)
    norms = torch.zeros(silos * parts, sites.shape[1], dtype=torch.float64).index_add_(0, at, sites).norm(dim=1)
    norm = 2 * float(norms.quantile(WITHIN))
    local: dict[str, Any] = {"local_optimizer": "closed_form"}
    if kind == "logistic":
        local = {"local_optimizer": "fixed_point", "local_steps": 10}
    of_changes = PVI(family="full", rounds=1, damping=1.0, virtual_clients=parts, **local)
    return of_changes, Masked(), {"clipping_norm": norm, "noise": "distributed"}


def _posterior(kind: Kind, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (n,) and covariance (n, n) of the exact posterior, of a logistic one Laplace's at its mode, 3,000 rows being
    many, and each record's curvature there (N, n, n)."""
    z, precision = laplace(kind, x, y)
    weight = torch.ones_like(y) if kind == "linear" else (x @ z).sigmoid() * (-(x @ z)).sigmoid()
    return z, torch.linalg.inv(precision), weight[:, None, None] * x.unsqueeze(-1) * x.unsqueeze(-2)
