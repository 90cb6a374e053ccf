"""The silos' half of SFVI: gradients of the silo's term, and steps on its own latents' distributions.

Under record privacy the silo's term goes through the gate a record at a time. Record-level latents follow their own
record and past broadcasts only, so their steps need no noise; a silo-level latent follows all records of the silo, so
its gradient is clipped together with what is shared and comes back from the gate noised (docs/privacy-analysis.md).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secure_fvi.algorithms.base import Broadcast, LocalFit, Pending, Problem, SiloView, adopt_if_used
from secure_fvi.algorithms.sfvi import FINISH, SFVI
from secure_fvi.algorithms.sfvi_frame import SFVIFrame, local_units
from secure_fvi.algorithms.stationarity import SiloSlope, as_natural, as_sent, final_draws, silo_inputs
from secure_fvi.algorithms.weighing import Weigher, asked, points
from secure_fvi.compiled import Traced, TracedOnMade, threads
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.exported import GraphDensity, untested_operations
from secure_fvi.families import Params
from secure_fvi.objective import RecordGradients, SiloGradient, flat_gradient, record_gradients, silo_gradient
from secure_fvi.privacy.gate import Gate, Release
from secure_fvi.trees import part, put, running_average, take

#: Rows of a block of per-record gradients, and numbers in one above which it has fewer rows: powers of two, so that no
#: vectorised loop ends within a block. Only what everyone knows, the model's size, decides on them.
_FEWEST_ROWS, _MOST_ROWS, _MOST_NUMBERS = 64, 512, 2**16
#: The first key of the draws at the final q; those of rounds are smaller.
_FINAL = 2**30


class SFVILocal(NamedTuple):
    """A silo's state. Never leaves the silo."""

    record: Params  # variational parameters of its records, (N + 1, ...) each
    record_moments: Params
    silo: Params  # of its silo-level latents, (1, ...) each
    silo_moments: Params
    record_average: Params
    silo_average: Params
    averaged: int  # iterates in the averages
    stage: int  # to which they belong


class _Stepped(NamedTuple):
    """Both levels of latents after a round, before averaging."""

    record: Params
    record_moments: Params
    silo: Params
    silo_moments: Params


