"""The silos' half of PVI: the site, and the change of it that a local fit asks for.

The site stays at the silo. A change counts only once the server has said, in a later broadcast, that its sum was used
and with which damping; whatever is lost in between, q stays the prior times the product of sites.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import Broadcast, LocalFit, Pending, Problem, SiloView
from secure_fvi.algorithms.natural import Natural, nothing
from secure_fvi.algorithms.pvi import PVI
from secure_fvi.algorithms.pvi_fit import OwnState, SiloFit
from secure_fvi.algorithms.pvi_frame import PVIFrame
from secure_fvi.algorithms.pvi_parts import part_views
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


class Part(NamedTuple):
    """A silo, or one of its virtual clients. Never leaves the silo."""

    site: Natural  # t_j, without the change that is on its way
    change: Natural  # as it was released with the last sum
    own: OwnState
    waiting: Answer  # for the silo's next turn, where its fits take longer than a round


class PVILocal(NamedTuple):
    """A silo's state. Never leaves the silo."""

    parts: tuple[Part, ...]
    sent: int  # index of the sum that the changes were released with; 0: none

    @property
    def site(self) -> Natural:
        """The product of all parts' sites."""
        return _product([part.site for part in self.parts])

    @property
    def change(self) -> Natural:
        return _product([part.change for part in self.parts])


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
        views = part_views(view, self.config.virtual_clients)
        return PVILocal(tuple(Part(self._one, self._one, self.fit.init(v), self._none) for v in views), 0)

    def contribute(self, message: Broadcast, local: PVILocal, view: SiloView, gate: Gate) -> tuple[Release, PVILocal]:
        local = self._settled(message, local, view.silo)
        late = bool(self.frame.delays[self.problem.silos.index(view.silo)] > 0)
        views = part_views(view, self.config.virtual_clients)
        answered = [self._answered(message, k, part, views[k], late) for k, part in enumerate(local.parts)]
        parts, answers = [part for part, _ in answered], [answer for _, answer in answered]
        rows = np.stack([self._row(part.change, answer) for part, answer in answered])
        if self.frame.terms is None:
            release = gate.release(np.concatenate([rows.sum(0), *self._in_clear(answers, view)]))
        elif self.frame.by_parts:
            release = gate.release_parts(torch.from_numpy(rows))
        else:
            release = gate.release(rows.sum(0))
        if self.frame.terms is not None:
            parts = self._as_released(message, parts, rows, release)
        return release, PVILocal(tuple(parts), message.sum_index)

    def _answered(self, message: Broadcast, k: int, part: Part, view: SiloView, late: bool) -> tuple[Part, Answer]:
        """The k-th part with its change, and the answer that the change is from."""
        answer, own = self._fitted(message, k, part, view)
        waiting = self._none
        if late:  # this fit will be done by the next turn
            waiting, answer = answer, part.waiting if part.waiting.round >= 0 else answer
        change = self._one
        if answer.usable:
            change = self._one.plus(answer.site.minus(part.site), weight(message.round - answer.round))
        return Part(part.site, change, own, waiting), answer

    def _fitted(self, message: Broadcast, k: int, part: Part, view: SiloView) -> tuple[Answer, OwnState]:
        """The local fit against the q of `message`, and the silo's latents after it."""
        q = self.frame.unpack(message.tensors["q"])
        cavity = q.minus(part.site)
        theta = {name: self.frame.move(message.tensors[f"theta/{name}"]) for name in self.frame.theta_start}
        if cavity.proper:
            begin = q if part.own.visits else first_start(q, self.config.start_spread, self.problem.seed)
            draws = message.sum_index * self.config.virtual_clients + k
            fitted = self.fit(draws, theta, begin, cavity, part.own, view)
            if fitted.sane:
                return Answer(message.round, fitted.q.minus(cavity), fitted.value, fitted.theta, True), fitted.own
        zeros = {name: torch.zeros_like(v) for name, v in theta.items()}
        own = part.own._replace(visits=part.own.visits + 1)
        return Answer(message.round, self._one, 0.0, zeros, False), own

    def commit(self, local: PVILocal, pending: Pending, accepted: int) -> PVILocal:
        """The pending state in any case: whether its change counts is read off a later broadcast, which may come
        rounds after the last one used where not all silos are asked in every round."""
        return pending.local

    def local_fit(self, local: PVILocal) -> LocalFit:
        return self.fit.local_fit(local.parts[0].own)  # models with local latents have one part

    def site(self, local: PVILocal, message: Broadcast, silo: str) -> Natural:
        """t_j as of a broadcast. For the silo's own eyes."""
        return self._settled(message, local, silo).site

    def _settled(self, message: Broadcast, local: PVILocal, silo: str) -> PVILocal:
        """With the changes that were sent taken into the sites, if the server says that it used them."""
        mine = self.problem.silos.index(silo)
        used = local.sent and int(message.tensors["counted"][mine]) == local.sent
        damping = float(message.tensors["factors"][mine]) if used else 0.0
        parts = [p._replace(site=p.site.plus(p.change, damping), change=self._one) for p in local.parts]
        return PVILocal(tuple(parts), 0)

    def _row(self, change: Natural, answer: Answer) -> FloatArray:
        """What a part adds to the blocks that are protected."""
        parts = [change.pack(), *(answer.theta[name].reshape(-1) for name in sorted(answer.theta))]
        return np.concatenate([to_numpy(p) for p in parts])

    def _in_clear(self, answers: list[Answer], view: SiloView) -> list[FloatArray]:
        """The blocks that only a run without differential privacy has."""
        skipped = float(not all(answer.usable for answer in answers))
        present = [float(name == view.silo) for name in self.problem.silos]
        return [np.array([sum(answer.value for answer in answers), float(view.size), skipped]), np.array(present)]

    def _as_released(self, message: Broadcast, parts: list[Part], rows: FloatArray, release: Release) -> list[Part]:
        """What counts is what was released: each part's change as it was clipped, and an even share of the rest."""
        assert self.frame.terms is not None
        clip = message.scalars.get(CLIP, self.frame.terms.settings.clipping_norm)
        total = torch.from_numpy(self.frame.terms.in_clear(release.values, clip)[: self.frame.packed])
        kept = torch.from_numpy(rows)
        if self.frame.by_parts:
            kept = kept * (clip / 2 / kept.norm(dim=1, keepdim=True)).clamp(max=1.0)
        changes = kept[:, : self.frame.packed]
        changes = changes + (total - changes.sum(0)) / len(parts)
        return [part._replace(change=self.frame.unpack(row)) for part, row in zip(parts, changes, strict=True)]


def _product(factors: list[Natural]) -> Natural:
    return functools.reduce(Natural.plus, factors)
