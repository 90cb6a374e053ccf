"""Attacks of a server that tells different silos different things; each beside its control."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from sum_adversary import TABLE, World, is_input
from sum_network import CONTEXT, carry

from secure_fvi.aggregation import Masked, onetime, silo_batch, unmask
from secure_fvi.aggregation import session as session_module
from secure_fvi.aggregation.masked_setup import MAX_ATTEMPTS, Setup
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.messages import (
    Activate,
    Contribution,
    Deposit,
    DepositRequest,
    KeyAdvert,
    KeySet,
    KeysRequest,
    NonceReveal,
    Nonces,
    RevealRequest,
    SetSignature,
    SignRequest,
    pack,
    unpack,
    unpack_any,
)
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.aggregation.session import Session, key_set_hash, nonce_commitment
from secure_fvi.aggregation.silo_batch import SiloBatch
from secure_fvi.errors import AggregationError, InputError, ProtocolError

VICTIM = 1


def payload_of(message):
    return unpack(message, Contribution).payload


class FakeWorld:
    """What one silo is shown: a session in which everybody else's X25519 key is the adversary's."""

    def __init__(self, world, members):
        self.world, self.members = world, members
        self.victim = world.silos[world.ids[VICTIM]]
        self.private = {m: X25519PrivateKey.generate() for m in members if m != VICTIM}

    def attack(self):
        """Set-up, refill and one contribution of the victim, all by the adversary; what it then reads."""
        world, roster = self.world, self.world.roster
        advert = unpack(self.victim.handle(pack(KeysRequest(0))), KeyAdvert)
        rows = []
        for m in self.members:
            if m == VICTIM:
                rows.append((advert.public_key, advert.nonce_commitment, advert.signature))
            else:
                rows.append((self.private[m].public_key().public_bytes_raw(), bytes([m]) * 32, bytes(64)))
        bitmap = roster.bitmap(frozenset(self.members))
        key_set = KeySet(0, bitmap, *([list(c) for c in zip(*rows, strict=True)]))
        self.victim.handle(pack(key_set))
        named = key_set_hash(roster, 0, bitmap, key_set.public_keys, key_set.nonce_commitments)
        session = Session(roster, named, self.members, self.members)
        public = X25519PublicKey.from_public_bytes(advert.public_key)
        secrets = {m: key.exchange(public) for m, key in self.private.items()}

        deposit = unpack(self.victim.handle(pack(DepositRequest(0))), Deposit)
        shares = {}
        for m, envelope in zip(session.neighbours(VICTIM), deposit.envelopes, strict=True):
            opened = onetime.open_envelope(session, 0, VICTIM, m, secrets[m], envelope)
            shares[session.position(VICTIM, m)] = opened[0, 0].tobytes()

        deposits = {VICTIM: deposit}
        for m in secrets:
            any_secrets = dict.fromkeys(session.members, bytes(32)) | {VICTIM: secrets[m]}
            deposits[m] = onetime.draw(session, m, 0, any_secrets).deposit
        batch = unmask.ServerBatch(session, 0, deposits)
        self.victim.handle(pack(batch.delivery(VICTIM)))
        message = self.victim.contribute(0, world.ids, TABLE, world.values[world.ids[VICTIM]], CONTEXT)

        positions = tuple(sorted(shares))[: session.threshold]
        rows = np.frombuffer(b"".join(shares[p] for p in positions), np.uint8).reshape(-1, 32)
        b = unmask.shamir.recover(positions, rows).tobytes()
        seeds = {m: onetime.pair_seeds(session, 0, secrets[m], VICTIM, m)[:32] for m in secrets}
        return world.open_contribution(VICTIM, payload_of(message), b, seeds, session=session, digest=batch.digest)


class TestKeySubstitution:
    def test_refused(self):
        world = World(prepared=False, consistency_check=False)
        with pytest.raises(ProtocolError, match="is not signed with its identity"):
            FakeWorld(world, (0, 1, 2, 3)).attack()

    def test_control_without_signatures_the_input_is_open(self, monkeypatch):
        monkeypatch.setattr(Roster, "verify", lambda self, place, signature, statement: True)
        world = World(prepared=False, consistency_check=False)
        opened = FakeWorld(world, (0, 1, 2, 3)).attack()
        assert is_input(opened, world.values[world.ids[VICTIM]])

    def test_an_advert_of_another_session_or_attempt_or_silo_is_refused(self):
        world = World(prepared=False)
        other = World(prepared=False)
        adverts = {s: unpack(silo.handle(pack(KeysRequest(0))), KeyAdvert) for s, silo in world.silos.items()}
        old = adverts[world.ids[2]]
        later = unpack(world.silos[world.ids[2]].handle(pack(KeysRequest(1))), KeyAdvert)
        foreign = unpack(other.silos[other.ids[2]].handle(pack(KeysRequest(0))), KeyAdvert)
        genuine = [adverts[s] for s in world.ids]
        for replacement in (later, foreign, adverts[world.ids[0]], old._replace(nonce_commitment=bytes(32))):
            rows = [replacement if i == 2 else a for i, a in enumerate(genuine)]
            key_set = KeySet(0, b"\x0f", *[list(c) for c in zip(*(r[1:] for r in rows), strict=True)])
            with pytest.raises(ProtocolError, match="not signed with its identity"):
                world.silos[world.ids[0]].handle(pack(key_set))
        key_set = KeySet(0, b"\x0f", *[list(c) for c in zip(*(r[1:] for r in genuine), strict=True)])
        assert unpack(world.silos[world.ids[0]].handle(pack(key_set)), NonceReveal).attempt == 0

    def test_a_key_of_small_order_is_refused(self):
        world = World(prepared=False)
        adverts = [unpack(world.silos[s].handle(pack(KeysRequest(0))), KeyAdvert) for s in world.ids]
        zero = bytes(32)
        statement = session_module.advert_statement(world.roster, 0, 2, zero, adverts[2].nonce_commitment)
        signature = world.identities[world.ids[2]].sign(statement)
        adverts[2] = adverts[2]._replace(public_key=zero, signature=signature)
        key_set = KeySet(0, b"\x0f", *[list(c) for c in zip(*(r[1:] for r in adverts), strict=True)])
        with pytest.raises(ProtocolError, match="unusable"):
            world.silos[world.ids[0]].handle(pack(key_set))


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
        lie = unmask.ServerBatch(session, 0, deposits)
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
        replies = {h: world.silos[s].handle(request) for h, s in enumerate(world.ids)}
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
    def test_the_total_is_noise(self, check):
        world = World(7, consistency_check=check)
        exact = sum(world.values.values())
        # A uniform element lies within 1e-6 of the truth with chance below 1e-7.
        assert np.abs(self.total(world) - exact).min() > 1e-6

    @pytest.mark.parametrize("check", [True, False])
    def test_the_silo_refuses_to_sign_or_reveal(self, check):
        world = World(7, consistency_check=check)
        victim = world.ids[VICTIM]
        world.contribute(ids=[victim], context=self.OTHER)
        request = world.reveal_request(range(7))
        if check:
            request = pack(SignRequest(0, world.roster.bitmap(frozenset(range(7))), TABLE.digest, CONTEXT))
        with pytest.raises(ProtocolError, match="another broadcast"):
            world.silos[victim].handle(request)

    def test_control_with_mask_keys_that_ignore_the_broadcast_the_total_is_exact(self, monkeypatch):
        def careless(session, digest, index, table, context, seed):
            return onetime.mask_key(session, digest, index, table, bytes(32), seed)

        monkeypatch.setattr(silo_batch, "mask_key", careless)
        monkeypatch.setattr(unmask, "mask_key", careless)
        world = World(7)
        assert is_input(self.total(world), sum(world.values.values()))


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
        bitmap = world.roster.bitmap(survivors)
        ask = pack(SignRequest(0, bitmap, TABLE.digest, CONTEXT))
        replies = [unpack(world.silos[world.ids[h]].handle(ask), SetSignature) for h in holders]
        signers = world.roster.bitmap(frozenset(holders))
        return pack(
            RevealRequest(
                0,
                bitmap,
                TABLE.digest,
                CONTEXT,
                signers,
                [r.contribution for r in replies],
                [r.signature for r in replies],
            )
        )

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
            contributions=honest.contributions[:3] + honest.contributions[:1],
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
            request = pack(SignRequest(0, world.roster.bitmap(frozenset({VICTIM, 3})), TABLE.digest, CONTEXT))
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
        bitmap = world.roster.bitmap(frozenset(range(5)))
        with pytest.raises(ProtocolError, match="did not contribute"):
            world.silos[world.ids[VICTIM]].handle(pack(SignRequest(0, bitmap, TABLE.digest, CONTEXT)))


class TestGraphSeed:
    """Neighbours on a k-regular graph follow from nonces that were committed to before any was shown."""

    def world(self):
        world = World(34, prepared=False, corrupt=0.0, lost=0.0)
        adverts = [unpack(world.silos[s].handle(pack(KeysRequest(0))), KeyAdvert) for s in world.ids]
        members = world.roster.bitmap(frozenset(range(34)))
        key_set = KeySet(0, members, *[list(c) for c in zip(*(a[1:] for a in adverts), strict=True)])
        return world, key_set

    def test_a_nonce_other_than_the_one_committed_to_is_refused(self):
        world, key_set = self.world()
        nonces = [unpack(silo.handle(pack(key_set)), NonceReveal).nonce for silo in world.silos.values()]
        ground = [bytes(32), *nonces[1:]]
        silo = world.silos[world.ids[5]]
        with pytest.raises(ProtocolError, match="not what it committed to"):
            silo.handle(pack(Nonces(0, ground)))
        with pytest.raises(ProtocolError, match="a nonce of each member"):
            silo.handle(pack(Nonces(0, nonces[:-1])))
        silo.handle(pack(Nonces(0, nonces)))

    def test_control_without_commitments_a_nonce_can_be_ground_for_neighbours(self, monkeypatch):
        monkeypatch.setattr(Setup, "accept_nonces", accept_any_nonces)
        world, key_set = self.world()
        nonces = [unpack(silo.handle(pack(key_set)), NonceReveal).nonce for silo in world.silos.values()]
        colluders = {7, 8}
        named = key_set_hash(world.roster, 0, key_set.members, key_set.public_keys, key_set.nonce_commitments)
        for guess in range(20_000):
            ground = [*nonces[:7], guess.to_bytes(32, "big"), *nonces[8:]]
            order = session_module.graph_order(named, range(34), ground)
            at = order.index(5)
            if {order[at - 1], order[(at + 1) % 34]} == colluders:
                break
        silo = world.silos[world.ids[5]]
        silo.handle(pack(Nonces(0, ground)))
        assert set(silo._state._setup.session.neighbours(5)) == colluders

    def test_a_second_key_set_gets_no_nonce(self):
        world, key_set = self.world()
        silo = world.silos[world.ids[5]]
        silo.handle(pack(key_set))
        fewer = KeySet(0, world.roster.bitmap(frozenset(range(33))), *[c[:33] for c in key_set[2:]])
        with pytest.raises(ProtocolError, match="another key set"):
            silo.handle(pack(fewer))

    def test_set_ups_are_counted(self):
        world = World(prepared=False)
        silo = world.silos[world.ids[0]]
        for attempt in range(MAX_ATTEMPTS):
            silo.handle(pack(KeysRequest(attempt)))
        with pytest.raises(ProtocolError, match="set-ups in one session"):
            silo.handle(pack(KeysRequest(MAX_ATTEMPTS)))
        with pytest.raises(ProtocolError, match="an old set-up"):
            silo.handle(pack(KeysRequest(0)))

    def test_a_silo_lost_between_commitment_and_nonce_makes_the_set_up_start_anew(self):
        world = World(34, prepared=False, corrupt=0.0, lost=0.0)
        carry(world.server.prepare(0), world.silos, lost=[(), {world.ids[3]}])
        assert world.server._state.session.members == tuple(range(34))
        assert world.silos[world.ids[0]]._state._setup.attempt == 1
        assert is_input(world.total(world.contribute()).values, sum(world.values.values()))

    def test_a_silo_that_never_reveals_is_left_out(self):
        world = World(34, prepared=False, corrupt=0.0, lost=0.0)
        away = {world.ids[3]}
        carry(world.server.prepare(0), world.silos, lost=[(), away, (), away])
        rest = [s for s in world.ids if s not in away]
        assert world.server._state.session.members == tuple(world.roster.places[s] for s in rest)
        total = world.total(world.contribute(ids=rest))
        assert is_input(total.values, sum(world.values[s] for s in rest))

    def test_set_ups_that_always_lose_somebody_end_in_an_error(self):
        world = World(34, prepared=False, corrupt=0.0, lost=0.0)
        lost = [step for i in range(MAX_ATTEMPTS) for step in ((), {world.ids[i]})]
        with pytest.raises(AggregationError, match="no set-up in 8 attempts"):
            carry(world.server.prepare(0), world.silos, lost=lost)

    @pytest.mark.parametrize("count", [7, 34])
    @pytest.mark.parametrize("fault", ["signature", "nonce", "key"])
    def test_one_bad_silo_does_not_cost_the_others_the_set_up(self, count, fault):
        world = World(count, prepared=False, corrupt=0.0, lost=0.0)
        bad = world.ids[3]

        class Bad:
            def handle(self, data):
                reply = unpack_any(world.silos[bad].handle(data))
                if fault == "signature" and isinstance(reply, KeyAdvert):
                    reply = reply._replace(signature=bytes(64))
                if fault == "key" and isinstance(reply, KeyAdvert):
                    statement = session_module.advert_statement(
                        world.roster, reply.attempt, 3, bytes(32), reply.nonce_commitment
                    )
                    signature = world.identities[bad].sign(statement)
                    reply = reply._replace(public_key=bytes(32), signature=signature)
                if fault == "nonce" and isinstance(reply, NonceReveal):
                    reply = reply._replace(nonce=bytes(32))
                return pack(reply)

        carry(world.server.prepare(0), world.silos | {bad: Bad()})
        assert bad in world.server.faults
        rest = [s for s in world.ids if s != bad]
        total = carry(
            world.server.total(0, world.ids, TABLE, world.contribute(ids=rest), CONTEXT),
            {s: world.silos[s] for s in rest},
            lost=(),
        )
        assert is_input(total.values, sum(world.values[s] for s in rest))


def accept_any_nonces(self, message):
    """`Setup.accept_nonces` without its check."""
    self._fix(session_module.graph_order(self._hash, self._members, message.nonces))


def test_nonce_commitments_differ_by_silo_and_attempt():
    roster = World(prepared=False).roster
    nonce = bytes(32)
    assert len({nonce_commitment(roster, a, p, nonce) for a in range(2) for p in range(3)}) == 6
