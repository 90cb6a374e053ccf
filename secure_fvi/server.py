"""The server: broadcasts, adds up, updates. It holds no data, no local parameter and no silo's contribution.

`round` is a generator over exchanges, so that any engine can carry it: it yields one message per silo and is sent
the replies of those that answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from secure_fvi.aggregation.base import Exchanges, SumServer
from secure_fvi.algorithms.base import Problem, Program, Step
from secure_fvi.messages import ROUND, SUM, encode_broadcast

T = TypeVar("T")


class ServerState(NamedTuple):
    """What the server needs to go on after a crash."""

    algorithm: Any
    last_index: int  # of the last sum begun; the next is larger
    accepted: int  # of the last sum used
    records: int | None  # N over all silos, once a full cohort has answered


class Server:
    """The aggregating party."""

    def __init__(self, problem: Problem, program: Program, secure_sum: SumServer) -> None:
        self.problem, self.program, self._sum = problem, program, secure_sum
        self._table = program.table()
        self.state = ServerState(program.init(), 0, 0, None)

    def round(self) -> Exchanges[Step]:
        """One round: one secure sum. Raises AggregationError when too few silos survive; the state is unchanged
        but for the index, which is never used again."""
        state = self.state
        index = state.last_index + 1
        self.state = state._replace(last_index=index)
        yield from _wrapped(self._sum.prepare(index))
        message = self.program.broadcast(state.algorithm, index, state.accepted)
        body = encode_broadcast(message)
        replies = yield dict.fromkeys(message.cohort, ROUND + body)
        total = yield from _wrapped(
            self._sum.total(index, message.cohort, self._table, replies, hashlib.sha256(body).digest())
        )
        answered = int(self._table.split(total.values)["records"])
        full = len(message.cohort) == len(self.problem.silos)
        records = answered if full and total.survivors == message.cohort else state.records
        scale = self._scale(message.cohort, total.survivors, answered, records)
        algorithm, step = self.program.update(state.algorithm, message, total.values, scale)
        self.state = ServerState(algorithm, index, index, records)
        return step

    def _scale(self, cohort: tuple[str, ...], survivors: tuple[str, ...], answered: int, records: int | None) -> float:
        """What stands in for silos that are not in the total: J / m for a drawn cohort, N / sum N_j after losses."""
        if survivors != cohort and records is not None:
            return records / answered
        return len(self.problem.silos) / len(survivors)


def _wrapped(exchanges: Exchanges[T]) -> Exchanges[T]:
    """The secure sum's own messages, marked as such."""
    try:
        messages = next(exchanges)
        while True:
            replies: Mapping[str, bytes] = yield {silo: SUM + body for silo, body in messages.items()}
            messages = exchanges.send(replies)
    except StopIteration as stop:
        return stop.value
