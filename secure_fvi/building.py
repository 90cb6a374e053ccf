"""What every party builds for itself before the first round, from what all know: no data is needed for it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from secure_fvi.aggregation.base import SecureSum
from secure_fvi.algorithms.base import Algorithm, Problem
from secure_fvi.compiled import choose_mode
from secure_fvi.density import LogDensity
from secure_fvi.disclosure import Disclosure
from secure_fvi.errors import InputError, SecureFVIWarning
from secure_fvi.exported import Elsewhere, GraphDensity
from secure_fvi.federated_model import Data, FederatedModel, Schema
from secure_fvi.later import Later
from secure_fvi.privacy.accounting import admitted, job_curve, smallest_budget
from secure_fvi.privacy.gate import Gate, NoiseSource
from secure_fvi.privacy.ledger import Job, Ledger, OpenJob, Term
from secure_fvi.privacy.ledger_terms import Budget
from secure_fvi.privacy.settings import DP, check_device
from secure_fvi.privacy.terms import Terms, description
from secure_fvi.program_contract import check_encoders, check_program
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
        check_encoders(problem, getattr(algorithm, "local_family", None))
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


# ---- Gates for the silos of a job ----
#
# Its terms agreed, its whole cost checked against every silo's ledger, its sum strong enough for the noise it carries.


class Guards(NamedTuple):
    """The gates of all silos in this process, with their open jobs where there is a ledger."""

    gates: Mapping[str, Gate]
    jobs: Sequence[OpenJob] = ()
    ledgers: Mapping[str, Ledger] = {}
    at_end: Callable[[], None] | None = None  # what becomes of ledgers that this process keeps for all
    holder: Guards | None = None  # of a party that is no silo and releases too: it holds a private response

    @property
    def last_index(self) -> int:
        """The largest sum index that any silo has charged: a resumed job goes on above it."""
        return max((job.last_index(term.phase) for job in self.jobs for term in job.job.terms), default=-1)

    def released(self, silo: str) -> int:
        """How many answers of `silo` its ledger has reserved: below that no count of questions is drawn from again.
        A sum that a silo keeps to itself comes with an answer."""
        job, phases = dict(zip(self.gates, self.jobs, strict=False)).get(silo), self.gates[silo].phases
        return 0 if job is None else sum(t.count - job.left(t.phase) for t in job.job.terms if t.phase in phases)

    def close(self, outcome: str) -> None:
        for job in self.jobs:
            job.close(outcome)
        if self.at_end is not None:
            self.at_end()
        for ledger in self.ledgers.values():
            ledger.close()
        if self.holder is not None:
            self.holder.close(outcome)


def strong_enough(aggregation: SecureSum, found: Disclosure) -> SecureSum:
    """The sum, made to refuse fewer survivors than the job's noise counts on, as its disclosure says."""
    if found.exact or found.kind == "plain":
        return aggregation
    least = max(found.at_least, aggregation.min_cohort)  # type: ignore[attr-defined]
    return dataclasses.replace(aggregation, min_cohort=least, max_missing=found.missing)  # type: ignore[type-var]


def declared_job(
    name: str, data_set: str, terms: Mapping[str, Terms], algorithm: str, noise: NoiseSource, exact_jobs: int = 0
) -> tuple[Job, Budget]:
    """The job as a ledger charges it, and the budget that it brings where the data set has none. exact_jobs: without
    differential privacy that the data set is known to have answered before."""
    declared = tuple(Term(phase, t.event, t.releases) for phase, t in terms.items())
    settings = next(iter(terms.values())).settings
    about = {"algorithm": algorithm, **description(terms, noise), **({"exact_jobs": exact_jobs} if exact_jobs else {})}
    job = Job(name, data_set, settings.unit, settings.delta, declared, about)
    if settings.epsilon is not None:
        asked = Budget(data_set, settings.epsilon, settings.delta, settings.unit)
        if admitted(asked, (), job_curve(job)):
            return job, asked
    return job, smallest_budget(job)


def warn_of_large_delta(terms: Mapping[str, Terms], sizes: Mapping[str, int]) -> None:
    """At the silos: a delta of 1 / N or more allows to publish a whole record. The warning gives no size away."""
    for silo, size in sizes.items():
        if any(t.settings.unit == "record" and t.settings.delta * size >= 1 for t in terms.values()):
            delta = next(iter(terms.values())).settings.delta
            warnings.warn(
                f"silo '{silo}': delta = {delta:g} is not below 1 / N, its number of records: such a guarantee allows "
                "to publish whole records; choose a far smaller one",
                SecureFVIWarning,
                stacklevel=4,
            )


def silo_secret(derived: Callable[[], bytes], private: bool, noise_key: bytes | None) -> bytes:
    """A silo's sampling secret. Under privacy it never follows from the seed: who knows a batch knows too much."""
    return os.urandom(32) if private and noise_key is None else derived()
