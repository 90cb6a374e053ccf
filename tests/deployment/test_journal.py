"""The journal of a silo whose batches move few rows: what is written for a message, and what a restart makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import pyro
import pyro.distributions as dist
import pytest
import torch

import secure_fvi as sf
from secure_fvi.aggregation.plain import SALT
from secure_fvi.aggregation.store import NONE, MemoryStore, Still
from secure_fvi.deployment import holding
from secure_fvi.deployment.holding import DurableSilo, HeldStore
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.fitting import build_parties
from secure_fvi.messages import ROUND, decode_broadcast, encode_broadcast
from secure_fvi.states import Moved

SILO, ROUNDS = "silo-1", 12


class Killed(BaseException):
    """The end of a silo's process."""


class Disk(MemoryStore):
    """Outlives the silo's process; told to, it fails before or after a write, or before rows are taken away."""

    def __init__(self) -> None:
        super().__init__()
        self.dies, self.written = "", 0

    def put(self, slots: Mapping[str, bytes], rising: Mapping[str, int] = NONE, still: Still = NONE) -> None:
        answer = "party/answer" in slots
        if answer and self.dies == "before":
            raise Killed
        super().put(slots, rising, still)
        self.written += sum(map(len, slots.values()))
        if answer and self.dies == "after":
            raise Killed

    def drop(self, slots: Any) -> None:
        if self.dies == "between":
            raise Killed
        super().drop(slots)


