"""From an algorithm, written as functions of named blocks, to the two halves that the driver wants.

    setup       what follows from the options and the model; what cannot be is refused
    sums        the secure sums by phase: their blocks, when they are asked, of whom, and in what form
    init        the server's state before the first round
    broadcast   the next message, from the state
    answer      at the silo, the only function that sees data: numbers by block, and the silo's next state
    step        the server's next state, from sums over silos by block

What travels is one rule for all: without differential privacy every block of a sum; with it those alone that it
protects, clipped and noised, and counts that the job makes public. An algorithm never flattens, splits, clips, noises
or charges anything, and a sum that protects nothing does not exist under privacy.

Under record privacy what each record's numbers are, to the last bit, follows from that record alone (`EachAlone`).
Records are evaluated together, and a program can make the last bit of a rounding error count for anything. PyTorch may
round otherwise in batches of another shape, so that blocks have one shape whatever the data; where the program raises
on a record (a matrix that cannot be factorised), those on which it does are found and a made record stands in their
place in the same shape. To fail would tell of them without noise. Whether a function is traced, or cannot be evaluated
for many records at once, is seen on made records. docs/privacy-analysis.md, "To the last bit".
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.aggregation.base import UNABLE, Block, BlockTable, FloatArray
from secure_fvi.algorithms.base import (
    CLIP,
    Broadcast,
    Form,
    LocalFit,
    Order,
    Pending,
    Phase,
    Posterior,
    Problem,
    SiloView,
    Step,
    Verdict,
    choose_cohort,
    form,
)
from secure_fvi.compiled import TracedOnMade, by_itself, flatten
from secure_fvi.disclosure import Sums
from secure_fvi.errors import AggregationError, InputError, SecureFVIWarning
from secure_fvi.exported import GraphDensity, untested_operations, used_operations
from secure_fvi.families import Conditional
from secure_fvi.later import Later
from secure_fvi.privacy.gate import MOST_ROWS, Gate, NoisedSum, Release
from secure_fvi.privacy.settings import RecordDP, SiloDP
from secure_fvi.privacy.terms import Extent, Terms, agree
from secure_fvi.states import Moved
from secure_fvi.trees import Params

if TYPE_CHECKING:
    from secure_fvi.algorithms import noise_aware
    from secure_fvi.algorithms.noise_aware import Clipped, NoiseAware
    from secure_fvi.objective import Lengths
else:
    noise_aware = Later("secure_fvi.algorithms.noise_aware")

#: Block of records by the lengths of their gradients, under record privacy.
LENGTHS = "lengths"
#: What the total of such a block is at most in a sum of silos that can.
_ZERO = 2.0**-20
#: Numbers by the name of their block, as a silo finds them; and of a total.
Blocks = Mapping[str, Any]
Totals = Mapping[str, FloatArray]
Rows = npt.NDArray[np.int64]


class Sum(NamedTuple):
    """One secure sum of an algorithm.

    blocks: in the order in which they travel. protected: those that privacy covers, by name. counts: those that travel
    under record privacy too where the job says public_counts. when: in which rounds it is asked. sent: the shapes of
    its broadcast's tensors, scalars: the numbers with them, known: those of which all parties know the value.
    """

    blocks: tuple[Block, ...]
    when: Phase
    sent: Mapping[str, Tensor | tuple[int, ...]]
    protected: frozenset[str] = frozenset()
    counts: frozenset[str] = frozenset()
    scalars: tuple[str, ...] = ()
    known: Mapping[str, float | None] = {}

    def chosen(self, names: frozenset[str]) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.name in names)


class Answer(NamedTuple):
    """What a silo has to say. Never leaves the silo but through its gate.

    blocks: numbers by block, at least those that travel. local: the silo's next state. dropped: computations that
    failed and counted as nothing. released: under privacy, the next state from the protected numbers as they were
    released, one vector in natural units; for algorithms whose state follows what was said rather than what was found.
    It has to be declared (`Declaration.follows`): over several rounds it needs all of the noise in what one silo says.
    parts: under record privacy, the protected numbers of each of disjoint parts of the records (`Gate.release_change`),
    which `blocks` adds up; none: all records are one.
    """

    blocks: Blocks
    local: Any
    dropped: int = 0
    released: Callable[[FloatArray], Any] | None = None
    parts: tuple[Blocks, ...] = ()


class RecordAnswer(NamedTuple):
    """An answer record by record, for record privacy. Never leaves the silo but through its gate.

    chunks: matrices of gradients (B, shared + hidden) and the records' terms of the objective (B,). own: what follows
    from no record, by block, added after the noise, or None (`Gate.release_records`). blocks: counts. local: the next
    state, from the noised sum of hidden gradients (hidden,), once all chunks were read. dropped: records that failed,
    once read.
    """

    chunks: Iterable[tuple[Tensor, Tensor]]
    own: Blocks | None
    blocks: Blocks
    local: Callable[[Tensor], Any]
    dropped: Callable[[], int]


class FitAnswer(NamedTuple):
    """An answer at which a fit by noised steps arrives, for record privacy: the noise is in each step, and the answer
    has none of its own. Never leaves the silo but through its gate.

    fit: given what makes noised sums over records (`Gate.release_fit`), the answer. Of records it knows these alone.
    """

    fit: Callable[[NoisedSum], Answer]


class RowAnswer(NamedTuple):
    """An answer with a row a person, for record privacy of who is known to take part. Never leaves but through a gate.

    hidden: the phase to which it is charged and gradients by person (B, n), whose noised sum stays here; None for none.
    rows: from that sum (n,), float64, the rows (B, C) that are released, noised, and what is kept: a silo's next state.
    """

    hidden: tuple[str, Tensor] | None
    rows: Callable[[Tensor | None], tuple[Tensor, Any]]

    def through(self, gate: Gate) -> tuple[Release, Any]:
        """What `gate` lets out, and what is kept."""
        rows, kept = self.rows(None if self.hidden is None else gate.hidden_sum(*self.hidden))
        return gate.release_rows(rows.detach()), kept


class Program(ABC):
    """Options bound to a problem: the server's half and the silos'. It holds no data, so that all silos of a process
    share its traces; every party builds the same one. Both states are NamedTuples of tensors and plain values, and a
    silo's never leaves it. Beside what is said here it has, the same at every party,

        tables    the blocks of a contribution by phase
        terms     what each phase releases under differential privacy; empty without
        order     the questions that silos answer

    `view` is what it may use of a silo's data: a `SiloView`, or a `VerticalView` in vertical runs.
    """

    #: Why an algorithm takes no record privacy, as an error says it. Empty: it does.
    no_record_privacy: ClassVar[str] = ""
    #: At a server that holds data, a private response: the gate through which what follows from them goes.
    gate: Gate | None = None

    def __init__(self, config: Any, problem: Problem) -> None:
        self.config, self.problem = config, problem
        if self.no_record_privacy and isinstance(problem.privacy, RecordDP):
            raise InputError(f"{config.name} takes no record privacy{self.no_record_privacy}")
        declared = config.declare(len(problem.silos), problem.privacy is not None)
        #: Rounds after which a run ends whatever happens.
        self.most_rounds: int = declared.rounds
        self.follows: bool = problem.privacy is not None and problem.privacy.unit in declared.follows
        #: Silos asked in a round.
        self.cohort_size = next(said.asked for said in declared.sums if not said.besides)
        self.setup()
        sums = self.sums()
        if problem.privacy is not None:
            sums = {name: one for name, one in sums.items() if one.protected}
        self._check_after(declared.sums, sums)
        for said in (said for said in declared.sums if said.phase in sums):
            when = sums[said.phase].when._replace(most=said.at_most, counts=not said.besides)
            sums[said.phase] = sums[said.phase]._replace(when=when)
        self.parts = sums
        self.terms = {} if problem.privacy is None else self.agreed(sums)
        self.tables = {name: self._table(name, one) for name, one in sums.items()}
        forms = {name: self._form(name, one) for name, one in sums.items()}
        self.order = Order({name: one.when for name, one in sums.items()}, self.asked, forms)

    # ---- what an algorithm says ----

    @abstractmethod
    def setup(self) -> None:
        """Set what follows from options and model. Raises InputError for what these or its privacy do not allow."""

    @abstractmethod
    def sums(self) -> dict[str, Sum]:
        """By phase, in their order within a round."""

    @abstractmethod
    def init(self) -> Any:
        """The server's state before the first round."""

    @abstractmethod
    def broadcast(self, state: Any, index: int, accepted: Mapping[str, int]) -> Broadcast:
        """The next round's message; `accepted` is passed on. Randomness in it is public."""

    @abstractmethod
    def answer(self, message: Broadcast, local: Any, view: SiloView) -> Answer | RecordAnswer | RowAnswer | FitAnswer:
        """Draws are keyed by `view.turn`."""

    @abstractmethod
    def step(self, state: Any, message: Broadcast, sums: Totals, scale: float) -> tuple[Any, Step]:
        """The next state. `scale`: what totals are to be multiplied by for silos that were absent.

        Where a round has several phases the state says which comes next, and only the last one's step may be finished.
        """

    @abstractmethod
    def posterior(self, state: Any) -> Posterior:
        """What the state stands for now."""

    @abstractmethod
    def verdict(self, state: Any) -> Verdict:
        """Whether a run that has ended converged. It may claim so only where the result is right within tolerance."""

    @abstractmethod
    def metrics(self, state: Any) -> dict[str, float | None]:
        """What the algorithm adds to the metrics of a result."""

    # ---- what most say alike ----

    #: Numbers of gradients of a silo's own latents, which record privacy noises and keeps.
    hidden: int = 0
    #: Share of its records on which an answer under record privacy rests, drawn by Poisson sampling.
    sampled: float = 1.0
    #: Noised sums in an answer under record privacy that is a `FitAnswer`; 0: answers are others.
    noised_steps: int = 0
    #: Of these, those in the mean over which a `FitAnswer` says how many records' gradients are how long.
    told_steps: int = 1

    def cohort(self, round_: int) -> tuple[str, ...]:
        """The silos asked in a round."""
        return choose_cohort(self.problem.silos, self.cohort_size, self.problem.seed, round_)

    def asked(self, round_: int, phase: str) -> tuple[str, ...]:
        """The silos asked for one sum: all of them for what is asked but once."""
        return self.cohort(round_) if self.parts[phase].when.counts else self.problem.silos

    def init_local(self, view: SiloView) -> Any:
        """A silo's state before the first round."""
        return ()

    def commit(self, local: Any, pending: Pending, accepted: int) -> Any:
        """The local state from now on, as one that follows the global one step by step; `accepted` is the index of the
        last sum used that has this silo's term, or 0."""
        after, counts = pending.local, pending.sum_index == accepted
        if isinstance(after, Moved):
            return after.into(local, counts)
        return after if counts else local

    def where(self, message: Broadcast) -> Tensor | None:
        """Z_G (n_global,) of which a round asks, or near it, if it does."""
        return message.tensors.get("z_global")

    #: How records say how long their gradients are, in block `LENGTHS` of the first phase, where they do.
    lengths: Lengths | None = None

    @property
    def told(self) -> int:
        """Numbers by which they do."""
        return 0 if self.lengths is None else len(self.lengths.edges) + 1

    @property
    def none_counted(self) -> Tensor:
        """`counted` of a state before its first round: the sum over rounds of records by length, and rounds; (0,) where
        nothing tells."""
        return torch.zeros(self.told + 1 if self.told else 0, dtype=torch.float64)

    def count(self, counted: Tensor, sums: Totals, factor: float) -> Tensor:
        """With a round's total, times `factor`, more."""
        if self.lengths is None:
            return counted
        found = torch.as_tensor(sums[LENGTHS]).to(counted) * factor / self.lengths.unit
        return counted + torch.cat([found, found.new_ones(1)])

    def clipped(self, state: Any) -> Clipped | None:
        """Under record privacy, how long gradients were, as records released it; None: they do not, or it is hidden."""
        if self.lengths is None or not state.counted[-1]:
            return None
        terms, rounds = next(iter(self.terms.values())), float(state.counted[-1])
        factor = len(self.problem.silos) / terms.cohort / terms.sampling_rate / self.lengths.unit
        once = terms.variance(terms.cohort, terms.settings.clipping_norm) * factor**2 / self.told_steps
        return noise_aware.Clipped.of(self.lengths.edges, state.counted[:-1] / rounds, once / rounds)

    @property
    def uncounted(self) -> str | None:
        """Under differential privacy, why no posterior of this job will count its noise, as options and model tell
        before anything is charged; "" without privacy, None where one may."""
        return f"it is not worked out how far noise moves {self.config.name}" if self.terms else ""

    def noise_aware(self, state: Any) -> NoiseAware | str:
        """Under differential privacy, the posterior that counts its noise; or in words why there is none."""
        assert self.uncounted is not None, "an algorithm whose posterior may count noise says how"
        return self.uncounted

    def local_fit(self, local: Any) -> LocalFit:
        """What the local state stands for now, here no latents of its own; in vertical runs q(theta_j) by name."""
        family = Conditional().build(0, self.problem.layout.size("global"), 1)
        return LocalFit(family, {}, family, {}, 1)

    def replicated(self, state: Any) -> Tensor | None:
        """(1 + replicates, numbers) over all silos, of their tables and of replicates; None where none were asked for,
        or are not known."""
        return None

    def blank(self) -> Posterior:
        """Of the form that this job's posterior has; silos hold what the server names at the end against it."""
        return self.posterior(self.init())

    def rounds(self, state: Any) -> int:
        """Rounds done."""
        return int(state.round)

    @property
    def traced_by_data(self) -> bool:
        """Whether a silo's data have a say in whether its steps are traced, and are kept so."""
        return True

    @property
    def by_record(self) -> bool:
        """Whether privacy protects records one by one."""
        return isinstance(self.problem.privacy, RecordDP)

    def agreed(self, sums: Mapping[str, Sum]) -> dict[str, Terms]:
        """The terms of each sum under privacy, as of one algorithm whose sums are charged alike."""
        return {name: self._agreed(one) for name, one in sums.items()}

    # ---- what follows for all ----

    def contribute(self, message: Broadcast, local: Any, view: SiloView, gate: Gate) -> tuple[Release, Any]:
        """What the gate lets out, and the local state to hand to `commit`."""
        found, phase = self.answer(message, local, view), message.phase
        if isinstance(found, RowAnswer):
            return found.through(gate)
        if isinstance(found, RecordAnswer):
            blocks = self.tables[phase].blocks
            own = None if found.own is None else torch.from_numpy(self._flat(found.own, blocks, some=True))
            public = self._flat(found.blocks, blocks, some=True)
            release, hidden = gate.release_records(found.chunks, own, public.tolist())
            gate.dropped += found.dropped()
            return release, found.local(hidden)
        if isinstance(found, FitAnswer):
            return self._fitted_answer(found, message, gate)
        terms = self.terms.get(phase)
        if terms is not None and found.released is not None and not self.follows:
            raise AggregationError(f"{self.config.name}'s states follow what silos released, which it does not declare")
        # Under privacy the gate adds its side coordinate itself.
        one = self.parts[phase]
        values = self._flat(found.blocks, one.blocks if terms is None else one.chosen(one.protected))
        if terms is None:
            values = np.concatenate([values, np.zeros(UNABLE.size)])
        gate.dropped += found.dropped
        if terms is not None and terms.settings.unit == "record":
            rows = [self._flat(of_part, one.chosen(one.protected)) for of_part in found.parts] or [values]
            release = gate.release_change(torch.from_numpy(np.stack(rows)))
        else:
            release = gate.release(values)
        if terms is None or found.released is None:
            return release, found.local
        clip = message.scalars.get(CLIP, terms.settings.clipping_norm)
        return release, found.released(terms.in_clear(release.values, clip)[: len(values)])

    def silence(self, message: Broadcast, local: Any, view: Any, gate: Gate) -> tuple[Release, Any]:
        """As `contribute`, under privacy, of a silo whose data go into no answer: released and charged as an answer is,
        so that nobody else can tell it."""
        return gate.release_nothing(), local

    def _fitted_answer(self, found: FitAnswer, message: Broadcast, gate: Gate) -> tuple[Release, Any]:
        one, answers = self.parts[message.phase], list[Answer]()

        def fit(noised_sum: NoisedSum) -> FloatArray:
            answers.append(found.fit(noised_sum))
            return self._flat(answers[0].blocks, one.chosen(one.protected))

        release = gate.release_fit(fit)
        after = answers[0]
        return release, after.local if after.released is None else after.released(release.values)

    def update(self, state: Any, message: Broadcast, total: FloatArray, scale: float) -> tuple[Any, Step]:
        """`step`, of a total (table.size,)."""
        sums = self.tables[message.phase].split(total)
        if not (np.abs(sums.pop(UNABLE.name, np.zeros(1))) <= _ZERO).all():
            raise AggregationError(
                f"round {message.round}: some silo's data could not answer, so that there is no total; which one, and "
                "why, its own site's log says alone"
            )
        return self.step(state, message, sums, scale)

    def release_held(
        self, message: Broadcast, phase: str, found: RowAnswer, turn: int | None = None
    ) -> tuple[FloatArray, Any]:
        """In `step`, at a server with a gate: what leaves it of the data that it holds, and what is kept. turn: as in
        `Gate.begin`."""
        assert self.gate is not None
        self.gate.begin(message.sum_index, phase, len(message.cohort), turn=turn)
        release, kept = found.through(self.gate)
        return release.values, kept

    def answered(self, scale: float) -> float:
        """The silos in a total, from its `scale`."""
        return float(round(len(self.problem.silos) / scale))

    def move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.problem.device, self.problem.dtype)

    def received(self, message: Broadcast, names: Iterable[str]) -> Params:
        """Tensors of a broadcast, where and as this party computes."""
        return {name: self.move(message.tensors[name]) for name in names}

    def _check_after(self, declared: Iterable[Sums], sums: Mapping[str, Sum]) -> None:
        """What a server may ask after the sum that ends a job is one kind of question: each silo holds it to what that
        sum named (`Silo`), and it is declared as telling likelihoods, which policies list."""
        first, *others = [name for name, one in sums.items() if one.when.ends] or [""]
        told = {said.phase for said in declared if said.besides and said.likelihood}
        for name in others:
            if name not in told or not sums[first].sent.keys() <= sums[name].sent.keys():
                raise TypeError(
                    f"{self.config.name}: '{name}' is asked after '{first}'; let it repeat what that names, and "
                    "declare that it tells a likelihood"
                )

    def _agreed(self, one: Sum) -> Terms:
        privacy, shared = self.problem.privacy, sum(block.size for block in one.chosen(one.protected))
        if isinstance(privacy, RecordDP):
            extent, record = Extent(shared, self.hidden, int(privacy.objective_share > 0)), self.problem.model.record
            terms = agree(privacy, self.cohort_size, self.sampled, one.when.most, extent, self.noised_steps)
            return dataclasses.replace(terms, record=record)
        assert isinstance(privacy, SiloDP)
        extent = Extent(shared, 0, int(privacy.target_quantile is not None))
        return agree(privacy, self.cohort_size, self.sampled, one.when.most, extent)

    def _table(self, phase: str, one: Sum) -> BlockTable:
        if phase not in self.terms:
            return BlockTable((*one.blocks, UNABLE))
        return self.terms[phase].table(one.chosen(one.protected), one.chosen(one.counts))

    def _form(self, phase: str, one: Sum) -> Form:
        return form(one.sent, *one.scalars, terms=self.terms.get(phase), known=one.known)

    @staticmethod
    def _flat(values: Blocks, blocks: Iterable[Block], some: bool = False) -> FloatArray:
        """`values` one after the other in the order of `blocks`; some: those that there are."""
        chosen = [_numbers(values[b.name]) for b in blocks if not some or b.name in values]
        return np.concatenate([np.empty(0), *chosen])


