"""Vertical federated inference: silos hold different columns of the same people (Hassan et al. 2024).

    augmented (3.2)   z_j ~ N(eta_j, rho^2), y ~ p(y | sum_j z_j)
    power (3.3)       z_j ~ N(eta_j, rho^2), log-likelihood sum_j w_j log p(y | eta_j + sum_{k != j} z_k), w_j = 1/J

    server:  sends the pull on what silos sent last: dlog p(y | s)/ds (augmented), D = sum_j d_j (power)
    silo:    with it takes that round's steps on its own q(theta_j) and q(z_j), then adds a new z_j to the sum s
    server:  augmented: works out the pull of s, and takes a step on q(gamma)
             power: sends s and gamma; silos add up their slopes d_j, and it takes its step with the second total
             response = "silos": sends s; each silo, which knows y, works out the pull and takes the step on its own
             copy of q(gamma), and the server hears of q(gamma) once, in a sum after the last round

A silo replays the noise of the round it was last in from its own keyed generator, also when it was absent since. With
`max_staleness` silos send the change of their z_j, and s is the running total: an absent silo's last z_j stays in.
Under privacy a person enters each round twice, in theta_j's noised gradient and in its row of z_j, and pulls on a
private response pass the holder's own gate before they are broadcast (docs/privacy-analysis.md, section 7).

Section numbers are those of the paper; its mathematics is in `steps`. rho is a standard deviation. The power likelihood
is not normalised: its bound may not be compared with another model's as evidence.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block, BlockTable
from secure_fvi.algorithms import stopping
from secure_fvi.algorithms.base import PRIVATE, Broadcast, Phase, Posterior, Step, Verdict, choose_cohort
from secure_fvi.algorithms.kit import Answer, Program, RowAnswer, Sum, Totals
from secure_fvi.algorithms.vertical.likelihoods import Likelihood, RecordSlopes, marginal, slopes_by_record
from secure_fvi.algorithms.vertical.predictors import Amortised, Auto, Integrated, MeanField, Predictor
from secure_fvi.algorithms.vertical.steps import (
    ByRecord,
    Draw,
    Incoming,
    Led,
    Moments,
    Noise,
    Response,
    ServerParams,
    SiloParams,
    VerticalServer,
    VerticalSilo,
)
from secure_fvi.compiled import Mode, Traced, TracedOnMade
from secure_fvi.disclosure import LABELS, Declaration, Sums, drawn
from secure_fvi.errors import AggregationError, InputError, ProtocolError, one_line
from secure_fvi.optimizers import Optimizer
from secure_fvi.options import SCHEDULES, Bound, Count, Part, Positive, Schedule, Share, Whole, check
from secure_fvi.privacy.gate import Gate, Release
from secure_fvi.privacy.settings import DP, RecordDP
from secure_fvi.privacy.terms import REPLACE, Extent, Terms, agree
from secure_fvi.randomness import KeyedDraws, server_draws
from secure_fvi.trees import Params, part, put, running_average, take, to_numpy, unflatten

#: The sums of one round: z_j, and in the power-likelihood model what the others need of silo j's likelihood.
AUXILIARY_PHASE, SLOPE_PHASE = "auxiliary", "slope"
#: What a silo, or the response's holder, spends on its own noised gradients; nothing of it is sent.
HIDDEN_PHASE = "hidden"
#: What the response's holder releases: dlog p / ds of each record.
PULL_PHASE = "pull"
#: The sum after the last round in which silos that alone know the response tell q(gamma).
SHARED_PHASE = "gamma"
#: Blocks: z_j, a row a record; a silo's part of the bound, nats; whether some silo's own parameters still drift; the
#: d_j; the gradient in gamma; a silo's part of log p, nats.
AUXILIARY, LOCAL, UNSETTLED, SLOPE, GAMMA, VALUE = (
    "auxiliary", "local", "unsettled", "slope", "gamma", "value",
)  # fmt: skip
#: How many averaged rounds tell by how much q is too narrow, and from how many times its sds on it is said.
_LOOKED_AT, _MUCH_WIDER = 50, 1.15
_WITH_Z = ", its part of the objective, whether its own parameters still drift"


class RunShape:
    """What follows from the model and the number of rounds, in variational runs and in SOUL."""

    model: Literal["augmented", "power"]
    response: Literal["shared", "private", "silos"]
    rounds: int
    bound: float

    @property
    def participation(self) -> float:
        return 1.0

    @property
    def is_power(self) -> bool:
        return self.model == "power"

    @property
    def server_knows(self) -> bool:
        """Whether the server has the response."""
        return self.response != "silos"

    @property
    def phases(self) -> tuple[str, ...]:
        """The sums of a round, in order."""
        return (AUXILIARY_PHASE, SLOPE_PHASE) if self.is_power else (AUXILIARY_PHASE,)

    @property
    def expected_calls(self) -> int:
        """Traced calls a silo makes."""
        return 2 * self.rounds

    def blocks(self, records: int, columns: int, gamma_size: int) -> dict[str, tuple[Block, ...]]:
        """Of each phase, for so many records a round."""
        rows, in_all = (records, columns), self.bound * records
        bound = [Block(LOCAL, (), in_all)] if self.server_knows else []  # of no use without the likelihood's part
        first = [Block(AUXILIARY, rows, self.bound), *bound, Block(UNSETTLED, (), 1.0, integer=True, rows="some")]
        second = Block(SLOPE, rows, self.bound), Block(GAMMA, (gamma_size,), in_all), Block(VALUE, (), in_all)
        return dict(zip(self.phases, (tuple(first), second), strict=False))

    def declare(self, silos: int, private: bool) -> Declaration:
        """Every total has a row a record: what the silos' columns together say of a person."""
        if private and not self.server_knows:
            raise InputError(
                "response = 'silos' is not available under privacy, as what silos tell of gamma would have no noise; "
                "use response = 'private' or 'shared', with the response at the server"
            )
        with_z = _WITH_Z if self.server_knows else ", whether its own parameters or gamma still drift"
        what = {
            AUXILIARY_PHASE: "its auxiliary variable of each person" + ("" if private else with_z),
            SLOPE_PHASE: "its slope of the likelihood at each person, its gradient in the shared parameters gamma, and "
            "its weighted part of the log-likelihood",
        }
        asked = drawn(silos, self.participation)
        sums = tuple(Sums(phase, self.rounds, what[phase], *asked) for phase in self.phases)
        if not self.server_knows:
            sums += (Sums(SHARED_PHASE, 1, "its copy of q of the shared parameters gamma", silos, besides=True),)
        keeps, because = "its parameters' posterior", f"participation = {self.participation:g}"
        # Of batches nobody knows the share before the people are counted: it may be one person.
        share = 1.0 if getattr(self, "batch_size", None) is None else 0.0
        labels = LABELS["noised" if private and self.response == "private" else self.response]
        return Declaration(self.rounds, sums, keeps, share=share, because=because, people=True, labels=labels)

    def check_response(self) -> None:
        """Raise InputError for a model and a setting that do not go together."""
        if self.is_power and not self.server_knows:
            raise InputError(
                "response = 'silos' keeps the response from the server, and in the power-likelihood model it sums a "
                "slope a person, whose sign is the label; use model = 'augmented'"
            )
        if self.model == "power" and self.response == "private":
            raise InputError(
                "the power-likelihood model needs the response at every silo, since each evaluates the likelihood; "
                "use model = 'augmented' where the response is private, or share it"
            )


