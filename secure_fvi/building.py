"""What every party builds for itself before the first round, from what all know: no data is needed for it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from secure_fvi.algorithms.base import Algorithm, Problem
from secure_fvi.compiled import choose_mode
from secure_fvi.density import LogDensity
from secure_fvi.errors import InputError
from secure_fvi.exported import Elsewhere, GraphDensity
from secure_fvi.federated_model import Data, FederatedModel, Schema
from secure_fvi.later import Later
from secure_fvi.privacy.settings import DP, check_device
from secure_fvi.program_contract import check_program
from secure_fvi.randomness import derive_key

if TYPE_CHECKING:
    from secure_fvi import discovery, program_density, program_sites
else:
    discovery, program_sites = Later("secure_fvi.discovery"), Later("secure_fvi.program_sites")
    program_density = Later("secure_fvi.program_density")


class Machine(NamedTuple):
    """How a party computes: of no consequence for anyone else but for the last bits, and `dtype`, which all agree on.

    work: the numbers that a step goes through here, by which "auto" decides.
    """

    device: str | torch.device = "cpu"
    dtype: torch.dtype = torch.float64
    compile: bool | Literal["auto"] = "auto"
    work: int = 0


def build_problem(
    model: FederatedModel | Elsewhere | Callable[..., Any],
    schema: Schema,
    algorithm: Algorithm,
    silos: Sequence[str],
    seed: int,
    privacy: DP | None,
    machine: Machine,
) -> Problem:
    """The problem that all parties agree on, from a program that keeps its contract.

    `silos`: all ids, sorted; `schema`: agreed between them. A model that is `Elsewhere` is traced there, and its graph
    runs here.
    """
    where, dtype = device_named(machine.device), machine.dtype
    with contextlib.nullcontext() if isinstance(model, Elsewhere) else program_sites.watched(model):
        density: LogDensity
        own: FederatedModel
        if isinstance(model, Elsewhere):
            own, traced = model.roles, model.exported(schema, dtype)
            layout, start = traced.layout, traced.start
            density = GraphDensity(traced, own, schema.to(where))
        else:
            own = discovery.as_model(model, schema, dtype)
            layout, start = discovery.read_layout(own, schema, dtype)
            density = program_density.ProgramDensity(own, layout, schema.to(where))
        ids = tuple(silos)
        problem = Problem(own, schema.to(where), layout, density, start, ids, seed, dtype, where, "traced", privacy)
        latents = layout.size("record") + layout.size("silo")
        calls, draws = algorithm.expected_calls * (getattr(algorithm, "steps_in_a_call", 1) if latents else 1), 1
        if hasattr(algorithm, "newton_calls"):
            calls, draws = algorithm.newton_calls(problem) or (calls, draws)
        problem = problem._replace(mode=choose_mode(machine.compile, calls * len(silos), machine.work * draws))
        check_program(problem, algorithm.importance_samples)
    return problem


def derived_secret(seed: int, owner: bytes) -> bytes:
    """The sampling secret of a silo in this process, where all follow from the seed so that a run repeats."""
    return derive_key(seed.to_bytes(16, "big", signed=True), b"secret/" + owner)


def check_common(seed: int, dtype: torch.dtype, device: object, privacy: DP | None) -> None:
    """Raise InputError for a seed or a type of numbers that no run takes, or a device that no run with this privacy."""
    check_device(privacy, device)
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"dtype must be torch.float32 or torch.float64, not {dtype}")
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
        raise InputError("seed must be a whole number of at most 64 bits")


def device_named(device: str | torch.device) -> torch.device:
    """The device; raises InputError where PyTorch does not find it."""
    try:
        where = torch.device(device)
    except RuntimeError:
        where = torch.device("meta")
    if where.type not in ("cpu", "cuda"):
        raise InputError(f"device '{device}' is none that runs use; give 'cpu' or 'cuda', or 'cuda:1' of several")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device '{where}': PyTorch finds {torch.cuda.device_count()} CUDA devices here")
    return where


def work_of(silos: Sequence[Data], algorithm: Algorithm, privacy: DP | None) -> int:
    """Numbers that the largest silo's step goes through; 0 under privacy: how a run computes shows in the last bits of
    what it sends, and in its configuration, and no noise covers how many records decided on it."""
    return numbers_of(silos) * algorithm.importance_samples if privacy is None else 0


def numbers_of(silos: Sequence[Data]) -> int:
    """In the data of the largest silo."""
    columns = [[silo[name] for name in getattr(silo, "columns", silo)] for silo in silos]
    sizes = [sum(math.prod(getattr(value, "shape", (0,))) for value in silo) for silo in columns]
    return max(sizes, default=0)
