"""Replayed, forged and altered messages; each attack beside its control."""

import hashlib
import types

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from sum_adversary import TABLE, Tampering, World, exact, is_input, unsigned
from sum_network import CONTEXT, carry

from secure_fvi.aggregation import masked_server, masked_silo, onetime
from secure_fvi.aggregation.messages import (
    Contribution,
    Deliver,
    RevealRequest,
    SetSignature,
    Shares,
    pack,
    unpack,
    unpack_any,
)
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.errors import AggregationError, ProtocolError

VICTIM = 1


def unchecked(monkeypatch):
    """Silos that take shares without a look at the commitments to them, which alone would stop what is tried here."""
    monkeypatch.setattr(masked_silo, "hmac", types.SimpleNamespace(compare_digest=lambda one, other: True))


class TestReplay:
    def test_a_contribution_of_an_old_sum_counts_as_a_dropout(self):
        world = World(5)
        old = world.contribute(0)
        world.total(old)
        messages = world.contribute(1) | {world.ids[VICTIM]: old[world.ids[VICTIM]]}
        total = world.total(messages, index=1)
        rest = [s for s in world.ids if s != world.ids[VICTIM]]
        assert total.survivors == tuple(rest)
        assert is_input(total.values, exact(world, rest))
        assert "another sum" in world.server.faults[world.ids[VICTIM]]

    def relabelled(self, world):
        """An old contribution under the number of the new sum."""
        old = world.contribute(0)[world.ids[VICTIM]]
        messages = world.contribute(1)
        messages[world.ids[VICTIM]] = pack(unpack(old, Contribution)._replace(sum_index=1))
        return messages

    @pytest.mark.parametrize("check", [True, False])
    def test_a_relabelled_contribution_counts_as_a_dropout(self, check):
        world = World(5, consistency_check=check)
        total = world.total(self.relabelled(world), index=1)
        rest = [s for s in world.ids if s != world.ids[VICTIM]]
        assert total.survivors == tuple(rest)
        assert is_input(total.values, exact(world, rest))
        assert "did not sign" in world.server.faults[world.ids[VICTIM]]

    def test_where_nobody_may_be_missing_it_ends_the_sum(self):
        world = World(5, max_missing=0)
        with pytest.raises(AggregationError, match=f"past max_missing = 0; nothing usable of '{world.ids[VICTIM]}'"):
            world.total(self.relabelled(world), index=1)

    def test_control_without_signatures_on_contributions_it_spoils_the_total(self, monkeypatch):
        unsigned(monkeypatch)
        world = World(5, consistency_check=False)
        assert not is_input(world.total(self.relabelled(world), index=1).values, exact(world))

    def old_reveal(self, world):
        """The signed request of sum 0, under the number of sum 1."""
        seen = []
        silo = Tampering(world.silos[world.ids[0]], request=lambda data: seen.append(data) or data)
        carry(
            world.server.total(0, world.ids, TABLE, world.contribute(0), CONTEXT),
            world.silos | {world.ids[0]: silo},
        )
        world.contribute(1)
        return pack(unpack(seen[-1], RevealRequest)._replace(sum_index=1))

    def test_old_signatures_open_no_other_sum(self):
        world = World(5)
        with pytest.raises(ProtocolError, match="is not valid here"):
            world.silos[world.ids[0]].handle(self.old_reveal(world))

    def test_control_without_signature_checks_they_do(self, monkeypatch):
        world = World(5)
        request = self.old_reveal(world)
        monkeypatch.setattr(Roster, "verify", lambda self, place, signature, statement: True)
        shares = unpack(world.silos[world.ids[0]].handle(request), Shares)
        assert [len(s) for s in shares.shares] == [32] * 5

    def deliver_again(self, world):
        """Envelopes of batch 0 delivered as those of batch 1; whether the victim took one for good."""
        victim = world.ids[VICTIM]
        first = world.silos[victim]._state._batches[0]._delivery.envelopes

        def swap(data):
            message = unpack_any(data)
            return pack(message._replace(envelopes=first)) if isinstance(message, Deliver) else data

        silos = world.silos | {victim: Tampering(world.silos[victim], request=swap)}
        carry(world.server.prepare(world.roster.batch), silos)
        return set(world.silos[victim]._state._batches[1]._held) != {VICTIM}

    def test_shares_of_an_old_batch_are_not_taken(self):
        world = World(5)
        assert not self.deliver_again(world)
        index = world.roster.batch
        assert is_input(world.total(world.contribute(index), index=index).values, exact(world))

    def test_control_with_envelopes_that_do_not_name_the_batch_they_are(self, monkeypatch):
        unchecked(monkeypatch)
        fields = onetime._envelope_fields
        monkeypatch.setattr(onetime, "_envelope_fields", lambda session, batch, *rest: fields(session, 0, *rest))
        assert self.deliver_again(World(5))


