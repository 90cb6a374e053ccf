"""`fit`: one call from a model and the silos' data to a posterior, all parties in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.aggregation import Masked, Plain
from secure_fvi.aggregation.base import SecureSum, check_silo_ids
from secure_fvi.algorithms.base import Algorithm
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.building import build_problem, check_common
from secure_fvi.checkpoints import FolderCheckpoints
from secure_fvi.compiled import choose_threads
from secure_fvi.compiled import threads as with_threads
from secure_fvi.contracts import check_repeats, whole_ids
from secure_fvi.disclosure import disclose
from secure_fvi.driving import Progress, Rounds, drive
from secure_fvi.engines.local import LocalEngine
from secure_fvi.engines.transport import Transport
from secure_fvi.errors import InputError
from secure_fvi.federated_model import Data, FederatedModel, Records, check_schemas_agree, read_data
from secure_fvi.guarding import Books, Guards, build_guards, silo_secret, strong_enough, warn_of_large_delta
from secure_fvi.privacy.noise import NoiseSource
from secure_fvi.privacy.settings import DP
from secure_fvi.randomness import derive_key
from secure_fvi.results import LocalPosterior, Result, assessed, summarise
from secure_fvi.server import Server
from secure_fvi.silo import Silo, silo_view


def fit(
    model: FederatedModel | Callable[..., Any],
    silos: Sequence[Data],
    algorithm: Algorithm | None = None,
    aggregation: SecureSum | None = None,
    privacy: DP | None = None,
    seed: int = 0,
    *,
    silo_ids: Sequence[str] | None = None,
    record_ids: Sequence[Tensor] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float64,
    compile: bool | Literal["auto"] = "auto",
    threads: int | Literal["auto"] = "auto",
    batch_silos: bool = False,
    checkpoint_dir: Path | None = None,
    checkpoint_seconds: float = 5.0,
    resume: bool = False,
    on_round: Callable[[Progress], None] | None = None,
    books: Books | None = None,
    noise_key: bytes | None = None,
) -> Result:
    """Fit `model` over `silos` (dicts of tensors or arrays, the keyword arguments of its Pyro function, or frames).

    A bare Pyro function is taken as a model of global and record-level sites alone, whose record plate is the one
    plate around all that it observes.

    With `record_ids` (int64 (N_j,) each, all different) the draws belong to the records, and the result does not
    depend on how they are spread over silos. Everything random follows from `seed`, but for what protects records:
    under `privacy` (`RecordDP`, `SiloDP`) noise and batches come from the operating system, unless a test gives
    `noise_key`, and the job is charged to `books`. Raises InputError for bad input and BudgetError for a budget that
    does not hold the job, before any round; warns with SecureFVIWarning when the run ends without having converged.

    `batch_silos`: silos of equal shape compute together, mapped by `vmap`; for many small silos, above all on a GPU.
    The posterior is the same up to rounding.
    """
    began = time.monotonic()
    algorithm = algorithm if algorithm is not None else SFVI()
    aggregation = aggregation if aggregation is not None else Masked()
    books = books if books is not None else Books()
    parties = build_parties(
        model, silos, algorithm, aggregation, seed, silo_ids, record_ids, device, dtype, compile,
        privacy, books, noise_key, batch_silos,
    )  # fmt: skip
    server, engine, guards = parties
    count = choose_threads(work_of(silos, algorithm)) if threads == "auto" else threads
    checkpoints = None if checkpoint_dir is None else FolderCheckpoints(checkpoint_dir, checkpoint_seconds)
    with with_threads(count):
        rounds = drive(
            server, engine, guards, algorithm, privacy is not None, books.block,
            checkpoints, resume, on_round, began,
        )  # fmt: skip
    return result_of(server, engine, algorithm, aggregation, rounds)


def build_parties(
    model: FederatedModel | Callable[..., Any],
    silos: Sequence[Data],
    algorithm: Algorithm,
    aggregation: SecureSum,
    seed: int = 0,
    silo_ids: Sequence[str] | None = None,
    record_ids: Sequence[Tensor] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float64,
    compile: bool | Literal["auto"] = "auto",
    privacy: DP | None = None,
    books: Books | None = None,
    noise_key: bytes | None = None,
    batch_silos: bool = False,
) -> tuple[Server, LocalEngine, Guards]:
    """A server, an engine with its silos and their gates, before the first round. Arguments as in `fit`."""
    _check_silos(silos)
    names, ordered = named_silos(silo_ids, len(silos))
    disclosed = disclose(algorithm, aggregation, privacy, len(ordered))
    check_common(seed, dtype)
    read = {name: read_data(data, name, dtype) for name, data in zip(names, silos, strict=True)}
    schema = check_schemas_agree({name: schema for name, (schema, _) in read.items()})
    work = work_of(silos, algorithm)
    problem = build_problem(model, schema, algorithm, ordered, seed, device, dtype, compile, privacy, work)
    program, noise = algorithm.server(problem), NoiseSource(noise_key)
    terms = program.terms
    disclosed = disclosed.of_program(program.tables, terms, aggregation)
    server_sum, silo_sums = strong_enough(aggregation, terms).local_parties(ordered)
    warn_of_large_delta(terms, {name: records.size for name, (_, records) in read.items()})
    guards = build_guards(ordered, program.tables, terms, algorithm.name, books or Books(), noise, disclosed.rows)
    ids = _record_ids(names, [records for _, records in read.values()], record_ids)
    silo_program = algorithm.silo(problem)  # one for all silos, so that they share traces; it holds no data
    built = {}
    for name in ordered:
        secret = silo_secret(lambda name=name: derived_secret(seed, name, record_ids), bool(terms), noise_key)  # type: ignore[misc]
        view = silo_view(name, problem, read[name][1], ids[name], secret)
        released = guards.released(name)
        built[name] = Silo(name, silo_program, view, silo_sums[name], guards.gates[name], released=released)
    return Server(problem, program, server_sum, noise), LocalEngine(built, batch_silos), guards


def work_of(silos: Sequence[Data], algorithm: Algorithm) -> int:
    """Numbers that the largest silo's step goes through."""
    columns = [[silo[name] for name in getattr(silo, "columns", silo)] for silo in silos]
    sizes = [sum(math.prod(getattr(value, "shape", (0,))) for value in silo) for silo in columns]
    return max(sizes, default=0) * algorithm.importance_samples


