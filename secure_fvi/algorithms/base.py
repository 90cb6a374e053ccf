"""What every algorithm is made of, and the messages between its halves.

An algorithm is a frozen configuration; `program(problem)` binds it to a model and gives the four verbs. Each half
of the driver builds its own program, so the server's never meets data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from secure_fvi.compiled import Mode
from secure_fvi.density import Layout, LogDensity, Params, Start
from secure_fvi.disclosure import Declaration
from secure_fvi.errors import ProtocolError
from secure_fvi.families import GlobalFamily, LocalFamily
from secure_fvi.federated_model import FederatedModel, Schema
from secure_fvi.privacy.settings import DP
from secure_fvi.privacy.terms import Terms
from secure_fvi.randomness import KeyedDraws

if TYPE_CHECKING:
    from secure_fvi.algorithms.kit import Program
    from secure_fvi.algorithms.noise_aware import NoiseAware


class Problem(NamedTuple):
    """What all parties know before the first round."""

    model: FederatedModel
    schema: Schema
    layout: Layout
    density: LogDensity
    start: Start  # centre of the prior, from made data
    silos: tuple[str, ...]  # all ids, sorted
    seed: int
    dtype: torch.dtype
    device: torch.device
    mode: Mode
    privacy: DP | None = None


class SiloView(NamedTuple):
    """What a silo's half of an algorithm may use. Never leaves the silo."""

    silo: str
    rows: Params  # (N + 1, ...): the silo's records and one spare row of weight zero
    weights: Tensor  # (N + 1,): one for records, zero for the spare row
    size: int  # N
    start: Start  # with the silo's own records, N + 1 rows
    record_draws: KeyedDraws  # keyed by record id, N + 1 rows
    batch_draws: KeyedDraws  # of orders in which records are gone through
    joining_draws: KeyedDraws  # of Poisson samples, by place: one id, of the silo
    silo_draws: KeyedDraws
    hiding_draws: KeyedDraws  # of what stands for numbers that are not told (`hiding`)
    turn: int = 0  # the silo's own count of questions, from 0: what keys its draws, and no number that the server names
    #: Told whether a number is too large to tell (`hiding`); whether no later question hears more than that.
    hides: Callable[[bool], bool] = bool


#: The phase of algorithms whose round is one sum.
ROUND_PHASE = "round"


class Pending(NamedTuple):
    """A local state that waits for the server's word on the sum it was released with."""

    sum_index: int
    local: Any


class Question(NamedTuple):
    """What a broadcast asks, in the order in which a silo answers."""

    round: int
    place: int  # of the phase in the round
    iteration: int  # of a phase that repeats within a round


#: Before the first.
BEFORE_ALL = Question(-1, 0, 0)


class Phase(NamedTuple):
    """When a phase may be asked: once in each of `rounds`, or in each iteration of them, and `most` times in all. The
    last two are as its algorithm declares its sums (`kit.Program`)."""

    rounds: range
    iterations: range = range(1)  # a round's, by the scalar "iteration" of the broadcast
    ends: bool = False  # whether nothing is asked after it, but phases of the same round that end the job too
    most: int = 0
    #: Whether its rounds are rounds of the job. A sum before or after them is of all silos or of none: no later round
    #: shows a silo that it was left out.
    counts: bool = True

    @property
    def repeats(self) -> bool:
        """Whether its broadcasts name an iteration."""
        return len(self.iterations) > 1 or bool(self.iterations[0])


#: Scalar of a broadcast whose phase repeats within a round.
ITERATION = "iteration"
#: The phase of the sum at the final q.
FINISH = "finish"
#: Scalar that the server adds where the clipping norm adapts.
CLIP = "clip"


#: Between what a number of a broadcast lies, ends included: factors, flags and counts. Others are finite.
_RANGES: Mapping[str, tuple[float, float]] = {
    "scale": (0.0, 2.0**20), "rate": (0.0, 1.0), "averaging": (0.0, 1.0), "stage": (0.0, 2.0**31),
    "records": (0.0, 2.0**53), "prior": (0.0, 2.0**53),
}  # fmt: skip


