"""The silos' half of SFVI-Avg: a run of local steps from what the server sent, and the change that came of it.

A silo acts as if the federation were N / N_j copies of itself: L_j is scaled as a whole, with its record-level terms,
the prior and the entropy of its silo-level latents. Scaling is then the same as in SFVI for the silo's own latents,
whose best distribution given q(Z_G) does not depend on N; their own steps are therefore left unscaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.barycenter import ROOT
from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import Broadcast, LocalFit, Pending, Problem, SiloView, adopt_if_used
from secure_fvi.algorithms.sfvi_avg import BOUND_DRAWS, BURES, COUNT, MERGE, SFVIAvg
from secure_fvi.algorithms.sfvi_avg_frame import (
    LOC,
    OBJECTIVE,
    RECORDS,
    SD,
    SILOS,
    THETA,
    SFVIAvgFrame,
    bures_term,
)
from secure_fvi.algorithms.sfvi_frame import local_units, mean_units
from secure_fvi.compiled import Traced
from secure_fvi.density import LogDensity, LogTerms
from secure_fvi.errors import ProtocolError
from secure_fvi.families import Params
from secure_fvi.objective import SiloFunction, server_gradient, silo_gradient
from secure_fvi.privacy.gate import Gate, Release
from secure_fvi.trees import merge, part, to_numpy


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


class _Local(NamedTuple):
    """What a local step carries on."""

    shared: Params  # "eta/..." and "theta/..."
    moments: Params
    record: Params
    record_moments: Params
    silo: Params
    silo_moments: Params
    average: tuple[Params, Params, Params]  # of shared, record, silo


class SFVIAvgSilo:
    """`algorithms.base.SiloProgram`."""

    def __init__(self, config: SFVIAvg, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.frame = frame = SFVIAvgFrame(config, problem)
        self.tables, self.terms = frame.tables, frame.terms
        self.base, self.optimizer = frame.base, frame.base.optimizer
        self._server_gradient = server_gradient(problem.density, frame.family)
        carried = (None, None, 0, 0, None, None, None, 0, None)
        axes = (*carried, 0, 0, None, 1, None, None)
        self._step: Callable[..., Any] = Traced(
            self._step_function, axes, problem.mode, self.base.local_family.couples_records
        )

    def init_local(self, view: SiloView) -> SFVIAvgLocal:
        base, nothing = self.base, np.zeros((0, 0))
        record = base.local_family.init(base.move(view.start.z_record))
        silo = base.silo_family.init(base.move(view.start.z_silo).unsqueeze(0))
        anchor = base.move(self.problem.start.z_global)
        theta = {name: base.move(value) for name, value in self.frame.theta_start.items()}
        moments = self.optimizer.init(merge(eta=self.frame.family.init(anchor), theta=theta))
        return SFVIAvgLocal(
            record,
            self.optimizer.init(record),
            silo,
            self.optimizer.init(silo),
            moments,
            anchor,
            -1,
            0,
            nothing,
            nothing,
        )

    def contribute(
        self, message: Broadcast, local: SFVIAvgLocal, view: SiloView, gate: Gate
    ) -> tuple[Release, SFVIAvgLocal]:
        if message.phase == MERGE:
            return self._merge(message, local, view, gate)
        if message.phase == BURES:
            return self._iterate(message, local, view, gate)
        shared = self._shared(message)
        if message.phase != COUNT:  # the last q has come: the latents' distributions refer to it from here on
            local = self._anchored(local, shared["eta/loc"])
        values = {RECORDS: np.float64(view.size), OBJECTIVE: self._bound(message, local, shared, view)}
        return gate.release(self._flat(message, values)), local

    def commit(self, local: SFVIAvgLocal, pending: Pending, accepted: int) -> SFVIAvgLocal:
        kept: SFVIAvgLocal = adopt_if_used(local, pending, accepted)
        return kept

    def local_fit(self, local: SFVIAvgLocal) -> LocalFit:
        base = self.base
        return LocalFit(base.local_family, local.record, base.silo_family, local.silo, base.samples)

    # ---- a round ----

    def _merge(
        self, message: Broadcast, local: SFVIAvgLocal, view: SiloView, gate: Gate
    ) -> tuple[Release, SFVIAvgLocal]:
        shared = self._shared(message)
        local = self._anchored(local, shared["eta/loc"])
        bound = np.float64(0.0) if self.frame.private else self._bound(message, local, shared, view)
        own, after = self._run(message, local, shared, view)
        weight, family = self.frame.weight(view.size), self.frame.family
        before, eta = part(shared, "eta"), part(own, "eta")
        values: dict[str, Any] = {RECORDS: np.float64(view.size), SILOS: np.float64(1.0), OBJECTIVE: bound}
        values |= {LOC: weight * to_numpy(eta["loc"] - before["loc"])}
        values |= {THETA + name: weight * to_numpy(own[THETA + name] - v) for name, v in part(shared, "theta").items()}
        after = after._replace(merged=message.round, iteration=1)
        if self.frame.full:
            at, covariance = to_numpy(family.covariance(before)), to_numpy(family.covariance(eta))
            values[ROOT] = bures_term(covariance, weight, at)
            after = after._replace(covariance=covariance, at=at)
        else:
            values[SD] = weight * to_numpy(family.stddev(eta) - family.stddev(before))
        return gate.release(self._flat(message, values)), after

    def _iterate(
        self, message: Broadcast, local: SFVIAvgLocal, view: SiloView, gate: Gate
    ) -> tuple[Release, SFVIAvgLocal]:
        """One more Bures iteration, at an S that the silo derives from the last total itself.

        A silo that missed an earlier sum of this merge has weight zero in the rest of it.
        """
        iteration = int(message.scalars["iteration"])
        if not 0 < iteration < self.config.bures_iterations:
            raise ProtocolError("an iteration of a barycenter past those agreed on")
        if (local.merged, local.iteration) != (message.round, iteration):
            return gate.release(np.zeros(self.tables[BURES].size)), local
        at = self.frame.after_iteration(local.at, to_numpy(message.tensors[ROOT]))
        weight = self.frame.weight(view.size)
        values = {
            RECORDS: np.float64(view.size),
            SILOS: np.float64(1.0),
            ROOT: bures_term(local.covariance, weight, at),
        }
        return gate.release(self._flat(message, values)), local._replace(iteration=iteration + 1, at=at)

    def _flat(self, message: Broadcast, values: dict[str, Any]) -> FloatArray:
        """The phase's blocks in order; under privacy the gate adds its side coordinate itself."""
        names = [b.name for b in self.tables[message.phase].blocks if b.name in values]
        return np.concatenate([np.ravel(values[name]) for name in names]).astype(np.float64)

    # ---- local steps ----

    def _run(
        self, message: Broadcast, local: SFVIAvgLocal, shared: Params, view: SiloView
    ) -> tuple[Params, SFVIAvgLocal]:
        """A round's steps: the silo's own eta_G and theta, averaged, and its state."""
        config, init = self.config, self.optimizer.init
        moments = (local.moments, local.record_moments, local.silo_moments)
        if not config.persistent:
            moments = (init(shared), init(local.record), init(local.silo))
        carried = _Local(
            shared, moments[0], local.record, moments[1], local.silo, moments[2], (shared, local.record, local.silo)
        )
        copies = message.scalars["records"] / view.size
        for step in range(config.local_steps):
            factors = (copies, message.scalars["rate"] * config.multiplier(step), config.averaging_weight(step))
            carried, _ = self._call(carried, view, message.round, BOUND_DRAWS + step, factors)
        own, record, silo = carried.average
        return own, local._replace(
            record=record, record_moments=carried.record_moments, silo=silo, silo_moments=carried.silo_moments,
            moments=carried.moments, anchor=own["eta/loc"],
        )  # fmt: skip

    def _bound(self, message: Broadcast, local: SFVIAvgLocal, shared: Params, view: SiloView) -> np.float64:
        """The silo's part of the bound at the q(Z_G) that was sent, nats: the mean over a few draws."""
        carried = _Local(
            shared, local.moments, local.record, local.record_moments, local.silo, local.silo_moments,
            (shared, local.record, local.silo),
        )  # fmt: skip
        at = [self._call(carried, view, message.round, draw, (1.0, 0.0, 1.0))[1] for draw in range(BOUND_DRAWS)]
        return np.float64(torch.stack(at).mean())

    def _call(
        self, carried: _Local, view: SiloView, round_: int, draw: int, factors: tuple[float, float, float]
    ) -> tuple[_Local, Tensor]:
        key = round_ * (self.config.local_steps + BOUND_DRAWS) + draw
        base, samples = self.base, self.base.samples
        eps_record = base.move(view.record_draws.normals(key, samples * base.n_record))
        eps_record = eps_record.reshape(len(eps_record), samples, base.n_record).transpose(0, 1).contiguous()
        # One draw cut in two: two draws under one key would share their numbers.
        size = self.frame.family.noise_size
        eps = base.move(view.silo_draws.normals(key, size + base.n_silo))
        out: tuple[_Local, Tensor] = self._step(
            *carried[:6], *carried.average, view.rows, view.weights, eps[0, :size].clone(), eps_record,
            eps[:, size:].clone(), torch.tensor(factors, dtype=self.problem.dtype, device=self.problem.device),
        )  # fmt: skip
        return out

    def _step_function(
        self,
        shared: Params, moments: Params, record: Params, record_moments: Params, silo: Params, silo_moments: Params,
        shared_average: Params, record_average: Params, silo_average: Params,
        rows: Params, weights: Tensor, eps: Tensor, eps_record: Tensor, eps_silo: Tensor, factors: Tensor,
    ) -> tuple[_Local, Tensor]:  # fmt: skip
        """`factors`: N / N_j, on the learning rate, and the weight of this iterate in the average."""
        copies, rate, share = factors.unbind()
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
        shared, moments = self.optimizer.step(shared, merge(eta=total.eta, theta=total.theta), moments, rate, units)
        record, record_moments = self.optimizer.step(record, g.local, record_moments, rate, local_units(record))
        silo, silo_moments = self.optimizer.step(silo, g.silo, silo_moments, rate, local_units(silo))
        average = (
            _towards(shared_average, shared, share),
            _towards(record_average, record, share),
            _towards(silo_average, silo, share),
        )
        return _Local(shared, moments, record, record_moments, silo, silo_moments, average), g.value

    def _gradient(self, copies: Tensor) -> SiloFunction:
        """Of L_j, or, in the paper's text, of L_j with its log-joint alone scaled."""
        density: Any = self.problem.density if self.config.scale_entropy else _Powered(self.problem.density, copies)
        return silo_gradient(density, self.base.local_family, self.base.silo_family, self.base.samples)

    def _shared(self, message: Broadcast) -> Params:
        return {name: self.base.move(value) for name, value in message.tensors.items()}

    def _anchored(self, local: SFVIAvgLocal, loc: Tensor) -> SFVIAvgLocal:
        """The same distributions given Z_G, written around the mean `loc` of the merged q(Z_G)."""
        shift = loc - local.anchor
        silo, silo_shift = _around(local.silo, shift)
        record, _ = _around(local.record, torch.cat([shift, silo_shift.reshape(-1)]))
        return local._replace(record=record, silo=silo, anchor=loc)


def _around(params: Params, shift: Tensor) -> tuple[Params, Tensor]:
    """A conditional family's parameters after its d has lost `shift`, and the move of its mean."""
    out, moved = dict(params), shift.new_zeros(params["loc"].shape if params else (0,))
    for name, by in (("loc", "coupling"), ("log_scale", "scale_coupling")):
        if by in params:
            change = (params[by] * shift).sum(-1)
            out[name] = params[name] + change
            moved = change if name == "loc" else moved
    return out, moved


def _towards(average: Params, latest: Params, share: Tensor) -> Params:
    return {name: old + share * (latest[name] - old) for name, old in average.items()}


class _Powered:
    """A density to a power: what is scaled when entropy is not."""

    def __init__(self, density: LogDensity, power: Tensor) -> None:
        self._evaluate, self._power = density.evaluate, power

    def evaluate(self, *args: Any) -> LogTerms:
        terms = self._evaluate(*args)
        return terms._replace(records=self._power * terms.records, silo=self._power * terms.silo)
