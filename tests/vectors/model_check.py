"""The rules by which silos contribute, sign and reveal, as a small machine of which every state is visited.

n silos, the last of which colludes with a server that lies: it asks each honest silo whatever it likes, whenever it
likes, loses what it likes, and crashes and restarts silos. A colluder signs everything and gives every share it holds.
What the two can open is worked out from shares and seeds told, never from the rules: an honest silo's contribution is
its value under the mask of b and those of the seeds shared with the other honest silos.

A rule can be taken out; the search is then to find what follows. `test_model_check.py` walks the real parties along.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from secure_fvi.aggregation.graph import complete_threshold

Places = frozenset[int]


class Ask(NamedTuple):
    """What a silo contributes to at an index: a question, of a cohort."""

    question: int
    cohort: Places


class Named(NamedTuple):
    """Survivors of a sum."""

    ask: Ask
    survivors: Places


class Sum(NamedTuple):
    """One honest silo at one index. used, record, named: what it remembers. The rest has left it."""

    used: Ask | None = None
    record: Ask | None = None
    named: Named | None = None
    sent: frozenset[Ask] = frozenset()
    signed: frozenset[Named] = frozenset()
    revealed: frozenset[Named] = frozenset()


class Silo(NamedTuple):
    """One honest silo. keys: 0 none, 1 all members' own, 2 the server's in their place. looked: a set that a second
    process over its store has seen to be free, and has yet to write."""

    keys: int
    sums: tuple[Sum, ...]
    questions: tuple[Named | None, ...]
    looked: tuple[int, Named] | None = None


State = tuple[Silo, ...]


class Step(NamedTuple):
    """What the server had a silo do."""

    what: str
    silo: int
    index: int = 0
    ask: Ask | None = None
    survivors: Places = frozenset()


#: What can be taken out: the rules, in the words of docs/protocol.md.
RULES = frozenset(
    {
        "keys are signed", "T silos sign the batch", "an index is used once", "an index is claimed before it is used",
        "one set an index", "sets are claimed before they are signed", "a claim is one step", "one set a question",
        "at least min_cohort survive", "at most max_missing are missing", "the cohort is the one asked",
        "survivors' own signatures", "T signatures before shares", "T is over two thirds", "t shares to a secret",
        "secrets are of one index", "survivors contributed", "the question is the one answered",
        "a later question ends a sum",
    }
)  # fmt: skip


class World(NamedTuple):
    """How much there is to try."""

    n: int = 4
    indices: int = 1
    questions: int = 1
    cohorts: tuple[Places, ...] = ()  # all silos where none is given
    min_cohort: int = 3
    max_missing: int = 1
    set_up: bool = False  # whether keys are exchanged in the search; else they are
    kills: bool = True  # whether silos are killed, between a claim and what it is for as well
    without: frozenset[str] = frozenset()

    def keeps(self, rule: str) -> bool:
        assert rule in RULES
        return rule not in self.without

    @property
    def honest(self) -> range:
        return range(self.n - 1)

    @property
    def signatures(self) -> int:
        return 2 * self.n // 3 + 1 if self.keeps("T is over two thirds") else self.n // 2

    @property
    def shares(self) -> int:
        return complete_threshold(self.n) if self.keeps("t shares to a secret") else 1

    @property
    def asks(self) -> list[Ask]:
        return [Ask(q, c) for q in range(self.questions) for c in self.cohorts or (frozenset(range(self.n)),)]

    @property
    def sets(self) -> list[Places]:
        """With the colluder in each: it can only help to have it there."""
        some = (itertools.combinations(self.honest, k) for k in range(1, self.n))
        return [frozenset((*chosen, self.n - 1)) for chosen in itertools.chain(*some)]

    def start(self) -> State:
        silo = Silo(0 if self.set_up else 1, (Sum(),) * self.indices, (None,) * self.questions)
        return (silo,) * (self.n - 1)

    def steps(self, state: State) -> Iterator[tuple[Step, State]]:
        return steps(self, state)

    def violation(self, state: State) -> str | None:
        return violation(self, state)


# ---- What a silo does ----


def changed(state: State, at: int, silo: Silo) -> State:
    return (*state[:at], silo, *state[at + 1 :])


def with_sum(silo: Silo, index: int, one: Sum) -> Silo:
    return silo._replace(sums=(*silo.sums[:index], one, *silo.sums[index + 1 :]))


def ready(world: World, state: State, i: int) -> bool:
    """Whether T silos have signed the batch of these keys; the server's own keys stand in no other silo's batch."""
    keys = state[i].keys
    signers = 1 + (sum(s.keys == 1 for s in state) if keys == 1 else 1)
    return bool(keys) and (signers >= world.signatures or not world.keeps("T silos sign the batch"))


def contributes(world: World, state: State, i: int, index: int, ask: Ask, sends: bool) -> State | None:
    """Claim the index, and send. Between the two a silo may be killed."""
    silo, one = state[i], state[i].sums[index]
    if not ready(world, state, i) or i not in ask.cohort or len(ask.cohort) < world.min_cohort:
        return None
    later = any(s.record for s in silo.sums[index:])
    if world.keeps("an index is used once") and (later or one.used not in (None, ask)):
        return None
    if one.named is not None:
        return None
    one = one._replace(used=ask)
    if sends:
        one = one._replace(record=ask, sent=one.sent | {ask})
    return changed(state, i, with_sum(silo, index, one))


def allowed(world: World, state: State, i: int, index: int, named: Named, signed: bool) -> bool:
    """Whether a silo would name these survivors. signed: T silos have named them."""
    silo, one, ((question, cohort), there) = state[i], state[i].sums[index], named
    if not ready(world, state, i) or not there <= cohort:
        return False
    if world.keeps("at least min_cohort survive") and len(there) < world.min_cohort:
        return False
    if world.keeps("at most max_missing are missing") and len(cohort - there) > world.max_missing:
        return False
    if one.record is not None:
        newest = next(s.record for s in reversed(silo.sums) if s.record)
        if world.keeps("the question is the one answered") and question != one.record.question:
            return False
        if world.keeps("a later question ends a sum") and question != newest.question:
            return False
        return cohort == one.record.cohort or not world.keeps("the cohort is the one asked")
    if i in there and world.keeps("survivors contributed"):
        return False
    if signed or not world.keeps("survivors' own signatures"):
        return True
    return all(j == world.n - 1 or named.ask in state[j].sums[index].sent for j in there)


def free(world: World, silo: Silo, index: int, named: Named) -> bool:
    """Whether nothing else was named before for this index or question."""
    if world.keeps("one set an index") and silo.sums[index].named not in (None, named):
        return False
    return not world.keeps("one set a question") or silo.questions[named.ask.question] in (None, named)


def names(world: World, state: State, i: int, index: int, named: Named, reveals: bool) -> State | None:
    """Sign survivors, or reveal the shares for them."""
    silo = state[i]
    enough = not world.keeps("T signatures before shares")
    if reveals and not enough:
        signers = 1 + sum(named in s.sums[index].signed for s in state)
        enough = signers >= world.signatures
    if (reveals and not enough) or not allowed(world, state, i, index, named, reveals and enough):
        return None
    if (index, named) != silo.looked and not free(world, silo, index, named):
        return None
    one, q = silo.sums[index], named.ask.question
    one = one._replace(
        named=named,
        signed=one.signed | {named} if not reveals else one.signed,
        revealed=one.revealed | {named} if reveals else one.revealed,
    )
    silo = with_sum(silo, index, one)._replace(questions=(*silo.questions[:q], named, *silo.questions[q + 1 :]))
    return changed(state, i, silo)


def crashed(world: World, silo: Silo) -> Silo:
    """After a restart over its store: what was written before it left is there."""
    sums = []
    for one in silo.sums:
        if not world.keeps("an index is claimed before it is used"):
            one = one._replace(used=None, record=None)
        if not world.keeps("sets are claimed before they are signed"):
            one = one._replace(named=None)
        sums.append(one)
    forgets = not world.keeps("sets are claimed before they are signed")
    return silo._replace(sums=tuple(sums), questions=(None,) * len(silo.questions) if forgets else silo.questions)


def steps(world: World, state: State) -> Iterator[tuple[Step, State]]:
    """All that a server can have happen next."""
    for i in world.honest:
        silo = state[i]
        if silo.keys == 0:
            for keys in (1, 2) if not world.keeps("keys are signed") else (1,):
                yield Step("keys", i, keys), changed(state, i, silo._replace(keys=keys))
            continue
        if world.kills:
            yield Step("crash", i), changed(state, i, crashed(world, silo))
        for index, ask in itertools.product(range(world.indices), world.asks):
            for what in ("claim", "contribute") if world.kills else ("contribute",):
                after = contributes(world, state, i, index, ask, what == "contribute")
                if after is not None:
                    yield Step(what, i, index, ask), after
            for there in world.sets:
                named = Named(ask, there)
                for what in ("sign", "reveal"):
                    after = names(world, state, i, index, named, what == "reveal")
                    if after is not None:
                        yield Step(what, i, index, ask, there), after
                if not world.keeps("a claim is one step") and free(world, silo, index, named):
                    # One of two processes over a store sees that nothing was named, and writes later.
                    looked = silo._replace(looked=(index, named))
                    yield Step("look", i, index, ask, there), changed(state, i, looked)


# ---- What server and colluder can open ----


def violation(world: World, state: State) -> str | None:
    """What is wrong with a state, in a few words."""
    by_question: dict[int, set[Places]] = {}
    for index in range(world.indices):
        told = {i: told_at(world, state, i, index) for i in world.honest}
        opened = {kind: {o for o in world.honest if opens(world, told, o, kind)} for kind in ("b", "e")}
        if opened["b"] & opened["e"]:
            return "both secrets of one silo"
        sent = {i: state[i].sums[index].sent for i in world.honest if state[i].sums[index].sent}
        if any(len(asks) > 1 for asks in sent.values()):
            return "an index used twice"
        totals = leaked(state, {i: next(iter(a)) for i, a in sent.items()}, told, opened)
        if len(totals) > 1:
            return "an index with two totals"
        for total in totals:
            if len(total) < world.min_cohort - 1:
                return "a total of too few"
            for i in total:
                (ask,) = sent[i]
                if len(ask.cohort - total - {world.n - 1}) > world.max_missing:
                    return "a total that lacks too many"
            by_question.setdefault(ask.question, set()).add(total)
    if any(len(totals) > 1 for totals in by_question.values()):
        return "a question with two totals"
    return None


def told_at(world: World, state: State, i: int, index: int) -> frozenset[Named]:
    if world.keeps("secrets are of one index"):
        return state[i].sums[index].revealed
    return frozenset().union(*(one.revealed for one in state[i].sums))


def opens(world: World, told: dict[int, frozenset[Named]], owner: int, kind: str) -> bool:
    """From t shares, the colluder's among them, or because a survivor told its b."""
    if kind == "b" and any(owner in named.survivors for named in told[owner]):
        return True
    holders = [h for h, sets in told.items() if any((owner in named.survivors) == (kind == "b") for named in sets)]
    return len(holders) + 1 >= world.shares


