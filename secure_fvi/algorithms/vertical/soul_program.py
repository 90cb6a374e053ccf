"""A silo of a SOUL run as `algorithms.base.SiloProgram`: draws of theta_j stay here, z_j moves along its pull.

augmented   one exchange a round: the broadcast carries the pull on the z_j of the last round; the silo draws theta_j
            given that z_j, moves it, and sends the new one
power       theta_j is drawn when s and gamma are known, in the sum of slopes; z_j moves with the next broadcast
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms import stopping
from secure_fvi.algorithms.base import Broadcast, Pending, adopt_if_used
from secure_fvi.algorithms.vertical.config import SLOPE_PHASE
from secure_fvi.algorithms.vertical.frame import VerticalFrame, VerticalProblem, VerticalView
from secure_fvi.algorithms.vertical.predictors import Predictor
from secure_fvi.algorithms.vertical.silo import Response
from secure_fvi.algorithms.vertical.soul import Soul, SoulSilo
from secure_fvi.compiled import Traced
from secure_fvi.privacy.gate import Gate, Release
from secure_fvi.trees import Params, to_numpy


class SoulLocal(NamedTuple):
    """A silo's state. It never leaves the silo."""

    theta: Tensor  # (n,) the last draw
    z: Tensor  # (N, C)
    mean_eta: Tensor  # (N, C) over the last round's draws
    own: Tensor  # (N, C) power: its own slope in the last sum
    length: Tensor  # () of a Langevin step
    rounds: int  # rounds whose z_j the server has
    kept: Tensor  # (kept, n) draws after burn-in
    monitor: stopping.Monitor  # of the draws


