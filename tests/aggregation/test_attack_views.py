"""Attacks of a server that tells different silos different things; each beside its control."""

import numpy as np
import pytest
from sum_adversary import World, exact, is_input, payload_of, unsigned
from sum_fake_world import FakeWorld
from sum_network import CONTEXT

from secure_fvi.aggregation import Masked, masked_server, masked_silo, onetime
from secure_fvi.aggregation import session as session_module
from secure_fvi.aggregation.masked_silo import MaskedSilo, SiloBatch
from secure_fvi.aggregation.messages import (
    Activate,
    RevealRequest,
    SetSignature,
    Shares,
    SignRequest,
    pack,
    unpack,
)
from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import InputError, ProtocolError

VICTIM = 1


class TestSmallerWorld:
    """A key set, a batch or a cohort that leaves the victim alone with colluders."""

    def test_a_key_set_below_the_signature_threshold_is_refused(self):
        world = World(7, prepared=False)
        with pytest.raises(ProtocolError, match="a key set of 3 silos; at least 5 are needed"):
            FakeWorld(world, (0, 1, 2)).attack()

    def deliver_lie(self, world, members):
        """Deposits of `members` only are shown to the victim."""
        session, silo = world.session, world.silos[world.ids[VICTIM]]
        deposits = {m: world.batch.deposits[m] for m in members}
        lie = masked_server.ServerBatch(session, 0, deposits)
        return silo.handle(pack(lie.delivery(VICTIM)))

    def test_a_batch_below_the_signature_threshold_is_refused(self):
        world = World(7)
        world.restart_silos()
        silo = world.silos[world.ids[VICTIM]]
        own = silo._state._batches[0]
        own._delivery, own.active = None, False
        with pytest.raises(ProtocolError, match="a batch of 3 silos; at least 5 are needed"):
            self.deliver_lie(world, (0, 1, 2))

    def test_a_batch_that_others_did_not_sign_is_not_used(self):
        world = World(7)
        silo = world.silos[world.ids[VICTIM]]
        own = silo._state._batches[0]
        own._delivery, own.active = None, False
        silo._store.drop(["delivery/0/0"])
        self.deliver_lie(world, (0, 1, 2, 3, 4))
        signers = sorted(world.batch.signatures)[:5]
        activate = Activate(0, world.roster.bitmap(frozenset(signers)), [world.batch.signatures[s] for s in signers])
        with pytest.raises(ProtocolError, match="is not valid here"):
            silo.handle(pack(activate))
        with pytest.raises(ProtocolError, match="not agreed on yet"):
            world.contribute(ids=[world.ids[VICTIM]])

    def isolate(self, world):
        """The victim is told a cohort of itself and two colluders; all others hear of the whole cohort.

        Everybody's b is then revealed. The colluders give their pairwise seeds.
        """
        victim = world.ids[VICTIM]
        told = sorted([victim, world.ids[0], world.ids[2]])
        message = world.contribute(ids=[victim], cohort=told)[victim]
        world.contribute(ids=[s for s in world.ids if s != victim])
        request = world.reveal_request(range(len(world.ids)))
        with pytest.raises(ProtocolError, match="another cohort"):
            world.silos[victim].handle(request)
        replies = {h: world.silos[s].handle(request) for h, s in enumerate(world.ids) if s != victim}
        b = world.recover(dict(world.shares_of(VICTIM, h, r) for h, r in replies.items()))
        own = world.silos[victim]._state._batches[0]
        seeds = {m: onetime.pair_seeds(world.session, 0, own._pair_secrets[m], VICTIM, m)[:32] for m in (0, 2)}
        return world.open_contribution(VICTIM, payload_of(message), b, seeds)

    def test_a_smaller_cohort_takes_no_mask_away(self):
        world = World(7, consistency_check=False)
        assert not is_input(self.isolate(world), world.values[world.ids[VICTIM]])

    def test_control_masks_for_the_named_cohort_only_leave_the_input_open(self, monkeypatch):
        contribute, masks = MaskedSilo.contribute, SiloBatch.masks
        cohort_now = []

        def remembering(self, index, cohort, *rest):
            cohort_now[:] = [self._roster.places[s] for s in cohort]
            return contribute(self, index, cohort, *rest)

        def only_cohort(self, *arguments):
            others = self.session.neighbours(self.me)
            chosen = masks(self, *arguments)
            return chosen[:1] + [m for v, m in zip(others, chosen[1:], strict=True) if v in cohort_now]

        monkeypatch.setattr(MaskedSilo, "contribute", remembering)
        monkeypatch.setattr(SiloBatch, "masks", only_cohort)
        world = World(7, consistency_check=False)
        assert is_input(self.isolate(world), world.values[world.ids[VICTIM]])


