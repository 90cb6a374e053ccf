"""SFVI-Avg (Hassan et al. 2023, Algorithm 2): many local steps, then a Wasserstein average, in a few secure sums.

    server:  sends eta_G and theta
    silo:    fits its own copy of (eta_G, theta) and its eta_L, as if the other records were like its own
    server:  the W2 barycenter of the silos' q(Z_G), the mean of their theta, from one total

Each silo maximises L0 + (N / N_j) L_j: it acts as if the federation were N / N_j copies of itself. The paper scales
log p(y_j, Z_Lj | Z_G) but not -log q(Z_Lj | Z_G), which runs off in models with record-level latents; here all of L_j
is scaled (`scale_entropy`). The best distribution of the silo's own latents given q(Z_G) does not depend on N; their
own steps are left unscaled. However many rounds it takes, the result stays approximate: it averages posteriors of silos
(docs/sfvi-avg.md).

A contribution is a weight times the change of a silo's parameters from those that it was sent, so that without privacy
nothing is lost, and under silo privacy what is clipped is the change. A full covariance travels as the term of one
Bures iteration at S, the covariance that was sent; the change form would not help it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from secure_fvi.aggregation.base import Block, FloatArray
from secure_fvi.algorithms import checking, refining
from secure_fvi.algorithms.base import (
    FINISH,
    ITERATION,
    PRIVATE,
    Broadcast,
    LocalFit,
    Phase,
    Posterior,
    Problem,
    SiloView,
    Step,
    Verdict,
)
from secure_fvi.algorithms.kit import Answer, Program, Rows, Sum, Totals, at_least_two
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
)
from secure_fvi.algorithms.weighing import DISCLOSED
from secure_fvi.compiled import Traced
from secure_fvi.density import LogDensity, LogTerms
from secure_fvi.disclosure import Declaration, Sums, drawn
from secure_fvi.errors import AggregationError, InputError, ProtocolError
from secure_fvi.families import Amortised, Conditional, GlobalFamily, Params
from secure_fvi.families.gaussian import eta_of
from secure_fvi.later import Later
from secure_fvi.objective import SiloFunction, server_gradient, silo_gradient
from secure_fvi.optimizers import Optimizer
from secure_fvi.options import Bound, Count, NotNegative, Part, Positive, Says, Share, Spread, Whole, check
from secure_fvi.trees import averages, merge, part, running_average, take, to_numpy, write

if TYPE_CHECKING:
    from secure_fvi.algorithms import final_server, refining_server
else:
    final_server = Later("secure_fvi.algorithms.final_server")
    refining_server = Later("secure_fvi.algorithms.refining_server")

#: Phases. COUNT once, before the first round; MERGE, and BURES where asked for, every round; FINISH once.
COUNT, MERGE, BURES = "count", "merge", "bures"
SILOS, LOC, SD, THETA = "silos", "loc", "sd", "theta/"
#: The block of an iteration of a barycenter: a silo's term as its upper triangle.
ROOT = "root"
#: Blocks of a trusted barycenter, with a row a silo.
WEIGHTS, MEANS, SPREADS = "weights", "means", "spreads"
#: Draws of Z_G at which silos estimate their part of the bound at the q(Z_G) that they were sent: before and after all
#: rounds, and in each round, where it shows how a run goes and costs as much as so many steps.
BOUND_DRAWS, ROUND_DRAWS = 16, 4
#: The learning rate falls to this share of itself within a round.
LEAST_RATE = 0.1
#: The learning rate falls from round to round once a merge has moved q by less than SETTLED, in posterior sds, and
#: either by less than SHRINKING times the longest of the last WATCHED, or these together by less than the longest.
SETTLED, SHRINKING, WATCHED = 1.0, 0.1, 3
#: Rounds at falling rates that a run does at least.
REFINED = 4
#: A merged sd is at least this share of the one before: noise must not make it negative.
LEAST_SD = 0.1
#: Global dimensions of a trusted barycenter at most: POT takes dense matrices, whatever the family.
LARGEST = 512


@dataclass(frozen=True)
class SFVIAvg:
    """Options of SFVI-Avg. With every one at its default a model of moderate size stops by itself, or says it has not.

    The first rounds go far. Once merges move q by less than SETTLED posterior sds, and no longer at an even pace one
    way, the learning rate falls from round to round: silos stray less from each other, and with that the error of
    averaging falls. The run ends after REFINED such rounds when a merge moves q by less than `tolerance`.
    """

    rounds: Count = 20
    """At most."""
    local_steps: Count = 2000
    """Of a silo in a round. Within it the rate falls linearly to a tenth."""
    importance_samples: Count = 1
    """K of the bound; 1 is the ELBO."""
    family: Literal["auto", "diagonal", "full"] = "auto"
    """Of q(Z_G); "auto" is full up to 256 dimensions, diagonal above."""
    weights: Literal["records", "equal"] = "records"
    """Of a silo in the merge: its number of records, or 1, as in the paper."""
    scale_entropy: bool = True
    """False leaves the entropy of the silo's own latents unscaled, which is the paper's text, for comparison."""
    tolerance: NotNegative = 0.1
    """The largest of a merge's moves: of means in posterior sds, of log sds, and of theta relative to 1 + |theta|."""
    bures_iterations: Count = 1
    """Secure sums a round for the barycenter of full covariances; one is enough, since the next round goes on where it
    ended."""
    barycenter: Literal["secure", "trusted"] = "secure"
    """"secure" takes it from totals; "trusted" shows the server each silo's own q(Z_G) and number of records, and needs
    a plain sum."""
    optimizer: str = "adam"
    """Of `optimizers.BY_NAME`."""
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    """Of that: betas, momentum, ..."""
    learning_rate: Positive = 0.05
    """Of local steps."""
    local_learning_rate: Positive | None = None
    """Of steps on a silo's own latents; None is `learning_rate`."""
    start_spread: Spread = 0.0
    """q(Z_G)'s mean begins at the prior's centre plus draws of this sd that all parties share."""
    decay: Annotated[float, Field(gt=0, le=1), Says("must lie in (0, 1]")] = 0.2
    """Factor by which the learning rate falls from round to round once merges have settled."""
    average_last: Part = 0.5
    """Share of a round's last iterates that a silo averages."""
    sampling_rate: Share = 1.0
    """Each record joins a local step with this probability."""
    participation: Share = 1.0
    """Of the silos, asked in a round."""
    total_records: Count | None = None
    """N, where it is public; otherwise it is counted by one more secure sum."""
    bound: Bound = 2.0**30
    """Largest absolute value of any element of a contribution."""
    final_local_steps: Whole = 0
    """After the last merge, a silo's steps on its own latents alone, whose fit otherwise is to its own copy of q(Z_G):
    they cost no exchange. Silos' weights of their own (personal networks) gain much by it."""
    local_family: Conditional | Amortised = field(default_factory=Conditional)
    """q(Z_L | Z_G) of records."""
    silo_family: Conditional = field(default_factory=Conditional)
    """q(Z_S | Z_G) of a silo's own latents."""
    replicates: Count | None = None
    """Of a formula's tables, in a predictive check over all silos by one more sum (`checking`); None: there is none."""

    name = "sfvi-avg"

    def __post_init__(self) -> None:
        family: str = self.family
        if family == "low_rank":
            raise InputError(
                "family 'low_rank' has no barycenter: that of low-rank Gaussians is not low rank; "
                "choose auto, diagonal or full, or the algorithm sfvi"
            )
        check(self)
        if self.reveals_silos and self.bures_iterations != 1:
            raise InputError("a trusted barycenter is taken at once; leave bures_iterations at 1")
        if not self.scale_entropy and self.importance_samples != 1:
            raise InputError("scale_entropy = False is the paper's text, which has importance_samples = 1 only")
        Optimizer(self.optimizer, self.learning_rate, self.optimizer_options)

    @property
    def reveals_silos(self) -> bool:
        """Whether the server is to see single silos' terms."""
        return self.barycenter == "trusted"

    @property
    def expected_calls(self) -> int:
        return self.rounds * (self.local_steps + ROUND_DRAWS) + self.final_local_steps

    @property
    def keys_a_round(self) -> int:
        """How many numbers are set aside to name a silo's draws for one question."""
        return self.local_steps + BOUND_DRAWS

    def averaged(self, step: int, steps: int) -> int:
        """Iterates in the average of the last ones after one of `steps` local steps; at most 1 before that begins."""
        first = min(steps - 1, math.ceil(steps * (1 - self.average_last)))
        return step - first + 1

    def declare(self, silos: int, private: bool) -> Declaration:
        asked, cohort = drawn(silos, self.participation)
        bound = "its part of the bound and its number of records"
        merged = "the change of its own copy of q and of the model's parameters, times its weight"
        sums = [Sums(MERGE, self.rounds, f"{merged}; {bound}", asked, cohort)]
        if not private:
            if self.total_records is None:
                sums.insert(0, Sums(COUNT, 1, bound, silos, besides=True))
            if self.bures_iterations > 1 and self.family != "diagonal":
                again = self.rounds * (self.bures_iterations - 1)
                what = "its covariance, as one iteration sees it; its weight, which is its number of records"
                sums.append(Sums(BURES, again, what, asked, cohort))
            sums.append(Sums(FINISH, 1, f"{bound}; {DISCLOSED}", silos, besides=True, likelihood=True))
            sums.append(refining.declared(silos))
        sums.extend(checking.declared(self.replicates, silos))
        keeps = "its own latents' posterior and its optimiser's state"
        because = f"barycenter = '{self.barycenter}', participation = {self.participation:g}"
        return Declaration(self.rounds, tuple(sums), keeps, self.reveals_silos, self.sampling_rate, because)

    def server(self, problem: Problem) -> Program:
        """Raises InputError for what the model or its privacy do not allow."""
        if self.replicates is not None:
            return checking.CheckedProgram(self, problem)
        return SFVIAvgProgram(self, problem)

    silo = server


