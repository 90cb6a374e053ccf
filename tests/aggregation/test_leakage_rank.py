"""A lying server that acts at random, on real silos: what it can solve for is what is disclosed, and no more.

Each behaviour asks questions, under one index or several, in the same words or others, to all or to some; names sets
of survivors, one to all or two to two halves, among them sets that the graph of masks does not connect; collects
signatures and shares; drops answers, repeats messages, restarts silos, and runs a second process over a silo's store.
Silos are whole `Silo` objects with their gates and masked sums, over stores that outlive them. What it learns is
worked out from the bytes that came out of them (leakage.py). Each check that keeps it out is removed in a control,
and the test then finds the leak.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from leakage import Answer, Knowledge, Named, P, Verdict, rank, reduced
from sum_network import carry, names

from secure_fvi.aggregation import Block, BlockTable, Masked, masked_silo
from secure_fvi.aggregation.graph import Neighbourhood
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.messages import (
    Contribution,
    RevealRequest,
    SetSignature,
    Shares,
    SignRequest,
    pack,
    unpack,
)
from secure_fvi.aggregation.onetime import Asked
from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.session import Session
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.algorithms.base import ROUND_PHASE, Broadcast, Order, Phase, form
from secure_fvi.deployment.holding import DurableSilo, HeldStore
from secure_fvi.errors import AggregationError, ProtocolError
from secure_fvi.messages import ROUND, SUM, encode_broadcast
from secure_fvi.privacy.gate import Gate
from secure_fvi.silo import Limits, Silo

TABLE = BlockTable((Block("gradient", (3,), 10.0), Block("count", (1,), 1e6, integer=True)))
ROUNDS = 1_000_000


class View(NamedTuple):
    """Of a silo's data: nothing but whose it is."""

    silo: str
    size: int = 10
    turn: int = 0


class State(NamedTuple):
    """A silo's own between rounds."""

    round: int = 0


class Answers:
    """A program whose answer follows from silo and round alone, the worst case: asked twice, it says the same."""

    tables, terms = {ROUND_PHASE: TABLE}, {}

    def __init__(self, ids):
        rounds = {ROUND_PHASE: Phase(range(ROUNDS), most=ROUNDS)}
        self.order = Order(rounds, lambda *_: tuple(ids), {ROUND_PHASE: form({}, "word")})

    def init_local(self, view):
        return State()

    def contribute(self, message, local, view, gate):
        seed = hashlib.sha256(f"{view.silo}/{message.round}".encode()).digest()
        rng = np.random.default_rng(int.from_bytes(seed[:8], "big"))
        return gate.release(np.append(rng.uniform(-10, 10, 3), float(rng.integers(1, 1000)))), local

    def commit(self, local, pending, accepted):
        return local


class Drawing(Answers):
    """A program that draws anew whenever it computes, the worst case for masks that are used twice."""

    rng = np.random.default_rng(99)

    def contribute(self, message, local, view, gate):
        return gate.release(np.append(self.rng.uniform(-10, 10, 3), float(self.rng.integers(1, 1000)))), local


class Spied:
    """A silo's half of the sum, with the equations of what it sends written down; it changes nothing."""

    def __init__(self, inner: MaskedSilo, tape: dict[bytes, Answer], place: int) -> None:
        self.inner, self.tape, self.place = inner, tape, place

    def handle(self, message):
        return self.inner.handle(message)

    def absent_from(self, question):
        return self.inner.absent_from(question)

    def shown(self, question):
        return self.inner.shown(question)

    def left_out(self, question):
        return self.inner.left_out(question)

    @property
    def whole(self):
        return self.inner.whole

    @property
    def keys(self):
        return self.inner.keys

    def contribute(self, index, cohort, table, values, context, question=b"", most_missing=None, past=None, *rest):
        inner = self.inner
        message = inner.contribute(index, cohort, table, values, context, question, most_missing, past, *rest)
        if inner.whole:
            session, there = inner._state.agreed.session, frozenset(inner._roster.places[s] for s in cohort)
            peers, seeds = [v for v in session.neighbours(self.place) if v in there], []
            asked = Asked(index, inner._roster.bitmap(there), table.digest, context, question)
            masks = inner._whole_masks(session, asked, there, past)
        else:
            batch = inner._state.batch_of(index)
            peers, seeds = (
                [v for v in batch.session.neighbours(self.place) if v in batch.depositors],
                [("b", self.place, index)],
            )
            masks = batch.masks(index, table.digest, context)
        seeds += [("pair", *sorted((self.place, v)), index) for v in peers]
        rows = tuple((m.key, m.negative, seed) for m, seed in zip(masks, seeds, strict=True))
        payload = bytes(unpack(message, Contribution).payload)
        self.tape[payload] = Answer(self.place, None, index, context, payload, values.copy(), rows)
        return message


