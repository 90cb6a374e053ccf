"""Structured federated variational inference (Hassan et al. 2023, Algorithm 1): one secure sum a round.

    server:  draws eps_G, sends Z_G, d = Z_G - mu_G and theta
    silo:    draws eps_L, takes a step on its own eta_L, contributes gradients in Z_G, d and theta
    server:  adds L0 = log p(Z_G) / q(Z_G), pulls the total back through f_G, takes a step on eta_G and theta

The result does not depend on how records are spread over silos. The paper's Algorithm 1 writes the silo's term with
p(y | ...); it is p(y, Z_L | Z_G) / q(Z_L | Z_G), and the server's L0 enters its own step.

Under record privacy the silo's term goes through the gate a record at a time. Record-level latents follow their own
record and past broadcasts only, so their steps need no noise; a silo-level latent follows all records of the silo, so
its gradient is clipped together with what is shared and comes back from the gate noised (docs/privacy-analysis.md).

A warm start is a few rounds of SFVI-Avg before the first one (S3.2: five such rounds halved the steps to convergence):
`SFVIWarmProgram`, made of the programs of both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import jacrev

from secure_fvi.aggregation.base import Block
from secure_fvi.algorithms import refining
from secure_fvi.algorithms.base import (
    CLIP,
    FINISH,
    PRIVATE,
    ROUND_PHASE,
    Broadcast,
    LocalFit,
    Phase,
    Posterior,
    Problem,
    SiloView,
    Step,
    Verdict,
    fixed_length,
)
from secure_fvi.algorithms.kit import (
    LENGTHS,
    NOT_TWICE,
    Answer,
    Blocks,
    EachAlone,
    Program,
    RecordAnswer,
    Rows,
    Sum,
    Totals,
    at_least_two,
    on_made,
)
from secure_fvi.algorithms.refining import REFINE
from secure_fvi.algorithms.structured import (
    BATCH_AXES,
    LATENTS_AXES,
    OBJECTIVE,
    RECORDS,
    Batch,
    Latents,
    StructuredProgram,
    global_units,
    local_units,
)
from secure_fvi.algorithms.weighing import DISCLOSED
from secure_fvi.compiled import Traced, by_itself
from secure_fvi.disclosure import Declaration, Sums, drawn
from secure_fvi.errors import AggregationError, InputError
from secure_fvi.exported import untested_operations
from secure_fvi.families import Amortised, Conditional, GlobalFamily, Params, global_family
from secure_fvi.later import Later
from secure_fvi.objective import (
    Curved,
    Lengths,
    RecordGradients,
    SiloGradient,
    record_gradients,
    server_gradient,
    silo_gradient,
)
from secure_fvi.optimizers import Optimizer
from secure_fvi.options import (
    SCHEDULES,
    Bound,
    Count,
    Fraction,
    Inside,
    NotNegative,
    Part,
    Positive,
    Says,
    Share,
    Spread,
    Whole,
    check,
    check_schedule,
)
from secure_fvi.privacy.settings import RecordDP, SiloDP, exact_totals
from secure_fvi.states import Moved
from secure_fvi.trees import averages, merge, part, running_average, stacked, take, to_numpy, unflatten

if TYPE_CHECKING:
    from secure_fvi.algorithms import checking, final_server, noise_aware, prior, refining_server, sfvi_warm, stopping
else:
    checking = Later("secure_fvi.algorithms.checking")
    final_server = Later("secure_fvi.algorithms.final_server")
    noise_aware = Later("secure_fvi.algorithms.noise_aware")
    prior = Later("secure_fvi.algorithms.prior")
    refining_server = Later("secure_fvi.algorithms.refining_server")
    sfvi_warm = Later("secure_fvi.algorithms.sfvi_warm")
    stopping = Later("secure_fvi.algorithms.stopping")

DIRECT, PATH, CURVATURE = "direct", "path", "curvature"
#: What the step on q does without.
_BESIDES = (RECORDS, CURVATURE, LENGTHS)
_EXPECTED_ROUNDS = 5_000  # of a run that stops by itself
#: Dimensions up to which a diagonal q is held against the curvature, which has as many squared; how many times as wide
#: a posterior is worth a warning, as far as sds of a converged run may be off (`final_server.SD_WITHIN`); sites named.
_LOOKED_AT, _MUCH_WIDER, _NAMED = 1000, 1.15, 4
#: Of the squared norm of gradients, the default norm of curvature, and the most dimensions in which there is one.
_CURVED, _CURVED_UP_TO = 0.3, 20
#: Of norms to which a record's curvature, and beside it its gradient, is cut.
_LARGEST_NORM = 2.0**60
#: The first key of the draws at the final q; those of rounds are smaller.
_FINAL = 2**30
#: Times that a normal is found which stands for a prior that is none where the posterior is.
_SITES = 3
#: Numbers of SFVI's draws at a silo, after a warm start, begin here.
OWN_DRAWS = 2**31


@dataclass(frozen=True)
class WarmStart:
    """Rounds of SFVI-Avg before the first round of SFVI (Hassan et al. 2023, S3.2); all else follows SFVI's options."""

    rounds: Whole = 0
    """0 for none."""
    local_steps: int = 1000
    """Of a silo in such a round."""
    weights: Literal["records", "equal"] = "records"
    """As in `SFVIAvg`."""
    total_records: Count | None = None
    """As in `SFVIAvg`."""

    def __post_init__(self) -> None:
        check(self)


Curvature = Annotated[NotNegative | Literal["auto"], Says("must be 'auto', or at least 0 and finite")]