class Merging(NamedTuple):
    """A merge whose barycenter wants more sums."""

    iteration: int  # Bures iterations done
    loc: Tensor  # (n,) the merged mean
    theta: Params
    covariance: FloatArray  # (n, n) S
    root: FloatArray  # (n (n + 1) / 2,) mean of the silos' last terms: from it the silos derive S themselves


class SFVIAvgState(NamedTuple):
    """The server's state. All of it follows from broadcasts and totals."""

    round: int
    phase: str  # of the sum to come
    eta: Params
    theta: Params
    records: int  # N; 0 before it was counted
    merging: Merging
    settled: int  # merges since q arrived, that one included
    movement: float | None  # of the last merge, posterior sds
    ways: Tensor  # (WATCHED, n) of the means in the last merges, posterior sds
    objective: float  # at the q last sent, nats; NaN where it is not released
    absent: int  # 1 where silos that were asked for the last merge are not in it
    rest: final_server.Rest  # what the final sum told of q, where all silos were in it
    refining: refining_server.Refining  # and what those after it did


class SFVIAvgLocal(NamedTuple):
    """A silo's state. Never leaves the silo."""

    record: Params  # variational parameters of its records, (N + 1, ...) each
    record_moments: Params
    silo: Params  # of its silo-level latents, (1, ...) each
    silo_moments: Params
    moments: Params  # optimiser state of its copy of eta_G and theta
    anchor: Tensor  # (n_global,) the mean of q(Z_G) to which the conditionals of its own latents refer
    merged: int  # the round that the following belong to; -1 before the first
    iteration: int  # Bures iterations answered in it
    covariance: FloatArray  # (n, n) of its own q(Z_G); empty for diagonal families
    at: FloatArray  # (n, n) S of the last iteration answered

    @property
    def latents(self) -> Latents:
        return Latents(self.record, self.record_moments, self.silo, self.silo_moments)


