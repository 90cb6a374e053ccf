"""Two processes of one party over one store, in whatever order; each attack beside its control."""

from contextlib import nullcontext

import numpy as np
import pytest
from sum_adversary import TABLE, Tampering, World, exact, is_input, payload_of
from sum_network import CONTEXT, carry

from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.aggregation.homomorphic_schemes import DECRYPTIONS
from secure_fvi.aggregation.key_holder import KeyHolder, KeyWornOut
from secure_fvi.aggregation.masked_silo import MaskedSilo, SiloState
from secure_fvi.aggregation.messages import Deliver, DepositRequest, KeySet, KeysRequest, pack, unpack_any
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.store import NONE, MemoryStore, SealedStore, SqliteStore
from secure_fvi.deployment.holding import HeldStore
from secure_fvi.errors import ProtocolError

VICTIM = 1


def another(world, place=VICTIM, store=None):
    """A second process of one silo over the same store."""
    name = world.ids[place]
    return MaskedSilo(world.roster, name, world.identities[name], store or world.stores[name], unbound=True)


class ForgetfulStore(MemoryStore):
    """The control: remembers no claim on an index."""

    def claim(self, slot, value, settle=True, still=NONE):
        return value if slot.startswith("used/") else super().claim(slot, value, settle)

    def put(self, slots, rising=NONE, still=NONE):
        super().put(slots, rising)

    def risen(self, slot):
        return -1


class TestOneIndexTwice:
    def difference(self, make_store=MemoryStore, most=2):
        """What the difference of two contributions to one index gives away; ProtocolError where it is refused."""
        world = World(prepared=False, max_missing=most)
        name = world.ids[VICTIM]
        world.stores[name] = make_store()
        world.restart_silos()
        carry(world.server.prepare(0), world.silos)
        second = another(world)
        one, two = world.values[name], np.append(np.linspace(-1, 1, TABLE.size - 1), 3.0)
        first = world.silos[name].contribute(0, world.ids, TABLE, one, CONTEXT)
        again = second.contribute(0, world.ids, TABLE, two, CONTEXT)
        ring = Ring(TABLE, world.roster.bits, world.roster.size)
        words = [np.frombuffer(payload_of(m), ring.dtype) for m in (again, first)]
        return ring.decode(words[0] - words[1]), two - one

    @pytest.mark.parametrize("most", [0, 2])
    def test_the_second_process_is_refused(self, most, tmp_path):
        for make in (MemoryStore, lambda: SqliteStore(tmp_path / "silo.sqlite")):
            with pytest.raises(ProtocolError, match="used already"):
                self.difference(make, most)

    @pytest.mark.parametrize("most", [0, 2])
    def test_control_without_claims_the_difference_is_open(self, most):
        assert is_input(*self.difference(ForgetfulStore, most))

    @pytest.mark.parametrize("most", [0, 2])
    def test_between_claim_and_write_the_other_is_refused_too(self, most):
        """The first process has claimed the index, and is killed or has not written it yet."""
        world = World(max_missing=most)
        name = world.ids[VICTIM]
        held = HeldStore(world.stores[name], lambda: None)
        first = another(world, store=held)
        values = world.values[name]
        sent = []

        def killed():
            with held.together():
                sent.append(first.contribute(0, world.ids, TABLE, values, CONTEXT))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            killed()
        assert world.stores[name].risen("last") == -1
        for context, other in ((CONTEXT, -values), (bytes(32), values)):
            with pytest.raises(ProtocolError, match="by another process or before a crash"):
                another(world).contribute(0, world.ids, TABLE, other, context)
        # The same answer may be made again: it is the same bytes.
        again = another(world).contribute(0, world.ids, TABLE, values, CONTEXT)
        assert payload_of(again) == payload_of(sent[0])

    def test_an_encrypted_answer_is_repeated_with_the_same_values_only(self):
        stores: dict[str, MemoryStore] = {}
        server, silos = local_parties(Homomorphic(), list("abc"), lambda party: stores.setdefault(party, MemoryStore()))
        carry(server.prepare(0), silos)
        values = np.append(np.full(TABLE.size - 1, 0.5), 1.0)
        silos["a"].contribute(0, list("abc"), TABLE, values, CONTEXT)
        stores["a"].drop(["last", "contributed/0"])  # as after a kill between the claim and the write
        with pytest.raises(ProtocolError, match="by another process or before a crash"):
            silos["a"].contribute(0, list("abc"), TABLE, -values, CONTEXT)
        silos["a"].contribute(0, list("abc"), TABLE, values, CONTEXT)