class Setting(NamedTuple):
    """A roster. degree: of a k-regular graph that is forced on few silos; None: what the toolkit chooses."""

    silos: int
    colluders: int = 0
    max_missing: int = 0
    degree: int | None = None
    min_cohort: int = 3
    corrupt: float = 0.1  # share of colluders that the graph is made for
    smaller: int = 0  # silos that sites let a cohort lack, where no total may lack any of its cohort


#: Of sums that recover, and of whole ones, with up to two less colluders than there are silos.
SMALL = [
    Setting(3, 0, 1, min_cohort=2),
    Setting(4, 1, 1),
    Setting(5, 1, 1),
    Setting(6, 1, 2),
    Setting(7, 2, 1),
    Setting(8, 0, 3, 2),
    Setting(10, 0, 4, 4),
    Setting(12, 1, 5, 6),
]
WHOLE = [
    Setting(3),
    Setting(4, 1),
    Setting(5, 3, min_cohort=5),
    Setting(6, 1, smaller=2),
    Setting(7, 3, min_cohort=5, smaller=2),
    Setting(8, 0, 0, 2, smaller=1),
    Setting(10, 0, 0, 4, smaller=3),
    Setting(12, 1, 0, 6, smaller=2),
]
LARGE = [Setting(48, 0, 8), Setting(48, 4, 4), Setting(64, 2, 6), Setting(48, 2, smaller=4)]


