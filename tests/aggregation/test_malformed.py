"""Malformed messages and messages out of turn: refused, without a crash and without a word about the inputs."""

from collections import defaultdict
from contextlib import nullcontext
from functools import cache

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sum_adversary import TABLE, Tampering, World, exact, is_input
from sum_network import CONTEXT, carry

from secure_fvi.aggregation import Block, BlockTable, Masked, shamir
from secure_fvi.aggregation.base import check_silo_ids
from secure_fvi.aggregation.graph import Neighbourhood
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.masked_silo import MaskedSilo
from secure_fvi.aggregation.messages import (
    VERSION,
    Activate,
    BatchSignature,
    Contribution,
    Deliver,
    Deposit,
    DepositRequest,
    Done,
    KeySet,
    KeysRequest,
    NonceReveal,
    Nonces,
    RevealRequest,
    SignRequest,
    pack,
    unpack,
    unpack_any,
)
from secure_fvi.aggregation.roster import Identity
from secure_fvi.aggregation.store import MemoryStore
from secure_fvi.errors import AggregationError, InputError, ProtocolError


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
            [VERSION + 1, *fields[1:]],
            [True, *fields[1:]],
            [VERSION, 99, *fields[2:]],
            [VERSION, "2", *fields[2:]],
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
        world.named(SignRequest, range(5), top),
        world.named(RevealRequest, range(5), top, signers=bitmap),
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
        Deliver(0, bitmap, [], [], []),
        Activate(0, bitmap, []),
        world.named(SignRequest, range(5)),
        Contribution(0, b"", b"", bytes(64)),
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


def ring_world():
    """Six silos on a ring, each with its four nearest: a graph whose order follows from nonces."""
    world = World(6, prepared=False)
    world.roster.__dict__["neighbourhood"] = Neighbourhood(6, 4, 3, False, -40.0, -30.0, -40.0, 1, -30.0)
    return world


def others(bitmap, *gone):
    """The set of five silos without `gone`."""
    return bytes([bitmap[0] & ~sum(1 << place for place in gone)])


#: What the first silo is told in place of the true message, and what it says; all else in it is as it should be.
OUT_OF_SHAPE = [
    (World, KeySet, lambda m: m._replace(attempt=1), "of another set-up"),
    (World, KeySet, lambda m: m._replace(public_keys=m.public_keys[:-1]), "one key, commitment and signature"),
    (World, KeySet, lambda m: m._replace(signatures=[*m.signatures, bytes(64)]), "one key, commitment and signature"),
    (World, KeySet, lambda m: KeySet(0, others(m.members, 0), *(c[1:] for c in m[2:])), "leaves this silo out"),
    (World, KeySet, lambda m: KeySet(0, others(m.members, 3, 4), *(c[:3] for c in m[2:])), "a key set of 3 silos"),
    (World, KeySet, lambda m: m._replace(public_keys=[bytes([9] * 32), *m.public_keys[1:]]), "another key of this"),
    (World, KeySet, lambda m: m._replace(signatures=[bytes(64)] * 5), "not signed with its identity"),
    (ring_world, Nonces, lambda m: m._replace(attempt=1), "nonces before the key set, or of another"),
    (ring_world, Nonces, lambda m: m._replace(nonces=m.nonces[:-1]), "a nonce of each member"),
    (ring_world, Nonces, lambda m: m._replace(nonces=m.nonces[::-1]), "not what it committed to"),
    (World, Deliver, lambda m: m._replace(depositors=others(m.depositors, 0)), "this silo among them"),
    (World, Deliver, lambda m: m._replace(depositors=others(m.depositors, 3, 4)), "a batch of 3 silos"),
    (World, Deliver, lambda m: m._replace(digests=m.digests[:-1]), "digests of a batch do not fit"),
    (World, Deliver, lambda m: m._replace(digests=m.digests[::-1]), "digests of a batch do not fit"),
    (World, Deliver, lambda m: m._replace(envelopes=m.envelopes[1:]), "one envelope, with its digest"),
    (World, Deliver, lambda m: m._replace(share_digests=m.share_digests[1:]), "one envelope, with its digest"),
    (World, Deliver, lambda m: m._replace(batch=1), "batch 1 is unknown"),
    (World, Activate, lambda m: m._replace(signatures=m.signatures[1:]), "a signature of each signer"),
    (World, Activate, lambda m: m._replace(signers=b"\x07", signatures=m.signatures[:3]), "3 signatures; 4 of"),
    (World, Activate, lambda m: m._replace(signatures=m.signatures[::-1]), "is not valid here"),
    (World, Activate, lambda m: m._replace(signers=b"\x80"), "does not fit the roster"),
]


