"""A silo keeps order, whatever a server says: each question once, in order, for whom the job asks, with its own draws.

The controls are honest rounds, which go on, and the numbers of a server that would have moved a draw before.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import make_intercepts
from torch import Tensor

import secure_fvi as sf
from secure_fvi.aggregation import masked_silo
from secure_fvi.aggregation.base import FloatArray, Total, carry
from secure_fvi.aggregation.plain import SALT
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.algorithms.base import Broadcast
from secure_fvi.algorithms.natural import Natural
from secure_fvi.algorithms.pvi import PVIProgram
from secure_fvi.deployment.holding import DurableSilo, HeldStore
from secure_fvi.errors import AggregationError, BoundError, DataError, InputError, ProtocolError
from secure_fvi.fitting import build_parties
from secure_fvi.messages import ROUND, SUM, decode_broadcast, encode_broadcast
from secure_fvi.privacy.gate import Gate
from secure_fvi.silo import Limits, Past, Silo

NAME = "silo-1"
DP = sf.RecordDP(noise_multiplier=1.0, clipping_norm=1.0, noise="silo", retries=20)


def parties(algorithm: Any = None, privacy: Any = None, **options: Any) -> tuple[Any, Any, Silo]:
    problem = make_intercepts()
    algorithm = algorithm or sf.SFVI(iterations=6, sampling_rate=0.5 if privacy else 1.0)
    server, engine, _ = build_parties(
        problem.model, problem.silos, algorithm, sf.Plain(), compile=False, privacy=privacy, **options
    )
    return server, engine, engine.silos[NAME]


def asked(server: Any) -> Broadcast:
    """The next broadcast, which the server does not count as sent."""
    state = server.state
    messages = next(server.round())
    server.state = state
    return decode_broadcast(messages[NAME][1:], server.program.order.asked)


def tell(silo: Any, message: Broadcast) -> bytes:
    reply: bytes = silo.handle(ROUND + encode_broadcast(message))
    return reply


def used(message: Broadcast, index: int, round_: int, phase: str = "round") -> Broadcast:
    """The same, with the word that silo 1's answer to that question counted, in sum `index`."""
    return message._replace(accepted={NAME: index}, sums=((index, round_, phase, 0),) if index else ())


def moved(message: Broadcast) -> Broadcast:
    """The same question with another z_G: what a lying server would ask besides."""
    tensors = {**message.tensors, "z_global": message.tensors["z_global"] + 1.0}
    return message._replace(tensors=tensors)


@pytest.mark.parametrize("privacy", [None, DP])
def test_the_same_question_gets_the_same_values_and_any_other_is_refused(privacy: Any) -> None:
    """Under another index too: no new draw, noise or charge. Another broadcast of the round, or another cohort, is
    refused and changes nothing. The control is the next round."""
    server, engine, silo = parties(privacy=privacy)
    engine.run(server.round())
    message = asked(server)
    paid, first = silo.gate.paid, tell(silo, message)
    assert tell(silo, message) == first
    assert tell(silo, message._replace(sum_index=message.sum_index + 1)) == first
    before = silo.past, silo.local, silo.pending, silo.gate.paid
    later = message._replace(sum_index=message.sum_index + 5)
    lies = [
        moved(later),
        later._replace(cohort=message.cohort[:-1]),
        later._replace(round=0),
        later._replace(accepted={}),
        later._replace(accepted={NAME: later.sum_index}),
    ]
    for lie in lies:
        with pytest.raises(ProtocolError):
            tell(silo, lie)
        assert (silo.past, silo.local, silo.pending, silo.gate.paid) == before
    assert silo.gate.paid == paid + bool(privacy)
    following = used(message._replace(round=2, sum_index=later.sum_index), message.sum_index + 1, 1)
    assert tell(silo, following) != first


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("before", [False, True])
def test_two_totals_of_one_question_are_not_to_be_had(before: bool, held: bool, monkeypatch: Any) -> None:
    """A sum is made, then the same question comes at the next index, to leave one silo out: the difference is this
    silo's contribution. Or both are asked before any total. Sums may lack a silo here, so that it is the question that
    stops it. The control: survivors that are not bound to their question."""
    if not held:
        monkeypatch.setattr(masked_silo, "_question_slot", lambda question: f"question/{os.urandom(8).hex()}")
    problem = make_intercepts()
    server, engine, _ = build_parties(
        problem.model, problem.silos, sf.SFVI(iterations=6), sf.Masked(min_cohort=2, max_missing=1), compile=False
    )
    engine.run(server.round())
    message, silos, table = asked(server), engine.silos, server.program.tables["round"]
    index, bodies = message.sum_index, {}

    def ask(index: int) -> dict[str, bytes]:
        carry(server.secure_sum.prepare(index), exchange)
        bodies[index] = encode_broadcast(message._replace(sum_index=index))
        return {s: silo.handle(ROUND + bodies[index]) for s, silo in silos.items()}

    def exchange(messages: Any) -> dict[str, bytes]:
        return {s: silos[s].handle(SUM + m) for s, m in messages.items()}

    def total(index: int, answers: dict[str, bytes]) -> FloatArray:
        context = hashlib.sha256(bodies[index]).digest()
        found: Total = carry(server.secure_sum.total(index, message.cohort, table, answers, context), exchange)
        return found.values

    answers, totals = [ask(index)], list[FloatArray]()
    if not before:
        totals.append(total(index, answers[0]))
    answers.append(ask(index + 1))
    if before:
        totals.append(total(index, answers[0]))
    kept = silos[NAME].answer
    assert kept is not None
    own = kept.values
    assert np.abs(totals[0] - own).max() > 0.1
    answers[1].pop(NAME)
    with pytest.raises(ProtocolError, match="other survivors of this question") if held else nullcontext():
        totals.append(total(index + 1, answers[1]))
    if not held:
        np.testing.assert_allclose(totals[0] - totals[1], own, atol=1e-8)


