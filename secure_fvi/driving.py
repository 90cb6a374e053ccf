"""The loop over rounds that all algorithms and engines share: options, progress, checkpoints, the end of a job; and the
books of a job in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

import torch

from secure_fvi.aggregation.base import BlockTable
from secure_fvi.aggregation.store import SqliteStore
from secure_fvi.algorithms.base import Step
from secure_fvi.building import Guards, declared_job
from secure_fvi.checkpoints import Begun, Checkpoints, latest_round
from secure_fvi.compiled import threads as with_threads
from secure_fvi.engines.transport import Transport
from secure_fvi.errors import BudgetError, InputError
from secure_fvi.key_files import key_path, load_key
from secure_fvi.options import Count, NotNegative, Says, check, checked
from secure_fvi.privacy.gate import Charge, Gate, NoiseSource
from secure_fvi.privacy.ledger import Ledger
from secure_fvi.privacy.terms import Terms
from secure_fvi.privacy.witness import Witness
from secure_fvi.server import Server

#: In a folder of checkpoints, of a private run for which nobody named a ledger.
_LEDGER = "ledger.sqlite"
_log = logging.getLogger(__name__)
_OBJECTIVE_ROUNDS = 200  # the reported bound is the mean over so many last rounds
R = TypeVar("R")
E = TypeVar("E", bound=Transport)


@dataclass(frozen=True)
class Books:
    """Where a job is charged.

    path: the ledger's file; None stands for one in the folder that the run is kept in, and where it is kept nowhere for
    a count in memory, of this run alone. data_set: the id under which each silo's
    policy knows the population; its budget holds across jobs, and where none was set the job brings its own. job: the
    job's id; a job that goes on after a crash has the same one. block: releases reserved by one durable row, and
    rounds between two checkpoints; a crash loses what is left of a block.
    """

    path: Path | None = None
    data_set: str = "data"
    job: str = "job"
    block: Count = 8

    def __post_init__(self) -> None:
        if isinstance(self.path, str):
            object.__setattr__(self, "path", Path(self.path))
        check(self)


class Options(TypedDict, total=False):
    """How a run is computed, kept and charged: keyword arguments of `fit` and `run`. None changes what is inferred."""

    device: str | torch.device
    """Where tensors lie; "cpu" by default."""
    dtype: Annotated[torch.dtype, Says("must be torch.float32 or torch.float64")]
    """torch.float64, the default, or torch.float32."""
    compile: bool | Literal["auto"]
    """Whether the silos' steps are compiled; "auto", the default, weighs the time that it takes, under privacy by the
    job's options alone."""
    threads: Annotated[Count | Literal["auto"], Says("must be 'auto' or a whole number of at least 1")]
    """Of PyTorch; "auto", the default, goes by the size of the data, and is 1 under privacy, which hides that size."""
    batch_silos: bool
    """Silos of equal shape compute together, mapped by `vmap`: for many small silos, above all on a GPU. The posterior
    is the same up to rounding. Under privacy they compute one by one all the same."""
    checkpoint_dir: Annotated[str | os.PathLike[str] | None, Says("must be the path of a folder")]
    """A folder that the run is kept in, and goes on from with `resume`."""
    checkpoint_seconds: NotNegative
    """Between two checkpoints, 5 by default; under privacy one comes every `books.block` rounds."""
    resume: bool
    """Go on where the folder says that the run was."""
    books: Books | None
    """Where a job under privacy is charged; without a ledger's path in `checkpoint_dir`, where there is one, and in
    memory otherwise, for this run alone."""
    noise_key: bytes | None
    """For tests: what noise and batches under privacy follow from, in place of the operating system."""


DEFAULTS: Options = {
    "device": "cpu", "dtype": torch.float64, "compile": "auto", "threads": "auto", "batch_silos": False,
    "checkpoint_dir": None, "checkpoint_seconds": 5.0, "resume": False, "books": None, "noise_key": None,
}  # fmt: skip