class Sinking(MemoryStore):
    """The control: what is written last stands, be it less."""

    def put(self, slots, rising=NONE, still=NONE):
        super().put({**slots, **{slot: number.to_bytes(8, "big") for slot, number in rising.items()}})


class SinkingFile(SqliteStore):
    def put(self, slots, rising=NONE, still=NONE):
        super().put({**slots, **{slot: number.to_bytes(8, "big") for slot, number in rising.items()}})


class TestStandingStill:
    """One process stands still before it writes which index was the newest, while the other goes on."""

    def stores(self, tmp_path, rises):
        yield (MemoryStore if rises else Sinking)()
        yield (SqliteStore if rises else SinkingFile)(tmp_path / "silo.sqlite")
        inner = (MemoryStore if rises else Sinking)()
        yield SealedStore(inner, bytes(32), b"silo")
        yield HeldStore(SealedStore((MemoryStore if rises else Sinking)(), bytes(32), b"silo"), lambda: None)

    def overtaken(self, world, store, index, later, rises):
        """The silo contributes at `index`, and while it stands still at all of `later`; what it sent there."""
        name, sent = world.ids[VICTIM], []
        store.put(world.stores[name]._slots)
        values = world.values[name]

        class StandsStill:
            def __getattr__(self, what):
                return getattr(store, what)

            def put(self, slots, rising, still):
                if "last" in rising and not sent:
                    sent.extend(contribute(other, i, values) for i in later)
                store.put(slots, rising, still)

        def contribute(silo, i, values):
            return silo.contribute(i, world.ids, TABLE, values, CONTEXT, bytes([i]) * 32)

        other = another(world, store=store)
        with (
            nullcontext() if not rises else pytest.raises(ProtocolError, match="another process has gone on meanwhile")
        ):
            contribute(another(world, store=StandsStill()), index, values)
        return sent, lambda i, values: contribute(another(world, store=store), i, values)

    @pytest.mark.parametrize("rises", [True, False])
    def test_an_index_whose_claim_was_let_go_of_is_used_no_more(self, rises, tmp_path):
        """Whole sums let go of claims by 64 indices."""
        for store in self.stores(tmp_path, rises):
            world = World(5, max_missing=0)
            values = world.values[world.ids[VICTIM]]
            two = np.append(np.linspace(-1, 1, TABLE.size - 1), 3.0)
            sent, again = self.overtaken(world, store, 10, (130, 200), rises)
            if rises:
                with pytest.raises(ProtocolError, match="used already, or skipped"):
                    again(130, two)
                assert store.risen("last") == 200
                continue
            ring = Ring(TABLE, world.roster.bits, world.roster.size)
            words = [np.frombuffer(payload_of(m), ring.dtype) for m in (again(130, two), sent[0])]
            assert is_input(ring.decode(words[0] - words[1]), two - values)

    @pytest.mark.parametrize("rises", [True, False])
    def test_no_sum_is_signed_after_a_later_question(self, rises, tmp_path):
        """Where sums recover."""
        for store in self.stores(tmp_path, rises):
            world = World(5, max_missing=1)
            self.overtaken(world, store, 0, (1,), rises)
            ask = unpack_any(world.sign_request({0, 1, 2, 3}))._replace(question=bytes(32))
            if rises:
                with pytest.raises(ProtocolError, match="did not contribute to sum 0"):
                    another(world, store=store).handle(pack(ask))
            else:
                assert another(world, store=store).handle(pack(ask))


