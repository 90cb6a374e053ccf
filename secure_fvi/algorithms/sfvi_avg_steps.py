"""The local run of SFVI-Avg: steps on a silo's own copy of q(Z_G) and theta and on its own latents, without exchange.

A silo acts as if the federation were N / N_j copies of itself: L_j is scaled as a whole, with its record-level terms,
the prior and the entropy of its silo-level latents. Scaling is then the same as in SFVI for the silo's own latents,
whose best distribution given q(Z_G) does not depend on N; their own steps are therefore left unscaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import Problem, SiloView
from secure_fvi.algorithms.sfvi_avg import BOUND_DRAWS, LEAST_RATE, SFVIAvg
from secure_fvi.algorithms.sfvi_avg_frame import SFVIAvgFrame
from secure_fvi.algorithms.sfvi_frame import local_units, mean_units
from secure_fvi.algorithms.stationarity import SiloSlope, as_natural, silo_inputs
from secure_fvi.algorithms.weighing import Weigher, points
from secure_fvi.compiled import Traced
from secure_fvi.density import LogDensity, LogTerms
from secure_fvi.families import Params
from secure_fvi.objective import SiloFunction, server_gradient, silo_gradient
from secure_fvi.randomness import server_draws
from secure_fvi.trees import merge, part, put, running_average, take

Rows = npt.NDArray[np.int64]


class Point(NamedTuple):
    """Where a silo's run stands. Never leaves the silo."""

    shared: Params  # its copy, "eta/..." and "theta/..."
    moments: Params  # optimiser state of it
    record: Params  # variational parameters of its records, (N + 1, ...) each
    record_moments: Params
    silo: Params  # of its silo-level latents, (1, ...) each
    silo_moments: Params


