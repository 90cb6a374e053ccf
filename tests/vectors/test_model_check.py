"""Every state that silos, one colluder and a lying server can come to: none is wrong, and without a rule one is.

The machine of model_check.py is abstract. What ties it to the code are the last tests: real silos, asked at random what
the machine is asked, take and refuse the same.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from model_check import (
    BORROWED,
    ONE,
    RULES,
    TWO,
    WHOLE_RULES,
    Ask,
    Deed,
    Named,
    State,
    WholeWorld,
    World,
    came_back,
    changed,
    contributes,
    crashed,
    gives,
    names,
    replaced,
    search,
    steps,
    writes,
)

from secure_fvi.aggregation import Block, BlockTable, Masked
from secure_fvi.aggregation.base import carry
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.messages import Contribution, RevealRequest, SetSignature, SignRequest, pack, unpack
from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import NONE, MemoryStore, Overtaken, Still
from secure_fvi.errors import ProtocolError

ALL, PAIR, TRIPLE = frozenset(range(4)), frozenset({0, 3}), frozenset({0, 1, 3})
WORLDS = {
    "a sum": World(),
    "set-up and a sum": World(set_up=True),
    "two questions for an index": World(questions=2),
    "cohorts that differ": World(cohorts=(ALL, TRIPLE), max_missing=0, min_cohort=2),
    "a cohort of two": World(cohorts=(ALL, PAIR), min_cohort=2),
    "three silos, two indices": World(n=3, indices=2, min_cohort=2),
}
LARGE = {
    "three silos, two indices, two questions": World(n=3, indices=2, questions=2, min_cohort=2),
    "four silos, two indices": World(indices=2, kills=False),
    "five silos": World(n=5),
}
#: Rules taken out, where that is tried, and what follows.
FAULTS: tuple[tuple[set[str], World, str], ...] = (
    ({"keys are signed", "T silos sign the batch"}, World(set_up=True), "a total of too few"),
    ({"an index is used once"}, World(questions=2), "an index used twice"),
    ({"an index is claimed before it is used"}, World(questions=2), "an index used twice"),
    ({"one set an index", "one set a question"}, World(n=3, min_cohort=2), "both secrets of one silo"),
    ({"sets are claimed before they are signed"}, World(n=3, min_cohort=2), "both secrets of one silo"),
    ({"a claim is one step"}, World(n=3, min_cohort=2, kills=False), "both secrets of one silo"),
    ({"one set a question"}, World(n=3, indices=2, min_cohort=2), "a question with two totals"),
    ({"at least min_cohort survive"}, World(max_missing=2), "a total of too few"),
    ({"at most max_missing are missing"}, World(max_missing=0, min_cohort=2), "a total that lacks too many"),
    ({"the cohort is the one asked"}, WORLDS["cohorts that differ"], "a total that lacks too many"),
    ({"survivors' own signatures"}, WORLDS["a cohort of two"], "a total that lacks too many"),
    ({"T signatures before shares"}, World(), "a total of too few"),
    ({"T is over two thirds"}, World(), "a total of too few"),
    ({"t shares to a secret"}, World(), "both secrets of one silo"),
    (
        {"secrets are of one index"},
        World(n=3, indices=2, questions=2, min_cohort=2, kills=False),
        "both secrets of one silo",
    ),
)
#: Each of these two stands behind the other; the search takes a while.
SLOW_FAULT = (
    {"the question is the one answered", "a later question ends a sum"},
    World(n=3, indices=2, questions=2, min_cohort=2, kills=False),
    "a question with two totals",
)
#: Behind which another rule stands: nothing is found without one of these.
BACKED = ("keys are signed", "T silos sign the batch", "one set an index", "survivors contributed")


@pytest.mark.parametrize("name", WORLDS)
def test_no_state_is_wrong(name: str) -> None:
    found = search(WORLDS[name])
    assert found.violation is None, found.way
    assert found.states > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_no_state_of_a_larger_world_is_wrong(name: str) -> None:
    assert search(LARGE[name]).violation is None


@pytest.mark.parametrize(
    ("without", "world", "violation"),
    [*FAULTS, pytest.param(*SLOW_FAULT, marks=pytest.mark.slow)],
    ids=lambda v: ", ".join(sorted(v)) if type(v) is set else "",
)
def test_each_planted_fault_is_found(without: set[str], world: World, violation: str) -> None:
    found = search(world._replace(without=frozenset(without)))
    assert found.violation == violation, found
    assert found.way


def test_every_rule_is_planted_or_backed() -> None:
    assert {rule for without, *_ in (*FAULTS, SLOW_FAULT) for rule in without} | set(BACKED) == RULES
    for rule in BACKED:
        world = World(set_up=rule in BACKED[:2], min_cohort=2 if rule == BACKED[3] else 3)
        assert search(world._replace(without=frozenset({rule}))).violation is None


# ---- Whole sums ----

SIDES = (ALL, TRIPLE, frozenset({1, 2, 3}))
WHOLE_WORLDS = {
    "a sum": WholeWorld(),
    "set-up and a sum": WholeWorld(keysets=(ONE, TWO, BORROWED), kills=False),
    "set-up and a sum of three": WholeWorld(n=3, keysets=(ONE, TWO, BORROWED)),
    "two broadcasts, cohorts that differ": WholeWorld(words=2, cohorts=SIDES, kills=False),
    "a cohort of two": WholeWorld(cohorts=(ALL, PAIR)),
    "two indices, cohorts that differ": WholeWorld(indices=2, cohorts=(ALL, TRIPLE), kills=False),
    "three silos, two indices, two broadcasts": WholeWorld(n=3, indices=2, words=2),
    "three silos, two questions in order, two broadcasts": WholeWorld(
        n=3, indices=2, numbers=2, words=2, ordered=True, kills=False
    ),
    "three silos, two questions in order": WholeWorld(n=3, indices=2, numbers=2, ordered=True),
    "two questions in order, cohorts that differ": WholeWorld(
        indices=2, numbers=2, cohorts=(ALL, TRIPLE), ordered=True, kills=False
    ),
    "two processes, three indices": WholeWorld(n=3, indices=3, min_cohort=2, kills=False, stands=True),
    "two questions in order, keys made anew": WholeWorld(
        n=3, indices=2, numbers=2, ordered=True, kills=False, anew=True
    ),
    "five silos": WholeWorld(n=5, words=2, kills=False),
    "three questions in order": WholeWorld(n=3, indices=3, numbers=3, words=2, ordered=True, kills=False),
    "four silos, two questions in order": WholeWorld(indices=2, numbers=2, words=2, ordered=True, kills=False),
}
#: Each rule taken out, in which world, and what follows.
WHOLE_FAULTS = {
    "keys are signed": ("set-up and a sum of three", "one silo's term"),
    "the key set is in the key": ("set-up and a sum", "a total that nobody was asked for"),
    "places are in the key": ("set-up and a sum of three", "one silo's term"),
    "the index is in the key": ("three silos, two indices, two broadcasts", "one silo's term"),
    "the cohort is in the key": ("two broadcasts, cohorts that differ", "a total that nobody was asked for"),
    "what is asked is in the key": ("two broadcasts, cohorts that differ", "a total that nobody was asked for"),
    "the past is in the key": (
        "three silos, two questions in order, two broadcasts",
        "a total that nobody was asked for",
    ),
    "an index is used once": ("three silos, two indices, two broadcasts", "one silo's term"),
    "an index is claimed before it is used": ("a sum", "one silo's term"),
    "a claim is one step": ("a sum", "one silo's term"),
    "one cohort a question": ("two indices, cohorts that differ", "a question with two totals"),
    "at least min_cohort are asked": ("a cohort of two", "a total of too few"),
    "a sum is used before the next question": ("three silos, two questions in order", "a total that is denied"),
    "the newest index rises alone": ("two processes, three indices", "one silo's term"),
    "an answer is kept": ("three silos, two questions in order", "a question answered in two ways"),
    "keys are in the past": ("two questions in order, keys made anew", "a total after a question that has none"),
    "questions come in their order": ("three silos, two questions in order", "a total that is denied"),
}


@pytest.mark.later("three questions in order")
@pytest.mark.parametrize("name", WHOLE_WORLDS)
def test_no_state_of_whole_sums_is_wrong(name: str) -> None:
    found = search(WHOLE_WORLDS[name])
    assert found.violation is None, found.way
    assert found.states > 40


@pytest.mark.parametrize("rule", sorted(WHOLE_RULES))
def test_each_fault_planted_in_whole_sums_is_found(rule: str) -> None:
    name, violation = WHOLE_FAULTS[rule]
    found = search(WHOLE_WORLDS[name]._replace(without=frozenset({rule})))
    assert found.violation == violation, found
    assert found.way


# ---- The machine and the code ----

TABLE = BlockTable((Block("x", (3,), 10.0),))


class Killed(Exception):
    """Of a process, before it has written what it was to send."""


class Brittle(MemoryStore):
    """Kills its process at the next write that is no claim, or lets it stand still there."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks = False
        self.waiting: tuple[Any, ...] = ()

    def put(self, slots: Mapping[str, bytes], rising: Mapping[str, int] = NONE, still: Still = NONE) -> None:
        if self.breaks:
            self.breaks, self.waiting = False, (slots, rising, still)
            raise Killed
        super().put(slots, rising, still)


