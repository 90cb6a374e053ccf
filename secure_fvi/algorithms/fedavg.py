"""Federated averaging (McMahan et al. 2017, Algorithm 1): a point estimate, by local steps and averages.

    server:  sends w, the global latents (unconstrained) and theta
    silo:    takes `local_steps` gradient steps from w on its own mean log posterior, contributes N_j x the change
    server:  adds the weighted mean of the changes to w, by SGD with momentum

A silo's objective is F_j = (sum_i log p(y_i | w) + (N_j / N) log p(w)) / N_j, so that sum_j (N_j / N) F_j is the log
posterior over N: with one local step a round this is gradient ascent on it, and where silos agree more steps come to
its maximum too. Where they do not, more local steps settle elsewhere (docs/fedavg.md). The maximum is taken in the
unconstrained space, log Jacobians included. A silo keeps nothing from round to round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from secure_fvi.aggregation.base import Block
from secure_fvi.algorithms.base import PRIVATE, Broadcast, Phase, Posterior, Problem, SiloView, Step, Verdict
from secure_fvi.algorithms.kit import Answer, Program, Sum, Totals, poisson_rows
from secure_fvi.compiled import Traced
from secure_fvi.disclosure import Declaration, Sums, drawn
from secure_fvi.errors import AggregationError, InputError
from secure_fvi.families.gaussian import GlobalFamily, Point
from secure_fvi.options import SCHEDULES, Bound, Count, Momentum, NotNegative, Positive, Schedule, Share, check
from secure_fvi.trees import Params, merge, part, take

#: Phases. COUNT once, before the first round, where N is needed; AVERAGE every round.
COUNT, AVERAGE = "count", "average"
ETA, THETA, RECORDS, SILOS, OBJECTIVE = "eta", "theta", "records", "silos", "objective"


@dataclass(frozen=True)
class FedAvg:
    """Options of federated averaging."""

    rounds: Count = 500
    """At most; the run ends where an average change is below `tolerance`."""
    local_steps: Count = 10
    """Gradient steps of a silo in a round."""
    learning_rate: Positive = 0.1
    """Of these steps, on the mean log posterior of a record."""
    server_learning_rate: Positive = 1.0
    """Of the server's step along the average change."""
    server_momentum: Momentum = 0.0
    """Of that step."""
    server_schedule: Schedule = "constant"
    """How its rate falls over `rounds`."""
    tolerance: NotNegative = 1e-4
    """The largest element of an average change, over learning_rate x local_steps where that is below 1, so that a small
    rate alone is no convergence."""
    prior: bool = True
    """False leaves log p(w) out: maximum likelihood."""
    weights: Literal["records", "equal"] = "records"
    """Of a silo in the average: its number of records, or 1."""
    sampling_rate: Share = 1.0
    """Each record joins a local step with this probability."""
    participation: Share = 1.0
    """Of the silos, asked in a round."""
    total_records: Count | None = None
    """N, where it is public; otherwise it is counted by one more secure sum, if the prior needs it."""
    bound: Bound = 2.0**30
    """Largest absolute value of any element of a contribution."""

    name = "fedavg"
    importance_samples = 1
    without_prior = "prior = False"

    def __post_init__(self) -> None:
        check(self)

    @property
    def expected_calls(self) -> int:
        return self.rounds * (self.local_steps + 1)

    @property
    def reach(self) -> float:
        """How far the local steps of a round may come, of a whole step."""
        return min(1.0, self.learning_rate * self.local_steps)

    def declare(self, silos: int, private: bool) -> Declaration:
        sums = averaged_sums(self, silos, private)
        because = f"participation = {self.participation:g}"
        return Declaration(self.rounds, sums, "nothing", False, self.sampling_rate, because)

    def server(self, problem: Problem) -> FedAvgProgram:
        """Raises InputError for what the model or its privacy do not allow."""
        return FedAvgProgram(self, problem)

    silo = server


def averaged_sums(config: Any, silos: int, private: bool) -> tuple[Sums, ...]:
    """What the sums of an algorithm that averages are: a count where N is needed and not public, then a round each."""
    what = "the change of its own copy of the point and of the model's parameters, times its weight"
    what += "; its part of the objective, its number of records"
    sums = (Sums(AVERAGE, config.rounds, what, *drawn(silos, config.participation)),)
    if config.prior and config.total_records is None and not private:
        return (Sums(COUNT, 1, "its number of records", silos, besides=True), *sums)
    return sums


#: A change that counts as none, as `tolerance` measures it: rounding.
_NOTHING = 1e-12


class FedAvgState(NamedTuple):
    """The server's state. All of it follows from broadcasts and totals."""

    round: int
    phase: str  # of the sum to come
    point: Params  # w: "eta/..." of the family, "theta/..." of pyro.params, unconstrained
    velocity: Params
    records: int  # N; 0 where nothing needs it
    movement: float | None  # of the last round, as `tolerance` measures it
    largest: Params  # change of each element in any round; of one that has not slowed down the way may be long
    slowed: bool  # whether all elements changed at most half as much in the last round
    reported: dict[str, float]  # totals at the w last sent, nats, scaled to all silos; empty where not released
    objective: float  # of them, at the w last sent, nats; NaN where it is not released