def test_a_server_cannot_rewind_a_silo() -> None:
    """It may say that the last answer was used, or was not; no sum before it, after it, or besides."""
    server, engine, silo = parties()
    for _ in range(3):
        engine.run(server.round())
    message, newest = asked(server), silo.past.used
    for accepted in (0, 1, newest - 1, message.sum_index, 99):
        with pytest.raises(ProtocolError, match="older than the other's"):
            tell(silo, message._replace(accepted={NAME: accepted}))
    silo.settle({NAME: newest})  # "it was not used"
    with pytest.raises(ProtocolError, match="older than the other's"):
        tell(silo, message)  # says now that it was
    tell(silo, used(message, newest, 1))
    assert silo.past.left_out == 1


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(
    ("by", "most", "says"),
    [
        ("job", 6, "the job has no round 6"),
        ("phase", 4, "phase 'round' was answered 4 times"),
        ("site", 5, "5 rounds were answered"),
        ("nobody", 40, ""),
    ],
)
def test_rounds_come_to_an_end(by: str, most: int, says: str) -> None:
    """Of a server that goes on: by the job's own rounds, by how often a phase is asked, and by the site's word where
    the job's are more. The control looks at none, and answers 40 rounds of a job of six, as was done with a limit of
    five."""
    server, engine, silo = parties()
    server.program = parties(sf.SFVI(iterations=50))[0].program
    for one in engine.silos.values() if by != "job" else ():
        one.program.order = server.program.order
    if by == "site":
        silo.limits = Limits(rounds=5)
    if by == "phase":
        phases = silo.program.order.phases
        fewer = {name: phase._replace(most=4) for name, phase in phases.items()}
        silo.program.order = silo.program.order._replace(phases=fewer)  # type: ignore[attr-defined]
    for _ in range(most):
        engine.run(server.round())
    assert silo.past.rounds == most
    with pytest.raises(ProtocolError, match=f"^silo '{NAME}': {says}") if says else nullcontext():
        engine.run(server.round())


@pytest.mark.usefixtures("few_draws", "untraced")
@pytest.mark.parametrize("most", [3, 4])
def test_sums_besides_the_rounds_count_as_answers(most: int) -> None:
    """A count, two merges with an iteration each, and an end: four, of which a site that says 3 makes no last one."""
    algorithm = sf.SFVIAvg(rounds=2, local_steps=2, bures_iterations=2, tolerance=0.0, family="full")
    server, engine, silo = parties(algorithm)
    silo.limits = Limits(rounds=most)
    for _ in range(5):
        engine.run(server.round())
    with pytest.raises(ProtocolError, match="3 rounds were answered") if most == 3 else nullcontext():
        engine.run(server.round())
    assert silo.past.rounds == most


@pytest.mark.usefixtures("few_draws", "untraced")
def test_phases_come_in_their_order_and_number() -> None:
    """SFVI-Avg: one count, merges with their iterations, one end, and nothing after it."""
    problem = make_intercepts()
    algorithm = sf.SFVIAvg(rounds=2, local_steps=2, bures_iterations=2, tolerance=0.0, family="full")
    server, engine, _ = build_parties(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)
    silo, messages = engine.silos[NAME], []
    for _ in range(6):
        messages.append(asked(server))
        engine.run(server.round())
    assert [m.phase for m in messages] == ["count", "merge", "bures", "merge", "bures", "finish"]
    for k, old in enumerate(messages):
        for round_ in (old.round, old.round + 1, 7):
            said = server.state.answered[NAME]
            again = old._replace(round=round_, sum_index=20 + k, accepted={NAME: said[0]}, sums=(said,))
            with pytest.raises(ProtocolError, match=r"answered already|no round"):
                tell(silo, again)


@pytest.mark.usefixtures("few_draws", "untraced")
@pytest.mark.parametrize("named", [True, False])
def test_what_the_job_does_not_have_is_refused_whoever_is_named(named: bool) -> None:
    """Whom a broadcast is for follows from its round and phase where it names nobody: these have to be the job's before
    that is looked up. The control is the honest question, of the same form."""
    algorithm = sf.SFVIAvg(rounds=2, local_steps=2, bures_iterations=2, tolerance=0.0, family="full")
    server, engine, silo = parties(algorithm)
    for _ in range(2):
        engine.run(server.round())
    message, before = asked(server), (silo.past, silo.pending)
    assert (message.phase, message.scalars["iteration"]) == ("bures", 1.0)

    def ask(said: Broadcast) -> bytes:
        return silo.handle(ROUND + encode_broadcast(said, None if named else said.cohort))

    for lie, words in (
        (message._replace(phase="other"), "the algorithm has no phase of the given name"),
        (message._replace(round=2), "the job has no round 2 with this phase"),
        (message._replace(round=2**62), f"the job has no round {2**62} with this phase"),
        (message._replace(scalars={**message.scalars, "iteration": 3.0}), "no such iteration of phase 'bures'"),
        (message._replace(scalars={**message.scalars, "iteration": 1.5}), "no such iteration of phase 'bures'"),
    ):
        with pytest.raises(ProtocolError, match=words):
            ask(lie)
        assert (silo.past, silo.pending) == before
    assert ask(message)


@pytest.mark.parametrize(
    "limits", [Limits(), Limits(missing=1), Limits(differences=9), Limits(missing=1, differences=2)]
)
def test_smaller_cohorts_are_differences(limits: Limits) -> None:
    """None without the site's word; with it they are counted, told of, and come to an end."""
    server, engine, silo = parties()
    silo.limits, told = limits, list[tuple[str, str]]()
    silo.on_event = lambda *event: told.append(event)
    smaller = min(limits.differences, 9 * limits.missing)
    for round_ in range(4):
        message = asked(server)
        fewer = message._replace(cohort=(NAME, message.cohort[1]), accepted={NAME: message.accepted[NAME]})
        for cohort in ((NAME,), (NAME, NAME), (*message.cohort, "mallory"), (NAME, "mallory")):
            with pytest.raises(ProtocolError):
                tell(silo, message._replace(cohort=cohort))
        if round_ < smaller:
            tell(silo, fewer)
            silo.settle({NAME: message.sum_index})
            server.state = server.state._replace(
                accepted=dict.fromkeys(engine.silos, message.sum_index), last_index=message.sum_index,
                answered=dict.fromkeys(engine.silos, (message.sum_index, round_, "round", 0)),
                algorithm=server.state.algorithm._replace(round=round_ + 1),
            )  # fmt: skip
            for other in engine.silos.values():
                other.past = other.past._replace(used=message.sum_index, settled=silo.past.settled)
            continue
        with pytest.raises(ProtocolError, match=r"max_missing|max_differences"):
            tell(silo, fewer)
        engine.run(server.round())
    assert silo.past.differences == len(told) == smaller