def _numbers(value: Any) -> FloatArray:
    tensor = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
    return np.ravel(np.asarray(tensor, np.float64))


def joined(view: SiloView, key: int, rate: float) -> Rows | None:
    """Rows of a Poisson sample (B,), None for all; from the silo's secret, so that nobody else knows who took part."""
    return None if rate == 1 else view.joining_draws.poisson(key, view.size, rate)


def at_least_two(rows: Rows, spare: int) -> Rows:
    """`rows`, filled up with the spare one of weight zero: a traced graph treats sizes 0 and 1 as special."""
    return np.concatenate([rows, np.full(max(2 - len(rows), 0), spare, np.int64)])


def poisson_rows(view: SiloView, key: int, rate: float, device: torch.device) -> Tensor | None:
    """Rows of a Poisson sample, at least two. None: all."""
    rows = joined(view, key, rate)
    return None if rows is None else torch.from_numpy(at_least_two(rows, view.size)).to(device)


# ---- A program looked at on made records ----

#: Why a program serves for nothing that asks for its curvature.
NOT_TWICE = (
    "PyTorch has no second derivative of the program, so that it is not seen whether the likelihood is a parabola; "
    "write it with other operations"
)
#: Made records, and the seed of their numbers.
_MADE, _MADE_SEED = 4, 20_250_503


