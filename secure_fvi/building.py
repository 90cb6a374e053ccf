"""What every party builds for itself before the first round, from what all know: no data is needed for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from secure_fvi.algorithms.base import Algorithm, Problem
from secure_fvi.compiled import choose_mode
from secure_fvi.contracts import check_program
from secure_fvi.density import LogDensity
from secure_fvi.discovery import as_model, read_layout
from secure_fvi.errors import InputError
from secure_fvi.exported import Elsewhere, GraphDensity, watched
from secure_fvi.federated_model import FederatedModel, Schema
from secure_fvi.privacy.settings import DP


def build_problem(
    model: FederatedModel | Elsewhere | Callable[..., Any],
    schema: Schema,
    algorithm: Algorithm,
    silos: Sequence[str],
    seed: int,
    device: str | torch.device,
    dtype: torch.dtype,
    compile: bool | Literal["auto"],
    privacy: DP | None,
    work: int = 0,
) -> Problem:
    """The problem that all parties agree on, from a program that keeps its contract.

    `silos`: all ids, sorted; `schema`: agreed between them.

    A model that is `Elsewhere` is traced there, and its graph runs here.
    `compile` and `work`, the numbers that a step goes through here, decide how this party computes and nothing else.
    """
    where = device_named(device)
    with watched(model):
        return _built(model, schema, algorithm, silos, seed, where, dtype, compile, privacy, work)


def _built(
    model: FederatedModel | Elsewhere | Callable[..., Any],
    schema: Schema,
    algorithm: Algorithm,
    silos: Sequence[str],
    seed: int,
    where: torch.device,
    dtype: torch.dtype,
    compile: bool | Literal["auto"],
    privacy: DP | None,
    work: int,
) -> Problem:
    density: LogDensity
    if isinstance(model, Elsewhere):
        roles, traced = model.roles, model.exported(schema, dtype)
        layout, start = traced.layout, traced.start
        model, density = roles, GraphDensity(traced, roles, schema.to(where))
    else:
        model = as_model(model, schema, dtype)
        layout, start = read_layout(model, schema, dtype)
        density = LogDensity(model, layout, schema.to(where))
    mode = choose_mode(compile, algorithm.expected_calls * len(silos), work)
    ids = tuple(silos)
    problem = Problem(model, schema.to(where), layout, density, start, ids, seed, dtype, where, mode, privacy)
    check_program(problem, algorithm.importance_samples)
    return problem


def check_common(seed: int, dtype: torch.dtype) -> None:
    """Raise InputError for a seed or a type of numbers that no run takes."""
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"dtype must be torch.float32 or torch.float64, not {dtype}")
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
        raise InputError("seed must be a whole number of at most 64 bits")


def device_named(device: str | torch.device) -> torch.device:
    """The device; raises InputError where PyTorch does not find it."""
    where = torch.device(device)
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device '{where}': PyTorch finds {torch.cuda.device_count()} CUDA devices here")
    return where
