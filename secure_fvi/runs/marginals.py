"""Marginal densities of global sites, small enough to keep beside a run and draw in its report."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

#: More marginals than this tell a reader nothing; the first ones are kept.
MOST = 24
_GRID = 120


def labels(site: str, shape: tuple[int, ...]) -> list[str]:
    """Names of a site's elements in row-major order: `beta[0]`, `omega`, `Sigma[1,0]`."""
    if not shape:
        return [site]
    return [f"{site}[{','.join(map(str, index))}]" for index in itertools.product(*map(range, shape))]


def marginals(draws: Mapping[str, Tensor]) -> dict[str, dict[str, list[float]]]:
    """Densities by label from draws (n, *shape) of each site, for the first elements only."""
    found: dict[str, dict[str, list[float]]] = {}
    for site, values in draws.items():
        flat = values.reshape(len(values), -1).cpu().numpy()
        for label, column in zip(labels(site, tuple(values.shape[1:])), flat.T, strict=True):
            if len(found) == MOST:
                return found
            found[label] = density(column)
    return found


def density(draws: npt.NDArray[Any]) -> dict[str, list[float]]:
    """Gaussian kernel estimate with Scott's bandwidth: `x` and `density`, never past the extreme draws."""
    spread = min(float(draws.std()), float(np.subtract(*np.quantile(draws, [0.75, 0.25]))) / 1.34)
    width = max(1.06 * spread * len(draws) ** -0.2, 1e-12 + 1e-9 * abs(float(draws.mean())))
    x = np.linspace(draws.min(), draws.max(), _GRID)
    kernel = np.exp(-0.5 * ((x[:, None] - draws[None, :]) / width) ** 2)
    y = kernel.sum(1) / (len(draws) * width * np.sqrt(2 * np.pi))
    return {"x": x.round(9).tolist(), "density": y.round(9).tolist()}