class Between:
    """A store over which another process does something between this one's look and its first write of the kind, be it
    a claim on what `begins` or, where that is empty, a contribution. The control: a write rests on nothing."""

    def __init__(self, store, begins, act, rests):
        self._store, self._begins, self._act, self._rests = store, begins, act, rests

    def __getattr__(self, what):
        return getattr(self._store, what)

    def _meanwhile(self):
        act, self._act = self._act, lambda: None
        act()

    def claim(self, slot, value, settle=True, still=NONE):
        if self._begins and slot.startswith(self._begins):
            self._meanwhile()
        return self._store.claim(slot, value, settle, still if self._rests else NONE)

    def put(self, slots, rising=NONE, still=NONE):
        if not self._begins and "last" in rising:
            self._meanwhile()
        self._store.put(slots, rising, still if self._rests else NONE)


class TestBetweenLookAndWrite:
    """Where sums recover: what a write rests on is looked at in its own transaction, of one file as of memory."""

    def world(self, tmp_path, disk):
        """A world, and its victim's store twice, as two processes have it."""
        world = World(5, max_missing=1)
        if not disk:
            return world, [world.stores[world.ids[VICTIM]]] * 2
        pair = [SqliteStore(tmp_path / "silo.sqlite") for _ in range(2)]
        pair[0].put(world.stores[world.ids[VICTIM]]._slots)
        return world, pair

    def contribute(self, world, silo, index):
        return silo.contribute(index, world.ids, TABLE, world.values[world.ids[VICTIM]], CONTEXT, bytes([index]) * 32)

    @pytest.mark.parametrize("disk", [False, True])
    @pytest.mark.parametrize("rests", [True, False])
    def test_no_sum_is_signed_once_a_later_question_was_answered(self, disk, rests, tmp_path):
        """Its survivors would be counted by nobody."""
        world, (one, two) = self.world(tmp_path, disk)
        self.contribute(world, another(world, store=one), 0)
        later = another(world, store=two)
        between = Between(one, "survivors/", lambda: self.contribute(world, later, 1), rests)
        ask = pack(unpack_any(world.sign_request({0, 1, 2, 3}))._replace(question=bytes(32)))
        with pytest.raises(ProtocolError, match="has answered another meanwhile") if rests else nullcontext():
            assert another(world, store=between).handle(ask)
        assert (one.get("survivors/0") is None) == rests
        assert one.risen("last") == 1

    @pytest.mark.parametrize("disk", [False, True])
    @pytest.mark.parametrize("rests", [True, False])
    def test_who_was_told_the_survivors_contributes_no_more(self, disk, rests, tmp_path):
        world, (one, two) = self.world(tmp_path, disk)
        others = [name for name in world.ids if name != world.ids[VICTIM]]
        sent = world.contribute(ids=others, cohort=world.ids)
        told = another(world, store=two)
        ask = pack(world.with_proofs(unpack_any(world.sign_request({0, 2, 3, 4})), sent))
        between = Between(one, "", lambda: told.handle(ask), rests)
        late, values = another(world, store=between), world.values[world.ids[VICTIM]]
        with pytest.raises(ProtocolError, match="another process has gone on meanwhile") if rests else nullcontext():
            assert late.contribute(0, world.ids, TABLE, values, CONTEXT)
        assert two.get("survivors/0") is not None
        assert (one.risen("last") == -1) == rests


