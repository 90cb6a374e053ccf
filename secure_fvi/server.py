"""The server: broadcasts, adds up, updates. It holds no data, no local parameter and no silo's contribution.

`round` is a generator over exchanges, so that any engine can carry it: it yields one message per silo and is sent
the replies of those that answered.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from secure_fvi.aggregation.base import Exchanges, FloatArray, SumServer, Total
from secure_fvi.algorithms.base import CLIP, ITERATION, Broadcast, Step
from secure_fvi.errors import AggregationError
from secure_fvi.messages import ROUND, SUM, encode_broadcast, question_digest
from secure_fvi.privacy.events import Composed
from secure_fvi.privacy.gate import NoiseSource, curated
from secure_fvi.privacy.terms import REPLACE, Terms, description, linked_by

if TYPE_CHECKING:
    from secure_fvi.algorithms.kit import Program

T = TypeVar("T")


class ServerState(NamedTuple):
    """What the server needs to go on after a crash."""

    algorithm: Any
    last_index: int  # of the last sum begun; the next is larger
    accepted: Mapping[str, int]  # by silo, index of the last sum used that has its term
    records: int | None  # N over all silos, once a full cohort has answered
    clip: float  # clipping norm of the next round under differential privacy, 0 without
    answered: Mapping[str, tuple[int, int, str, int]]  # of the sums in `accepted`: index, round, phase, iteration


class Observer(Protocol):
    """Hears what the server arrives at, for audits. It copies what it keeps and changes nothing."""

    def total(self, index: int, total: Total) -> None:
        """The total of sum `index`, as the secure sum gave it."""
        ...

    def released(self, index: int, values: FloatArray) -> None:
        """What the algorithm is given of it: with the server's own noise, where there is any."""
        ...


class Server:
    """The aggregating party."""

    def __init__(self, problem: Any, program: Program, secure_sum: SumServer, noise: NoiseSource | None = None) -> None:
        """`problem`: a `Problem` or a `VerticalProblem`; the server itself reads the silos' ids."""
        self.problem, self.program, self._sum = problem, program, secure_sum
        self._noise = noise or NoiseSource()
        clip = max((terms.settings.clipping_norm for terms in program.terms.values()), default=0.0)
        self.state = ServerState(program.init(), 0, {}, None, clip, {})
        self._observers: list[Observer] = []

    @property
    def secure_sum(self) -> SumServer:
        """The server's half of the secure sum."""
        return self._sum

    def observe(self, observer: Observer) -> None:
        """Let `observer` hear of every sum from now on."""
        self._observers.append(observer)

    @property
    def rounds(self) -> int:
        """Rounds done."""
        return self.program.rounds(self.state.algorithm)

    def claim(self) -> dict[str, Any] | None:
        """What the job guarantees, None without differential privacy."""
        return claim(self.program.terms, self._noise) if self.program.terms else None

    def skip_to(self, index: int) -> None:
        """Use no sum index up to `index` again: silos may have released under them before a crash."""
        self.state = self.state._replace(last_index=max(self.state.last_index, index))

    def round(self) -> Exchanges[Step]:
        """One secure sum, which is a round or a phase of one.

        Raises AggregationError when too few silos survive; the state is unchanged but for the index, which is never
        used again.
        """
        state = self.state
        index = state.last_index + 1
        self.state = state._replace(last_index=index)
        yield from _wrapped(self._sum.prepare(index))
        message = self.program.broadcast(state.algorithm, index, state.accepted)
        sums = tuple(sorted({state.answered[s] for s in message.cohort if s in state.answered}))
        message = message._replace(accepted={s: state.accepted.get(s, 0) for s in message.cohort}, sums=sums)
        terms, table = self.program.terms.get(message.phase), self.program.tables[message.phase]
        if terms is not None and terms.adaptive:
            message = message._replace(scalars={**message.scalars, CLIP: state.clip})
        body = encode_broadcast(message, self.program.order.asked(message.round, message.phase))
        replies = yield dict.fromkeys(message.cohort, ROUND + body)
        if self.program.order.phases[message.phase].ends and len(replies) < len(message.cohort):
            return self._lost(message, len(replies))
        context, question = hashlib.sha256(body).digest(), question_digest(message)
        total = yield from _wrapped(self._sum.total(index, message.cohort, table, replies, context, question))
        for observer in self._observers:
            observer.total(index, total)
        values, clip = total.values, state.clip
        if terms is not None:
            values = curated(values, terms, clip, self._noise, index)
            if terms.adaptive:
                below = float(table.split(values)[terms.side_name])
                clip = terms.next_clip(below, len(total.survivors), clip)
        for observer in self._observers:
            observer.released(index, values)
        records, scale = self._absent(message.cohort, total.survivors, table.split(values).get("records"))
        algorithm, step = self.program.update(state.algorithm, message, values, scale)
        said = index, message.round, message.phase, int(message.scalars.get(ITERATION, 0))
        accepted = {**state.accepted, **dict.fromkeys(total.survivors, index)}
        answered = {**state.answered, **dict.fromkeys(total.survivors, said)}
        self.state = ServerState(algorithm, index, accepted, records, clip, answered)
        return step

    def _lost(self, message: Broadcast, answered: int) -> Step:
        """After a sum that ends the job and is not made, since no silo signs it without all: the algorithm hears of a
        total that lacks silos, and has no use for one."""
        scale = len(message.cohort) / answered if answered else math.inf
        nothing = np.zeros(self.program.tables[message.phase].size)
        algorithm, step = self.program.update(self.state.algorithm, message, nothing, scale)
        self.state = self.state._replace(algorithm=algorithm)
        return step

    def _absent(
        self, cohort: tuple[str, ...], survivors: tuple[str, ...], count: FloatArray | None
    ) -> tuple[int | None, float]:
        """N where it is known, and the factor for silos that are not in the total: J / m for a drawn cohort,
        N / sum N_j after losses. Raises AggregationError where silos say that they have no records."""
        records = self.state.records
        if count is not None:
            if len(cohort) == len(self.problem.silos) and survivors == cohort:
                records = max(records or 0, int(count))  # a silo that is in a merge no more counts none of its own
            if survivors != cohort and records is not None:
                if int(count) < 1:
                    raise AggregationError(
                        f"the {len(survivors)} silos of a total say that they have {int(count)} records in all; one of "
                        "them tells a wrong number"
                    )
                return records, max(1.0, records / int(count))
        return records, len(self.problem.silos) / len(survivors)


