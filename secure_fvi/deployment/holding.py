"""What a party keeps on disk between two messages of a job, so that it can be killed at any moment.

State, answers and a silo's claims on questions are on the disk before anything leaves: after a power cut a silo has
forgotten no question that it answered, and draws for none as it drew before. What the secure sum claims in between
outlives the process and, at 0.1 ms instead of 4 ms, not the machine: a session's secrets are not used again once the
machine has been restarted (`SessionLost`, and all open a new one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from secure_fvi import wire
from secure_fvi.aggregation.store import NONE, SealedStore, SqliteStore, Still, Store
from secure_fvi.algorithms.base import Pending
from secure_fvi.errors import InputError
from secure_fvi.files import own_file
from secure_fvi.messages import ROUND
from secure_fvi.silo import Answer, Past, Silo
from secure_fvi.states import moves, pack_state, unpack_state

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_STATE, _ANSWER, _CLAIM, _BOOT = "party/state", "party/answer", "party/claim", "party/boot"
_JOURNAL = "party/journal/"
_VERSION = 12  # of what lies there
#: How many times the bytes of a whole state the records after it may take, and how many they may in any case.
_TIMES, _SHORT = 2, 2**20
_SOURCE = Path("the silo's state")


def boot_id() -> bytes:
    """Names the time since the machine was started; empty where the system has no such name."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b""


def open_store(path: Path, power_safe: bool = False) -> SqliteStore:
    """A store whose claims survive the process, and with power_safe, or where the system cannot tell of its restarts,
    the machine too, as all that is put does."""
    return SqliteStore(path, power_safe=power_safe or not boot_id())


def open_held(
    path: Path, secret: bytes, power_safe: bool = False, job: str | None = None, begun: bool = False
) -> HeldStore:
    """Such a store in the file `path`, its values sealed with the site's `secret` (32 bytes) for this file of `job`:
    the one of whose name its folder is, unless said; files of other jobs have the same names.

    begun: something was written there before. Raises RecordError where it is gone or empty then, which SQLite would
    take for a new one: the party would have forgotten what it answered."""
    with own_file(path):
        if begun and not (path.exists() and path.stat().st_size):
            raise ValueError("nothing is there")
    inner = open_store(path, power_safe)
    return HeldStore(SealedStore(inner, secret, f"{job or path.parent.name}/{path.name}".encode()), inner.close, path)


class HeldStore:
    """A store whose writes within `together` reach the disk as one, or not at all. What it reads raises RecordError,
    which names the file `path`, where that was altered."""

    def __init__(self, inner: Store, close: Callable[[], None], path: Path = Path("a store in memory")) -> None:
        self.inner, self.close, self._path = inner, close, path
        self._held: dict[str, bytes] | None = None
        self._rising: dict[str, int] = {}
        self._still: dict[str, int | None] = {}

    def __repr__(self) -> str:
        return "HeldStore(...)"

    @contextmanager
    def together(self) -> Iterator[None]:
        """Hold back all `put`s until the end; nothing is written where an error is raised. What they rest on is looked
        at then."""
        self._held, self._rising, self._still = {}, {}, {}
        try:
            yield
            self.inner.put(self._held, self._rising, self._still)
        finally:
            self._held, self._rising, self._still = None, {}, {}

    def claim(self, slot: str, value: bytes, settle: bool = True, still: Still = NONE) -> bytes:
        with own_file(self._path):
            return self.inner.claim(slot, value, settle, still)

    def put_now(self, slots: Mapping[str, bytes]) -> None:
        """Not held back: what has to be known whatever comes of the rest."""
        self.inner.put(slots)

    def put(self, slots: Mapping[str, bytes], rising: Mapping[str, int] = NONE, still: Still = NONE) -> None:
        if self._held is None:
            self.inner.put(slots, rising, still)
        else:
            self._held.update(slots)
            self._still = {**still, **self._still}  # of what is held back itself nothing is there yet
            self._rising.update({slot: max(number, self._rising.get(slot, -1)) for slot, number in rising.items()})

    def get(self, slot: str) -> bytes | None:
        if self._held is not None and slot in self._held:
            return self._held[slot]
        with own_file(self._path):
            return self.inner.get(slot)

    def risen(self, slot: str) -> int:
        return max(self._rising.get(slot, -1), self.inner.risen(slot))

    def drop(self, slots: Iterable[str]) -> None:
        self.inner.drop(slots)

    def same_boot(self) -> bool:
        """Whether the machine has not been restarted since the store was begun."""
        now = boot_id()
        return not now or self.claim(_BOOT, now) == now


