"""The local fit of PVI: q against cavity x the silo's own likelihood, by steps that need no exchange.

It meets no site and no message: `pvi_silo` says against which cavity, and what becomes of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.aggregation.base import FloatArray
from secure_fvi.algorithms.base import LocalFit, Problem, SiloView
from secure_fvi.algorithms.local_fit_options import EXACT, FIRST_FIT, PATIENCE, WINDOW, LocalFitOptions
from secure_fvi.algorithms.natural import Natural, from_moments
from secure_fvi.algorithms.options import SCHEDULES
from secure_fvi.algorithms.pvi_block import Block, Carry, Inputs
from secure_fvi.algorithms.pvi_exact import ExactFit
from secure_fvi.algorithms.pvi_frame import PVIFrame
from secure_fvi.algorithms.pvi_local import Anchored, reanchored_records, reanchored_silo
from secure_fvi.algorithms.pvi_steps import global_steps
from secure_fvi.algorithms.stationarity import SiloSlope
from secure_fvi.algorithms.weighing import Weigher, points
from secure_fvi.families import Params
from secure_fvi.trees import put, take

#: The last share of local steps, over which q and the gradient of theta are averaged.
_TAIL = 0.25
#: Least share of any rate within a fit. Those of own parameters also fall as 1 / visits, from the first rate: their
#: jitter makes q too narrow.
_LEAST = 0.05
#: Steps over which draws are stratified, and numbers drawn ahead for them at most.
_STRATA, _AHEAD = 16, 4_000_000
#: Shares of the configured rate at which a fit is tried, one after the other, until one does not run off.
_RATES = (1.0, 0.1, 0.01)
#: Share of the steps after which the silo's latents are at their least rate: their noise biases q's scale sites.
_SETTLED_AT = 0.6
#: Share of a first fit over which their rate rises: until q has found its width, gains mean nothing.
_WARM = 0.1


class OwnState(NamedTuple):
    """What a silo keeps from fit to fit, but for its site. Never leaves the silo."""

    record: Params  # variational parameters of its records, (N + 1, ...) each
    silo: Params  # of its silo-level latents, (1, ...) each
    phi: Params  # weights of its own encoder, for amortised families
    moments: dict[str, Params]  # of the optimiser, for the three above
    anchor: Tensor  # (n_global,) the mean of Z_G that `record` and `silo` are relative to
    visits: int
    share: float  # of the configured rate of q at which its fits run


class Fitted(NamedTuple):
    """Where a local fit ended."""

    q: Natural
    value: float  # E_q[log p(y, Z_L | Z_G) - log q(Z_L | Z_G)], or its importance-weighted bound; nats
    theta: Params  # gradient
    own: OwnState
    touched: Tensor  # (n,) whether the silo's term has ever had a gradient in this dimension of Z_G

    @property
    def sane(self) -> bool:
        return self.q.proper and math.isfinite(self.value)


class _Watch:
    """Early stopping (paper, section 5.3.1): once the expected log-likelihood, averaged over windows, has not risen
    above its best for `PATIENCE` windows."""

    def __init__(self, window: int) -> None:
        self.window, self.best, self.waited = window, -math.inf, 0

    def over(self, steps: int, value: Tensor) -> bool:
        """Whether to stop after so many steps; `value` is the average since the window began."""
        if not self.window or steps % self.window:
            return False
        self.waited = 0 if float(value) > self.best else self.waited + 1
        self.best = max(self.best, float(value))
        return self.waited >= PATIENCE


def _far(q: Natural, end: Natural) -> float:
    """How far a fit went: the largest of its mean's way and of its sd, in sds of where it began. It may narrow at will,
    as fits on raw scales do."""
    sd = q.stddev()
    return float(torch.maximum((end.mean() - q.mean()).abs() / sd, end.stddev() / sd).max())


class SiloFit:
    """The local fits of all silos of a process; it holds no data, so that they share its traces."""

    def __init__(self, config: LocalFitOptions, problem: Problem, frame: PVIFrame) -> None:
        self.config, self.problem, self.frame = config, problem, frame
        self.optimizer = frame.local_optimizer
        self.exact = ExactFit(config, problem, frame) if config.local_optimizer in EXACT else None
        self.block = Block(frame, global_steps(frame)) if self.exact is None else None
        self._slope = SiloSlope(problem, frame.local_family, frame.silo_family, frame.samples)
        self._weigher = Weigher(problem, frame.local_family, frame.silo_family)

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
        return OwnState(record, silo, phi, moments, start.z_global.to("cpu", torch.float64), 0, 1.0)

    def local_fit(self, own: OwnState) -> LocalFit:
        """What a silo's state says of its own latents."""
        frame = self.frame
        anchor = frame.move(own.anchor)
        records = {**own.record, **own.phi, Anchored.ANCHOR: anchor}
        silos = {**own.silo, Anchored.ANCHOR: anchor} if own.silo else {}
        family, silo_family = Anchored(frame.local_family, frame.n), Anchored(frame.silo_family, frame.n)
        return LocalFit(family, records, silo_family, silos, frame.samples)

    def __call__(self, turn: int, theta: Params, q: Natural, cavity: Natural, own: OwnState, view: SiloView) -> Fitted:
        """q fitted to cavity x likelihood, from q. `turn` names the draws: the silo's own count.

        A fit that runs off is begun again at a tenth of the rate, and once more; the silo keeps the rate that worked.
        """
        shares = [share for share in _RATES if share <= own.share] if self.exact is None else [1.0]
        for share in shares:
            fitted = self._at(share, turn, theta, q, cavity, own, view)
            if fitted.sane and _far(q, fitted.q) < self.config.bound:
                break
        return fitted

    def _at(
        self, share: float, turn: int, theta: Params, q: Natural, cavity: Natural, own: OwnState, view: SiloView
    ) -> Fitted:
        """A fit at `share` of the configured rate of q."""
        if self.exact is not None:
            end, value, gradient = self.exact(q, cavity, theta, view)
            anchor = end.mean() if end.proper else own.anchor
            own = own._replace(anchor=anchor, visits=own.visits + 1)
            return Fitted(end, value, gradient, own, torch.ones(q.n, dtype=torch.bool))
        assert self.block is not None
        frame, moments, length, q_steps = self.frame, own.moments, self.block.length, self.block.steps
        silo, moved = reanchored_silo(own.silo, frame.move(q.mean() - own.anchor), frame.n_silo)
        record = reanchored_records(own.record, moved)
        current = q_steps.init(q, tight=own.visits == 0 or self.config.early_stopping)
        average = self.block.observed(current, moved.new_zeros(()), theta, moved[: frame.n])
        steps = self.config.local_steps * (FIRST_FIT if own.visits == 0 else 1)
        first_key = turn * self.config.local_steps * FIRST_FIT
        batches = self._batches(first_key, steps, view)
        schedule = self._schedule(steps, own.visits, share)
        carry = Carry(
            current, record, moments["record"], silo, moments["silo"], own.phi, moments["phi"], average, moved
        )
        tilted = (frame.move(cavity.shift), frame.move(cavity.precision))
        draws = self._draws(first_key, len(schedule), batches, view)
        watch = _Watch(self._window if self.config.early_stopping else 0)
        for start in range(0, len(schedule), length):
            batch = None if batches is None else batches[start : start + length]
            rows, weights = self._rows(batch, view)
            inputs = Inputs(tilted, theta, rows, weights, *next(draws), schedule[start : start + length])
            carry = self._advance(carry, inputs, batch)
            if watch.over(start + length, carry.average["value"]):
                break
        average = carry.average
        ended = all(bool(torch.isfinite(v).all()) for v in average.values())
        loc, covariance = (average[name].to("cpu", torch.float64) for name in ("loc", "covariance"))
        after = OwnState(
            carry.record,
            carry.silo,
            carry.phi,
            {"record": carry.record_moments, "silo": carry.silo_moments, "phi": carry.phi_moments},
            q_steps.loc(carry.q).to("cpu", torch.float64),
            own.visits + 1,
            share,
        )
        return Fitted(
            from_moments(loc, covariance) if ended else cavity,
            float(average["value"]) if ended else math.nan,
            {name: average[f"theta/{name}"] for name in theta},
            after,
            average["touched"].to("cpu") != 0,
        )

    def at_the_end(
        self, eps: Tensor, key: int, theta: Params, q: Natural, own: OwnState, view: SiloView, weighs: bool
    ) -> FloatArray:
        """The silo's terms of `stationarity` at q, for the draws `eps`, and, where it `weighs`, of `weighing`; `key` as
        in a fit. In minibatches each draw of the first has one."""
        count = eps.shape[0] * eps.shape[1]
        silo, moved = reanchored_silo(own.silo, self.frame.move(q.mean() - own.anchor), self.frame.n_silo)
        record = reanchored_records(own.record, moved)
        first_key = key * self.config.local_steps * FIRST_FIT
        batches = self._batches(first_key, count, view) if self.exact is None else None
        inputs = self._inputs(first_key, count, batches, record, view)
        theta = {**theta, **own.phi}
        slope = self._slope(q, eps, theta, silo, inputs)
        if not weighs:
            return slope
        at = points(self.problem.seed, q, self.problem.layout)
        return np.concatenate([slope, self._weigher(q, at, theta, record, silo, view, first_key + count)])

    def _inputs(
        self, key: int, count: int, batches: npt.NDArray[np.int64] | None, record: Params, view: SiloView
    ) -> Iterator[tuple[Params, Params, Tensor, Tensor, Tensor]]:
        """Records' parameters, rows, weights, eps_L and eps_S of each of `count` draws."""
        frame, samples, n = self.frame, self.frame.samples, self.frame.n_record
        for draw in range(count):
            own, rows, weights = record, view.rows, view.weights
            at = None if batches is None else batches[draw]
            if at is not None:
                picked = torch.from_numpy(at).to(self.problem.device)
                own, rows = take(record, picked), take(view.rows, picked)
                weights = view.weights.new_full((len(at),), view.size / len(at))
            eps_record = view.record_draws.normals(key + draw, samples * n, at).reshape(len(weights), samples, n)
            eps_silo = view.silo_draws.normals(key + draw, frame.n_silo)
            yield own, rows, weights, frame.move(eps_record.transpose(0, 1).contiguous()), frame.move(eps_silo)

    def _advance(self, carry: Carry, inputs: Inputs, batch: npt.NDArray[np.int64] | None) -> Carry:
        """The state after a block. Records that are in no batch only move along with the means of Z_G and Z_S."""
        assert self.block is not None
        if batch is None or not carry.record:
            return self.block(carry, inputs)
        at = torch.from_numpy(batch[0]).to(self.problem.device)
        after = self.block(
            carry._replace(record=take(carry.record, at), record_moments=take(carry.record_moments, at)), inputs
        )
        return after._replace(
            record=put(reanchored_records(carry.record, after.moved), at, after.record),
            record_moments=put(carry.record_moments, at, after.record_moments),
        )

    def _rows(self, batch: npt.NDArray[np.int64] | None, view: SiloView) -> tuple[Params, Tensor]:
        """Rows and weights of a block, for its batches (S, B)."""
        if batch is None:
            return view.rows, view.weights
        at = torch.from_numpy(batch.reshape(-1)).to(self.problem.device)
        rows = {name: v.unflatten(0, batch.shape) for name, v in take(view.rows, at).items()}
        return rows, view.weights.new_full((batch.shape[1],), view.size / batch.shape[1])

    def _draws(
        self, key: int, steps: int, batches: npt.NDArray[np.int64] | None, view: SiloView
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """eps_G (S, noise), eps_L (S, K, B, n_record) and eps_S (S, 1, n_silo) of each block.

        Stratified over some steps: what a fit reports is an average over many, and the noise of 300 records' draws in
        a scale site is what keeps it from its target. Minibatches draw eps_L anew, a record at a time.
        """
        assert self.block is not None
        frame, length = self.frame, self.block.length
        width, samples, n = frame.family.noise_size + frame.n_silo, frame.samples, frame.n_record
        count = len(view.weights) if batches is None else batches.shape[1]
        most = _STRATA if batches is not None else min(_STRATA, _AHEAD // max(1, count * samples * n))
        chunk = length * max(1, most // length)
        for start in range(0, steps, chunk):
            rounds = min(chunk, steps - start)
            noise = frame.move(view.silo_draws.stratified(key + start, width, rounds))
            eps_silo, eps = noise.split([frame.n_silo, frame.family.noise_size], 2)
            ahead: Tensor | None = None
            if n and batches is None:
                ahead = view.record_draws.stratified(key + start, samples * n, rounds)
            for first in range(0, rounds, length):
                block = slice(first, first + length)
                drawn = torch.empty(length, count, 0)
                if ahead is not None:
                    drawn = ahead[block]
                elif n and batches is not None:  # a block is one step then
                    drawn = view.record_draws.normals(key + start + first, samples * n, batches[start + first])[None]
                eps_record = drawn.reshape(length, count, samples, n).transpose(1, 2).contiguous()
                yield eps[block, 0], frame.move(eps_record), eps_silo[block]

    def _schedule(self, steps: int, visits: int, share: float) -> Tensor:
        """(steps, 3): shares of the first learning rates, of q and of the silo's own parameters, and the weight of the
        iterate after a step in the average of the last ones."""
        cosine = SCHEDULES["cosine"]
        first = steps - max(1, math.floor(_TAIL * steps))
        rows = []
        for step in range(steps):
            done = step / steps
            own = max(_LEAST, cosine(min(1.0, done / _SETTLED_AT))) / (1 + visits)
            own *= 1.0 if visits else min(1.0, done / _WARM)
            averaged = step % self._window if self.config.early_stopping else max(0, step - first)
            rate = share * max(_LEAST, cosine(done)) * self.config.decay**visits
            rows.append((rate, own, 1.0 / (averaged + 1)))
        return self.frame.move(torch.tensor(rows, dtype=torch.float64))

    @property
    def _window(self) -> int:
        """Steps over which early stopping looks at the expected log-likelihood: whole blocks."""
        assert self.block is not None
        return math.ceil(WINDOW / self.block.length) * self.block.length

    def _batches(self, key: int, steps: int, view: SiloView) -> npt.NDArray[np.int64] | None:
        """Rows of every step's minibatch (steps, B), None for all: consecutive pieces of shuffles of the silo's
        records, which follow from its secret."""
        size = max(2, math.ceil(self.config.sampling_rate * view.size))
        if size >= view.size:
            return None
        pieces = view.size // size
        orders = [
            np.argsort(view.batch_draws.uniforms(key + first, 1)[0, : view.size, 0])[: pieces * size]
            for first in range(0, steps, pieces)
        ]
        batches: npt.NDArray[np.int64] = np.concatenate(orders).reshape(-1, size)[:steps]
        return batches