def leaked(
    state: State, sent: dict[int, Ask], told: dict[int, frozenset[Named]], opened: dict[str, set[int]]
) -> list[Places]:
    """The smallest groups of honest silos whose terms add up to something known: all their b are open, and the masks
    that are not cancel within the group, which those of two broadcasts do not."""

    def seed(u: int, v: int) -> bool:
        told_by = any(
            one in named.survivors and other not in named.survivors
            for one, other in ((u, v), (v, u))
            for named in told[one]
        )
        return bool({u, v} & opened["e"]) or told_by

    everyone, found, left = range(len(state)), [], set(sent)
    alone = {i for i in sent if state[i].keys == 2}
    left -= alone
    while left:
        group, waiting = set[int](), [left.pop()]
        while waiting:
            i = waiting.pop()
            group.add(i)
            waiting += [j for j in everyone if j not in group and not seed(i, j)]
        left -= group
        same = len({sent[i].question for i in group if i in sent}) == 1
        if group <= sent.keys() and same and group <= opened["b"]:
            found.append(frozenset(group))
    return found + [frozenset({i}) for i in alone]


# ---- The search ----


class Found(NamedTuple):
    """What a search came to."""

    states: int
    violation: str | None
    way: tuple[Any, ...]  # the shortest to it


def search(world: World | WholeWorld, most: int = 2_000_000) -> Found:
    """Breadth first, until a violation or all states are seen."""
    start: Any = world.start()
    before: dict[Any, tuple[Any, Any] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for step, after in world.steps(state):
            if after in before:
                continue
            before[after] = state, step
            wrong = world.violation(after)
            if wrong is not None:
                return Found(len(before), wrong, way(before, after))
            if len(before) > most:
                raise MemoryError(f"more than {most} states")
            queue.append(after)
    return Found(len(before), None, ())


def way(before: dict[Any, tuple[Any, Any] | None], state: Any) -> tuple[Any, ...]:
    found: list[Any] = []
    while (link := before[state]) is not None:
        state, step = link
        found.append(step)
    return tuple(reversed(found))


# ---- Whole sums: pairwise masks alone, and no message but the contribution ----
#
# What is known is worked out from the masks: which keystreams are in which contribution, and which combinations of
# contributions hold none. All honest silos of a cohort, asked the same under the same keys and past, are a total; any
# other combination is a leak.


class Put(NamedTuple):
    """What a whole sum asks: a question, by its number in the job's order and its words, of a cohort."""

    number: int
    words: int
    cohort: Places


class Gave(NamedTuple):
    """A contribution that has left. draw: which of two values a silo might answer with. past: the sums of which the
    silo believes that they were used with its term, what they asked, and the key set under which it answered."""

    silo: int
    index: int
    put: Put
    draw: int
    keys: int
    past: frozenset[tuple[int, Put, int]]


class Member(NamedTuple):
    """One honest silo. keys: the key set it took, 0 for none. claimed: by index. last: the newest index. waiting: its
    last answer. cohorts: by question. looked: an index that a second process saw to be free, and has yet to claim.
    standing: what another process has claimed, with the newest index that it saw, and has yet to write and send."""

    keys: int
    claimed: tuple[tuple[Put, int] | None, ...]
    last: int = -1
    gave: frozenset[Gave] = frozenset()
    waiting: Gave | None = None
    past: frozenset[tuple[int, Put, int]] = frozenset()
    cohorts: tuple[Places | None, ...] = ()
    looked: int | None = None
    standing: tuple[int, Put, int, int] | None = None


Members = tuple[Member, ...]
#: Key sets: everybody's keys; the same with another key of the colluder; with silo 0's as the colluder's; the server's.
ONE, TWO, BORROWED, FORGED = 1, 2, 3, 4

WHOLE_RULES = frozenset(
    {
        "keys are signed", "the key set is in the key", "places are in the key", "the index is in the key",
        "the cohort is in the key", "what is asked is in the key", "the past is in the key", "an index is used once",
        "an index is claimed before it is used", "a claim is one step", "one cohort a question",
        "at least min_cohort are asked", "a sum is used before the next question", "the newest index rises alone",
        "an answer is kept", "questions come in their order", "keys are in the past",
    }
)  # fmt: skip


class Deed(NamedTuple):
    """What the server had a silo do. said: whether it was told that its last answer was used."""

    what: str
    silo: int
    index: int = 0
    put: Put | None = None
    draw: int = 0
    said: bool = True


class WholeWorld(NamedTuple):
    """How much there is to try. ordered: whether questions come in an order, with what the server says of the last;
    otherwise the sum's half stands alone. stands: whether a second process over silo 0's store may stand still before
    it writes that it contributed; claims up to the newest index before are then let go of with each contribution. anew:
    whether silos may be asked for keys a second time."""

    n: int = 4
    indices: int = 1
    numbers: int = 1
    words: int = 1
    cohorts: tuple[Places, ...] = ()
    min_cohort: int = 3
    ordered: bool = False
    keysets: tuple[int, ...] = ()  # all have taken the first where none is given
    kills: bool = True
    stands: bool = False
    anew: bool = False
    without: frozenset[str] = frozenset()

    def keeps(self, rule: str) -> bool:
        assert rule in WHOLE_RULES
        return rule not in self.without

    @property
    def honest(self) -> range:
        return range(self.n - 1)

    @property
    def puts(self) -> list[Put]:
        cohorts = self.cohorts or (frozenset(range(self.n)),)
        return [Put(*each) for each in itertools.product(range(self.numbers), range(self.words), cohorts)]

    def start(self) -> Members:
        claimed, cohorts = (None,) * self.indices, (None,) * (self.numbers * self.words)
        return (Member(0 if self.keysets else ONE, claimed, cohorts=cohorts),) * (self.n - 1)

    def steps(self, state: Members) -> Iterator[tuple[Deed, Members]]:
        """All that a server can have happen next."""
        keysets = (*self.keysets, *((FORGED,) if not self.keeps("keys are signed") else ()))
        for i, member in enumerate(state):
            if member.keys == 0:
                for keys in keysets:
                    yield Deed("keys", i, keys), replaced(state, i, member._replace(keys=keys))
                continue
            if self.anew and member.keys == ONE:
                yield Deed("keys", i, TWO), replaced(state, i, member._replace(keys=TWO))
            if self.kills:
                yield Deed("crash", i), replaced(state, i, came_back(self, member))
            stands = self.stands and i == 0
            draws, said = (0, 1) if self.kills or stands else (0,), (True, False) if self.ordered else (True,)
            whats = ("contribute", *(("claim",) if self.kills else ()), *(("stand",) if stands else ()))
            if (after := writes(self, state, i)) is not None:
                yield Deed("write", i), after
            for index, put, draw, told in itertools.product(range(self.indices), self.puts, draws, said):
                for what in whats:
                    after = gives(self, state, Deed(what, i, index, put, draw, told))
                    if after is not None:
                        yield Deed(what, i, index, put, draw, told), after
            if not self.keeps("a claim is one step"):
                for index in range(member.last + 1, self.indices):
                    if member.claimed[index] is None:
                        yield Deed("look", i, index), replaced(state, i, member._replace(looked=index))

    def violation(self, state: Members) -> str | None:
        """What is wrong with a state, in a few words."""
        return known(self, frozenset().union(*(member.gave for member in state)))


def replaced(state: Members, at: int, member: Member) -> Members:
    return (*state[:at], member, *state[at + 1 :])


def came_back(world: WholeWorld, member: Member) -> Member:
    """After a restart over its store."""
    if world.keeps("an index is claimed before it is used"):
        return member
    return member._replace(claimed=(None,) * world.indices, last=-1)


def gives(world: WholeWorld, state: Members, deed: Deed) -> Members | None:
    """Claim question and index, and send. Between the two a silo may be killed, or stand still."""
    member, (what, i, index, put, draw, said) = state[deed.silo], deed
    assert put is not None
    if not member.keys or i not in put.cohort:
        return None
    if world.keeps("at least min_cohort are asked") and len(put.cohort) < world.min_cohort:
        return None
    used = index <= member.last or member.claimed[index] not in (None, (put, draw))
    if used and member.looked != index and world.keeps("an index is used once"):
        return None
    past, waiting = member.past, member.waiting
    if world.ordered and waiting is not None:
        if put == waiting.put:
            if draw != waiting.draw and world.keeps("an answer is kept"):  # and masked anew
                return None
        elif (put.number <= waiting.put.number and world.keeps("questions come in their order")) or (
            not said and world.keeps("a sum is used before the next question")
        ):
            return None
        elif said:
            past |= {(waiting.index, waiting.put, waiting.keys if world.keeps("keys are in the past") else 0)}
    q = put.number * world.words + put.words
    if world.keeps("one cohort a question") and member.cohorts[q] not in (None, put.cohort):
        return None
    member = member._replace(
        claimed=(*member.claimed[:index], (put, draw), *member.claimed[index + 1 :]),
        cohorts=(*member.cohorts[:q], put.cohort, *member.cohorts[q + 1 :]),
    )
    if what == "stand":
        member = member._replace(standing=(index, put, draw, member.last))
    if what == "contribute":
        if world.stands:
            gone = member.last + 1
            member = member._replace(claimed=((None,) * gone + member.claimed[gone:]))
        gave = Gave(i, index, put, draw, member.keys, past)
        member = member._replace(last=index, gave=member.gave | {gave}, waiting=gave, past=past)
    return replaced(state, i, member)


def writes(world: WholeWorld, state: Members, i: int) -> Members | None:
    """A process that stood still writes that it contributed, and sends: only if no other has contributed meanwhile."""
    member = state[i]
    if member.standing is None:
        return None
    index, put, draw, seen = member.standing
    if world.keeps("the newest index rises alone") and member.last != seen:
        return None
    gave = Gave(i, index, put, draw, member.keys, member.past)
    return replaced(state, i, member._replace(last=index, gave=member.gave | {gave}, standing=None))


def masks(world: WholeWorld, gave: Gave) -> dict[tuple[object, ...], int]:
    """The keystreams in a contribution that server and colluder do not know, with how often they were added."""
    found: dict[tuple[object, ...], int] = {}
    u, last = gave.silo, world.n - 1
    for v in gave.put.cohort - {u}:
        if gave.keys == FORGED or (v == last and gave.keys != BORROWED):
            continue
        # Whose secret it is. The colluder has borrowed the key of silo 0.
        pair = tuple(sorted((u, v if v != last else 0)))
        together = frozenset(one for one in gave.past if v in one[1].cohort)
        fields: dict[str, object] = {
            "places are in the key": (min(u, v), max(u, v)), "the key set is in the key": gave.keys,
            "the index is in the key": gave.index, "the cohort is in the key": gave.put.cohort,
            "what is asked is in the key": gave.put[:2], "the past is in the key": together,
        }  # fmt: skip
        key = (pair, *(field for rule, field in fields.items() if world.keeps(rule)))
        found[key] = found.get(key, 0) + (1 if u < v else -1)
    return {key: times for key, times in found.items() if times}


@lru_cache(maxsize=100_000)
def known(world: WholeWorld, gave: frozenset[Gave]) -> str | None:
    """What of these contributions is known that should not be."""
    rows, totals = sorted(gave, key=repr), allowed_totals(world, gave)
    put_on = [masks(world, one) for one in rows]
    keys = sorted({key for row in put_on for key in row}, key=repr)
    inputs = sorted({(one.silo, one.put, one.draw) for one in rows}, key=repr)
    matrix = [
        [row.get(key, 0) for key in keys] + [int((one.silo, one.put, one.draw) == name) for name in inputs]
        for one, row in zip(rows, put_on, strict=True)
    ]
    free = [row[len(keys) :] for row in echelon(matrix) if not any(row[: len(keys)])]
    told = [[int(any((g.silo, g.put, g.draw) == name for g in total)) for name in inputs] for total in totals]
    if len(echelon(free)) > len(echelon([row for row in told if len(echelon([*free, row])) == len(echelon(free))])):
        silos = [{inputs[at][0] for at, x in enumerate(row) if x} for row in echelon(free)]
        return "one silo's term" if any(len(those) == 1 for those in silos) else "a total that nobody was asked for"
    by_question: dict[tuple[int, int], set[Places]] = {}
    values: dict[Put, set[frozenset[tuple[int, int]]]] = {}
    had = {(one.index, one.put) for total in totals for one in total}
    for total in totals:
        if len(total) < world.min_cohort - 1:
            return "a total of too few"
        one = next(iter(total))
        by_question.setdefault(one.put[:2], set()).add(one.put.cohort)
        values.setdefault(one.put, set()).add(frozenset((g.silo, g.draw) for g in total))
        if any(
            g.silo == o.silo and g.put.number > o.put.number and o.put not in {put for _, put, _ in g.past}
            for g in gave
            for o in total
        ):
            return "a total that is denied"
        these = {one.silo for one in total}
        believed = {(index, put) for one in total for index, put, _ in one.past if put.cohort - {world.n - 1} <= these}
        if not believed <= had:
            return "a total after a question that has none"
    if world.ordered and any(len(found) > 1 for found in values.values()):
        return "a question answered in two ways"
    return "a question with two totals" if any(len(c) > 1 for c in by_question.values()) else None


def allowed_totals(world: WholeWorld, gave: frozenset[Gave]) -> list[frozenset[Gave]]:
    """Contributions of all honest silos of a cohort to one index, of one view."""
    groups: dict[tuple[object, ...], set[Gave]] = {}
    for one in gave:
        groups.setdefault((one.index, one.put, one.keys), set()).add(one)
    found = []
    for group in groups.values():
        cohort = next(iter(group)).put.cohort - {world.n - 1}
        pairs = itertools.combinations(group, 2)
        same = all(
            {x for x in a.past if b.silo in x[1].cohort} == {x for x in b.past if a.silo in x[1].cohort}
            for a, b in pairs
        )
        if same and len(group) == len(cohort) == len({one.silo for one in group}) and next(iter(group)).keys < BORROWED:
            found.append(frozenset(group))
    return found


def echelon(rows: list[list[int]]) -> list[list[int]]:
    """Over a prime: reduced rows, none of them zero."""
    p, rows, done = 2_147_483_629, [list(row) for row in rows], 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((r for r in range(done, len(rows)) if rows[r][column] % p), None)
        if pivot is None:
            continue
        rows[done], rows[pivot] = rows[pivot], rows[done]
        inverse = pow(rows[done][column], -1, p)
        rows[done] = [x * inverse % p for x in rows[done]]
        for r in range(len(rows)):
            if r != done and rows[r][column] % p:
                rows[r] = [(x - rows[r][column] * y) % p for x, y in zip(rows[r], rows[done], strict=True)]
        done += 1
    return rows[:done]
