"""Replayed, forged, truncated and altered messages; random dropouts and orders; each attack beside its control."""

import hashlib
from collections import defaultdict

import msgpack
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sum_adversary import TABLE, World, is_input
from sum_network import CONTEXT, carry, contribute, names, random_values, run_sum, table_of

from secure_fvi.aggregation import Masked, onetime, unmask
from secure_fvi.aggregation.messages import (
    Activate,
    Contribution,
    Deliver,
    DepositRequest,
    Done,
    KeySet,
    KeysRequest,
    Nonces,
    RevealRequest,
    SetSignature,
    Shares,
    SignRequest,
    pack,
    unpack,
    unpack_any,
)
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.errors import AggregationError, ProtocolError

VICTIM = 1


class Tampering:
    """A silo whose messages somebody on the way may change."""

    def __init__(self, silo, request=lambda data: data, reply=lambda data: data):
        self._silo, self._request, self._reply = silo, request, reply

    def handle(self, message):
        return self._reply(self._silo.handle(self._request(message)))

    def contribute(self, *arguments):
        return self._reply(self._silo.contribute(*arguments))


def exact(world, ids=None):
    return sum(world.values[s] for s in (ids or world.ids))


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

    def test_a_relabelled_contribution_is_noticed(self):
        world = World(5)
        with pytest.raises(AggregationError, match=f"what came in for '{world.ids[VICTIM]}' is not what it sent"):
            world.total(self.relabelled(world), index=1)

    def test_control_without_the_consistency_check_it_spoils_the_total(self):
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

        monkeypatch.setattr("secure_fvi.aggregation.silo_batch.open_envelope", plain_ctr)
        assert self.flip_in_transit(World(5, prepared=False))

    def wrong_share(self, world, liar=0):
        """A holder reveals its first share with one bit flipped."""

        def flip(data):
            message = unpack_any(data)
            if not isinstance(message, Shares):
                return data
            first = bytes([message.shares[0][0] ^ 1]) + message.shares[0][1:]
            return pack(message._replace(shares=[first, *message.shares[1:]]))

        silos = world.silos | {world.ids[liar]: Tampering(world.silos[world.ids[liar]], reply=flip)}
        return carry(world.server.total(0, world.ids, TABLE, world.contribute(), CONTEXT), silos)

    def test_a_wrong_share_is_worked_around(self):
        world = World(5)
        assert is_input(self.wrong_share(world).values, exact(world))

    def test_too_many_wrong_shares_are_an_error(self, monkeypatch):
        monkeypatch.setattr(unmask, "_TRIES", 1)
        world = World(5)
        original = unmask.shamir.recover
        monkeypatch.setattr(unmask.shamir, "recover", lambda p, s: original(p, s) ^ np.uint8(1))
        with pytest.raises(AggregationError, match="do not fit its commitment"):
            world.total(world.contribute())

    def test_control_without_commitments_the_total_is_wrong(self, monkeypatch):
        monkeypatch.setattr(unmask, "_matches", lambda *arguments: True)
        world = World(5)
        assert not is_input(self.wrong_share(world).values, exact(world))

    def test_altered_sealed_seeds_are_an_error_not_a_wrong_total(self):
        world = World(5)
        deposit = world.batch.deposits[VICTIM]
        sealed = bytearray(deposit.sealed_seeds)
        sealed[3] ^= 1
        world.batch.deposits[VICTIM] = deposit._replace(sealed_seeds=bytes(sealed))
        rest = [s for s in world.ids if s != world.ids[VICTIM]]
        with pytest.raises(AggregationError, match=r"sealed seeds .* do not open"):
            world.total(world.contribute(ids=rest))

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


def corpus():
    """One message of every kind that a silo takes or sends, from a whole run."""
    seen = defaultdict(list)
    world = World(5, prepared=False)

    def log(data):
        seen[type(unpack_any(data)).__name__].append(data)
        return data

    silos = {s: Tampering(p, log, log) for s, p in world.silos.items()}
    carry(world.server.prepare(0), silos)
    messages = {s: silos[s].contribute(0, world.ids, TABLE, world.values[s], CONTEXT) for s in world.ids}
    carry(world.server.total(0, world.ids, TABLE, messages, CONTEXT), silos)
    return {kind: rows[0] for kind, rows in seen.items()}


CORPUS = corpus()