class SFVISilo:
    """`algorithms.base.SiloProgram`."""

    def __init__(self, config: SFVI, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.frame = frame = SFVIFrame(config, problem)
        self.tables, self.terms, self.order = frame.tables, frame.terms_by_phase, frame.order
        self.optimizer = frame.local_optimizer
        self._slope = SiloSlope(problem, frame.local_family, frame.silo_family, frame.samples)
        self._weigher = Weigher(problem, frame.local_family, frame.silo_family)
        plain = silo_gradient(problem.density, frame.local_family, frame.silo_family, frame.samples)
        self._gradient: Callable[..., SiloGradient] = plain
        self._record_gradients: Callable[..., RecordGradients] = record_gradients(plain, frame.couples)
        self._alone = record_gradients(plain, frame.couples, mapped=False)
        self._looked_at: int | None = None  # the turn in which `_look` looked last
        self._block = _rows_of_block(sum(b.size for b in frame.gradient_blocks))
        by_shape = frame.local_family.couples_records
        record, draws = (None, None) if by_shape else (0, 1)
        axes = (None, None, None, record, None, record, record, draws, None)
        self._step: Any = self._step_function
        if frame.by_record:
            self._step = TracedOnMade(self._record_step_function, self._made, problem.mode)
            self._own_terms = Traced(plain, (None,) * 10, problem.mode)
        elif self.optimizer.traceable:
            self._step = Traced(self._step_function, (*axes, record, None, None), problem.mode, by_shape)
        else:
            self._gradient = Traced(plain, axes, problem.mode, by_shape)

    def init_local(self, view: SiloView) -> SFVILocal:
        start, frame = view.start, self.frame
        z_record, z_silo = start.z_record, start.z_silo
        if self.terms:  # a start that the silo's data had a part in would be a release without noise
            z_record, z_silo = self.problem.start.z_record[:1].expand_as(z_record), self.problem.start.z_silo
        record = frame.local_family.init(frame.move(z_record))
        silo = frame.silo_family.init(frame.move(z_silo).unsqueeze(0))
        record_moments = self.optimizer.init(record, by_row=frame.by_row)
        return SFVILocal(record, record_moments, silo, self.optimizer.init(silo), record, silo, 0, 0)

    def contribute(self, message: Broadcast, local: SFVILocal, view: SiloView, gate: Gate) -> tuple[Release, SFVILocal]:
        if message.phase == FINISH:
            return self._finish(message, local, view, gate), local
        release, stepped = (self._by_record if self.frame.by_record else self._together)(message, local, view, gate)
        stage, averages = int(message.scalars["stage"]), message.scalars["averaging"] > 0
        averaged = (local.averaged + 1 if stage == local.stage else 1) if averages else 0
        after = SFVILocal(
            *stepped,
            running_average(local.record_average, stepped.record, averaged),
            running_average(local.silo_average, stepped.silo, averaged),
            averaged,
            stage,
        )
        return release, after

    def _finish(self, message: Broadcast, local: SFVILocal, view: SiloView, gate: Gate) -> Release:
        """The silo's terms of `stationarity` at the final q, with its latents as they are reported."""
        shared = {name: self.frame.move(value) for name, value in message.tensors.items()}
        q = as_natural(self.frame.family, part(shared, "eta"))
        eps = final_draws(self.problem.seed, q.n, q.full)
        keys = range(_FINAL, _FINAL + eps.shape[0] * eps.shape[1])
        inputs = silo_inputs(self.frame, local.record_average, view, keys)
        theta, silo = part(shared, "theta"), local.silo_average
        terms = self._slope(q, eps, theta, silo, inputs)
        if asked(self.tables[FINISH]):
            at = points(self.problem.seed, q, self.problem.layout)
            terms = np.concatenate([terms, self._weigher(q, at, theta, local.record_average, silo, view, keys.stop)])
        return gate.release(np.append(as_sent(self.problem, self.tables[FINISH], terms, view), float(view.size)))

    def commit(self, local: SFVILocal, pending: Pending, accepted: int) -> SFVILocal:
        kept: SFVILocal = adopt_if_used(local, pending, accepted)
        return kept

    def local_fit(self, local: SFVILocal) -> LocalFit:
        frame = self.frame
        return LocalFit(frame.local_family, local.record_average, frame.silo_family, local.silo_average, frame.samples)

    # ---- the silo's sum at once ----

    def _together(self, message: Broadcast, local: SFVILocal, view: SiloView, gate: Gate) -> tuple[Release, _Stepped]:
        batch = self._batch(view.turn, view)
        if batch is not None:
            # At least two rows, filled up with the spare one: a traced graph treats sizes 0 and 1 as special.
            batch = np.concatenate([batch, np.full(max(2 - len(batch), 0), view.size, np.int64)])
        at = None if batch is None else torch.from_numpy(batch).to(self.problem.device)
        weights = view.weights if at is None else view.weights[at] / self.config.sampling_rate
        flat, record, record_moments, silo, silo_moments = self._step(
            *self._shared(message), take(local.record, at), local.silo, take(view.rows, at), weights,
            self._eps_record(view.turn, view, batch), self._eps_silo(view.turn, view),
            take(local.record_moments, at), local.silo_moments, self._scale(message),
        )  # fmt: skip
        values = flat.cpu().numpy().astype(np.float64)
        # Under silo privacy neither the bound nor the number of records is released.
        values = values[:-1] if self.terms else np.append(values, float(view.size))
        record, record_moments = put(local.record, at, record), put(local.record_moments, at, record_moments)
        return gate.release(values), _Stepped(record, record_moments, silo, silo_moments)

    def _step_function(
        self,
        z_global: Tensor, shift: Tensor, theta: Params, record: Params, silo: Params, rows: Params, weights: Tensor,
        eps_record: Tensor, eps_silo: Tensor, record_moments: Params, silo_moments: Params, scale: Tensor,
    ) -> tuple[Tensor, Params, Params, Params, Params]:  # fmt: skip
        g = self._gradient(z_global, shift, theta, record, silo, rows, weights, eps_record, eps_silo)
        return (
            torch.cat([flat_gradient(g._replace(silo={}), self.frame.couples), g.value.reshape(1)]),
            *self.optimizer.step(record, g.local, record_moments, scale, local_units(record)),
            *self.optimizer.step(silo, g.silo, silo_moments, scale, local_units(silo)),
        )

    # ---- a record at a time ----

    def _by_record(self, message: Broadcast, local: SFVILocal, view: SiloView, gate: Gate) -> tuple[Release, _Stepped]:
        turn, rate = view.turn, self.config.sampling_rate
        shared, scale = self._shared(message), self._scale(message)
        eps_silo = self._eps_silo(turn, view)
        record, record_moments = local.record, local.record_moments

        def stepped(rows: npt.NDArray[np.int64]) -> tuple[Any, ...]:
            at = torch.from_numpy(rows).to(self.problem.device)
            args: tuple[Any, ...] = (
                *shared, take(record, at), local.silo, take(view.rows, at), view.weights[at],
                self._eps_record(turn, view, rows), eps_silo, take(record_moments, at), {}, scale,
            )  # fmt: skip
            with threads(1):  # several would cut a block into parts at places of their own
                self._look(turn, args)
                return self._step(*args)

        def chunks() -> Iterator[tuple[Tensor, Tensor]]:
            nonlocal record, record_moments
            for rows in self._chunks(turn, view):
                found, rows, failed = _evaluated(rows, stepped, view.size)
                gate.dropped += failed
                if found is not None:
                    gradients, values, new, moments = found
                    at = torch.from_numpy(rows).to(self.problem.device)
                    record, record_moments = put(record, at, new), put(record_moments, at, moments)
                    yield gradients, values

        own = self._own(shared, local.silo, eps_silo) if self.frame.n_silo else None
        data_free = None
        if own is not None:
            assert self.frame.terms is not None
            data_free = rate * flat_gradient(own._replace(silo={}), self.frame.couples)
            if self.frame.terms.extent.side:
                data_free = torch.cat([data_free, rate * own.value.reshape(1)])
        public = [float(view.size)] if any(b.name == "records" for b in self.frame.table.blocks) else []
        release, hidden = gate.release_records(chunks(), data_free, public)
        silo, silo_moments = local.silo, local.silo_moments
        if own is not None:
            names = sorted(silo)
            parts = self.frame.move(hidden / rate).split([silo[name].numel() for name in names])
            total = {name: own.silo[name] + p.reshape(silo[name].shape) for name, p in zip(names, parts, strict=True)}
            silo, silo_moments = self.optimizer.step(silo, total, silo_moments, scale, local_units(silo))
        return release, _Stepped(record, record_moments, silo, silo_moments)

    def _record_step_function(
        self,
        z_global: Tensor, shift: Tensor, theta: Params, record: Params, silo: Params, rows: Params, weights: Tensor,
        eps_record: Tensor, eps_silo: Tensor, record_moments: Params, silo_moments: Params, scale: Tensor,
    ) -> tuple[Tensor, Tensor, Params, Params]:  # fmt: skip
        g = self._record_gradients(z_global, shift, theta, record, silo, rows, weights, eps_record, eps_silo)
        local = {name: value / self.config.sampling_rate for name, value in g.local.items()}
        stepped, moments = self.optimizer.step(record, local, record_moments, scale, local_units(record))
        return g.rows, g.values, stepped, moments

    def _own(self, shared: tuple[Tensor, Tensor, Params], silo: Params, eps_silo: Tensor) -> SiloGradient:
        """What the silo adds besides its records: prior and entropy of its silo-level latents, on made data."""
        problem, frame = self.problem, self.frame
        made = {n: v.to(problem.device) for n, v in problem.schema.dummy_rows(2).items()}
        rows = {name: frame.move(v) if v.is_floating_point() else v for name, v in made.items()}
        local = frame.local_family.init(frame.move(problem.start.z_record[:1].expand(2, -1)))
        nothing = frame.move(torch.zeros(2))
        eps = frame.move(torch.zeros(frame.samples, 2, frame.n_record))
        return self._own_terms(*shared, local, silo, rows, nothing, eps, eps_silo, frame.scalar(1.0))

    def _look(self, turn: int, args: tuple[Any, ...]) -> None:
        """Which operations the program uses for a made record with what is shared this turn, until it is traced. With
        one that is not known to keep records apart when it is mapped, they are evaluated in a loop from here on."""
        if self._looked_at == turn or self._record_gradients is self._alone or self._step.traced:
            return
        if self._looked_at is not None and isinstance(self.problem.density, GraphDensity):
            return  # it uses the same in each turn
        self._looked_at = turn
        shared, (record, silo, rows, weights, eps_record, eps_silo) = args[:3], self._made(*args)[3:9]
        first = torch.zeros(1, dtype=torch.int64, device=weights.device)
        made = (take(record, first), silo, take(rows, first), weights[:1], eps_record[:, :1], eps_silo)
        found = untested_operations(lambda: self._alone(*shared, *made))
        if found:
            self._record_gradients, self._step.mode, self._block = self._alone, "eager", _FEWEST_ROWS
            warnings.warn(
                f"the model uses {', '.join(found)}, which PyTorch is not known to keep apart for records that are "
                "evaluated together: under record privacy they are evaluated one by one, which is slow. Write it with "
                "other operations",
                SecureFVIWarning,
                stacklevel=2,
            )

    def _made(self, *args: Any) -> tuple[Any, ...]:
        """What `_record_step_function` was called with, made records in place of the silo's own."""
        z_global, shift, theta, _, silo, rows, weights, eps_record, eps_silo, _, none, scale = args
        count, frame = len(weights), self.frame
        made = {n: v.to(rows[n]) for n, v in self.problem.schema.dummy_rows(count).items()}
        start = frame.local_family.init(frame.move(self.problem.start.z_record[:1].expand(count, -1)))
        eps = torch.randn(eps_record.shape, generator=torch.Generator().manual_seed(0))
        return (
            z_global, shift, theta, start, silo, made, torch.ones_like(weights), eps.to(eps_record), eps_silo,
            self.optimizer.init(start, by_row=True), none, scale,
        )  # fmt: skip

    # ---- what both ways need ----

    def _shared(self, message: Broadcast) -> tuple[Tensor, Tensor, Params]:
        t = {name: self.frame.move(value) for name, value in message.tensors.items()}
        return t["z_global"], t["shift"], {name: t[f"theta/{name}"] for name in self.frame.theta_start}

    def _scale(self, message: Broadcast) -> Tensor:
        return self.frame.scalar(message.scalars["scale"])

    def _eps_record(self, key: int, view: SiloView, rows: npt.NDArray[np.int64] | None) -> Tensor:
        """eps_L (K, B, n_record)."""
        n, samples = self.frame.n_record, self.frame.samples
        eps = view.record_draws.normals(key, samples * n, rows)
        return self.frame.move(eps.reshape(len(eps), samples, n).transpose(0, 1).contiguous())

    def _eps_silo(self, key: int, view: SiloView) -> Tensor:
        return self.frame.move(view.silo_draws.normals(key, self.frame.n_silo))

    def _batch(self, key: int, view: SiloView) -> npt.NDArray[np.int64] | None:
        """Rows of a Poisson sample; drawn from the silo's secret, so nobody else knows who took part. None: all."""
        if self.config.sampling_rate == 1:
            return None
        joined = view.batch_draws.uniforms(key, 1)[0, : view.size, 0] < self.config.sampling_rate
        return np.flatnonzero(joined)

    def _chunks(self, key: int, view: SiloView) -> Iterator[npt.NDArray[np.int64]]:
        """The sample in blocks of one shape, whatever the data, filled up with the spare row of weight zero.

        There is a spare row in each, so that none differs from another by having one. None of the sample is cut.
        """
        batch, own = self._batch(key, view), self._block - 1
        rows = np.arange(view.size) if batch is None else batch
        blocks = max(1, math.ceil(len(rows) / own))
        filled = np.append(rows, np.full(blocks * own - len(rows), view.size, np.int64)).reshape(blocks, own)
        yield from np.pad(filled, ((0, 0), (0, 1)), constant_values=view.size)


def _rows_of_block(numbers: int) -> int:
    """Rows whose gradients, of so many numbers each, are held at once."""
    return min(_MOST_ROWS, max(_FEWEST_ROWS, 2 ** int(math.log2(max(1, _MOST_NUMBERS // max(1, numbers))))))


_Step = Callable[[npt.NDArray[np.int64]], tuple[Any, ...]]


def _evaluated(
    rows: npt.NDArray[np.int64], step: _Step, spare: int
) -> tuple[tuple[Any, ...] | None, npt.NDArray[np.int64], int]:
    """What `step` gives for a block of rows, which rows these are, and on how many it failed.

    Where the program raises anything (a matrix that cannot be factorised), the records on which it does are found and
    the block is evaluated again with the spare row in their place, which is what a zero is: in the same shape, so that
    no bit of another record's numbers moves. To fail would tell the server of them, without noise, as often as it
    asks. None where the spare row itself fails, as it then does in each block of every silo.
    """
    with contextlib.suppress(Exception):
        return step(rows), rows, 0
    failing = _failing(rows[rows < spare], len(rows), step, spare)
    rest = np.where(np.isin(rows, failing), spare, rows)
    with contextlib.suppress(Exception):
        return step(rest), rest, len(failing)
    return None, rest, int((rows < spare).sum())


def _failing(some: npt.NDArray[np.int64], size: int, step: _Step, spare: int) -> list[int]:
    """Those rows on which `step` raises, each looked at in a block of the same shape."""
    try:
        step(np.append(some, np.full(size - len(some), spare, np.int64)))
        return []
    except Exception:
        if len(some) <= 1:
            return some.tolist()
    half = len(some) // 2
    return [row for part in (some[:half], some[half:]) for row in _failing(part, size, step, spare)]