def _check_silos(silos: Any) -> None:
    if isinstance(silos, (Mapping, str, bytes, Tensor)) or hasattr(silos, "columns") or not hasattr(silos, "__len__"):
        raise InputError(
            f"silos is a list of each silo's data, not {type(silos).__name__}; names go into silo_ids, as in "
            "fit(model, list(data.values()), silo_ids=list(data))"
        )


def named_silos(silo_ids: Sequence[str] | None, count: int) -> tuple[list[str], tuple[str, ...]]:
    """The ids of `count` silos, made up where none are given, and the same sorted. Raises InputError for bad ones."""
    names = list(silo_ids) if silo_ids is not None else [f"silo-{i + 1}" for i in range(count)]
    if len(names) != count:
        raise InputError(f"{len(names)} silo ids for {count} silos")
    return names, check_silo_ids(names)


def derived_secret(seed: int, silo: str, record_ids: Sequence[Tensor] | None) -> bytes:
    """The sampling secret of a silo in this process, where all follow from the seed so that a run repeats.

    Records with ids of their own share one secret, which makes draws independent of the partition.
    """
    owner = b"all" if record_ids is not None else b"silo/" + silo.encode()
    return derive_key(seed.to_bytes(16, "big", signed=True), b"secret/" + owner)


def _record_ids(
    names: Sequence[str], records: Sequence[Records], record_ids: Sequence[Tensor] | None
) -> dict[str, npt.NDArray[np.int64]]:
    if record_ids is None:
        for name, r in zip(names, records, strict=True):
            check_repeats(r.rows, name)
        return {name: np.arange(r.size) for name, r in zip(names, records, strict=True)}
    if len(record_ids) != len(names):
        raise InputError(f"record_ids for {len(record_ids)} silos, data for {len(names)}")
    ids = {name: whole_ids(given, name) for name, given in zip(names, record_ids, strict=True)}
    together = np.concatenate(list(ids.values()))
    different, counts = np.unique(together, return_counts=True)
    if len(different) != len(together):
        twice = different[counts > 1]
        where = ", ".join(f"{int(np.isin(i, twice).sum())} rows of silo '{n}'" for n, i in ids.items())
        raise InputError(f"record_ids: a record id occurs twice, in {where}; ids must differ over all silos")
    return ids