class Parties:
    """Real silos behind the steps of the machine; the server has what they sent, and the last one's identity."""

    def __init__(self, world: World | WholeWorld) -> None:
        self.world, self.ids = world, [f"s{i}" for i in range(world.n)]
        self.identities = {s: Identity() for s in self.ids}
        most = world.max_missing if isinstance(world, World) else 0
        kind = Masked(min_cohort=world.min_cohort, max_missing=most, batch=world.indices)
        self.roster = kind.roster({s: i.public_key for s, i in self.identities.items()})
        self.stores = {s: Brittle() for s in self.ids}
        self.silos = {s: MaskedSilo(self.roster, s, self.identities[s], self.stores[s]) for s in self.ids}
        server = MaskedServer(self.roster)
        carry(server.prepare(0), lambda messages: {s: self.silos[s].handle(m) for s, m in messages.items()})
        self.batch: Any = server._state.batches.get(0)
        self.sent: dict[tuple[int, int, Ask], tuple[bytes, bytes]] = {}
        self.signed: dict[tuple[int, int, Named], bytes] = {}
        self.standing: dict[str, tuple[Any, ...]] = {}

    def crash(self, i: int) -> None:
        silo = self.ids[i]
        self.silos[silo] = MaskedSilo(self.roster, silo, self.identities[silo], self.stores[silo])

    def contribute(self, i: int, index: int, ask: Ask, sends: bool) -> None:
        silo, context, question = self.ids[i], *self.asked(ask)
        self.stores[silo].breaks = not sends
        cohort = [self.ids[p] for p in sorted(ask.cohort)]
        try:
            raw = self.silos[silo].contribute(index, cohort, TABLE, np.full(3, float(i)), context, question)
        except Killed:
            self.crash(i)
            return
        finally:
            self.stores[silo].breaks = False
        message = unpack(raw, Contribution)
        self.sent[i, index, ask] = hashlib.sha256(message.payload).digest(), message.signature

    def asked(self, ask: Ask) -> tuple[bytes, bytes]:
        return bytes([1 + ask.question]) * 32, bytes([101 + ask.question]) * 32

    def named(self, index: int, named: Named) -> SignRequest:
        """With whatever signatures of survivors the server has; the colluder's it makes."""
        (context, question), roster, session = self.asked(named.ask), self.roster, self.batch.session
        cohort, there = roster.bitmap(named.ask.cohort), sorted(named.survivors)
        proofs = []
        for p in there:
            payload, signature = self.sent.get((p, index, named.ask), (bytes(32), bytes(64)))
            if p == self.world.n - 1:
                fields = self.batch.digest, index, p, cohort, TABLE.digest, context, question, payload
                signature = self.identities[self.ids[p]].sign(session.contribution_statement(*fields))
            proofs.append((payload, signature))
        survivors, columns = roster.bitmap(named.survivors), [list(c) for c in zip(*proofs, strict=True)]
        return SignRequest(index, cohort, survivors, TABLE.digest, context, question, *columns)

    def sign(self, i: int, index: int, named: Named) -> None:
        reply = self.silos[self.ids[i]].handle(pack(self.named(index, named)))
        self.signed[i, index, named] = unpack(reply, SetSignature).signature

    def reveal(self, i: int, index: int, named: Named) -> None:
        request, last = self.named(index, named), self.world.n - 1
        statement = self.batch.session.survivors_statement(self.batch.digest, request)
        signatures = {p: s for (p, at, what), s in self.signed.items() if (at, what) == (index, named)}
        signatures[last] = self.identities[self.ids[last]].sign(statement)
        signers = self.roster.bitmap(frozenset(signatures))
        whole = RevealRequest(*request, signers, [signatures[p] for p in sorted(signatures)])
        self.silos[self.ids[i]].handle(pack(whole))


