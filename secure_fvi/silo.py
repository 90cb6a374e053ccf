"""A silo: the only party that holds data. A state machine over bytes; it opens no connection.

Data, local variational parameters and the silo's secret stay in this object. What leaves is what `handle` returns:
contributions, which pass the gate and then the secure sum, and the sum's own protocol messages.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import torch

from secure_fvi.aggregation.base import SumSilo
from secure_fvi.algorithms.base import Pending, Problem, SiloProgram, SiloView
from secure_fvi.discovery import start_at_silo
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.federated_model import Records
from secure_fvi.messages import CLIP, ROUND, SUM, decode_broadcast
from secure_fvi.privacy.gate import Gate
from secure_fvi.randomness import UNIT_ID, KeyedDraws

_SPARE_ID = -2


class Silo:
    """One institution's party."""

    def __init__(
        self,
        name: str,
        problem: Problem,
        program: SiloProgram,
        records: Records,
        record_ids: npt.NDArray[np.int64],
        secret: bytes,
        secure_sum: SumSilo,
        gate: Gate,
    ) -> None:
        self.name, self.problem, self.program, self.size = name, problem, program, records.size
        self._sum, self.gate = secure_sum, gate
        self.view = _view(name, problem, records, record_ids, secret)
        problem.density.check_global_density(self.view.rows, name)
        self.local = program.init_local(self.view)
        self.pending: Pending | None = None

    def __repr__(self) -> str:
        return f"Silo('{self.name}')"

    def handle(self, message: bytes) -> bytes:
        """Answer the server. Raises ProtocolError or AggregationError; nothing is released then."""
        kind, body = message[:1], message[1:]
        if kind == SUM:
            return self._sum.handle(body)
        if kind != ROUND:
            raise ProtocolError(f"silo '{self.name}': a message of unknown kind")
        broadcast = decode_broadcast(body)
        self.settle(broadcast.accepted)
        index, cohort = broadcast.sum_index, broadcast.cohort
        self.gate.begin(index, broadcast.phase, len(cohort), broadcast.scalars.get(CLIP))
        release, local = self.program.contribute(broadcast, self.local, self.view, self.gate)
        context = hashlib.sha256(body).digest()
        answer = self._sum.contribute(release.sum_index, cohort, self.gate.table, release.values, context)
        self.pending = Pending(broadcast.sum_index, local)
        return answer

    def settle(self, accepted: int) -> None:
        """Let the algorithm decide on the pending local state, now that the last used sum is known."""
        if self.pending is not None:
            self.local = self.program.commit(self.local, self.pending, accepted)
            self.pending = None


def _view(silo: str, problem: Problem, records: Records, ids: npt.NDArray[np.int64], secret: bytes) -> SiloView:
    """Records with one spare row at the end (a copy of the first, of weight zero), and the silo's draws."""
    if ids.shape != (records.size,):
        raise InputError(f"silo '{silo}': {ids.shape[0]} record ids for {records.size} records")
    if len(np.unique(ids)) != len(ids) or (ids < 0).any():
        raise InputError(f"silo '{silo}': record ids must be different whole numbers of at least 0")
    rows = {name: torch.cat([t, t[:1]]).to(problem.device) for name, t in records.rows.items()}
    weights = torch.ones(records.size + 1, dtype=problem.dtype, device=problem.device)
    weights[-1] = 0.0
    keyed = np.append(ids, _SPARE_ID)
    start = start_at_silo(problem.model, rows, problem.schema.constants, problem.dtype, silo)
    return SiloView(
        silo,
        rows,
        weights,
        records.size,
        start,
        KeyedDraws(secret, b"records", keyed),
        KeyedDraws(secret, b"batches", keyed),
        KeyedDraws(secret, b"silo/" + silo.encode(), np.array([UNIT_ID])),
    )