class Point(NamedTuple):
    """Where a silo's local run stands. Never leaves the silo."""

    shared: Params  # its copy, "eta/..." and "theta/..."
    moments: Params  # optimiser state of it
    own: Latents

    def averaged(self, latest: Point, count: int) -> Point:
        """This average with `latest` as its `count`-th term, states of optimisers and records aside."""
        silo = running_average(self.own.silo, latest.own.silo, count)
        return self._replace(
            shared=running_average(self.shared, latest.shared, count), own=self.own._replace(silo=silo)
        )


class Records:
    """Distributions of a silo's records over the steps of a round: where they are, and their average over the steps
    from `first` on. In minibatches a step writes its own rows, where they lie, and an average is made up for the steps
    that a row was not in when it is next in one."""

    def __init__(self, own: Latents, first: int, by_row: bool) -> None:
        self.own, self.average, self.first, self.by_row = own, own.record, first, by_row
        if by_row:
            record, moments, self.average = (
                {name: value.clone() for name, value in params.items()}
                for params in (own.record, own.record_moments, own.record)
            )
            self.own = own._replace(record=record, record_moments=moments)
            one = next(iter(record.values()))
            self._seen = torch.full((len(one),), -1, device=one.device)  # no step yet

    def taken(self, own: Latents, at: Tensor | None) -> Latents:
        """`own` with the records at these rows."""
        mine = self.own.taken(at)
        return own._replace(record=mine.record, record_moments=mine.record_moments)

    def put(self, at: Tensor | None, new: Latents, step: int) -> None:
        """After `step`, which was of these rows."""
        if at is None or not self.by_row:
            self.own, self.average = new, running_average(self.average, new.record, step - self.first + 1)
            return
        before = averages(take(self.own.record, at), take(self.average, at), self._seen[at], self.first, step - 1)
        average = running_average(before, new.record, step - self.first + 1)
        write(self.own.record, at, new.record)
        write(self.own.record_moments, at, new.record_moments)
        write(self.average, at, average)
        self._seen[at] = step

    def ended(self, here: Point, average: Point, steps: int) -> tuple[Point, Point]:
        """Both with all records, after so many steps."""
        there = self.average
        if self.by_row:
            there = averages(self.own.record, there, self._seen, self.first, steps - 1)
        own = here.own._replace(record=self.own.record, record_moments=self.own.record_moments)
        return here._replace(own=own), average._replace(own=average.own._replace(record=there))


class Factors(NamedTuple):
    """Of one step, besides those of its options."""

    copies: float  # N / N_j
    rate: float  # of the learning rate
    moving: float  # of it once more for what is shared: 1, or 0 where q(Z_G) and theta stay