class TestAnotherBroadcast:
    """One silo is shown another broadcast; its answer is not what the total of the others may be compared with."""

    OTHER = bytes(reversed(CONTEXT))

    def total(self, world):
        victim = world.ids[VICTIM]
        messages = world.contribute(ids=[s for s in world.ids if s != victim])
        messages |= world.contribute(ids=[victim], context=self.OTHER)
        return world.total(messages).values

    @pytest.mark.parametrize("check", [True, False])
    def test_it_counts_as_a_dropout(self, check):
        world = World(7, consistency_check=check)
        rest = [s for s in world.ids if s != world.ids[VICTIM]]
        assert is_input(self.total(world), exact(world, rest))
        assert "did not sign" in world.server.faults[world.ids[VICTIM]]

    @pytest.mark.parametrize("check", [True, False])
    def test_added_all_the_same_it_makes_the_total_noise(self, check, monkeypatch):
        unsigned(monkeypatch)
        world = World(7, consistency_check=check)
        truth = sum(world.values.values())
        # A uniform element lies within 1e-6 of the truth with chance below 1e-7.
        assert np.abs(self.total(world) - truth).min() > 1e-6

    @pytest.mark.parametrize("check", [True, False])
    def test_the_silo_refuses_to_sign_or_reveal(self, check):
        world = World(7, consistency_check=check)
        victim = world.ids[VICTIM]
        world.contribute(ids=[victim], context=self.OTHER)
        request = world.reveal_request(range(7))
        if check:
            request = world.sign_request(range(7))
        with pytest.raises(ProtocolError, match="another broadcast"):
            world.silos[victim].handle(request)

    def test_control_with_mask_keys_that_ignore_the_broadcast_the_total_is_exact(self, monkeypatch):
        def careless(session, digest, index, table, context, seed):
            return onetime.mask_key(session, digest, index, table, bytes(32), seed)

        unsigned(monkeypatch)
        monkeypatch.setattr(masked_silo, "mask_key", careless)
        monkeypatch.setattr(masked_server, "mask_key", careless)
        world = World(7)
        assert is_input(self.total(world), sum(world.values.values()))


def test_a_request_that_nobody_signed_names_no_survivors():
    """Else one message on the wire to each silo would end a sum that all of them could finish."""
    world = World(5, consistency_check=True)
    messages = world.contribute()
    request = world.named(RevealRequest, {0, 1, 2}, signers=world.roster.bitmap(frozenset()))
    for silo in world.silos.values():
        with pytest.raises(ProtocolError, match="0 signatures"):
            silo.handle(pack(request))
    np.testing.assert_allclose(world.total(messages).values, sum(world.values.values()), atol=1e-6)