class Form(NamedTuple):
    """What the broadcasts of a phase carry: numbers, by name and range, and shapes of tensors by name."""

    scalars: Mapping[str, tuple[float, float]]
    tensors: Mapping[str, tuple[int, ...]]

    def check(self, message: Broadcast) -> None:
        """Raises ProtocolError where `message` is of another form, by what is missing, too many, of another shape or
        out of range. Nothing was computed: a refusal that follows from no data."""
        found = {name: tuple(value.shape) for name, value in message.tensors.items()}
        for kind, expected, given in (("number", self.scalars, message.scalars), ("tensor", self.tensors, found)):
            for name in sorted(set(expected) - set(given)):
                raise ProtocolError(f"the broadcast of phase '{message.phase}' lacks the {kind} '{name}'")
            if len(given) > len(expected):
                raise ProtocolError(f"the broadcast of phase '{message.phase}' has a {kind} that none asks for")
        for name, (least, most) in self.scalars.items():
            if not (least <= message.scalars[name] <= most and math.isfinite(message.scalars[name])):
                raise ProtocolError(
                    f"the number '{name}' of phase '{message.phase}' is not between {least:g} and {most:g}"
                )
        for name, shape in self.tensors.items():
            if found[name] != shape:
                raise ProtocolError(
                    f"tensor '{name}' of phase '{message.phase}' has the shape {found[name]}, not {shape}"
                )
            if not bool(torch.isfinite(message.tensors[name]).all()):
                raise ProtocolError(
                    f"tensor '{name}' of phase '{message.phase}' holds what is no finite number; where the fit ran "
                    "off, lower learning_rate or rescale the data"
                )

    @property
    def bytes(self) -> int:
        """Of its tensors, at most."""
        return sum(8 * math.prod(shape) for shape in self.tensors.values())


def form(
    tensors: Mapping[str, Tensor | tuple[int, ...]],
    *scalars: str,
    terms: Terms | None = None,
    known: Mapping[str, float | None] | None = None,
) -> Form:
    """The form of broadcasts with tensors like these (or of these shapes). terms: of the phase, under privacy. known:
    numbers that all parties know beforehand."""
    adaptive = {CLIP} if terms is not None and terms.adaptive else set[str]()
    ranges = {name: _RANGES.get(name, (-math.inf, math.inf)) for name in sorted({*scalars, *adaptive})}
    ranges |= {name: (value, value) for name, value in (known or {}).items() if value is not None and name in ranges}
    shapes = {name: value if isinstance(value, tuple) else tuple(value.shape) for name, value in tensors.items()}
    return Form(ranges, shapes)


class Order(NamedTuple):
    """The questions of a job, the same at every party: what a silo answers, once each and in this order. In its rounds
    every phase is asked, and every iteration."""

    phases: Mapping[str, Phase]  # in their order within a round
    cohort: Callable[[int, str], tuple[str, ...]]  # the silos that are asked in a round, by phase; a public coin
    forms: Mapping[str, Form]  # of the broadcasts, by phase

    @property
    def longest(self) -> int:
        """Bytes of the tensors of any broadcast, at most."""
        return max(form.bytes for form in self.forms.values())

    def asked(self, round_: int, phase: str) -> tuple[str, ...]:
        """The silos that the job asks. Raises ProtocolError for a round or a phase that it does not have."""
        self._phase(round_, phase)
        return self.cohort(round_, phase)

    def question(self, message: Broadcast) -> Question:
        """What `message` asks. Raises ProtocolError for what the job never asks, or not in this form."""
        phase = self._phase(message.round, message.phase)
        iteration = message.scalars.get(ITERATION, 0) if phase.repeats else 0
        if iteration not in phase.iterations:
            raise ProtocolError(f"the job has no such iteration of phase '{message.phase}'")
        self.forms[message.phase].check(message)
        return Question(message.round, list(self.phases).index(message.phase), int(iteration))

    def _phase(self, round_: int, name: str) -> Phase:
        if name not in self.phases:
            raise ProtocolError("the algorithm has no phase of the given name")
        if round_ not in self.phases[name].rounds:
            raise ProtocolError(f"the job has no round {round_} with this phase")
        return self.phases[name]

    def between(self, last: Question, following: Question) -> Iterator[tuple[Question, str]]:
        """The questions of the job's rounds after one and before another, with their phases."""
        phases = list(self.phases.items())
        # Of a round in which a job ends nothing else is asked.
        stop = following.round + phases[following.place][1].counts
        for round_ in range(max(last.round, 0), stop):
            for place, (name, phase) in enumerate(phases):
                if phase.counts and round_ in phase.rounds:
                    asked = (Question(round_, place, k if phase.repeats else 0) for k in phase.iterations)
                    yield from ((question, name) for question in asked if last < question < following)

    def answered(self, message: Broadcast) -> dict[int, Question]:
        """The question that each sum named in `message` answered, by index; 0 stands for none. Raises ProtocolError for
        what the job never asks, and for a sum that would have answered two."""
        found = {0: BEFORE_ALL}
        for index, round_, phase, iteration in message.sums:
            if index in found or phase not in self.phases:
                raise ProtocolError("the server names two questions of one sum, or a phase that the job does not have")
            found[index] = Question(round_, list(self.phases).index(phase), iteration)
        if len(set(found.values())) < len(found):
            raise ProtocolError("the server names two sums of one question")
        return found