class LocalRun:
    """The runs of all silos of a process; it holds no data, so that they share its traces."""

    def __init__(self, config: SFVIAvg, problem: Problem, frame: SFVIAvgFrame) -> None:
        self.config, self.problem, self.frame = config, problem, frame
        self.base, self.optimizer, self.local_optimizer = frame.base, frame.base.optimizer, frame.base.local_optimizer
        self._public_draws = server_draws(problem.seed)
        self._server_gradient = server_gradient(problem.density, frame.family)
        axes = (None, None, 0, 0, None, None, 0, 0, None, 1, None, None)
        self._slope = SiloSlope(problem, self.base.local_family, self.base.silo_family, self.base.samples)
        self._weigher = Weigher(problem, self.base.local_family, self.base.silo_family)
        self._step: Callable[..., Any] = Traced(
            self.step_function, axes, problem.mode, self.base.local_family.couples_records
        )

    def init_moments(self, shared: Params, record: Params, silo: Params) -> tuple[Params, Params, Params]:
        """Of the optimiser, before a first step."""
        init = self.optimizer.init
        return init(shared), init(record, by_row=self.base.by_row), init(silo)

    def __call__(self, start: Point, records: float, rate: float, view: SiloView) -> tuple[Point, Point]:
        """A round's steps from `start`: where they ended, and the average of the last iterates (moments aside).

        `records`: N over all silos. `rate`: factor on the learning rate.
        """
        return self._walk(start, self.config.local_steps, records / view.size, rate, 1.0, view)

    def finish(self, start: Point, view: SiloView) -> Point:
        """The silo's own latents after their last steps, which leave its copy of q(Z_G) and theta as they are."""
        average = self._walk(start, self.config.final_local_steps, 1.0, 1.0, 0.0, view)[1]
        return average._replace(shared=start.shared, moments=start.moments)

    def _walk(
        self, start: Point, steps: int, copies: float, rate: float, moving: float, view: SiloView
    ) -> tuple[Point, Point]:
        """`moving`: 1, or 0 where q(Z_G) and theta stay. Keys begin where those of the question before end."""
        here, average = start, start
        for step in range(steps):
            key = view.turn * self.config.keys_a_round + BOUND_DRAWS + step
            now = rate * (1 - (1 - LEAST_RATE) * step / steps)
            here, _ = self._call(here, view, key, None, self._batch(key, view), (copies, now, moving))
            average = _averaged(average, here, self.config.averaged(step, steps))
        return here, average

    def bound(self, at: Point, round_: int, draws: int, view: SiloView) -> Tensor:
        """The silo's part of the bound, nats (): the mean over `draws` of Z_G that all parties have in common.

        The server adds L0 at the same draws: at an exact q the sum is the same at every Z_G (Roeder et al. 2017).
        """
        found = []
        for draw in range(draws):
            key = view.turn * self.config.keys_a_round + draw
            eps = self._public_draws.normals(round_ * BOUND_DRAWS + draw, self.frame.family.noise_size)[0]
            found.append(self._call(at, view, key, self.base.move(eps), None, (1.0, 0.0, 0.0))[1])
        return torch.stack(found).mean()

    def at_the_end(self, at: Point, eps: Tensor, view: SiloView, weighs: bool) -> FloatArray:
        """The silo's terms of `stationarity` at the q(Z_G) that was sent, by all its records, and of `weighing`."""
        base = self.base
        theta = part(at.shared, "theta")
        q = as_natural(self.frame.family, part(at.shared, "eta"))
        first = (view.turn + 1) * self.config.keys_a_round  # past the last question, which this answers
        keys = range(first, first + eps.shape[0] * eps.shape[1])
        slope = self._slope(q, eps, theta, at.silo, silo_inputs(base, at.record, view, keys))
        if not weighs:
            return slope
        where = points(self.problem.seed, q, self.problem.layout)
        return np.concatenate([slope, self._weigher(q, where, theta, at.record, at.silo, view, keys.stop)])

    def _call(
        self,
        at: Point,
        view: SiloView,
        key: int,
        eps: Tensor | None,
        batch: Rows | None,
        factors: tuple[float, float, float],
    ) -> tuple[Point, Tensor]:
        """One step, at the given eps_G or at one of the silo's own, and the silo's part of the bound before it.

        `key` names the draws, which are used once. `factors`: of `step_function`.
        """
        base, size = self.base, self.frame.family.noise_size
        rows = None if batch is None else torch.from_numpy(batch).to(self.problem.device)
        weights = view.weights if rows is None else view.weights[rows] / self.config.sampling_rate
        eps_record = base.move(view.record_draws.normals(key, base.samples * base.n_record, batch))
        eps_record = eps_record.reshape(len(eps_record), base.samples, base.n_record).transpose(0, 1).contiguous()
        # One draw cut in two: two draws under one key would share their numbers.
        own = base.move(view.silo_draws.normals(key, size + base.n_silo))
        new, value = self._step(
            at.shared, at.moments, take(at.record, rows), take(at.record_moments, rows), at.silo, at.silo_moments,
            take(view.rows, rows), weights, own[0, :size].clone() if eps is None else eps, eps_record,
            own[:, size:].clone(), torch.tensor(factors, dtype=self.problem.dtype, device=self.problem.device),
        )  # fmt: skip
        record, record_moments = put(at.record, rows, new.record), put(at.record_moments, rows, new.record_moments)
        return new._replace(record=record, record_moments=record_moments), value

    def step_function(
        self,
        shared: Params, moments: Params, record: Params, record_moments: Params, silo: Params, silo_moments: Params,
        rows: Params, weights: Tensor, eps: Tensor, eps_record: Tensor, eps_silo: Tensor, factors: Tensor,
    ) -> tuple[Point, Tensor]:  # fmt: skip
        """`factors`: N / N_j, of the learning rate, and of it once more for what is shared."""
        copies, rate, moving = factors.unbind()
        eta, theta = part(shared, "eta"), part(shared, "theta")
        z_global = self.frame.family.transform(eta, eps)
        g = self._gradient(copies)(
            z_global, z_global - eta["loc"], theta, record, silo, rows, weights, eps_record, eps_silo
        )
        times = copies if self.config.scale_entropy else torch.ones_like(copies)
        total = self._server_gradient(
            eta, theta, eps, times * g.direct, times * g.path, {name: times * v for name, v in g.theta.items()}
        )
        units = {"eta/loc": mean_units(self.frame.family.stddev(eta))}
        gradient = merge(eta=total.eta, theta=total.theta)
        shared, moments = self.optimizer.step(shared, gradient, moments, rate * moving, units)
        record, record_moments = self.local_optimizer.step(record, g.local, record_moments, rate, local_units(record))
        silo, silo_moments = self.local_optimizer.step(silo, g.silo, silo_moments, rate, local_units(silo))
        return Point(shared, moments, record, record_moments, silo, silo_moments), g.value

    def _gradient(self, copies: Tensor) -> SiloFunction:
        """Of L_j, or, in the paper's text, of L_j with its log-joint alone scaled."""
        density: Any = self.problem.density if self.config.scale_entropy else _Powered(self.problem.density, copies)
        return silo_gradient(density, self.base.local_family, self.base.silo_family, self.base.samples)

    def _batch(self, key: int, view: SiloView) -> Rows | None:
        """Rows of a Poisson sample, drawn from the silo's secret; None: all.

        At least two, filled up with the spare row of weight zero: a traced graph treats sizes 0 and 1 as special.
        """
        if self.config.sampling_rate == 1:
            return None
        joined = view.batch_draws.uniforms(key, 1)[0, : view.size, 0] < self.config.sampling_rate
        batch = np.flatnonzero(joined)
        return np.concatenate([batch, np.full(max(2 - len(batch), 0), view.size, np.int64)])


def _averaged(average: Point, latest: Point, count: int) -> Point:
    if count <= 1:
        return latest
    return average._replace(
        shared=running_average(average.shared, latest.shared, count),
        record=running_average(average.record, latest.record, count),
        silo=running_average(average.silo, latest.silo, count),
    )


class _Powered:
    """A density to a power: what is scaled when entropy is not."""

    def __init__(self, density: LogDensity, power: Tensor) -> None:
        self._evaluate, self._power = density.evaluate, power

    def evaluate(self, *args: Any) -> LogTerms:
        terms = self._evaluate(*args)
        return terms._replace(records=self._power * terms.records, silo=self._power * terms.silo)
