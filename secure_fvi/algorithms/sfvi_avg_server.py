"""The server's half of SFVI-Avg: it merges the silos' posteriors from totals, and knows none of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.barycenter import ROOT
from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import ITERATION, PRIVATE, Broadcast, Posterior, Problem, Step, Verdict
from secure_fvi.algorithms.sfvi_avg import (
    BOUND_DRAWS,
    BURES,
    COUNT,
    FINISH,
    MERGE,
    REFINED,
    SETTLED,
    SHRINKING,
    WATCHED,
    SFVIAvg,
    bound_draws,
)
from secure_fvi.algorithms.sfvi_avg_frame import (
    LEAST_SD,
    LOC,
    OBJECTIVE,
    RECORDS,
    SD,
    SILOS,
    THETA,
    SFVIAvgFrame,
    full_parameters,
)
from secure_fvi.algorithms.sfvi_avg_trusted import diagonal_parameters, merged
from secure_fvi.algorithms.stationarity import Rest, as_natural, at_rest, final_draws, verdict
from secure_fvi.errors import AggregationError, InputError
from secure_fvi.families import Params
from secure_fvi.randomness import server_draws
from secure_fvi.trees import merge, part, to_numpy


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
    rest: Rest  # what the final sum told of q, where all silos were in it


class SFVIAvgServer:
    """`algorithms.base.ServerProgram`."""

    def __init__(self, config: SFVIAvg, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.frame = SFVIAvgFrame(config, problem)
        self.family = self.frame.family
        self.tables, self.terms = self.frame.tables, self.frame.terms
        self._draws = server_draws(problem.seed)

    def init(self) -> SFVIAvgState:
        move, nothing = self.frame.base.move, np.zeros(0)
        eta = self.frame.base.start()
        theta = {name: move(value) for name, value in self.frame.theta_start.items()}
        first = COUNT if self.frame.counts_first else MERGE
        idle = Merging(0, eta["loc"], theta, nothing, nothing)
        ways = eta["loc"].new_zeros(WATCHED, self.family.n)
        return SFVIAvgState(
            0, first, eta, theta, self.config.total_records or 0, idle, 0, None, ways, math.nan, 0, Rest()
        )

    def broadcast(self, state: SFVIAvgState, index: int, accepted: Mapping[str, int]) -> Broadcast:
        silos, rate = self.frame.cohort(state.round, state.phase), self.config.decay**state.settled
        scalars = {"records": float(state.records), "rate": rate}
        if state.phase == BURES:
            scalars[ITERATION] = float(state.merging.iteration)
            tensors = {ROOT: torch.from_numpy(state.merging.root)}
        else:
            tensors = merge(eta=state.eta, theta=state.theta)
        return Broadcast(state.round, index, accepted, silos, scalars, tensors, state.phase)

    def update(
        self, state: SFVIAvgState, message: Broadcast, total: FloatArray, scale: float
    ) -> tuple[SFVIAvgState, Step]:
        blocks = self.tables[message.phase].split(total)
        if OBJECTIVE in blocks:
            own = self._global_bound(dict(message.tensors), message.round, bound_draws(message.phase))
            state = state._replace(objective=own + scale * float(blocks[OBJECTIVE]))
            if not math.isfinite(state.objective):
                raise InputError(
                    f"the objective is not finite in round {state.round}; lower learning_rate or rescale the data"
                )
        finished, silos = message.phase == FINISH, len(self.problem.silos)
        absent = int(scale * len(message.cohort) > silos * (1 + 1e-9))
        if finished and not absent:
            q = as_natural(self.family, state.eta)
            eps = final_draws(self.problem.seed, q.n, q.full)
            prior = lambda z: self._log_prior(z, state.theta)  # noqa: E731
            rest = at_rest(self.problem, q, state.theta, prior, eps, blocks, self.config.bound)
            state = state._replace(rest=rest)
        if message.phase == MERGE:
            state = state._replace(absent=absent)
        if message.phase == COUNT:
            state = state._replace(records=round(scale * float(blocks[RECORDS])), phase=MERGE)
        elif message.phase == MERGE:
            state, finished = self._merge(state, blocks, scale)
        elif message.phase == BURES:
            weight = _positive(float(blocks[RECORDS if self.frame.by_records else SILOS]))
            state, finished = self._iterate(state, state.merging, blocks[ROOT] / weight)
        rate = self.config.learning_rate * message.scalars["rate"]
        return state, Step(state.objective, rate, None, message.phase, finished)

    def posterior(self, state: SFVIAvgState) -> Posterior:
        return Posterior(self.family, state.eta, state.theta)

    def verdict(self, state: SFVIAvgState) -> Verdict:
        """Merges that have settled are at this algorithm's own fixed point, an average of posteriors; whether that is
        the posterior of all records is measured by the slope of the bound there."""
        config = self.config
        if self.terms:
            return Verdict(None, PRIVATE, {}, not self.settled(state))
        advice = "sfvi-avg averages the silos' posteriors and is approximate by construction: use pvi or sfvi"
        if not self.settled(state):
            what = f"merges were still moving after {state.round} rounds"
            more = f"raise rounds (now {config.rounds}) or local_steps (now {config.local_steps})"
            return verdict(state.rest, what, "", f"{more}; {advice}")
        against = "a silo was absent from the last merge" if state.absent else None
        found = verdict(state.rest, against, "merges have settled", advice)
        if not found.converged:
            return found
        return found._replace(reason=f"{found.reason}; sfvi-avg remains an approximation, an average of posteriors")

    def settled(self, state: SFVIAvgState) -> bool:
        """Whether merges have settled; it says nothing about what averaging posteriors gets wrong."""
        return state.settled > REFINED and state.movement is not None and state.movement < self.config.tolerance

    def rounds(self, state: SFVIAvgState) -> int:
        return state.round

    def metrics(self, state: SFVIAvgState) -> dict[str, float | None]:
        """`bound`: at the last q that silos were sent, nats. `movement`: by the last merge, posterior sds."""
        return {"bound": None if math.isnan(state.objective) else state.objective, "movement": state.movement}

    def _merge(self, state: SFVIAvgState, blocks: dict[str, FloatArray], scale: float) -> tuple[SFVIAvgState, bool]:
        weight = _positive(self.frame.total_weight(blocks, scale))

        def moved(old: Tensor, name: str) -> Tensor:
            return old + torch.as_tensor(blocks[name] / weight).to(old)

        theta = {name: moved(value, THETA + name) for name, value in state.theta.items()}
        if self.frame.trusted:
            mean, covariance = merged(blocks, self.frame.full)
            centre = torch.from_numpy(mean).to(state.eta["loc"])
            parameters = full_parameters if self.frame.full else diagonal_parameters
            return self._adopt(state, parameters(centre, covariance), theta)
        loc = moved(state.eta["loc"], LOC)
        if self.frame.full:
            covariance = to_numpy(self.family.covariance(state.eta))
            return self._iterate(state, Merging(0, loc, theta, covariance, state.merging.root), blocks[ROOT] / weight)
        before = self.family.stddev(state.eta)
        log_scale = torch.maximum(moved(before, SD), LEAST_SD * before).log()
        return self._adopt(state, {"loc": loc, "log_scale": log_scale}, theta)

    def _iterate(self, state: SFVIAvgState, merging: Merging, root: FloatArray) -> tuple[SFVIAvgState, bool]:
        """One Bures iteration, and the merge's end where it was the last."""
        covariance = self.frame.after_iteration(merging.covariance, root)
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

    def _log_prior(self, z: Tensor, theta: Params) -> Tensor:
        return self.problem.density.log_prior(self.frame.base.move(z), theta).to("cpu", torch.float64)

    def _global_bound(self, sent: Params, round_: int, draws: int) -> float:
        """E[L0] = E[log p(Z_G) - log q(Z_G)] at the q that silos were sent, nats, at the draws that they use too."""
        eta, theta, values = part(sent, "eta"), part(sent, "theta"), []
        for draw in range(draws):
            eps = self.frame.base.move(self._draws.normals(round_ * BOUND_DRAWS + draw, self.family.noise_size)[0])
            z = self.family.transform(eta, eps)
            values.append(self.problem.density.log_prior(z, theta) - self.family.log_prob(eta, z))
        return float(torch.stack(values).mean())


def _positive(weight: float) -> float:
    if weight <= 0:
        raise AggregationError("the weights of a merge add up to nothing")
    return weight
