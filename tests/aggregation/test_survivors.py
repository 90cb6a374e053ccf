"""A server that chooses the survivors: who may be missing, of which cohort, for which question, on which graph."""

import itertools
import sys
import types
from contextlib import nullcontext, suppress

import numpy as np
import pytest
from homomorphic_world import World as HomomorphicWorld
from sum_adversary import TABLE, World, exact, is_input, payload_of
from sum_network import CONTEXT, carry, names

from secure_fvi.aggregation import Masked
from secure_fvi.aggregation.graph import least_in_window, log2_hypergeometric_tail, neighbourhood, ring_neighbours
from secure_fvi.aggregation.homomorphic import HomomorphicSilo
from secure_fvi.aggregation.homomorphic_schemes import pack as pack_encrypted
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.messages import RevealRequest, SetSignature, SignRequest, pack, unpack
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.session import Session
from secure_fvi.errors import AggregationError, ProtocolError

VICTIM = 1
QUESTION = bytes(range(100, 132))


class TestMissing:
    """The same values twice, the second time with one silo declared lost: the difference is its term."""

    def difference(self, world, ask=None):
        totals = []
        for index, away in enumerate(((), (VICTIM,))):
            messages = {
                s: world.silos[s].contribute(index, world.ids, TABLE, world.values[s], CONTEXT, *(ask or ()))
                for s in world.ids
            }
            for place in away:
                del messages[world.ids[place]]
            totals.append(world.total(messages, index=index).values)
        return totals[0] - totals[1]

    @pytest.mark.parametrize("check", [True, False])
    def test_by_default_nobody_may_be_missing(self, check):
        world = World(5, max_missing=0, consistency_check=check)
        with pytest.raises(AggregationError, match=r"1 of the 5 silos asked are missing, past max_missing = 0"):
            self.difference(world)

    @pytest.mark.parametrize("check", [True, False])
    @pytest.mark.parametrize("most", [0, 1])
    def test_silos_refuse_it_of_a_server_that_does_not(self, most, check):
        """Where nobody may be missing they name no survivors at all: the sum has no self masks to open."""
        world = World(5, max_missing=most, consistency_check=check)
        world.contribute()
        few = {2, 3, 4} if most else {0, 2, 3, 4}
        request = world.sign_request(few) if check else world.reveal_request(few)
        says = (
            "does not take (Sign|Reveal)Request"
            if not most
            else "2 of the 5 silos asked are missing, past max_missing = 1"
        )
        for silo in world.silos.values():
            with pytest.raises(ProtocolError, match=says):
                silo.handle(request)

    def test_a_site_may_allow_fewer_than_the_roster(self):
        world = World(5, max_missing=2)
        name = world.ids[0]
        own = MaskedSilo(world.roster, name, world.identities[name], world.stores[name], max_missing=0, unbound=True)
        world.contribute()
        with pytest.raises(ProtocolError, match="max_missing = 0"):
            own.handle(world.sign_request({0, 2, 3, 4}))

    def test_control_where_one_may_be_missing_the_difference_is_its_term(self):
        world = World(5, max_missing=1)
        assert is_input(self.difference(world), world.values[world.ids[VICTIM]])

    @pytest.mark.parametrize("check", [True, False])
    def test_one_set_a_question_where_one_may_be_missing(self, check):
        world = World(5, max_missing=1, consistency_check=check)
        with pytest.raises(AggregationError):
            self.difference(world, ask=(QUESTION,))
        silo = world.silos[world.ids[0]]
        assert silo.absent_from(QUESTION) == ()
        assert silo.absent_from(bytes(32)) is None
        named = world.named(SignRequest if check else RevealRequest, {0, 2, 3, 4}, 1, question=QUESTION)
        with pytest.raises(ProtocolError, match="other survivors of this question were named before"):
            silo.handle(pack(named))
        # The same question to the same survivors tells nothing new.
        messages = {
            s: world.silos[s].contribute(2, world.ids, TABLE, world.values[s], CONTEXT, QUESTION) for s in world.ids
        }
        assert is_input(world.total(messages, index=2).values, exact(world))

    def test_who_signed_a_sum_is_shown_again_to_a_silo_that_missed_it(self):
        """It takes no further question before; who is not among the survivors, or signed alone, is shown nothing."""
        world = World(5, max_missing=1)
        first, late, lost = world.ids[0], world.ids[1], world.ids[4]
        messages = {
            s: world.silos[s].contribute(0, world.ids, TABLE, world.values[s], CONTEXT, QUESTION) for s in world.ids
        }
        world.silos[first].handle(world.sign_request({0, 1, 2, 3}, question=QUESTION))
        assert world.silos[first].shown(QUESTION) is False
        del messages[lost]
        world.total(messages, lost=((), {late}))
        shown = lambda: [world.silos[s].shown(QUESTION) for s in (first, late, lost)]  # noqa: E731
        assert shown() == [True, False, False]
        carry(world.server.prepare(1), world.silos)
        assert shown() == [True, True, False]
        world.restart_silos()
        assert shown() == [True, True, False]
        assert World(5, consistency_check=False).silos[first].shown(QUESTION) is None

    @pytest.mark.parametrize("forgets", [False, True])
    def test_who_missed_it_is_shown_it_after_other_sums_and_a_restart_of_the_server(self, forgets):
        """One silo is away when the first sum is shown, for the whole of the second, which does not ask it, and while
        the server begins anew. The control has a store that forgets."""
        world = World(8, max_missing=1, batch=2)
        late, others = world.ids[0], world.ids[1:]
        for index, asked in ((0, world.ids), (1, others)):
            messages = {
                s: world.silos[s].contribute(index, asked, TABLE, world.values[s], CONTEXT, bytes([index]) * 32)
                for s in asked
            }
            exchanges = world.server.total(index, asked, TABLE, messages, CONTEXT)
            carry(exchanges, world.silos, ((), {late}) if asked is world.ids else ({late}, {late}))
        store = world.server._store
        if forgets:
            store.drop(["unshown"])
        again = MaskedServer(world.roster, store)
        for index in (2, 3):
            carry(again.prepare(index), world.silos)
        assert world.silos[late].shown(bytes(32)) is not forgets

    def test_who_is_left_out_is_shown_that(self):
        """Not who was not asked, nor who signed it and has not seen that the others did; and once is for good."""
        world = World(6, max_missing=1)
        asked, lost = world.ids[:5], world.ids[4]
        messages = {s: world.silos[s].contribute(0, asked, TABLE, world.values[s], CONTEXT, QUESTION) for s in asked}
        del messages[lost]
        told = lambda: [world.silos[s].left_out(QUESTION) for s in (world.ids[0], lost, world.ids[5])]  # noqa: E731
        assert told() == [False, False, False]
        exchanges = world.server.total(0, asked, TABLE, messages, CONTEXT)
        carry(exchanges, world.silos, ((), {lost}))
        assert told() == [False, False, False]
        carry(world.server.total(0, asked, TABLE, messages, CONTEXT), world.silos)
        assert told() == [False, True, False]
        world.restart_silos()
        assert told() == [False, True, False]
        assert not any(world.silos[s].shown(QUESTION) for s in (lost, world.ids[5]))
        assert World(5, consistency_check=False).silos[lost].left_out(QUESTION) is None

    def test_questions_outlive_a_session_in_a_store_of_their_own(self):
        from secure_fvi.aggregation.store import MemoryStore

        kept = {}
        for survivors, refused in (({0, 2, 3, 4}, False), ({0, 1, 2, 3, 4}, True)):
            world = World(5, max_missing=1)
            for s in world.ids:
                store = kept.setdefault(s, MemoryStore())
                world.silos[s] = MaskedSilo(world.roster, s, world.identities[s], world.stores[s], questions=store)
            for s in world.ids:
                world.silos[s].contribute(0, world.ids, TABLE, world.values[s], CONTEXT, QUESTION)
            request = world.sign_request(survivors, question=QUESTION)
            if refused:
                with pytest.raises(ProtocolError, match="other survivors of this question"):
                    world.silos[world.ids[0]].handle(request)
            else:
                world.silos[world.ids[0]].handle(request)
                assert world.silos[world.ids[0]].absent_from(QUESTION) == (world.ids[1],)

    def test_a_sum_without_a_question_is_refused_where_nobody_said_otherwise(self):
        """Contribution, signature and shares alike; named, the same sum goes through. The control is the silo that may:
        `test_control_where_one_may_be_missing_the_difference_is_its_term` rests on it."""
        world = World(5, max_missing=1)
        for s in world.ids:
            world.silos[s] = MaskedSilo(world.roster, s, world.identities[s], world.stores[s])
        silo = world.silos[world.ids[0]]
        with pytest.raises(ProtocolError, match="sum 0 names no question"):
            silo.contribute(0, world.ids, TABLE, world.values[world.ids[0]], CONTEXT)
        messages = {
            s: world.silos[s].contribute(0, world.ids, TABLE, world.values[s], CONTEXT, QUESTION) for s in world.ids
        }
        for request in (world.sign_request({0, 2, 3, 4}), world.reveal_request({0, 2, 3, 4})):
            with pytest.raises(ProtocolError, match="sum 0 names no question"):
                silo.handle(request)
        assert is_input(world.total(messages, index=0).values, exact(world))

    @pytest.mark.parametrize("most", [0, 2])
    def test_of_liars_that_are_half_no_honest_silo_is_named(self, most):
        """Two of four answer another question than was asked. The control: a server that goes by their number, where
        they are three."""
        world = World(4, max_missing=most, min_cohort=2)

        def sent(liars, index):
            asked = {s: bytes(32) if s in liars else QUESTION for s in world.ids}
            give = [(s, world.silos[s], world.values[s]) for s in world.ids]
            return {s: o.contribute(index, world.ids, TABLE, v, CONTEXT, asked[s]) for s, o, v in give}

        half, three = world.ids[:2], world.ids[:3]
        for index, liars, question in ((0, half, QUESTION), (1, half, None), (2, three, QUESTION), (3, three, None)):
            world.server.faults.clear()
            nobody = question is None and liars == half
            with pytest.raises(AggregationError, match="none that most of them do") if nobody else nullcontext():
                world.server.admit(index, world.ids, TABLE, sent(liars, index), CONTEXT, None, question)
            named = {s for s, why in world.server.faults.items() if "another question" in why}
            wrong = set(world.ids) - set(liars) if question is None else set(liars)
            assert named == (set() if nobody else wrong)

    def test_a_silo_that_answers_another_question_counts_as_a_dropout(self):
        world = World(5, max_missing=1)
        messages = world.contribute(ids=world.ids[1:])
        messages[world.ids[0]] = world.silos[world.ids[0]].contribute(
            0, world.ids, TABLE, world.values[world.ids[0]], CONTEXT, QUESTION
        )
        assert is_input(world.total(messages).values, exact(world, world.ids[1:]))
        assert "another question" in world.server.faults[world.ids[0]]


