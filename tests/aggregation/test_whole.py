"""Whole sums against a lying server with a colluder: each attack beside the control in which it reads what it is after.

Of five silos the last colludes: it hands its key over. Every honest contribution of a sum is added, and the masks that
they share with the colluder are taken off: what is then left is the honest silos' total, or noise.
"""

import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from sum_adversary import TABLE, World, exact, is_input, payload_of
from sum_network import CONTEXT, carry, contribute, random_values

from secure_fvi.aggregation import Block, BlockTable, masked_silo
from secure_fvi.aggregation.masked_server import MaskedServer
from secure_fvi.aggregation.messages import (
    Deliver,
    DepositRequest,
    KeyAdvert,
    KeySet,
    KeysRequest,
    pack,
    unpack,
)
from secure_fvi.aggregation.onetime import Asked, whole_key
from secure_fvi.aggregation.prg import Mask, apply_masks
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.roster import Roster
from secure_fvi.aggregation.session import Session, advert_statement, key_set_hash, nonce_commitment
from secure_fvi.errors import AggregationError, ProtocolError

COLLUDER, VICTIM = 4, 1
HONEST = range(COLLUDER)
QUESTION = bytes(range(50, 82))
#: What is asked of all, and of the victim in its place.
SAID = {"cohort": frozenset(range(5)), "table": TABLE, "context": CONTEXT, "question": QUESTION, "past": {}}
OTHER = {
    "cohort": frozenset(range(4)),
    "table": BlockTable((Block("gradient", (TABLE.size - 1,), 10.0), Block("n", (1,), 1e6, integer=True))),
    "context": bytes(32),
    "question": bytes(32),
    "past": {"silo-0000": bytes(32), "silo-0014": bytes(32), "silo-0021": bytes(32)},
}


def whole(**options):
    return World(5, max_missing=0, **options)


def careless(monkeypatch, field):
    """Masks that do not know `field`."""

    def key(session, secret, one, other, asked, past):
        if field == "past":
            return whole_key(session, secret, one, other, asked, b"")
        if field == "places":
            return whole_key(session, secret, 0, 0, asked, past)
        if field == "key set":
            session = Session(session.roster, bytes(32), session.members, session.members)
            return whole_key(session, secret, one, other, asked, past)
        return whole_key(
            session, secret, one, other, asked._replace(**{field: 0 if field == "sum_index" else b""}), past
        )

    monkeypatch.setattr(masked_silo, "whole_key", key)


def ask(world, place, index=0, **said):
    """What one silo sends, once the masks that it shares with the colluder are off."""
    said, name = {**SAID, **said}, world.ids[place]
    cohort = [world.ids[p] for p in sorted(said["cohort"])]
    values = said.get("values", world.values[name])
    message = world.silos[name].contribute(
        index, cohort, said["table"], values, said["context"], said["question"], past=said["past"]
    )
    words = np.frombuffer(payload_of(message), np.uint64).copy()
    setup = world.silos[name]._state.agreed
    asked = Asked(index, world.roster.bitmap(said["cohort"]), said["table"].digest, said["context"], said["question"])
    if COLLUDER in said["cohort"]:
        key = masked_silo.whole_key(setup.session, setup.pair_secrets[COLLUDER], place, COLLUDER, asked, b"")
        apply_masks(words, [Mask(key, True)])
    return words


def opened(world, words):
    return Ring(TABLE, 64, world.roster.size).decode(sum(words))


@pytest.mark.parametrize("field", SAID)
@pytest.mark.parametrize("known", [True, False])
def test_what_one_silo_is_told_in_another_way_makes_noise(field, known, monkeypatch):
    if not known:
        careless(monkeypatch, field)
    world = whole()
    words = [ask(world, p, **({field: OTHER[field]} if p == VICTIM else {})) for p in HONEST]
    # A uniform element lies within 1e-9 of the truth with chance below 1e-9.
    assert is_input(opened(world, words), exact(world, world.ids[:4])) is not known


@pytest.mark.parametrize("known", [True, False])
def test_another_key_set_for_one_silo_makes_noise(known, monkeypatch):
    """The colluder signs two keys. Every honest silo's own is in both."""
    if not known:
        careless(monkeypatch, "key set")
    world = whole(prepared=False)
    adverts = [unpack(world.silos[s].handle(pack(KeysRequest(0))), KeyAdvert) for s in world.ids]
    name, private = world.ids[COLLUDER], [X25519PrivateKey.generate() for _ in range(2)]
    for place in HONEST:
        mine = private[place == VICTIM].public_key().public_bytes_raw()
        statement = advert_statement(world.roster, 0, COLLUDER, mine, bytes(32))
        adverts[COLLUDER] = KeyAdvert(0, mine, bytes(32), world.identities[name].sign(statement))
        columns = [list(column) for column in zip(*(a[1:] for a in adverts), strict=True)]
        world.silos[world.ids[place]].handle(pack(KeySet(0, b"\x1f", *columns)))
    assert is_input(opened(world, [ask(world, p) for p in HONEST]), exact(world, world.ids[:4])) is not known


