"""The local fit of PVI: q against cavity x the silo's own likelihood, by steps that need no exchange.

It meets no site and no message: `pvi_silo` says against which cavity, and what becomes of the answer.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.algorithms.base import LocalFit, Problem, SiloView
from secure_fvi.algorithms.natural import Natural, from_moments, quadratic
from secure_fvi.algorithms.pvi import CLOSED_FORM, PVI
from secure_fvi.algorithms.pvi_frame import PVIFrame
from secure_fvi.algorithms.pvi_local import Anchored, reanchored, split_theta
from secure_fvi.algorithms.pvi_steps import global_steps
from secure_fvi.algorithms.sfvi import SCHEDULES
from secure_fvi.algorithms.sfvi_frame import local_units
from secure_fvi.compiled import Traced
from secure_fvi.errors import InputError
from secure_fvi.families import Params
from secure_fvi.objective import silo_gradient
from secure_fvi.trees import put, running_average, take

#: The last share of local steps, over which q and the gradient of theta are averaged.
_TAIL = 0.25
#: A silo's first visit takes so many times the steps, since its own latents start from nothing.
_FIRST_VISIT = 4
#: Share of the local learning rate on later visits, and the least share of any rate.
_LATER, _LEAST = 0.4, 0.05
#: Share of the steps after which the silo's latents are at their least rate: their noise biases q's scale sites.
_SETTLED_AT = 0.6


class OwnState(NamedTuple):
    """What a silo keeps from fit to fit, but for its site. Never leaves the silo."""

    record: Params  # variational parameters of its records, (N + 1, ...) each
    silo: Params  # of its silo-level latents, (1, ...) each
    phi: Params  # weights of its own encoder, for amortised families
    moments: dict[str, Params]  # of the optimiser, for the three above
    anchor: Tensor  # (n_global,) the mean of Z_G that `record` and `silo` are relative to
    visits: int


class Fitted(NamedTuple):
    """Where a local fit ended."""

    q: Natural
    value: float  # E_q[log p(y, Z_L | Z_G) - log q(Z_L | Z_G)], or its importance-weighted bound; nats
    theta: Params  # gradient
    own: OwnState

    @property
    def sane(self) -> bool:
        return self.q.proper and math.isfinite(self.value)


class SiloFit:
    """The local fits of all silos of a process; it holds no data, so that they share its traces."""

    def __init__(self, config: PVI, problem: Problem, frame: PVIFrame) -> None:
        self.config, self.problem, self.frame = config, problem, frame
        self.optimizer = frame.local_optimizer
        self.steps = global_steps(frame) if config.local_optimizer != CLOSED_FORM else None
        self._gradient = silo_gradient(problem.density, frame.local_family, frame.silo_family, frame.samples)
        by_shape = frame.local_family.couples_records
        record, draws = (None, None) if by_shape else (0, 1)
        axes = (None, None, None, record, None, None, record, record, None, draws, None, record, None, None, None)
        self._step = Traced(self._step_function, axes, problem.mode, by_shape)

    def init(self, view: SiloView) -> OwnState:
        """Before the first fit."""
        frame, start = self.frame, view.start
        z_record, z_silo = start.z_record, start.z_silo
        if frame.terms is not None:  # a start that the silo's data had a part in would be a release without noise
            z_record, z_silo = self.problem.start.z_record[:1].expand_as(z_record), self.problem.start.z_silo
        record = frame.local_family.init(frame.move(z_record))
        silo = frame.silo_family.init(frame.move(z_silo).unsqueeze(0))
        phi = {name: frame.move(v) for name, v in frame.local_family.init_theta(self.problem.dtype).items()}
        moments = {
            "record": self.optimizer.init(record, by_row=frame.by_row),
            "silo": self.optimizer.init(silo),
            "phi": self.optimizer.init(phi),
        }
        return OwnState(record, silo, phi, moments, start.z_global.to("cpu", torch.float64), 0)

    def local_fit(self, own: OwnState) -> LocalFit:
        """What a silo's state says of its own latents."""
        frame = self.frame
        anchor = frame.move(own.anchor)
        records = {**own.record, **own.phi, Anchored.ANCHOR: anchor}
        silos = {**own.silo, Anchored.ANCHOR: anchor} if own.silo else {}
        family, silo_family = Anchored(frame.local_family, frame.n), Anchored(frame.silo_family, frame.n)
        return LocalFit(family, records, silo_family, silos, frame.samples)

    def __call__(
        self, sum_index: int, theta: Params, q: Natural, cavity: Natural, own: OwnState, view: SiloView
    ) -> Fitted:
        """q fitted to cavity x likelihood, from q. `sum_index` names the draws, which are never used twice."""
        if self.steps is None:
            return self._closed_form(cavity, own, view)
        frame, config, steps = self.frame, self.config, self.steps
        current = steps.init(q, tight=own.visits == 0)
        centre = q.mean()
        record, silo = reanchored(own.record, own.silo, frame.move(centre - own.anchor))
        phi, moments = own.phi, own.moments
        tilted = (frame.move(cavity.shift), frame.move(cavity.precision))
        average: Params = {}
        averaged = 0
        steps_now = config.local_steps * (_FIRST_VISIT if own.visits == 0 else 1)
        for step in range(steps_now):
            done = step / steps_now
            key = sum_index * config.local_steps * _FIRST_VISIT + step
            batch = self._batch(key, view)
            at = None if batch is None else torch.from_numpy(batch).to(self.problem.device)
            weights = view.weights if at is None else view.weights[at] * (view.size / len(at))
            noise = frame.move(view.silo_draws.normals(key, frame.family.noise_size + frame.n_silo))
            eps_silo, eps = noise.split([frame.n_silo, frame.family.noise_size], 1)
            current, new, new_record, seen = self._step(
                current, tilted, theta, take(record, at), silo, phi, take(view.rows, at), weights, eps[0],
                self._eps_record(key, view, batch), eps_silo, take(moments["record"], at), moments["silo"],
                moments["phi"], self._rates(done, own.visits),
            )  # fmt: skip
            record = put(record, at, new_record["params"])
            silo, phi = new["silo"], new["phi"]
            moments = {
                "record": put(moments["record"], at, new_record["moments"]),
                "silo": new["silo_moments"],
                "phi": new["phi_moments"],
            }
            if done >= 1 - _TAIL or step == steps_now - 1:
                averaged += 1
                average = running_average(average, seen, averaged)
        loc = average["loc"].to("cpu", torch.float64)
        end = from_moments(loc, average["covariance"].to("cpu", torch.float64)) if _finite(average) else cavity
        anchor = steps.loc(current).to("cpu", torch.float64)
        after = OwnState(record, silo, phi, moments, anchor, own.visits + 1)
        gradient = {name: average[f"theta/{name}"] for name in theta}
        return Fitted(end, float(average["value"]) if _finite(average) else math.nan, gradient, after)

    def _step_function(
        self,
        current: Params, cavity: tuple[Tensor, Tensor], theta: Params, record: Params, silo: Params, phi: Params,
        rows: Params, weights: Tensor, eps: Tensor, eps_record: Tensor, eps_silo: Tensor, record_moments: Params,
        silo_moments: Params, phi_moments: Params, scale: Tensor,
    ) -> tuple[Params, dict[str, Params], dict[str, Params], Params]:  # fmt: skip
        assert self.steps is not None
        z = self.steps.draw(current, eps)
        shift = z - self.steps.loc(current)
        g = self._gradient(z, shift, {**theta, **phi}, record, silo, rows, weights, eps_record, eps_silo)
        held = cavity[0] - (cavity[1] @ z if cavity[1].dim() == 2 else cavity[1] * z)
        shared, phi_gradient = split_theta(g.theta, theta)
        after = self.steps.step(current, eps, g.direct + g.path + held, scale[0])
        new_record, record_moments = self.optimizer.step(record, g.local, record_moments, scale[1], local_units(record))
        new_silo, silo_moments = self.optimizer.step(silo, g.silo, silo_moments, scale[1], local_units(silo))
        # The silo's latents move along with the mean of Z_G, as their conditionals say they do: held back, they would
        # turn a Newton step on the marginal likelihood into a step of EM, which is slow where much is unobserved.
        moved = self.steps.loc(after) - self.steps.loc(current)
        new_record, new_silo = reanchored(new_record, new_silo, moved)
        new_phi, phi_moments = self.optimizer.step(phi, phi_gradient, phi_moments, scale[1])
        seen = {"loc": self.steps.loc(after), "covariance": self.steps.covariance(after), "value": g.value.reshape(1)}
        seen |= {f"theta/{name}": value for name, value in shared.items()}
        new = {"silo": new_silo, "silo_moments": silo_moments, "phi": new_phi, "phi_moments": phi_moments}
        return after, new, {"params": new_record, "moments": record_moments}, seen

    def _rates(self, done: float, visits: int) -> Tensor:
        """Shares of the first learning rates, of q and of the silo's latents, after a share of the local steps."""
        cosine = SCHEDULES["cosine"]
        own = max(_LEAST, cosine(min(1.0, done / _SETTLED_AT))) * (1.0 if visits == 0 else _LATER)
        return self.frame.move(torch.tensor([max(_LEAST, cosine(done)), own]))

    def _closed_form(self, cavity: Natural, own: OwnState, view: SiloView) -> Fitted:
        """The silo's likelihood is a Gaussian factor: q is cavity x likelihood, or its diagonal approximation."""
        no_latents = view.start.z_record.new_zeros(len(view.weights), 0)

        def log_likelihood(z: Tensor) -> Tensor:
            terms = self.problem.density.evaluate(z, z.new_zeros(0), no_latents.to(z), {}, view.rows)
            return (view.weights * terms.records).sum()

        at = self.frame.move(self.problem.start.z_global)
        likelihood = quadratic(log_likelihood, at, True)
        if likelihood is None:
            raise InputError(
                f"silo '{view.silo}': its log likelihood is not quadratic in the global latents; local_optimizer = "
                "'closed_form' is for Gaussian likelihoods with known variance"
            )
        if self.frame.full:
            end = cavity.plus(likelihood)
        else:
            tilted = Natural(cavity.shift, torch.diag(cavity.precision)).plus(likelihood)
            diagonal = tilted.precision.diagonal()
            end = Natural(diagonal * tilted.mean(), diagonal)
        mean, covariance = end.mean(), end.covariance()
        spread = covariance if self.frame.full else torch.diag(covariance)
        value = float(log_likelihood(self.frame.move(mean))) - 0.5 * float((likelihood.precision * spread).sum())
        return Fitted(end, value, {}, own._replace(anchor=mean, visits=own.visits + 1))

    def _eps_record(self, key: int, view: SiloView, rows: npt.NDArray[np.int64] | None) -> Tensor:
        """eps_L (K, B, n_record)."""
        n, samples = self.frame.n_record, self.frame.samples
        eps = view.record_draws.normals(key, samples * n, rows)
        return self.frame.move(eps.reshape(len(eps), samples, n).transpose(0, 1).contiguous())

    def _batch(self, key: int, view: SiloView) -> npt.NDArray[np.int64] | None:
        """Rows of a batch of fixed size, drawn without replacement from the silo's secret. None: all."""
        size = max(2, math.ceil(self.config.sampling_rate * view.size))
        if size >= view.size:
            return None
        order: Any = np.argpartition(view.batch_draws.uniforms(key, 1)[0, : view.size, 0], size)
        return np.sort(order[:size])


def _finite(average: Params) -> bool:
    return all(bool(torch.isfinite(v).all()) for v in average.values())
