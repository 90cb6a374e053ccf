"""The silos' half of PVI: the site, and the change of it that a local fit asks for.

The site stays at the silo. A change counts only once the server has said, in a later broadcast, that its sum was used
and with which damping; whatever is lost in between, q stays the prior times the product of sites.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import Broadcast, LocalFit, Pending, Problem, SiloView
from secure_fvi.algorithms.natural import Natural, nothing
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.pvi_fit import OwnState, SiloFit
from secure_fvi.algorithms.pvi_frame import PVIFrame
from secure_fvi.algorithms.pvi_schedule import weight
from secure_fvi.algorithms.pvi_start import first_start
from secure_fvi.families import Params
from secure_fvi.messages import CLIP
from secure_fvi.privacy.gate import Gate, Release
from secure_fvi.trees import to_numpy


class Answer(NamedTuple):
    """A finished local fit. Never leaves the silo but as a change, in a sum."""

    round: int  # of the broadcast that it was fitted against; -1: there is none
    site: Natural  # what t_j should be
    value: float  # see `Fitted`
    theta: Params
    usable: bool  # False where the cavity was improper or the fit failed: the site stays as it is


class PVILocal(NamedTuple):
    """A silo's state. Never leaves the silo."""

    site: Natural  # t_j, without the change that is on its way
    change: Natural  # as it was released with sum `sent`
    sent: int  # 0: none
    own: OwnState
    waiting: Answer  # for the silo's next turn, where its fits take longer than a round


class PVISilo:
    """`algorithms.base.SiloProgram`."""

    def __init__(self, config: PVI, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.frame = frame = PVIFrame(config, problem)
        self.tables, self.terms = frame.tables, frame.terms_by_phase
        self.fit = SiloFit(config, problem, frame)
        self._one = nothing(frame.n, frame.full)
        self._none = Answer(-1, self._one, 0.0, {}, False)

    def init_local(self, view: SiloView) -> PVILocal:
        return PVILocal(self._one, self._one, 0, self.fit.init(view), self._none)

    def contribute(self, message: Broadcast, local: PVILocal, view: SiloView, gate: Gate) -> tuple[Release, PVILocal]:
        local = self._settled(message, local, view.silo)
        answer, own = self._fitted(message, local, view)
        waiting = self._none
        if self.frame.delays[self.problem.silos.index(view.silo)] > 0:  # this fit will be done by the next turn
            waiting, answer = answer, local.waiting if local.waiting.round >= 0 else answer
        change = self._one
        if answer.usable:
            change = self._one.plus(answer.site.minus(local.site), weight(message.round - answer.round))
        release = gate.release(self._values(change, answer, view))
        if self.frame.terms is not None:  # what counts is what was released: clipped, and with the silo's own noise
            clip = message.scalars.get(CLIP, self.frame.terms.settings.clipping_norm)
            released = self.frame.terms.in_clear(release.values, clip)[: self.frame.packed]
            change = self.frame.unpack(torch.from_numpy(released))
        return release, PVILocal(local.site, change, message.sum_index, own, waiting)

    def _fitted(self, message: Broadcast, local: PVILocal, view: SiloView) -> tuple[Answer, OwnState]:
        """The local fit against the q of `message`, and the silo's latents after it."""
        q = self.frame.unpack(message.tensors["q"])
        cavity = q.minus(local.site)
        theta = {name: self.frame.move(message.tensors[f"theta/{name}"]) for name in self.frame.theta_start}
        if cavity.proper:
            begin = q if local.own.visits else first_start(q, self.config.start_spread, self.problem.seed)
            fitted = self.fit(message.sum_index, theta, begin, cavity, local.own, view)
            if fitted.sane:
                return Answer(message.round, fitted.q.minus(cavity), fitted.value, fitted.theta, True), fitted.own
        zeros = {name: torch.zeros_like(v) for name, v in theta.items()}
        own = local.own._replace(visits=local.own.visits + 1)
        return Answer(message.round, self._one, 0.0, zeros, False), own

    def commit(self, local: PVILocal, pending: Pending, accepted: int) -> PVILocal:
        """The pending state in any case: whether its change counts is read off a later broadcast, which may come
        rounds after the last one used where not all silos are asked in every round."""
        return pending.local

    def local_fit(self, local: PVILocal) -> LocalFit:
        return self.fit.local_fit(local.own)

    def site(self, local: PVILocal, message: Broadcast, silo: str) -> Natural:
        """t_j as of a broadcast. For the silo's own eyes."""
        return self._settled(message, local, silo).site

    def _settled(self, message: Broadcast, local: PVILocal, silo: str) -> PVILocal:
        """With the change that was sent taken into the site, if the server says that it used it."""
        if not local.sent:
            return local
        mine = self.problem.silos.index(silo)
        if int(message.tensors["counted"][mine]) != local.sent:
            return local._replace(change=self._one, sent=0)
        damping = float(message.tensors["factors"][mine])
        return local._replace(site=local.site.plus(local.change, damping), change=self._one, sent=0)

    def _values(self, change: Natural, answer: Answer, view: SiloView) -> FloatArray:
        parts = [change.pack(), *(answer.theta[name].reshape(-1) for name in sorted(answer.theta))]
        values = np.concatenate([to_numpy(p) for p in parts])
        if self.frame.terms is not None:
            return values
        present = [float(name == view.silo) for name in self.problem.silos]
        return np.concatenate([values, [answer.value, float(view.size), float(not answer.usable)], present])