@dataclass(frozen=True)
class Vertical(RunShape):
    """Options of vertical inference: one model, one family and one run."""

    model: Literal["augmented", "power"] = "augmented"
    """Of the likelihood: of the sum of all z_j, or a weighted one at each silo of its eta_j and the others' z_k."""
    rho: Positive = 1.0
    """Standard deviation of z_j given eta_j: smaller is closer to the pooled model, and slower to fit."""
    response: Literal["shared", "private", "silos"] = "shared"
    """Who knows y: silos and server, the server alone, or the silos alone (z integrated out)."""
    family: Literal["auto", "diagonal", "full", "low_rank"] = "auto"
    """Of theta_j, as in `families.global_family`; "auto" is diagonal where batches are drawn, since their noise
    accumulates in correlations that few records inform."""
    auxiliary: Amortised | MeanField | Integrated | Auto = field(default_factory=Auto)
    """Of z_j given theta_j."""
    local_steps: Count = 1
    """Updates a silo makes between two exchanges, for the same s."""
    damping: Share | None = None
    """Share of their change that is kept; None keeps all of one step and 1/J of several, since J silos answer the same
    s at once."""
    batch_size: Count | None = None
    """Records a round, the same at all parties by a shared seed; None uses all."""
    rounds: Count = 4000
    """How many; a run that has not settled by then says so."""
    learning_rate: float = 0.02
    """Of the silos' and the server's steps."""
    schedule: Schedule = "linear"
    """How it falls over `rounds`."""
    average_last: Part = 0.25
    """The share of last iterates that is averaged."""
    optimizer: str = "adam"
    """Of silos and server, as in `optimizers.Optimizer`."""
    participation: Share = 1.0
    """Of the silos, asked in a round; an absent silo's last z_j stays in the sum (augmented-variable model, all records
    a round)."""
    max_staleness: Whole = 0
    """Rounds for which it may: then the silo is asked again whatever the draw."""
    bound: Bound = 2.0**20
    """Largest absolute value of an element of a contribution; past it a silo refuses."""

    name: ClassVar[str] = "vertical"
    importance_samples: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check(self)
        self.check_response()
        if self.is_power and isinstance(self.auxiliary, Integrated):
            raise InputError(
                "in the power-likelihood model each silo sees the others' z, so that nobody can integrate it out; "
                "use an amortised or mean-field auxiliary"
            )
        Optimizer(self.optimizer, self.learning_rate)
        if not self.server_knows and not isinstance(self.auxiliary, Integrated | Auto):
            raise InputError(
                "response = 'silos' keeps the response from the server, and z_j of these auxiliary families follow "
                "each person's label; use auxiliary kind 'integrated'"
            )
        if not self.server_knows and self.batch_size is not None:
            raise InputError(
                "response = 'silos' keeps the response from the server, and of batches that all know the sums of "
                "predictors move by an equation each for the labels; leave batch_size out"
            )
        if not self.server_knows and self.max_staleness:
            raise InputError("response = 'silos': each silo follows gamma through every round; set participation = 1")
        if (self.participation < 1) != (self.max_staleness > 0):
            raise InputError("participation below 1 and max_staleness above 0 belong together: give both or neither")
        if self.max_staleness and (self.is_power or self.batch_size is not None):
            raise InputError(
                "silos may be absent from rounds in the augmented-variable model with all records in each round only: "
                "the power likelihood needs every silo's slope, and a batch z_j that were sent before"
            )

    def resolved(self, likelihood: Likelihood) -> Vertical:
        """With the auxiliary family that is used. Raises InputError where `likelihood` cannot be integrated."""
        possible = not self.is_power and marginal(likelihood, 1.0) is not None
        if isinstance(self.auxiliary, Integrated) and not possible:
            raise InputError(
                f"a {type(likelihood).__name__} likelihood cannot be integrated over z; use another auxiliary"
            )
        if not self.server_knows and not possible:
            raise InputError(
                f"response = 'silos' needs z integrated out, which a {type(likelihood).__name__} likelihood cannot be: "
                "take another likelihood, or let the server hold the response"
            )
        if not isinstance(self.auxiliary, Auto):
            return self
        return replace(self, auxiliary=Integrated() if possible else Amortised())

    def seen_by_holder(self, likelihood: Likelihood, silos: int) -> Likelihood:
        """What the holder of the response takes derivatives of, in the sum that it gets from `silos` silos."""
        if not isinstance(self.auxiliary, Integrated):
            return likelihood
        found = marginal(likelihood, math.sqrt(silos) * self.rho, self.auxiliary.nodes)
        assert found is not None
        return found

    @property
    def family_in_use(self) -> str:
        return "diagonal" if self.family == "auto" and self.batch_size is not None else self.family

    def multiplier(self, round_: int) -> float:
        """Of the learning rate."""
        return float(SCHEDULES[self.schedule](round_ / self.rounds))

    def averages(self, round_: int) -> bool:
        """Whether the iterate after `round_` enters the average."""
        return round_ >= self.rounds * (1 - self.average_last)

    def kept(self, silos: int) -> float:
        """The damping in force among `silos` silos."""
        if self.damping is not None:
            return self.damping
        return 1.0 if self.local_steps == 1 else 1.0 / silos

    def program(self, problem: VerticalProblem, held: Predictor | Held | None = None) -> VerticalProgram:
        """A silo's with its predictor, the server's with what it holds; without either what both derive alike."""
        return VerticalProgram(self, problem, held)