@pytest.mark.parametrize("known", [True, False])
def test_two_indices_share_no_mask(known, monkeypatch):
    if not known:
        careless(monkeypatch, "sum_index")
    world = whole()
    name, other = world.ids[VICTIM], random_values(world.ids, TABLE, seed=8)
    first = ask(world, VICTIM, 0)
    second = ask(world, VICTIM, 1, values=other[name])
    assert is_input(opened(world, [second, 0 - first]), other[name] - world.values[name]) is not known


@pytest.mark.parametrize("known", [True, False])
def test_a_colluder_that_gives_out_anothers_key_cancels_no_mask(known, monkeypatch):
    """Of three silos the first borrows the third's public key: the second would add and subtract one and the same."""
    if not known:
        careless(monkeypatch, "places")
    world = World(3, prepared=False, max_missing=0)
    adverts = [unpack(world.silos[s].handle(pack(KeysRequest(0))), KeyAdvert) for s in world.ids]
    commitment = nonce_commitment(world.roster, 0, 0, bytes(32))
    statement = advert_statement(world.roster, 0, 0, adverts[2].public_key, commitment)
    borrowed = KeyAdvert(0, adverts[2].public_key, commitment, world.identities[world.ids[0]].sign(statement))
    columns = [list(column) for column in zip(*(a[1:] for a in (borrowed, *adverts[1:])), strict=True)]
    silo, values = world.silos[world.ids[1]], world.values[world.ids[1]]
    silo.handle(pack(KeySet(0, b"\x07", *columns)))
    payload = payload_of(silo.contribute(0, world.ids, TABLE, values, CONTEXT))
    assert is_input(Ring(TABLE, 64, 3).decode(np.frombuffer(payload, np.uint64)), values) is not known


@pytest.mark.parametrize("checked", [True, False])
def test_keys_that_their_silos_did_not_sign_are_refused(checked, monkeypatch):
    """All keys but the victim's are the server's."""
    if not checked:
        monkeypatch.setattr(Roster, "verify", lambda self, place, signature, statement: True)
    world = whole(prepared=False)
    silo, others = world.silos[world.ids[VICTIM]], [p for p in range(5) if p != VICTIM]
    advert = unpack(silo.handle(pack(KeysRequest(0))), KeyAdvert)
    private = {p: X25519PrivateKey.generate() for p in others}
    rows = [
        (private[p].public_key().public_bytes_raw(), bytes(32), bytes(64)) if p in private else advert[1:]
        for p in range(5)
    ]
    key_set = KeySet(0, b"\x1f", *[list(column) for column in zip(*rows, strict=True)])
    if checked:
        with pytest.raises(ProtocolError, match="is not signed with its identity"):
            silo.handle(pack(key_set))
        return
    silo.handle(pack(key_set))
    values = world.values[world.ids[VICTIM]]
    words = np.frombuffer(payload_of(silo.contribute(0, world.ids, TABLE, values, CONTEXT)), np.uint64).copy()
    named = key_set_hash(world.roster, 0, *key_set[1:4])
    session, public = Session(world.roster, named, range(5), range(5)), X25519PublicKey.from_public_bytes(advert[1])
    asked = Asked(0, b"\x1f", TABLE.digest, CONTEXT, b"")
    for p, key in private.items():
        apply_masks(words, [Mask(whole_key(session, key.exchange(public), p, VICTIM, asked, b""), p > VICTIM)])
    assert is_input(opened(world, [words]), values)


def test_a_key_set_that_lacks_a_silo_is_refused():
    world = whole(prepared=False)
    adverts = [unpack(world.silos[s].handle(pack(KeysRequest(0))), KeyAdvert) for s in world.ids]
    columns = [list(column[:4]) for column in zip(*(a[1:] for a in adverts), strict=True)]
    with pytest.raises(ProtocolError, match="a key set of 4 silos; at least 5 are needed"):
        world.silos[world.ids[0]].handle(pack(KeySet(0, b"\x0f", *columns)))


@pytest.mark.parametrize("bound", [True, False])
def test_one_question_has_one_cohort_over_all_indices(bound, monkeypatch):
    """Asked of all, then without the victim: the totals' difference would be its term. To all again it may be asked."""
    if not bound:
        monkeypatch.setattr(masked_silo, "_question_slot", lambda question: f"question/{os.urandom(8).hex()}")
    world = whole()

    def total(index, cohort):
        messages = {
            s: world.silos[s].contribute(index, cohort, TABLE, world.values[s], CONTEXT, QUESTION) for s in cohort
        }
        return carry(world.server.total(index, cohort, TABLE, messages, CONTEXT), {}).values

    whole_total, rest = total(0, world.ids), [s for p, s in enumerate(world.ids) if p != VICTIM]
    if bound:
        with pytest.raises(ProtocolError, match="other survivors of this question"):
            total(1, rest)
        assert is_input(total(2, world.ids), whole_total)
        assert world.silos[world.ids[0]].absent_from(QUESTION) == ()
    else:
        assert is_input(whole_total - total(1, rest), world.values[world.ids[VICTIM]])