def complete(given: Options) -> Options:
    """`given`, with defaults for the rest. Raises TypeError for an option that there is not, as Python does, and
    InputError for one of another type."""
    for name in given:
        if name not in DEFAULTS:
            more = "silo_ids, record_ids, and fit on_round and progress"
            raise TypeError(f"'{name}' is no option of a run; it takes {', '.join(DEFAULTS)}, {more}")
    return {**DEFAULTS, **checked(Options, given)}  # type: ignore[typeddict-item]


def books_of(options: Options, private: bool) -> Books:
    """Where a run of complete `options` is charged: one that is kept needs a ledger, which outlives its process too.

    Raises InputError where a run that begins anew would find the ledger of the one before it."""
    books = options["books"] or Books()
    folder = _folder(options) if private and books.path is None else None
    if folder is None:
        return books
    if not options["resume"] and (folder / _LEDGER).exists():
        raise InputError(
            f"checkpoint_dir '{folder}' holds a private run and what it was charged: go on with it by resume=True, or "
            "give another folder"
        )
    return dataclasses.replace(books, path=folder / _LEDGER)


def goes_on(options: Options) -> bool:
    """Whether a run of complete `options` goes on from a checkpoint."""
    folder = options["checkpoint_dir"]
    return options["resume"] and folder is not None and latest_round(Path(folder)) is not None


class Parties(NamedTuple, Generic[E]):
    """The parties of a job: the server, the engine that carries its messages, and gates where silos are in this
    process."""

    server: Server
    engine: E
    guards: Guards


class Progress(NamedTuple):
    """What a run yields after every round. Derived from broadcasts and totals, except for the byte counts."""

    round: int
    max_rounds: int
    objective: float
    learning_rate: float
    r_hat: float | None
    bytes_up: int  # over all silos, since the start
    bytes_down: int
    phase: str
    cohort: int  # silos in the newest sum
    ending: bool | None = None  # whether rounds are over and sums that end the job are left; None: it has no such sums
    #: Of those sums, so many done and so many at most; None before them, or where this process began among them.
    finals: tuple[int, int] | None = None