class TestAlteredShares:
    def flip_in_transit(self, world, position=40):
        """One bit of one envelope to the victim is flipped; whether the victim holds that share."""
        victim, sender = world.ids[VICTIM], 0

        def flip(data):
            message = unpack_any(data)
            if not isinstance(message, Deliver):
                return data
            envelope = bytearray(message.envelopes[0])
            envelope[position] ^= 1
            return pack(message._replace(envelopes=[bytes(envelope), *message.envelopes[1:]]))

        silos = world.silos | {victim: Tampering(world.silos[victim], request=flip)}
        carry(world.server.prepare(0), silos)
        return sender in world.silos[victim]._state._batches[0]._held

    @pytest.mark.parametrize("position", [0, 12, 500, -1])
    def test_a_bit_flipped_in_transit_is_noticed_and_the_sum_goes_on(self, position):
        world = World(5, prepared=False)
        assert not self.flip_in_transit(world, position)
        assert is_input(world.total(world.contribute()).values, exact(world))

    def test_control_without_authentication_it_is_taken(self, monkeypatch):
        def plain_ctr(session, batch, sender, receiver, secret, envelope):
            fields = onetime._envelope_fields(session, batch, sender, receiver)
            key = onetime.derive_key(secret, onetime.LABEL_ENVELOPE, *fields)
            # AES-GCM without its tag is AES-CTR from counter 2.
            start = modes.CTR(envelope[:12] + (2).to_bytes(4, "big"))
            data = Cipher(algorithms.AES(key), start).decryptor().update(envelope[12:-16])
            return np.frombuffer(data, np.uint8).reshape(-1, 2, 32)

        unchecked(monkeypatch)
        monkeypatch.setattr("secure_fvi.aggregation.masked_silo.open_envelope", plain_ctr)
        assert self.flip_in_transit(World(5, prepared=False))

    def wrong_share(self, world, liar=0):
        """A holder reveals its first share with one bit flipped; without the check, all secrets come from shares."""

        def flip(data):
            message = unpack_any(data)
            if not isinstance(message, Shares):
                return data
            first = bytes([message.shares[0][0] ^ 1]) + message.shares[0][1:]
            return pack(message._replace(shares=[first, *message.shares[1:]]))

        silos = world.silos | {world.ids[liar]: Tampering(world.silos[world.ids[liar]], reply=flip)}
        return carry(world.server.total(0, world.ids, TABLE, world.contribute(), CONTEXT), silos)

    def test_a_wrong_share_is_recognised_and_its_holder_named(self):
        world = World(5, consistency_check=False)
        assert is_input(self.wrong_share(world).values, exact(world))
        assert "not the one it was dealt" in world.server.faults[world.ids[0]]

    def test_control_without_commitments_to_shares_a_dealer_seems_to_be_wrong(self, monkeypatch):
        monkeypatch.setattr(masked_server.ServerBatch, "is_share", lambda *arguments: True)
        with pytest.raises(masked_server.Convicted, match="do not open its commitment"):
            self.wrong_share(World(5, consistency_check=False))

    def test_control_without_any_commitments_the_total_is_wrong_or_out_of_range(self, monkeypatch):
        monkeypatch.setattr(masked_server.ServerBatch, "is_share", lambda *arguments: True)
        monkeypatch.setattr(masked_server.ServerBatch, "opens", lambda self, owner, index, kind, secret: bool(secret))
        monkeypatch.setattr(Ring, "_check_range", lambda *arguments: None)
        world = World(5, consistency_check=False)
        assert not is_input(self.wrong_share(world).values, exact(world))

    def test_altered_sealed_seeds_are_an_error_not_a_wrong_total(self):
        world = World(5)
        deposit = world.batch.deposits[VICTIM]
        sealed = bytearray(deposit.sealed_seeds)
        sealed[3] ^= 1
        world.batch.deposits[VICTIM] = deposit._replace(sealed_seeds=bytes(sealed))
        rest = [s for s in world.ids if s != world.ids[VICTIM]]
        messages = world.contribute(ids=rest)
        # Needed only for a survivor that falls silent before it has told its seeds.
        with pytest.raises(AggregationError, match=r"sealed are not those that it committed to$"):
            world.total(messages, lost=[(), {world.ids[0]}])
        assert is_input(world.total(messages).values, exact(world, rest))

    def test_a_forged_signature_is_left_out(self):
        world = World(7)

        def forge(data):
            message = unpack_any(data)
            return pack(message._replace(signature=bytes(64))) if isinstance(message, SetSignature) else data

        silos = dict(world.silos)
        for liar in world.ids[:2]:
            silos[liar] = Tampering(world.silos[liar], reply=forge)
        total = carry(world.server.total(0, world.ids, TABLE, world.contribute(), CONTEXT), silos)
        assert is_input(total.values, exact(world))
        silos[world.ids[2]] = Tampering(world.silos[world.ids[2]], reply=forge)
        with pytest.raises(AggregationError, match="4 of 7 silos signed the survivors, 5 are needed"):
            carry(world.server.total(1, world.ids, TABLE, world.contribute(1), CONTEXT), silos)


def test_messages_of_a_stranger_change_nothing():
    world = World(5)
    stranger = Identity()
    messages = world.contribute()
    messages["stranger"] = messages[world.ids[0]]
    total = world.total(messages)
    assert is_input(total.values, exact(world))
    world.contribute(1)
    own = unpack(world.silos[world.ids[0]].handle(world.sign_request(range(5), index=1)), SetSignature)
    statement = hashlib.sha256(b"anything").digest()
    assert not world.roster.verify(0, stranger.sign(statement), statement)
    assert own.signature != stranger.sign(statement)