class WholeParties(Parties):
    """The same where sums are whole."""

    def do(self, deed: Deed) -> bool:
        """Whether the silo takes it."""
        silo = self.ids[deed.silo]
        if deed.what == "crash":
            self.crash(deed.silo)
            return True
        if deed.what == "write":
            try:
                self.stores[silo].put(*self.standing.pop(silo))
            except (KeyError, Overtaken):
                return False
            return True
        assert deed.put is not None
        self.stores[silo].breaks = deed.what in ("claim", "stand")
        (number, words, cohort), ids = deed.put, [self.ids[p] for p in sorted(deed.put.cohort)]
        context, question = bytes([number, words, *sorted(cohort)]).ljust(32), bytes([number, words]).ljust(32)
        values = np.full(3, deed.silo + deed.draw / 2)
        try:
            self.silos[silo].contribute(deed.index, ids, TABLE, values, context, question)
        except Killed:
            self.crash(deed.silo)
            if deed.what == "stand":
                self.standing[silo] = self.stores[silo].waiting
        except ProtocolError:
            return False
        finally:
            self.stores[silo].breaks = False
        return True


def walk_whole(world: WholeWorld, seed: int, length: int = 40) -> tuple[int, int]:
    """As `walk`, of a masked half alone, without a `Silo` that keeps questions in order."""
    rng, state, parties, taken = random.Random(seed), world.start(), WholeParties(world), 0
    for _ in range(length):
        open_ = [deed for deed, after in world.steps(state) if after != state]
        if open_ and rng.random() < 0.6:
            deed = rng.choice(open_)
        else:
            what, i, index = (
                rng.choice(["crash", "claim", "contribute", *(("stand", "write") if world.stands else ())]),
                rng.choice(world.honest),
                rng.randrange(world.indices),
            )
            deed = Deed(what, i, index, rng.choice(world.puts), rng.randrange(2))
        came = replaced(state, deed.silo, came_back(world, state[deed.silo]))
        wrote = writes(world, state, deed.silo) if deed.what == "write" else None
        after = came if deed.what == "crash" else wrote if deed.what == "write" else gives(world, state, deed)
        did = parties.do(deed)
        assert did == (after is not None), (deed, state[deed.silo])
        taken += did
        state = after or state
    return taken, length - taken


