"""Attacks that ask for both secrets of one silo, use a secret twice, or guess it; each beside its control."""

import itertools

import msgpack
import numpy as np
import pytest
from sum_adversary import TABLE, World, is_input, payload_of
from sum_network import CONTEXT, carry

from secure_fvi.aggregation import onetime, shamir
from secure_fvi.aggregation.masked_silo import SiloBatch
from secure_fvi.aggregation.messages import RevealRequest, pack
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.errors import AggregationError, ProtocolError

VICTIM = 1


class TestIndexUsedTwice:
    def attack(self, world):
        """The difference of two inputs under the same masks."""
        victim = world.ids[VICTIM]
        first = world.contribute()[victim]
        world.values[victim] = -world.values[victim]
        second = world.contribute()[victim]
        ring = Ring(TABLE, 64, world.roster.size)
        one, two = (np.frombuffer(payload_of(m), ring.dtype) for m in (first, second))
        return ring.decode(one - two) / 2

    @pytest.mark.parametrize("restart", [False, True])
    def test_refused(self, restart):
        world = World()
        world.contribute(index=2)
        if restart:
            world.restart_silos()
        for index in (2, 1, 0):
            with pytest.raises(ProtocolError, match="used already"):
                world.contribute(index=index)

    def test_control_without_the_rule_the_input_is_open(self, monkeypatch):
        world = World()
        silo, values = world.silos[world.ids[VICTIM]], world.values[world.ids[VICTIM]]
        monkeypatch.setattr(type(silo), "_last_index", lambda self: -1)
        monkeypatch.setattr(type(silo), "_use", lambda self, *arguments: None)
        monkeypatch.setattr(type(silo), "_put", lambda self, *arguments: None)
        assert is_input(self.attack(world), values)