class Run(Generic[R]):
    """A job between its parties, a round at each step of the iterator, until its algorithm is finished.

        run = sf.run(model, silos)
        for progress in run: ...
        result = run.result()

    In between, server and silos are as they are after that round. Whoever breaks off goes on from the last checkpoint,
    where the run has any.
    """

    def __init__(
        self,
        parties: Parties[Any],
        conclude: Callable[[Run[R]], R],
        checkpoints: Checkpoints | None = None,
        *,
        resume: bool = False,
        block: int = 1,
        threads: int | None = None,
        began: float | None = None,
    ) -> None:
        """conclude: makes the result. block: rounds between two checkpoints under privacy, where a round that is run
        again is released, and paid for, again. threads: of PyTorch in rounds and result. began: a time of the
        monotonic clock."""
        self.server, self.engine, self.guards = parties
        self._conclude, self._checkpoints = conclude, checkpoints
        self._block, self._threads = block, threads
        skipped = max(self.server.state.last_index, self.guards.last_index)
        resumed = resume and checkpoints is not None
        done = _restore(self.server, self.engine, checkpoints) if resumed and checkpoints else NOTHING_DONE
        self.server.skip_to(skipped)
        if not self.server.rounds and (why := self.server.program.uncounted):
            _log.warning("under privacy what is found will not count the noise: %s", why)
        self._began = (time.monotonic() if began is None else began) - done.seconds
        self.objectives, self.finished, self._closed = list(done.objectives), done.finished, False
        #: Sums that end the job, done in this process; None where some may have been before it.
        self._finals: int | None = None if self._ending() else 0
        self._last_save = time.monotonic()

    def __iter__(self) -> Iterator[Progress]:
        return self

    def __next__(self) -> Progress:
        if self.finished:
            self.close()
            raise StopIteration
        with self._with_threads():
            step = self.engine.run(self.server.round())
        self.finished = step.finished
        phase = self.server.program.order.phases.get(step.phase)
        if self._finals is not None and phase is not None and phase.ends:
            self._finals += 1
        self.objectives = [*self.objectives[-_OBJECTIVE_ROUNDS + 1 :], step.objective]
        if self._checkpoints is not None and (self.finished or self._due(self._checkpoints)):
            self._save(self._checkpoints)
        return self._progress(step)

    @property
    def seconds(self) -> float:
        """Since the beginning, those of a run that this one goes on from with them."""
        return time.monotonic() - self._began

    def result(self) -> R:
        """What was found, after all rounds that are left. Warns with SecureFVIWarning where it deserves less trust."""
        for _ in self:
            pass
        with self._with_threads():
            return self._conclude(self)

    def close(self) -> None:
        """End the job at the silos' ledgers, and tell silos what was used. Done by the iterator at its end."""
        if not self._closed:
            self._closed = True
            self.guards.close("finished")
            self.engine.silo_states(self.server.state.accepted)

    def _with_threads(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._threads is None else with_threads(self._threads)

    def _due(self, checkpoints: Checkpoints) -> bool:
        if self.server.program.terms and checkpoints.seconds > 0:
            return self.server.rounds % self._block == 0
        return time.monotonic() - self._last_save >= checkpoints.seconds

    def _save(self, checkpoints: Checkpoints) -> None:
        engine = self.engine
        locals_ = {f"silo/{name}": state for name, state in engine.silo_states(self.server.state.accepted).items()}
        done = _Done(
            tuple(self.objectives), self.finished, self.seconds, engine.exchanges, engine.bytes_up, engine.bytes_down
        )
        checkpoints.save(self.server.rounds, {"server": self.server.state, "run": done, **locals_})
        self._last_save = time.monotonic()

    def _progress(self, step: Step) -> Progress:
        state, ending = self.server.state, self._ending()
        return Progress(
            self.server.rounds,
            self.server.program.most_rounds,
            step.objective,
            step.learning_rate,
            step.r_hat,
            sum(self.engine.bytes_up.values()),
            sum(self.engine.bytes_down.values()),
            step.phase,
            sum(index == state.last_index for index in state.accepted.values()),
            ending,
            self._counted() if ending else None,
        )

    def _ending(self) -> bool | None:
        phases = self.server.program.order.phases
        if not any(phase.ends for phase in phases.values()):
            return None
        following = phases.get(getattr(self.server.state.algorithm, "phase", ""))
        return self.finished or (following is not None and following.ends)

    def _counted(self) -> tuple[int, int] | None:
        if self._finals is None:
            return None
        return self._finals, sum(phase.most for phase in self.server.program.order.phases.values() if phase.ends)


def kept_in(options: Options, begun: Callable[[], Begun]) -> Checkpoints | None:
    """The checkpoints that `options` ask for, of a run that is begun with `begun()`. Raises InputError for what cannot
    be a folder."""
    where = _folder(options)
    return None if where is None else Checkpoints(where, options["checkpoint_seconds"], begun())


def _folder(options: Options) -> Path | None:
    """`checkpoint_dir`, made where it is not there."""
    folder = options["checkpoint_dir"]
    if options["resume"] and folder is None:
        raise InputError("resume needs checkpoint_dir, the folder that the run was kept in")
    if folder is None:
        return None
    where = Path(folder)
    if where.is_file():
        raise InputError(f"checkpoint_dir must be the path of a folder, not {folder!r}")
    try:
        where.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"checkpoint_dir {folder!r}: {error.strerror}") from None
    return where


class _Done(NamedTuple):
    """What the loop itself must remember."""

    objectives: tuple[float, ...]
    finished: bool
    seconds: float
    exchanges: int
    bytes_up: dict[str, int]
    bytes_down: dict[str, int]


NOTHING_DONE = _Done((), False, 0.0, 0, {}, {})