class TestCohort:
    """Silos outside a cohort hear a smaller one than was asked, so that nobody seems to be missing."""

    def lie(self, world):
        """Six of eight were asked; the server tells the others that five of them were, and that all five answered."""
        asked, told = world.ids[:6], range(5)
        messages = {s: world.silos[s].contribute(0, asked, TABLE, world.values[s], CONTEXT) for s in asked}
        kind = SignRequest if world.roster.consistency_check else RevealRequest
        request = world.named(kind, told, cohort=world.roster.bitmap(frozenset(told)))
        return messages, request

    @pytest.mark.parametrize("check", [True, False])
    def test_a_contributor_refuses_another_cohort(self, check):
        world = World(8, max_missing=1, consistency_check=check)
        _, request = self.lie(world)
        for s in world.ids[:6]:
            with pytest.raises(ProtocolError, match="another cohort"):
                world.silos[s].handle(pack(request))

    @pytest.mark.parametrize("check", [True, False])
    def test_who_was_not_asked_takes_it_from_the_survivors_signatures_alone(self, check):
        world = World(8, max_missing=1, consistency_check=check)
        messages, request = self.lie(world)
        for lie in (request, world.with_proofs(request, messages)):
            with pytest.raises(ProtocolError, match=r"own signature|did not sign"):
                world.silos[world.ids[7]].handle(pack(lie))

    def test_control_without_those_signatures_it_signs(self, monkeypatch):
        monkeypatch.setattr(MaskedSilo, "_check_proofs", lambda *arguments: None)
        world = World(8, max_missing=1)
        _, request = self.lie(world)
        assert world.silos[world.ids[7]].handle(pack(request))

    @pytest.mark.parametrize("check", [True, False])
    def test_an_honest_sum_over_a_part_of_the_roster(self, check):
        world = World(8, max_missing=1, consistency_check=check)
        asked, there = world.ids[:6], world.ids[1:6]
        messages = {s: world.silos[s].contribute(0, asked, TABLE, world.values[s], CONTEXT) for s in there}
        total = carry(world.server.total(0, asked, TABLE, messages, CONTEXT), world.silos)
        assert total.survivors == tuple(there)
        assert is_input(total.values, exact(world, there))

    def test_a_survivor_outside_the_cohort_is_refused(self):
        world = World(8)
        world.contribute()
        request = world.named(SignRequest, range(8), cohort=world.roster.bitmap(frozenset(range(6))))
        with pytest.raises(ProtocolError, match="not in its cohort"):
            world.silos[world.ids[0]].handle(pack(request))


