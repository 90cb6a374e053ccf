"""The server's half of PVI: it adds the damped sum of changes to q, chooses the damping, and says when to stop.

A run is at rest once, in the last rounds, every silo took part, none failed or tempered its cavity, and none's own
undamped change moves q past the tolerance: these are counts in the sum, so that opposite changes do not hide each other
and a sum of nothing is no rest. Then, in one more phase, all silos evaluate the bound and its slope at the final q
(`stationarity`): a run has converged only if that slope would not move q either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import (
    PRIVATE,
    ROUND_PHASE,
    Broadcast,
    Posterior,
    Problem,
    Step,
    Verdict,
    fixed_length,
)
from secure_fvi.algorithms.local_fit_options import NATURAL
from secure_fvi.algorithms.natural import Natural, nothing, to_eta
from secure_fvi.algorithms.pvi import FINISH, PVI
from secure_fvi.algorithms.pvi_damping import accept, distance_moved, pace
from secure_fvi.algorithms.pvi_frame import PVIFrame
from secure_fvi.algorithms.pvi_prior import Prior
from secure_fvi.algorithms.pvi_schedule import Turns, after_turn, first_turns, weight
from secure_fvi.algorithms.stationarity import Rest, at_rest, final_draws, verdict
from secure_fvi.errors import InputError
from secure_fvi.families import Params
from secure_fvi.optimizers import Optimizer

#: Quiet rounds in a row after which a run is at rest, all silos in each; of other schedules one round of each silo.
QUIET = 2
#: How often a step is shortened before the silos' tempered answers are taken.
_SHORTER = 3
#: And in all: a silo whose cavity is improper at the fixed point itself stays so, however short the steps.
_MOST_UNDONE = 8


class Counts(NamedTuple):
    """Silos of one round's sum. Everyone may see them."""

    absent: int = 0
    skipped: int = 0
    tempered: int = 0
    moving: int = 0

    @property
    def quiet(self) -> bool:
        return not any(self)


class PVIState(NamedTuple):
    """The server's state. All of it follows from totals."""

    round: int
    q: Natural  # the prior's factor times all sites
    prior: Natural  # the prior's factor, or the site that stands for it
    theta: Params
    theta_moments: Params
    took: Tensor  # (J,) the sum of each silo's last change that q took; 0: none
    kept: Tensor  # (J,) and that sum's damping, which the server may have halved since
    moved: Tensor  # (J,) standard deviations by which each silo's last change, undamped, would have moved q
    damping: float  # the share to be taken next, under "auto"; 0 before the first round
    residual: Natural  # the last sum of changes of all silos
    earlier: Natural  # the one before
    skipped: int  # times that a silo's fit failed
    tempered: int  # times that a silo fitted against a tempered cavity
    undone: int  # steps taken back by half, since they left a silo without a proper cavity
    last: Counts  # of the last round
    quiet: Tensor  # (J,) rounds in a row that a silo was in the total of and that were quiet
    stepped: Tensor  # (J,) one for silos whose changes the last step was made of; all zero: it cannot be shortened
    shortened: int  # times that the last step was
    theta_moved: float  # by the last step of theta, relative to 1 + |theta|
    phase: str  # of the sum to come
    rest: Rest  # what the final sum told
    checked: bool  # whether all silos were in it
    halvings: int  # of steps after which q would have been improper, or would have lost most of its precision
    turns: Turns  # of a schedule with delays