class TestOnTheDisk:
    """Of a silo that must outlive its machine: what an answer rests on is synced before the answer leaves."""

    def unsynced(self, tmp_path, power_safe=True):
        """What a silo wrote in one sum that was not on the disk when it answered; how often it synced. By SQLite's own
        account of each transaction."""
        world, left, syncs, open_ = World(prepared=False), [], 0, []
        name = world.ids[VICTIM]
        world.stores[name] = store = SqliteStore(tmp_path / "silo.sqlite", power_safe)
        world.restart_silos()
        carry(world.server.prepare(0), world.silos)
        full = store._connection.execute("PRAGMA synchronous").fetchone()[0] == 2

        def seen(statement):
            nonlocal full, syncs
            if statement.startswith("PRAGMA synchronous"):
                full = "FULL" in statement
            if statement.startswith("INSERT"):
                open_.append(statement)
            alone = statement.startswith("INSERT") and not store._connection.in_transaction
            if alone or statement.startswith("COMMIT"):
                syncs += full
                if full:
                    open_.clear()

        store._connection.set_trace_callback(seen)
        messages = world.contribute()
        left.extend(open_)
        world.total(messages)
        left.extend(open_)
        return left, syncs

    def test_claims_are_synced_with_what_rests_on_them(self, tmp_path):
        left, syncs = self.unsynced(tmp_path)
        assert left == []
        assert syncs == 2  # the contribution with its claim; the survivors, and nothing more when they come again

    def test_control_where_claims_need_not_outlive_the_machine(self, tmp_path):
        left, _ = self.unsynced(tmp_path, power_safe=False)
        assert any("survivors/0" in statement for statement in left)


class TestABatchThatIsOver:
    """One process has gone on to newer batches and dropped the claims of the first; the other still holds it."""

    def stale(self, contributed):
        world = World(batch=1)
        old = another(world)
        if contributed:
            world.total(world.contribute(0))
        for index in (1, 2):
            carry(world.server.prepare(index), world.silos)
        assert world.stores[world.ids[VICTIM]].get("used/0") is None
        return world, old

    def use(self, world, old):
        return old.contribute(0, world.ids, TABLE, -world.values[world.ids[VICTIM]], CONTEXT)

    @pytest.mark.parametrize("contributed", [True, False])
    def test_is_used_no_more(self, contributed):
        with pytest.raises(ProtocolError, match=r"is over|used already"):
            self.use(*self.stale(contributed))

    def test_control_without_the_mark_it_is(self, monkeypatch):
        monkeypatch.setattr(SiloState, "check_live", lambda self, batch: None)
        assert payload_of(self.use(*self.stale(False)))

    def test_is_not_drawn_again(self):
        world = World(prepared=False, batch=1)
        late = another(world)
        carry(world.server.prepare(0), world.silos)
        late = another(world)  # knows batch 0 only
        for index in (1, 2, 3, 4):
            carry(world.server.prepare(index), world.silos)
        with pytest.raises(ProtocolError, match="batch 1 is over"):
            late.handle(pack(DepositRequest(1)))


def test_both_processes_hand_out_the_same_keys_and_deposits():
    world = World(prepared=False)
    place = world.ids[VICTIM]
    twin = another(world)
    assert twin.handle(pack(KeysRequest(0))) == world.silos[place].handle(pack(KeysRequest(0)))
    carry(world.server.prepare(0), world.silos)
    one, two = another(world), another(world)
    asked = pack(DepositRequest(1))
    assert one.handle(asked) == two.handle(asked)