def on_made(problem: Problem, largest: int = 0) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The log-likelihood of a model without other latents than Z_G, on made records, so that the data are not asked;
    and a Z_G (n_global,) to begin with. Numbers are uniform ones, and whole numbers 0; or, with `largest`, all are
    whole, from 0 up to it in turn, and one more in columns of floating point."""
    rng = torch.Generator().manual_seed(_MADE_SEED)

    def made(column: Tensor) -> Tensor:
        floating = column.is_floating_point()
        if largest == 0:
            return torch.rand(column.shape, generator=rng, dtype=column.dtype) if floating else column
        turn = torch.arange(_MADE).reshape(-1, *[1] * (column.dim() - 1)) % (largest + 1)
        return (column + turn).to(column.dtype)  # of ones, or zeros

    rows = {name: made(column).to(problem.device) for name, column in problem.schema.dummy_rows(_MADE).items()}

    def log_p(z: Tensor) -> Tensor:
        return problem.density.evaluate(z, z.new_zeros(0), z.new_zeros(_MADE, 0), {}, rows).records.sum()

    return log_p, problem.start.z_global.to(problem.device, problem.dtype)


# ---- Records by themselves, under record privacy ----

#: Rows of a block of per-record gradients at least, and numbers in one above which it has fewer than at most: powers of
#: two as well. Only what everyone knows, the model's size, decides on them.
FEWEST_ROWS, _MOST_NUMBERS = 64, 2**16


def rows_at_once(numbers: int) -> int:
    """Rows of a block, where so many numbers are held of each."""
    return min(MOST_ROWS, max(FEWEST_ROWS, 2 ** int(math.log2(max(1, _MOST_NUMBERS // max(1, numbers))))))


def blocks_of(rows: Rows | None, size: int, length: int) -> Rows:
    """Rows (B,), None for all `size` of them, in blocks of one shape (blocks, length), whatever the data, filled up
    with the spare row of weight zero. There is a spare row in each, so that none differs from another by having one."""
    rows, own = np.arange(size) if rows is None else rows, length - 1
    blocks = max(1, math.ceil(len(rows) / own))
    filled = np.append(rows, np.full(blocks * own - len(rows), size, np.int64)).reshape(blocks, own)
    return np.pad(filled, ((0, 0), (0, 1)), constant_values=size)


def warn_one_by_one(found: Iterable[str]) -> None:
    """Of operations that are not known to keep records apart (`exported.untested_operations`)."""
    warnings.warn(
        f"the model uses {', '.join(found)}, which PyTorch is not known to keep apart for records that are "
        "evaluated together: under record privacy they are evaluated one by one, which is slow. Write it with "
        "other operations",
        SecureFVIWarning,
        stacklevel=3,
    )


class EachAlone:
    """A function of shared values and blocks of records that evaluates each record alone: mapped and traced, or in a
    loop once it is seen to use, for a made record, what is not known to keep records apart when it is mapped
    (`exported.untested_operations`). It holds no data, so that all silos of a process share its traces."""

    def __init__(
        self, problem: Problem, gradients: Callable[..., Callable[..., Any]], takes: Callable[..., tuple[Any, ...]],
        step: Callable[..., Any], made: Callable[..., tuple[Any, ...]], numbers: int,
    ) -> None:  # fmt: skip
        """gradients: `objective.record_gradients`, but for `mapped`. takes: what these take of (shared, ...). step: by
        what they give and (shared, ...), what is found. made: by (count, shared, ...), the latter with so many made
        records, None for as many. numbers: held at once of each record."""
        self._problem, self._takes, self._step, self._made = problem, takes, step, made
        self._mapped, self._alone = gradients(), gradients(mapped=False)
        self.run = TracedOnMade(self.together, lambda *args: made(None, *args), problem.mode)
        self.length = rows_at_once(numbers)
        self._seen: list[Tensor] | None = None  # with what it was looked at

    def together(self, *args: Any) -> Any:
        """What it gives with these arguments, however many records they have."""
        return self._step(self._mapped(*self._takes(*args)), *args)

    def __call__(
        self, rows: Rows | None, size: int, args: Callable[[Rows], tuple[Any, ...]]
    ) -> Iterator[tuple[Any, Rows, int]]:
        """As of `evaluated`, by blocks of these rows, None for all `size` of them, with such arguments."""
        run: Callable[..., Any] | None = None

        def step(block: Rows) -> Any:
            nonlocal run
            given = args(block)
            with by_itself():
                if run is None:  # once a call: how many blocks there are, and calls in search of who fails, is of data
                    self._look(given)
                    run = self.run.ready(*given)
                return run(*given)

        for block in blocks_of(rows, size, self.length):
            yield evaluated(block, step, size)

    def _look(self, args: tuple[Any, ...]) -> None:
        """At what it uses for a made record with what is given besides, until it is traced: alone, and mapped, where it
        may go another way. A graph uses the same with any."""
        if self.run.traced or self._mapped is self._alone:
            return
        made = self._made(1, *args)
        given, seen, graph = flatten(made), self._seen, isinstance(self._problem.density, GraphDensity)
        if seen is not None and (graph or all(map(torch.equal, given, seen))):
            return
        self._seen, taken = given, self._takes(*made)
        alone, mapped = (functools.partial(run, *taken) for run in (self._alone, self._mapped))
        if found := sorted({*untested_operations(alone), *used_operations(mapped)[1]}):
            self._mapped, self.run.mode, self.length = self._alone, "eager", FEWEST_ROWS
            warn_one_by_one(found)


def evaluated(rows: Rows, step: Callable[[Rows], Any], spare: int) -> tuple[Any, Rows, int]:
    """What `step` gives for a block of rows, which rows these are, and on how many it failed.

    Where the program raises anything, the records on which it does are found and the block is evaluated again with the
    spare row in their place, which is what a zero is: in the same shape, so that no bit of another record's numbers
    moves. None where the spare row itself fails, as it then does in each block of every silo.
    """
    with contextlib.suppress(Exception):
        return step(rows), rows, 0
    bad = failing(rows[rows < spare], len(rows), step, spare)
    rest = np.where(np.isin(rows, bad), spare, rows)
    with contextlib.suppress(Exception):
        return step(rest), rest, len(bad)
    return None, rest, int((rows < spare).sum())


def failing(some: Rows, size: int, step: Callable[[Rows], Any], spare: int) -> list[int]:
    """Those rows on which `step` raises, each looked at in a block of the same shape."""
    try:
        step(np.append(some, np.full(size - len(some), spare, np.int64)))
        return []
    except Exception:
        if len(some) <= 1:
            return some.tolist()
    half = len(some) // 2
    return [row for part in (some[:half], some[half:]) for row in failing(part, size, step, spare)]