class SoulSiloProgram:
    """One silo's program."""

    def __init__(self, config: Soul, problem: VerticalProblem, predictor: Predictor) -> None:
        self.config, self.problem, self.predictor = config, problem, predictor
        self.frame = VerticalFrame(config, problem)
        self.tables, self.terms, self.order = self.frame.tables, self.frame.terms, self.frame.order
        self.core = SoulSilo(config, problem.likelihood, predictor, len(problem.silos))
        mode = problem.mode
        self._langevin = Traced(self.core.langevin, (None,) * 8, mode, by_shape=True)
        self._mean_eta = Traced(self.core.mean_eta, (None,) * 2, mode, by_shape=True)
        self._slope = Traced(self.core.slope, (None,) * 5, mode, by_shape=True)
        self._density = Traced(self.core.log_density, (None,) * 6, mode, by_shape=True)
        late = config.rounds - int(np.ceil(config.rounds * config.burn_in))
        self._every = max(1, late // config.keep)

    def init_local(self, view: VerticalView) -> SoulLocal:
        theta = self.frame.move(self.predictor.start)
        z = self.frame.move(torch.zeros(view.size, self.frame.columns))
        gamma, generator = z.new_zeros(self.frame.gamma_size), torch.Generator().manual_seed(view.start_seed)
        zero = torch.zeros_like(z)
        curvature = self.core.largest_curvature(z, zero, view.rows, view.response, gamma, generator)
        kept = theta.new_zeros(0, len(theta))
        return SoulLocal(theta, z, zero, zero, self.config.step / curvature, 0, kept, stopping.start())

    def contribute(
        self, message: Broadcast, local: SoulLocal, view: VerticalView, gate: Gate
    ) -> tuple[Release, SoulLocal]:
        if message.phase == SLOPE_PHASE:
            return self._contribute_slope(message, local, view, gate)
        if local.rounds:
            local = self._move(message, local, view)
        gamma = local.z.new_zeros(self.frame.gamma_size)  # the likelihood's part of the density is the server's
        response = () if not self.config.is_power else view.response
        density = self._density(local.theta, local.z, torch.zeros_like(local.z), view.rows, response, gamma)
        blocks = {
            "auxiliary": local.z,
            "local": density if not self.config.is_power else density.new_zeros(()),
            "unsettled": torch.tensor(float(not _settled(local))),
        }
        return gate.release(self._flat(message.phase, blocks)), local._replace(rounds=message.round + 1)

    def commit(self, local: SoulLocal, pending: Pending, accepted: int) -> SoulLocal:
        return adopt_if_used(local, pending, accepted)

    def local_fit(self, local: SoulLocal) -> Params:
        """Mean and sd of the kept draws, unconstrained: "theta/loc", "theta/sd"."""
        kept = local.kept if len(local.kept) else local.theta.unsqueeze(0)
        return {"theta/loc": kept.mean(0), "theta/sd": kept.std(0, correction=0)}

    def thetas(self, local: SoulLocal, n: int, seed: int) -> Tensor:
        """`n` of the kept draws (n, n_theta), with replacement. For the silo's own eyes."""
        kept = local.kept if len(local.kept) else local.theta.unsqueeze(0)
        return kept[torch.randint(len(kept), (n,), generator=torch.Generator().manual_seed(seed))]

    def _contribute_slope(
        self, message: Broadcast, local: SoulLocal, view: VerticalView, gate: Gate
    ) -> tuple[Release, SoulLocal]:
        s, gamma = self.frame.move(message.tensors["sum"]), self.frame.move(message.tensors["gamma"])
        others, response = s - local.z, view.response
        assert isinstance(response, Response)
        thetas, local = self._draw(message.round, local, view, others, gamma)
        own, in_gamma = self._slope(thetas, others, view.rows, response, gamma)
        density = self._density(local.theta, local.z, others, view.rows, response, gamma)
        blocks = {"slope": own, "gamma": in_gamma, "value": density}
        return gate.release(self._flat(message.phase, blocks)), local._replace(own=own)

    def _move(self, message: Broadcast, local: SoulLocal, view: VerticalView) -> SoulLocal:
        """z_j after the pull on it is known; in the augmented-variable model theta_j is drawn first."""
        round_ = local.rounds - 1
        pull, h = self.frame.move(message.tensors["pull"]), self.frame.move(message.tensors["curvature"])
        if not self.config.is_power:
            gamma = pull.new_zeros(self.frame.gamma_size)
            _, local = self._draw(round_, local, view, torch.zeros_like(pull), gamma)
        rate = pull.new_tensor(self.config.rate(round_))
        return local._replace(z=self.core.move(local.z, local.mean_eta, pull - local.own, h, rate))

    def _draw(
        self, round_: int, local: SoulLocal, view: VerticalView, others: Tensor, gamma: Tensor
    ) -> tuple[Tensor, SoulLocal]:
        """The Langevin draws of a round (M, n); the last one is kept after burn-in."""
        noise = self.frame.move(view.silo_draws.normals(view.turn, self.config.draws * len(local.theta))[0])
        noise = noise.reshape(self.config.draws, -1)
        response = view.response if self.config.is_power else ()
        thetas = self._langevin(local.theta, local.z, others, view.rows, response, gamma, noise, local.length)
        last = thetas[-1]
        kept = local.kept
        if self.config.averages(round_) and round_ % self._every == 0:
            kept = torch.cat([kept, last.unsqueeze(0)])
        where = to_numpy(last)
        # The draws' own spread is the unit in which they may drift.
        sd = np.maximum(to_numpy(kept).std(0), 1e-3) if len(kept) > 1 else np.ones_like(where)
        monitor = stopping.watch(stopping.observe(local.monitor, where, np.log(sd)))
        mean_eta = self._mean_eta(thetas, view.rows)
        return thetas, local._replace(theta=last, mean_eta=mean_eta, kept=kept, monitor=monitor)

    def _flat(self, phase: str, blocks: dict[str, Tensor]) -> FloatArray:
        return np.concatenate([to_numpy(blocks[b.name]).reshape(-1) for b in self.tables[phase].blocks])


def _settled(local: SoulLocal) -> bool:
    return local.monitor.r_hat is not None and local.monitor.r_hat < stopping.R_HAT_BELOW
