"""The silos' half of a baseline: one local fit against the prior that the baseline gives it."""

from __future__ import annotations

import numpy as np

from secure_fvi.algorithms.base import Broadcast, LocalFit, Pending, Problem, SiloView
from secure_fvi.algorithms.baselines import COUNT, Baseline
from secure_fvi.algorithms.baselines_frame import BaselineFrame
from secure_fvi.algorithms.natural import Natural, nothing
from secure_fvi.algorithms.pvi_fit import OwnState, SiloFit
from secure_fvi.algorithms.pvi_start import first_start
from secure_fvi.errors import AggregationError, InputError, ProtocolError
from secure_fvi.privacy.gate import Gate, Release
from secure_fvi.trees import to_numpy


class BaselineSilo:
    """`algorithms.base.SiloProgram`. A silo's state is that of its own latents: there is no site."""

    def __init__(self, config: Baseline, problem: Problem) -> None:
        self.config, self.problem = config, problem
        self.frame = frame = BaselineFrame(config, problem)
        self.tables, self.terms, self.order = frame.tables, frame.terms, frame.order
        self.fit = SiloFit(frame.base.config, problem, frame.base)

    def init_local(self, view: SiloView) -> OwnState:
        most = self.frame.public_records
        if most is not None and view.size > most:  # before the first round: later it would tell how many there are
            raise InputError(f"silo '{view.silo}': total_records = {most}, but this silo alone has more records")
        return self.fit.init(view)

    def contribute(self, message: Broadcast, local: OwnState, view: SiloView, gate: Gate) -> tuple[Release, OwnState]:
        if message.phase == COUNT:
            return gate.release(np.array([float(view.size)])), local
        prior = self._prior(message, view)
        base = self.frame.base
        begin = prior if local.visits else first_start(prior, base.config.start_spread, base.problem.seed)
        fitted = self.fit(view.turn + 1, {}, begin, prior, local, view)
        if self.frame.base.terms is None and self.frame.all_at_once and not fitted.sane:
            # A zero in its place would make the total the others'.
            raise AggregationError(
                f"silo '{view.silo}': its local fit ran off; lower learning_rate, standardise the columns, or use pvi"
            )
        change = fitted.q.minus(prior) if fitted.sane else nothing(prior.n, prior.full)
        values = to_numpy(change.pack())
        if self.frame.base.terms is None:
            counts = [float(view.size)] if self.frame.all_at_once else []
            values = np.concatenate([values, counts, [float(not fitted.sane)]])
        return gate.release(values), fitted.own if fitted.sane else local

    def commit(self, local: OwnState, pending: Pending, accepted: int) -> OwnState:
        """The pending state in any case: own latents are where a silo's last fit left them, used or not."""
        return pending.local

    def local_fit(self, local: OwnState) -> LocalFit:
        return self.fit.local_fit(local)

    def _prior(self, message: Broadcast, view: SiloView) -> Natural:
        """c_j: q as it was sent, or this silo's share of it."""
        q = self.frame.base.unpack(message.tensors["q"])
        if not self.frame.split:
            return q
        records = message.scalars["records"]
        if not records >= 1:
            raise ProtocolError("the broadcast's number of records is none")
        # A silo that alone has more records than the server names says nothing of it.
        return nothing(q.n, q.full).plus(q, min(1.0, view.size / records))