def test_a_server_stores_no_survivors_that_silos_would_refuse(monkeypatch):
    """A silo that comes late may still mend them. The control: stored first, they are the only ones."""

    def apart(self, survivors):
        if len(survivors) < 5:
            raise ProtocolError("they could be taken apart")

    monkeypatch.setattr(Session, "check_survivors", apart)
    world = World(5)
    messages = world.contribute()
    four = {s: messages[s] for s in world.ids[1:]}
    with pytest.raises(AggregationError, match=f"could be taken apart; nothing usable of '{world.ids[0]}'"):
        world.total(four)
    assert is_input(world.total(messages).values, exact(world))
    world.server._store.put({"survivors/0": world.roster.bitmap(frozenset(range(1, 5)))})
    with pytest.raises(AggregationError):
        world.total(messages)


class TestHomomorphic:
    """The key holder and silos of encrypted sums refuse the same."""

    @pytest.mark.parametrize("options", [{}, {"masks": False}, {"scheme": "ckks"}])
    def test_nobody_may_be_missing_by_default(self, options):
        world = HomomorphicWorld(4, table=SMALL, values=small_values(4), max_missing=0, **options)
        messages = world.contribute()
        request = world.signed_request(messages)
        del messages[world.victim]
        world.server._store.drop(["survivors/0"])
        with pytest.raises(AggregationError, match="past max_missing = 0"):
            world.total(messages)
        three = world.roster.bitmap(frozenset({0, 2, 3}))
        with pytest.raises(ProtocolError, match="past max_missing = 0"):
            world.holder.handle(pack_encrypted(request._replace(survivors=three)))

    def difference(self, options, question=b""):
        """One question at two indices, the second time with one silo declared lost; and that silo's values."""
        world = HomomorphicWorld(4, table=SMALL, values=small_values(4), max_missing=1, **options)
        totals = []
        for index in range(2):
            carry(world.local.prepare(index), world.silos)
            messages = world.contribute(index, question)
            if index:
                del messages[world.victim]
            totals.append(world.total(messages, index).values)
        return totals[0] - totals[1], world.values[world.victim]

    @pytest.mark.parametrize("options", [{}, {"masks": False}, {"scheme": "ckks"}])
    def test_one_set_a_question_where_one_may_be_missing(self, options):
        with pytest.raises(AggregationError, match="0 of 4 silos signed the survivors"):
            self.difference(options, QUESTION)

    @pytest.mark.parametrize("options", [{}, {"masks": False}, {"scheme": "ckks"}])
    def test_control_where_no_question_is_named_the_difference_is_its_term(self, options):
        # CKKS floods totals with an sd of 2e-5 of the bound.
        np.testing.assert_allclose(*self.difference(options), atol=1e-2)

    def test_a_site_may_allow_fewer(self):
        world = HomomorphicWorld(4, max_missing=1, masks=False)
        name = world.ids[0]
        inner = world.silos[name]
        own = HomomorphicSilo(
            world.roster, name, inner._identity, world.config, world.stores[name], max_missing=0, unbound=True,
        )  # fmt: skip
        world.contribute()
        everyone, three = (world.roster.bitmap(frozenset(s)) for s in (range(4), {0, 2, 3}))
        request = SignRequest(0, everyone, three, world.table.digest, CONTEXT, b"", [], [])
        with pytest.raises(ProtocolError, match="max_missing = 0"):
            own.handle(pack(request))


