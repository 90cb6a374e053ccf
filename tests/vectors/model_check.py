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
from typing import NamedTuple

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
        "secrets are of one index", "survivors contributed",
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
        if question != one.record.question or question != newest.question:
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
    way: tuple[Step, ...]  # the shortest to it


def search(world: World, most: int = 2_000_000) -> Found:
    """Breadth first, until a violation or all states are seen."""
    start = world.start()
    before: dict[State, tuple[State, Step] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for step, after in steps(world, state):
            if after in before:
                continue
            before[after] = state, step
            wrong = violation(world, after)
            if wrong is not None:
                return Found(len(before), wrong, way(before, after))
            if len(before) > most:
                raise MemoryError(f"more than {most} states")
            queue.append(after)
    return Found(len(before), None, ())


def way(before: dict[State, tuple[State, Step] | None], state: State) -> tuple[Step, ...]:
    found: list[Step] = []
    while (link := before[state]) is not None:
        state, step = link
        found.append(step)
    return tuple(reversed(found))
