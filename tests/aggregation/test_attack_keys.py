"""Attacks on keys and on the graph; each beside its control."""

from contextlib import nullcontext

import pytest
from sum_adversary import TABLE, World, is_input
from sum_fake_world import FakeWorld
from sum_network import CONTEXT, carry

from secure_fvi.aggregation import session as session_module
from secure_fvi.aggregation.messages import (
    KeyAdvert,
    KeySet,
    KeysRequest,
    NonceReveal,
    Nonces,
    pack,
    unpack,
    unpack_any,
)
from secure_fvi.aggregation.onetime import MAX_ATTEMPTS, Setup
from secure_fvi.aggregation.roster import Roster
from secure_fvi.aggregation.session import key_set_hash, nonce_commitment
from secure_fvi.errors import AggregationError, ProtocolError

VICTIM = 1
_P = 2**255 - 19
_OF_ORDER_8 = (
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
)
#: The points of which every multiple by a private key is zero, as canonical and as other bytes.
SMALL_ORDER = [
    *((u | top).to_bytes(32, "little") for u in (0, 1, _P - 1, _P, _P + 1) for top in (0, 1 << 255)),
    *map(bytes.fromhex, _OF_ORDER_8),
]


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

    @pytest.mark.parametrize("most", [0, 1])
    @pytest.mark.parametrize("point", SMALL_ORDER)
    def test_a_key_of_small_order_is_refused(self, point, most):
        """By the server as by silos. The control: the key that its silo signed first is taken in the same place."""
        world = World(prepared=False, max_missing=most)
        adverts = [unpack(world.silos[s].handle(pack(KeysRequest(0))), KeyAdvert) for s in world.ids]
        statement = session_module.advert_statement(world.roster, 0, 2, point, adverts[2].nonce_commitment)
        signature = world.identities[world.ids[2]].sign(statement)
        small = adverts[2]._replace(public_key=point, signature=signature)
        for advert, usable in ((small, False), (adverts[2], True)):
            assert world.server._state._usable(2, 0, advert) is usable
            rows = [*adverts[:2], advert, *adverts[3:]]
            key_set = KeySet(0, b"\x0f", *[list(c) for c in zip(*(r[1:] for r in rows), strict=True)])
            with nullcontext() if usable else pytest.raises(ProtocolError, match="unusable"):
                world.silos[world.ids[usable]].handle(pack(key_set))


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
