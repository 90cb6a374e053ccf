"""`fit`: one call from a model and the silos' data to a posterior, all parties in this process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.aggregation import Masked
from secure_fvi.aggregation.base import SecureSum, check_silo_ids
from secure_fvi.algorithms.base import Problem, Step
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.compiled import choose_mode, choose_threads
from secure_fvi.compiled import threads as with_threads
from secure_fvi.density import LogDensity
from secure_fvi.discovery import read_layout
from secure_fvi.engines.local import LocalEngine
from secure_fvi.errors import InputError, SecureFVIWarning
from secure_fvi.federated_model import Data, FederatedModel, Records, check_schemas_agree, read_data
from secure_fvi.local_posterior import LocalPosterior
from secure_fvi.randomness import derive_key
from secure_fvi.results import Result, summarise
from secure_fvi.runs.checkpoint import load_checkpoint, save_checkpoint
from secure_fvi.server import Server
from secure_fvi.silo import Silo

_OBJECTIVE_ROUNDS = 200  # the reported bound is the mean over so many last rounds
_EXPECTED_ROUNDS = 5_000  # of a run that stops by itself, for the choice to compile


class Progress(NamedTuple):
    """Told to `on_round` after every round. Derived from broadcasts and totals, except for the byte counts."""

    round: int
    max_rounds: int
    objective: float
    learning_rate: float
    r_hat: float | None
    bytes_up: int  # over all silos, since the start
    bytes_down: int
    phase: str


def fit(
    model: FederatedModel,
    silos: Sequence[Data],
    algorithm: SFVI | None = None,
    aggregation: SecureSum | None = None,
    privacy: None = None,
    seed: int = 0,
    *,
    silo_ids: Sequence[str] | None = None,
    record_ids: Sequence[Tensor] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float64,
    compile: bool | Literal["auto"] = "auto",
    threads: int | Literal["auto"] = "auto",
    checkpoint_dir: Path | None = None,
    checkpoint_seconds: float = 5.0,
    resume: bool = False,
    on_round: Callable[[Progress], None] | None = None,
) -> Result:
    """Fit `model` over `silos` (dicts of tensors, the keyword arguments of its Pyro function).

    With `record_ids` (int64 (N_j,) each, all different) the draws belong to the records, and the result does not
    depend on how they are spread over silos. Everything random follows from `seed`. Raises InputError for bad
    input, before any round; warns with SecureFVIWarning when the run ends without having converged.
    """
    began = time.monotonic()
    algorithm = algorithm if algorithm is not None else SFVI()
    aggregation = aggregation if aggregation is not None else Masked()
    if privacy is not None:
        raise InputError("privacy must be None: this version has no differential privacy yet")
    parties = build_parties(model, silos, algorithm, aggregation, seed, silo_ids, record_ids, device, dtype, compile)
    server, engine = parties
    count = choose_threads(work_of(silos, algorithm)) if threads == "auto" else threads
    with with_threads(count):
        done = _restore(server, engine, checkpoint_dir) if resume and checkpoint_dir is not None else _NOTHING_DONE
        began -= done.seconds
        objectives = list(done.objectives)
        last_save = time.monotonic()
        finished = done.finished
        while not finished:
            step = engine.run(server.round())
            finished = step.finished
            objectives = [*objectives[-_OBJECTIVE_ROUNDS + 1 :], step.objective]
            due = checkpoint_dir is not None and time.monotonic() - last_save >= checkpoint_seconds
            if checkpoint_dir is not None and (due or finished):
                _save(server, engine, checkpoint_dir, tuple(objectives), finished, time.monotonic() - began)
                last_save = time.monotonic()
            if on_round is not None:
                on_round(_progress(server, engine, algorithm, step))
    return _result(server, engine, algorithm, aggregation, objectives, time.monotonic() - began)


def build_parties(
    model: FederatedModel,
    silos: Sequence[Data],
    algorithm: SFVI,
    aggregation: SecureSum,
    seed: int = 0,
    silo_ids: Sequence[str] | None = None,
    record_ids: Sequence[Tensor] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float64,
    compile: bool | Literal["auto"] = "auto",
) -> tuple[Server, LocalEngine]:
    """A server and an engine with its silos, before the first round. Arguments as in `fit`."""
    names = list(silo_ids) if silo_ids is not None else [f"silo-{i + 1}" for i in range(len(silos))]
    if len(names) != len(silos):
        raise InputError(f"{len(names)} silo ids for {len(silos)} silos")
    ordered = check_silo_ids(names)
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"dtype must be torch.float32 or torch.float64, not {dtype}")
    if type(seed) is not int or not -(2**63) <= seed < 2**63:
        raise InputError("seed must be a whole number of at most 64 bits")
    read = {name: read_data(data, name, dtype) for name, data in zip(names, silos, strict=True)}
    schema = check_schemas_agree({name: schema for name, (schema, _) in read.items()})
    layout, start = read_layout(model, schema, dtype)
    where = _device(device)
    calls = (algorithm.iterations or _EXPECTED_ROUNDS) * len(silos)
    problem = Problem(
        model, schema.to(where), layout, LogDensity(model, layout, schema.to(where)), start, ordered, seed, dtype,
        where, choose_mode(compile, calls, work_of(silos, algorithm)),
    )  # fmt: skip
    server_sum, silo_sums = aggregation.local_parties(ordered)
    ids = _record_ids(names, [records for _, records in read.values()], record_ids)
    silo_program = algorithm.program(problem)  # one for all silos, so that they share traces; it holds no data
    built = {
        name: Silo(
            name,
            problem,
            silo_program,
            read[name][1],
            ids[name],
            _secret(seed, name, record_ids),
            silo_sums[name],
        )
        for name in ordered
    }
    return Server(problem, algorithm.program(problem), server_sum), LocalEngine(built)


def work_of(silos: Sequence[Data], algorithm: SFVI) -> int:
    """Numbers that the largest silo's step goes through."""
    sizes = [sum(v.numel() for v in silo.values() if isinstance(v, Tensor)) for silo in silos]
    return max(sizes, default=0) * algorithm.importance_samples