def _wrapped(exchanges: Exchanges[T]) -> Exchanges[T]:
    """The secure sum's own messages, marked as such."""
    try:
        messages = next(exchanges)
        while True:
            replies: Mapping[str, bytes] = yield {silo: SUM + body for silo, body in messages.items()}
            messages = exchanges.send(replies)
    except StopIteration as stop:
        return stop.value


#: Beyond this epsilon the guarantee is void, and the tighter accountant not worth its time.
_MEANINGFUL = 100.0


def claim(terms: Mapping[str, Terms], noise: NoiseSource) -> dict[str, Any]:
    """Unit, epsilon and delta of all releases of a job, the mechanism's numbers and what was declared public. charged:
    what a ledger takes for it on which nothing was spent, by RDP, since nothing else adds up over jobs."""
    from secure_fvi.privacy.accountants import epsilon

    first = next(iter(terms.values()))
    settings = first.settings
    job = Composed(tuple(t.job for t in terms.values()))
    by_rdp = epsilon(job, settings.delta, "rdp")
    meaningful = by_rdp < _MEANINGFUL
    exact = meaningful and not any(t.resolution for t in terms.values())
    spent = epsilon(job, settings.delta, "pld") if exact else by_rdp
    found = {
        "unit": settings.unit,
        "epsilon": spent,
        "delta": settings.delta,
        "accountant": "pld" if exact else "rdp",
        "charged": epsilon(job, settings.delta, "ledger") if meaningful else by_rdp,
        **description(terms, noise),
    }
    if first.adjacency == REPLACE:
        found["linked"] = linked(spent, settings.delta, first.cohort, f"a person's columns at all {first.cohort} silos")
    elif (records := linked_by(settings)) > 1:
        whose = f"someone who has up to {records} records, as in so many silos"
        found["linked"] = {**linked(spent, settings.delta, 1, whose), "records": records, "by": "noise for all of them"}
    elif settings.unit == "record":
        found["linked"] = linked(spent, settings.delta, 2, "someone who has two records, as in two silos")
    return found


def linked(epsilon: float, delta: float, records: int, whose: str) -> dict[str, Any]:
    """What a job guarantees for so many records together, which meet one noise: group privacy."""
    from secure_fvi.privacy.accountants import of_group

    together = of_group(epsilon, delta, records)
    return {"whose": whose, "records": records, "epsilon": together[0], "delta": together[1]}
