"""The sites of result.json and compare.json, one scalar a row, for tables and plots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from secure_fvi.runs.marginals import labels


class PosteriorRow(NamedTuple):
    label: str
    mean: float
    sd: float


class ComparisonRow(NamedTuple):
    label: str
    mean: float  # of the reference
    sd: float
    run_mean: float
    run_sd: float
    error: float  # (run_mean - mean) / sd
    ratio: float  # run_sd / sd


def standing(result: dict[str, Any]) -> str:
    """Of result.json, in a word or two: converged, not converged, not assessed."""
    return {True: "converged", False: "not converged", None: "not assessed"}[result["converged"]]


def reason(result: dict[str, Any]) -> str:
    """Why, in one line; empty in files of earlier versions."""
    return str(result.get("convergence", {}).get("reason", ""))


def posterior_rows(result: dict[str, Any]) -> list[PosteriorRow]:
    """One row for each element of each global site."""
    rows = []
    for site, moments in result["posterior"].items():
        names = labels(site, shape_of(moments["mean"]))
        rows += [PosteriorRow(*row) for row in zip(names, _flat(moments["mean"]), _flat(moments["sd"]), strict=True)]
    return rows


def comparison_rows(comparison: dict[str, Any]) -> list[ComparisonRow]:
    """One row for each element of each compared site."""
    keys = ("mean", "sd", "run_mean", "run_sd", "mean_error_in_sd", "sd_ratio")
    rows = []
    for site, values in comparison["sites"].items():
        names = labels(site, shape_of(values["mean"]))
        rows += [ComparisonRow(*row) for row in zip(names, *(_flat(values[key]) for key in keys), strict=True)]
    return rows


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