def _device(device: str | torch.device) -> torch.device:
    where = torch.device(device)
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device '{where}': PyTorch finds {torch.cuda.device_count()} CUDA devices here")
    return where


def _secret(seed: int, silo: str, record_ids: Sequence[Tensor] | None) -> bytes:
    """The sampling secret of a silo in this process, where all follow from the seed so that a run repeats.

    Records with ids of their own share one secret, which makes draws independent of the partition.
    """
    owner = b"all" if record_ids is not None else b"silo/" + silo.encode()
    return derive_key(seed.to_bytes(16, "big", signed=True), b"secret/" + owner)


def _record_ids(
    names: Sequence[str], records: Sequence[Records], record_ids: Sequence[Tensor] | None
) -> dict[str, npt.NDArray[np.int64]]:
    if record_ids is None:
        return {name: np.arange(r.size) for name, r in zip(names, records, strict=True)}
    if len(record_ids) != len(names):
        raise InputError(f"record_ids for {len(record_ids)} silos, data for {len(names)}")
    ids = {name: torch.as_tensor(i).cpu().numpy().astype(np.int64) for name, i in zip(names, record_ids, strict=True)}
    together = np.concatenate(list(ids.values()))
    if len(np.unique(together)) != len(together):
        raise InputError("a record id occurs twice; ids must differ over all silos")
    return ids


class _Done(NamedTuple):
    """What the loop itself must remember."""

    objectives: tuple[float, ...]
    finished: bool
    seconds: float
    exchanges: int
    bytes_up: dict[str, int]
    bytes_down: dict[str, int]


_NOTHING_DONE = _Done((), False, 0.0, 0, {}, {})


def _restore(server: Server, engine: LocalEngine, directory: Path) -> _Done:
    templates: dict[str, Any] = {f"silo/{name}": silo.local for name, silo in engine.silos.items()}
    states = load_checkpoint(directory, {"server": server.state, "run": _NOTHING_DONE, **templates})
    if states is None:
        return _NOTHING_DONE
    server.state = states["server"]
    for name, silo in engine.silos.items():
        silo.local = states[f"silo/{name}"]
    done: _Done = states["run"]
    engine.exchanges, engine.bytes_up, engine.bytes_down = done.exchanges, done.bytes_up, done.bytes_down
    return done


def _save(
    server: Server, engine: LocalEngine, directory: Path, objectives: tuple[float, ...], finished: bool, seconds: float
) -> None:
    for silo in engine.silos.values():
        silo.settle(server.state.accepted)
    done = _Done(objectives, finished, seconds, engine.exchanges, engine.bytes_up, engine.bytes_down)
    locals_ = {f"silo/{name}": silo.local for name, silo in engine.silos.items()}
    save_checkpoint(directory, server.state.algorithm.round, {"server": server.state, "run": done, **locals_})


def _progress(server: Server, engine: LocalEngine, algorithm: SFVI, step: Step) -> Progress:
    return Progress(
        server.state.algorithm.round,
        algorithm.most_rounds,
        step.objective,
        step.learning_rate,
        step.r_hat,
        sum(engine.bytes_up.values()),
        sum(engine.bytes_down.values()),
        step.phase,
    )


def _result(
    server: Server,
    engine: LocalEngine,
    algorithm: SFVI,
    aggregation: SecureSum,
    objectives: Sequence[float],
    seconds: float,
) -> Result:
    for silo in engine.silos.values():
        silo.settle(server.state.accepted)
    problem, state = server.problem, server.state.algorithm
    posterior = server.program.posterior(state)
    converged = server.program.converged(state)
    if not converged:
        warnings.warn(
            f"{algorithm.name} ended after {state.round} rounds without converging; "
            "raise max_iterations or iterations, or rescale the data",
            SecureFVIWarning,
            stacklevel=3,
        )
    tail = np.array(objectives)
    return Result(
        algorithm=algorithm.name,
        seed=problem.seed,
        silos=list(problem.silos),
        rounds=state.round,
        seconds=seconds,
        elbo=float(tail.mean()),
        converged=converged,
        posterior=summarise(problem, posterior),
        theta=problem.density.constrain(posterior.eta["loc"], posterior.theta)[1],
        metrics={
            "elbo_sd": float(tail.std()),
            "r_hat": state.monitor.r_hat,
            "records": server.state.records,
            "execution": problem.mode,
        },
        aggregation={
            "kind": aggregation.kind,
            "exchanges": engine.exchanges,
            "bytes_up_per_silo": max(engine.bytes_up.values()),
            "bytes_down_per_silo": max(engine.bytes_down.values()),
        },
        privacy=None,
        problem=problem,
        variational=posterior,
        local={name: LocalPosterior(silo, posterior) for name, silo in engine.silos.items()},
    )
