"""`fit_vertical`: silos that hold different columns of the same people, all parties in this process.

Records must be aligned: row i is the same person at every silo (`secure_fvi.alignment`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation import Masked
from secure_fvi.aggregation.base import SecureSum
from secure_fvi.algorithms.vertical.config import Vertical
from secure_fvi.algorithms.vertical.frame import PULL_PHASE, VerticalFrame, VerticalProblem, VerticalView
from secure_fvi.algorithms.vertical.likelihoods import Likelihood
from secure_fvi.algorithms.vertical.predictors import Predictor, Program, linear
from secure_fvi.algorithms.vertical.server_program import VerticalServerProgram
from secure_fvi.algorithms.vertical.silo import Response
from secure_fvi.algorithms.vertical.silo_program import VerticalSiloProgram
from secure_fvi.algorithms.vertical.soul import Soul
from secure_fvi.algorithms.vertical.soul_program import SoulSiloProgram
from secure_fvi.building import check_common, device_named
from secure_fvi.checkpoints import FolderCheckpoints
from secure_fvi.compiled import choose_mode, choose_threads
from secure_fvi.compiled import threads as with_threads
from secure_fvi.contracts import check_predictor, check_predictor_at_silo
from secure_fvi.disclosure import disclose
from secure_fvi.driving import Progress, drive
from secure_fvi.engines.local import LocalEngine
from secure_fvi.errors import InputError
from secure_fvi.federated_model import Shared
from secure_fvi.fitting import derived_secret, named_silos
from secure_fvi.guarding import Books, Guards, build_guards, silo_secret, strong_enough
from secure_fvi.privacy.noise import NoiseSource
from secure_fvi.privacy.settings import DP
from secure_fvi.randomness import UNIT_ID, KeyedDraws, derive_key
from secure_fvi.server import Server
from secure_fvi.silo import Silo
from secure_fvi.trees import Params
from secure_fvi.vertical_results import VerticalResult, vertical_result

#: The party that holds a private response, in the ledger.
RESPONSE_HOLDER = "response-holder"


class VerticalParties(NamedTuple):
    """All parties before the first round."""

    problem: VerticalProblem
    server: Server
    engine: LocalEngine
    guards: Guards
    holder: Guards | None  # of a private response, under privacy


def fit_vertical(
    likelihood: Likelihood,
    silos: Sequence[Mapping[str, Tensor | Shared]],
    response: Tensor,
    predictors: Sequence[Program] | None = None,
    offset: Tensor | None = None,
    algorithm: Vertical | Soul | None = None,
    aggregation: SecureSum | None = None,
    privacy: DP | None = None,
    seed: int = 0,
    *,
    silo_ids: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float64,
    compile: bool | Literal["auto"] = "auto",
    threads: int | Literal["auto"] = "auto",
    checkpoint_dir: Path | None = None,
    checkpoint_seconds: float = 5.0,
    resume: bool = False,
    on_round: Callable[[Progress], None] | None = None,
    books: Books | None = None,
    noise_key: bytes | None = None,
) -> VerticalResult:
    """Fit p(response | sum of the silos' predictors), each from its own columns (Hassan et al. 2024).

    silos: dicts of tensors (N, ...), the arguments of each silo's predictor, and of `sf.Shared` values that all its
    rows share; response and offset (N,), held by the
    server, and under `algorithm.response = "shared"` by every silo. predictors: Pyro programs, `linear()` by default.
    Everything else as in `fit`. Under `RecordDP` one person's columns at one silo, and where it is private the label,
    are protected (adjacency: values replaced).
    """
    began = time.monotonic()
    algorithm = algorithm if algorithm is not None else Vertical()
    aggregation = aggregation if aggregation is not None else Masked()
    books = books if books is not None else Books()
    parties = build_vertical_parties(
        likelihood, silos, response, predictors, offset, algorithm, aggregation, privacy, seed,
        silo_ids, device, dtype, compile, books, noise_key,
    )  # fmt: skip
    count = choose_threads(numbers_of(silos)) if threads == "auto" else threads
    checkpoints = None if checkpoint_dir is None else FolderCheckpoints(checkpoint_dir, checkpoint_seconds)
    with with_threads(count):
        rounds = drive(
            parties.server, parties.engine, parties.guards, algorithm, privacy is not None, books.block,
            checkpoints, resume, on_round, began,
        )  # fmt: skip
        if parties.holder is not None:
            parties.holder.close("finished")
        return vertical_result(parties, algorithm, aggregation, rounds)


def build_vertical_parties(
    likelihood: Likelihood,
    silos: Sequence[Mapping[str, Tensor | Shared]],
    response: Tensor,
    predictors: Sequence[Program] | None,
    offset: Tensor | None,
    algorithm: Vertical | Soul,
    aggregation: SecureSum,
    privacy: DP | None = None,
    seed: int = 0,
    silo_ids: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float64,
    compile: bool | Literal["auto"] = "auto",
    books: Books | None = None,
    noise_key: bytes | None = None,
) -> VerticalParties:
    """Server, engine and gates. Arguments as in `fit_vertical`; raises InputError and BudgetError as `fit` does."""
    names, ordered = named_silos(silo_ids, len(silos))
    algorithm = algorithm.resolved(likelihood)
    disclosed = disclose(algorithm, aggregation, privacy, len(ordered))
    if getattr(aggregation, "max_missing", 0):
        raise InputError("max_missing must be 0: a sum that lacks one silo's columns predicts nobody")
    check_common(seed, dtype)
    where = device_named(device)
    found = {n: _columns(n, data, dtype, where) for n, data in zip(names, silos, strict=True)}
    columns = {name: rows for name, (rows, _) in found.items()}
    programs = list(predictors) if predictors is not None else [linear(likelihood.columns)] * len(silos)
    if len(programs) != len(silos):
        raise InputError(f"{len(programs)} predictors for {len(silos)} silos")
    programs = [
        functools.partial(p, **shared) if shared else p for p, (_, shared) in zip(programs, found.values(), strict=True)
    ]
    known = _response(likelihood, response, offset, dtype, where)
    for name, rows in columns.items():
        size = len(next(iter(rows.values())))
        if size != len(known.y):
            raise InputError(
                f"silo '{name}' has {size} records, the response {len(known.y)}: align them first, so that row i is "
                "the same person everywhere (docs/vertical-alignment.md)"
            )
    mode = choose_mode(compile, algorithm.expected_calls * len(silos), numbers_of(silos))
    problem = VerticalProblem(likelihood, ordered, len(known.y), seed, dtype, where, mode, privacy)
    frame, noise = VerticalFrame(algorithm, problem), NoiseSource(noise_key)
    disclosed.of_program(frame.tables, {p: t for p, t in frame.terms.items() if p in frame.tables}, aggregation)
    server_sum, silo_sums = strong_enough(aggregation, frame.terms).local_parties(ordered)
    books = books or Books()
    guards = build_guards(ordered, frame.tables, frame.terms, algorithm.name, books, noise)
    holder = None
    if frame.terms and algorithm.response == "private":
        terms = frame.response_terms()
        tables = {PULL_PHASE: terms[PULL_PHASE].table(frame.z_blocks, [])}
        holder = build_guards((RESPONSE_HOLDER,), tables, terms, algorithm.name, books, noise)
    built: dict[str, Silo] = {}
    shared: dict[Any, VerticalSiloProgram | SoulSiloProgram] = {}
    for name, program in zip(names, programs, strict=True):
        secret = silo_secret(lambda name=name: derived_secret(seed, name, None), bool(frame.terms), noise_key)  # type: ignore[misc]
        seen = known if algorithm.response == "shared" else ()
        # Silos of one program and shape share its traces; it holds no data.
        rows = columns[name]
        key = (program, tuple((k, v.shape[1:], v.dtype) for k, v in rows.items()))
        if key not in shared:
            shared[key] = _silo_program(algorithm, problem, _predictor(name, program, rows, likelihood, frame))
        if not frame.terms:
            check_predictor_at_silo(shared[key].predictor, rows, name)
        view, silo_program = _view(name, rows, seen, secret), shared[key]
        released = guards.released(name)
        built[name] = Silo(name, silo_program, view, silo_sums[name], guards.gates[name], released=released)
    gate = holder.gates[RESPONSE_HOLDER] if holder is not None else None
    server = Server(problem, VerticalServerProgram(algorithm, problem, known, gate), server_sum, noise)
    return VerticalParties(problem, server, LocalEngine({n: built[n] for n in ordered}), guards, holder)


def _predictor(silo: str, program: Program, rows: Params, likelihood: Likelihood, frame: VerticalFrame) -> Predictor:
    """Read and checked on made data. Raises InputError, which names the silo."""
    try:
        found = Predictor(program, rows, likelihood.columns)
        check_predictor(found, alone=bool(frame.terms))
    except InputError as error:
        raise InputError(f"silo '{silo}': {error}") from error
    return found


def _silo_program(
    algorithm: Vertical | Soul, problem: VerticalProblem, predictor: Predictor
) -> VerticalSiloProgram | SoulSiloProgram:
    if isinstance(algorithm, Soul):
        return SoulSiloProgram(algorithm, problem, predictor)
    return VerticalSiloProgram(algorithm, problem, predictor)


def _view(silo: str, rows: Params, response: Response | tuple[()], secret: bytes) -> VerticalView:
    size = len(next(iter(rows.values())))
    return VerticalView(
        silo,
        rows,
        response,
        size,
        KeyedDraws(secret, b"vertical/records/" + silo.encode(), np.arange(size)),
        KeyedDraws(secret, b"vertical/silo/" + silo.encode(), np.array([UNIT_ID])),
        int.from_bytes(derive_key(secret, b"vertical/start/" + silo.encode())[:7], "big"),
    )


def _columns(
    silo: str, data: Mapping[str, Tensor | Shared], dtype: torch.dtype, device: torch.device
) -> tuple[Params, Params]:
    """The silo's rows and the values that they share, checked; numbers as `dtype`, whole numbers as they are. No value
    is quoted."""

    def moved(value: Tensor) -> Tensor:
        return value.to(device, dtype) if value.is_floating_point() else value.to(device)

    shared = {name: moved(torch.as_tensor(v.tensor)) for name, v in data.items() if isinstance(v, Shared)}
    given = {name: v for name, v in data.items() if isinstance(v, Tensor) and v.dim() > 0}
    if not given or len(given) + len(shared) < len(data):
        raise InputError(f"silo '{silo}': give its columns as a dict of tensors with one row a record")
    sizes = {name: len(v) for name, v in given.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(f"silo '{silo}': all tensors must have one row a record, but sizes are {sizes}")
    if not next(iter(sizes.values())):
        raise InputError(f"silo '{silo}': no records")
    rows = {}
    for name, value in given.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise InputError(f"silo '{silo}': '{name}' holds NaN or infinite values; remove or impute them first")
        rows[name] = moved(value)
    return rows, shared


def _response(
    likelihood: Likelihood, response: Tensor, offset: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Response:
    y = torch.as_tensor(response).to(device, dtype)
    likelihood.check(y)
    off = torch.zeros_like(y) if offset is None else torch.as_tensor(offset).to(device, dtype)
    if off.shape != y.shape or not bool(torch.isfinite(off).all()):
        raise InputError(f"the offset must be finite, one number a record, shape ({len(y)},)")
    return Response(y, off)


def numbers_of(silos: Sequence[Mapping[str, Any]]) -> int:
    """That the largest silo's step goes through."""
    return max((sum(v.numel() for v in data.values() if isinstance(v, Tensor)) for data in silos), default=0)