def _small():
    from secure_fvi.aggregation import Block, BlockTable

    return BlockTable((Block("b", (4,), 10.0),))


SMALL = _small()


def small_values(count):
    rng = np.random.default_rng(3)
    return {s: rng.uniform(-10, 10, 4) for s in sorted(names(count))}


def connected(order, honest, k):
    """Whether the honest survivors share masks in one connected graph."""
    honest = set(honest)
    seen, todo = set(), [min(honest)] if honest else []
    while todo:
        member = todo.pop()
        if member not in seen:
            seen.add(member)
            todo += [v for v in ring_neighbours(order, order.index(member), k) if v in honest]
    return seen == honest


def ring_session(silos, k, least, order=None):
    """A session on the k-regular graph that asks for `least` survivors in each window."""
    roster = types.SimpleNamespace(
        session=bytes(32),
        hash=bytes(32),
        size=silos,
        corrupt=0.1,
        neighbourhood=types.SimpleNamespace(complete=False, k=k, threshold=2 * k // 3 + 1),
    )
    session = Session(roster, bytes(32), range(silos), order or range(silos))
    session.__dict__["least_in_window"] = least
    return session


class TestGraph:
    @pytest.mark.parametrize(("silos", "k", "colluders"), [(9, 4, 1), (10, 4, 1), (9, 6, 2), (11, 6, 1)])
    def test_every_accepted_set_is_connected_whatever_colluders_do(self, silos, k, colluders):
        """Brute force: all survivor sets, and all colluders of whom no window of k/2 has more than `colluders`."""
        session, order, width = ring_session(silos, k, colluders + 1), tuple(range(silos)), k // 2
        windows = [{(at + step) % silos for step in range(width)} for at in range(silos)]
        accepted = []
        for bits in range(1, 2**silos):
            survivors = {m for m in range(silos) if bits >> m & 1}
            try:
                session.check_survivors(survivors)
            except ProtocolError:
                assert min(len(w & survivors) for w in windows) <= colluders
                continue
            assert min(len(w & survivors) for w in windows) > colluders
            accepted.append(survivors)
        assert accepted
        few = [set(c) for n in range(4) for c in itertools.combinations(range(silos), n)]
        few = [c for c in few if max(len(w & c) for w in windows) <= colluders]
        for survivors in accepted:
            for bad in few:
                assert connected(order, survivors - bad, k)

    def test_control_one_less_in_a_window_lets_it_be_split(self):
        silos, k, colluders = 10, 4, 1
        session, split = ring_session(silos, k, colluders), 0
        for bits in range(1, 2**silos):
            survivors = {m for m in range(silos) if bits >> m & 1}
            try:
                session.check_survivors(survivors)
            except ProtocolError:
                continue
            split += any(
                not connected(tuple(range(silos)), survivors - {a, b}, k)
                for a, b in itertools.combinations(range(silos), 2)
            )
        assert split

    @pytest.mark.parametrize(("members", "colluders", "width"), [(10, 3, 4), (12, 4, 3), (9, 2, 5)])
    def test_the_tail_is_that_of_all_ways_to_place_the_colluders(self, members, colluders, width):
        ways = list(itertools.combinations(range(members), colluders))
        for least in range(width + 2):
            hits = sum(len(set(w) & set(range(width))) >= least for w in ways)
            tail = log2_hypergeometric_tail(members, colluders, width, least)
            assert 2**tail == pytest.approx(hits / len(ways))

    def test_the_least_is_the_smallest_that_holds_over_all_windows(self):
        for members, colluders, width in ((1000, 100, 53), (128, 12, 25), (44, 4, 20)):
            least = least_in_window(members, colluders, width)

            def all_windows(at_least, m=members, c=colluders, w=width):
                return np.log2(m) + log2_hypergeometric_tail(m, c, w, at_least)

            assert all_windows(least) <= -40 < all_windows(least - 1)
        assert least_in_window(100, 50, 5) == 6  # more than there are: no graph of that degree is used
        assert least_in_window(100, 0, 5) == 1

    def test_honest_losses_are_never_refused(self):
        """20,000 random losses of 10% on 1,000 silos. The chance that any is refused is below 2^-34.3 each."""
        hood = neighbourhood(1000, 0.1, 0.1)
        width, rng = hood.k // 2, np.random.default_rng(0)
        refused = 0
        for _ in range(20):
            ranks = rng.random((1000, 1000)).argsort(1)
            there = np.ones((1000, 1000), np.int16)
            np.put_along_axis(there, ranks[:, :100], 0, 1)
            sums = np.cumsum(np.concatenate([there, there[:, : width - 1]], 1), 1)
            windows = sums[:, width - 1 :] - np.concatenate([np.zeros((1000, 1), sums.dtype), sums[:, : 1000 - 1]], 1)
            refused += int((windows.min(1) < hood.least_in_window).sum())
        assert refused == 0
        # The same through the check itself, and its control: chosen losses of as many.
        session = ring_session(1000, hood.k, hood.least_in_window)
        for _ in range(50):
            session.check_survivors(frozenset(rng.permutation(1000)[100:].tolist()))
        with pytest.raises(ProtocolError, match="could be taken apart"):
            session.check_survivors(frozenset(range(26, 1000)) - frozenset(range(100, 174)))

    @pytest.mark.parametrize(("colluders", "isolates"), [(19, True), (6, False)])
    def test_a_third_in_league_isolates_silos_of_a_large_roster(self, colluders, isolates):
        """Fewer than a third of 64, in random places: of half the rings a server can name survivors that silos accept
        and that leave one of them with colluders for all its neighbours. The control: the share that was assumed."""
        hood, rng, found = neighbourhood(64, 0.1, 0.1), np.random.default_rng(0), 0
        assert Masked(max_missing=25).withstands(64, True) == 6
        session = ring_session(64, hood.k, hood.least_in_window)
        for _ in range(30):
            league = set(rng.permutation(64)[:colluders].tolist())
            for alone in set(range(64)) - league:
                near = set(ring_neighbours(range(64), alone, hood.k))
                survivors = frozenset(range(64)) - (near - league)
                with suppress(ProtocolError):
                    session.check_survivors(survivors)
                    found += 1
                    assert not connected(range(64), survivors - league, hood.k)
                    break
        assert (found > 5) == isolates
        assert isolates or not found

    def test_the_graph_says_what_it_withstands(self):
        text = str(neighbourhood(1000, 0.1, 0.1))
        assert "whatever survivors are named: each 53 consecutive silos must keep 28" in text


class TestIsolation:
    """Survivors that are no neighbours of each other, named after all have contributed."""

    def attack(self, check):
        ids = sorted(names(48))
        identities = {s: Identity() for s in ids}
        roster = Masked(max_missing=45, consistency_check=check, batch=4).roster(
            {s: i.public_key for s, i in identities.items()}
        )
        assert not roster.neighbourhood.complete
        order = tuple(range(48))
        session = Session(roster, bytes(32), order, order)
        k = roster.neighbourhood.k
        alone = {0, k // 2 + 1, k // 2 + 2}
        assert not connected(order, alone, k)
        return session, alone

    @pytest.mark.parametrize("check", [True, False])
    def test_is_refused(self, check):
        session, alone = self.attack(check)
        with pytest.raises(ProtocolError, match="could be taken apart"):
            session.check_survivors(alone)

    @pytest.mark.parametrize("most", [0, 1])
    def test_a_sampled_cohort_that_the_graph_cannot_hold_gets_no_contribution(self, most):
        world = World(48, max_missing=most, batch=4)
        asked = [world.ids[p] for p in world.session._order[:6]]
        with pytest.raises(ProtocolError, match="could be taken apart"):
            world.silos[asked[0]].contribute(0, asked, TABLE, world.values[asked[0]], CONTEXT)

    def apart(self, count, check):
        """A world of so many silos that have contributed, what they sent, and survivors of whom no two share a mask."""
        world = World(count, max_missing=count - 3, consistency_check=check, batch=2)
        messages = world.contribute()
        alone = []
        for place in world.session._order:
            if not any(place in world.session.neighbours(other) for other in alone):
                alone.append(place)
        if len(alone) < 3:  # just above the size at which the graph is complete: one alone, and any two beyond it
            first, k = world.session._order[0], world.roster.neighbourhood.k
            alone = [first, *world.session._order[k // 2 + 1 : k // 2 + 3]]
        return world, messages, alone

    @pytest.mark.parametrize(("count", "check"), [(44, True), (48, True), (48, False), (128, True)])
    def test_silos_refuse_to_sign_and_reveal(self, count, check):
        world, _, alone = self.apart(count, check)
        request = world.sign_request(alone) if check else world.reveal_request(alone)
        for silo in world.silos.values():
            with pytest.raises(ProtocolError, match="could be taken apart"):
                silo.handle(request)

    @pytest.mark.parametrize(("count", "check", "read"), [(44, True, 1), (48, True, 1), (48, False, 1), (128, True, 4)])
    def test_control_without_the_check_they_do(self, monkeypatch, count, check, read):
        """All sign such survivors where signatures are asked for, all reveal, and vectors are read from one sum: of 128
        silos those of all that were named."""
        monkeypatch.setattr(Session, "check_survivors", lambda self, survivors: None)
        world, messages, alone = self.apart(count, check)
        request = world.reveal_request(alone)
        if check:
            ask = world.sign_request(alone)
            signed = [unpack(silo.handle(ask), SetSignature).signature for silo in world.silos.values()]
            signers = world.roster.bitmap(frozenset(range(count)))
            request = pack(world.named(RevealRequest, alone, signers=signers, signatures=signed))
        replies = {p: silo.handle(request) for p, silo in enumerate(world.silos.values())}
        opened = 0
        for victim in alone:
            around = world.session.neighbours(victim)
            if not set(alone).isdisjoint(around):
                continue
            b = world.recover(dict(world.shares_of(victim, h, replies[h]) for h in around))
            seeds = {}
            for v in around:
                e = world.recover(dict(world.shares_of(v, h, replies[h]) for h in world.session.holders(v)))
                seeds[v] = world.seeds_under(v, e)[victim]
            found = world.open_contribution(victim, payload_of(messages[world.ids[victim]]), b, seeds)
            assert is_input(found, world.values[world.ids[victim]])
            opened += 1
        assert opened == read


def test_verify_is_asked_for_each_survivor(monkeypatch):
    """The cost of a part of a roster: a silo that was not asked verifies each survivor once, the others none."""
    counted = []
    verify = Roster.verify

    def counting(self, place, signature, statement):
        counted.append(sys._getframe(1).f_code.co_name)
        return verify(self, place, signature, statement)

    monkeypatch.setattr(Roster, "verify", counting)
    world = World(8, max_missing=1)
    messages = {s: world.silos[s].contribute(0, world.ids[:6], TABLE, world.values[s], CONTEXT) for s in world.ids[:6]}
    counted.clear()
    carry(world.server.total(0, world.ids[:6], TABLE, messages, CONTEXT), world.silos)
    assert counted.count("_check_proofs") == 2 * 6
    assert counted.count("admit") == 6