@dataclass(frozen=True)
class SFVI:
    """Options of SFVI. With every one at its default a model of moderate size converges and stops by itself."""

    family: Literal["auto", "diagonal", "full", "low_rank"] = "auto"
    """Of q(Z_G); "auto" is full up to 256 dimensions and diagonal above."""
    rank: Count = 8
    """Of a low-rank family."""
    importance_samples: Count = 1
    """K of the bound; 1 is the ELBO."""
    iterations: Count | None = None
    """Rounds to run; None runs until the rule of `stopping` is met, at most `max_iterations`."""
    max_iterations: Count = 30_000
    """See `iterations`."""
    optimizer: str = "adam"
    """Of `optimizers.BY_NAME`: adam, rmsprop or sgd."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    """Of that: betas, momentum, ..."""
    learning_rate: Positive = 0.05
    """Of steps on q(Z_G) and the model's parameters."""
    local_learning_rate: Positive | None = None
    """Of a silo's own latents; None is `learning_rate`. In minibatches, where a record's distribution takes a step only
    when the record is drawn, a larger one lets it keep up."""
    start_spread: Spread = 0.0
    """q(Z_G)'s mean begins at the prior's centre plus draws of this sd that all parties share, for hidden units and
    topics, which are all alike at the centre."""
    schedule: str | Callable[[float], float] = "constant"
    """Of the learning rate over `iterations`, which it needs: constant, linear, cosine, exponential, or a function of
    the share done."""
    average_last: Part = 0.25
    """With `iterations` set, the share of last iterates that is averaged (0 keeps the last one)."""
    sampling_rate: Share = 1.0
    """Each record joins a round with this probability."""
    participation: Share = 1.0
    """Of the silos, asked in a round."""
    bound: Bound = 2.0**30
    """Largest absolute value of any element of a contribution; past it a silo refuses."""
    local_family: Conditional | Amortised = field(default_factory=Conditional)
    """q(Z_L | Z_G) of records."""
    silo_family: Conditional = field(default_factory=Conditional)
    """q(Z_S | Z_G) of a silo's own latents."""
    warm_start: WarmStart = field(default_factory=WarmStart)
    """Rounds of SFVI-Avg beforehand; they are not counted in `iterations`."""
    replicates: Count | None = None
    """Of a formula's tables, in a predictive check over all silos by one more sum (`checking`); None: there is none."""
    least_information: Positive | None = None
    """Under differential privacy, a public assumption that narrows intervals: the data's Fisher information about Z_G
    (n_global, in unconstrained space, of gradients as they are clipped) has no eigenvalue below it. Say it from what is
    known without the data; where totals rule it out it is not used, and the run warns."""
    curvature_norm: Curvature = "auto"
    """Under `RecordDP`, so that intervals are narrower where totals alone hardly tell how much data say: each record's
    part of a sum holds the curvature of its gradient as well (n_global x n_global, in unconstrained space), clipped to
    this Frobenius norm, and noised with it; 0: it does not. Of a regression that is the squared length of a row, as
    long as rows are, times the variance of an outcome over its dispersion squared (linear: 1 over the variance of
    errors; logistic: a quarter). "auto": three tenths of the square of the norm to which gradients are cut, since
    squares of gradients are as long as that in the mean (Bartlett's identity), where intervals count the noise,
    n_global is 20 at most, of more it takes long, and not the server adds the noise, which would see exact sums."""
    curvature_share: Inside = 0.3
    """Of the square of `clipping_norm`, what the curvature has; gradients have the rest: to cut them no more than
    without, let that norm be 1.2 times as long."""
    lengths_share: Fraction = 0.01
    """Under `RecordDP`, of the square of `clipping_norm`, what it costs to release how many records' gradients are how
    long, by which a run says how many it cut; 0: it does not. Nor does it with noise = "server", which would see exact
    counts."""

    name = "sfvi"

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.schedule, str):
            check_schedule("schedule", self.schedule)
        if self.schedule != "constant" and self.iterations is None:
            raise InputError("a learning-rate schedule needs `iterations`; without it the stopping rule sets the rate")
        Optimizer(self.optimizer, self.learning_rate, self.optimizer_options)
        if self.warm_start.rounds:
            sfvi_warm.averaging(self)

    @property
    def own_rounds(self) -> int:
        """At most, those of a warm start aside."""
        return self.iterations or self.max_iterations

    @property
    def expected_calls(self) -> int:
        before = sfvi_warm.averaging(self).expected_calls if self.warm_start.rounds else 0
        return before + (self.iterations or _EXPECTED_ROUNDS)

    def multiplier(self, round_: int) -> float:
        """Of the learning rate in a run of fixed length."""
        schedule = SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule
        return float(schedule(round_ / self.own_rounds))

    def declare(self, silos: int, private: bool) -> Declaration:
        what = "gradients of its part of the bound, in the global latents and the model's parameters, and that part"
        if self.curvature_norm and self.curvature_norm != "auto":
            what += "; the curvature of these gradients"
        told = ["how many records' gradients are how long"] if self.lengths_share else []
        told += ["the curvature of gradients in few global latents"] if self.curvature_norm == "auto" else []
        if private and told:
            what += f"; under record privacy, unless the server adds the noise, {' and '.join(told)}"
        what += "; its number of records"
        own = Sums(ROUND_PHASE, self.own_rounds, what, *drawn(silos, self.participation))
        before = sfvi_warm.averaging(self).declare(silos, private).sums if self.warm_start.rounds else ()
        sums = (*(s for s in before if s.phase not in (FINISH, REFINE)), own)
        if not private and self.iterations is None:
            final = f"{DISCLOSED}; its number of records"
            sums = (*sums, Sums(FINISH, 1, final, silos, besides=True, likelihood=True), refining.declared(silos))
        if self.replicates is not None:
            sums = (*sums, *checking.declared(self.replicates, silos))
        because = f"participation = {self.participation:g}"
        rounds, keeps = self.warm_start.rounds + self.own_rounds, "its own latents' posterior"
        return Declaration(rounds, sums, keeps, False, self.sampling_rate, because)

    def server(self, problem: Problem) -> Program:
        """Raises InputError for what the model or its privacy do not allow."""
        if self.replicates is not None:
            return checking.CheckedProgram(self, problem)
        return sfvi_warm.SFVIWarmProgram(self, problem) if self.warm_start.rounds else SFVIProgram(self, problem)

    silo = server