class PVIServer:
    """`algorithms.base.ServerProgram`."""

    def __init__(self, config: PVI, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.frame = frame = PVIFrame(config, problem)
        self.tables, self.terms = frame.tables, frame.terms_by_phase
        self.prior = Prior(frame)
        self.optimizer = Optimizer("adam", config.theta_learning_rate)

    def init(self) -> PVIState:
        theta = {name: self.frame.move(value) for name, value in self.frame.theta_start.items()}
        prior = self.prior.start(theta)
        if not prior.proper:
            raise InputError("the prior of the global sites has no Gaussian approximation; PVI cannot start from it")
        none = torch.zeros(len(self.problem.silos), dtype=torch.float64)
        moved = torch.full_like(none, math.inf)
        none_yet = nothing(self.frame.n, self.frame.full)
        moments, turns = self.optimizer.init(theta), first_turns(len(none))
        return PVIState(
            round=0, q=prior, prior=prior, theta=theta, theta_moments=moments, took=none, kept=none, moved=moved,
            damping=0.0, residual=none_yet, earlier=none_yet, skipped=0, tempered=0, undone=0, last=Counts(),
            quiet=none, stepped=none, shortened=0, theta_moved=0.0, phase=ROUND_PHASE, rest=Rest(), checked=False,
            halvings=0, turns=turns,
        )  # fmt: skip

    def broadcast(self, state: PVIState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        units = self.frame.units(state.q)
        tensors = {"q": state.q.pack(), "units": units, "sums": state.took, "dampings": state.kept}
        tensors |= {f"theta/{name}": value for name, value in state.theta.items()}
        if state.phase == FINISH:
            return Broadcast(state.round, index, accepted, self.problem.silos, {}, tensors, FINISH)
        return Broadcast(state.round, index, accepted, self.frame.cohort(state.round), {}, tensors)

    def update(self, state: PVIState, message: Broadcast, total: FloatArray, scale: float) -> tuple[PVIState, Step]:
        sums, silos = self.tables[message.phase].split(total), self.problem.silos
        present = self._present(message, sums.get("present"), scale)
        if message.phase == FINISH:
            return self._checked(state, present, sums)
        counts = Counts(
            len(message.cohort) - int(present.sum()), *(int(sums.get(n, 0)) for n in ("skipped", "tempered", "moving"))
        )
        if self._may_shorten(state, counts):
            return self._shortened(state, counts)
        stated = torch.from_numpy(sums["change"])
        change = self.frame.unpack(stated / self.frame.per_unit(message.tensors["units"].to(stated)))
        asked = int(present.sum())
        if not asked:
            change = nothing(self.frame.n, self.frame.full)
        damping = float(self.config.damping) if self.config.damping != "auto" else self._chosen(state, change, asked)
        turns, age = self._turns(state, message)
        q, taken, halvings = accept(state.q, change, damping, 0.0 if age else self._safe(asked))
        moved = torch.where(present > 0, distance_moved(state.q, change, taken) / weight(age), state.moved)
        objective = math.nan
        if "objective" in sums and asked == len(silos) and not age:
            objective = float(sums["objective"]) + self.prior.minus_kl(q, state.theta)
        theta, moments = state.theta, state.theta_moments
        if self.config.theta_updates == "round" or float(moved.max()) < self.config.tolerance:
            theta, moments = self._theta_step(state, q, sums, scale)
        prior = state.prior
        q, prior = self.prior.refit(q, prior, theta)
        moves = [((theta[n] - v).abs() / (1 + v.abs())).max() for n, v in state.theta.items() if v.numel()]
        theta_moved = float(torch.stack(moves).max()) if moves else 0.0
        quiet = counts.quiet and theta_moved < self.config.tolerance
        after = PVIState(
            round=state.round + 1,
            q=q,
            prior=prior,
            theta=theta,
            theta_moments=moments,
            took=torch.where(present * taken > 0, float(message.sum_index), state.took),
            kept=torch.where(present * taken > 0, taken, state.kept),
            moved=moved,
            damping=taken or damping / 2,
            residual=change,
            earlier=state.residual,
            skipped=state.skipped + counts.skipped,
            tempered=state.tempered + counts.tempered,
            undone=state.undone,
            last=counts,
            quiet=state.quiet + present if quiet else torch.zeros_like(state.quiet),
            stepped=present if taken and not counts.skipped and not counts.tempered else torch.zeros_like(present),
            shortened=0,
            theta_moved=theta_moved,
            phase=ROUND_PHASE,
            rest=Rest(),
            checked=False,
            halvings=state.halvings + halvings,
            turns=turns,
        )
        return self._ended(after, Step(objective, taken, None, self.config.schedule, False))

    def posterior(self, state: PVIState) -> Posterior:
        eta = {name: self.frame.move(value) for name, value in to_eta(state.q).items()}
        return Posterior(self.frame.family, eta, state.theta)

    def rounds(self, state: PVIState) -> int:
        return state.round

    def at_rest(self, state: PVIState) -> bool:
        """Whether every silo was in quiet rounds, none after a round that was not, and their sum does not move q."""
        needed = QUIET if self.frame.cohort_size == len(self.problem.silos) else 1
        return bool((state.quiet >= needed).all()) and float(state.moved.max()) < self.config.tolerance

    def verdict(self, state: PVIState) -> Verdict:
        """What the last rounds and the final sum say together."""
        config, rest, details = self.config, state.rest, self._details(state)
        if self.frame.terms is not None:
            return Verdict(None, PRIVATE, details, float(state.moved.max()) >= 1.0)
        if config.rounds is not None:
            far = float(state.moved.max()) >= 1.0
            seen = ", and q was still moving by more than a standard deviation" if far else ""
            return fixed_length("rounds", config.rounds, seen, self._counts(state), far)
        trouble = self._trouble(state)
        if trouble is not None:
            return Verdict(False, trouble, details)
        advice = (
            f"lower learning_rate (now {self._rate:.2g}) or raise local_steps (now {config.local_steps}), "
            "standardise the columns, or use sfvi"
        )
        found = f"all {len(self.problem.silos)} silos were at rest in the last rounds"
        return verdict(rest, None, found, advice)._replace(details=details)

    def _details(self, state: PVIState) -> dict[str, float | None]:
        return {**self._counts(state), **state.rest.details()}

    def _counts(self, state: PVIState) -> dict[str, float | None]:
        return {f"silos_{name}": float(value) for name, value in state.last._asdict().items()}

    def _trouble(self, state: PVIState) -> str | None:
        """What kept the rounds from coming to rest, and what to try."""
        last, count, config = state.last, len(self.problem.silos), self.config
        if self.at_rest(state):
            return None if state.checked else "a silo was missing when the final q was checked; run it again"
        scale = "standardise the columns, or use sfvi"
        if last.skipped:
            return (
                f"{last.skipped} of {count} silos could not fit in the last round, their local steps ran off; lower "
                f"learning_rate (now {self._rate:.2g}), {scale}"
            )
        if last.tempered:
            return (
                f"{last.tempered} of {count} silos had an improper cavity in the last round (the other silos' sites "
                f"together are no distribution), so that q counts their records wrongly; set a lower damping "
                f"(now {self._damping(state)}), {scale}"
            )
        if last.absent:
            return f"{last.absent} of the silos that were asked were absent from the last round; run it again"
        if last.moving:
            return (
                f"{last.moving} of {count} silos would still move q by more than {config.tolerance:g} sds after "
                f"{state.round} rounds; raise max_rounds (now {config.max_rounds}) or local_steps "
                f"(now {config.local_steps}), lower learning_rate (now {self._rate:.2g}), {scale}"
            )
        if state.theta_moved >= config.tolerance:
            return f"the pyro.params were still moving; raise max_rounds (now {config.max_rounds})"
        return f"q was at rest for too short a time; raise max_rounds (now {config.max_rounds})"

    @property
    def _rate(self) -> float:
        """Of the local fits."""
        return self.frame.first_rate if self.config.local_optimizer == NATURAL else self.config.first_rate

    def _damping(self, state: PVIState) -> str:
        return f"{state.damping:.2g}, found by itself" if self.config.damping == "auto" else f"{self.config.damping:g}"

    def _ended(self, state: PVIState, step: Step) -> tuple[PVIState, Step]:
        """After a round: whether it was the last, and whether the final q has to be looked at."""
        done = state.round >= self.config.most_rounds or (self.config.rounds is None and self.at_rest(state))
        if done and FINISH in self.tables:
            return state._replace(phase=FINISH), step
        return state, step._replace(finished=done)

    def _checked(self, state: PVIState, present: Tensor, sums: dict[str, FloatArray]) -> tuple[PVIState, Step]:
        """After the final sum."""
        whole = int(present.sum()) == len(self.problem.silos)
        eps = final_draws(self.problem.seed, self.frame.n, self.frame.full, self.config.rounds is not None)
        prior = lambda z: self.prior.log_prob(z, state.theta)  # noqa: E731
        rest = at_rest(self.problem, state.q, state.theta, prior, eps, sums, self.config.bound)
        state = state._replace(phase=ROUND_PHASE, rest=rest if whole else Rest(), checked=whole)
        return state, Step(rest.objective if whole else math.nan, state.damping, None, FINISH, True)

    def _may_shorten(self, state: PVIState, counts: Counts) -> bool:
        """Whether silos lost their proper cavity by the last step, which can be taken back by half."""
        return bool(
            counts.tempered
            and state.stepped.any()
            and state.shortened < _SHORTER
            and state.undone < _MOST_UNDONE
            and not self.config.delay
        )

    def _shortened(self, state: PVIState, counts: Counts) -> tuple[PVIState, Step]:
        """Half the last step; what the silos answered to the whole one is left."""
        mine = state.stepped > 0
        taken = float(state.kept[mine].max()) / 2
        q = state.q.plus(state.residual, -taken)
        if not q.proper:  # as it may be where the prior's site has moved since; then the step stays
            q, taken, mine = state.q, 2 * taken, torch.zeros_like(mine)
        after = state._replace(
            round=state.round + 1,
            q=q,
            kept=torch.where(mine, taken, state.kept),
            damping=min(state.damping, taken),
            tempered=state.tempered + counts.tempered,
            undone=state.undone + 1,
            last=counts,
            quiet=torch.zeros_like(state.quiet),
            stepped=mine.double(),
            shortened=state.shortened + 1,
        )
        return self._ended(after, self._left(after))

    def _left(self, state: PVIState) -> Step:
        """The step of a round whose answers were left."""
        return Step(math.nan, state.damping, None, self.config.schedule, False)

    def metrics(self, state: PVIState) -> dict[str, float | None]:
        moved = float(state.moved.max())
        return {
            "last_change_sd": moved if math.isfinite(moved) else None,
            "damping": state.damping,
            "bound": state.rest.bound,
            "skipped_fits": state.skipped,
            "tempered_cavities": state.tempered,
            "undone_steps": state.undone,
            "halvings": state.halvings,
        }

    def _present(self, message: Broadcast, shown: FloatArray | None, scale: float) -> Tensor:
        """(J,) one for silos in the total. Under silo privacy they are not counted, so a sum that lost one is left."""
        silos = self.problem.silos
        if shown is not None:
            return torch.from_numpy(shown > 0.5).double()
        whole = round(len(silos) / scale) == len(message.cohort)
        return torch.tensor([float(whole and name in message.cohort) for name in silos], dtype=torch.float64)

    def _safe(self, asked: int) -> float:
        """One over the clients asked, virtual ones counted."""
        return 1.0 / max(asked * self.config.virtual_clients, 1)

    def _turns(self, state: PVIState, message: Broadcast) -> tuple[Turns, int]:
        """After this round, and the age of the oldest change in its total: late silos answer on their last turn's q."""
        if not self.config.delay:
            return state.turns, 0
        cohort = [self.problem.silos.index(name) for name in message.cohort]
        late = [j for j in cohort if self.frame.delays[j] > 0 and state.turns.last[j] >= 0]
        age = max((message.round - int(state.turns.last[j]) for j in late), default=0)
        return after_turn(state.turns, cohort, self.frame.delays, message.round), age

    def _chosen(self, state: PVIState, change: Natural, asked: int) -> float:
        """One over the silos asked; more than that only where all silos were, in this round as in the last."""
        safe = self._safe(asked)
        if asked < len(self.problem.silos) or not state.damping:
            return safe
        return min(1.0, max(safe, state.damping * pace(state.q, change, state.residual, state.earlier)))

    def _theta_step(
        self, state: PVIState, q: Natural, sums: dict[str, FloatArray], scale: float
    ) -> tuple[Params, Params]:
        """A step of Adam along the gradient of the free energy (paper, Appendix A)."""
        if not state.theta:
            return state.theta, state.theta_moments
        own = self.prior.theta_gradient(q, state.theta)
        total = {name: scale * torch.from_numpy(sums[f"theta/{name}"]) for name in state.theta}
        gradient = {name: self.frame.move(total[name]) + own[name] for name in state.theta}
        return self.optimizer.step(state.theta, gradient, state.theta_moments, self.frame.scalar(1.0))
