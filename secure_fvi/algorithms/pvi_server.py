"""The server's half of PVI: it adds the damped sum of changes to q and chooses the damping."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import Broadcast, Posterior, Problem, Step
from secure_fvi.algorithms.natural import Natural, distance, nothing, to_eta
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.pvi_frame import PVIFrame
from secure_fvi.algorithms.pvi_prior import Prior
from secure_fvi.algorithms.pvi_schedule import Turns, after_turn, first_turns, next_cohort, weight
from secure_fvi.errors import InputError
from secure_fvi.families import Params
from secure_fvi.optimizers import Optimizer

#: Halvings of a step after which q stays where it is.
_HALVINGS = 30
#: A step beyond one over the silos asked may take at most this share of q's precision in any direction.
_MOST_LOST = 0.75
#: Under damping = "auto". Changes of the mean whose cosine with the last one is above _ALIKE, or changes that shrink to
#: a share of _SHRINKING, allow a step longer by _BOLDER; a cosine under _TURNING, or a growth by _RUNNING_OFF, halves
#: it. On 100 silos of label shards (MNIST) the cosine is .98 at a damping of .05, where all goes well; at .1, where the
#: test error rises again, it falls from .88 to -.6.
_ALIKE, _TURNING, _SHRINKING, _RUNNING_OFF, _BOLDER = 0.95, 0.75, 0.8, 1.4, 1.5


class PVIState(NamedTuple):
    """The server's state. All of it follows from totals."""

    round: int
    q: Natural  # the prior's factor times all sites
    prior: Natural  # the prior's factor, or the site that stands for it
    theta: Params
    theta_moments: Params
    counted: Tensor  # (J,) index of the last sum that each silo's change was used from
    factors: Tensor  # (J,) and its damping
    moved: Tensor  # (J,) standard deviations by which each silo's last change, undamped, would have moved q
    damping: float  # the share to be taken next, under "auto"; 0 before the first round
    residual: Natural  # the last sum of changes of all silos
    skipped: int  # times that a silo met an improper cavity
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
        residual = nothing(self.frame.n, self.frame.full)
        moments, turns = self.optimizer.init(theta), first_turns(len(none))
        return PVIState(0, prior, prior, theta, moments, none, none, moved, 0.0, residual, 0, 0, turns)

    def broadcast(self, state: PVIState, index: int, accepted: int) -> Broadcast:
        tensors = {"q": state.q.pack(), "counted": state.counted, "factors": state.factors}
        tensors |= {f"theta/{name}": value for name, value in state.theta.items()}
        cohort = self.frame.cohort(state.round)
        if self.config.delay:
            silos = self.problem.silos
            cohort = tuple(silos[j] for j in next_cohort(state.turns, len(cohort), self.problem.seed, state.round))
        return Broadcast(state.round, index, accepted, cohort, {}, tensors)

    def update(self, state: PVIState, message: Broadcast, total: FloatArray, scale: float) -> tuple[PVIState, Step]:
        sums = self.frame.table.split(total)
        present = self._present(message, sums.get("present"), scale)
        change = self.frame.unpack(torch.from_numpy(sums["change"]))
        asked = int(present.sum())
        if not asked:
            change = nothing(self.frame.n, self.frame.full)
        damping = self._damping(state, change, asked)
        turns, age = self._turns(state, message)
        q, taken, halvings = _accept(state.q, change, damping, 0.0 if age else 1.0 / max(asked, 1))
        moved = torch.where(present > 0, distance(state.q, state.q.plus(change, 1 / weight(age))), state.moved)
        objective = math.nan
        if "objective" in sums and asked == len(self.problem.silos) and not age:
            objective = float(sums["objective"]) + self.prior.minus_kl(q, state.theta)
        theta, moments = self._theta_step(state, q, sums, scale)
        prior = state.prior
        q, prior = self.prior.refit(q, prior, theta)
        after = PVIState(
            round=state.round + 1,
            q=q,
            prior=prior,
            theta=theta,
            theta_moments=moments,
            counted=torch.where(present > 0, float(message.sum_index), state.counted),
            factors=torch.where(present > 0, taken, state.factors),
            moved=moved,
            damping=taken or damping / 2,
            residual=change,
            skipped=state.skipped + int(sums.get("skipped", 0)),
            halvings=state.halvings + halvings,
            turns=turns,
        )
        done = after.round >= self.config.most_rounds
        finished = done or (self.config.rounds is None and self.converged(after))
        return after, Step(objective, taken, None, self.config.schedule, finished)

    def posterior(self, state: PVIState) -> Posterior:
        eta = {name: self.frame.move(value) for name, value in to_eta(state.q).items()}
        return Posterior(self.frame.family, eta, state.theta)

    def rounds(self, state: PVIState) -> int:
        return state.round

    def converged(self, state: PVIState) -> bool:
        """Whether no site's last change would move q by more than the tolerance; a fixed number of rounds is its
        author's word, as long as q did not run away."""
        limit = self.config.tolerance if self.config.rounds is None else 1.0
        return float(state.moved.max()) < limit

    def metrics(self, state: PVIState) -> dict[str, float | None]:
        moved = float(state.moved.max())
        return {
            "last_change_sd": moved if math.isfinite(moved) else None,
            "damping": state.damping,
            "skipped_cavities": state.skipped,
            "halvings": state.halvings,
        }

    def _present(self, message: Broadcast, shown: FloatArray | None, scale: float) -> Tensor:
        """(J,) one for silos in the total. Under silo privacy they are not counted, so a sum that lost one is left."""
        silos = self.problem.silos
        if shown is not None:
            return torch.from_numpy(shown > 0.5).double()
        whole = round(len(silos) / scale) == len(message.cohort)
        return torch.tensor([float(whole and name in message.cohort) for name in silos], dtype=torch.float64)

    def _turns(self, state: PVIState, message: Broadcast) -> tuple[Turns, int]:
        """After this round, and the age of the oldest change in its total: late silos answer on their last turn's q."""
        if not self.config.delay:
            return state.turns, 0
        cohort = [self.problem.silos.index(name) for name in message.cohort]
        late = [j for j in cohort if self.frame.delays[j] > 0 and state.turns.last[j] >= 0]
        age = max((message.round - int(state.turns.last[j]) for j in late), default=0)
        return after_turn(state.turns, cohort, self.frame.delays, message.round), age

    def _damping(self, state: PVIState, change: Natural, asked: int) -> float:
        """At least one over the silos asked, at most one; more than that only while successive changes agree.

        A step that is too long turns the next change round in some directions, long before q becomes improper. How far
        two changes of the mean point the same way shows that early; their lengths do not, since q sharpens meanwhile.
        """
        if self.config.damping != "auto":
            return float(self.config.damping)
        safe = 1.0 / max(asked, 1)
        if asked < len(self.problem.silos) or not state.damping:
            return safe
        agreement, growth = _agreement(state.q, state.residual, change)
        if agreement < _TURNING or growth > _RUNNING_OFF:
            return max(safe, state.damping / 2)
        if agreement > _ALIKE or growth < _SHRINKING:
            return min(1.0, state.damping * _BOLDER)
        return max(safe, state.damping)

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