def test_two_key_holders_count_each_others_decryptions():
    stores: dict[str, MemoryStore] = {}
    config = Homomorphic(scheme="ckks")
    holder = config.parties(list("abc"), lambda party: stores.setdefault(party, MemoryStore()))[2]
    twin = KeyHolder(holder._roster, holder._identity, holder._key, config.masked, holder._store)
    # Both read the same count; only claims tell them of each other.
    for party in (holder, twin, holder):
        party._store.put({"spent": bytes(8)})
        party._count(DECRYPTIONS // 4)
    twin._store.put({"spent": bytes(8)})
    with pytest.raises(KeyWornOut):
        twin._count(DECRYPTIONS // 4 + 1)


class BlindStore(MemoryStore):
    """Does not show what another process wrote between a look and the claim; claims are as they are."""

    def __init__(self, shared, *hidden):
        self._slots, self._hidden = shared._slots, hidden

    def get(self, slot):
        return None if slot.startswith(self._hidden) else super().get(slot)


class TestBetweenLookAndClaim:
    """Both processes have looked, and found nothing; the claim decides, and the later one is refused."""

    @pytest.mark.parametrize("kind", [KeySet, Deliver])
    def test_one_key_set_and_one_delivery(self, kind):
        world = World(5, prepared=False)
        name, seen = world.ids[0], []

        def four(m):
            if kind is KeySet:
                return KeySet(0, b"\x0f", *(column[:4] for column in m[2:]))
            fields = {"digests": m.digests[:4], "envelopes": m.envelopes[:3], "share_digests": m.share_digests[:3]}
            return m._replace(depositors=b"\x0f", **fields)

        def request(data):
            message = unpack_any(data)
            if isinstance(message, kind) and not seen:
                seen.append((data, another(world, 0)))  # started before the first process has taken it
            return data

        carry(world.server.prepare(0), world.silos | {name: Tampering(world.silos[name], request)})
        data, second = seen[0]
        with pytest.raises(ProtocolError, match=r"accepted already|delivered already"):
            second.handle(pack(four(unpack_any(data))))
        second.handle(data)
        total = world.total(world.contribute())
        assert is_input(total.values, exact(world))

    def test_one_set_of_survivors(self):
        world = World(5)
        world.contribute()
        second = another(world, 0, BlindStore(world.stores[world.ids[0]], "survivors/"))
        world.silos[world.ids[0]].handle(world.sign_request({0, 1, 2, 3}))
        with pytest.raises(ProtocolError, match="other survivors of sum 0 were named before"):
            second.handle(world.sign_request(range(5)))
        second.handle(world.sign_request({0, 1, 2, 3}))

    def test_one_use_of_the_newest_index(self):
        """The second has claimed the older index when the first has gone on to the next one."""
        world = World(5)
        name = world.ids[0]
        store = world.stores[name]

        class Overtaken(BlindStore):
            def claim(self, slot, value, settle=True, still=NONE):
                if slot == "used/0":
                    world.silos[name].contribute(1, world.ids, TABLE, world.values[name], CONTEXT)
                return super().claim(slot, value, settle, still)

        second = another(world, 0, Overtaken(store))
        with pytest.raises(ProtocolError, match="used already, or skipped"):
            second.contribute(0, world.ids, TABLE, world.values[name], CONTEXT)

    @pytest.mark.parametrize("what", ["survivors", "delivery"])
    @pytest.mark.parametrize("marked", [True, False])
    def test_a_batch_that_ends_before_the_claim(self, what, marked, monkeypatch):
        """The other process has gone on, and dropped what was claimed: the claim finds its slot free. The control:
        nobody looks for the mark."""
        world, late = World(5, prepared=False, batch=1), []
        name = world.ids[0]

        class Overtaken(BlindStore):
            def claim(self, slot, value, settle=True, still=NONE):
                if what in slot and len(late) == 1:
                    late.append(slot)
                    for index in (1, 2, 3):
                        carry(world.server.prepare(index), world.silos)
                return super().claim(slot, value, settle, still)

        def seen(data):
            if isinstance(unpack_any(data), Deliver) and not late:
                late.append((another(world, 0, Overtaken(world.stores[name])), data))
            return data

        carry(world.server.prepare(0), world.silos | {name: Tampering(world.silos[name], seen)})
        second, request = late[0]
        if what == "survivors":
            world.contribute()
            second, request = another(world, 0, Overtaken(world.stores[name])), world.sign_request(range(5))
        if not marked:
            monkeypatch.setattr(SiloState, "check_live", lambda self, batch: None)
            assert second.handle(request)
            return
        with pytest.raises(ProtocolError, match="batch 0 is over"):
            second.handle(request)
        assert len(late) == 2