def result_of(
    server: Server,
    engine: Transport,
    algorithm: Algorithm,
    aggregation: SecureSum,
    rounds: Rounds,
) -> Result:
    """What a run that has ended found. Warns with SecureFVIWarning where `assessed` does."""
    problem, state = server.problem, server.state.algorithm
    posterior = server.program.posterior(state)
    verdict = assessed(server.program.verdict(state), algorithm.name, server.rounds)
    tail = np.array(rounds.objectives)
    metrics = server.program.metrics(state)
    # A run of few rounds has one good estimate, its last; a mean over rounds would take the approach in.
    bound = metrics["bound"] if "bound" in metrics else tail.mean()
    return Result(
        algorithm=algorithm.name,
        seed=problem.seed,
        silos=list(problem.silos),
        rounds=server.rounds,
        seconds=rounds.seconds,
        elbo=None if bound is None else number_or_none(bound),
        **verdict,
        posterior=summarise(problem, posterior),
        theta=problem.density.constrain(posterior.eta["loc"], posterior.theta)[1],
        metrics={
            "elbo_sd": number_or_none(tail.std()),
            **metrics,
            "records": server.state.records,
            "execution": problem.mode,
        },
        aggregation={
            "kind": aggregation.kind,
            "exchanges": engine.exchanges,
            "bytes_up_per_silo": max(engine.bytes_up.values()),
            "bytes_down_per_silo": max(engine.bytes_down.values()),
        },
        privacy=server.claim(),
        problem=problem,
        variational=posterior,
        local={name: LocalPosterior(silo, problem, posterior) for name, silo in engine.silos.items()},
    )


def number_or_none(value: Any) -> float | None:
    """None for what was not released."""
    return float(value) if math.isfinite(value) else None


# ---- Every silo on its own: what it would know if it exchanged nothing, for comparison ----


def fit_alone(
    model: FederatedModel | Callable[..., Any],
    silos: Sequence[Data],
    algorithm: Algorithm | None = None,
    seed: int = 0,
    *,
    silo_ids: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Result]:
    """Fit `model` to each silo's data alone, by its own run of `algorithm`; the results by silo, in the order given.

    Nothing is shared: a silo is its own server, and its result is for its own eyes. `options` are those of `fit` but
    for aggregation, privacy, books and checkpoints, which exchanges have and this has not. Raises InputError as `fit`.
    """
    for option in ("aggregation", "privacy", "books", "noise_key", "checkpoint_dir", "resume"):
        if option in options:
            raise InputError(f"fit_alone exchanges nothing and takes no {option}")
    names = list(silo_ids) if silo_ids is not None else [f"silo-{i + 1}" for i in range(len(silos))]
    if len(names) != len(silos):
        raise InputError(f"{len(names)} silo ids for {len(silos)} silos")
    check_silo_ids(names)
    ids = options.pop("record_ids", None) or [None] * len(silos)
    return {
        name: fit(
            model, [data], algorithm, Plain(), seed=seed, silo_ids=[name],
            record_ids=None if own is None else [own], **options,
        )
        for name, data, own in zip(names, silos, ids, strict=True)
    }  # fmt: skip