def _parties(rate: float = 0.02) -> tuple[Any, Any]:
    """A silo of 400 records with a latent each, and one of three whose answers may be lost."""

    def program(y: torch.Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("row", len(y)):
            own = pyro.sample("own", dist.Normal(mu, 1.0))
            pyro.sample("y", dist.Normal(own, 1.0), obs=y)

    data = [{"y": torch.linspace(-1, 1, n, dtype=torch.float64)} for n in (400, 3)]
    algorithm = sf.SFVI(iterations=ROUNDS, sampling_rate=rate, average_last=0.75)
    server, engine, _ = build_parties(sf.FederatedModel(program, "row"), data, algorithm, sf.Plain(), compile=False)
    return server, engine


def _started(disk: MemoryStore, rate: float = 0.02) -> DurableSilo:
    return DurableSilo(_parties(rate)[1].silos[SILO], HeldStore(disk, lambda: None))


def _played(disk: Disk, plan: Mapping[int, str], rate: float = 0.02) -> tuple[list[bytes], DurableSilo]:
    """A job: the silo's answers by round, and the silo. plan: by round, at what write it is killed, and started again
    for the same message; "lost": its answer is, and it is started again before the next."""
    server, engine = _parties(rate)
    party, answers = _started(disk, rate), []
    for k in range(ROUNDS):
        conversation = server.round()
        messages, what = next(conversation), plan.get(k, "")
        if what in ("before", "after"):
            disk.dies = what
            with pytest.raises(Killed):
                party.handle(messages[SILO])
            disk.dies = ""
        if what:
            party = _started(disk, rate)
        replies = {name: silo.handle(messages[name]) for name, silo in engine.silos.items() if name != SILO}
        replies[SILO] = party.handle(messages[SILO])
        answers.append(replies[SILO][:-SALT])  # the rest is at random, and another party's here
        if what == "lost":
            del replies[SILO]
        with pytest.raises(StopIteration):
            conversation.send(replies)
    return answers, party


def _numbers(party: DurableSilo) -> dict[str, torch.Tensor]:
    assert party.silo.pending is not None
    local = party.silo.program.commit(party.silo.local, party.silo.pending, party.silo.pending.sum_index)
    return {name: value.clone() for name, value in local.by_row.items()}


@pytest.mark.later
@pytest.mark.parametrize("rate", [0.02, 0.25], ids=["records alone", "made one state now and then"])
def test_killed_at_any_write_it_answers_the_same_bytes(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after a write, and before what it replaces is taken away; an answer that was lost is in both jobs."""
    monkeypatch.setattr(holding, "_SHORT", 10)
    monkeypatch.setattr(holding, "_TIMES", 1)
    whole, party = _played(Disk(), {7: "lost"}, rate)
    plan = {2: "before", 3: "after", 4: "before", 5: "after", 6: "after", 7: "lost", 8: "after", 9: "before"}
    disk = Disk()
    killed, other = _played(disk, plan, rate)
    assert killed == whole
    again = _started(disk, rate)
    for found in (other, again):
        assert found.silo.past == party.silo.past
        assert isinstance(found.silo.pending.local, Moved)  # type: ignore[union-attr]
        ends = _numbers(party), _numbers(found)
        assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_what_is_written_follows_the_batch() -> None:
    """Of 400 records with a latent each, 8 move in a round: a tenth of the state. The control is a round of all."""
    few, all_of = Disk(), Disk()
    _played(few, {})
    _played(all_of, {}, 1.0)
    state = len(few._slots["party/state"])
    assert few.written - state < 0.1 * ROUNDS * state
    assert all_of.written > ROUNDS * 0.5 * state


def test_records_that_the_state_holds_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or where the process was killed before that, when it is started again."""
    monkeypatch.setattr(holding, "_SHORT", 10)
    monkeypatch.setattr(holding, "_TIMES", 1)
    disk = Disk()
    _played(disk, {}, 0.25)
    kept = [slot for slot in disk._slots if slot.startswith("party/journal/")]
    assert 0 < len(kept) < ROUNDS - 2
    first = min(int(slot.rpartition("/")[2]) for slot in kept)
    assert msgpack.unpackb(disk._slots["party/state"], strict_map_key=False)[1] == first - 1
    disk._slots[f"party/journal/{first - 1}"] = b"of a process that was killed"
    _started(disk, 0.25)
    assert f"party/journal/{first - 1}" not in disk._slots
    disk = Disk()
    disk.dies = "between"
    with pytest.raises(Killed):
        _played(disk, {}, 0.25)


@pytest.mark.later
@pytest.mark.parametrize("gone", ["the last record", "one between"])
def test_a_journal_with_a_gap_is_refused(gone: str) -> None:
    disk = Disk()
    _played(disk, {})
    numbers = sorted(int(slot.rpartition("/")[2]) for slot in disk._slots if slot.startswith("party/journal/"))
    del disk._slots[f"party/journal/{numbers[-1] if gone == 'the last record' else numbers[3]}"]
    with pytest.raises(InputError, match="restored from a copy"):
        _started(disk)


def test_a_journal_beside_a_state_that_nothing_was_asked_of_is_refused() -> None:
    """The state was restored from the copy of a silo that had answered nothing. The control is its own state."""
    disk = Disk()
    _played(disk, {})
    _started(disk)
    fields = msgpack.unpackb(disk._slots["party/state"], strict_map_key=False)
    disk._slots["party/state"] = msgpack.packb([*fields[:4], -1, b""])
    with pytest.raises(InputError, match="the silo's journal does not follow its state"):
        _started(disk)


def test_after_a_write_that_failed_the_state_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What of the failed one is on the disk nobody knows, so no record may rest on it; and the answer, asked for again,
    does not leave before it is there."""
    server, engine = _parties()
    disk = Disk()
    party = _started(disk)

    def turn(fails: bool) -> None:
        conversation = server.round()
        messages = next(conversation)
        if fails:
            with monkeypatch.context() as full:
                full.setattr(Disk, "put", _full(Disk.put))
                with pytest.raises(OSError, match="full"):
                    party.handle(messages[SILO])
        replies = {name: silo.handle(messages[name]) for name, silo in engine.silos.items() if name != SILO}
        with pytest.raises(StopIteration):
            conversation.send({**replies, SILO: party.handle(messages[SILO])})

    for fails in (False, False, True, False):
        turn(fails)
    assert msgpack.unpackb(disk._slots["party/state"], strict_map_key=False)[1] == 4
    again = _started(disk)
    assert again.silo.past == party.silo.past
    ends = _numbers(again), _numbers(party)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def _full(put: Any) -> Any:
    def failing(self: Disk, slots: Mapping[str, bytes], *rest: Any) -> None:
        if "party/answer" in slots:
            raise OSError("the disk is full")
        put(self, slots, *rest)

    return failing


def test_a_refused_message_moves_no_row() -> None:
    """The server says that the last answer was used, and then breaks the order: what was written on its word is taken
    back."""
    server, engine = _parties()
    party = _started(Disk())
    for _ in range(2):
        conversation = server.round()
        messages = next(conversation)
        replies = {name: silo.handle(messages[name]) for name, silo in engine.silos.items() if name != SILO}
        with pytest.raises(StopIteration):
            conversation.send({**replies, SILO: party.handle(messages[SILO])})
    before = {name: value.clone() for name, value in party.silo.local.by_row.items()}
    message = decode_broadcast(next(server.round())[SILO][1:], server.program.order.asked)
    with pytest.raises(ProtocolError, match="says it did"):
        party.handle(ROUND + encode_broadcast(message._replace(sums=())))
    assert all(torch.equal(party.silo.local.by_row[name], value) for name, value in before.items())
    party.handle(ROUND + encode_broadcast(message))
    assert not torch.equal(party.silo.local.by_row["seen"], before["seen"])