class TestTwoSurvivorSets:
    """One half is told that the victim survived, the other that it dropped out."""

    def attack(self, world):
        message = world.contribute()[world.ids[VICTIM]]
        everyone = frozenset(range(5))
        halves = ((everyone, (0, 1)), (everyone - {VICTIM}, (2, 3, 4)))
        collected = []
        for survivors, holders in halves:
            request = world.reveal_request(survivors)
            if world.roster.consistency_check:
                request = self.signed(world, survivors, holders)
            replies = {h: world.silos[world.ids[h]].handle(request) for h in holders}
            collected.append(dict(world.shares_of(VICTIM, h, r) for h, r in replies.items()))
        if any(len(shares) < world.session.threshold for shares in collected):
            return None
        b, e = (world.recover(shares) for shares in collected)
        return world.open_contribution(VICTIM, payload_of(message), b, world.seeds_under(VICTIM, e))

    def signed(self, world, survivors, holders):
        """The best request the server can make for one half: with that half's signatures."""
        ask = world.sign_request(survivors)
        replies = [unpack(world.silos[world.ids[h]].handle(ask), SetSignature) for h in holders]
        signers = world.roster.bitmap(frozenset(holders))
        request = world.named(RevealRequest, survivors, signers=signers, signatures=[r.signature for r in replies])
        return pack(request)

    def weaken(self, monkeypatch):
        monkeypatch.setattr(session_module, "complete_threshold", lambda silos: 2)

    def test_the_consistency_check_alone_stops_it(self, monkeypatch):
        self.weaken(monkeypatch)
        with pytest.raises(ProtocolError, match="signatures; 4 of the roster are needed"):
            self.attack(World(5))

    def test_the_share_threshold_alone_stops_it(self):
        assert self.attack(World(5, consistency_check=False)) is None

    def test_control_without_either_the_input_is_open(self, monkeypatch):
        self.weaken(monkeypatch)
        world = World(5, consistency_check=False)
        assert is_input(self.attack(world), world.values[world.ids[VICTIM]])

    def opened(self, world, colluders):
        """What the server reads of the victim with the last `colluders` silos in league: they sign both sets, and hand
        over the shares that they hold."""
        size, needed = len(world.ids), world.roster.signatures_needed
        bad, honest = range(size - colluders, size), [s for s in range(size - colluders) if s != VICTIM]
        own = message = world.contribute()[world.ids[VICTIM]]
        near = [VICTIM, *honest[: max(needed - colluders - 1, 0)]]
        everyone, shares = frozenset(range(size)), {}
        for survivors, told in ((everyone, near), (everyone - {VICTIM}, [s for s in honest if s not in near])):
            ask = world.sign_request(survivors)
            signatures = {s: unpack(world.silos[world.ids[s]].handle(ask), SetSignature).signature for s in told}
            for s in bad:
                statement = world.silos[world.ids[s]]._named(unpack(ask, SignRequest), signed=False)[2]
                signatures[s] = world.identities[world.ids[s]].sign(statement)
            signers = sorted(signatures)
            request = pack(
                world.named(
                    RevealRequest, survivors, signers=world.roster.bitmap(frozenset(signers)),
                    signatures=[signatures[s] for s in signers],
                )
            )  # fmt: skip
            replies = {s: unpack(world.silos[world.ids[s]].handle(request), Shares) for s in told}
            if VICTIM in told:
                own = replies[VICTIM].own
                continue
            for s, reply in replies.items():
                share = reply.shares[world.batch.held_by(s).index(VICTIM)]
                shares[world.session.position(VICTIM, s)] = share
        for s in bad:
            held = world.silos[world.ids[s]]._state._batches[0]._held[VICTIM]
            shares[world.session.position(VICTIM, s)] = held[0, 1].tobytes()
        if len(shares) < world.session.threshold:
            return None
        seeds = world.seeds_under(VICTIM, world.recover(shares))
        return world.open_contribution(VICTIM, payload_of(message), own, seeds)

    @pytest.mark.parametrize("silos", [4, 7, 8])
    def test_as_many_colluders_as_the_sums_are_said_to_withstand_open_nothing(self, silos):
        """Noise in shares counts on it. The control: one more opens the victim's term."""
        most = Masked(max_missing=1).withstands(silos, True)
        with pytest.raises(ProtocolError, match="signatures"):
            self.opened(World(silos, max_missing=1), most)
        world = World(silos, max_missing=1)
        assert is_input(self.opened(world, most + 1), world.values[world.ids[VICTIM]])

    def test_signatures_of_one_member_count_once_and_forged_ones_not_at_all(self):
        world = World(5)
        world.contribute()
        honest = unpack(self.signed(world, frozenset(range(5)), (0, 1, 2, 3, 4)), RevealRequest)
        silo = world.silos[world.ids[0]]
        forged = honest._replace(signatures=[*honest.signatures[:-1], bytes(64)])
        short = honest._replace(signatures=honest.signatures[:4])
        doubled = honest._replace(
            signers=world.roster.bitmap(frozenset({0, 1, 2})),
            signatures=honest.signatures[:3] + honest.signatures[:1],
        )
        for request in (forged, short, doubled):
            with pytest.raises(ProtocolError):
                silo.handle(pack(request))
        silo.handle(pack(honest))


class TestMinimumCohort:
    def test_a_small_cohort_gets_no_contribution(self):
        world = World(5)
        with pytest.raises(ProtocolError, match="below min_cohort = 3"):
            world.contribute(ids=[world.ids[VICTIM]], cohort=world.ids[:2])

    @pytest.mark.parametrize("check", [True, False])
    def test_few_survivors_get_no_answer(self, check):
        world = World(5, consistency_check=check)
        world.contribute()
        request = world.reveal_request({VICTIM, 3})
        if check:
            request = world.sign_request({VICTIM, 3})
        for silo in world.silos.values():
            with pytest.raises(ProtocolError, match="2 survivors, below min_cohort = 3"):
                silo.handle(request)

    def test_control_at_a_minimum_of_two_one_colluder_has_the_input(self):
        world = World(5, min_cohort=2)
        messages = world.contribute()
        pair = [world.ids[VICTIM], world.ids[3]]
        total = world.total({s: messages[s] for s in pair})
        colluder = world.values[world.ids[3]]
        assert is_input(total.values - colluder, world.values[world.ids[VICTIM]])

    def test_a_site_refuses_a_roster_below_its_own_minimum(self):
        identities = {s: Identity() for s in ("a", "b")}
        roster = Masked(min_cohort=2).roster({s: i.public_key for s, i in identities.items()})
        with pytest.raises(InputError, match="below this site's, 3"):
            MaskedSilo(roster, "a", identities["a"], min_cohort=3)
        assert MaskedSilo(roster, "a", identities["a"], min_cohort=2).silo_id == "a"

    def test_a_survivor_that_contributed_nothing_is_refused(self):
        world = World(5)
        others = [s for s in world.ids if s != world.ids[VICTIM]]
        world.contribute(ids=others)
        with pytest.raises(ProtocolError, match="did not contribute"):
            world.silos[world.ids[VICTIM]].handle(world.sign_request(range(5)))