class DurableSilo:
    """A silo that writes its answer down, with the state that goes with it, before the answer leaves, and before it
    draws anything, its claim on the question.

    A broadcast that comes again gets the same bytes again. Messages of the secure sum need no such care: its silo half
    answers them from its own store.

    Of a state of which few rows move at a time (`Moved`) not all is written for every message, but a record of a
    journal: what moved, and on which word of the server's what had moved before was kept. The state is its last whole
    copy with the records since; once these take twice the bytes of the copy, a new one takes their place.
    """

    def __init__(self, silo: Silo, store: HeldStore) -> None:
        """Takes up what `store` holds of the silo. Raises InputError for another version's."""
        self.silo, self._store = silo, store
        self._packed: tuple[Any, bytes] = (None, b"")  # the state packed last: what was pending is settled next
        self._written: Pending | None = None  # what was pending when the last record, or whole state, was written
        self._unsure = False  # whether a write failed, so that nobody knows what of it is on the disk
        self._number, self._first = 0, 1  # of the last record, and of the first that the whole state does not hold
        self._bytes, self._whole = 0, 0  # of the records since the whole state, and of that one
        kept, answer, claim, known = store.get(_STATE), store.get(_ANSWER), store.get(_CLAIM), silo.past.failed
        if kept is not None:
            self._restore(kept, answer)
        if claim is not None:
            turn, claimed, failed = wire.own(claim, "the silo's claim")
            if turn > silo.past.turn:  # refused since, or killed before the answer was written down: it never left
                silo.past = silo.past._replace(turn=turn, claimed=claimed, failed=failed)
        silo.past = silo.past._replace(failed=silo.past.failed or known)  # the site may know what is not in this file
        silo.on_claim = self._claim

    def __repr__(self) -> str:
        return f"DurableSilo({self.silo!r})"

    def handle(self, message: bytes) -> bytes:
        """`Silo.handle`. Raises ProtocolError as well where this silo and the server disagree on the past."""
        if message[:1] != ROUND:
            return self.silo.handle(message)
        before, first = self.silo.answer, self._first
        try:
            with self._store.together():
                reply = self.silo.handle(message)
                if self.silo.answer is not before or self._unsure:
                    self._store.put({**self._next(), _ANSWER: self._answer()})
        except BaseException:
            self._unsure |= self.silo.answer is not before
            raise
        self._written, self._unsure = self.silo.pending, False
        self._forget(range(first, self._first))
        return reply

    @property
    def newest(self) -> int:
        """The sum for which this silo made its last answer, and charged it; 0 for none."""
        return self.silo.past.made

    def answered(self, message: bytes) -> bool:
        """Whether the answer to this broadcast, or to its question under another index, is kept."""
        return self.silo.answered(message)

    def settle(self, accepted: int) -> None:
        """At the end of a job."""
        self.silo.settle({self.silo.name: accepted})

    def carry_over(self, store: HeldStore) -> None:
        """Begin `store`, of a new session, with this state: what was released under the old secrets is masked anew, and
        not drawn again, whatever bytes ask for it: those of the old answer would fit no sum."""
        past, answer = self.silo.past, self.silo.answer
        if answer is not None:
            self.silo.answer = answer._replace(broadcast=b"", reply=b"")
        store.put(
            {
                _STATE: self._state(self._number),
                _CLAIM: msgpack.packb([past.turn, past.claimed, past.failed]),
                _ANSWER: self._answer(),
            }
        )

    def _claim(self, past: Past) -> None:
        self._store.put_now({_CLAIM: msgpack.packb([past.turn, past.claimed, past.failed])})

    # ---- read ----

    def _restore(self, kept: bytes, answer: bytes | None) -> None:
        silo = self.silo
        fields = wire.own(kept, "the silo's state")
        if len(fields) != 6 or fields[0] != _VERSION:
            raise InputError("the silo's state of this job was written by another version; finish the job with it")
        _, self._number, past, local, index, waiting = fields
        template = silo.local
        silo.past = unpack_state(past, Past(), _SOURCE)
        silo.local = unpack_state(local, template, _SOURCE)
        silo.pending = None if index < 0 else Pending(index, unpack_state(waiting, template, _SOURCE))
        self._first, self._whole = self._number + 1, len(kept)
        self._forget(self._stale())
        self._go_through()
        self._written = silo.pending
        if answer:
            *number, broadcast, values, reply = wire.own(answer, "the silo's answer")
            if number and number[0] != self._number:
                raise InputError(f"the silo's answer is of record {number[0]} of its journal, whose last is "
                                 f"{self._number}: some of its state was restored from a copy")  # fmt: skip
            silo.answer = Answer(broadcast, np.frombuffer(values, np.float64), reply)

    def _stale(self) -> list[int]:
        """Records that the whole state holds, of a process that was killed before it had taken them away."""
        number, found = self._number, list[int]()
        while self._store.get(f"{_JOURNAL}{number}") is not None:
            found.append(number)
            number -= 1
        return found

    def _go_through(self) -> None:
        """The records since the whole state."""
        silo = self.silo
        while (record := self._store.get(f"{_JOURNAL}{self._number + 1}")) is not None:
            past, decided, index, waiting = wire.own(record, "the silo's journal")
            before = silo.pending
            if before is None:
                raise InputError("the silo's journal does not follow its state: one of them was restored from a copy")
            if decided >= 0:
                silo.local = silo.program.commit(silo.local, before, decided)
            silo.past = unpack_state(past, Past(), _SOURCE)
            same = before.local if not waiting else unpack_state(waiting, silo.local, _SOURCE)
            silo.pending = Pending(index, same)
            self._number += 1
            self._bytes += len(record)

    # ---- written ----

    def _next(self) -> dict[str, bytes]:
        """What the answer that was just made adds to what is kept: a record, or the whole state anew."""
        self._number += 1
        record = self._record()
        if record is not None and self._bytes + len(record) <= max(_TIMES * self._whole, _SHORT):
            self._bytes += len(record)
            return {f"{_JOURNAL}{self._number}": record}
        state = self._state(self._number)
        self._first, self._bytes, self._whole = self._number + 1, 0, len(state)
        return {_STATE: state}

    def _record(self) -> bytes | None:
        """None where the state did not come about by rows that moved."""
        before, now, decided = self._written, self.silo.pending, self.silo.decided
        if self._unsure or before is None or now is None or not moves(before.local) or not moves(now.local):
            return None
        same = now.local is before.local
        waiting = b"" if same else pack_state(now.local)
        packed: bytes = msgpack.packb([pack_state(self.silo.past), -1 if same else decided, now.sum_index, waiting])
        return packed

    def _forget(self, numbers: Iterable[int]) -> None:
        """Records that a whole state holds."""
        if slots := [f"{_JOURNAL}{number}" for number in numbers]:
            self._store.drop(slots)

    def _state(self, number: int) -> bytes:
        pending = self.silo.pending
        local = self._pack(self.silo.local)
        index, waiting = (-1, b"") if pending is None else (pending.sum_index, self._pack(pending.local))
        packed: bytes = msgpack.packb([_VERSION, number, pack_state(self.silo.past), local, index, waiting])
        return packed

    def _answer(self) -> bytes:
        answer = self.silo.answer
        if answer is None:
            return b""
        values = answer.values.astype(np.float64).tobytes()
        packed: bytes = msgpack.packb([self._number, answer.broadcast, values, answer.reply])
        return packed

    def _pack(self, state: Any) -> bytes:
        if self._packed[0] is not state:
            self._packed = state, pack_state(state)
        return self._packed[1]