def shared_batch(seed: int, round_: int, records: int, size: int | None) -> npt.NDArray[np.int64]:
    """Positions of the records of a round, sorted, drawn without replacement: the same at every party.

    Everyone knows who takes part, so that subsampling amplifies no privacy guarantee. Terms of records are to be
    weighted by records / size.
    """
    if size is None or size >= records:
        return np.arange(records)
    rng = np.random.default_rng([abs(seed), round_])
    return np.sort(rng.choice(records, size, replace=False)).astype(np.int64)


class VerticalProblem(NamedTuple):
    """What all parties know before the first round."""

    likelihood: Likelihood
    silos: tuple[str, ...]  # all ids, sorted
    records: int  # N, the people that all silos hold
    seed: int
    dtype: torch.dtype
    device: torch.device
    mode: Mode
    privacy: DP | None = None
    offset: bool = False  # people had one that is not zero everywhere; known in one process alone


class VerticalView(NamedTuple):
    """What a silo's half may use. Never leaves the silo."""

    silo: str
    rows: Params  # (N, ...): the silo's columns
    response: Response | tuple[()]  # () where it is private
    size: int  # N
    record_draws: KeyedDraws
    silo_draws: KeyedDraws
    start_seed: int  # of the amortising network's weights
    turn: int = 0  # the silo's own count of questions, from 0: what keys its draws


class Held(NamedTuple):
    """What the server holds of people: the response, and where privacy protects it the gate that guards it."""

    response: Response | None  # None where the silos alone know it
    gate: Gate | None = None
    named: Callable[..., int] | None = None  # what a release's noise is named by, from its numbers; None: by its sum


class VerticalState(NamedTuple):
    """The server's state. All of it follows from totals, and from the response where the server holds it."""

    round: int
    phase: str
    gamma: ServerParams  # q(gamma)
    average: Params
    averaged: int
    pull: Tensor  # (B, C) what the next round's broadcast carries: dlog p(y | s)/ds, or D
    curvature: Tensor  # ()
    total: Tensor  # (B, C) s: of this round between two phases, the running total under staleness
    local: float  # nats: the silos' part of the bound of this round
    objective: float  # the bound as estimated in the last round, nats
    unsettled: float  # one where some silo's parameters still drifted, nan where it is not released
    monitor: stopping.Monitor  # of gamma
    led: Led  # of gamma


class Answered(NamedTuple):
    """Power likelihood: what the sum of slopes left for the update."""

    own: Tensor  # (B, C) d_j
    others: Tensor  # (B, C) s - z_j
    gamma: Tensor  # (n_gamma,)
    share: Tensor  # () w_j


class Shared(NamedTuple):
    """A silo's copy of q(gamma) where silos alone know the response; all silos' are the same. Empty otherwise."""

    q: ServerParams
    average: Params  # over the last rounds, as many as of its own parameters
    monitor: stopping.Monitor
    led: Led


class VerticalLocal(NamedTuple):
    """A silo's state. It never leaves the silo."""

    params: SiloParams
    moments: Moments
    average: Params  # of params.shared, over the last rounds
    averaged: int
    sent_round: int  # the round whose z_j the server has, -1 before the first
    turn: int  # of the silo's own count when it drew that z_j: its noise is replayed from there
    sent: Tensor  # (N, C) that z_j under staleness, (0, C) otherwise
    answered: Answered
    monitor: stopping.Monitor  # of q(theta_j)
    gamma: Shared
    led: Led  # of theta_j


