"""The server's half of PVI: it adds the damped sum of changes to q and chooses the damping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import Broadcast, Posterior, Problem, Step
from secure_fvi.algorithms.natural import Natural, nothing, to_eta
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.pvi_damping import accept, distance_moved, pace
from secure_fvi.algorithms.pvi_frame import PVIFrame
from secure_fvi.algorithms.pvi_prior import Prior
from secure_fvi.algorithms.pvi_schedule import Turns, after_turn, first_turns, next_cohort, weight
from secure_fvi.errors import InputError
from secure_fvi.families import Params
from secure_fvi.optimizers import Optimizer


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
    earlier: Natural  # the one before
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
        none_yet = nothing(self.frame.n, self.frame.full)
        moments, turns = self.optimizer.init(theta), first_turns(len(none))
        return PVIState(0, prior, prior, theta, moments, none, none, moved, 0.0, none_yet, none_yet, 0, 0, turns)

    def broadcast(self, state: PVIState, index: int, accepted: Mapping[str, int]) -> Broadcast:
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
        damping = float(self.config.damping) if self.config.damping != "auto" else self._chosen(state, change, asked)
        turns, age = self._turns(state, message)
        q, taken, halvings = accept(state.q, change, damping, 0.0 if age else self._safe(asked))
        moved = torch.where(present > 0, distance_moved(state.q, change, taken) / weight(age), state.moved)
        objective = math.nan
        if "objective" in sums and asked == len(self.problem.silos) and not age:
            objective = float(sums["objective"]) + self.prior.minus_kl(q, state.theta)
        theta, moments = state.theta, state.theta_moments
        if self.config.theta_updates == "round" or float(moved.max()) < self.config.tolerance:
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
            earlier=state.residual,
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