def _restore(server: Server, engine: Transport, checkpoints: Checkpoints) -> _Done:
    templates: dict[str, Any] = {f"silo/{name}": silo.kept for name, silo in engine.silos.items()}
    states = checkpoints.load({"server": server.state, "run": NOTHING_DONE, **templates})
    if states is None:
        return NOTHING_DONE
    server.state = states["server"]
    engine.restore_silos({name: states[f"silo/{name}"] for name in engine.silos})
    done: _Done = states["run"]
    engine.exchanges, engine.bytes_up, engine.bytes_down = done.exchanges, done.bytes_up, done.bytes_down
    return done


# ----
# A job's books, where one process plays all silos


def build_guards(
    silos: Sequence[str],
    tables: Mapping[str, BlockTable],
    terms: Mapping[str, Terms],
    algorithm: str,
    books: Books,
    noise: NoiseSource,
    rows_of_silos: bool = False,
    going_on: bool = False,
) -> Guards:
    """One gate a silo. Raises BudgetError, and charges nothing, where the budget of any silo does not hold the job.
    rows_of_silos: as the job's disclosure says (see `Gate`). going_on: the job has rounds behind it, which its ledger
    must know of; raises InputError where it does not."""

    def gate(silo: str, charge: Charge | None) -> Gate:
        return Gate(silo, tables, terms, charge, noise, silos=silos, rows_of_silos=rows_of_silos)

    if not terms:
        return Guards({silo: gate(silo, None) for silo in silos})
    if books.path is None:
        return Guards({silo: gate(silo, _in_memory(terms)) for silo in silos})
    job, own_budget = declared_job(books.job, books.data_set, terms, algorithm, noise)
    if going_on and not books.path.exists():
        raise InputError(_unknown(books))
    ledgers = {silo: Ledger.open(books.path, silo, create=not going_on) for silo in silos}
    if going_on and any(books.job not in ledger.chain.jobs for ledger in ledgers.values()):
        raise InputError(_unknown(books))
    countersign(books.path, ledgers)
    for ledger in ledgers.values():
        ledger.check_job(job, default_budget=own_budget)
    jobs = {
        silo: ledger.open_job(job, default_budget=own_budget, block=books.block) for silo, ledger in ledgers.items()
    }
    gates = {silo: gate(silo, jobs[silo].charge) for silo in silos}
    return Guards(gates, tuple(jobs.values()), ledgers, functools.partial(countersign, books.path, ledgers))


def _unknown(books: Books) -> str:
    return (
        f"the ledger '{books.path}' knows nothing of job '{books.job}', which has rounds behind it; resume with the "
        "books that it was charged to, or begin anew in another folder"
    )


def _in_memory(terms: Mapping[str, Terms]) -> Charge:
    left = {phase: t.releases for phase, t in terms.items()}

    def charge(phase: str, index: int) -> None:
        if not left[phase]:
            raise BudgetError(
                f"all {terms[phase].releases} releases of this job are spent; raise retries, or plan for more rounds"
            )
        left[phase] -= 1

    return charge


# A chain cannot tell by itself that its tail was cut or that it is an old copy; another party that has seen it can. The
# statements and receipts are the bytes that institutions would exchange.

#: Others that countersign a ledger: enough that one of them is honest, few enough to cost nothing.
WITNESSES = 2


def countersign(path: Path, ledgers: Mapping[str, Ledger]) -> None:
    """Have each ledger in the file `path` countersigned by the silos that follow it in the order of their names.

    Raises ProtocolError, before anything is charged if called then, for a ledger that was cut or rolled back.
    """
    names = sorted(ledgers)
    others = {
        name: [names[(i + k) % len(names)] for k in range(1, min(WITNESSES, len(names) - 1) + 1)]
        for i, name in enumerate(names)
    }
    for witness_name in names:
        identity = load_key(key_path(path, witness_name))
        store = SqliteStore(key_path(path, witness_name).with_suffix(".seen"))
        witness = Witness(witness_name, identity, store)
        for name, asked in others.items():
            if witness_name in asked:
                ledger = ledgers[name]
                key = ledger.chain.public_key
                receipt = witness.countersign(ledger.statement(witness.length(key)), key)
                ledger.add_receipt(receipt, identity.public_key)
        store.close()
