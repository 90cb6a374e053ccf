"""`fit`: one call from a model and the silos' data to a posterior, all parties in this process; `run`, round by round.

Rows or columns: a model of records (`FederatedModel`, or a bare Pyro function) is fitted over silos that hold different
people, `Columns` over silos that hold different columns of the same people.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Unpack, overload

import numpy as np
import numpy.typing as npt
import torch
from pydantic import AfterValidator, Field, StrictBool
from torch import Tensor

from secure_fvi.aggregation import Masked
from secure_fvi.aggregation.base import SecureSum, check_silo_ids
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.algorithms.base import Algorithm
from secure_fvi.algorithms.label_switching import of_one_order
from secure_fvi.algorithms.prior import NoStart
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.sfvi import SFVI
from secure_fvi.building import (
    Machine,
    build_problem,
    check_common,
    derived_secret,
    numbers_of,
    silo_secret,
    strong_enough,
    warn_of_large_delta,
    work_of,
)
from secure_fvi.checkpoints import Begun, options_of, text_of
from secure_fvi.columns import Columns, VerticalResult, column_parties, column_result
from secure_fvi.compiled import choose_threads
from secure_fvi.disclosure import disclose
from secure_fvi.discovery import as_model, read_layout
from secure_fvi.draws import LocalPosterior
from secure_fvi.driving import (
    Books,
    Options,
    Parties,
    Progress,
    Run,
    books_of,
    build_guards,
    complete,
    goes_on,
    kept_in,
)
from secure_fvi.engines.local import LocalEngine
from secure_fvi.engines.transport import Transport
from secure_fvi.errors import AggregationError, DataError, InputError, SecureFVIError, SecureFVIWarning
from secure_fvi.families.gaussian import FULL_UP_TO
from secure_fvi.federated_model import Data, FederatedModel, Records, Schema, check_repeats, read_data, rounded
from secure_fvi.options import Says, checked
from secure_fvi.privacy.gate import NoiseSource
from secure_fvi.privacy.settings import DP
from secure_fvi.progress import RunProgress
from secure_fvi.results import Result, assessed, counting, number_or_none, refined_draws, summarise
from secure_fvi.server import Server
from secure_fvi.silo import Silo, silo_view

Rows = FederatedModel | Callable[..., Any]
_LEAST_RATE = 0.005  # from which the default's learning rate is not lowered any more


class FitOptions(Options, total=False):
    """Keyword arguments of `fit`."""

    silo_ids: Sequence[str] | None
    """Names of the silos, silo-1, silo-2, ... by default."""
    record_ids: Sequence[Tensor] | None
    """int64 (N_j,) each, all different: draws belong to the records, and the result does not depend on how they are
    spread over silos."""


def _is_algorithm(value: Any) -> Any:
    if isinstance(value, type) or not hasattr(value, "declare"):
        raise ValueError("no algorithm")
    return value


class _Arguments(FitOptions, total=False):
    """Those and the rest, for `options.checked`."""

    algorithm: Annotated[Any, AfterValidator(_is_algorithm), Says("must be one, such as sf.PVI()")]
    privacy: Annotated[DP | None, Says("must be sf.RecordDP(...), sf.SiloDP(...) or None")]
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63), Says("must be a whole number of at most 64 bits")]
    on_round: Callable[[Progress], None] | None
    progress: Annotated[StrictBool | None, Says("must be True, False or None")]


@overload
def run(
    model: Columns,
    silos: Sequence[Data],
    algorithm: Any = None,
    aggregation: SecureSum | None = None,
    privacy: DP | None = None,
    seed: int = 0,
    **options: Unpack[FitOptions],
) -> Run[VerticalResult]: ...
@overload
def run(
    model: Rows,
    silos: Sequence[Data],
    algorithm: Any = None,
    aggregation: SecureSum | None = None,
    privacy: DP | None = None,
    seed: int = 0,
    **options: Unpack[FitOptions],
) -> Run[Result]: ...
def run(
    model: Any,
    silos: Sequence[Data],
    algorithm: Any = None,
    aggregation: SecureSum | None = None,
    privacy: DP | None = None,
    seed: int = 0,
    **options: Unpack[FitOptions],
) -> Any:
    """The run that `fit` drains: an iterator that yields `Progress` after every round, and `result()` at the end."""
    began = time.monotonic()
    chosen = {} if algorithm is None else {"algorithm": algorithm}
    seed = checked(_Arguments, {**chosen, "privacy": privacy, "seed": seed})["seed"]
    if isinstance(model, FederatedModel):  # once: tables are large
        model.check_declared(privacy)
        names, _ = named_silos(options.get("silo_ids"), _count(silos))
        silos = list(model.prepared(dict(zip(names, silos, strict=True))).values())
    sums = aggregation if aggregation is not None else Masked()
    given = complete(_of_run(options))
    if algorithm is None:
        algorithm = default_algorithm(model, silos, privacy, given["dtype"])

    def begun() -> Begun:
        names, _ = named_silos(options.get("silo_ids"), len(silos))
        told = {"seed": repr(seed), "dtype": str(given["dtype"]), "silos": ", ".join(sorted(names))}
        told |= {"model": text_of(model), "record_ids": text_of(options.get("record_ids"))}
        if privacy is not None:  # never the key
            told["noise"] = NoiseSource(given["noise_key"]).status
        told |= options_of("algorithm", algorithm) | options_of("aggregation", sums) | options_of("privacy", privacy)
        return told | {f"data of silo '{name}'": text_of(data) for name, data in zip(names, silos, strict=True)}

    kept = kept_in(given, begun) if given["resume"] else None
    if kept is not None:
        kept.check()
    parties = build_parties(model, silos, algorithm, sums, seed, privacy, **options)
    threads = given["threads"]
    if threads == "auto":
        work = numbers_of(silos) if isinstance(model, Columns) else work_of(silos, algorithm, privacy)
        threads = choose_threads(work)

    def conclude(done: Run[Any]) -> Any:
        if isinstance(model, Columns):
            return column_result(done, algorithm, sums)
        return result_of(done.server, done.engine, algorithm, sums, done)

    return Run(
        parties, conclude, kept or kept_in(given, begun),
        resume=given["resume"], block=(given["books"] or Books()).block, threads=threads, began=began,
    )  # fmt: skip


@overload
def fit(
    model: Columns,
    silos: Sequence[Data],
    algorithm: Any = None,
    aggregation: SecureSum | None = None,
    privacy: DP | None = None,
    seed: int = 0,
    *,
    on_round: Callable[[Progress], None] | None = None,
    progress: bool | None = None,
    **options: Unpack[FitOptions],
) -> VerticalResult: ...
@overload
def fit(
    model: Rows,
    silos: Sequence[Data],
    algorithm: Any = None,
    aggregation: SecureSum | None = None,
    privacy: DP | None = None,
    seed: int = 0,
    *,
    on_round: Callable[[Progress], None] | None = None,
    progress: bool | None = None,
    **options: Unpack[FitOptions],
) -> Result: ...
def fit(
    model: Any,
    silos: Sequence[Data],
    algorithm: Any = None,
    aggregation: SecureSum | None = None,
    privacy: DP | None = None,
    seed: int = 0,
    *,
    on_round: Callable[[Progress], None] | None = None,
    progress: bool | None = None,
    **options: Unpack[FitOptions],
) -> Any:
    """Fit `model` over `silos` (dicts of tensors or arrays, the keyword arguments of its Pyro function, or frames).

    Without an `algorithm` it is that of `default_algorithm`; where that runs off, or has no normal q to start from (a
    flat prior, say), a warning says so, and SFVI begins
    anew in place of partitioned VI, or at a fifth of its own learning rate, twice at most, unless there is a
    `checkpoint_dir`. A bare Pyro function is taken as a model
    of global and record-level sites alone, whose record plate is the one plate around all that it observes. `Columns`
    is a model of silos that hold different columns of the same people: silos are dicts of the arguments of each silo's
    predictor, row i the same person everywhere.

    `on_round` is told after every round; `progress` shows how the run is going, on stderr: a bar on a terminal, a line
    every ten seconds elsewhere; by default the bar alone, and nothing where stderr is no terminal. `options` are those
    of `FitOptions` and `driving.Options`. Everything random follows from `seed`, but for what protects records: under
    `privacy` (`RecordDP`, `SiloDP`) noise and batches come from the operating system, unless a test gives `noise_key`,
    and the job is charged to `books`. Raises InputError for bad input and BudgetError for a budget that does not hold
    the job, before any round; warns with SecureFVIWarning when the run ends without having converged.
    """
    checked(_Arguments, {"on_round": on_round, "progress": progress})

    rounds = 0

    def drained(by: Any) -> Any:
        nonlocal rounds
        going, rounds = run(model, silos, by, aggregation, privacy, seed, **options), 0
        with RunProgress(None if progress is None else not progress) as shown:
            for step in going:
                rounds = step.round + 1
                shown.update(step)
                if on_round is not None:
                    on_round(step)
        return going.result()

    kept = options.get("checkpoint_dir") is not None  # what began there goes on there, or not at all
    if algorithm is not None or kept or isinstance(model, Columns) or privacy is not None:
        return drained(algorithm)
    by: Any = None
    while True:
        try:
            return drained(by)
        except (AggregationError, NoStart) as error:
            if getattr(error, "uncentred", False):  # which many rounds more do not cure
                raise
            before: Any = by or default_algorithm(model, silos, privacy, complete(_of_run(options))["dtype"])
            if before.name == "sfvi":
                if not rounds or before.learning_rate < _LEAST_RATE:
                    raise
                by = replace(before, learning_rate=before.learning_rate / 5)
                said = f"SFVI, the default here, ran off after {rounds} rounds ({error}); it begins anew at a fifth of "
                said += f"its learning rate, {by.learning_rate:g}"
            else:
                by = SFVI()
                said = f"partitioned VI, the default here, was refused ({error}); SFVI goes on in its place, for many "
                said += "more rounds"
            warnings.warn(said, SecureFVIWarning, stacklevel=2)


def default_algorithm(
    model: Rows | Columns, silos: Sequence[Data], privacy: DP | None = None, dtype: torch.dtype = torch.float64
) -> Algorithm:
    """What fits `model` where nobody says otherwise; a result names it. Found by the shapes of the data alone.

    What the model itself names; else partitioned VI, where that can be: without privacy, `pyro.param`s, a start of the
    program's own and an encoder, of as many global dimensions as have a full covariance, `FULL_UP_TO`. Up to
    `weighing.UP_TO` of them its final q is weighed and refined; of more it is not, and at rest not assessed.
    Else SFVI, and so for data that no run takes, which are refused where they are read.
    """
    own = getattr(model, "default_algorithm", None)
    if own is not None:
        return own
    assert not isinstance(model, Columns)
    given = model if isinstance(model, FederatedModel) else None
    if privacy is not None or (given is not None and (given.start or given.encoder is not None)):
        return SFVI()
    try:
        with warnings.catch_warnings():  # the run says them
            warnings.simplefilter("ignore", SecureFVIWarning)
            rows = dict(zip(named_silos(None, _count(silos))[0], silos, strict=True))
            name, first = next(iter((rows if given is None else given.prepared(rows)).items()))
            schema = read_data(first, name, dtype)[0]
            layout, start = read_layout(as_model(model, schema, dtype), schema, dtype)
    except (SecureFVIError, StopIteration):
        return SFVI()
    return SFVI() if start.theta or layout.size("global") > FULL_UP_TO else PVI()


def build_parties(
    model: Rows | Columns,
    silos: Sequence[Data],
    algorithm: Any,
    aggregation: SecureSum,
    seed: int = 0,
    privacy: DP | None = None,
    **options: Unpack[FitOptions],
) -> Parties[LocalEngine]:
    """A server, an engine with its silos and their gates, before the first round. Arguments as in `fit`."""
    of = complete(_of_run(options))
    checked(_Arguments, {name: options.get(name) for name in ("silo_ids", "record_ids")})
    names, _ = named_silos(options.get("silo_ids"), _count(silos))
    if isinstance(model, Columns) != hasattr(algorithm, "resolved"):
        raise InputError(
            f"{getattr(algorithm, 'name', algorithm)} does not fit this model: sf.Columns takes sf.Vertical() or "
            "sf.Soul(), and these take nothing else"
        )
    record_ids = options.get("record_ids")
    if isinstance(model, Columns):
        if record_ids is not None:
            raise InputError("record_ids are for silos that hold different records; columns are aligned by row")
        return column_parties(model, names, silos, algorithm, aggregation, seed, privacy, of)
    rows: Mapping[str, Data] = dict(zip(names, silos, strict=True))
    if isinstance(model, FederatedModel):
        model.check_declared(privacy)
        rows = model.prepared(rows)
    return _row_parties(model, rows, record_ids, algorithm, aggregation, seed, privacy, of)


def _row_parties(
    model: Rows, silos: Mapping[str, Data], record_ids: Sequence[Tensor] | None, algorithm: Algorithm,
    aggregation: SecureSum, seed: int, privacy: DP | None, of: Options,
) -> Parties[LocalEngine]:  # fmt: skip
    names, ordered, noise_key, dtype = list(silos), tuple(sorted(silos)), of["noise_key"], of["dtype"]
    disclosed = disclose(algorithm, aggregation, privacy, len(ordered))
    check_common(seed, dtype, of["device"], privacy)
    read = {name: read_data(data, name, dtype) for name, data in silos.items()}
    schema = check_schemas_agree({name: schema for name, (schema, _) in read.items()})
    machine = Machine(of["device"], dtype, of["compile"], work_of(list(silos.values()), algorithm, privacy))
    problem = build_problem(model, schema, algorithm, ordered, seed, privacy, machine)
    program, noise = algorithm.server(problem), NoiseSource(noise_key)
    terms = program.terms
    disclosed = disclosed.of_program(program.tables, terms, aggregation)
    server_sum, silo_sums = local_parties(strong_enough(aggregation, disclosed), ordered, check_once=True)
    warn_of_large_delta(terms, {name: records.size for name, (_, records) in read.items()})
    ids = _record_ids(names, [records for _, records in read.values()], record_ids, getattr(model, "columns", None))
    books = books_of(of, bool(terms))
    guards = build_guards(
        ordered, program.tables, terms, algorithm.name, books, noise, disclosed.rows, going_on=goes_on(of)
    )
    # One for all silos, so that they share traces; it holds no data. But data decide whether a trace is kept, and how
    # calls that run together round: under privacy no silo's may decide that for another.
    silo_program, built = algorithm.silo(problem), dict[str, Silo]()
    apart = privacy is not None and silo_program.traced_by_data
    for name in ordered:
        silo_program = algorithm.silo(problem) if apart and built else silo_program
        own = b"all" if record_ids is not None else b"silo/" + name.encode()
        secret = silo_secret(lambda own=own: derived_secret(seed, own), bool(terms), noise_key)  # type: ignore[misc]
        view = silo_view(name, problem, read[name][1], ids[name], secret)
        released = guards.released(name)
        built[name] = Silo(name, silo_program, view, silo_sums[name], guards.gates[name], released=released)
    engine = LocalEngine(built, of["batch_silos"] and not apart)
    return Parties(Server(problem, program, server_sum, noise), engine, guards)


def _of_run(options: FitOptions) -> Options:
    """Those that are not of `fit` alone."""
    return {k: v for k, v in options.items() if k not in ("silo_ids", "record_ids")}  # type: ignore[return-value]


def _count(silos: Any) -> int:
    """How many; raises InputError for what is no list of silos."""
    if isinstance(silos, (Mapping, str, bytes, Tensor)) or hasattr(silos, "columns") or not hasattr(silos, "__len__"):
        raise InputError(
            f"silos is a list of each silo's data, not {type(silos).__name__}; names go into silo_ids, as in "
            "fit(model, list(data.values()), silo_ids=list(data))"
        )
    return len(silos)


def _record_ids(
    names: Sequence[str], records: Sequence[Records], record_ids: Sequence[Tensor] | None, columns: Any
) -> dict[str, npt.NDArray[np.int64]]:
    if record_ids is None:
        for name, r in zip(names, records, strict=True):
            check_repeats(r.rows, name, columns)
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
    done: Run[Any],
) -> Result:
    """What a run that has ended found. Warns with SecureFVIWarning where `assessed` does."""
    problem, state = server.problem, server.state.algorithm
    posterior, claim = counting(server, state, server.program.posterior(state))
    said = of_one_order(server.program.verdict(state), problem, posterior)
    verdict = assessed(said, algorithm.name, server.rounds)
    tail = np.array(done.objectives)
    metrics, refined = server.program.metrics(state), refined_draws(problem, posterior)
    # A run of few rounds has one good estimate, its last; a mean over rounds would take the approach in.
    bound = metrics["bound"] if "bound" in metrics else tail.mean()
    return Result(
        algorithm=algorithm.name,
        seed=problem.seed,
        silos=list(problem.silos),
        rounds=server.rounds,
        seconds=done.seconds,
        elbo=None if bound is None else number_or_none(bound),
        **verdict,
        posterior=summarise(problem, posterior, refined),
        theta=problem.density.constrain(posterior.eta["loc"], posterior.theta)[1],
        metrics={
            "elbo_sd": number_or_none(tail.std()),
            **metrics,
            "records": server.state.records,
            "execution": problem.mode,
        },
        aggregation={"kind": aggregation.kind, **engine.traffic},
        privacy=claim,
        problem=problem,
        variational=posterior,
        refined=refined,
        replicated=server.program.replicated(state),
        local={name: LocalPosterior(silo, problem, posterior) for name, silo in engine.silos.items()},
    )


def whole_ids(ids: Any, silo: str) -> npt.NDArray[np.int64]:
    """A silo's record ids as int64 (N,). Raises DataError, which counts rows, where some are not whole numbers."""
    try:
        found = torch.as_tensor(ids).cpu().numpy()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"silo '{silo}': record_ids must be whole numbers, one a record") from None
    if found.ndim != 1 or found.dtype.kind not in "iuf":
        raise InputError(f"silo '{silo}': record_ids must be whole numbers, one a record")
    bad = int((~(found >= 0) | (found % 1 != 0) | (found >= 2**63)).sum())
    long = int(rounded(found).sum())
    if long and not bad:
        raise DataError(
            f"silo '{silo}': record_ids are floats of too many digits to be told apart in {long} of {len(found)} rows"
        )
    if bad:
        raise DataError(f"silo '{silo}': record_ids are no whole numbers of at least 0 in {bad} of {len(found)} rows")
    return found.astype(np.int64)