@pytest.mark.parametrize(("make", "kind", "alter", "reason"), OUT_OF_SHAPE, ids=lambda x: getattr(x, "__name__", None))
def test_a_request_of_set_up_that_does_not_fit_is_refused_and_changes_nothing(make, kind, alter, reason):
    world = make() if make is ring_world else World(5, prepared=False)
    silo, met = world.silos[world.ids[0]], []

    def request(data):
        message = unpack_any(data)
        if isinstance(message, kind) and not met:
            met.append(message)
            with pytest.raises(ProtocolError, match=reason):
                silo.handle(pack(alter(message)))
        return data

    carry(world.server.prepare(0), world.silos | {world.ids[0]: Tampering(silo, request)})
    assert met
    assert is_input(world.total(world.contribute()).values, exact(world))


def test_a_request_that_comes_before_what_it_follows_is_refused():
    world = ring_world()
    silo = world.silos[world.ids[0]]
    silo.handle(pack(KeysRequest(0)))
    with pytest.raises(ProtocolError, match="nonces before the key set"):
        silo.handle(pack(Nonces(0, [bytes(32)] * 6)))
    with pytest.raises(ProtocolError, match="keys are not exchanged"):
        silo.handle(pack(DepositRequest(0)))
    world = World(5, prepared=False)

    def request(data):
        if isinstance(unpack_any(data), Deliver):
            with pytest.raises(ProtocolError, match="batch 0 is not delivered yet"):
                world.silos[world.ids[0]].handle(pack(Activate(0, b"\x0f", [bytes(64)] * 4)))
        return data

    carry(world.server.prepare(0), world.silos | {world.ids[0]: Tampering(world.silos[world.ids[0]], request)})


def test_survivors_are_signed_for_the_question_that_was_answered():
    world = World(4)
    silo = world.silos[world.ids[0]]
    silo.contribute(0, world.ids, TABLE, world.values[world.ids[0]], CONTEXT, b"q" * 32)
    for other in (b"", b"r" * 32):
        with pytest.raises(ProtocolError, match="answers another question"):
            silo.handle(world.sign_request(range(4), question=other))
    silo.handle(world.sign_request(range(4), question=b"q" * 32))


def test_a_refill_that_too_few_take_part_in_fails():
    world = World(5, prepared=False, consistency_check=False, max_missing=1)
    with pytest.raises(AggregationError, match="refill: 3 of 5 silos answered, 4 are needed"):
        carry(world.server.prepare(0), world.silos, [(), (), (), world.ids[:2]])


def test_a_set_up_of_whole_sums_that_lacks_one_names_it():
    """The next attempt has all."""
    world = World(5, prepared=False, max_missing=0)
    says = f"set-up: 4 of 5 silos answered, 5 are needed; nothing usable of '{world.ids[2]}'"
    with pytest.raises(AggregationError, match=says):
        carry(world.server.prepare(0), world.silos, [world.ids[2:3]])
    carry(world.server.prepare(0), world.silos)
    assert len(world.session.members) == 5


def test_a_batch_older_than_the_newest_is_not_drawn():
    world = World(4)
    silo = world.silos[world.ids[0]]
    silo.handle(pack(DepositRequest(3)))
    with pytest.raises(ProtocolError, match="an old batch"):
        silo.handle(pack(DepositRequest(2)))
    carry(world.server.prepare(3 * world.roster.batch), world.silos)
    with pytest.raises(AggregationError, match="old batch"):
        carry(world.server.prepare(2 * world.roster.batch), world.silos)


def test_a_survivor_without_secrets_is_refused():
    world = World(5, prepared=False)
    late = world.ids[4]
    carry(world.server.prepare(0), {s: p for s, p in world.silos.items() if s != late})
    messages = world.contribute(ids=world.ids[:4])
    with pytest.raises(ProtocolError, match="has no secrets for it"):
        world.silos[world.ids[0]].handle(world.sign_request(range(5)))
    assert is_input(world.total(messages).values, exact(world, world.ids[:4]))


def test_without_the_consistency_check_nothing_is_signed():
    world = World(4, consistency_check=False)
    world.contribute()
    with pytest.raises(ProtocolError, match="no consistency check"):
        world.silos[world.ids[0]].handle(world.sign_request(range(4)))


def test_a_silo_takes_no_roster_that_is_not_its_own():
    world = World(4, prepared=False)
    one, two = world.ids[:2]
    for silo, identity, least, reason in (
        ("stranger", world.identities[one], None, "'stranger' is not in the roster"),
        (one, world.identities[two], None, "holds another identity key"),
        (one, Identity(), None, "holds another identity key"),
        (one, world.identities[one], 4, "min_cohort 3 is below this site's, 4"),
    ):
        with pytest.raises(InputError, match=reason):
            MaskedSilo(world.roster, silo, identity, MemoryStore(), least)


