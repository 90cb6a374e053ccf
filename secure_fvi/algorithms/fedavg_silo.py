"""The silos' half of FedAvg: gradient steps on the silo's own objective, and the change that came of them.

A silo keeps nothing from round to round.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import Broadcast, LocalFit, Pending, Problem, SiloView
from secure_fvi.algorithms.fedavg import COUNT, FedAvg
from secure_fvi.algorithms.fedavg_frame import OBJECTIVE, RECORDS, SILOS, FedAvgFrame
from secure_fvi.compiled import Traced
from secure_fvi.families import Conditional, Params
from secure_fvi.privacy.gate import Gate, Release
from secure_fvi.trees import take, to_numpy


class FedAvgSilo:
    """`algorithms.base.SiloProgram`."""

    def __init__(self, config: FedAvg, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.frame = FedAvgFrame(config, problem)
        self.tables, self.terms, self.order = self.frame.tables, self.frame.terms, self.frame.order
        self._gradient = Traced(self._gradient_function, (None, 0, 0, None), problem.mode)

    def init_local(self, view: SiloView) -> tuple[()]:
        return ()

    def contribute(self, message: Broadcast, local: tuple[()], view: SiloView, gate: Gate) -> tuple[Release, tuple[()]]:
        values: dict[str, FloatArray] = {RECORDS: np.array(float(view.size)), SILOS: np.array(1.0)}
        if message.phase != COUNT:
            sent = {name: self.frame.move(message.tensors[name]) for name in self.frame.start}
            values[OBJECTIVE], own = self._run(sent, message, view)
            weight = view.size if self.frame.by_records else 1
            values |= {name: weight * to_numpy(own[name] - value) for name, value in sent.items()}
        # Under privacy the gate adds its side coordinate itself.
        chosen = [values[b.name] for b in self.tables[message.phase].blocks if b.name in values]
        return gate.release(np.concatenate([np.ravel(v) for v in chosen])), ()

    def commit(self, local: tuple[()], pending: Pending, accepted: int) -> tuple[()]:
        return ()

    def local_fit(self, local: tuple[()]) -> LocalFit:
        """No latents of its own."""
        family = Conditional().build(0, self.frame.family.n, 1)
        return LocalFit(family, {}, family, {}, 1)

    def _run(self, point: Params, message: Broadcast, view: SiloView) -> tuple[FloatArray, Params]:
        """The log likelihood of all the silo's records at what was sent, nats, and the point after the local steps."""
        config = self.config
        scale = torch.tensor([1.0 / view.size, message.scalars["prior"]], dtype=self.problem.dtype)
        scale = self.frame.move(scale)
        _, log_likelihood = self._gradient(point, view.rows, view.weights, scale)
        for step in range(config.local_steps):
            at = self._batch(view.turn * config.local_steps + step, view)
            weights = view.weights if at is None else view.weights[at] / config.sampling_rate
            gradient, _ = self._gradient(point, take(view.rows, at), weights, scale)
            point = {name: w + config.learning_rate * gradient[name] for name, w in point.items()}
        return to_numpy(log_likelihood), point

    def _gradient_function(self, point: Params, rows: Params, weights: Tensor, scale: Tensor) -> tuple[Params, Tensor]:
        """Of sum_i weight_i log p(y_i | w) x scale_0 + log p(w) x scale_1; and the weighted sum itself, nats ()."""

        def objective(point: Params) -> tuple[Tensor, Tensor]:
            at = self.frame.posterior(point)
            z, theta = at.eta["loc"], at.theta
            no_latents = z.new_zeros(len(weights), 0)
            terms = self.problem.density.evaluate(z, z.new_zeros(0), no_latents, theta, rows)
            log_likelihood = (weights * terms.records).sum()
            return scale[0] * log_likelihood + scale[1] * terms.shared, log_likelihood

        found: tuple[Params, Any] = torch.func.grad(objective, has_aux=True)(point)
        return found

    def _batch(self, key: int, view: SiloView) -> Tensor | None:
        """Rows of a Poisson sample, at least two, filled up with the spare row of weight zero. None: all."""
        if self.config.sampling_rate == 1:
            return None
        joined = view.batch_draws.uniforms(key, 1)[0, : view.size, 0] < self.config.sampling_rate
        batch = np.flatnonzero(joined)
        batch = np.concatenate([batch, np.full(max(2 - len(batch), 0), view.size, np.int64)])
        return torch.from_numpy(batch).to(self.problem.device)