def test_drawn_cohorts_are_recomputed() -> None:
    """The coin is public: a server that names other silos than it shows is refused."""
    server, engine, _ = parties(sf.SFVI(iterations=30, participation=0.67))
    lied = 0
    for _ in range(6):
        messages = next(server.round())
        name, raw = next(iter(messages.items()))
        message, silo = decode_broadcast(raw[1:], server.program.order.asked), engine.silos[name]
        other = tuple(sorted({*engine.silos} - {next(s for s in message.cohort if s != name)}))
        with pytest.raises(ProtocolError, match="not the one that the job asks"):
            tell(silo, message._replace(cohort=other))
        lied += 1
        engine.run(server.round())
    assert lied == 6


def test_a_silo_that_is_left_out_again_and_again_stops() -> None:
    server, engine, silo = parties(sf.SFVI(iterations=60))
    silo.limits, told = Limits(left_out=3), list[tuple[str, str]]()
    silo.on_event = lambda *event: told.append(event)

    def leave_out() -> None:
        engine.run(server.round())
        server.state = server.state._replace(accepted={**server.state.accepted, NAME: 0})

    for _ in range(4):
        leave_out()
    with pytest.raises(ProtocolError, match="of its answers were not used"):
        leave_out()
    assert [kind for kind, _ in told] == ["left out"] * 3


def batches(silo: Any, messages: list[Broadcast]) -> list[list[int]]:
    """Which records each of these questions drew."""
    program: Any = getattr(silo, "silo", silo).program
    drawn, batch = [], program.drawn

    def noted(key: int, view: Any) -> Any:
        drawn.append(batch(key, view).tolist())
        return batch(key, view)

    program.drawn = noted
    try:
        for message in messages:
            tell(silo, message)
    finally:
        del program.drawn
    return drawn


def test_no_number_of_the_servers_moves_a_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question draws anew, whatever its index, and the samples are those of an honest run. The control: a silo
    that keys its draws by the index, as it is after 32 bits of it were shifted out, meets one Poisson sample again and
    again at indices 2^32 apart."""
    server, _, honest = parties(privacy=DP, noise_key=b"k" * 32)
    first = asked(server)
    ascending = [used(first._replace(round=r, sum_index=1 + r), r, r - 1) for r in range(6)]
    wrapped = [
        used(m._replace(sum_index=7 + r * 2**32), 7 + (r - 1) * 2**32 if r else 0, r - 1)
        for r, m in enumerate(ascending)
    ]
    _, _, other = parties(privacy=DP, noise_key=b"k" * 32)
    drawn = batches(other, wrapped)
    assert drawn == batches(honest, ascending)
    assert len({tuple(batch) for batch in drawn}) == 6
    own = Silo._contribution
    monkeypatch.setattr(Silo, "_contribution", lambda self, m, local, _: own(self, m, local, m.sum_index % 2**32))
    again = batches(parties(privacy=DP, noise_key=b"k" * 32)[2], wrapped)
    assert len({tuple(batch) for batch in again}) == 1


def test_a_question_is_claimed_before_anything_is_drawn() -> None:
    """Killed between its claim and its answer, a silo draws for the same question what it drew, and for another one
    anew; an answer that was written down is given again, in a new session too."""
    server = parties(privacy=DP, noise_key=b"k" * 32)[0]
    message, store = asked(server), MemoryStore()

    def started() -> DurableSilo:
        fresh = parties(privacy=DP, noise_key=b"k" * 32)[2]
        return DurableSilo(fresh, HeldStore(store, lambda: None))

    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> Any:
        raise Killed

    dying = started()
    dying.silo._sum.contribute = die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        tell(dying, message)
    same = started()
    assert (same.silo.past.turn, same.silo.past.answers) == (0, ())
    assert store.get("party/answer") is None
    assert not same.answered(ROUND + encode_broadcast(message))
    kept = dict(store._slots)
    reply = tell(same, message)
    assert same.silo.past.turn == 0
    again = started()
    assert tell(again, message) == reply
    other = tell(again, message._replace(sum_index=message.sum_index + 3))
    assert other[:-SALT] == reply[:-SALT]  # plain: the values themselves
    new = MemoryStore()
    again.carry_over(HeldStore(new, lambda: None))
    store = new
    assert tell(started(), message._replace(sum_index=9))[:-SALT] == reply[:-SALT]
    with pytest.raises(ProtocolError, match="answered already"):
        tell(started(), moved(message)._replace(sum_index=10))
    store = new
    following = used(message._replace(round=1, sum_index=20), 9, 0)
    dying = started()
    dying.silo._sum.contribute = die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        tell(dying, following)
    assert not started().answered(ROUND + encode_broadcast(following))
    store = MemoryStore()
    store.put(kept)
    other = started()
    tell(other, moved(message))
    assert other.silo.past.turn == 1


@pytest.mark.parametrize("known", [True, False])
def test_a_claim_that_was_put_back_is_not_drawn_for_again_once_it_was_released(known: bool) -> None:
    """A copy of the silo's file from between its claim and its answer is put back: the ledger has that release, so that
    the question, under another index, gets another sample. Of two releases that each count on a coin of its own, both
    would else have the same one. The control is a silo that is not told of its ledger."""
    server, store = parties(privacy=DP, noise_key=b"k" * 32)[0], MemoryStore()
    message = asked(server)

    def started(released: int) -> DurableSilo:
        silo = parties(privacy=DP, noise_key=b"k" * 32)[2]
        silo._released = released
        return DurableSilo(silo, HeldStore(store, lambda: None))

    first, copies = started(0), []
    own = first.silo._contribution
    first.silo._contribution = lambda *args: (copies.append(dict(store._slots)), own(*args))[1]  # type: ignore
    (drawn,) = batches(first, [message])
    assert first.silo.gate.paid == 1
    store = MemoryStore()
    store.put(copies[0])
    again = started(int(known))
    assert again.silo.past.claimed == first.silo.past.claimed
    (other,) = batches(again, [message._replace(sum_index=9)])
    assert again.silo.gate.paid == 1
    assert (other == drawn) is not known


@pytest.mark.parametrize("known", [True, False])
def test_a_sample_is_not_drawn_again_once_it_was_charged_for(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a restart too: a release is charged, and then the sum, or what follows from noised numbers, fails, which
    is seen outside. The question that is asked again, under another index, gets another sample. The control is a silo
    whose count has not gone on, as was shipped."""
    server, _, silo = parties(privacy=DP, noise_key=b"k" * 32)
    message, contribute, drawn = asked(server), silo._sum.contribute, []

    def lost(*_: Any, **__: Any) -> bytes:
        drawn.append(silo.gate.paid)
        raise ConnectionError("the sum is lost")

    program: Any = silo.program
    batch = program.drawn
    monkeypatch.setattr(program, "drawn", lambda key, view: drawn.append(batch(key, view).tolist()) or batch(key, view))
    silo._sum.contribute = lost  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        tell(silo, message)
    silo._sum.contribute = contribute  # type: ignore[method-assign]
    if not known:
        silo.past = silo.past._replace(turn=silo.past.turn - 1)
    tell(silo, message._replace(sum_index=9))
    first, paid, second = drawn
    assert (paid, silo.gate.paid) == (1, 2)
    assert (first == second) is not known