class SFVIAvgProgram(StructuredProgram):
    """SFVI-Avg on one problem."""

    no_record_privacy = (
        ": its local steps see whole records again and again without noise; use unit = 'silo', or the algorithm sfvi"
    )

    def setup(self) -> None:
        super().setup()
        config, n = self.config, self.family.n
        self.full, self.trusted = self.family.name == "full", config.reveals_silos
        self.by_records, self.counts_first = config.weights == "records", config.total_records is None
        if self.trusted and n > LARGEST:
            raise InputError(
                f"a trusted barycenter is for at most {LARGEST} global dimensions, not {n}; use "
                "barycenter = 'secure', which is one sum for family = 'diagonal'"
            )
        if self.problem.privacy is not None:
            self._check_private()
        axes = (None, None, LATENTS_AXES), BATCH_AXES, None, None
        couples = self.local_family.couples_records
        self._step = Traced(self.step_function, (None,) * 4 if couples else axes, self.problem.mode, couples)
        self._server_gradient = server_gradient(self.problem.density, self.family)

    def _check_private(self) -> None:
        if self.trusted:
            raise InputError("under silo privacy sfvi-avg needs barycenter = 'secure'")
        if self.full:
            raise InputError("under silo privacy sfvi-avg needs family = 'diagonal': noise breaks a Bures iteration")
        if self.by_records:
            raise InputError("under silo privacy sfvi-avg needs weights = 'equal': numbers of records are not released")
        if self.config.final_local_steps:
            raise InputError("under silo privacy no broadcast follows the last merge; leave final_local_steps at 0")
        if self.counts_first:
            raise InputError(
                "under silo privacy sfvi-avg needs total_records, a public figure for all silos' records together, "
                "since counting them would release their number"
            )

    def sums(self) -> dict[str, Sum]:
        config, n, bound = self.config, self.family.n, self.config.bound
        packed = n * (n + 1) // 2
        records, objective = Block(RECORDS, (), 2.0**31, integer=True), Block(OBJECTIVE, (), bound)
        weight = records if self.by_records else Block(SILOS, (), 1.0, integer=True)
        counts = (records,) if self.by_records else (records, weight)
        shapes: dict[str, tuple[int, ...]] = {} if self.trusted else {LOC: (n,), **({} if self.full else {SD: (n,)})}
        shapes |= {THETA + name: tuple(v.shape) for name, v in sorted(self.theta_start.items())}
        changes = tuple(Block(name, shape, bound) for name, shape in shapes.items())
        root = (Block(ROOT, (packed,), bound),) if self.full else ()
        silos = trusted_blocks(len(self.problem.silos), n, self.full, bound) if self.trusted else root

        sent: Mapping[str, Any] = merge(eta=self.start(), theta=self.theta_start)
        scalars, known = ("records", "rate"), {"records": config.total_records}
        rounds, again = range(config.rounds), range(1, config.bures_iterations)
        found: dict[str, Sum] = {}
        if self.counts_first:
            found[COUNT] = Sum((records, objective), Phase(range(1)), sent, scalars=scalars, known=known)
        found[MERGE] = Sum(
            (*counts, objective, *changes, *silos), Phase(rounds), sent, frozenset(shapes),
            scalars=scalars, known=known,
        )  # fmt: skip
        if self.full and again:
            found[BURES] = Sum(
                (weight, *root), Phase(rounds, again), {ROOT: (packed,)}, scalars=(*scalars, ITERATION), known=known
            )
        final, last = (records, *self.final_blocks()), range(1, config.rounds + 1)
        found[FINISH] = Sum(final, Phase(last, ends=True), sent, scalars=scalars, known=known)
        return self.with_refining(found)

    # ---- server ----

    def init(self) -> SFVIAvgState:
        eta, theta, nothing = self.start(), self.moved_theta(), np.zeros(0)
        first, idle = COUNT if self.counts_first else MERGE, Merging(0, eta["loc"], theta, nothing, nothing)
        ways = eta["loc"].new_zeros(WATCHED, self.family.n)
        return SFVIAvgState(
            0,
            first,
            eta,
            theta,
            self.config.total_records or 0,
            idle,
            0,
            None,
            ways,
            math.nan,
            0,
            final_server.Rest(),
            refining_server.start(),
        )

    def broadcast(self, state: SFVIAvgState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        scalars = {"records": float(state.records), "rate": self.config.decay**state.settled}
        tensors: Params = merge(eta=state.eta, theta=state.theta)
        if state.phase == BURES:
            scalars[ITERATION] = float(state.merging.iteration)
            tensors = {ROOT: torch.from_numpy(state.merging.root)}
        cohort = self.asked(state.round, state.phase)
        message = Broadcast(state.round, index, accepted, cohort, scalars, tensors, state.phase)
        return self.refining_message(message, state.refining) if state.phase == REFINE else message

    def step(self, state: SFVIAvgState, message: Broadcast, sums: Totals, scale: float) -> tuple[SFVIAvgState, Step]:
        if OBJECTIVE in sums:
            own = self._global_bound(dict(message.tensors), message.round, bound_draws(message.phase))
            state = state._replace(objective=own + scale * float(sums[OBJECTIVE]))
            if not math.isfinite(state.objective):
                raise InputError(
                    f"the objective is not finite in round {state.round}; lower learning_rate or rescale the data"
                )
        finished, absent = message.phase == FINISH, self.lacks(message, scale)
        if finished and not absent:
            rest = self.rest(self.posterior(state), sums)
            state = state._replace(rest=rest, objective=rest.objective)  # NaN where it is hidden
            begun = self.first_refining(self.posterior(state), rest, self._of_q(state), self.settled(state))
            if begun is not None:
                state, finished = state._replace(phase=REFINE, refining=begun), False
        if message.phase == REFINE:
            after = self.refined(state.refining, self.posterior(state), message, sums, absent)
            state, finished = state._replace(refining=after), after.done
        if message.phase == COUNT:
            state = state._replace(records=round(scale * float(sums[RECORDS])), phase=MERGE)
        elif message.phase == MERGE:
            state, finished = self._merge(state._replace(absent=int(absent)), sums, scale)
        elif message.phase == BURES:
            weight = _positive(float(sums[RECORDS if self.by_records else SILOS]))
            state, finished = self._iterate(state, state.merging, sums[ROOT] / weight)
        rate = self.config.learning_rate * message.scalars["rate"]
        return state, Step(state.objective, rate, None, message.phase, finished)

    def posterior(self, state: SFVIAvgState) -> Posterior:
        return Posterior(self.family, state.eta, state.theta, state.refining.answer)

    def verdict(self, state: SFVIAvgState) -> Verdict:
        """Merges that have settled are at this algorithm's own fixed point, an average of posteriors; whether that is
        the posterior of all records is measured by the slope of the bound there, and by weighed draws."""
        return refining_server.verdict(self._of_q(state), state.refining, self._refiner.fits)

    def _of_q(self, state: SFVIAvgState) -> Verdict:
        config = self.config
        if self.terms:
            return Verdict(None, PRIVATE, {}, not self.settled(state))
        advice = "sfvi-avg averages the silos' posteriors and is approximate by construction: use pvi or sfvi"
        if not self.settled(state):
            what = f"merges were still moving after {state.round} rounds"
            more = f"raise rounds (now {config.rounds}) or local_steps (now {config.local_steps})"
            return final_server.verdict(state.rest, what, "", f"{more}; {advice}")
        if state.absent:
            return final_server.verdict(state.rest, "a silo was absent from the last merge", "", "run it again")
        found = final_server.verdict(state.rest, None, "merges have settled", advice)
        if not found.converged:
            return found
        return found._replace(reason=f"{found.reason}; sfvi-avg remains an approximation, an average of posteriors")

    def settled(self, state: SFVIAvgState) -> bool:
        """Whether merges have settled; it says nothing about what averaging posteriors gets wrong."""
        return state.settled > REFINED and state.movement is not None and state.movement < self.config.tolerance

    def metrics(self, state: SFVIAvgState) -> dict[str, float | None]:
        """`bound`: at the last q that silos were sent, nats. `movement`: by the last merge, posterior sds."""
        return {"bound": None if math.isnan(state.objective) else state.objective, "movement": state.movement}

    def _merge(self, state: SFVIAvgState, sums: Totals, scale: float) -> tuple[SFVIAvgState, bool]:
        # Under privacy that of the silos is their number, which the server knows anyway.
        total = self.answered(scale) if self.terms else float(sums[RECORDS if self.by_records else SILOS])
        weight = _positive(total)

        def moved(old: Tensor, name: str) -> Tensor:
            return old + torch.as_tensor(sums[name] / weight).to(old)

        theta = {name: moved(value, THETA + name) for name, value in state.theta.items()}
        if self.trusted:
            mean, covariance = trusted_merge(sums, self.full)
            parameters = full_parameters if self.full else diagonal_parameters
            return self._adopt(state, parameters(torch.from_numpy(mean).to(state.eta["loc"]), covariance), theta)
        loc = moved(state.eta["loc"], LOC)
        if self.full:
            covariance = to_numpy(self.family.covariance(state.eta))
            return self._iterate(state, Merging(0, loc, theta, covariance, state.merging.root), sums[ROOT] / weight)
        before = self.family.stddev(state.eta)
        log_scale = torch.maximum(moved(before, SD), LEAST_SD * before).log()
        return self._adopt(state, {"loc": loc, "log_scale": log_scale}, theta)

    def _iterate(self, state: SFVIAvgState, merging: Merging, root: FloatArray) -> tuple[SFVIAvgState, bool]:
        """One Bures iteration, and the merge's end where it was the last."""
        covariance = after_iteration(merging.covariance, root)
        merging = merging._replace(iteration=merging.iteration + 1, covariance=covariance, root=root)
        if merging.iteration < self.config.bures_iterations:
            return state._replace(phase=BURES, merging=merging), False
        return self._adopt(state, full_parameters(merging.loc, covariance), merging.theta)

    def _adopt(self, state: SFVIAvgState, eta: Params, theta: Params) -> tuple[SFVIAvgState, bool]:
        new = merge(eta=eta, theta=theta)
        movement = self._movement(merge(eta=state.eta, theta=state.theta), new)
        if not math.isfinite(movement):
            raise InputError(f"the merge of round {state.round} is not finite; lower learning_rate or rescale the data")
        way = (eta["loc"] - state.eta["loc"]) / self.family.stddev(eta)
        ways = torch.cat([state.ways[1:], way.unsqueeze(0)])
        # A small merge alone may mean no more than that silos take few steps: q goes on at an even pace then. At the
        # end merges shrink fast, or go to and fro.
        lengths = ways.norm(dim=1)
        shrinking = bool(lengths[-1] < SHRINKING * lengths.max())
        to_and_fro = state.round + 1 >= WATCHED and bool(ways.sum(0).norm() < lengths.max())
        arrived = movement < SETTLED and (shrinking or to_and_fro)
        settled = state.settled + 1 if state.settled or arrived else 0
        state = state._replace(
            round=state.round + 1, phase=MERGE, eta=eta, theta=theta, settled=settled, movement=movement, ways=ways
        )
        done = self.settled(state) or state.round >= self.config.rounds
        if done and FINISH in self.tables:
            return state._replace(phase=FINISH), False
        return state, done

    def _movement(self, old: Params, new: Params) -> float:
        before, after = (self.family.stddev(part(p, "eta")) for p in (old, new))
        moves = [(new["eta/loc"] - old["eta/loc"]).abs() / after, (after / before).log().abs()]
        moves += [((new[n] - v).abs() / (1 + v.abs())).flatten() for n, v in old.items() if n.startswith(THETA)]
        return float(torch.cat(moves).max())

    def _global_bound(self, sent: Params, round_: int, draws: int) -> float:
        """E[L0] = E[log p(Z_G) - log q(Z_G)] at the q that silos were sent, nats, at the draws that they use too."""
        eta, theta, values = part(sent, "eta"), part(sent, "theta"), []
        for draw in range(draws):
            z = self.family.transform(eta, self._public_eps(round_, draw))
            values.append(self.problem.density.log_prior(z, theta) - self.family.log_prob(eta, z))
        return float(torch.stack(values).mean())

    def _public_eps(self, round_: int, draw: int) -> Tensor:
        """Of Z_G, the same at all parties."""
        return self.move(self.public_draws.normals(round_ * BOUND_DRAWS + draw, self.family.noise_size)[0])

    # ---- silo ----

    def init_local(self, view: SiloView) -> SFVIAvgLocal:
        own, anchor = self.first_latents(view.start.z_record, view.start.z_silo), self.move(self.problem.start.z_global)
        moments = self.optimizer.init(merge(eta=self.family.init(anchor), theta=self.moved_theta()))
        nothing = np.zeros((0, 0))
        return SFVIAvgLocal(*own, moments, anchor, -1, 0, nothing, nothing)

    def local_fit(self, local: SFVIAvgLocal) -> LocalFit:
        return self.fit_of(local.record, local.silo)

    def answer(self, message: Broadcast, local: SFVIAvgLocal, view: SiloView) -> Answer:
        if message.phase == BURES:
            return self._answer_again(message, local, view)
        shared = self.received(message, message.tensors)
        if message.phase == MERGE:
            return self._answer_merge(message, self.anchored(local, shared["eta/loc"]), shared, view)
        if message.phase == FINISH:  # the last q has come: the latents' distributions refer to it from here on
            local = self._finish(self.anchored(local, shared["eta/loc"]), shared, view)
            first = (view.turn + 1) * self.config.keys_a_round  # past the last question, which this answers
            final = self.final_answer(shared, local.record, local.silo, view, first)
            return Answer({RECORDS: view.size, **final}, local)
        if message.phase == REFINE:
            found = self.refining_answer(message, shared, local.record, local.silo, view)
            return Answer({RECORDS: view.size, **found}, local)
        return Answer({RECORDS: view.size, OBJECTIVE: self._bound(message, local, shared, view)}, local)

    def _answer_merge(self, message: Broadcast, local: SFVIAvgLocal, shared: Params, view: SiloView) -> Answer:
        """A round's local run: the silo's own eta_G and theta, averaged, and its state."""
        start = Point(shared, local.moments, local.latents)
        end, average = self.run(start, message.scalars["records"], message.scalars["rate"], view)
        own, before, eta = average.shared, part(shared, "eta"), part(average.shared, "eta")
        weight = self.weight(view.size)
        found: dict[str, Any] = {RECORDS: view.size, SILOS: 1}
        found |= {} if self.terms else {OBJECTIVE: self._bound(message, local, shared, view)}
        found |= {LOC: weight * to_numpy(eta["loc"] - before["loc"])}
        found |= {THETA + name: weight * to_numpy(own[THETA + name] - v) for name, v in part(shared, "theta").items()}
        latents = end.own._replace(record=average.own.record, silo=average.own.silo)
        after = local._replace(
            **latents._asdict(), moments=end.moments, anchor=eta["loc"], merged=message.round, iteration=1
        )
        if self.trusted:
            found |= own_row(self.family, eta, weight, view.silo, self.problem.silos)
        elif self.full:
            at, covariance = to_numpy(self.family.covariance(before)), to_numpy(self.family.covariance(eta))
            found[ROOT] = bures_term(covariance, weight, at)
            after = after._replace(covariance=covariance, at=at)
        else:
            found[SD] = weight * to_numpy(self.family.stddev(eta) - self.family.stddev(before))
        return Answer(found, after)

    def _answer_again(self, message: Broadcast, local: SFVIAvgLocal, view: SiloView) -> Answer:
        """One more Bures iteration, at an S that the silo derives itself, from what the server says that the total was.

        A silo that missed an earlier sum of this merge has weight zero in the rest of it.
        """
        iteration, root = int(message.scalars[ITERATION]), to_numpy(message.tensors[ROOT])
        if (local.merged, local.iteration) != (message.round, iteration):
            return Answer({RECORDS: 0, SILOS: 0, ROOT: np.zeros_like(root)}, local)
        try:
            at = after_iteration(local.at, root)
        except AggregationError as error:  # of what the server said, whatever the data are
            raise ProtocolError(f"silo '{view.silo}': {error}") from None
        term = bures_term(local.covariance, self.weight(view.size), at)
        return Answer({RECORDS: view.size, SILOS: 1, ROOT: term}, local._replace(iteration=iteration + 1, at=at))

    def weight(self, records: int) -> int:
        """A silo's weight in the merge."""
        return records if self.by_records else 1

    def _finish(self, local: SFVIAvgLocal, shared: Params, view: SiloView) -> SFVIAvgLocal:
        """Steps on the silo's own latents alone, with an optimiser that starts anew: q(Z_G) has moved under them."""
        steps = self.config.final_local_steps
        if not steps:
            return local
        start = Point(shared, self.optimizer.init(shared), self.fresh(local.record, local.silo))
        end = self._walk(start, steps, Factors(1.0, 1.0, 0.0), view)[1].own
        return local._replace(record=end.record, silo=end.silo)

    def anchored(self, local: SFVIAvgLocal, loc: Tensor) -> SFVIAvgLocal:
        """The same distributions given Z_G, written around the mean `loc` of the merged q(Z_G)."""
        shift = loc - local.anchor
        silo, silo_shift = _around(local.silo, shift)
        record, _ = _around(local.record, torch.cat([shift, silo_shift.reshape(-1)]))
        return local._replace(record=record, silo=silo, anchor=loc)

    # ---- local steps ----

    def run(self, start: Point, records: float, rate: float, view: SiloView) -> tuple[Point, Point]:
        """A round's steps from `start`: where they ended, and the average of the last iterates (moments aside).

        `records`: N over all silos. `rate`: factor on the learning rate.
        """
        return self._walk(start, self.config.local_steps, Factors(records / view.size, rate, 1.0), view)

    def _walk(self, start: Point, steps: int, factors: Factors, view: SiloView) -> tuple[Point, Point]:
        """Keys begin where those of the question before end."""
        here, average = start, start
        records = Records(start.own, 1 - self.config.averaged(0, steps), self.by_row and bool(start.own.record))
        for step in range(steps):
            key = view.turn * self.config.keys_a_round + BOUND_DRAWS + step
            now = factors._replace(rate=factors.rate * (1 - (1 - LEAST_RATE) * step / steps))
            rows = self.drawn(key, view)
            rows = None if rows is None else at_least_two(rows, view.size)
            at = self.at(rows)
            here, _ = self._call(here._replace(own=records.taken(here.own, at)), view, key, rows, now)
            records.put(at, here.own, step)
            average = average.averaged(here, self.config.averaged(step, steps))
        return records.ended(here, average, steps)

    def _bound(self, message: Broadcast, local: SFVIAvgLocal, shared: Params, view: SiloView) -> Tensor:
        """The silo's part of the bound at the q(Z_G) that was sent, nats (): the mean over draws of Z_G that all
        parties have in common.

        The server adds L0 at the same draws: at an exact q the sum is the same at every Z_G (Roeder et al. 2017).
        """
        at, found = Point(shared, local.moments, local.latents), []
        for draw in range(bound_draws(message.phase)):
            key, eps = view.turn * self.config.keys_a_round + draw, self._public_eps(message.round, draw)
            found.append(self._call(at, view, key, None, Factors(1.0, 0.0, 0.0), eps)[1])
        return torch.stack(found).mean()

    def _call(
        self, at: Point, view: SiloView, key: int, rows: Rows | None, factors: Factors, eps: Tensor | None = None
    ) -> tuple[Point, Tensor]:
        """One step on these rows (None: all), whose latents `at` has, at the given eps_G or at one of the silo's own,
        and the silo's part of the bound before it. `key` names the draws, which are used once."""
        size = self.family.noise_size
        # One draw cut in two: two draws under one key would share their numbers.
        drawn = self.move(view.silo_draws.normals(key, size + self.n_silo))
        batch = self.batch(key, view, rows, drawn[:, size:].clone(), self.config.sampling_rate)
        numbers = torch.tensor(factors, dtype=self.problem.dtype, device=self.problem.device)
        found: tuple[Point, Tensor] = self._step(at, batch, drawn[0, :size].clone() if eps is None else eps, numbers)
        return found

    def step_function(self, at: Point, batch: Batch, eps: Tensor, factors: Tensor) -> tuple[Point, Tensor]:
        copies, rate, moving = factors.unbind()
        eta, theta = part(at.shared, "eta"), part(at.shared, "theta")
        z_global = self.family.transform(eta, eps)
        g = self._gradient(copies)(z_global, z_global - eta["loc"], theta, at.own.record, at.own.silo, *batch)
        times = copies if self.config.scale_entropy else torch.ones_like(copies)
        total = self._server_gradient(
            eta, theta, eps, times * g.direct, times * g.path, {name: times * v for name, v in g.theta.items()}
        )
        units = global_units(self.family, eta)
        gradient = merge(eta=total.eta, theta=total.theta)
        shared, moments = self.optimizer.step(at.shared, gradient, at.moments, rate * moving, units)
        return Point(shared, moments, self.stepped(at.own, g, rate)), g.value

    def _gradient(self, copies: Tensor) -> SiloFunction:
        """Of L_j, or, in the paper's text, of L_j with its log-joint alone scaled."""
        density: Any = self.problem.density if self.config.scale_entropy else _Powered(self.problem.density, copies)
        return silo_gradient(density, self.local_family, self.silo_family, self.samples)


def bound_draws(phase: str) -> int:
    """At how many draws of Z_G the bound is estimated in a phase."""
    return ROUND_DRAWS if phase == MERGE else BOUND_DRAWS


def full_parameters(loc: Tensor, covariance: FloatArray) -> Params:
    """eta of the full family with this mean (n,) and covariance (n, n). Raises InputError where it is no covariance."""
    matrix = torch.from_numpy(covariance)
    factor, info = torch.linalg.cholesky_ex(0.5 * (matrix + matrix.T))
    if int(info) or not bool(factor.isfinite().all()):
        raise InputError("the merged covariance is not positive definite; lower learning_rate or rescale the data")
    return {name: value.to(loc) for name, value in eta_of(loc, factor).items()}


def diagonal_parameters(loc: Tensor, covariance: FloatArray) -> Params:
    """eta of the diagonal family with this mean (n,) and the diagonal of this covariance (n, n)."""
    sd = np.sqrt(np.diag(covariance))
    return {"loc": loc, "log_scale": loc.new_tensor(np.log(sd))}


def _around(params: Params, shift: Tensor) -> tuple[Params, Tensor]:
    """A conditional family's parameters after its d has lost `shift`, and the move of its mean."""
    out, moved = dict(params), shift.new_zeros(params["loc"].shape if params else (0,))
    for name, by in (("loc", "coupling"), ("log_scale", "scale_coupling")):
        if by in params:
            change = (params[by] * shift).sum(-1)
            out[name] = params[name] + change
            moved = change if name == "loc" else moved
    return out, moved


def _positive(weight: float) -> float:
    if weight <= 0:
        raise AggregationError("the weights of a merge add up to nothing")
    return weight


class _Powered:
    """A density to a power: what is scaled when entropy is not."""

    def __init__(self, density: LogDensity, power: Tensor) -> None:
        self._evaluate, self._power = density.evaluate, power

    def evaluate(self, *args: Any) -> LogTerms:
        terms = self._evaluate(*args)
        return terms._replace(records=self._power * terms.records, silo=self._power * terms.silo)


# ---- Wasserstein barycenters of Gaussians, from totals alone (section 3.2) ----
#
# The barycenter of N(mu_j, Sigma_j) with weights w_j has the weighted mean of the mu_j and the covariance S with
#
#     S = sum_j w_j (S^1/2 Sigma_j S^1/2)^1/2,
#
# reached by S <- S^-1/2 T^2 S^-1/2, T the right side (Alvarez-Esteban et al. 2016). T is a sum over silos: every
# iteration is one secure sum, and one release. Of few silos, several totals tell the covariances apart
# (docs/threat-model.md). For diagonal covariances sigma is the weighted mean of the sigma_j: one sum, no iteration.


class Gaussian(NamedTuple):
    """A mean (d,) and a covariance (d, d)."""

    mean: FloatArray
    covariance: FloatArray


def trusted_barycenter(gaussians: list[Gaussian], weights: FloatArray | None = None) -> Gaussian:
    """The barycenter by POT, for parties that may see all Gaussians. `weights` (J,) add up to 1 (None: equal)."""
    import ot

    means = np.stack([g.mean for g in gaussians])
    covariances = np.stack([g.covariance for g in gaussians])
    mean, covariance = ot.gaussian.bures_wasserstein_barycenter(
        means, covariances, weights=weights, num_iter=1000, eps=1e-11
    )
    return Gaussian(np.asarray(mean), np.asarray(covariance))


def bures_term(own: FloatArray, weight: int, covariance: FloatArray) -> FloatArray:
    """n T_j for Sigma_j = `own` at S = `covariance`, both (d, d): an upper triangle."""
    root = matrix_root(covariance)
    return weight * pack_symmetric(matrix_root(root @ own @ root))


def after_iteration(covariance: FloatArray, mean: FloatArray) -> FloatArray:
    """S^-1/2 T^2 S^-1/2 for T = `mean`, the upper triangle of the silos' weighted mean. Raises AggregationError for one
    that no Gaussians have: not positive definite."""
    t = unpack_symmetric(mean, covariance.shape[0])
    if not np.isfinite(t).all() or (found := np.linalg.eigh(t)).eigenvalues[0] <= 0:
        raise AggregationError("the total of a barycenter's iteration is not positive definite")
    values, vectors = found
    inverse_root = matrix_root(covariance, inverse=True)
    half = inverse_root @ ((vectors * values) @ vectors.T)
    return half @ half.T


def matrix_root(matrix: FloatArray, inverse: bool = False) -> FloatArray:
    """The symmetric root of a symmetric positive semidefinite `matrix` (d, d), or the inverse of the root."""
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    roots = np.sqrt(np.maximum(values, 0.0))
    root: FloatArray = (vectors * (1 / roots if inverse else roots)) @ vectors.T
    return root


def pack_symmetric(symmetric: FloatArray) -> FloatArray:
    """The upper triangle of a symmetric matrix (d, d), rows one after the other, (d (d + 1) / 2,)."""
    return symmetric[np.triu_indices(symmetric.shape[0])]


def unpack_symmetric(upper: FloatArray, d: int) -> FloatArray:
    """The symmetric matrix (d, d) of an upper triangle; inverse of `pack_symmetric`."""
    out = np.zeros((d, d))
    out[np.triu_indices(d)] = upper
    return out + np.triu(out, 1).T


# ---- a trusted barycenter ----
# Each silo has a row of its own, zero for all others, so that the total of a plain sum is the list of what silos sent.
# Seen by the server: each silo's number of records (its weight), mean and covariance.


def trusted_blocks(silos: int, n: int, full: bool, bound: float) -> tuple[Block, ...]:
    """A row a silo: its weight, mean (n,), and covariance as a packed triangle or, for diagonal families, sds (n,)."""
    spread = n * (n + 1) // 2 if full else n
    return (
        Block(WEIGHTS, (silos,), 2.0**31, integer=True, rows="silo"),
        Block(MEANS, (silos, n), bound, rows="silo"),
        Block(SPREADS, (silos, spread), bound, rows="silo"),
    )


def own_row(family: GlobalFamily, eta: Params, weight: int, silo: str, silos: Sequence[str]) -> dict[str, Any]:
    """What a silo puts into these blocks."""
    mine = np.array([name == silo for name in silos], np.float64)
    spread = pack_symmetric(to_numpy(family.covariance(eta))) if family.name == "full" else to_numpy(family.stddev(eta))
    return {WEIGHTS: weight * mine, MEANS: np.outer(mine, to_numpy(eta["loc"])), SPREADS: np.outer(mine, spread)}


def trusted_merge(sums: Totals, full: bool) -> Gaussian:
    """The barycenter of the silos that answered, by POT. Raises AggregationError where none has a weight."""
    weights = sums[WEIGHTS]
    there = np.flatnonzero(weights > 0)
    if not len(there):
        raise AggregationError("the weights of a merge add up to nothing")
    means, spreads = sums[MEANS][there], sums[SPREADS][there]
    gaussians = [
        Gaussian(mean, unpack_symmetric(spread, len(mean)) if full else np.diag(spread**2))
        for mean, spread in zip(means, spreads, strict=True)
    ]
    return trusted_barycenter(gaussians, weights[there] / weights[there].sum())