WHOLE_WALKED = [
    WholeWorld(indices=4, numbers=2, cohorts=(ALL, TRIPLE)),
    WholeWorld(n=3, indices=3, words=2),
    WholeWorld(indices=4, cohorts=(ALL, PAIR)),
    WholeWorld(n=3, indices=5, min_cohort=2, stands=True),
]


@pytest.mark.parametrize("seed", range(12))
def test_silos_do_what_the_machine_of_whole_sums_does(seed: int) -> None:
    taken, refused = walk_whole(WHOLE_WALKED[seed % 4], seed)
    assert taken > 5
    assert refused > 5


@pytest.mark.parametrize(
    "rule",
    ["an index is used once", "one cohort a question", "at least min_cohort are asked", "the newest index rises alone"],
)
def test_control_a_machine_of_whole_sums_without_a_rule_does_other_things(rule: str) -> None:
    def walks() -> None:
        for seed in range(12):
            walk_whole(WHOLE_WALKED[seed % 4]._replace(without=frozenset({rule})), seed)

    with pytest.raises(AssertionError):
        walks()


def machine(world: World, state: State, what: str, i: int, index: int, named: Named) -> State | None:
    """What the machine makes of a step, allowed or not."""
    if what == "crash":
        return changed(state, i, crashed(world, state[i]))
    if what in ("claim", "contribute"):
        return contributes(world, state, i, index, named.ask, what == "contribute")
    return names(world, state, i, index, named, what == "reveal")


def code(parties: Parties, what: str, i: int, index: int, named: Named) -> bool:
    """Whether the silo takes it."""
    try:
        if what == "crash":
            parties.crash(i)
        elif what in ("claim", "contribute"):
            parties.contribute(i, index, named.ask, what == "contribute")
        else:
            (parties.sign if what == "sign" else parties.reveal)(i, index, named)
    except ProtocolError:
        return False
    return True


def walk(world: World, seed: int, length: int = 40) -> tuple[int, int]:
    """Steps that both took, and that both refused. Raises AssertionError where one did."""
    rng, state, parties, taken = random.Random(seed), world.start(), Parties(world), 0
    for _ in range(length):
        open_ = [step for step, after in steps(world, state) if after != state]
        if open_ and rng.random() < 0.6:
            step = rng.choice(open_)
            ask = step.ask or world.asks[0]
            what, i, index, named = step.what, step.silo, step.index, Named(ask, step.survivors)
        else:
            what, i = rng.choice(["crash", "claim", "contribute", "sign", "reveal"]), rng.choice(world.honest)
            index, named = rng.randrange(world.indices), Named(rng.choice(world.asks), rng.choice(world.sets))
        after = machine(world, state, what, i, index, named)
        did = code(parties, what, i, index, named)
        assert did == (after is not None), (what, i, index, named, state[i])
        taken += did
        state = after or state
    return taken, length - taken


WALKED = [World(indices=2, questions=2, cohorts=(ALL, TRIPLE)), WORLDS["a cohort of two"]._replace(indices=2)]


@pytest.mark.parametrize("seed", range(10))
def test_silos_do_what_the_machine_does(seed: int) -> None:
    taken, refused = walk(WALKED[seed % 2], seed)
    assert taken > 5
    assert refused > 5


def walks(world_without: frozenset[str]) -> None:
    for seed in range(10):
        walk(WALKED[seed % 2]._replace(without=world_without), seed)


@pytest.mark.parametrize(
    "rule",
    [
        "an index is used once",
        "one set a question",
        "at most max_missing are missing",
        "survivors' own signatures",
        "the question is the one answered",
        "a later question ends a sum",
    ],
)
def test_control_a_machine_without_a_rule_does_other_things(rule: str) -> None:
    with pytest.raises(AssertionError):
        walks(frozenset({rule}))