_SEEN = "seen"


def _length(privacy: RecordDP) -> float:
    """Of a record's vector at most, the objective aside."""
    return privacy.clipping_norm * math.sqrt(1 - privacy.objective_share)


class SFVIState(NamedTuple):
    """The server's state. All of it follows from broadcasts and totals."""

    round: int
    eta: Params
    theta: Params
    moments: Params  # optimiser state
    average: Params  # running average of eta and theta, keys "eta/..." and "theta/..."
    averaged: int  # iterates in it
    eps: Tensor  # (noise_size,) eps_G of the round to come
    z_global: Tensor  # (n_global,) and its Z_G
    shift: Tensor  # (n_global,) d = Z_G - mu_G
    monitor: stopping.Monitor
    lost: int  # rounds since the averaging began in which a silo that was asked was missing
    phase: str  # of the sum to come
    rest: final_server.Rest  # what the final sum told of q, where all silos were in it
    refining: refining_server.Refining  # and what those after it did
    trace: noise_aware.Trace  # under privacy, or of a diagonal family, of the rounds that are averaged
    half: noise_aware.Trace  # under privacy, of the first half of these
    counted: Tensor  # (9,) of these rounds, or of all: noised counts of gradients by length, and rounds; or (0,)


class SFVILocal(NamedTuple):
    """A silo's state. Never leaves the silo."""

    record: Params  # variational parameters of its records, (N + 1, ...) each
    record_moments: Params
    silo: Params  # of its silo-level latents, (1, ...) each
    silo_moments: Params
    record_average: Params
    silo_average: Params
    averaged: int  # iterates in the averages
    stage: int  # to which they belong
    steps: int  # so far
    #: (N + 1,) in which step a record was last in a batch: its average holds the iterates up to that one, and has stood
    #: still since, as the record has. Empty where all are in every step.
    seen: Tensor

    @property
    def latents(self) -> Latents:
        return Latents(self.record, self.record_moments, self.silo, self.silo_moments)

    @property
    def by_row(self) -> Params:
        return {
            **merge(record=self.record, moments=self.record_moments, average=self.record_average),
            _SEEN: self.seen,
        }

    def with_rows(self, rows: Params) -> SFVILocal:
        """With these tensors by row; there may be none."""
        return self._replace(
            record=part(rows, "record"), record_moments=part(rows, "moments"), record_average=part(rows, "average"),
            seen=rows.get(_SEEN, self.seen[:0]),
        )  # fmt: skip

    def average_at(self, at: Tensor | None) -> Params:
        """Averages at these rows, None for all, as of now."""
        record, average = take(self.record, at), take(self.record_average, at)
        if self.averaged == 0:
            return record
        if not len(self.seen):
            return average
        seen = self.seen if at is None else self.seen[at]
        return averages(record, average, seen, self.steps - self.averaged + 1, self.steps)


class Sent(NamedTuple):
    """What the server sends in a round."""

    z_global: Tensor  # (n_global,)
    shift: Tensor  # (n_global,)
    theta: Params