@pytest.mark.parametrize(
    "alter",
    [
        lambda d: {"batch": 1},
        lambda d: {"commitments": d.commitments[:-64]},
        lambda d: {"sealed_seeds": d.sealed_seeds[:-1]},
        lambda d: {"envelopes": d.envelopes[:-1]},
        lambda d: {"seed_rows": [row[:-32] for row in d.seed_rows]},
        lambda d: {"share_rows": d.share_rows[:-1]},
        lambda d: {"signature": bytes(64)},
    ],
)
def test_a_deposit_that_does_not_fit_counts_as_none(alter):
    world = World(5, prepared=False)
    bad = world.ids[2]

    def reply(data):
        message = unpack_any(data)
        if not isinstance(message, Deposit):
            return data
        changed = message._replace(**alter(message))
        if changed.signature == message.signature:  # its owner signs it as it is
            statement = world.silos[bad]._state._setup.session.deposit_statement(2, changed)
            changed = changed._replace(signature=world.identities[bad].sign(statement))
        return pack(changed)

    carry(world.server.prepare(0), world.silos | {bad: Tampering(world.silos[bad], reply=reply)})
    assert bad in world.server.faults
    assert 2 not in world.batch.present
    ids = [s for s in world.ids if s != bad]
    assert is_input(world.total(world.contribute(ids=ids)).values, exact(world, ids))


@pytest.mark.parametrize(
    ("kind", "alter", "reason"),
    [
        (NonceReveal, lambda m: {"key_set": bytes(32)}, "a nonce for another key set"),
        (NonceReveal, lambda m: {"attempt": m.attempt + 1}, "a nonce for another key set"),
        (NonceReveal, lambda m: {"nonce": bytes(32)}, "a nonce that it did not commit to"),
        (BatchSignature, lambda m: {"batch": m.batch + 1}, "a wrong signature on the batch, or one of another batch"),
        (BatchSignature, lambda m: {"signature": bytes(64)}, "a wrong signature on the batch, or one of another batch"),
    ],
)
def test_an_answer_of_set_up_that_does_not_fit_is_its_silos_fault(kind, alter, reason):
    """It has no part in the first sum; the control is the others, who have."""
    world = ring_world() if kind is NonceReveal else World(5, prepared=False)
    bad = world.ids[2]

    def reply(data):
        message = unpack_any(data)
        return pack(message._replace(**alter(message))) if isinstance(message, kind) else data

    carry(world.server.prepare(0), world.silos | {bad: Tampering(world.silos[bad], reply=reply)})
    assert world.server.faults == {bad: reason}
    ids = [s for s in world.ids if s != bad]
    taking_part = world.batch.active if kind is BatchSignature else world.batch.present
    assert taking_part == {world.ids.index(s) for s in ids}


def test_survivors_of_a_sum_are_signed_no_more_once_a_later_question_was_answered():
    """What its total lacks was counted then. The control: before that question they are."""
    for later in (False, True):
        world = World(4)
        silo = world.silos[world.ids[0]]
        for index in range(1 + later):
            silo.contribute(index, world.ids, TABLE, world.values[world.ids[0]], CONTEXT, bytes([index]) * 32)
        request = world.sign_request(range(4), question=bytes(32))
        with pytest.raises(ProtocolError, match="sum 0 is over: silo") if later else nullcontext():
            silo.handle(request)


def test_a_total_asked_for_again_needs_what_the_survivors_of_before_sent():
    world = World(5)
    messages = world.contribute()
    with pytest.raises(AggregationError, match=r"revealed|answered|shares"):
        world.total(messages, lost=[(), world.ids])
    fewer = {s: messages[s] for s in world.ids[1:]}
    with pytest.raises(AggregationError, match="of the survivors named before is missing"):
        world.total(fewer)
    assert is_input(world.total(messages).values, exact(world))


def test_what_no_sum_can_be_made_of_is_refused():
    for bound in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InputError, match="bound must be positive and finite"):
            Block("b", (1,), bound)
    with pytest.raises(InputError, match="block names must differ"):
        BlockTable((Block("b", (1,), 1.0), Block("b", (2,), 1.0)))
    for ids, reason in (
        ([], "at least one silo"),
        (["", "a"], "a silo id is empty"),
        (["a", "a"], "ids must differ"),
        (["a", "\ud800"], "no text"),
    ):
        with pytest.raises(InputError, match=reason):
            check_silo_ids(ids)
    with pytest.raises(InputError, match="cannot be negative"):
        next(MaskedServer(World(3).roster).prepare(-1))
    for wrong in ({"bits": 16}, {"min_cohort": 1}, {"max_missing": -1}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            Masked(**wrong)
    with pytest.raises(ProtocolError, match="expected Done, got KeysRequest"):
        unpack(pack(KeysRequest(0)), Done)
    for holders, threshold in ((3, 4), (3, 0), (256, 2)):
        with pytest.raises(ValueError, match="cannot share among"):
            shamir.share(np.zeros((1, 32), np.uint8), holders, threshold)