@pytest.mark.parametrize("refused", [True, False])
def test_a_silo_sends_nothing_without_a_mask(refused, monkeypatch):
    """Whatever becomes of the two rules that ask for neighbours before. The control is its input."""
    world = whole()
    alone = (frozenset({VICTIM}), world.roster.bitmap(frozenset({VICTIM})))
    monkeypatch.setattr(masked_silo.MaskedSilo, "_check_cohort", lambda *_: alone)
    if refused:
        with pytest.raises(ProtocolError, match="has no neighbour in the cohort of sum 0"):
            ask(world, VICTIM, cohort=frozenset({VICTIM}))
    else:
        monkeypatch.setattr(masked_silo.MaskedSilo, "_whole_masks", lambda *_: [])
        words = ask(world, VICTIM, cohort=frozenset({VICTIM}))
        assert is_input(opened(world, words[None]), world.values[world.ids[VICTIM]])


def test_there_is_nothing_else_to_ask_a_silo_for():
    """No deposit, survivor or share: whatever a server says of who is lost, it has the contributions alone."""
    world = whole()
    world.contribute()
    lies = [DepositRequest(0), Deliver(0, b"\x1f", [], [], [])]
    for request in [*map(pack, lies), world.sign_request({0, 1, 2, 3}), world.reveal_request({0, 1, 2, 3})]:
        with pytest.raises(ProtocolError, match=r"does not take .* where a total is of all or there is none"):
            world.silos[world.ids[VICTIM]].handle(request)


@pytest.mark.parametrize("why", ["away", "altered", "late"])
def test_without_one_of_them_there_is_no_total_and_it_is_named(why):
    """Late it is the total after all: the others' contributions are as they were."""
    world = whole()
    messages, lost = world.contribute(), world.ids[VICTIM]
    kept = dict(messages)
    messages[lost] = messages[lost][:-1] + bytes([messages[lost][-1] ^ 1])
    if why != "altered":
        del messages[lost]
    says = f"1 of the 5 silos asked are missing, past max_missing = 0; nothing usable of '{lost}'"
    with pytest.raises(AggregationError, match=says + ("; .* did not sign" if why == "altered" else "$")):
        world.total(messages)
    if why == "late":
        assert is_input(world.total(kept).values, exact(world))


@pytest.mark.parametrize("checked", [True, False])
def test_a_total_that_cannot_be_is_refused(checked, monkeypatch):
    """A silo whose contribution is of another past than the others'. Unchecked the noise is taken for a total."""
    if not checked:
        monkeypatch.setattr(Ring, "_check_range", lambda *arguments: None)
    world = whole()
    past, name = dict.fromkeys(world.ids, bytes(32)), world.ids[VICTIM]
    messages = world.contribute(ids=[s for s in world.ids if s != name])
    messages[name] = world.silos[name].contribute(0, world.ids, TABLE, world.values[name], CONTEXT, past=past)
    if checked:
        with pytest.raises(AggregationError, match=r"sum 0: .*'(gradient|count)'"):
            world.total(messages)
    else:
        assert np.abs(world.total(messages).values - exact(world)).max() > 50


@pytest.mark.parametrize("away", [(), ((), {"silo-0007"})])
def test_a_server_that_begins_anew_and_a_silo_that_missed_the_key_set(away):
    world = whole(prepared=False)
    carry(world.server.prepare(0), world.silos, away)
    messages = world.contribute()
    assert is_input(world.total(messages).values, exact(world))
    server = MaskedServer(world.roster, world.server._store)
    world.restart_silos()
    carry(server.prepare(1), world.silos)
    messages = contribute(world.silos, 1, TABLE, world.values)
    assert is_input(carry(server.total(1, world.ids, TABLE, messages, CONTEXT), {}).values, exact(world))


def test_claims_on_indices_are_let_go_of_and_no_index_is_used_again():
    world, values = whole(), np.zeros(TABLE.size)
    name = world.ids[0]
    for index in range(200):
        world.silos[name].contribute(index, world.ids, TABLE, values, CONTEXT)
    assert sum(slot.startswith("used/") for slot in world.stores[name]._slots) <= 128
    world.restart_silos()
    for index in range(200):
        with pytest.raises(ProtocolError, match="used already, or skipped"):
            world.silos[name].contribute(index, world.ids, TABLE, values + 1, CONTEXT)