class SFVIProgram(StructuredProgram):
    """SFVI on one problem."""

    def setup(self) -> None:
        super().setup()
        config, problem = self.config, self.problem
        if problem.privacy is not None and config.iterations is None:
            raise InputError(
                "under differential privacy give iterations: a job is charged for all its rounds beforehand"
            )
        if problem.privacy is None and config.least_information is not None:
            raise InputError(noise_aware.NO_NOISE)
        if self.by_record and (label := problem.model.numbered_by_data) is not None:
            raise InputError(
                f"(... | {label}) under record privacy: silos number the groups of '{label}' by which are in their "
                "data, and a record of a new one would renumber all others'. List them in the dictionary (levels of a "
                f"category, low and high of an integer), and let most have as many: most={{'{label}': ...}}; or use pvi"
            )
        n = (self.family.n,)
        shapes: dict[str, tuple[int, ...]] = {DIRECT: n, **({PATH: n} if self.couples else {})}
        shapes |= {f"theta/{name}": tuple(v.shape) for name, v in sorted(self.theta_start.items())}
        self.lengths, self.curved = self._lengths(), self._curved()
        if self.curved is not None:
            shapes[CURVATURE] = (self.family.n * (self.family.n + 1) // 2,)
        if self.lengths is not None:
            shapes[LENGTHS] = (self.told,)
        self.gradient_blocks = tuple(Block(name, shape, config.bound) for name, shape in shapes.items())
        self.hidden = sum(v.numel() for v in self.silo_family.init(torch.zeros(1, self.n_silo)).values())
        self.sampled = config.sampling_rate
        self._trace()

    @property
    def traced_by_data(self) -> bool:
        return not self.by_record

    def _lengths(self) -> Lengths | None:
        """How records say how long their gradients are, where they do."""
        share, privacy = self._of_lengths, self.problem.privacy
        if not share or not isinstance(privacy, RecordDP):
            return None
        length = _length(privacy)
        return Lengths(length * math.sqrt(self._of_gradients), length * math.sqrt(share))

    @property
    def _of_lengths(self) -> float:
        """Share of the square of the norm for how long gradients are: none where the server would see it exactly, since
        counts of records step at each one's own values, and add up to their number."""
        privacy = self.problem.privacy
        told = isinstance(privacy, RecordDP) and not exact_totals(privacy)
        return self.config.lengths_share if told else 0.0

    @property
    def _of_gradients(self) -> float:
        """Share of the square of the norm that gradients have."""
        return (1 - self._of_lengths) * (1 - self.config.curvature_share * bool(self._bent))

    @functools.cached_property
    def _bent(self) -> float:
        """The norm to which a record's curvature is cut; 0: records do not say it. Raises InputError where they should
        and it would serve for nothing."""
        config, privacy = self.config, self.problem.privacy
        norm, auto = config.curvature_norm, config.curvature_norm == "auto"
        few = self.family.n <= _CURVED_UP_TO and isinstance(privacy, RecordDP) and not exact_totals(privacy)
        if not norm or (auto and not few):
            return 0.0
        if not isinstance(privacy, RecordDP):
            raise InputError("curvature_norm is for intervals that count the noise of RecordDP; leave it out")
        length, why = _length(privacy), self._uncounted
        if not why:
            log_p, at = on_made(self.problem)
            try:
                jacrev(jacrev(log_p))(at)
            except RuntimeError:  # NotImplementedError is one
                why = NOT_TWICE
            else:  # where slopes jump, as of abs(), that is slow, and curvature says nothing of the jumps
                once, twice = jacrev(log_p), jacrev(jacrev(log_p))
                if auto and untested_operations(lambda: twice(at)) and not untested_operations(lambda: once(at)):
                    return 0.0
        if norm == "auto":
            norm = _CURVED * length**2 * (1 - self._of_lengths) * (1 - config.curvature_share)
        room = all(1 / _LARGEST_NORM <= one <= _LARGEST_NORM for one in (norm, length))
        if auto:
            return norm if room and not why else 0.0
        if why:
            raise InputError(f"curvature_norm is for intervals that count the noise, and here are none: {why}")
        if not room:  # each record would fail
            raise InputError(
                f"curvature_norm = {norm:g} with clipping_norm = {privacy.clipping_norm:g}: a norm whose square has no "
                "room in floating point; rescale the data or the parameters"
            )
        return norm

    def _curved(self) -> Curved | None:
        """How records say their curvature, where they do."""
        if not self._bent:
            return None
        assert isinstance(self.problem.privacy, RecordDP)
        length, rest = _length(self.problem.privacy), self.config.curvature_share * (1 - self._of_lengths)
        return Curved(length * math.sqrt(self._of_gradients), self._bent, length * math.sqrt(rest) / self._bent)

    def _trace(self) -> None:
        """What is traced of both halves: whole steps."""
        mode, by_shape = self.problem.mode, self.local_family.couples_records
        of = self.problem.density, self.local_family, self.silo_family, self.samples
        self._gradient: Callable[..., SiloGradient] = silo_gradient(*of)
        gradients = functools.partial(record_gradients, *of, self.couples, curved=self.curved, lengths=self.lengths)
        numbers = sum(block.size for block in self.gradient_blocks)
        self._own_terms = Traced(self._gradient, (None,) * 9, mode)
        self._pull_back: Callable[..., Any] = server_gradient(self.problem.density, self.family)
        self._move = Traced(self._move_function, (None,) * 8, mode)
        axes = None, LATENTS_AXES, BATCH_AXES, None
        self._step: Any = (
            EachAlone(self.problem, gradients, self._taken, self._record_step_function, self._made, numbers)
            if self.by_record
            else Traced(self._step_function, (None,) * 4 if by_shape else axes, mode, by_shape)
        )

    def family_of(self, n: int) -> GlobalFamily:
        return global_family(self.config.family, n, self.config.rank)

    def sums(self) -> dict[str, Sum]:
        config, n = self.config, (self.family.n,)
        records = Block(RECORDS, (), 2.0**31, integer=True)
        sent: Mapping[str, Any] = {"z_global": n, "shift": n, **merge(theta=self.theta_start)}
        gradients = frozenset(block.name for block in self.gradient_blocks)
        blocks = (*self.gradient_blocks, Block(OBJECTIVE, (), config.bound), records)
        rounds = Phase(range(config.own_rounds))
        scalars = ("scale", "averaging", "stage")
        found = {ROUND_PHASE: Sum(blocks, rounds, sent, gradients, frozenset({RECORDS}), scalars)}
        if config.iterations is None and self.family.name in ("diagonal", "full"):
            last = Phase(range(1, config.own_rounds + 1), ends=True)
            final = merge(eta=self.start(), theta=self.theta_start)
            found[FINISH] = Sum((*self.final_blocks(), records), last, final)
            return self.with_refining(found)
        return found

    # ---- server ----

    def init(self) -> SFVIState:
        return self.init_at(self.start(), self.moved_theta())

    def init_at(self, eta: Params, theta: Params) -> SFVIState:
        """The state before the first round, from given parameters."""
        merged = merge(eta=eta, theta=theta)
        eps = self._noise(0)
        z_global, shift = self._draw(eta, eps)
        moments, monitor = self.optimizer.init(merged), stopping.start()
        curved = self.curved is not None
        sizes = (self.family.n * looks for looks in (self._looks_on, self._counts))
        trace, half = (noise_aware.nothing_seen(n, curved) for n in sizes)
        return SFVIState(
            0, eta, theta, moments, merged, 0, eps, z_global, shift, monitor, 0, ROUND_PHASE,
            final_server.Rest(), refining_server.start(), trace, half, self.none_counted,
        )  # fmt: skip

    def broadcast(self, state: SFVIState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        cohort = self.asked(state.round, state.phase)
        if state.phase in (FINISH, REFINE):
            found = self.posterior(state)
            shared = merge(eta=found.eta, theta=found.theta)
            message = Broadcast(state.round, index, accepted, cohort, {}, shared, FINISH)
            return message if state.phase == FINISH else self.refining_message(message, state.refining)
        tensors = {"z_global": state.z_global, "shift": state.shift, **merge(theta=state.theta)}
        scalars = {
            "scale": state.monitor.scale if self.config.iterations is None else self.config.multiplier(state.round),
            "averaging": float(self._averages(state)),
            "stage": float(state.monitor.stage),
        }
        return Broadcast(state.round, index, accepted, cohort, scalars, tensors)

    def step(self, state: SFVIState, message: Broadcast, sums: Totals, scale: float) -> tuple[SFVIState, Step]:
        absent = self.lacks(message, scale)
        if message.phase == FINISH:
            return self._checked(state, sums, absent)
        if message.phase == REFINE:
            return self._refined(state, message, sums, absent)
        averages = self._averages(state)
        lost = state.lost + absent if averages else 0
        averaged = state.averaged + 1 if averages else 0
        # What a sum over sampled records has to be divided by.
        each = self.config.sampling_rate if self.by_record else 1.0
        weights = [scale / each, message.scalars["scale"], 1.0 / max(averaged, 1)]
        factors = torch.tensor(weights, dtype=self.problem.dtype)
        eps = self._noise(state.round + 1)
        totals = {name: self.move(torch.as_tensor(value)) for name, value in sums.items() if name not in _BESIDES}
        eta, theta, moments, average, z_global, shift, watched = self._move(
            state.eta, state.theta, state.moments, state.average, state.eps, eps, totals, self.move(factors)
        )
        objective, *iterate = np.split(to_numpy(watched), [1, 1 + self.family.n])
        if not math.isfinite(objective[0]):
            why = "" if self.terms else self.problem.density.misplaced(self.problem, state.z_global)
            raise AggregationError(
                f"the objective is not finite in round {state.round}"
                + (f": {why}" if why else "; lower learning_rate or rescale the data")
            )
        monitor = stopping.observe(state.monitor, *iterate)
        finished = state.round + 1 >= self.config.own_rounds
        if self.config.iterations is None:
            monitor, stage_ended = stopping.assess(monitor)
            finished = finished or monitor.converged
            if stage_ended:  # the next stage starts from this one's average
                eta, theta = part(average, "eta"), part(average, "theta")
                z_global, shift = self._draw(eta, eps)
                averaged = averaged if monitor.converged else 0
        else:
            monitor = stopping.watch(monitor)
        rate = self.config.learning_rate * message.scalars["scale"]
        shown = float(objective[0]) if OBJECTIVE in sums else math.nan
        phase = FINISH if finished and FINISH in self.tables else ROUND_PHASE
        shown_phase = "averaging" if self._averages(state) else "approach"
        step = Step(shown, rate, monitor.r_hat, shown_phase, finished and phase == ROUND_PHASE)
        trace = self._seen(state, message, sums, scale / each) if averages and not absent else state.trace
        counts = averages or not self.config.average_last
        counted = self.count(state.counted, sums, scale / each) if counts else state.counted
        after = SFVIState(
            state.round + 1, eta, theta, moments, average, averaged, eps, z_global, shift, monitor, lost, phase,
            final_server.Rest(), state.refining, trace, trace if self._counts and self._early(state) else state.half,
            counted,
        )  # fmt: skip
        return after, step

    def _checked(self, state: SFVIState, sums: Totals, absent: bool) -> tuple[SFVIState, Step]:
        """After the final sum."""
        rest = final_server.Rest() if absent else self.rest(self.posterior(state), sums)
        state = state._replace(phase=ROUND_PHASE, rest=rest)
        begun = self.first_refining(self.posterior(state), rest, self._of_q(state), state.monitor.converged)
        if begun is not None:
            state = state._replace(phase=REFINE, refining=begun)
        return state, Step(rest.objective, 0.0, state.monitor.r_hat, FINISH, begun is None)

    def _refined(self, state: SFVIState, message: Broadcast, sums: Totals, absent: bool) -> tuple[SFVIState, Step]:
        """After one more sum at draws near q."""
        after = self.refined(state.refining, self.posterior(state), message, sums, absent)
        step = Step(state.rest.objective, 0.0, state.monitor.r_hat, REFINE, after.done)
        return state._replace(refining=after, phase=ROUND_PHASE if after.done else REFINE), step

    @property
    def _uncounted(self) -> str | None:
        """Why no posterior of this job can count the noise of privacy; "" where there is none."""
        config = self.config
        privacy = self.problem.privacy
        if privacy is None:
            return ""
        if self.n_record or self.n_silo:
            return (
                "latents of records and silos follow the noised broadcasts, and how far is not in the totals; "
                "integrate them out in the program, where there is one of a record"
            )
        if self.theta_start:
            return "the pyro.params have no prior, and follow the noise with q"
        if isinstance(privacy, SiloDP) and privacy.target_quantile is not None:
            return "target_quantile cuts silos' gradients by design, which moves q by more than noise"
        if config.participation < 1:
            return "participation below 1 draws other silos each round, which differ by more than noise"
        if config.average_last == 0:
            return "average_last = 0 says that no rounds are near the end"
        if self.family.n > noise_aware.UP_TO:
            return f"{self.family.n} global dimensions are more than {noise_aware.UP_TO}"
        return None

    @property
    def _narrow(self) -> bool:
        """Whether it is looked at how much too narrow q is."""
        return not self.terms and self.family.name == "diagonal" and 1 < self.family.n <= _LOOKED_AT

    @property
    def _counts(self) -> bool:
        """Whether the posterior is to count the noise of privacy."""
        return bool(self.terms) and self._uncounted is None

    @property
    def _looks_on(self) -> bool:
        """Whether broadcasts and totals are kept, in sums."""
        return self._counts or self._narrow

    def _seen(self, state: SFVIState, message: Broadcast, sums: Totals, factor: float) -> noise_aware.Trace:
        """With what this round's total, times `factor`, tells of the likelihood's gradient where it was asked."""
        if not self._looks_on:
            return state.trace
        if not self.terms:
            gradient = sum(torch.as_tensor(sums[name]) for name in (DIRECT, PATH) if name in sums)
            return noise_aware.seen(state.trace, state.z_global.cpu(), torch.as_tensor(gradient * factor), 1.0)
        terms = self.terms[ROUND_PHASE]
        clip = message.scalars.get(CLIP, terms.settings.clipping_norm)
        variance = terms.variance(len(message.cohort), clip) * factor**2
        gradient = torch.as_tensor(sums[DIRECT]) * factor
        units = float(sums.get(RECORDS, math.nan)) if self.by_record else len(message.cohort)
        at = state.z_global.cpu()
        if self.curved is None:
            return noise_aware.seen(state.trace, at, gradient, variance, units * clip**2)
        h = self.curved.read(torch.as_tensor(sums[CURVATURE]) * factor, len(at))
        norms, each = units * self.curved.gradient**2, variance / self.curved.unit**2
        return noise_aware.seen(state.trace, at, gradient, variance, norms, h, each)

    @functools.cached_property
    def _line(self) -> bool | None:
        return noise_aware.straight(self.problem)

    @property
    def uncounted(self) -> str | None:
        if self._uncounted is not None:
            return self._uncounted
        return NOT_TWICE if self._line is None else None

    def noise_aware(self, state: SFVIState) -> noise_aware.NoiseAware | str:
        if (why := self.uncounted) is not None:
            return why
        clipping_norm, line = self.terms[ROUND_PHASE].settings.clipping_norm, bool(self._line)
        norm = clipping_norm if self.curved is None else self.curved.gradient
        norm = norm if self.by_record or not line else math.nan
        sampled, floor = self.config.sampling_rate < 1, self.config.least_information
        told = self.clipped(state)
        seen = (norm, line, sampled, floor, None if told is None else (told, clipping_norm))
        own = prior.Prior(self.problem, True)
        if (normal := own.exact({})) is not None:
            return noise_aware.of_gradients(state.trace, state.half, normal, *seen)
        found: Any = self.posterior(state).eta
        mean, covariance = found["loc"].cpu().double(), self.family.stddev(found).cpu().double().square().diag()
        for _ in range(_SITES):
            site = own.site(mean, covariance)
            if not site.proper:
                return noise_aware.NOT_NORMAL
            found = noise_aware.of_gradients(state.trace, state.half, site, *seen)
            if isinstance(found, str):
                return found
            mean, covariance = found.mean, found.covariance
        return found if own.stands(site, mean, covariance) else noise_aware.NOT_NORMAL

    def posterior(self, state: SFVIState) -> Posterior:
        refined = state.refining.answer
        if state.averaged:
            return Posterior(self.family, part(state.average, "eta"), part(state.average, "theta"), refined)
        return Posterior(self.family, state.eta, state.theta, refined)

    def verdict(self, state: SFVIState) -> Verdict:
        """Of a run that stops by itself: whether the stopping rule was met with all silos, and q is stationary, or was
        refined."""
        found = refining_server.verdict(self._of_q(state), state.refining, self._refiner.fits)
        return self._with_widening(found, state) if self._narrow else found

    def _with_widening(self, found: Verdict, state: SFVIState) -> Verdict:
        """With by how much the posterior is wider than a diagonal q, where that is known, and a warning where it is
        much: of the curvature that the totals of rounds have shown."""
        posterior, problem = self.posterior(state), self.problem
        at, sd = posterior.eta["loc"], self.family.stddev(posterior.eta)
        prior = torch.func.hessian(lambda z: -problem.density.log_prior(z, posterior.theta))(at)
        ratio = noise_aware.widening(state.trace, sd.to("cpu"), prior.to("cpu"))
        if ratio is None or not ratio.isfinite().all():
            return found
        worst = float(ratio.max())
        details = {**found.details, "widening": worst}
        if worst < _MUCH_WIDER:
            return found._replace(details=details)
        by_site = {name: float(r.max()) for name, r in problem.layout.split(ratio, "global").items()}
        sites = sorted((r, name) for name, r in by_site.items() if r >= _MUCH_WIDER)[::-1]
        named = ", ".join(f"{name} {r:.2g} times" for r, name in sites[:_NAMED]) + (", ..." if sites[_NAMED:] else "")
        why = (
            "q is diagonal, and the likelihood's curvature is not: as the rounds showed it, posterior sds are up to "
            f"{worst:.2g} times those of a diagonal q ({named}); family = 'full' follows correlations"
        )
        return found._replace(reason=f"{found.reason}; besides, {why}", details=details, narrow=True)

    def _of_q(self, state: SFVIState) -> Verdict:
        config, r_hat = self.config, state.monitor.r_hat
        still = r_hat is not None and r_hat < stopping.R_HAT_BELOW
        if self.terms:
            return Verdict(None, PRIVATE, {"r_hat": r_hat}, not still)
        if config.iterations is not None:
            seen = "" if still else ", and the iterates were still drifting when it ended"
            return fixed_length("iterations", config.iterations, seen, {"r_hat": r_hat}, not still)
        against, advice = None, "lower learning_rate, standardise the columns, or give priors that say more"
        if not state.monitor.converged:  # so it was the limit that ended it
            against = f"the iterates had not settled after {state.round} rounds"
            advice = (
                f"raise max_iterations (now {config.max_iterations}), lower learning_rate, or standardise the columns"
            )
        elif state.lost:
            against = f"silos were absent from {state.lost} of the rounds that the result averages"
            advice = "run it again, with all silos"
        settled = "means and sds have settled in two stages"
        if FINISH in self.tables:
            return final_server.verdict(state.rest, against, settled, advice)
        return Verdict(against is None, against or settled, {"r_hat": r_hat}, remedy=advice)

    def metrics(self, state: SFVIState) -> dict[str, float | None]:
        found: dict[str, float | None] = {"r_hat": state.monitor.r_hat}
        return found if FINISH not in self.tables else found | {"bound": state.rest.bound}

    def _noise(self, round_: int) -> Tensor:
        return self.move(self.public_draws.normals(round_, self.family.noise_size)[0])

    def _averages(self, state: SFVIState) -> bool:
        """Whether this round's iterate enters the average."""
        if self.config.iterations is None:
            return state.monitor.averaging > 0
        return bool(state.round >= self.config.iterations * (1 - self.config.average_last))

    def _early(self, state: SFVIState) -> bool:
        """Whether this round comes before the middle of those whose iterates enter the average."""
        return state.round < self.config.own_rounds * (1 - self.config.average_last / 2)

    def _draw(self, eta: Params, eps: Tensor) -> tuple[Tensor, Tensor]:
        """Z_G and d."""
        z_global = self.family.transform(eta, eps)
        return z_global, z_global - eta["loc"]

    def _move_function(
        self,
        eta: Params, theta: Params, moments: Params, average: Params, eps: Tensor, eps_next: Tensor,
        totals: Params, factors: Tensor,
    ) -> tuple[Params, Params, Params, Params, Tensor, Tensor, Tensor]:  # fmt: skip
        """`factors`: on totals, on the learning rate, and the weight of this iterate in the average."""
        sums = {name: value * factors[0] for name, value in totals.items()}
        path = sums[PATH] if self.couples else torch.zeros_like(sums[DIRECT])
        theta_total = {name: sums[f"theta/{name}"] for name in theta}
        gradient = self._pull_back(eta, theta, eps, sums[DIRECT], path, theta_total)
        params, moments = self.optimizer.step(
            merge(eta=eta, theta=theta),
            merge(eta=gradient.eta, theta=gradient.theta),
            moments,
            factors[1],
            global_units(self.family, eta),
        )
        average = {name: old + factors[2] * (params[name] - old) for name, old in average.items()}
        eta = part(params, "eta")
        z_global, shift = self._draw(eta, eps_next)
        # Where the silos' part is not released, L0 alone still shows an iterate that has blown up.
        objective = (gradient.value + sums.get(OBJECTIVE, 0.0)).reshape(1)
        watched = torch.cat([objective, eta["loc"], self.family.stddev(eta).log()])
        return eta, part(params, "theta"), moments, average, z_global, shift, watched

    # ---- silo ----

    def init_local(self, view: SiloView) -> SFVILocal:
        z_record, z_silo = view.start.z_record, view.start.z_silo
        if self.terms:  # a start that the silo's data had a part in would be a release without noise
            z_record, z_silo = self.problem.start.z_record[:1].expand_as(z_record), self.problem.start.z_silo
        return self.begun(self.first_latents(z_record, z_silo), 0, 0)

    def begun(self, own: Latents, averaged: int, stage: int) -> SFVILocal:
        """The state of a silo whose latents are these."""
        average, rows = own.record, 0
        if self.by_row and own.record:  # rows are written where they lie
            average = {name: value.clone() for name, value in own.record.items()}
            rows = len(next(iter(average.values())))
        seen = torch.zeros(rows, dtype=torch.int64, device=self.problem.device)
        return SFVILocal(*own, average, own.silo, averaged, stage, 0, seen)

    def local_fit(self, local: SFVILocal) -> LocalFit:
        return self.fit_of(local.average_at(None), local.silo_average)

    def answer(self, message: Broadcast, local: SFVILocal, view: SiloView) -> Answer | RecordAnswer:
        if message.phase not in (FINISH, REFINE):
            return (self._one_by_one if self.by_record else self._together)(message, local, view)
        sent = self.received(message, message.tensors)
        own = local.average_at(None), local.silo_average
        if message.phase == REFINE:
            return Answer({**self.refining_answer(message, sent, *own, view), RECORDS: view.size}, local)
        found = self.final_answer(sent, *own, view, _FINAL)
        return Answer({**found, RECORDS: view.size}, local)

    def sent(self, message: Broadcast) -> Sent:
        """What a round's broadcast says, where and as this party computes."""
        t = self.received(message, message.tensors)
        return Sent(t["z_global"], t["shift"], {name: t[f"theta/{name}"] for name in self.theta_start})

    def _eps_silo(self, view: SiloView) -> Tensor:
        return self.move(view.silo_draws.normals(view.turn, self.n_silo))

    def _named(self, g: SiloGradient) -> Blocks:
        """The silo's term of a round's sum."""
        path = {PATH: g.path} if self.couples else {}
        return {DIRECT: g.direct, **path, **merge(theta=g.theta), OBJECTIVE: g.value}

    def _after(self, message: Broadcast, local: SFVILocal, own: Latents, at: Tensor | None = None) -> SFVILocal | Moved:
        """The next state, where the round's step went to `own`, whose records are those at these rows; None: all."""
        stage, averages = int(message.scalars["stage"]), message.scalars["averaging"] > 0
        averaged = (local.averaged + 1 if stage == local.stage else 1) if averages else 0
        average = take(local.record_average, None) if at is None else local.average_at(at)
        record, steps = running_average(average, own.record, averaged), local.steps + 1
        silo = running_average(local.silo_average, own.silo, averaged)
        after = SFVILocal(*own, record, silo, averaged, stage, steps, local.seen)
        if at is None or not local.record:
            return after
        before = take(local.by_row, at)
        return Moved(at, before, {**after.by_row, _SEEN: torch.full_like(at, steps)}, after.with_rows({}))

    # ---- the silo's sum at once ----

    def _together(self, message: Broadcast, local: SFVILocal, view: SiloView) -> Answer:
        rows = self.drawn(view.turn, view)
        rows = None if rows is None else at_least_two(rows, view.size)
        batch = self.batch(view.turn, view, rows, self._eps_silo(view), self.config.sampling_rate)
        at, scale = self.at(rows), self.scalar(message.scalars["scale"])
        blocks, own = self._step(self.sent(message), local.latents.taken(at), batch, scale)
        return Answer({**blocks, RECORDS: view.size}, self._after(message, local, own, at))

    @staticmethod
    def _taken(sent: Sent, own: Latents, batch: Batch, scale: Tensor) -> tuple[Any, ...]:
        """What gradients take of a step's arguments."""
        return *sent, own.record, own.silo, *batch

    def _step_function(self, sent: Sent, own: Latents, batch: Batch, scale: Tensor) -> tuple[Blocks, Latents]:
        g = self._gradient(*self._taken(sent, own, batch, scale))
        return self._named(g), self.stepped(own, g, scale)

    # ---- a record at a time ----

    def _one_by_one(self, message: Broadcast, local: SFVILocal, view: SiloView) -> RecordAnswer:
        rate, sent, scale = self.config.sampling_rate, self.sent(message), self.scalar(message.scalars["scale"])
        eps_silo, dropped = self._eps_silo(view), 0
        moved: list[tuple[Rows, Params, Params]] = []  # rows, and where they and their optimiser's state go
        latents = local.latents._replace(silo_moments={})

        def args(rows: Rows) -> tuple[Sent, Latents, Batch, Tensor]:
            return sent, latents.taken(self.at(rows)), self.batch(view.turn, view, rows, eps_silo), scale

        def chunks() -> Iterator[tuple[Tensor, Tensor]]:
            nonlocal dropped
            for found, rows, failed in self._step(self.drawn(view.turn, view), view.size, args):
                dropped += failed
                if found is not None:
                    gradients, values, new, moments = found
                    moved.append((rows, new, moments))
                    yield gradients, values

        own = self._own(sent, local.silo, eps_silo) if self.n_silo else None

        def after(hidden: Tensor) -> SFVILocal | Moved:
            silo, silo_moments = local.silo, local.silo_moments
            if own is not None:
                found = unflatten(self.move(hidden / rate), silo)
                total = {name: own.silo[name] + found[name] for name in silo}
                silo, silo_moments = self.local_optimizer.step(silo, total, silo_moments, scale, local_units(silo))
            rows = np.concatenate([np.empty(0, np.int64), *(block for block, _, _ in moved)])
            there = np.flatnonzero(rows < view.size)  # the spare one stays where it began
            at, chosen = self.at(rows[there]), self.at(there)
            record, moments = local.latents.taken(at)[:2]
            if moved:
                record = take(stacked([new for _, new, _ in moved]), chosen)
                moments = take(stacked([new for _, _, new in moved]), chosen)
            return self._after(message, local, Latents(record, moments, silo, silo_moments), at)

        free: dict[str, Any] | None = None
        if own is not None:
            free = {name: rate * value for name, value in self._named(own).items()}
            if self.lengths is not None:
                free[LENGTHS] = np.zeros(self.told)  # of records alone
        return RecordAnswer(chunks(), free, {RECORDS: view.size}, after, lambda: dropped)

    def _record_step_function(
        self, g: RecordGradients, sent: Sent, own: Latents, batch: Batch, scale: Tensor
    ) -> tuple[Tensor, Tensor, Params, Params]:
        local = {name: value / self.config.sampling_rate for name, value in g.local.items()}
        step = self.local_optimizer.step
        return g.rows, g.values, *step(own.record, local, own.record_moments, scale, local_units(own.record))

    def _own(self, sent: Sent, silo: Params, eps_silo: Tensor) -> SiloGradient:
        """What the silo adds besides its records: prior and entropy of its silo-level latents, on made data."""
        problem = self.problem
        made = {n: v.to(problem.device) for n, v in problem.schema.dummy_rows(2).items()}
        rows = {name: self.move(v) if v.is_floating_point() else v for name, v in made.items()}
        record = self.local_family.init(self.move(problem.start.z_record[:1].expand(2, -1)))
        nothing = self.move(torch.zeros(2))
        eps = self.move(torch.zeros(self.samples, 2, self.n_record))
        with by_itself():  # what this adds is neither cut nor noised: nothing that was worked out of records enters it
            found: SiloGradient = self._own_terms(*sent, record, silo, rows, nothing, eps, eps_silo)
        return found

    def _made(
        self, count: int | None, sent: Sent, own: Latents, batch: Batch, scale: Tensor
    ) -> tuple[Sent, Latents, Batch, Tensor]:
        """What `_record_step_function` was called with, so many made records (None: as many) in place of the silo's."""
        count = len(batch.weights) if count is None else count
        rows = {n: v.to(batch.rows[n]) for n, v in self.problem.schema.dummy_rows(count).items()}
        record = self.local_family.init(self.move(self.problem.start.z_record[:1].expand(count, -1)))
        drawn = torch.randn(self.samples, count, self.n_record, generator=torch.Generator().manual_seed(0))
        made = own._replace(record=record, record_moments=self.local_optimizer.init(record, by_row=True))
        eps, weights = drawn.to(batch.eps_record), batch.weights.new_ones(count)
        return sent, made, Batch(rows, weights, eps, batch.eps_silo), scale