@pytest.mark.parametrize("kept", [True, False])
def test_nor_is_it_in_another_process(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of a silo that begins anew from its file, whose count of questions is ahead of what its ledger has: one
    was refused before it was charged, and another asked in its place once the process had ended. The control is a
    silo that keeps of a charged answer that failed what it keeps of any claim."""
    server, store, drawn = parties(privacy=DP, noise_key=b"k" * 32)[0], MemoryStore(), list[Any]()
    message = asked(server)

    def started(released: int) -> DurableSilo:
        silo = parties(privacy=DP, noise_key=b"k" * 32)[2]
        silo._released, program = released, cast(Any, silo.program)
        batch = program.drawn
        monkeypatch.setattr(program, "drawn", lambda *of: drawn.append(batch(*of).tolist()) or batch(*of))
        return DurableSilo(silo, HeldStore(store, lambda: None))

    def lost(*_: Any, **__: Any) -> bytes:
        raise ConnectionError("the sum is lost")

    first = started(0)
    first.silo.gate.begin = lost  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        tell(first, message)
    second = started(0)
    second.silo._sum.contribute = lost  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        tell(second, moved(message))
    assert (first.silo.gate.paid, second.silo.gate.paid) == (0, 1)
    claim = store.get("party/claim")
    assert claim is not None
    turn, claimed, failed = msgpack.unpackb(claim)
    if not kept:
        store.put({"party/claim": msgpack.packb([turn - 1, claimed, failed])})
    tell(started(1), moved(message)._replace(sum_index=9))
    one, other = drawn
    assert (one == other) is not kept


def test_a_refused_question_leaves_a_silo_as_it_was() -> None:
    server, engine, silo = parties()
    engine.run(server.round())
    message = asked(server)
    before = silo.past, silo.local, silo.pending
    for bad in ({"scalars": {}}, {"tensors": {}}, {"phase": "merge"}, {"cohort": ()}):
        with pytest.raises((ProtocolError, KeyError)):
            tell(silo, message._replace(**bad))  # type: ignore[arg-type]
        assert (silo.past, silo.local, silo.pending) == before
    engine.run(server.round())


@pytest.mark.parametrize("held", [True, False])
def test_a_refused_question_takes_no_answer_away(held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that was claimed, and refused, is claimed on the disk yet. The one that was answered before it, under
    another index, gets what it got, also after a restart: a server that lost its last writes asks so. The control takes
    the claim for what was answered."""
    server, store = parties()[0], MemoryStore()
    message = asked(server)

    def started() -> DurableSilo:
        return DurableSilo(parties()[2], HeldStore(store, lambda: None))

    def late(*_: Any, **__: Any) -> bytes:
        raise ProtocolError("this silo is too late")

    silo = started()
    reply, again = tell(silo, message), message._replace(sum_index=message.sum_index + 9)
    monkeypatch.setattr(silo.silo._sum, "contribute", late)
    with pytest.raises(ProtocolError, match="too late"):
        tell(silo, used(message._replace(round=1, sum_index=message.sum_index + 1), message.sum_index, 0))
    fresh = started()
    assert fresh.silo.past.claimed != fresh.silo.past.answered
    if not held:
        fresh.silo.past = fresh.silo.past._replace(answered=fresh.silo.past.claimed)
        with pytest.raises(ProtocolError, match="answered already"):
            tell(fresh, again)
        return
    assert fresh.answered(ROUND + encode_broadcast(again))
    assert tell(fresh, again)[:-SALT] == reply[:-SALT]


def test_counts_are_not_drawn_from_again_after_a_resume(tmp_path: Path) -> None:
    """Under privacy a round after the checkpoint was released and charged; run again, it is drawn under a count that
    the ledger has not seen. The control is a silo that starts anew without a ledger."""
    problem = make_intercepts()
    algorithm = sf.SFVI(iterations=6, sampling_rate=0.5)
    for path, first in ((tmp_path / "ledger.sqlite", 4), (None, 0)):
        books, turns = sf.Books(path=path, job="j", block=4), []
        for _ in range(2):
            server, engine, guards = build_parties(
                problem.model, problem.silos, algorithm, sf.Plain(), compile=False, privacy=DP, books=books
            )
            server.skip_to(guards.last_index)
            for _ in range(2):
                engine.run(server.round())
            turns.append([s.past.turn for s in engine.silos.values()])
            for ledger in guards.ledgers.values():
                ledger.close()
        assert turns == [[1] * 3, [first + 1] * 3]


def test_a_checkpoint_goes_on_with_the_silos_count(tmp_path: Path) -> None:
    problem = make_intercepts()
    server, engine, _ = build_parties(problem.model, problem.silos, sf.SFVI(iterations=6), sf.Plain(), compile=False)
    for _ in range(4):
        engine.run(server.round())
    kept = engine.silo_states(server.state.accepted)
    again = build_parties(problem.model, problem.silos, sf.SFVI(iterations=6), sf.Plain(), compile=False)[1]
    assert again.silos[NAME].past == Past()
    again.restore_silos(kept)
    assert again.silos[NAME].past.turn == 3
    assert again.silos[NAME].kept == engine.silos[NAME].kept


@pytest.mark.parametrize("held", [True, False])
def test_refusals_are_no_oracle(held: bool) -> None:
    """A silo that cannot answer says so, alone. Asked with one z_G after the other, it told where its own gradient
    passes the bound, to any precision and without an answer. Now it fails once, also after a restart; the same question
    may come again. The control forgets the failure."""
    server, _, silo = parties()
    message, store = asked(server), MemoryStore()
    durable = DurableSilo(silo, HeldStore(store, lambda: None))
    failures = 0
    for power in range(60, 0, -1):
        aimed = {**message.tensors, "z_global": torch.full_like(message.tensors["z_global"], 2.0**power)}
        try:
            tell(durable, message._replace(tensors=aimed))
            break
        except AggregationError:
            failures += 1
        except ProtocolError:
            assert held
        if not held:
            silo.past = silo.past._replace(failed=False)
    assert failures == 1 if held else failures > 20
    if held:
        fresh = DurableSilo(parties()[2], HeldStore(store, lambda: None))
        with pytest.raises(ProtocolError, match="begin another job"):
            tell(fresh, message)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("algorithm", [sf.SFVI(iterations=6), sf.PVI(family="full", local_steps=20)])
@pytest.mark.later("algorithm1-False")
def test_a_failure_is_nobodys_in_masked_sums(alone: bool, algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A party among others whose data cannot answer tells its own site alone: what it sends is as long as ever, and the
    total of all is none, from then on, whatever is asked, also after a restart. The control: one that nobody told to
    keep it to itself refuses, in its own name, and its first refusal says in which of the rounds."""
    problem, told = make_intercepts(), list[object]()
    server, engine, _ = build_parties(problem.model, problem.silos, algorithm, sf.Masked(), compile=False)
    silo = engine.silos[NAME]
    if alone:
        silo.on_unfit = told.append
    engine.run(server.round())
    contribute = silo._contribution

    def past_its_bound(message: Broadcast, *rest: Any) -> Any:
        if message.round == 1:
            raise BoundError("silo 'silo-1': its part of 'direct' exceeds the declared bound")
        return contribute(message, *rest)

    monkeypatch.setattr(silo, "_contribution", past_its_bound)
    if not alone:
        with pytest.raises(AggregationError, match="silo-1"):
            engine.run(server.round())
        return
    state, message = server.state, asked(server)
    body = ROUND + encode_broadcast(message, server.program.order.asked(1, message.phase))
    replies = {name: one.handle(body) for name, one in engine.silos.items()}
    assert len({len(reply) for reply in replies.values()}) == 1
    assert [str(t) for t in told] == ["silo 'silo-1': its part of 'direct' exceeds the declared bound"]
    server.state = state
    with pytest.raises(AggregationError, match="some silo's data could not answer") as caught:
        engine.run(server.round())  # the same question again, to the same silos
    assert NAME not in str(caught.value)
    assert silo.past.failed
    store = MemoryStore()
    DurableSilo(silo, HeldStore(store, lambda: None)).carry_over(HeldStore(store, lambda: None))
    silo.past = Past()
    assert DurableSilo(silo, HeldStore(store, lambda: None)).silo.past.failed
    early = MemoryStore()  # written before it failed, as by one that was killed since; its site knows that it did
    silo.past, failed = silo.past._replace(failed=False), silo.past
    DurableSilo(silo, HeldStore(early, lambda: None)).carry_over(HeldStore(early, lambda: None))
    for knows in (False, True):
        silo.past = Past(failed=knows)
        assert DurableSilo(silo, HeldStore(early, lambda: None)).silo.past.failed is knows
    silo.past = failed
    following = used(message._replace(round=2, sum_index=message.sum_index + 9), message.sum_index, 1, message.phase)
    following = following._replace(accepted=dict.fromkeys(message.cohort, message.sum_index))
    assert len(tell(silo, following)) == len(replies[NAME])
    assert silo.past.failed
    assert len(told) == 1


@pytest.mark.parametrize("whose", ["its site's", "nobody's", "the server's", "its gate's"])
def test_only_a_spoilt_total_hides_whose_data_could_not_answer(whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts for nothing must look like any other contribution: under masks, from a silo whose site is told. One
    that nobody is told for, whose sums the server sees, or whose answers get noise, refuses, once, and then whatever
    else is asked. The control is the first, which answers on."""
    aggregation = sf.Plain() if whose == "the server's" else sf.Masked()
    problem, privacy, told = make_intercepts(), DP if whose == "its gate's" else None, list[object]()
    server, engine, _ = build_parties(
        problem.model, problem.silos, sf.SFVI(iterations=6), aggregation, privacy=privacy, compile=False
    )
    engine.run(server.round())
    silo, message = engine.silos[NAME], asked(server)
    silo.on_unfit = None if whose == "nobody's" else told.append

    def past_its_bound(*_: Any) -> Any:
        raise BoundError("its part of 'direct' exceeds the declared bound")

    monkeypatch.setattr(silo, "_contribution", past_its_bound)
    alone = whose == "its site's"
    with nullcontext() if alone else pytest.raises(AggregationError, match="exceeds the declared bound"):
        tell(silo, message)
    assert len(told) == alone
    following = used(message._replace(round=2, sum_index=message.sum_index + 1), message.sum_index, 1)
    following = following._replace(accepted=dict.fromkeys(message.cohort, message.sum_index))
    with nullcontext() if alone else pytest.raises(ProtocolError, match="begin another job"):
        tell(silo, following)
    assert silo.past.failed


@pytest.mark.parametrize(
    ("error", "year", "uncentred"),
    [
        (BoundError("past its bound"), 2000.0, True),
        (BoundError("past its bound"), 0.0, False),
        (FloatingPointError(), 2000.0, None),
    ],
)
def test_a_refusal_says_whether_a_column_is_far_from_zero(
    error: Exception, year: float, uncentred: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fit` then tries no other algorithm. Said of a contribution past its bound alone: what cannot be computed has
    other causes. The controls are the same column about its mean, and the other error."""
    server, _, silo = parties()
    rows = dict(silo.view.rows)
    rows["year"] = year + torch.arange(-3.0, 4.0).repeat(8)[: len(rows["y"])]
    silo.view = silo.view._replace(rows=rows)

    def failing(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(silo, "_contribution", failing)
    with pytest.raises(AggregationError) as caught:
        tell(silo, asked(server))
    assert isinstance(caught.value, BoundError) is (uncentred is not None)
    assert getattr(caught.value, "uncentred", None) is uncentred


def test_a_total_that_is_none_moves_nothing_whatever_its_numbers_are() -> None:
    """A spoilt total is uniform over the ring, so that a small sum's few numbers may all lie within their bounds: its
    zeros tell. The control is the same total with zeros."""
    server, _, _ = parties()
    program, message, state = server.program, asked(server), server.state.algorithm
    honest = np.zeros(program.tables["round"].size)
    assert program.update(state, message, honest.copy(), 1.0)[0].round == state.round + 1
    for at, value in ((-1, 1e-5), (-2, -1.0), (-1, np.nan)):
        spoilt = honest.copy()
        spoilt[at] = value
        with pytest.raises(AggregationError, match="round 0: some silo's data could not answer"):
            program.update(state, message, spoilt, 1.0)


@pytest.mark.parametrize("unused", [0, 1, None])
@pytest.mark.later("0")
def test_a_server_cannot_call_the_others_answers_unused(unused: int | None) -> None:
    """A silo that missed the merge sends nothing in the Bures iterations: one that is asked alone, or told that it
    alone was used, would send its own term as the total. The controls: a site that allows it, and the honest word."""
    problem = make_intercepts()
    algorithm = sf.SFVIAvg(rounds=2, local_steps=2, bures_iterations=2, tolerance=0.0, family="full")
    server, engine, _ = build_parties(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)
    silo = engine.silos[NAME]
    silo.limits = Limits(unused=unused)
    engine.run(server.round())
    engine.run(server.round())
    message = asked(server)
    assert message.phase == "bures"
    lie = message._replace(accepted={**dict.fromkeys(message.cohort, 1), NAME: message.accepted[NAME]})
    if unused is None:
        tell(silo, lie)
        return
    with pytest.raises(ProtocolError, match="lacks 2 silos"):
        tell(silo, lie)
    tell(silo, message)


def _merged(limits: Limits) -> tuple[Any, dict[str, Silo], Broadcast, dict[str, int]]:
    """Silos that answered the count and the merge; the others under larger indices than silo 1, at the server's whim.
    The server, the silos, the Bures iteration that it asks next, and the indices of the merge by silo."""
    problem = make_intercepts()
    algorithm = sf.SFVIAvg(rounds=2, local_steps=2, bures_iterations=2, tolerance=0.0, family="full")
    server, engine, _ = build_parties(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)
    for silo in engine.silos.values():
        silo.limits = limits
    count = asked(server)
    first = {s: 1 if s == NAME else 10 for s in engine.silos}
    for s, silo in engine.silos.items():
        tell(silo, count._replace(sum_index=first[s]))
    state = server.state.algorithm
    server.state = server.state._replace(algorithm=state._replace(phase="merge", records=60))
    merge, second = asked(server), {s: 2 if s == NAME else 20 for s in engine.silos}
    for s, silo in engine.silos.items():  # to each, as if all had been asked in its own sum
        said = merge._replace(accepted=dict.fromkeys(first, first[s]), sums=((first[s], 0, "count", 0),))
        tell(silo, said._replace(sum_index=second[s]))
    bures = merge._replace(phase="bures", scalars={**merge.scalars, "iteration": 1.0}, sum_index=30)
    root = {"root": torch.ones(1, dtype=torch.float64)}
    return server, engine.silos, bures._replace(tensors=root), second


@pytest.mark.parametrize("unused", [0, None])
@pytest.mark.later("None")
def test_an_index_does_not_say_when_it_was_asked(unused: int | None) -> None:
    """The others' count went by a larger index than silo 1's merge: by numbers they would not seem behind it. They
    hold the server to what their own sums answered, and silo 1 to what it says of theirs. The control: a site that
    lets others be behind."""
    _, silos, bures, second = _merged(Limits(unused=unused))
    behind = {s: second[s] if s == NAME else 10 for s in silos}  # their merge "was not used"
    merged = (2, 0, "merge", 0)
    honest = bures._replace(accepted=behind, sums=(merged, (10, 0, "count", 0)))
    feigned = bures._replace(accepted=behind, sums=(merged, (10, 0, "merge", 0)))
    twice = bures._replace(accepted=behind, sums=(merged, (10, 0, "merge", 0), (10, 0, "count", 0)))
    other = silos["silo-2"]
    if unused is None:
        tell(silos[NAME], honest)
    else:
        with pytest.raises(ProtocolError, match="lacks 2 silos"):
            tell(silos[NAME], honest)
        with pytest.raises(ProtocolError, match="two sums of one question"):
            tell(silos[NAME], feigned)
    alone = bures._replace(accepted=dict.fromkeys(silos, 10), sums=((10, 0, "merge", 0),))
    with pytest.raises(ProtocolError, match="sum 10 did not answer what the server says"):
        tell(other, alone)
    with pytest.raises(ProtocolError, match="two questions of one sum"):
        tell(other, twice)


def test_a_question_asked_again_says_no_more_of_others() -> None:
    """Asked first with the honest word, and then, as a retry, with another of the others: the values are the same, and
    the others would send theirs of before. The control is the retry with the same word."""
    _, silos, bures, _ = _merged(Limits(unused=0))
    told = bures._replace(accepted=dict.fromkeys(silos, 2), sums=((2, 0, "merge", 0),))
    first = tell(silos[NAME], told)
    assert tell(silos[NAME], told._replace(sum_index=31)) == first
    lie = told._replace(
        sum_index=32, accepted={s: 2 if s == NAME else 10 for s in silos}, sums=(*told.sums, (10, 0, "count", 0))
    )
    with pytest.raises(ProtocolError, match="lacks 2 silos"):
        tell(silos[NAME], lie)


def test_no_silos_site_is_blown_up() -> None:
    """PVI's broadcast has the dampings of sums: one of -10^6 would make the sites the whole of a total. The control is
    the honest broadcast."""
    server, engine, silo = parties(sf.PVI(rounds=6, local_steps=5))
    engine.run(server.round())
    message = asked(server)
    for value in (-1e6, 1.5, float("nan")):
        lied = message.tensors["dampings"].clone()
        lied[0] = value
        with pytest.raises(ProtocolError, match=r"between 0 and 1|no finite number"):
            tell(silo, message._replace(tensors={**message.tensors, "dampings": lied}))
    tell(silo, message)


@pytest.mark.parametrize(
    "algorithm", [sf.PVI(rounds=3, local_steps=5), sf.BCM(prior="split", total_records=60, local_steps=5)],
    ids=lambda a: a.name,
)  # fmt: skip
def test_a_q_that_is_no_distribution_is_the_messages_fault(monkeypatch: pytest.MonkeyPatch, algorithm: Any) -> None:
    """And is refused before anything is claimed. The control: the silo's own data could not answer, which its site
    counts against them."""
    server, _, silo = parties(algorithm)
    message, told = asked(server), list[str]()
    silo.on_event = lambda kind, what: told.append(kind)
    lie = message._replace(tensors={**message.tensors, "q": -message.tensors["q"]})
    for _ in range(2):
        with pytest.raises(ProtocolError, match="'silo-1': the q that the server names is no distribution"):
            tell(silo, lie)
    tell(silo, message)
    assert not told
    _, _, silo = parties(algorithm)
    silo.on_event = lambda kind, what: told.append(kind)
    monkeypatch.setattr(Natural, "proper", True)
    with pytest.raises(AggregationError):
        tell(silo, lie)
    assert told == ["unanswerable"]


def _lacking(limits: Limits, cut: int = 0) -> tuple[Any, Any, list[str]]:
    """A masked job whose sums may lack two silos; a driver of its next round in which the named ones are lost. cut: so
    many of the last are not asked, though the job asks all."""
    problem = make_intercepts()
    sizes = [*problem.silos, *({"y": problem.silos[1]["y"][k : k + 9]} for k in (0, 9))]
    sums = sf.Masked(min_cohort=2, max_missing=2)
    server, engine, _ = build_parties(problem.model, sizes, sf.SFVI(iterations=9), sums, compile=False)
    for silo in engine.silos.values():
        silo.limits = limits
    broadcast = server.program.broadcast
    asked_ = tuple(sorted(engine.silos))[: len(sizes) - cut]
    if cut:
        server.program.broadcast = lambda *said: broadcast(*said)._replace(cohort=asked_)

    def round_without(*lost: str) -> Any:
        exchanges = server.round()
        messages = next(exchanges)
        try:
            while True:
                replies = engine.exchange(messages)
                if next(iter(messages.values()))[:1] == ROUND:
                    replies = {s: r for s, r in replies.items() if s not in lost}
                messages = exchanges.send(replies)
        except StopIteration as done:
            return done.value

    return round_without, engine, sorted(engine.silos)


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.later("2")
def test_totals_that_lack_a_silo_are_differences_too(most: int) -> None:
    """Each lacking another silo, five sums were each silo's term to 8e-10. Now the site's word on how many sums may
    lack any is on totals as on cohorts. The control: sites that do not count them."""
    round_without, engine, names = _lacking(Limits(missing=1, differences=most, lacking=True))
    round_without()
    for k in range(most):
        round_without(names[k])
        round_without()
    assert {s.past.differences for s in engine.silos.values()} <= {most}
    with pytest.raises((AggregationError, ProtocolError), match="max_missing = "):
        round_without(names[most])
    free, _, _ = _lacking(Limits())
    for name in names:
        free(name)


def test_a_cohort_and_its_total_lack_no_more_together() -> None:
    """A cohort that lacks one and survivors that lack another were a total of n - 2 where n - 1 was promised. The
    control is each alone."""
    for short, lost, refused in ((1, 1, True), (1, 0, False), (0, 1, False)):
        limits = Limits(missing=1, differences=5, lacking=True)
        round_without, _, names = _lacking(limits, cut=short)
        if refused:
            with pytest.raises((AggregationError, ProtocolError), match="max_missing = 0"):
                round_without(*names[:lost])
        else:
            round_without(*names[:lost])


def test_whatever_fails_on_data_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's LinAlgError is no torch's: 47 refusals in one job gave a silo's mean. Of all that an operation may raise,
    the first is the last; under privacy there is noise instead. The control: a message that is at fault."""
    for error in (np.linalg.LinAlgError("x"), RuntimeError("x"), KeyError("x"), AssertionError(), TypeError("x")):
        for privacy in (None, DP):
            server, _, silo = parties(privacy=privacy)
            message, told = asked(server), []
            silo.on_event = lambda *event, told=told: told.append(event)

            def fails(*_: Any, error: Exception = error) -> Any:
                raise error

            monkeypatch.setattr(type(silo.program), "contribute", fails)
            if privacy:
                tell(silo, message)
                assert (silo.gate.paid, silo.past.failed) == (1, False)
            else:
                with pytest.raises((type(error), AggregationError)):
                    tell(silo, message)
                with pytest.raises(ProtocolError, match="begin another job"):
                    tell(silo, moved(message))
                assert [kind for kind, _ in told] == ["unanswerable"]
            monkeypatch.undo()
    server, _, silo = parties()
    with pytest.raises(ProtocolError):
        tell(silo, asked(server)._replace(tensors={}))
    assert not silo.past.failed


def test_a_servers_number_of_records_is_held_against_nobodys() -> None:
    """BCM's split of the prior asked whether a silo has more records than the server named: a bit, without noise or
    charge. A number that is not the job's own public figure is refused whatever the records, and before the first round
    under privacy that figure is held against nobody's either. The control: without privacy one bit is told, and counted
    as of the data."""
    privacy = sf.SiloDP(noise_multiplier=1.0, noise="silo", retries=0)
    silos = [{"x": torch.randn(n), "y": torch.randn(n)} for n in (30, 20, 10)]
    model = sf.FederatedModel(_line, "row")

    def built(total: int, privacy: Any = privacy) -> tuple[Any, Any]:
        algorithm = sf.BCM(prior="split", total_records=total, local_steps=2)
        return build_parties(model, silos, algorithm, sf.Plain(), compile=False, privacy=privacy)[:2]

    for named in (60.0, 29.0, 1.0):
        server, engine = built(60)
        lie = asked(server)._replace(scalars={**asked(server).scalars, "records": named})
        for silo in engine.silos.values():
            with pytest.raises(ProtocolError) if named != 60.0 else nullcontext():
                tell(silo, lie)
            assert silo.gate.paid == (named == 60.0)
    for total in (29, 30):
        server, engine = built(total)
        for silo in engine.silos.values():
            tell(silo, asked(server))
    with pytest.raises(DataError, match="this silo alone has more records"):
        built(29, None)
    built(30, None)


def _line(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(0.0, 1.0))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(x * beta, 1.0), obs=y)


def _thresholds(y: Tensor) -> None:
    """A program whose factorisation fails where y is above 100 + z: what a lying server would ask about."""
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    with pyro.plate("row", len(y)):
        covariance = (100 + z - y).reshape(-1, 1, 1)
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(1), covariance), obs=y.unsqueeze(-1))


def _is_below(algorithm: Any, privacy: Any, least: float, most: float = 7.0) -> tuple[bool, Silo]:
    """Whether silo 1, with `most` as its largest value, answers a server that asks whether all lie below `least`."""
    torch.manual_seed(0)
    silos = [{"y": torch.tensor([0.1, 0.2, most])}, {"y": torch.randn(5)}, {"y": torch.randn(5)}]
    model = sf.FederatedModel(_thresholds, "row")
    server, engine, _ = build_parties(model, silos, algorithm, sf.Plain(), compile=False, privacy=privacy)
    message, silo = asked(server), engine.silos[NAME]
    lie = torch.tensor([least - 100.0], dtype=torch.float64)
    if "q" in message.tensors:
        lie = torch.cat([lie * 1e4, torch.tensor([1e4], dtype=torch.float64)]).reshape(message.tensors["q"].shape)
    told = {"q" if "q" in message.tensors else "z_global": lie}
    if "q" in told:
        told["units"] = server.program.families.units(server.program.families.unpack(lie))
    try:
        tell(silo, message._replace(tensors={**message.tensors, **told}))
    except AggregationError:
        return False, silo
    return True, silo


@pytest.mark.parametrize("algorithm", [sf.SFVI(iterations=3), sf.PVI(rounds=3, local_steps=2)], ids=lambda a: a.name)
def test_a_failing_operation_is_no_answer_without_noise(algorithm: Any) -> None:
    """A silo that fails where a value is above what the server names would tell it, unnoised and uncharged, as often
    as it asks. Under privacy it answers and is charged in both cases. The control has no privacy, and tells."""
    for privacy in (DP, sf.SiloDP(noise_multiplier=1.0, noise="silo")):
        for least in (5.0, 9.0):
            answered, silo = _is_below(algorithm, privacy, least)
            assert answered
            assert silo.gate.paid == 1
    assert [_is_below(algorithm, None, least)[0] for least in (5.0, 9.0)] == [False, True]


def test_of_records_one_fails_and_the_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it holds, the sum is that of the others, so that one record moves it by no more than the norm. The
    control is a record that does not fail."""
    sums: list[FloatArray] = []

    def shown(self: Gate, hidden: int) -> Any:
        def note(total: Tensor) -> Tensor:
            sums.append(total.numpy().copy())
            return total

        return note

    monkeypatch.setattr(Gate, "_noiser", shown)
    for most in (7.0, 8.0, 0.3):
        assert _is_below(sf.SFVI(iterations=3), DP, 5.0, most)[0]
    assert np.array_equal(sums[0], sums[1])
    assert (sums[0] != 0).any()
    assert 1e-3 < np.linalg.norm(sums[2] - sums[0]) <= 1 + 1e-9


def _curved(y: Tensor) -> None:
    """A likelihood that is quadratic in z unless a value lies above 5."""
    z = pyro.sample("z", dist.Normal(0.0, 1.0))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(z, 1.0), obs=y)
        pyro.factor("tail", -(y.clamp(min=5.0) - 5.0) * z**4)


@pytest.mark.parametrize("privacy", [DP, sf.SiloDP(noise_multiplier=1.0, noise="silo")], ids=lambda p: p.unit)
def test_a_likelihood_that_one_record_makes_no_gaussian_is_no_refusal(privacy: Any) -> None:
    """PVI in closed form refused where a silo's own likelihood was not quadratic, which one record decides. Under
    privacy it answers and is charged in both cases. The control has no privacy, and tells."""
    algorithm, model = sf.PVI(rounds=2, local_optimizer="closed_form"), sf.FederatedModel(_curved, "row")
    for most in (1.0, 7.0):
        silos = [{"y": torch.tensor([0.1, most])}, {"y": torch.zeros(3)}, {"y": torch.zeros(3)}]
        for dp in (privacy, None):
            server, engine, _ = build_parties(model, silos, algorithm, sf.Plain(), compile=False, privacy=dp)
            silo, message = engine.silos[NAME], asked(server)
            if dp is None and most > 5:
                with pytest.raises(InputError, match="silo 'silo-1': its log likelihood is not quadratic"):
                    tell(silo, message)
                continue
            tell(silo, message)
            assert silo.gate.paid == (dp is not None)
            assert silo.gate.dropped == (dp is not None and most > 5)


def test_a_likelihood_that_is_no_gaussian_is_refused_on_made_data() -> None:
    """At all parties alike: under privacy every silo would send noise alone, and nobody would be told."""

    def counts(y: Tensor) -> None:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("row", len(y)):
            pyro.sample("y", dist.Poisson(z.exp()), obs=y)

    algorithm = sf.PVI(rounds=2, local_optimizer="closed_form")
    with pytest.raises(InputError, match=r"^the log likelihood is not quadratic"):
        build_parties(
            sf.FederatedModel(counts, "row"), [{"y": torch.ones(3)}] * 3, algorithm, sf.Plain(), compile=False,
            privacy=DP,
        )  # fmt: skip


@pytest.mark.parametrize("fails", [KeyError, AssertionError, InputError, MemoryError])
@pytest.mark.parametrize("algorithm", [sf.SFVI(iterations=3), sf.PVI(rounds=3, local_steps=2)], ids=lambda a: a.name)
def test_whatever_a_program_raises_on_a_record_is_no_answer(
    fails: Any, algorithm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that looks a value up, say, and does not find it. The silo answers, is charged, and counts what it left out
    for its own log; its paper trail, whose length others see, gets no row. The control has no privacy, and tells."""
    for privacy in (DP, sf.SiloDP(noise_multiplier=1.0, noise="silo"), None):
        model = sf.FederatedModel(_thresholds, "row")
        silos = [{"y": torch.tensor([0.1, 0.2, 0.3])}, {"y": torch.zeros(5)}, {"y": torch.zeros(5)}]
        server, engine, _ = build_parties(model, silos, algorithm, sf.Plain(), compile=False, privacy=privacy)
        silo, message, told = engine.silos[NAME], asked(server), list[Any]()
        silo.on_event = lambda *event, told=told: told.append(event)

        def failing(*_: Any) -> Any:
            raise fails("on this record")

        caplog.clear()
        owner, name = silo.program, "fit" if isinstance(silo.program, PVIProgram) else "_step"
        if by_record := isinstance(privacy, sf.RecordDP) and name == "_step":
            owner, name = silo.program._step, "run"
        monkeypatch.setattr(owner, name, Failing(getattr(owner, name), failing))
        if privacy is None:
            with pytest.raises(fails):
                tell(silo, message)
            continue
        tell(silo, message)
        assert silo.gate.paid == 1
        assert silo.gate.dropped == (3 if by_record else 1)
        assert f"{silo.gate.dropped} records or contributions failed" in caplog.text
        assert not told


class Failing:
    """Something of a program that fails when it is called on data."""

    def __init__(self, inner: Any, failing: Any) -> None:
        self._inner, self._failing = inner, failing

    def __call__(self, *args: Any) -> Any:
        return self._failing(*args)

    def ready(self, *_: Any) -> Any:
        return self._failing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