class TestMalformed:
    def test_the_corpus_has_all_kinds_of_a_complete_graph(self):
        assert len(CORPUS) == 15  # all but Nonces

    @pytest.mark.parametrize("kind", sorted(CORPUS))
    def test_schema_is_strict(self, kind):
        fields = msgpack.unpackb(CORPUS[kind])
        unpack_any(msgpack.packb(fields))
        variants = [
            [*fields, 0],
            fields[:-1],
            [2, *fields[1:]],
            [True, *fields[1:]],
            [1, 99, *fields[2:]],
            [1, "2", *fields[2:]],
            {"version": 1},
            fields[0],
            None,
        ]
        for at in range(2, len(fields)):
            for wrong in (None, -1, 2**63, 1.5, "text", {}, [None], ["x"], True):
                variants.append([*fields[:at], wrong, *fields[at + 1 :]])
        for variant in variants:
            with pytest.raises(ProtocolError):
                unpack_any(msgpack.packb(variant))

    @pytest.mark.parametrize("kind", sorted(CORPUS))
    def test_truncated_and_extended_messages_are_refused(self, kind):
        data = CORPUS[kind]
        for cut in {0, 1, 2, len(data) // 2, len(data) - 1}:
            with pytest.raises(ProtocolError):
                unpack_any(data[:cut])
        with pytest.raises(ProtocolError):
            unpack_any(data + b"\x00")

    def test_other_things_than_bytes_are_refused(self):
        for thing in ("text", None, 3, [1, 2]):
            with pytest.raises(ProtocolError):
                unpack_any(thing)
        with pytest.raises(ProtocolError):
            unpack_any(b"\x91" * 100_000)  # nested beyond reason

    @given(data=st.data())
    @settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    def test_damaged_requests_never_crash_a_silo_nor_spoil_the_sum(self, data):
        world = World(3, prepared=False)
        stage = data.draw(st.integers(0, 6))
        steps = 0

        def damage(message):
            kind = data.draw(st.sampled_from(["flip", "cut", "noise", "other kind", "grow"]))
            if kind == "flip":
                at = data.draw(st.integers(0, len(message) - 1))
                return message[:at] + bytes([message[at] ^ data.draw(st.integers(1, 255))]) + message[at + 1 :]
            if kind == "cut":
                return message[: data.draw(st.integers(0, len(message) - 1))]
            if kind == "noise":
                return data.draw(st.binary(max_size=60))
            if kind == "other kind":
                return CORPUS[data.draw(st.sampled_from(sorted(CORPUS)))]
            return message + data.draw(st.binary(min_size=1, max_size=5))

        class Probed:
            def __init__(self, silo):
                self._silo = silo

            def handle(self, message):
                nonlocal steps
                if steps // 3 == stage:
                    try:
                        self._silo.handle(damage(message))
                    except ProtocolError as error:
                        assert_nothing_leaks(str(error), world)
                steps += 1
                return self._silo.handle(message)

        probed = {s: Probed(p) for s, p in world.silos.items()}
        try:
            carry(world.server.prepare(0), probed)
            total = carry(world.server.total(0, world.ids, TABLE, world.contribute(), CONTEXT), probed)
        except (AggregationError, ProtocolError) as error:
            # A damaged message that is valid in itself (another attempt's number, say) may cost the sum.
            assert_nothing_leaks(str(error), world)
            return
        assert is_input(total.values, exact(world))

    @given(data=st.data())
    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
    def test_damaged_replies_never_crash_the_server_nor_spoil_the_sum(self, data):
        world = World(5, prepared=False)
        target = data.draw(st.sampled_from(world.ids))
        stage = data.draw(st.integers(0, 6))
        step = 0

        def damage(reply):
            nonlocal step
            step += 1
            if step - 1 != stage:
                return reply
            at = data.draw(st.integers(0, len(reply) - 1))
            return data.draw(
                st.sampled_from([reply[:at], reply + b"\xc0", b"", reply[:at] + b"\x00" + reply[at + 1 :]])
                | st.binary(max_size=80)
            )

        silos = world.silos | {target: Tampering(world.silos[target], reply=damage)}
        carry(world.server.prepare(0), silos)
        messages = {}
        for silo in world.ids:
            try:
                messages[silo] = silos[silo].contribute(0, world.ids, TABLE, world.values[silo], CONTEXT)
            except ProtocolError:
                assert silo == target
        try:
            total = carry(world.server.total(0, world.ids, TABLE, messages, CONTEXT), silos)
        except AggregationError:
            assert stage == 5  # an altered contribution is noticed, not left out
            return
        assert set(world.ids) - {target} <= set(total.survivors)
        assert is_input(total.values, exact(world, total.survivors))


def assert_nothing_leaks(text, world):
    """No input value in a message to people."""
    for values in world.values.values():
        for value in values[:-1]:
            assert f"{value:.4f}" not in text
            assert repr(float(value)) not in text


class TestRandomDropouts:
    @given(
        count=st.integers(3, 9),
        check=st.booleans(),
        batch=st.sampled_from([1, 2, 64]),
        data=st.data(),
    )
    @settings(max_examples=80, deadline=None)
    def test_a_sum_is_exact_or_there_is_none(self, count, check, batch, data):
        ids = sorted(names(count))
        table = table_of(6)
        server, silos = Masked(consistency_check=check, batch=batch).local_parties(ids)
        some = st.sets(st.sampled_from(ids), max_size=max(1, count // 2))
        order = data.draw(st.permutations(ids))
        for index in range(2):
            lost = data.draw(st.lists(some, max_size=5))
            try:
                carry(server.prepare(index), silos, lost)
            except AggregationError:
                continue
            values = random_values(ids, table, seed=index)
            cohort = sorted(set(ids) - data.draw(some))
            absent = data.draw(some)
            messages = {}
            for silo in order:
                if silo in cohort and silo not in absent:
                    try:
                        messages |= contribute(silos, index, table, {silo: values[silo]}, cohort)
                    except ProtocolError:
                        continue
            try:
                total = carry(
                    server.total(index, cohort, table, messages, CONTEXT), silos, data.draw(st.lists(some, max_size=2))
                )
            except AggregationError:
                continue
            assert set(total.survivors) == set(messages)
            np.testing.assert_allclose(total.values, sum(values[s] for s in messages), rtol=0, atol=1e-9)

    def test_nobody_lost_is_always_a_sum(self):
        # The control of the test above, whose every sum could be refused.
        for count in range(3, 10):
            ids, table = names(count), table_of(6)
            server, silos = Masked().local_parties(ids)
            values = random_values(ids, table)
            assert len(run_sum(server, silos, 0, table, values).survivors) == count


class TestSecretsStayInside:
    def test_no_secret_in_a_repr(self):
        world = World()
        silo = world.silos[world.ids[0]]
        own = silo._state._batches[0]
        secret = own._drawn.self_seeds[:32]
        things = [silo, silo._state, silo._state._setup, own, own._drawn, world.stores[world.ids[0]]]
        things += [*own.masks(0, TABLE.digest, CONTEXT), world.identities[world.ids[0]], silo._store]
        for thing in things:
            assert repr(secret)[2:-1] not in repr(thing)
            assert secret.hex() not in repr(thing)
            assert len(repr(thing)) < 60

    def test_contributions_do_not_repeat_what_was_put_in(self):
        world = World()
        message = world.contribute()[world.ids[0]]
        assert world.values[world.ids[0]].tobytes()[:8] not in message


def test_messages_of_a_stranger_change_nothing():
    world = World(5)
    stranger = Identity()
    messages = world.contribute()
    messages["stranger"] = messages[world.ids[0]]
    total = world.total(messages)
    assert is_input(total.values, exact(world))
    request = SignRequest(1, world.roster.bitmap(frozenset(range(5))), TABLE.digest, CONTEXT)
    world.contribute(1)
    own = unpack(world.silos[world.ids[0]].handle(pack(request)), SetSignature)
    statement = hashlib.sha256(b"anything").digest()
    assert not world.roster.verify(0, stranger.sign(statement), statement)
    assert own.signature != stranger.sign(statement)


def test_numbers_at_the_edge_of_their_range_are_refused():
    world = World(5)
    silo = world.silos[world.ids[0]]
    bitmap = world.roster.bitmap(frozenset(range(5)))
    top = 2**63 - 1
    for request in (
        KeysRequest(top),
        DepositRequest(top),
        Activate(top, bitmap, []),
        SignRequest(top, bitmap, TABLE.digest, CONTEXT),
        RevealRequest(top, bitmap, TABLE.digest, CONTEXT, bitmap, [], []),
    ):
        with pytest.raises(ProtocolError):
            silo.handle(pack(request))
    with pytest.raises(ProtocolError):
        world.contribute(top, ids=[world.ids[0]])
    assert is_input(world.total(world.contribute()).values, exact(world))


@pytest.mark.parametrize(
    ("cohort", "context", "reason"),
    [
        (lambda ids: ids[1:], CONTEXT, "is not in the cohort"),
        (lambda ids: [*ids, ids[0]], CONTEXT, "does not fit the roster"),
        (lambda ids: [*ids, "stranger"], CONTEXT, "does not fit the roster"),
        (lambda ids: ids, CONTEXT[:-1], "32 bytes"),
    ],
)
def test_a_contribution_to_a_malformed_question_is_refused(cohort, context, reason):
    world = World(5)
    silo = world.ids[0]
    with pytest.raises(ProtocolError, match=reason):
        world.silos[silo].contribute(0, cohort(world.ids), TABLE, world.values[silo], context)
    assert is_input(world.total(world.contribute()).values, exact(world))


def test_questions_out_of_turn_are_refused():
    world = World(5, prepared=False)
    silo = world.silos[world.ids[0]]
    bitmap = world.roster.bitmap(frozenset(range(5)))
    early = [
        KeySet(0, bitmap, [], [], []),
        Nonces(0, []),
        DepositRequest(0),
        Deliver(0, bitmap, [], []),
        Activate(0, bitmap, []),
        SignRequest(0, bitmap, TABLE.digest, CONTEXT),
        Contribution(0, b""),
        Done(),
    ]
    for request in early:
        with pytest.raises(ProtocolError):
            silo.handle(pack(request))
    carry(world.server.prepare(0), world.silos)
    assert is_input(world.total(world.contribute()).values, exact(world))


def test_a_second_delivery_with_other_content_is_refused():
    world = World(5)
    silo = world.silos[world.ids[0]]
    delivery = world.batch.delivery(0)
    silo.handle(pack(delivery))  # the same again is answered again
    for other in (
        delivery._replace(envelopes=delivery.envelopes[::-1]),
        delivery._replace(depositors=world.roster.bitmap(frozenset({0, 1, 2, 3})), digests=delivery.digests[:4]),
    ):
        with pytest.raises(ProtocolError, match="delivered already"):
            silo.handle(pack(other))
