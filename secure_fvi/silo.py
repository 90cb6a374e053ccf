"""A silo: the only party that holds data. A state machine over bytes; it opens no connection.

Data, local variational parameters and the silo's secret stay in this object. What leaves is what `handle` returns:
contributions, which pass the gate and then the secure sum, and the sum's own protocol messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from secure_fvi.aggregation.base import SumSilo
from secure_fvi.algorithms.base import Pending, SiloProgram
from secure_fvi.errors import ProtocolError
from secure_fvi.messages import CLIP, ROUND, SUM, decode_broadcast
from secure_fvi.privacy.gate import Gate


class Silo:
    """One institution's party."""

    def __init__(
        self,
        name: str,
        program: SiloProgram,
        view: Any,
        secure_sum: SumSilo,
        gate: Gate,
    ) -> None:
        """`view`: what the program may use of the silo's data; `view.size` is the number of records."""
        self.name, self.program, self.view, self.size = name, program, view, view.size
        self._sum, self.gate = secure_sum, gate
        self.local = program.init_local(view)
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

    def settle(self, accepted: Mapping[str, int]) -> None:
        """Let the algorithm decide on the pending local state; `accepted` is a broadcast's, or the server's."""
        if self.pending is not None:
            self.local = self.program.commit(self.local, self.pending, accepted.get(self.name, 0))
            self.pending = None