def named_silos(silo_ids: Sequence[str] | None, count: int) -> tuple[list[str], tuple[str, ...]]:
    """The ids of `count` silos, made up where none are given, and the same sorted. Raises InputError for bad ones."""
    names = list(silo_ids) if silo_ids is not None else [f"silo-{i + 1}" for i in range(count)]
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"silo ids are texts, not {type(name).__name__}: {name!r}")
    if len(names) != count:
        raise InputError(f"{len(names)} silo ids for {count} silos")
    return names, check_silo_ids(names)


def check_schemas_agree(schemas: Mapping[str, Schema]) -> Schema:
    """The one schema of all silos; raises InputError naming the first silo and field that differ."""
    (first_id, first), *others = schemas.items()
    for silo, schema in others:
        if {f[0] for f in schema.fields} != {f[0] for f in first.fields}:
            raise InputError(
                f"silos '{first_id}' and '{silo}' hold different tensors: "
                f"{sorted(f[0] for f in first.fields)} and {sorted(f[0] for f in schema.fields)}"
            )
        for mine, theirs in zip(first.fields, schema.fields, strict=True):
            if mine != theirs:
                raise InputError(
                    f"'{mine[0]}' has shape {mine[1]} a record and type {mine[2]} at silo '{first_id}', "
                    f"but {theirs[1]} and {theirs[2]} at silo '{silo}'; give it as one at all silos"
                )
        for name in first.constants.keys() | schema.constants.keys():
            if not _same(first.constants.get(name), schema.constants.get(name)):
                listed = isinstance(schema.constants.get(name), list)
                hint = "; a list is one: use torch.tensor for a row a record" if listed else ""
                raise InputError(f"shared value '{name}' differs between silos '{first_id}' and '{silo}'{hint}")
    return first


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    try:
        return type(a) is type(b) and bool(a == b)
    except (RuntimeError, TypeError, ValueError):  # containers of arrays, which do not say whether they are equal
        return False
