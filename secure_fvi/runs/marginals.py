"""Marginal densities of global sites, small enough to keep beside a run and draw in its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from secure_fvi.summary import labels

#: More marginals than this tell a reader nothing; the first ones are kept.
MOST = 24
_GRID = 120


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


# ---- The sites of result.json, one scalar a row, for tables ----


class PosteriorRow(NamedTuple):
    label: str
    mean: float
    sd: float
    noise: float | None = None  # the part of the sd that the noise of privacy adds, where it is counted


def standing(result: dict[str, Any]) -> str:
    """Of result.json, in a word or two: converged, not converged, not assessed."""
    return {True: "converged", False: "not converged", None: "not assessed"}[result["converged"]]


def reason(result: dict[str, Any]) -> str:
    """Why, in one line; empty in files of earlier versions."""
    return str(result.get("convergence", {}).get("reason", ""))


def posterior_rows(result: dict[str, Any]) -> list[PosteriorRow]:
    """One row for each parameter of a formula, or each element of each global site."""
    if "parameters" in result:
        named = result["parameters"].items()
        return [PosteriorRow(name, row["mean"], row["sd"], row.get("noise")) for name, row in named]
    rows = []
    for site, moments in result["posterior"].items():
        columns = [_flat(moments["mean"]), _flat(moments["sd"])]
        if "noise" in result:
            columns.append(_flat(result["noise"]["sd"][site]))
        names = labels(site, shape_of(moments["mean"]))
        rows += [PosteriorRow(*row) for row in zip(names, *columns, strict=True)]
    return rows


def is_point(rows: list[PosteriorRow]) -> bool:
    """Whether a result is a point, which has no sds."""
    return not any(row.sd for row in rows)


def shape_of(nested: Any) -> tuple[int, ...]:
    """The shape of a tensor written as nested lists."""
    if not isinstance(nested, list):
        return ()
    return (len(nested), *(shape_of(nested[0]) if nested else ()))


def _flat(nested: Any) -> Iterator[float]:
    if isinstance(nested, list):
        for part in nested:
            yield from _flat(part)
    else:
        yield float(nested)