class FedAvgProgram(Program):
    """FedAvg on one problem, and what FedVI shares with it."""

    no_record_privacy = (
        ": its local steps see whole records again and again without noise; use unit = 'silo', or the algorithm sfvi"
    )
    #: Totals that a round reports beside the change, nats; none under silo privacy.
    reported: tuple[str, ...] = (OBJECTIVE,)

    def setup(self) -> None:
        config, problem = self.config, self.problem
        self.check_latents()
        self.family, eta = self.start_of_family()
        start = merge(**{ETA: eta, THETA: dict(sorted(problem.start.theta.items()))})
        self.start: Params = {name: self.move(value) for name, value in start.items()}
        self.by_records = config.weights == "records"
        self.counts_first = config.prior and config.total_records is None
        if problem.privacy is not None:
            self._check_private()
        self._gradient = self.traced_gradient()

    def check_latents(self) -> None:
        layout = self.problem.layout
        local = [site.name for role in ("record", "silo") for site in layout.of(role)]
        if local:
            raise InputError(
                f"fedavg is for models without local latents, and this one has {', '.join(local)}; sum them out of "
                "the model, or use sfvi-avg"
            )

    def start_of_family(self) -> tuple[GlobalFamily, Params]:
        """What the averaged point stands for, and where it starts."""
        family = Point(self.problem.layout.size("global"))
        return family, family.init(self.problem.start.z_global)

    def _check_private(self) -> None:
        config = self.config
        if self.by_records:
            raise InputError(
                f"under silo privacy {config.name} needs weights = 'equal': numbers of records are not released"
            )
        if self.counts_first:
            raise InputError(
                f"under silo privacy {config.name} needs total_records, a public figure for all silos' records "
                f"together, or {config.without_prior}, since counting them would release their number"
            )

    def sums(self) -> dict[str, Sum]:
        config, prior = self.config, ("prior",)
        counts = (Block(RECORDS, (), 2.0**31, integer=True), Block(SILOS, (), 1.0, integer=True))
        reported = tuple(Block(name, (), config.bound) for name in self.reported)
        changes = tuple(Block(name, tuple(v.shape), config.bound) for name, v in self.start.items())
        rounds = Phase(range(config.rounds))
        average = Sum((*counts, *reported, *changes), rounds, self.start, frozenset(self.start), scalars=prior)
        if not self.counts_first:
            return {AVERAGE: average}
        return {COUNT: Sum(counts, Phase(range(1)), self.start, scalars=prior), AVERAGE: average}

    # ---- server ----

    def init(self) -> FedAvgState:
        still = {name: torch.zeros_like(value) for name, value in self.start.items()}
        first = COUNT if self.counts_first else AVERAGE
        return FedAvgState(
            0, first, self.start, still, self.config.total_records or 0, None, still, False, {}, math.nan
        )

    def broadcast(self, state: FedAvgState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        cohort = self.asked(state.round, state.phase)
        prior = 1 / state.records if self.config.prior and state.records else 0.0
        return Broadcast(state.round, index, accepted, cohort, {"prior": prior}, dict(state.point), state.phase)

    def step(self, state: FedAvgState, message: Broadcast, sums: Totals, scale: float) -> tuple[FedAvgState, Step]:
        config = self.config
        if message.phase == COUNT:
            state = state._replace(records=round(scale * float(sums[RECORDS])), phase=AVERAGE)
            return state, Step(math.nan, config.learning_rate, None, COUNT, False)
        self._check_total(sums, scale)
        weight = self.answered(scale) if self.terms else float(sums[RECORDS if self.by_records else SILOS])
        if weight <= 0:
            raise AggregationError("the weights of an average add up to nothing")
        change = {name: torch.as_tensor(sums[name] / weight).to(value) for name, value in state.point.items()}
        velocity = {name: config.server_momentum * v + change[name] for name, v in state.velocity.items()}
        rate = config.server_learning_rate * SCHEDULES[config.server_schedule](state.round / config.rounds)
        point = {name: w + rate * velocity[name] for name, w in state.point.items()}
        if not all(bool(value.isfinite().all()) for value in point.values()):
            raise InputError(
                f"the average of round {state.round} is not finite; lower learning_rate or rescale the data"
            )
        movement = max(float(c.abs().max()) for c in change.values() if c.numel()) / config.reach
        largest = {name: torch.maximum(was, change[name].abs()) for name, was in state.largest.items()}
        nothing = _NOTHING * config.reach
        slowed = all(bool((c.abs() <= (largest[name] / 2).clamp(min=nothing)).all()) for name, c in change.items())
        reported = {name: scale * float(sums[name]) for name in self.reported if name in sums}
        objective = self.objective(state.point, reported) if reported else math.nan
        state = FedAvgState(
            state.round + 1, AVERAGE, point, velocity, state.records, movement, largest, slowed, reported, objective
        )  # fmt: skip
        finished = self.at_rest(state) or state.round >= config.rounds
        return state, Step(objective, config.learning_rate, None, AVERAGE, finished)

    def _check_total(self, sums: Totals, scale: float) -> None:
        """Raises InputError where the prior is shared out by another number of records than all silos have, as a total
        of all of them says: nothing else would tell."""
        said = self.config.total_records if self.config.prior and scale == 1 else None
        if said is not None and not self.terms and (found := round(float(sums[RECORDS]))) != said:
            raise InputError(
                f"total_records = {said}, and the silos have {found} records together, so that the prior would count "
                f"{found / said:.3g} times; leave total_records out, or correct it"
            )

    def objective(self, point: Params, reported: Mapping[str, float]) -> float:
        """log p(y | w) + log p(w) in nats, from the totals that were reported of `point`."""
        at = self.at(point)
        prior = self.problem.density.log_prior(at.eta["loc"], at.theta) if self.config.prior else 0
        return reported[OBJECTIVE] + float(prior)

    def at(self, point: Params) -> Posterior:
        return Posterior(self.family, part(point, ETA), part(point, THETA))

    def posterior(self, state: FedAvgState) -> Posterior:
        return self.at(state.point)

    def at_rest(self, state: FedAvgState) -> bool:
        """Whether averages have come to rest; with several local steps that need not be at the maximum. An element that
        goes on as it began, however slowly, is one whose column is of another scale."""
        return self._moves_little(state) and state.slowed

    def _moves_little(self, state: FedAvgState) -> bool:
        return state.movement is not None and state.movement < self.config.tolerance

    def verdict(self, state: FedAvgState) -> Verdict:
        """Of the averages, which are what it can see; under privacy they are noise."""
        if self.terms:
            return Verdict(None, PRIVATE, {})
        details = {"movement": state.movement}
        if self.at_rest(state):
            found = "averages have come to rest, with several local steps near the maximum rather than at it"
            return Verdict(True, f"{found}: a point estimate, no posterior", details)
        advice = f"raise rounds (now {self.config.rounds}), lower learning_rate, or standardise the columns"
        if self._moves_little(state):
            found = "some averages moved little, but as much as at the start, as where a column is of another scale"
            return Verdict(False, f"{found}; {advice}", details)
        return Verdict(False, f"averages were still moving when the rounds were over; {advice}", details)

    def metrics(self, state: FedAvgState) -> dict[str, float | None]:
        """`log_posterior`: log p(y, w) at the w last sent, nats (log p(y | w) without the prior). There is no bound."""
        objective = None if math.isnan(state.objective) else state.objective
        return {"bound": None, "log_posterior": objective, "movement": state.movement}

    # ---- silo ----

    def answer(self, message: Broadcast, local: tuple[()], view: SiloView) -> Answer:
        counts: dict[str, Any] = {RECORDS: view.size, SILOS: 1}
        if message.phase == COUNT:
            return Answer(counts, ())
        sent = self.received(message, self.start)
        reports, own = self.run(sent, message, view)
        weight = view.size if self.by_records else 1
        return Answer({**counts, **reports, **{n: weight * (own[n] - v) for n, v in sent.items()}}, ())

    def run(self, point: Params, message: Broadcast, view: SiloView) -> tuple[dict[str, Any], Params]:
        """The log likelihood of all the silo's records at what was sent, nats, and the point after the local steps."""
        config = self.config
        scale = self.move(torch.tensor([1.0 / view.size, message.scalars["prior"]], dtype=self.problem.dtype))
        _, log_likelihood = self._gradient(point, view.rows, view.weights, scale)
        for step in range(config.local_steps):
            key = view.turn * config.local_steps + step
            at = poisson_rows(view, key, config.sampling_rate, self.problem.device)
            weights = view.weights if at is None else view.weights[at] / config.sampling_rate
            gradient, _ = self._gradient(point, take(view.rows, at), weights, scale)
            point = {name: w + config.learning_rate * gradient[name] for name, w in point.items()}
        return {OBJECTIVE: log_likelihood}, point

    def traced_gradient(self) -> Traced:
        """Of sum_i weight_i log p(y_i | w) x scale_0 + log p(w) x scale_1; and the weighted sum itself, nats ()."""

        def function(point: Params, rows: Params, weights: Tensor, scale: Tensor) -> tuple[Params, Any]:
            def objective(point: Params) -> tuple[Tensor, Tensor]:
                at = self.at(point)
                z, no_latents = at.eta["loc"], at.eta["loc"].new_zeros(len(weights), 0)
                terms = self.problem.density.evaluate(z, z.new_zeros(0), no_latents, at.theta, rows)
                log_likelihood = (weights * terms.records).sum()
                return scale[0] * log_likelihood + scale[1] * terms.shared, log_likelihood

            found: tuple[Params, Any] = torch.func.grad(objective, has_aux=True)(point)
            return found

        return Traced(function, (None, 0, 0, None), self.problem.mode)