class TestSecretUsedTwice:
    def masks(self, world, index):
        victim = world.silos[world.ids[VICTIM]]
        batch = victim._state._batches[index // world.roster.batch]
        return [m.key for m in batch.masks(index, TABLE.digest, CONTEXT)]

    def test_every_index_and_batch_has_its_own_masks(self):
        world = World(batch=4)
        keys = [self.masks(world, i) for i in range(4)]
        carry(world.server.prepare(4), world.silos)
        keys += [self.masks(world, i) for i in range(4, 8)]
        assert len({k for row in keys for k in row}) == 8 * 4

    def test_control_with_one_secret_for_all_indices_differences_are_open(self, monkeypatch):
        # Seeds and keys that forget the index: two sums under the same masks.
        from secure_fvi.aggregation import masked_silo

        monkeypatch.setattr(masked_silo, "mask_key", lambda s, d, index, *rest: onetime.mask_key(s, d, 0, *rest))
        masks = SiloBatch.masks
        monkeypatch.setattr(SiloBatch, "masks", lambda self, index, *rest: masks(self, 0, *rest))
        world = World()
        victim, ring = world.ids[VICTIM], Ring(TABLE, 64, 4)
        before = world.values[victim]
        first = np.frombuffer(payload_of(world.contribute(0)[victim]), ring.dtype)
        world.values[victim] = -before
        second = np.frombuffer(payload_of(world.contribute(1)[victim]), ring.dtype)
        assert is_input(ring.decode(first - second) / 2, before)


class TestSurvivorAndDropped:
    """b opens the self mask, e the pairwise ones: whoever has both has the input."""

    def attack(self, world, between=lambda: None):
        message = world.contribute()[world.ids[VICTIM]]
        everyone = range(len(world.ids))
        b_shares, e_shares = {}, {}
        for survivors, shares in ((set(everyone), b_shares), (set(everyone) - {VICTIM}, e_shares)):
            request = world.reveal_request(survivors)
            for holder in everyone:
                reply = world.silos[world.ids[holder]].handle(request)
                position, share = world.shares_of(VICTIM, holder, reply)
                shares[position] = share
            between()
        seeds = world.seeds_under(VICTIM, world.recover(e_shares))
        return world.open_contribution(VICTIM, payload_of(message), world.recover(b_shares), seeds)

    def test_refused_in_two_messages(self):
        with pytest.raises(ProtocolError, match="other survivors of sum 0 were named before"):
            self.attack(World(consistency_check=False))

    def test_refused_across_a_restart(self):
        world = World(consistency_check=False)
        with pytest.raises(ProtocolError, match="other survivors of sum 0 were named before"):
            self.attack(world, between=world.restart_silos)

    def test_refused_when_first_asked_to_sign(self):
        world = World()
        world.contribute()
        silo = world.silos[world.ids[0]]
        everyone = frozenset(range(4))
        silo.handle(world.sign_request(everyone))
        with pytest.raises(ProtocolError, match="named before"):
            silo.handle(world.sign_request(everyone - {VICTIM}))

    def test_control_a_silo_that_forgets_opens_the_input(self, monkeypatch):
        monkeypatch.setattr(MemoryStore, "claim", lambda self, slot, value, *_, **__: value)
        world = World(consistency_check=False)
        assert is_input(self.attack(world), world.values[world.ids[VICTIM]])

    def test_control_a_store_that_forgets_across_a_restart_opens_the_input(self):
        world = World(consistency_check=False)

        def rolled_back():
            for store in world.stores.values():
                store.drop([s for s in store._slots if s.startswith("survivors/")])
            world.restart_silos()

        assert is_input(self.attack(world, between=rolled_back), world.values[world.ids[VICTIM]])

    def test_no_single_message_asks_for_both(self):
        world = World(consistency_check=False)
        world.contribute()
        silo = world.silos[world.ids[0]]
        own = silo._state.batch_of(0)
        for survivors in itertools.combinations(range(4), 3):
            for owner, share in enumerate(own.shares(0, frozenset(survivors))):
                assert share == own._held[owner][0, 0 if owner in survivors else 1].tobytes()
        # A set that names a member twice, or one past the roster, has no form.
        for bitmap in (b"\x1f", b"\x0f\x00", b""):
            request = world.named(RevealRequest, range(4))._replace(survivors=bitmap)
            with pytest.raises(ProtocolError, match="does not fit the roster"):
                silo.handle(pack(request))

    def test_control_a_silo_that_answered_both_opens_the_input(self, monkeypatch):
        def both(self, index, survivors):
            return [self._held[v][index].tobytes() for v in self._owners]

        monkeypatch.setattr(SiloBatch, "shares", both)
        world = World(consistency_check=False)
        message = world.contribute()[world.ids[VICTIM]]
        request = world.reveal_request(range(4))
        b_shares, e_shares = {}, {}
        for holder, silo in enumerate(world.silos.values()):
            share = msgpack.unpackb(silo.handle(request))[3][VICTIM]
            b_shares[holder + 1], e_shares[holder + 1] = share[:32], share[32:]
        seeds = world.seeds_under(VICTIM, world.recover(e_shares))
        opened = world.open_contribution(VICTIM, payload_of(message), world.recover(b_shares), seeds)
        assert is_input(opened, world.values[world.ids[VICTIM]])


class TestLateContribution:
    """A silo declared dropped has its pairwise seeds revealed; then its contribution arrives after all."""

    def attack(self, world, b=None):
        rest = [s for s in world.ids if s != world.ids[VICTIM]]
        survivors = [world.ids.index(s) for s in rest]
        late = world.contribute()[world.ids[VICTIM]]  # sent in time, kept back by the server
        replies = {h: world.silos[world.ids[h]].handle(world.reveal_request(survivors)) for h in survivors}
        e = world.recover(dict(world.shares_of(VICTIM, h, r) for h, r in replies.items()))
        return world.open_contribution(VICTIM, payload_of(late), b, world.seeds_under(VICTIM, e))

    def test_the_self_mask_still_covers_it(self):
        world = World(consistency_check=False)
        assert not is_input(self.attack(world), world.values[world.ids[VICTIM]])

    def test_control_without_the_self_mask_it_is_open(self, monkeypatch):
        masks = SiloBatch.masks
        monkeypatch.setattr(SiloBatch, "masks", lambda self, *a: masks(self, *a)[1:])
        world = World(consistency_check=False)
        assert is_input(self.attack(world), world.values[world.ids[VICTIM]])

    @pytest.mark.parametrize("check", [True, False])
    def test_a_silo_that_was_told_it_dropped_contributes_no_more(self, check):
        world = World(consistency_check=check)
        victim = world.ids[VICTIM]
        rest = {s: v for s, v in world.values.items() if s != victim}
        messages = world.contribute(ids=list(rest))
        total = world.total(messages)
        assert is_input(total.values, sum(rest.values()))
        with pytest.raises(ProtocolError, match="too late"):
            world.contribute(ids=[victim])

    def test_the_server_adds_no_late_contribution(self):
        world = World()
        late = world.contribute()
        first = {s: m for s, m in late.items() if s != world.ids[VICTIM]}
        one = world.total(first)
        two = world.total(late)  # asked again with the late one present
        assert one.survivors == two.survivors == tuple(sorted(first))
        assert (one.values == two.values).all()


class TestThreshold:
    @pytest.mark.parametrize(("holders", "threshold"), [(3, 2), (10, 7), (106, 71), (255, 170)])
    def test_any_threshold_of_shares_recovers(self, holders, threshold):
        rng = np.random.default_rng(0)
        secret = rng.integers(0, 256, 64, dtype=np.uint8)
        shares = shamir.share(secret, holders, threshold)
        for _ in range(5):
            rows = np.sort(rng.choice(holders, threshold, replace=False))
            positions = tuple(int(r) + 1 for r in rows)
            assert (shamir.recover(positions, shares[rows]) == secret).all()

    def test_one_less_than_the_threshold_fits_every_secret(self):
        # With t - 1 = 1 share fixed, each of the 256 secrets has exactly one polynomial through it.
        secrets = np.repeat(np.arange(256, dtype=np.uint8), 256)
        slopes = np.tile(np.arange(256, dtype=np.uint8), 256)
        field = shamir._field()
        at_three = np.asarray(field(secrets) + field(slopes) * field(3)).view(np.uint8)
        for share in (0, 1, 77, 255):
            assert sorted(secrets[at_three == share]) == list(range(256))

    def test_fewer_shares_than_the_threshold_give_no_sum(self):
        world = World(5, consistency_check=False)
        messages = world.contribute()
        away = set(world.ids[:2])
        with pytest.raises(AggregationError, match=r"3 shares of silo .* came in, 4 are needed"):
            world.total(messages, lost=[away])

    def test_control_with_the_threshold_there_is_a_sum(self):
        world = World(5, consistency_check=False)
        total = world.total(world.contribute(), lost=[{world.ids[0]}])
        assert is_input(total.values, sum(world.values.values()))

    def test_shares_agree_with_a_second_library(self, monkeypatch):
        # Shares of the bytes 5, 200 at x = 1..4 with the polynomial coefficients (5, 7, 9) and (200, 131, 54),
        # by reedsolo 1.7.0: gf_poly_eval over GF(2^8) of primitive polynomial 0x11d.
        coefficients = np.array([[5, 200], [7, 131], [9, 54]], np.uint8)
        expected = [[11, 125], [47, 11], [33, 190], [137, 185]]
        monkeypatch.setattr(shamir.os, "urandom", lambda length: coefficients[1:].tobytes()[:length])
        shares = shamir.share(coefficients[0], 4, 3)
        assert shares.tolist() == expected


class TestBruteForce:
    """A seed of few bits is found by trying all; one of 256 bits is not among the first 2^16."""

    BITS = 12

    def attack(self, world):
        """A server with colluders at all other silos knows all masks but the self mask; it tries self seeds."""
        victim = world.ids[VICTIM]
        payload = payload_of(world.contribute()[victim])
        own = world.silos[victim]._state._batches[0]
        seeds = {
            other: onetime.pair_seeds(world.session, 0, secret, VICTIM, other)[:32]
            for other, secret in own._pair_secrets.items()
        }
        for guess in range(2**self.BITS):
            opened = world.open_contribution(VICTIM, payload, guess.to_bytes(32, "big"), seeds)
            if (np.abs(opened) <= TABLE.bounds).all():  # chance of a false hit: far below 2^-12 a value, 12 values
                return opened
        return None

    def test_the_real_seed_is_not_found(self):
        assert self.attack(World()) is None

    def test_control_a_seed_of_reduced_entropy_is_found(self, monkeypatch):
        import os

        rng = np.random.default_rng(3)

        class Weak:
            @staticmethod
            def urandom(length):
                if length % 64:
                    return os.urandom(length)
                words = rng.integers(0, 2**self.BITS, length // 32)
                return b"".join(int(w).to_bytes(32, "big") for w in words)

        monkeypatch.setattr(onetime, "os", Weak)
        world = World()
        assert is_input(self.attack(world), world.values[world.ids[VICTIM]])