class World:
    """Real silos over stores that outlive them, prepared by an honest set-up; and what the adversary has of them."""

    def __init__(self, setting: Setting, seed: int = 0, program: Any = Answers) -> None:
        self.setting, self.program = setting, program
        self.rng = np.random.default_rng(seed)
        self.ids = sorted(names(setting.silos))
        self.identities = {s: Identity() for s in self.ids}
        kind = Masked(min_cohort=setting.min_cohort, batch=16, max_missing=setting.max_missing, corrupt=setting.corrupt)
        roster = kind.roster({s: i.public_key for s, i in self.identities.items()})
        self.roster = dataclasses.replace(roster, checked=set())  # a right signature is right for all parties here
        if setting.degree is not None:
            k = setting.degree
            hood = Neighbourhood(setting.silos, k, 2 * k // 3 + 1, False, -40.0, -30.0, -40.0, 1, -30.0)
            self.roster.__dict__["neighbourhood"] = hood
        self.stores = {s: MemoryStore() for s in self.ids}
        self.tape: dict[bytes, Answer] = {}
        self.silos = {s: self.process(s) for s in self.ids}
        self.server = MaskedServer(self.roster)
        colluders = self.rng.choice(setting.silos, setting.colluders, replace=False)
        self.knowledge = Knowledge(frozenset(int(c) for c in colluders))
        self.indices, self.rounds = itertools.count(1), itertools.count()
        self.contexts: dict[bytes, Broadcast] = {}
        self.sent: dict[tuple[int, bytes], Contribution] = {}
        #: What was last signed by enough: broadcast, survivors, signatures.
        self.latest: tuple[bytes, frozenset[int], dict[int, bytes]] | None = None

    def process(self, silo: str) -> DurableSilo:
        """A process of `silo` that starts now: whatever an earlier one knew, it has from the store."""
        place = self.roster.places[silo]
        held = HeldStore(self.stores[silo], lambda: None)
        masked = MaskedSilo(self.roster, silo, self.identities[silo], held)
        program = self.program(self.ids)
        limits = Limits(missing=max(self.setting.max_missing, self.setting.smaller), differences=ROUNDS)
        spied = Spied(masked, self.tape, place)
        return DurableSilo(Silo(silo, program, View(silo), spied, Gate(silo, program.tables), limits), held)

    def masked(self, silo: str) -> MaskedSilo:
        return self.silos[silo].silo._sum.inner

    @property
    def honest(self) -> list[str]:
        return [s for s in self.ids if self.roster.places[s] not in self.knowledge.colluders]

    def next_index(self) -> int:
        index = next(self.indices)
        if index % self.roster.batch == 0 or index == 1:
            carry(self.server.prepare(index), {s: self.masked(s) for s in self.ids})
        return index

    # What the adversary does

    def ask(self, process: DurableSilo, body: bytes) -> bool:
        """Ask a question; whether an answer came back."""
        try:
            reply = process.handle(ROUND + body)
        except (ProtocolError, AggregationError):
            return False
        sent = unpack(reply, Contribution)
        answer = self.tape[bytes(sent.payload)]
        self.sent[answer.silo, answer.context] = sent
        message = self.contexts[answer.context]
        if self.roster.whole:  # by its contribution it names the whole cohort
            everyone = frozenset(self.roster.places[s] for s in message.cohort)
            self._name(message, answer.context, everyone)
        self.knowledge.take_contribution(answer._replace(question=message.round))
        return True

    def broadcast(self, round_: int, index: int, cohort: list[str], word: float = 0.0) -> bytes:
        told = str(self.rng.choice(["used", "not used", "each its own"], p=[0.4, 0.5, 0.1]))
        accepted = {s: self.past(s, index, told, round_) for s in cohort}
        sums = self.answered(accepted)
        message = Broadcast(round_, index, accepted, tuple(cohort), {"word": word}, {}, sums=sums)
        body = encode_broadcast(message)
        self.contexts[hashlib.sha256(body).digest()] = message
        return body

    def answered(self, accepted: dict[str, int]) -> tuple[tuple[int, int, str, int], ...]:
        """What to say that these sums answered: what one of the silos did answer under it, or now and then anything."""
        rounds: dict[int, int] = {}
        for silo, index in accepted.items():
            party = self.silos[silo].silo
            question = party.past.settled if index == party.past.used else party.past.asked
            if index and question.round >= 0:
                rounds.setdefault(index, question.round)
        if rounds and self.rng.random() < 0.05:
            rounds[int(self.rng.choice(list(rounds)))] = int(self.rng.integers(5))
        return tuple((index, round_, ROUND_PHASE, 0) for index, round_ in sorted(rounds.items()))

    def past(self, silo: str, index: int, told: str, round_: int) -> int:
        """What to tell a silo of its last answer: that it was used, as for the next question, or that it was not, as
        for the same one again; or nonsense. It knows better than "not used" of a sum that it was shown, mostly: a silo
        takes that for no answer."""
        party = self.silos[silo].silo
        newest = party.pending.sum_index if party.pending is not None else party.past.used
        if told == "each its own":
            return int(self.rng.choice([party.past.used, newest, index]))
        over = round_ > party.past.asked.round and party.past.answered
        known = self.roster.whole or party._sum.shown(bytes.fromhex(party.past.answered))
        if over and known and self.rng.random() < 0.9:
            return newest
        return newest if told == "used" else party.past.used

    def say(self, process: DurableSilo, message: tuple) -> bytes | None:
        try:
            return process.handle(SUM + pack(message))
        except (ProtocolError, AggregationError):
            return None

    def named(self, body: bytes, survivors: frozenset[int]) -> tuple:
        """What both requests say of survivors, with all the signatures of contributions that the adversary has."""
        context = hashlib.sha256(body).digest()
        message, roster = self.contexts[context], self.roster
        cohort = roster.bitmap(frozenset(roster.places[s] for s in message.cohort))
        sent = [self.sent.get((place, context)) for place in sorted(survivors)]
        there = [one for one in sent if one is not None]
        question = there[0].question if there else b""
        digests = [hashlib.sha256(one.payload).digest() for one in there]
        proofs = [one.signature for one in there]
        return (message.sum_index, cohort, roster.bitmap(survivors), TABLE.digest, context, question, digests, proofs)

    def have_signed(self, processes: list[DurableSilo], body: bytes, survivors: frozenset[int]) -> dict[int, bytes]:
        """Signatures on `survivors` by those of `processes` that give one, and by all colluders."""
        context = hashlib.sha256(body).digest()
        message, out, named = self.contexts[context], {}, self.named(body, survivors)
        for process in processes:
            reply = self.say(process, SignRequest(*named))
            if reply is not None:
                place = self.roster.places[process.silo.name]
                out[place] = unpack(reply, SetSignature).signature
                self._name(message, context, survivors)
        for place in self.knowledge.colluders:
            silo = self.roster.ids[place]
            batch = self.masked(silo)._state.batch_of(message.sum_index)
            out[place] = self.identities[silo].sign(
                batch.session.survivors_statement(batch.digest, SignRequest(*named))
            )
        return out

    def have_revealed(
        self, processes: list[DurableSilo], body: bytes, survivors: frozenset[int], signed: dict[int, bytes]
    ) -> None:
        context = hashlib.sha256(body).digest()
        message = self.contexts[context]
        signers = sorted(signed)[: self.roster.signatures_needed]
        signatures = [signed[p] for p in signers]
        request = RevealRequest(*self.named(body, survivors), self.roster.bitmap(frozenset(signers)), signatures)
        if len(signers) == self.roster.signatures_needed:
            self.latest = body, survivors, signed
        for process in processes:
            reply = self.say(process, request)
            if reply is not None:
                batch = process.silo._sum.inner._state.batch_of(message.sum_index)
                place = self.roster.places[process.silo.name]
                self.knowledge.take_shares(batch, place, survivors, unpack(reply, Shares))
                self._name(message, context, survivors)

    def _name(self, message: Broadcast, context: bytes, survivors: frozenset[int]) -> None:
        cohort = frozenset(self.roster.places[s] for s in message.cohort)
        self.knowledge.named.append(Named(message.round, message.sum_index, context, cohort, survivors))

    def verdict(self, first_round: int = 0) -> Verdict:
        """On what the adversary knows of questions from `first_round` on."""
        for place in () if self.roster.whole else self.knowledge.colluders:
            for index in {a.index for a in self.knowledge.answers.values() if a.question >= first_round}:
                batch = self.masked(self.roster.ids[place])._state.batch_of(index)
                self.knowledge.take_colluder(batch, place, index)
        rounds = frozenset(a.question for a in self.knowledge.answers.values() if a.question >= first_round)
        return self.knowledge.beyond(self.setting.max_missing, self.setting.min_cohort, rounds)


class Liar:
    """One behaviour of the server, drawn at random."""

    def __init__(self, world: World, rng: np.random.Generator) -> None:
        self.world, self.rng = world, rng

    def often(self, chance: float) -> bool:
        return bool(self.rng.random() < chance)

    def behave(self) -> Verdict:
        """Act; on what is then known."""
        first = -1
        for _ in range(1 + self.often(0.2)):
            round_ = next(self.world.rounds)
            first = round_ if first < 0 else first
            settle_later = []
            for _ in range(int(self.rng.choice([1, 2, 3], p=[0.45, 0.45, 0.1]))):
                index = self.world.next_index()
                settle_later.append(self.question(round_, index))
                if self.often(0.6):
                    settle_later.pop()()
            for at in self.rng.permutation(len(settle_later)):
                settle_later[at]()
        return self.world.verdict(first)

    def question(self, round_: int, index: int) -> Any:
        """Ask it; what is left to do is to settle on survivors."""
        world, rng = self.world, self.rng
        cohort = list(world.ids)
        if world.latest is not None and self.often(0.9):  # as an honest server does, for those who missed it
            world.have_revealed([world.silos[s] for s in world.honest], *world.latest)
        if self.often(0.15):
            size = int(rng.integers(world.setting.min_cohort, len(cohort) + 1))
            cohort = sorted(rng.choice(cohort, size, replace=False).tolist())
        bodies = [world.broadcast(round_, index, cohort)]
        if self.often(0.15):  # two stories
            other = cohort if self.often(0.5) or len(cohort) <= world.setting.min_cohort else cohort[:-1]
            bodies.append(world.broadcast(round_, index, other, 1.0))
        left_out, rare = rng.choice(world.ids) if self.often(0.1) else None, min(0.05, 0.5 / len(world.ids))
        for silo in rng.permutation(world.honest):
            silo = str(silo)
            if silo == left_out or silo not in cohort:
                continue
            body = bodies[int(rng.integers(len(bodies)))]
            second = world.process(silo) if self.often(rare) else None  # another process over the same store
            world.ask(world.silos[silo], body)
            if second is not None:
                fresh = world.broadcast(next(world.rounds) if self.often(0.5) else round_, index, cohort)
                world.ask(second, body if self.often(0.3) else fresh)
            if self.often(rare):
                world.ask(world.silos[silo], bodies[-1])
            if self.often(rare):
                world.silos[silo] = world.process(silo)
        return lambda: self.settle(index, bodies)

    def settle(self, index: int, bodies: list[bytes]) -> None:
        """Name one set of survivors, or two to two halves; open what can be opened. Of a whole sum there is nothing."""
        world, rng = self.world, self.rng
        if world.roster.whole:
            return
        body = bodies[int(rng.integers(len(bodies)))]
        sets = [self.survivors(index, body) for _ in range(1 + self.often(0.2))]
        halves = rng.integers(len(sets), size=len(world.honest))
        for at, survivors in enumerate(sets):
            asked = [world.silos[s] for s, half in zip(world.honest, halves, strict=True) if half == at]
            signed = world.have_signed(asked, body, survivors)
            if self.often(0.05):
                silo = str(rng.choice(world.honest))
                world.silos[silo] = world.process(silo)
            if len(signed) >= world.roster.signatures_needed or self.often(0.1):
                told = [world.silos[s] for s in world.honest if not self.often(0.02)]
                world.have_revealed(told, body, survivors, signed)
                if self.often(0.1):
                    world.have_revealed(told, body, self.survivors(index, body), signed)

    def survivors(self, index: int, body: bytes) -> frozenset[int]:
        """Those that answered, or fewer, or more; or silos that share no masks."""
        world, rng = self.world, self.rng
        places, context = world.roster.places, hashlib.sha256(body).digest()
        cohort = [places[s] for s in world.contexts[context].cohort]
        came = {a.silo for a in world.knowledge.answers.values() if a.index == index and a.context == context}
        came |= world.knowledge.colluders & set(cohort)
        if not came:
            return frozenset(cohort)
        choice = rng.random()
        if choice < 0.35:
            return frozenset(came)
        if choice < 0.65:  # some are said to have dropped out
            gone = rng.choice(
                sorted(came), min(int(rng.integers(1, world.setting.max_missing + 3)), len(came) - 1), False
            )
            return frozenset(came - set(gone.tolist()))
        if choice < 0.75:
            return frozenset(cohort)
        session = world.masked(world.ids[0])._state.batch_of(index).session
        if choice < 0.9:  # an island: some neighbours go, so that what is between them stands alone
            order = [p for p in session._order if p in came]
            at, width = int(rng.integers(len(order))), int(rng.integers(1, 4))
            inside = {order[(at + i) % len(order)] for i in range(width)}
            near = {v for p in inside for v in session.neighbours(p)} - inside
            return frozenset(came - near) or frozenset(came)
        chosen: list[int] = []  # no two of them neighbours
        for place in rng.permutation(sorted(came)).tolist():
            if not any(place in session.neighbours(other) for other in chosen):
                chosen.append(place)
        return frozenset(chosen)


class Outcome(NamedTuple):
    """Of many behaviours."""

    leaks: list[tuple[Setting, int, list[str]]]  # where more than the disclosed was known
    disclosed: int  # totals learnt


def run(settings: list[Setting], behaviours: int, seed: int, program: Any = None, until_leak: bool = False) -> Outcome:
    """So many behaviours, spread over the settings, `A_WORLD` in each world; no more worlds after the first leak
    where `until_leak`."""
    leaks, disclosed = [], 0
    # Silos that were once told two stories have no whole sum with each other any more.
    each = A_WORLD if settings[0].max_missing else A_WORLD // 4
    for at in range(0, behaviours, each):
        setting = settings[at // each % len(settings)]
        world = World(setting, seed + at, program or (Drawing if at // each % 5 == 4 else Answers))
        for more in range(min(each, behaviours - at)):
            verdict = Liar(world, np.random.default_rng([seed, at, more])).behave()
            disclosed += verdict.disclosed
            if verdict.beyond:
                leaks.append((setting, at + more, verdict.beyond))
        if leaks and until_leak:
            break
    return Outcome(leaks, disclosed)


#: Behaviours that one world of silos sees before a new one takes its place.
A_WORLD = 8

#: Behaviours in the default tier: on small rosters, and on those for which the toolkit chooses a k-regular graph.
FEW, FEW_LARGE = 120, 4
#: The most that a control may take to come upon its leak; it ends with the first.
ENOUGH = 320


@pytest.mark.parametrize("settings", [SMALL, WHOLE], ids=["recovering", "whole"])
def test_nothing_is_known_beyond_the_disclosed(settings: list[Setting]) -> None:
    # Of half of them silos want no more, once they are lied to about the past.
    outcome = run(settings, 2 * FEW if settings is SMALL else FEW, 1)
    assert outcome.leaks == []
    assert outcome.disclosed > FEW / 4  # the liar gets what it is to get, so that it is not turned away at the door


@pytest.mark.parametrize(("setting", "seed"), [(LARGE[0], 2), (LARGE[-1], 6)], ids=["recovering", "whole"])
def test_nor_on_the_graph_that_the_toolkit_chooses(setting: Setting, seed: int) -> None:
    outcome = run([setting], FEW_LARGE, seed)
    assert outcome.leaks == []
    assert outcome.disclosed > 0


@pytest.mark.slow
def test_ten_thousand_behaviours() -> None:
    outcome = run(SMALL + WHOLE, 9_800, 1_000)
    large = run(LARGE, 200, 2_000)
    assert outcome.leaks + large.leaks == []
    print(f"10,000 behaviours, {outcome.disclosed + large.disclosed} totals disclosed, nothing beyond them")


# Each protection removed: the test has to find the leak within as many behaviours.


def found(*options: Any, **more: Any) -> list:
    return run(*options, **more, until_leak=True).leaks


def test_control_survivors_that_no_masks_hold_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break 2: the check of the graph's windows."""
    monkeypatch.setattr(Session, "check_survivors", lambda self, survivors: None)
    leaks = found([s for s in SMALL if s.degree], ENOUGH, 3)
    assert leaks


def test_control_other_survivors_of_a_question_under_another_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break 3: the sums do not know which question they answer."""
    contribute = MaskedSilo.contribute
    monkeypatch.setattr(MaskedSilo, "contribute", lambda self, *a: contribute(self, *a[:5]))
    monkeypatch.setattr(MaskedSilo, "_check_bound", lambda *_: None)
    assert found([s for s in SMALL if s.max_missing], ENOUGH, 4)


def test_control_a_silo_that_forgets_what_it_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break 3: the question comes again to another cohort."""
    monkeypatch.setattr(Silo, "_in_order", lambda self, past, broadcast, question: past)
    monkeypatch.setattr(Silo, "_check_told", lambda *_: None)
    assert found(SMALL, ENOUGH, 5)


@pytest.mark.parametrize("settings", [SMALL, WHOLE], ids=["recovering", "whole"])
def test_control_masks_that_two_processes_use(settings: list[Setting], monkeypatch: pytest.MonkeyPatch) -> None:
    """Break 5: an index is not claimed in the store."""
    monkeypatch.setattr(MaskedSilo, "_use", lambda self, *_: None)
    monkeypatch.setattr(MaskedSilo, "_last_index", lambda self: -1)
    monkeypatch.setattr(MaskedSilo, "_put", lambda self, kept, index, last: self._store.put(kept, {"last": index}))
    assert found(settings, ENOUGH, 6, program=Drawing)


def test_control_whole_sums_whose_masks_do_not_know_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two broadcasts of one index, to cohorts that differ or not, have a total of terms that answer both."""
    key = masked_silo.whole_key

    def careless(session: Any, secret: bytes, one: int, other: int, asked: Asked, past: bytes) -> bytes:
        return key(session, secret, one, other, asked._replace(cohort=b"", context=b"", question=b""), past)

    monkeypatch.setattr(masked_silo, "whole_key", careless)
    assert found(WHOLE, ENOUGH, 8)


class Rows(Answers):
    """A program with a row for each silo, which it declares to be symmetric in silos."""

    def contribute(self, message, local, view, gate):
        values = np.zeros(TABLE.size)
        values[sorted(names(4)).index(view.silo)] = 5.0
        return gate.release(values), local


def test_control_a_table_with_a_row_for_each_silo() -> None:
    """Break 1: what is called a total over silos is each silo's own."""
    leaks = found([Setting(4)], 8, 7, program=Rows)
    assert leaks


def test_what_is_solved_for_is_what_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The algebra against the bytes: each combination that it finds, carried out, gives the true inputs."""
    monkeypatch.setattr(Session, "check_survivors", lambda self, survivors: None)
    read = single = 0
    for seed in range(7):
        world = World(Setting(8, 0, 5, 2) if seed else Setting(4, 1), seed)
        for more in range(4):
            Liar(world, np.random.default_rng([seed, more])).behave()
        for signs, value, truth in world.knowledge.read(TABLE, world.roster):
            np.testing.assert_allclose(value, truth, atol=1e-9)
            read, single = read + 1, single + (len(signs) == 1)
    assert read > 10
    assert single > 0


def test_elimination_over_the_field() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        left, right = rng.integers(-1, 2, (7, 4)), rng.integers(-1, 2, (4, 9))
        rows, pivots = reduced(left @ right, 9)
        assert rank(left @ right) == len(pivots) == np.linalg.matrix_rank(left @ right)
        assert not rows[len(pivots) :].any()
        assert all(rows[at, pivot] == 1 for at, pivot in enumerate(pivots))
    assert rank(np.array([[1, 1], [1, -1]])) == 2
    assert pow(3, P - 1, P) == 1
