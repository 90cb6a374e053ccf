"""The silos' half of PVI: the site, and the change of it that a local fit asks for.

The site stays at the silo. A change counts only once the server has said, in a later broadcast, that its sum was used
and with which damping, and the server may say another damping later: it takes a step back that left a silo without a
proper cavity. Whatever is lost in between, q stays the prior times the product of sites. Dampings are named by sum, not
by silo: all changes of one total are taken in alike, whatever a server says. Were one silo's alone to count, the next
total would lack just that one.

A silo whose cavity q / t is improper, or whose fit against it runs off, fits against a tempered one, q / t^a, in which
the smallest precision relative to q's is `MARGIN`. The site that a fit arrives at is q* / (q / t^a): the Gaussian that
stands for the silo's likelihood at q*, whatever cavity led there, so that nothing of the old site is kept. With a < 1
q* has counted part of the likelihood twice and is too narrow; the silo says so, and no run ends there as converged.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import CLIP, Broadcast, LocalFit, Pending, Problem, SiloView
from secure_fvi.algorithms.natural import Natural, distance, nothing
from secure_fvi.algorithms.pvi import FINISH, PVI
from secure_fvi.algorithms.pvi_fit import OwnState, SiloFit
from secure_fvi.algorithms.pvi_frame import PVIFrame
from secure_fvi.algorithms.pvi_parts import part_views
from secure_fvi.algorithms.pvi_schedule import weight
from secure_fvi.algorithms.pvi_start import first_start
from secure_fvi.algorithms.stationarity import as_sent, final_draws
from secure_fvi.algorithms.weighing import asked
from secure_fvi.errors import AggregationError, ProtocolError
from secure_fvi.families import Params
from secure_fvi.privacy.gate import Gate, Release
from secure_fvi.trees import to_numpy

#: A cavity is tempered where in some direction it has no more than `IMPROPER` of q's precision (a silo that alone knows
#: a parameter leaves but the prior's, a ten-thousandth perhaps), and then has `MARGIN` of it.
IMPROPER, MARGIN = 1e-9, 0.05


class Answer(NamedTuple):
    """A finished local fit. Never leaves the silo but as a change, in a sum."""

    round: int  # of the broadcast that it was fitted against; -1: there is none
    site: Natural  # what t_j should be
    value: float  # see `Fitted`
    theta: Params
    usable: bool  # False where the fit failed: the site stays as it is
    tempered: bool  # whether it was fitted against a tempered cavity


class Part(NamedTuple):
    """A silo, or one of its virtual clients. Never leaves the silo."""

    site: Natural  # t_j, without the change that is on its way
    change: Natural  # as it was released with the last sum
    taken: Natural  # the change that the site took in last, whole
    own: OwnState
    waiting: Answer  # for the silo's next turn, where its fits take longer than a round


class PVILocal(NamedTuple):
    """A silo's state. Never leaves the silo."""

    parts: tuple[Part, ...]
    used: int  # the sum that the changes were released with, where the server has used it; 0: it has not
    took: int  # the sum of the change that the sites took in last; 0: none yet
    factor: float  # the damping with which they took it

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
        self.tables, self.terms, self.order = frame.tables, frame.terms_by_phase, frame.order
        self.fit = SiloFit(config, problem, frame)
        self._one = nothing(frame.n, frame.full)
        self._none = Answer(-1, self._one, 0.0, {}, False, False)

    def init_local(self, view: SiloView) -> PVILocal:
        views = part_views(view, self.config.virtual_clients)
        one = self._one
        return PVILocal(tuple(Part(one, one, one, self.fit.init(v), self._none) for v in views), 0, 0, 0.0)

    def contribute(self, message: Broadcast, local: PVILocal, view: SiloView, gate: Gate) -> tuple[Release, PVILocal]:
        local = self._settled(message, local, view.silo)
        if message.phase == FINISH:
            return self._finish(message, local, view, gate), local
        late = bool(self.frame.delays[self.problem.silos.index(view.silo)] > 0)
        views = part_views(view, self.config.virtual_clients)
        answered = [self._answered(message, k, part, views[k], late, gate) for k, part in enumerate(local.parts)]
        parts, answers = [part for part, _ in answered], [answer for _, answer in answered]
        per_unit = self._per_unit(message, view.silo)
        rows = np.stack([self._row(p.change, a, per_unit) for p, a in zip(parts, answers, strict=True)])
        if self.frame.terms is None:
            release = gate.release(np.concatenate([rows.sum(0), *self._in_clear(message, parts, answers, view)]))
        elif self.frame.by_record:
            release = gate.release_change(torch.from_numpy(rows.sum(0)))
        else:
            release = gate.release(rows.sum(0))
        if self.frame.terms is not None:
            parts = self._as_released(message, parts, rows, release)
        return release, local._replace(parts=tuple(parts), used=0)

    def _finish(self, message: Broadcast, local: PVILocal, view: SiloView, gate: Gate) -> Release:
        """The silo's part of the bound, and of its slope, at the final q."""
        q, theta = self.frame.unpack(message.tensors["q"]), self._theta(message)
        views = part_views(view, self.config.virtual_clients)
        eps = final_draws(self.problem.seed, self.frame.n, self.frame.full, self.config.rounds is not None)
        keys = range((view.turn + 1) * len(views), (view.turn + 2) * len(views))
        found = [
            self.fit.at_the_end(eps, key, theta, q, part.own, of, asked(self.tables[FINISH]))
            for key, part, of in zip(keys, local.parts, views, strict=True)
        ]
        present = [float(name == view.silo) for name in self.problem.silos]
        terms = as_sent(self.problem, self.tables[FINISH], np.sum(found, 0), view)
        return gate.release(np.concatenate([terms, present, [float(view.size)]]))

    def _theta(self, message: Broadcast) -> Params:
        return {name: self.frame.move(message.tensors[f"theta/{name}"]) for name in self.frame.theta_start}

    def _answered(
        self, message: Broadcast, k: int, part: Part, view: SiloView, late: bool, gate: Gate
    ) -> tuple[Part, Answer]:
        """The k-th part with its change, and the answer that the change is from."""
        answer, own = self._fitted(message, k, part, view, gate)
        waiting = self._none
        if late:  # this fit will be done by the next turn
            waiting, answer = answer, part.waiting if part.waiting.round >= 0 else answer
        change = self._one
        if answer.usable:
            change = self._one.plus(answer.site.minus(part.site), weight(message.round - answer.round))
        return part._replace(change=change, own=own, waiting=waiting), answer

    def _fitted(self, message: Broadcast, k: int, part: Part, view: SiloView, gate: Gate) -> tuple[Answer, OwnState]:
        """The local fit against the q of `message`, and the silo's latents after it."""
        q = self.frame.unpack(message.tensors["q"])
        theta = self._theta(message)
        begin = q if part.own.visits else first_start(q, self.config.start_spread, self.problem.seed)
        turn = (view.turn + 1) * self.config.virtual_clients + k
        try:
            for least in (IMPROPER, MARGIN):
                cavity, share = tempered(q, part.site, least)
                if least == MARGIN and share == 1:
                    break  # tempering would change nothing
                fitted = self.fit(turn, theta, begin, cavity, part.own, view)
                if fitted.sane:
                    site = fitted.q.minus(cavity).within(fitted.touched)
                    return Answer(message.round, site, fitted.value, fitted.theta, True, share < 1), fitted.own
                if share < 1:
                    break
        except Exception:
            # Under privacy to fail on data would tell of them, without noise: the change is nothing, and noised.
            if self.frame.terms is None:
                raise
            gate.dropped += 1
        if self.frame.terms is None and self.frame.cohort_size > 1:
            # A zero in its place would make the total the others', and later totals this silo's.
            raise AggregationError(
                f"silo '{view.silo}': its local fit ran off in round {message.round}; lower learning_rate (now "
                f"{self.frame.first_rate:.2g}), standardise the columns, or use sfvi"
            )
        zeros = {name: torch.zeros_like(v) for name, v in theta.items()}
        own = part.own._replace(visits=part.own.visits + 1)
        return Answer(message.round, self._one, 0.0, zeros, False, False), own

    def commit(self, local: PVILocal, pending: Pending, accepted: int) -> PVILocal:
        """The pending state in any case, with the server's word on its change: with which damping it was used stands in
        a later broadcast, which may come rounds after where not all silos are asked in every round."""
        kept: PVILocal = pending.local
        return kept._replace(used=accepted if pending.sum_index == accepted else 0)

    def local_fit(self, local: PVILocal) -> LocalFit:
        return self.fit.local_fit(local.parts[0].own)  # models with local latents have one part

    def site(self, local: PVILocal, message: Broadcast, silo: str) -> Natural:
        """t_j as of a broadcast. For the silo's own eyes."""
        return self._settled(message, local, silo).site

    def _settled(self, message: Broadcast, local: PVILocal, silo: str) -> PVILocal:
        """With the changes that were sent taken into the sites, if the server has said that it used them, and with the
        last change as short as the server says that it is by now."""
        if not bool(((message.tensors["dampings"] >= 0) & (message.tensors["dampings"] <= 1)).all()):
            raise ProtocolError(f"silo '{silo}': a change is taken in with a damping between 0 and 1")
        one, took, factor = self._one, local.took, local.factor
        parts, new = [p._replace(change=one) for p in local.parts], damping_of(message, local.used, silo)
        if new > 0:
            parts = [p._replace(site=p.site.plus(p.change, new), taken=p.change, change=one) for p in local.parts]
            took, factor = local.used, new
        kept = damping_of(message, took, silo)
        if kept > 0 and kept != factor:
            parts = [p._replace(site=p.site.plus(p.taken, kept - factor)) for p in parts]
            factor = kept
        return PVILocal(tuple(parts), 0, took, factor)

    def _per_unit(self, message: Broadcast, silo: str) -> Tensor:
        """Of the units that are sent: a silo whose own rounding is another may be off by a factor of two."""
        units = message.tensors["units"].to("cpu", torch.float64)
        own = self.frame.units(self.frame.unpack(message.tensors["q"]))
        if not bool(((units == own) | (units == 2 * own) | (units == own / 2)).all()):
            raise ProtocolError(f"silo '{silo}': the units of a change are not those of the q that was sent")
        return self.frame.per_unit(units)

    def _row(self, change: Natural, answer: Answer, per_unit: Tensor) -> FloatArray:
        """What a part adds to the blocks that are protected."""
        parts = [change.pack() * per_unit, *(answer.theta[name].reshape(-1) for name in sorted(answer.theta))]
        return np.concatenate([to_numpy(p) for p in parts])

    def _in_clear(
        self, message: Broadcast, parts: list[Part], answers: list[Answer], view: SiloView
    ) -> list[FloatArray]:
        """The blocks that only a run without differential privacy has."""
        q, age = self.frame.unpack(message.tensors["q"]), min(a.round for a in answers)
        whole = 1 / weight(message.round - age) if age >= 0 else 1.0
        flags = (
            not all(answer.usable for answer in answers),
            any(answer.tempered for answer in answers),
            any(distance(q, q.plus(part.change, whole)) > self.config.tolerance for part in parts),
        )
        present = [float(name == view.silo) for name in self.problem.silos]
        value = sum(answer.value for answer in answers)
        counts = [float(value), float(view.size), *map(float, flags)]
        return [np.array(counts), np.array(present)]

    def _as_released(self, message: Broadcast, parts: list[Part], rows: FloatArray, release: Release) -> list[Part]:
        """What counts is what was released: the change of the one part, or, where what is protected is the silo, each
        part's own change and an even share of the rest."""
        assert self.frame.terms is not None
        clip = message.scalars.get(CLIP, self.frame.terms.settings.clipping_norm)
        total = torch.from_numpy(self.frame.terms.in_clear(release.values, clip)[: self.frame.packed])
        changes = total.unsqueeze(0)
        if len(parts) > 1:
            own = torch.from_numpy(rows)[:, : self.frame.packed]
            changes = own + (total - own.sum(0)) / len(parts)
        return [part._replace(change=self.frame.unpack(row)) for part, row in zip(parts, changes, strict=True)]


def tempered(q: Natural, site: Natural, least: float = IMPROPER) -> tuple[Natural, float]:
    """The cavity q / t^a and a: 1 where that leaves more than `least` of q's precision in every direction, else the
    largest that leaves `MARGIN` of it. A cavity is proper whatever the site."""
    if site.full:
        factor = q.factor()
        most = float(torch.linalg.eigvalsh(factor.mT @ site.precision @ factor).max())
    else:
        most = float((site.precision / q.precision).max())
    cavity = q.minus(site)
    if most < 1 - least and cavity.proper:
        return cavity, 1.0
    share = min(1.0, (1 - MARGIN) / most) if most > 0 else 1.0
    return q.plus(site, -share), share


def damping_of(message: Broadcast, index: int, silo: str) -> float:
    """With which q took the changes of sum `index`: the first entry that names it, at every `silo`; 0: it was left."""
    named = zip(message.tensors["sums"].tolist(), message.tensors["dampings"].tolist(), strict=True)
    return next((damping for at, damping in named if index and at == index), 0.0)


def _product(factors: list[Natural]) -> Natural:
    return functools.reduce(Natural.plus, factors)