class ColumnsProgram(Program):
    """What variational runs and SOUL share: what all parties derive alike, and the server's half.

    It holds no data but the response, at a server that has it: predictors differ between silos, so that each has its
    own program.
    """

    problem: VerticalProblem  # type: ignore[assignment]
    predictor: Predictor  # a silo's own

    def __init__(self, config: Any, problem: VerticalProblem, held: Predictor | Held | None = None) -> None:
        super().__init__(config, problem)  # type: ignore[arg-type]
        if isinstance(held, Predictor):
            self.set_silo(held)
        elif held is not None:
            self.set_server(held)

    def setup(self) -> None:
        config, problem = self.config, self.problem
        self.columns, self.gamma_size = problem.likelihood.columns, problem.likelihood.gamma_size
        #: A round's batch is asked for by everything that takes rows, and two rounds are in work at a time.
        self.batch = functools.lru_cache(maxsize=2)(self._batch)
        self.batch_records = min(config.batch_size or problem.records, problem.records)
        self.weight = problem.records / self.batch_records
        self._cohorts, self._last = list[tuple[str, ...]](), dict.fromkeys(problem.silos, -1)

    @abstractmethod
    def set_silo(self, predictor: Predictor) -> None:
        """What one silo computes with. Raises InputError for what its predictor or its privacy do not allow."""

    @abstractmethod
    def local_fit(self, local: Any) -> Any:
        """q(theta_j) and the fitted `pyro.param`s by name: "theta/...", "point/..."."""

    @abstractmethod
    def thetas(self, local: Any, n: int, seed: int) -> Tensor:
        """`n` draws of theta_j (n, n_theta), unconstrained. For the silo's own eyes."""

    def wrong_sds(self, local: Any) -> str:
        """What the silo is to hear of sds that are too small, as q is a product, or too large; nothing if unseen."""
        return ""

    def _wider(self, led: Led, averaged: int) -> Tensor | None:
        """(n,) how many times posterior sds are those of q; None where nothing was seen of it: gradients of
        batches, and noised ones, move by themselves."""
        seen = averaged >= _LOOKED_AT and self.batch_records == self.problem.records and not self.terms
        return led.widening() if seen else None

    def sums(self) -> dict[str, Sum]:
        rows, rounds = (self.batch_records, self.columns), self.config.rounds
        blocks, when = self.config.blocks(*rows, self.gamma_size), Phase(range(rounds))
        sent: dict[str, tuple[int, ...]] = {"pull": rows, "curvature": ()}
        scalars = ("scale", "averaging")
        if not self.config.server_knows:
            sent = {"sum": rows}
        found = {AUXILIARY_PHASE: Sum(blocks[AUXILIARY_PHASE], when, sent, frozenset({AUXILIARY}), scalars=scalars)}
        if not self.config.server_knows:
            size = sum(value.numel() for value in self._gamma_core().init().eta.values())
            own, last = (Block(GAMMA, (size,), self.config.bound),), range(rounds, rounds + 1)
            found[SHARED_PHASE] = Sum(own, Phase(last, ends=True), sent, scalars=scalars)
        if self.config.is_power:
            sent = {"sum": rows, "gamma": (self.gamma_size,)}
            found[SLOPE_PHASE] = Sum(blocks[SLOPE_PHASE], when, sent, scalars=scalars)
        return found

    def cohort(self, round_: int) -> tuple[str, ...]:
        """The silos asked in a round: by a public coin, and all whose last z_j has reached the bound on staleness."""
        problem, config = self.problem, self.config
        while len(self._cohorts) <= round_:
            at = len(self._cohorts)
            chosen = choose_cohort(problem.silos, self.cohort_size, problem.seed, at)
            due = [s for s, last in self._last.items() if last < 0 or at - last > config.max_staleness]
            self._cohorts.append(tuple(sorted({*chosen, *due})))
            self._last |= dict.fromkeys(self._cohorts[at], at)
        return self._cohorts[round_]

    def weights(self) -> Tensor:
        """(B,) what each record of a batch stands for."""
        return torch.full((self.batch_records,), self.weight, dtype=self.problem.dtype, device=self.problem.device)

    def move(self, value: Any) -> Tensor:
        """A tensor, an array or a number, as this run computes with it, whatever PyTorch takes numbers for."""
        return torch.as_tensor(value, dtype=self.problem.dtype, device=self.problem.device)

    def _batch(self, round_: int) -> Tensor | None:
        """Positions of the records of a round; None for all."""
        if self.batch_records == self.problem.records:
            return None
        at = shared_batch(self.problem.seed, round_, self.problem.records, self.batch_records)
        return torch.from_numpy(at).to(self.problem.device)

    def _responses(self, known: Response, round_: int) -> Response:
        """Those of a round's batch."""
        return Response(**take(known._asdict(), self.batch(round_)))

    def of_holder(self) -> tuple[dict[str, BlockTable], dict[str, Terms]]:
        """Tables and terms of what the holder of a private response releases: pulls on each record, and through them
        its own noised gradient in gamma. It adds all of the noise itself; its norm is the clipping norm too."""
        terms, rows = self.terms[AUXILIARY_PHASE], self.parts[AUXILIARY_PHASE].chosen(frozenset({AUXILIARY}))
        alone = dataclasses.replace(terms.settings, noise="silo", epsilon=None, noise_multiplier=terms.noise_multiplier)
        pull = dataclasses.replace(terms, settings=alone, resolution=0)
        hidden = dataclasses.replace(pull, extent=Extent(0, self.gamma_size, 0))
        return {PULL_PHASE: pull.table(rows, [])}, {PULL_PHASE: pull, HIDDEN_PHASE: hidden}

    # ---- server ----

    def set_server(self, held: Held) -> None:
        """Raises InputError for a likelihood that cannot be evaluated a record at a time where it has to be."""
        self.held, self.gate, self._named = held
        self.set_gamma()
        self._slopes = ByRecord(self._slopes_function, self._made_labels, "eager", "the likelihood")
        if self.gate is not None:
            self._check_likelihood()

    def set_gamma(self) -> None:
        """What whoever knows the response computes with: the server, or each silo."""
        problem, self.server_core = self.problem, self._gamma_core()
        self.likelihood, self._draws = self.server_core.likelihood, server_draws(problem.seed)
        self._respond = Traced(self.server_core.respond, (None,) * 4, problem.mode)
        self._move_gamma = Traced(self.server_core.update, (None,) * 4, problem.mode)

    def _gamma_core(self) -> VerticalServer:
        config, problem = self.config, self.problem
        seen = config.seen_by_holder(problem.likelihood, len(problem.silos))
        return VerticalServer(seen, Optimizer(config.optimizer, config.learning_rate), problem.dtype, config.family)

    @property
    def response(self) -> Response:
        """What the server has of it."""
        assert self.held is not None
        return self.held

    def init(self) -> VerticalState:
        gamma, zero = self._gamma_start(), self.move(torch.zeros(self.batch_records, self.columns))
        return VerticalState(
            0, AUXILIARY_PHASE, gamma, gamma.eta, 0, zero, zero.new_zeros(()), zero, 0.0, math.nan, math.nan,
            stopping.start(), Led(*zero.new_zeros(3, self.gamma_size)),
        )  # fmt: skip

    def _gamma_start(self) -> ServerParams:
        return ServerParams(*({k: v.to(self.problem.device) for k, v in d.items()} for d in self.server_core.init()))

    def broadcast(self, state: VerticalState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        # Silos know both by the round, and go by that.
        scalars = {"scale": self._scale(state.round), "averaging": float(self._averages(state.round - 1))}
        tensors = {"sum": state.total}
        if not self.config.server_knows:
            asked = self.asked(state.round, state.phase)
            return Broadcast(state.round, index, accepted, asked, scalars, tensors, state.phase)
        if state.phase == SLOPE_PHASE:
            tensors = {"sum": state.total, "gamma": self._gamma(state)}
        else:
            tensors = {"pull": state.pull, "curvature": state.curvature}
        return Broadcast(state.round, index, accepted, self.cohort(state.round), scalars, tensors, state.phase)

    def step(self, state: VerticalState, message: Broadcast, sums: Totals, scale: float) -> tuple[VerticalState, Step]:
        if self.answered(scale) != len(message.cohort):
            raise AggregationError(
                f"round {state.round}: a silo that was asked did not answer; the sum of the auxiliary variables is "
                "then no predictor. Ask again when it is back"
            )
        if message.phase == SLOPE_PHASE:
            return self._after_slopes(state, sums)
        if message.phase == SHARED_PHASE:
            told = self.move(sums[GAMMA]) / len(message.cohort)
            state = state._replace(average=unflatten(told, state.average))
            return state, Step(math.nan, self._rate(state), None, SHARED_PHASE, True)
        s = self.move(sums[AUXILIARY])
        if self.config.max_staleness:
            s = s + state.total
        state = state._replace(
            total=s,
            local=scale * float(sums[LOCAL]) if LOCAL in sums else math.nan,
            unsettled=float(sums[UNSETTLED]) if UNSETTLED in sums else math.nan,
        )
        if not self.config.server_knows:
            step = Step(math.nan, self._rate(state), None, self._stage(self._averages(state.round)), False)
            phase = AUXILIARY_PHASE if state.round + 1 < self.config.rounds else SHARED_PHASE
            return state._replace(round=state.round + 1, phase=phase), step
        if self.config.is_power:
            step = Step(state.objective, self._rate(state), state.monitor.r_hat, SLOPE_PHASE, False)
            return state._replace(phase=SLOPE_PHASE), step
        response, gamma = self._responses(self.response, state.round), self._gamma(state)
        if self.gate is not None:
            # The curvature, which several local steps would need, follows from every offset, and is not noised.
            pull, in_gamma = self._guarded(message, response, s, gamma)
            return self._finish(state._replace(pull=pull, curvature=pull.new_zeros(())), in_gamma, math.nan)
        answer = self._respond(response, s, gamma, self.weights())
        state = state._replace(pull=answer.pull, curvature=answer.curvature)
        return self._finish(state, answer.gamma, float(answer.value))

    def posterior(self, state: VerticalState) -> Posterior:
        """q(gamma); the silos' q(theta_j) stay with them."""
        return Posterior(self.server_core.family, state.average, {})

    def verdict(self, state: VerticalState) -> Verdict:
        """Whether gamma and, where silos say so, their own parameters stopped drifting; and whether q is too narrow for
        gamma, which what silos alone know of the response leaves to them to see."""
        still = settled(state.monitor) or not self.config.server_knows  # silos say whether gamma is
        at_rest = still and (math.isnan(state.unsettled) or state.unsettled < 0.5)
        details = self.metrics(state)
        if self.terms:
            return Verdict(None, PRIVATE, details, not at_rest)
        found = Verdict(True, "gamma and the silos' own parameters stopped drifting", details)
        if not at_rest:
            own = "own parameters" if self.config.server_knows else "own parameters or gamma"
            who = "gamma was" if not still else f"some silo's {own} were"
            advice = f"raise rounds (now {self.config.rounds}), lower learning_rate, or standardise the columns"
            found = Verdict(False, f"{who} still drifting when the rounds were over; {advice}", details)
        wider = self._wider(state.led, state.averaged)
        if wider is None:
            return found
        found = found._replace(details={**details, "widening": (worst := float(wider.max()))})
        if worst < _MUCH_WIDER:
            return found
        return found._replace(reason=f"{found.reason}; besides, {_of_product({'gamma': worst})}", narrow=True)

    def metrics(self, state: VerticalState) -> dict[str, float | None]:
        unsettled = None if math.isnan(state.unsettled) else round(state.unsettled)
        return {"r_hat": state.monitor.r_hat, "some_unsettled": unsettled}

    def _after_slopes(self, state: VerticalState, sums: Totals) -> tuple[VerticalState, Step]:
        """Power likelihood: D, the gradient in gamma and the likelihood's value are totals."""
        value, offset = float(sums[VALUE]), self._responses(self.response, state.round).offset
        curvature = self.server_core.curvature(offset, state.total, self._gamma(state))
        state = state._replace(phase=AUXILIARY_PHASE, pull=self.move(sums[SLOPE]), curvature=curvature)
        return self._finish(state, self.move(sums[GAMMA]), value)

    def _finish(self, state: VerticalState, in_gamma: Tensor, value: float) -> tuple[VerticalState, Step]:
        """The step on q(gamma), and the end of the round."""
        scale = self.move(self.config.multiplier(state.round))
        gamma, own, moved = self._move_gamma(state.gamma, in_gamma, self._gamma_noise(state.round), scale)
        objective = state.local + value + float(own)
        what, found = "the objective", objective
        if self.terms:  # the bound is not released, and what q follows from is noised
            what, found = "q of the shared parameters", sum(float(value.sum()) for value in gamma.eta.values())
        if not math.isfinite(found):
            raise InputError(f"{what} is not finite in round {state.round}; lower learning_rate or rescale the data")
        averaged = state.averaged + 1 if self._averages(state.round) else 0
        average = running_average(state.average, gamma.eta, averaged)
        monitor = self._watched(state.monitor, gamma.eta)
        finished = state.round + 1 >= self.config.rounds
        step = Step(objective, self._rate(state), monitor.r_hat, self._stage(bool(averaged)), finished)
        ahead = state._replace(
            round=state.round + 1, objective=objective, gamma=gamma, average=average, averaged=averaged,
            monitor=monitor, led=state.led.then(moved, averaged),
        )  # fmt: skip
        return ahead, step

    def _watched(self, monitor: stopping.Monitor, eta: Params) -> stopping.Monitor:
        """After one more q(gamma)."""
        sd = self.server_core.family.stddev(eta)
        sd = torch.where(sd > 0, sd, 1.0)  # a point has none
        return stopping.watch(stopping.observe(monitor, to_numpy(eta["loc"]), np.log(to_numpy(sd))))

    @staticmethod
    def _stage(averaging: bool) -> str:
        return "averaging" if averaging else "approach"

    def _guarded(self, message: Broadcast, response: Response, s: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """The response's part of a round, clipped, noised and charged: pulls and the gradient in gamma."""
        found = self._slopes_alone(response, s, gamma)
        answer = RowAnswer((HIDDEN_PHASE, found.gamma), lambda noised: (found.predictor, noised))
        # With what all the rows follow from: that those of two rounds are equal would tell of labels.
        made_of = torch.tensor(message.round), s, gamma, found.gamma, found.predictor
        turn = None if self._named is None else self._named(*made_of)
        pull, in_gamma = self.release_held(message, PULL_PHASE, answer, turn)
        return self.move(pull).reshape(found.predictor.shape), self.move(in_gamma * self.weight)

    def _slopes_alone(self, response: Response, s: Tensor, gamma: Tensor) -> RecordSlopes:
        """A record on which the likelihood fails is not a number, which the gate counts as nothing: to fail would tell
        of it without noise."""
        return RecordSlopes(*self._slopes(gamma, (*response, s)))

    def _slopes_function(self, gamma: Tensor, records: Any) -> RecordSlopes:
        y, offset, s = records
        return slopes_by_record(self.likelihood, y, offset, s, gamma)

    def _made_labels(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Made labels, offsets (count,) and sums (count, C)."""
        s = self.move(torch.zeros(count, self.columns))
        return s[:, 0], s[:, 0], s

    def _check_likelihood(self) -> None:
        """Raise InputError for a likelihood that cannot be evaluated a record at a time, on made labels."""
        try:
            self._slopes.check(self.move(torch.zeros(self.gamma_size)))
        except Exception as error:  # the likelihood may be the user's
            raise InputError(
                "record-level privacy evaluates the likelihood of each record alone, which fails on labels of 0 "
                f"({type(error).__name__}: {one_line(error)})"
            ) from error

    def _gamma_noise(self, round_: int) -> Tensor:
        return self.move(self._draws.normals(round_, self.server_core.family.noise_size)[0])

    def _gamma(self, state: VerticalState) -> Tensor:
        return self.server_core.gamma(state.gamma.eta, self._gamma_noise(state.round))

    def _scale(self, round_: int) -> float:
        """Of the steps that silos take in a round, which answer the pull on what they sent in the one before."""
        return float(self.config.multiplier(max(round_ - 1, 0)))

    def _averages(self, round_: int) -> bool:
        return round_ >= 0 and bool(self.config.averages(round_))

    def _rate(self, state: VerticalState) -> float:
        return float(self.config.learning_rate * self.config.multiplier(state.round))


class VerticalProgram(ColumnsProgram):
    """Vertical inference on one problem."""

    # ---- privacy ----

    def agreed(self, sums: Mapping[str, Sum]) -> dict[str, Terms]:
        """One person's columns at one silo enter each round twice: in theta_j's noised gradient and in its row of z_j.
        Batches are known to all, so that they amplify nothing; every round is charged."""
        privacy, config = self.problem.privacy, self.config
        if not isinstance(privacy, RecordDP):
            raise InputError(
                "vertical silos hold parts of the same people: protect a person's columns and label with "
                "privacy.unit = 'record' (adjacency: one person's values replaced)"
            )
        if privacy.objective_share or privacy.public_counts:
            raise InputError(
                "a vertical run under privacy releases z_j alone: leave out objective_share, public_counts"
            )
        if privacy.linked > 1:
            raise InputError("vertical silos hold one row a person each: leave out linked")
        several, damped = config.local_steps > 1, config.damping not in (None, 1)
        for option, refused in (
            ("model", config.is_power),
            ("local_steps", several),
            ("damping", damped),
        ):
            if refused:
                raise InputError(
                    f"{option} = {getattr(config, option)!r} is not available under privacy: noise is added to one "
                    "gradient and one row of z_j a round; use the augmented-variable model, local_steps = 1, no damping"
                )
        if config.max_staleness:
            raise InputError(
                "a silo whose last z_j stays in the sum is not available under privacy: set max_staleness = 0"
            )
        shared = self.batch_records * self.columns
        both = agree(privacy, len(self.problem.silos), 1.0, 2 * config.rounds, Extent(shared, 0, 0))
        # The retries that were paid for in `both` go to each of the two.
        rows = dataclasses.replace(both, rounds=config.rounds, adjacency=REPLACE)
        rows = dataclasses.replace(rows, settings=dataclasses.replace(privacy, retries=privacy.retries // 2))
        alone = dataclasses.replace(rows.settings, noise="silo", epsilon=None, noise_multiplier=both.noise_multiplier)
        hidden = dataclasses.replace(rows, settings=alone, resolution=0, extent=Extent(0, 1, 0))
        return {AUXILIARY_PHASE: rows, HIDDEN_PHASE: hidden}

    # ---- silo ----

    def set_silo(self, predictor: Predictor) -> None:
        config, problem, mode = self.config, self.problem, self.problem.mode
        self.predictor = predictor
        optimizer = Optimizer(config.optimizer, config.learning_rate)
        self.core = VerticalSilo(config, problem.likelihood, predictor, len(problem.silos), optimizer)
        if self.terms:
            self._draws_alone = ByRecord(self._draw_function, self.core.made, mode, "the predictor")
            self._gradients = ByRecord(self._gradient_function, self._made_answered, mode, "the predictor's gradient")
            self._prior_gradient = Traced(self.core.prior_gradient, (None,) * 2, mode, by_shape=True)
            self._ascend = TracedOnMade(self._ascend_function, self._made_ascent, mode)
            self._check_predictor()
        if not config.server_knows:
            self.set_gamma()
        self._draw = Traced(self.core.draw, (None,) * 5, mode, by_shape=True)
        self._slope = Traced(self.core.slope, (None,) * 6, mode, by_shape=True)
        self._update = Traced(self.core.update, (None,) * 8, mode, by_shape=True)

    def init_local(self, view: Any) -> VerticalLocal:
        generator = torch.Generator().manual_seed(view.start_seed)
        params, moments = self.core.init(view.size, generator)
        params, moments = SiloParams(*map(self._moved, params)), Moments(*map(self._moved, moments))
        zero = self.move(torch.zeros(0, self.columns))
        sent = zero.new_zeros(view.size, self.columns) if self.config.max_staleness else zero
        gamma, scalar = zero.new_zeros(self.gamma_size), zero.new_zeros(())
        answered = Answered(zero, zero, gamma, scalar)
        q = ServerParams({}, {}) if self.config.server_knows else self._gamma_start()
        known, monitor = Shared(q, q.eta, stopping.start(), Led(gamma, gamma, gamma)), stopping.start()
        its = Led(*torch.zeros_like(params.shared["theta/loc"]).expand(3, -1))
        return VerticalLocal(params, moments, params.shared, 0, -1, 0, sent, answered, monitor, known, its)

    def answer(self, message: Broadcast, local: VerticalLocal, view: Any) -> Answer | RowAnswer:
        if message.phase == SLOPE_PHASE:
            return self._slopes_of(message, local, view)
        if message.phase == SHARED_PHASE:
            return self._told(message, local, view)
        if self.terms:
            return self._rows_of(message, local, view)
        if local.sent_round >= 0:
            params, moments = self._found(local)
            incoming, scale, gamma = self._incoming(message, local, view)
            local = local._replace(gamma=gamma)
            rows, response = self._rows(local.sent_round, view), self._response(local.sent_round, view)
            noise = self._noise(local, view)
            found = self._update(params, moments, rows, response, self.weights(), noise, incoming, scale)
            local = self._finished(message, local, SiloParams(*found[0]), Moments(*found[1]))
            local = local._replace(led=local.led.then(found[2], local.averaged))
        local = local._replace(sent_round=message.round, turn=view.turn)
        draw = self._draw_at(local, view)
        z = draw.z
        if self.config.max_staleness:
            z, local = draw.z - local.sent, local._replace(sent=draw.z)
        still = settled(local.monitor) and (self.config.server_knows or settled(local.gamma.monitor))
        told = {AUXILIARY: z, LOCAL: draw.local, UNSETTLED: float(not still)}
        return Answer(told, local)

    def _told(self, message: Broadcast, local: VerticalLocal, view: VerticalView) -> Answer:
        """After the last round: q(gamma), once it has answered that round too."""
        if local.sent_round != message.round - 1:
            raise ProtocolError(
                f"silo '{view.silo}': gamma after round {message.round}, the last of which it is not in"
            )
        _, _, gamma = self._incoming(message, local, view)
        own = torch.cat([value.reshape(-1) for _, value in sorted(gamma.average.items())])
        return Answer({GAMMA: own}, local._replace(gamma=gamma))

    def local_fit(self, local: VerticalLocal) -> Any:
        """Averaged over the last rounds."""
        return local.average if local.averaged else local.params.shared

    def thetas(self, local: VerticalLocal, n: int, seed: int) -> Tensor:
        family, eta = self.core.family, part(self.local_fit(local), "theta")
        eps = torch.randn(n, family.noise_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return torch.func.vmap(lambda e: family.transform(eta, e))(eps.to(eta["loc"]))

    def wrong_sds(self, local: VerticalLocal) -> str:
        wider = self._wider(local.led, local.averaged)
        if wider is None:
            return ""
        found = {name: float(ratio.max()) for name, ratio in self.predictor.by_site(wider).items() if ratio.numel()}
        if not self.config.server_knows:
            found["gamma"] = float(local.gamma.led.widening().max())
        much = {name: ratio for name, ratio in found.items() if ratio >= _MUCH_WIDER}
        by_site = self.predictor.by_site(local.led.too_wide())
        wide = [f"{name} {float(ratio.max()):.2g} times" for name, ratio in by_site.items() if bool((ratio > 1).any())]
        lines = [_of_product(much)] if much else []
        if wide:
            lines.append(
                f"sds of q have not come to rest, and are larger than they will be: {', '.join(wide)}; standardise the "
                f"columns, or raise rounds (now {self.config.rounds})"
            )
        return "; besides, ".join(lines)

    def _slopes_of(self, message: Broadcast, local: VerticalLocal, view: VerticalView) -> Answer:
        s, gamma = self.move(message.tensors["sum"]), self.move(message.tensors["gamma"])
        weight = s.new_tensor(1.0 / len(self.problem.silos))
        if local.sent_round != message.round:
            raise ProtocolError(f"silo '{view.silo}': slopes of round {message.round}, whose sum it is not in")
        draw = self._draw_at(local, view)
        response = self._response(message.round, view)
        assert isinstance(response, Response)
        own, in_gamma, value = self._slope(draw, response, self.weights(), s, gamma, weight)
        answered = Answered(own, s - draw.z, gamma, weight)
        return Answer({SLOPE: own, GAMMA: in_gamma, VALUE: value}, local._replace(answered=answered))

    def _found(self, local: VerticalLocal) -> tuple[SiloParams, Moments]:
        """Parameters and moments of the round that `local` is in, with those of its records."""
        record = take(local.moments.record, self.batch(local.sent_round))
        return self._record_params(local), Moments(local.moments.shared, record)

    def _incoming(
        self, message: Broadcast, local: VerticalLocal, view: VerticalView
    ) -> tuple[Incoming, Tensor, Shared]:
        """What the round that `local` is in is answered, now that the pull on it is known, or follows from s; the
        step's scale (); and q(gamma) after its step, where that is the silo's to take."""
        scale = self.move(self._scale(message.round))  # as the server takes it; no server's to name
        known = local.gamma
        if self.config.server_knows:
            pull, h = self.move(message.tensors["pull"]), self.move(message.tensors["curvature"])
        else:
            response, noise = self._response(local.sent_round, view), self._gamma_noise(local.sent_round)
            assert isinstance(response, Response)
            gamma = self.server_core.gamma(known.q.eta, noise)
            pull, h, in_gamma, _ = self._respond(response, self.move(message.tensors["sum"]), gamma, self.weights())
            moved, _, away = self._move_gamma(known.q, in_gamma, noise, scale)
            q, averaged = ServerParams(*moved), self._averaged(message, local)
            average = running_average(known.average, q.eta, averaged)
            known = Shared(q, average, self._watched(known.monitor, q.eta), known.led.then(away, averaged))
        if self.config.is_power:
            a = local.answered
            return Incoming(pull - a.own, h * (1 - a.share), a.others, a.gamma, a.share), scale, known
        others, none = torch.zeros_like(pull), pull.new_zeros(self.gamma_size)
        return Incoming(pull, h, others, none, torch.ones_like(h)), scale, known

    def _averaged(self, message: Broadcast, local: VerticalLocal) -> int:
        """How many rounds a silo's average is of, with the one that is answered now."""
        return local.averaged + 1 if self._averages(message.round - 1) else 0

    def _finished(self, message: Broadcast, local: VerticalLocal, new: SiloParams, moments: Moments) -> VerticalLocal:
        """After the steps of the round that `local` is in."""
        at, averaged = self.batch(local.sent_round), self._averaged(message, local)
        theta = part(new.shared, "theta")
        log_sd = np.log(to_numpy(self.core.family.stddev(theta)))
        return local._replace(
            params=SiloParams(new.shared, put(local.params.record, at, new.record)),
            moments=Moments(moments.shared, put(local.moments.record, at, moments.record)),
            average=running_average(local.average, new.shared, averaged),
            averaged=averaged,
            monitor=stopping.watch(stopping.observe(local.monitor, to_numpy(theta["loc"]), log_sd)),
        )

    # ---- a record at a time: one on which the program fails is not a number, which the gate counts as nothing ----

    def _rows_of(self, message: Broadcast, local: VerticalLocal, view: VerticalView) -> RowAnswer:
        if local.sent_round < 0:
            return RowAnswer(None, lambda _: self._drawn(message, local, view))
        params, moments = self._found(local)
        incoming, scale, _ = self._incoming(message, local, view)
        noise, sent = self._noise(local, view), self._rows_alone(local, params, view)
        rows, response = self._rows(local.sent_round, view), self._response(local.sent_round, view)
        records = (params.record, rows, response, noise.z, sent, incoming.pull)
        found = SiloParams(*self._gradients((params.shared, noise.theta, incoming.curvature), records))
        # theta_j follows from everyone's values, so that its gradient is noised before any row of z_j depends on it.
        together = torch.cat([found.shared[name].reshape(len(sent), -1) for name in sorted(found.shared)], 1)

        def after(noised: Tensor | None) -> tuple[Tensor, VerticalLocal]:
            assert noised is not None
            free = self._prior_gradient(params._replace(record={}), noise.theta)
            own = unflatten(self.move(noised) * self.weight, free)
            # A record that cannot be computed stays where it is.
            record = {name: value.nan_to_num(0.0, 0.0, 0.0) for name, value in found.record.items()}
            gradient = SiloParams({name: own[name] + value for name, value in free.items()}, record)
            stepped = self._ascend(params, moments, gradient, scale)
            return self._drawn(message, self._finished(message, local, *stepped), view)

        return RowAnswer((HIDDEN_PHASE, together), after)

    def silence(self, message: Broadcast, local: VerticalLocal, view: VerticalView, gate: Gate) -> tuple[Release, Any]:
        """From the second answer on it is charged for the sum of gradients as well, which follows from nobody."""
        if local.sent_round >= 0:
            gate.hidden_sum(HIDDEN_PHASE, torch.zeros(1, 1))
        return gate.release_nothing(), local._replace(sent_round=message.round, turn=view.turn)

    def _drawn(self, message: Broadcast, local: VerticalLocal, view: VerticalView) -> tuple[Tensor, VerticalLocal]:
        """z_j anew (B, C)."""
        local = local._replace(sent_round=message.round, turn=view.turn)
        return self._rows_alone(local, self._record_params(local), view), local

    def _rows_alone(self, local: VerticalLocal, params: SiloParams, view: VerticalView) -> Tensor:
        """z_j (B, C) of the round that `local` is in."""
        rows, response = self._rows(local.sent_round, view), self._response(local.sent_round, view)
        noise = self._noise(local, view)
        found: Tensor = self._draws_alone((params.shared, noise.theta), (params.record, rows, response, noise.z))
        return found

    def _draw_function(self, shared: Any, records: Any) -> Tensor:
        (q, theta), (own, rows, response, z) = shared, records
        return self.core.draw_by_record(SiloParams(q, own), rows, response, Noise(theta, z))

    def _gradient_function(self, shared: Any, records: Any) -> SiloParams:
        (q, theta, curvature), (own, rows, response, z, sent, pull) = shared, records
        incoming = Incoming(pull, curvature, torch.zeros_like(pull), pull[:0, 0], torch.ones_like(curvature))
        return self.core.gradient_by_record(SiloParams(q, own), rows, response, Noise(theta, z), sent, incoming)

    def _made_answered(self, count: int) -> Any:
        """`VerticalSilo.made`, and what the made records sent and were answered."""
        made = self.core.made(count)
        return *made, torch.zeros_like(made[-1]), torch.ones_like(made[-1])

    def _made_ascent(self, params: SiloParams, moments: Moments, gradient: SiloParams, scale: Tensor) -> Any:
        """What `_ascend_function` was called with, made records in place of the silo's own."""
        made = self.core.init(self.batch_records, torch.Generator().manual_seed(0))
        own, its = ({k: v.to(scale) for k, v in part.record.items()} for part in made)
        zero = {name: torch.zeros_like(value) for name, value in gradient.record.items()}
        return params._replace(record=own), moments._replace(record=its), gradient._replace(record=zero), scale

    def _ascend_function(
        self, params: SiloParams, moments: Moments, gradient: SiloParams, scale: Tensor
    ) -> tuple[SiloParams, Moments]:
        params, moments, gradient = SiloParams(*params), Moments(*moments), SiloParams(*gradient)
        return self.core.ascend(params, moments, gradient, self.core.units(params), scale)

    def _check_predictor(self) -> None:
        """Raise InputError where made records cannot be evaluated alone, as then none of the silo's could be."""
        start = self.predictor.start
        shared = {k: v.to(start) for k, v in self.core.init(1, torch.Generator().manual_seed(0))[0].shared.items()}
        theta = start.new_zeros(self.core.family.noise_size)
        try:
            self._draws_alone.check((shared, theta))
            self._gradients.check((shared, theta, start.new_zeros(())))
        except Exception as error:  # program and likelihood may be the user's
            raise InputError(
                f"record-level privacy evaluates each record alone, which fails on made data ({type(error).__name__}: "
                f"{one_line(error)})"
            ) from error

    # ---- what both ways need ----

    def _draw_at(self, local: VerticalLocal, view: VerticalView) -> Draw:
        """The z_j of the round that `local` is in, the same however often it is asked for."""
        round_, noise, params = local.sent_round, self._noise(local, view), self._record_params(local)
        return Draw(*self._draw(params, self._rows(round_, view), self._response(round_, view), self.weights(), noise))

    def _record_params(self, local: VerticalLocal) -> SiloParams:
        """With those of the records in the round that `local` is in."""
        return SiloParams(local.params.shared, take(local.params.record, self.batch(local.sent_round)))

    def _rows(self, round_: int, view: VerticalView) -> Params:
        return take(view.rows, self.batch(round_))

    def _response(self, round_: int, view: VerticalView) -> Response | tuple[()]:
        return self._responses(view.response, round_) if view.response else ()

    def _noise(self, local: VerticalLocal, view: VerticalView) -> Noise:
        at = self.batch(local.sent_round)
        positions = None if at is None else at.cpu().numpy()
        theta = view.silo_draws.normals(local.turn, self.core.family.noise_size)[0]
        z = view.record_draws.normals(local.turn, self.columns, positions)
        return Noise(self.move(theta), self.move(z))

    def _moved(self, params: Params) -> Params:
        return {name: value.to(self.problem.device) for name, value in params.items()}


def _of_product(ratios: Mapping[str, float]) -> str:
    """That sds are too small, and by how much, by what they belong to."""
    named = ", ".join(f"{name} {ratio:.2g} times" for name, ratio in sorted(ratios.items(), key=lambda r: -r[1]))
    return (
        "q is a product over silos and gamma, and leaves out what columns of several tell together: as rounds showed "
        f"it, posterior sds are roughly so many times those of q: {named}. Centre columns, and leave out or combine "
        "what two silos hold alike"
    )


def settled(monitor: stopping.Monitor) -> bool:
    """Whether what is monitored has stopped drifting."""
    return monitor.r_hat is not None and monitor.r_hat < stopping.R_HAT_BELOW