class Broadcast(NamedTuple):
    """What the server sends before a secure sum. May be seen by everyone."""

    round: int
    sum_index: int  # of the secure sum that answers it; never used twice
    accepted: Mapping[str, int]  # by silo of the cohort, the last sum used that has its term: silos commit on it
    cohort: tuple[str, ...]
    scalars: Mapping[str, float]
    tensors: Mapping[str, Tensor]
    phase: str = ROUND_PHASE  # which of the algorithm's sums this is
    #: What the sums in `accepted` answered, each once: index, round, phase, iteration. Silos hold what is said of
    #: others against it: an index alone says nothing of when it was asked.
    sums: tuple[tuple[int, int, str, int], ...] = ()


class Step(NamedTuple):
    """What a round told the server, for logs and progress. Derived from broadcasts and totals only."""

    objective: float  # noisy estimate of the bound, nats; nan where it is not released
    learning_rate: float
    r_hat: float | None
    phase: str
    finished: bool


class Verdict(NamedTuple):
    """What a run can say of its own end. It follows from broadcasts and totals; everyone may see it."""

    converged: bool | None  # None: not assessed
    reason: str  # one line: what was found
    details: Mapping[str, float | None]  # the numbers that it rests on
    moving: bool = False  # of a run that is not assessed: whether it was seen to be far from rest
    remedy: str = ""  # what to try, unless converged
    #: Whether q was seen to be much narrower than the posterior, or may be at one of its modes alone.
    narrow: bool = False

    @property
    def said(self) -> str:
        """What was found and, unless converged, what to try, in one line."""
        return "; ".join(part for part in (self.reason, "" if self.converged else self.remedy) if part)

    @property
    def warns(self) -> bool:
        """Whether the result deserves less trust than usual, and a warning is due."""
        return self.converged is False or self.moving or self.narrow


#: Why a run under differential privacy is not assessed.
PRIVATE = "under differential privacy nothing that would tell is released; compare runs of other lengths and seeds"


def fixed_length(option: str, count: int, seen: str, details: Mapping[str, float | None], moving: bool) -> Verdict:
    """Of a run whose length was set by `option`: nobody looked whether it was enough. `seen`: what its iterates did."""
    advice = f"leave {option} out, and the run stops by itself or says that it has not converged"
    return Verdict(None, f"its length was fixed ({option} = {count}){seen}", details, moving, advice)


class Refined(NamedTuple):
    """Weighted draws that are the posterior of Z_G (`refining`). Everyone may see them."""

    z: Tensor  # (S, n_global), float64, in unconstrained space
    weights: Tensor  # (S,) adding up to 1
    khat: float  # Pareto's, of the weights, or of them times squares of a reported number: the larger
    ess: float
    log_evidence: float  # log p(y), nats
    integration_error: float  # of the total log-likelihood over draws, from latents that were integrated out, nats


class Posterior(NamedTuple):
    """Where a fit ended. Everyone may see it."""

    family: GlobalFamily
    eta: Params
    theta: Params
    refined: Refined | None = None  # in place of q(Z_G), where there is one
    counted: NoiseAware | None = None  # likewise, under differential privacy

    def draws(self, n: int, seed: int | torch.Generator) -> Tensor:
        """Draws of Z_G in unconstrained space (n, n_global)."""
        rng = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
        if self.refined is not None:
            picked = torch.multinomial(self.refined.weights, n, replacement=True, generator=rng)
            return self.refined.z[picked].to(self.eta["loc"])
        if self.counted is not None:
            normals = torch.randn(n, len(self.counted.mean), generator=rng, dtype=torch.float64)
            root = torch.linalg.cholesky(self.counted.covariance)
            return (self.counted.mean + normals @ root.mT).to(self.eta["loc"])
        eps = torch.randn(n, self.family.noise_size, generator=rng, dtype=torch.float64).to(self.eta["loc"])
        found: Tensor = torch.func.vmap(lambda e: self.family.transform(self.eta, e))(eps)
        return found


class LocalFit(NamedTuple):
    """Where a silo's own fit ended. Never leaves the silo."""

    family: LocalFamily
    params: Params
    silo_family: LocalFamily
    silo_params: Params
    importance_samples: int


class Algorithm(Protocol):
    """A frozen configuration, as the user writes it."""

    @property
    def name(self) -> str: ...

    @property
    def expected_calls(self) -> int:
        """Traced calls a silo will make, for the choice to compile."""
        ...

    @property
    def importance_samples(self) -> int: ...

    def declare(self, silos: int, private: bool) -> Declaration:
        """What the sums of a job over `silos` silos are, with differential privacy where `private`: a superset, since
        the model is not known yet."""
        ...

    def server(self, problem: Problem) -> Program: ...

    def silo(self, problem: Problem) -> Program: ...


def choose_cohort(silos: tuple[str, ...], size: int, seed: int, round_: int) -> tuple[str, ...]:
    """So many of the silos, drawn without replacement by a public coin."""
    if size == len(silos):
        return silos
    rng = np.random.default_rng([abs(seed), round_])
    return tuple(sorted(silos[i] for i in rng.choice(len(silos), size, replace=False)))
