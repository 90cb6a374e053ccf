"""Malformed messages and messages out of turn: refused, without a crash and without a word about the inputs."""

from collections import defaultdict
from functools import cache

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sum_adversary import TABLE, Tampering, World, exact, is_input
from sum_network import CONTEXT, carry

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
    SignRequest,
    pack,
    unpack_any,
)
from secure_fvi.errors import AggregationError, ProtocolError


@cache
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


#: Every kind that masked sums exchange on a complete graph, which has no Nonces.
KINDS = [
    "Activate",
    "BatchSignature",
    "Contribution",
    "Deliver",
    "Deposit",
    "DepositRequest",
    "Done",
    "KeyAdvert",
    "KeySet",
    "KeysRequest",
    "NonceReveal",
    "RevealRequest",
    "SetSignature",
    "Shares",
    "SignRequest",
]


class TestMalformed:
    def test_the_corpus_has_a_message_of_every_kind(self):
        assert sorted(corpus()) == KINDS

    @pytest.mark.parametrize("kind", KINDS)
    def test_schema_is_strict(self, kind):
        fields = msgpack.unpackb(corpus()[kind])
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

    @pytest.mark.parametrize("kind", KINDS)
    def test_truncated_and_extended_messages_are_refused(self, kind):
        data = corpus()[kind]
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
                return corpus()[data.draw(st.sampled_from(KINDS))]
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