def _accept(q: Natural, change: Natural, damping: float, safe: float) -> tuple[Natural, float, int]:
    """q after the largest step of `damping`, `damping` / 2, ... that is proper and sane, its size (0 for none), and the
    halvings it took.

    A step up to `safe` need only be proper: one over the silos asked is an average of their local posteriors, where
    nothing is late.
    """
    for halving in range(_HALVINGS):
        step = damping * 0.5**halving
        after = q.plus(change, step)
        if after.proper and (step <= safe or _least_kept(q, change, step) > 1 - _MOST_LOST):
            return after, step, halving
    return q, 0.0, _HALVINGS


def _least_kept(q: Natural, change: Natural, step: float) -> float:
    """Smallest ratio of the new to the old precision over all directions."""
    if not q.full:
        return float((1 + step * change.precision / q.precision).min())
    factor = q.factor()
    return float(torch.linalg.eigvalsh(factor.mT @ change.precision @ factor).min()) * step + 1


def _agreement(q: Natural, before: Natural, now: Natural) -> tuple[float, float]:
    """Cosine between two changes of the mean, and by which factor the changes grew, both in the Fisher metric of q."""
    (mean_before, scale_before), (mean_now, scale_now) = _coordinates(q, before), _coordinates(q, now)
    lengths = float(mean_before.norm() * mean_now.norm())
    cosine = float(mean_before @ mean_now) / lengths if lengths else 1.0
    size_before, size_now = (
        math.hypot(float(mean.norm()), float(scale.norm()))
        for mean, scale in ((mean_before, scale_before), (mean_now, scale_now))
    )
    return cosine, size_now / size_before if size_before else 1.0


def _coordinates(q: Natural, change: Natural) -> tuple[Tensor, Tensor]:
    """A small change of q in natural parameters as one of its mean, in standard deviations (n,), and of its scale."""
    mean, factor = q.mean(), q.factor()
    if not q.full:
        return factor * (change.shift - change.precision * mean), change.precision * factor.square() / math.sqrt(2)
    moved = factor.mT @ (change.shift - change.precision @ mean)
    return moved, (factor.mT @ change.precision @ factor).flatten() / math.sqrt(2)
