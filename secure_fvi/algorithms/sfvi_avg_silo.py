"""The silos' half of SFVI-Avg: a local run from what the server sent, and the change that came of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.barycenter import ROOT
from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import ITERATION, Broadcast, LocalFit, Pending, Problem, SiloView, adopt_if_used
from secure_fvi.algorithms.sfvi_avg import BURES, COUNT, FINISH, MERGE, SFVIAvg, bound_draws
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
from secure_fvi.algorithms.sfvi_avg_steps import LocalRun, Point
from secure_fvi.algorithms.sfvi_avg_trusted import own_row
from secure_fvi.algorithms.stationarity import as_sent, final_draws
from secure_fvi.algorithms.weighing import asked
from secure_fvi.families import Params
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


class SFVIAvgSilo:
    """`algorithms.base.SiloProgram`."""

    def __init__(self, config: SFVIAvg, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.frame = frame = SFVIAvgFrame(config, problem)
        self.tables, self.terms, self.order = frame.tables, frame.terms, frame.order
        self.base = frame.base
        self.run = LocalRun(config, problem, frame)

    def init_local(self, view: SiloView) -> SFVIAvgLocal:
        base, nothing = self.base, np.zeros((0, 0))
        record = base.local_family.init(base.move(view.start.z_record))
        silo = base.silo_family.init(base.move(view.start.z_silo).unsqueeze(0))
        anchor = base.move(self.problem.start.z_global)
        theta = {name: base.move(value) for name, value in self.frame.theta_start.items()}
        shared = merge(eta=self.frame.family.init(anchor), theta=theta)
        moments, record_moments, silo_moments = self.run.init_moments(shared, record, silo)
        return SFVIAvgLocal(record, record_moments, silo, silo_moments, moments, anchor, -1, 0, nothing, nothing)

    def contribute(
        self, message: Broadcast, local: SFVIAvgLocal, view: SiloView, gate: Gate
    ) -> tuple[Release, SFVIAvgLocal]:
        if message.phase == MERGE:
            return self._merge(message, local, view, gate)
        if message.phase == BURES:
            return self._iterate(message, local, view, gate)
        shared = self._shared(message)
        if message.phase != COUNT:  # the last q has come: the latents' distributions refer to it from here on
            local = self._finish(message, self.anchored(local, shared["eta/loc"]), shared, view)
        values = {RECORDS: np.float64(view.size), OBJECTIVE: self._bound(message, local, shared, view)}
        flat = self._flat(message, values)
        if message.phase == FINISH:
            eps = final_draws(self.problem.seed, self.frame.family.n, self.frame.full)
            slope = self.run.at_the_end(self._point(local, shared), eps, view, asked(self.tables[FINISH]))
            flat = np.concatenate([flat, as_sent(self.problem, self.tables[FINISH], slope, view)])
        return gate.release(flat), local

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
        local = self.anchored(local, shared["eta/loc"])
        own, after = self._run(message, local, shared, view)
        weight, family = self.frame.weight(view.size), self.frame.family
        before, eta = part(shared, "eta"), part(own, "eta")
        values: dict[str, Any] = {RECORDS: np.float64(view.size), SILOS: np.float64(1.0)}
        values |= {} if self.frame.private else {OBJECTIVE: self._bound(message, local, shared, view)}
        values |= {LOC: weight * to_numpy(eta["loc"] - before["loc"])}
        values |= {THETA + name: weight * to_numpy(own[THETA + name] - v) for name, v in part(shared, "theta").items()}
        after = after._replace(merged=message.round, iteration=1)
        if self.frame.trusted:
            values |= own_row(family, eta, weight, view.silo, self.problem.silos)
        elif self.frame.full:
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
        iteration = int(message.scalars[ITERATION])
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

    # ---- what the phases share ----

    def _run(
        self, message: Broadcast, local: SFVIAvgLocal, shared: Params, view: SiloView
    ) -> tuple[Params, SFVIAvgLocal]:
        """A round's local run: the silo's own eta_G and theta, averaged, and its state."""
        start = self._point(local, shared)
        if not self.config.persistent:
            moments, record_moments, silo_moments = self.run.init_moments(shared, local.record, local.silo)
            start = start._replace(moments=moments, record_moments=record_moments, silo_moments=silo_moments)
        scalars = message.scalars
        end, average = self.run(start, scalars["records"], scalars["rate"], view)
        after = local._replace(
            record=average.record, record_moments=end.record_moments, silo=average.silo, silo_moments=end.silo_moments,
            moments=end.moments, anchor=average.shared["eta/loc"],
        )  # fmt: skip
        return average.shared, after

    def _finish(self, message: Broadcast, local: SFVIAvgLocal, shared: Params, view: SiloView) -> SFVIAvgLocal:
        """Steps on the silo's own latents alone, with an optimiser that starts anew: q(Z_G) has moved under them."""
        if not self.config.final_local_steps:
            return local
        moments, record_moments, silo_moments = self.run.init_moments(shared, local.record, local.silo)
        start = Point(shared, moments, local.record, record_moments, local.silo, silo_moments)
        end = self.run.finish(start, view)
        return local._replace(record=end.record, silo=end.silo)

    def _bound(self, message: Broadcast, local: SFVIAvgLocal, shared: Params, view: SiloView) -> FloatArray:
        """The silo's part of the bound at the q(Z_G) that was sent, nats."""
        return to_numpy(self.run.bound(self._point(local, shared), message.round, bound_draws(message.phase), view))

    def _point(self, local: SFVIAvgLocal, shared: Params) -> Point:
        return Point(shared, local.moments, local.record, local.record_moments, local.silo, local.silo_moments)

    def _shared(self, message: Broadcast) -> Params:
        return {name: self.base.move(value) for name, value in message.tensors.items()}

    def anchored(self, local: SFVIAvgLocal, loc: Tensor) -> SFVIAvgLocal:
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
