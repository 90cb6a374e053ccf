"""Totals that are right or refused: wrong seeds, wrong shares, elements past their bound; each beside its control."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
from sum_adversary import TABLE, Tampering, World, exact, is_input
from sum_network import CONTEXT, carry, names, random_values, table_of

from secure_fvi.aggregation import Block, BlockTable, masked_server, masked_silo, onetime
from secure_fvi.aggregation.homomorphic import Homomorphic
from secure_fvi.aggregation.homomorphic_schemes import PrimeRing, RealSlots, step_exponent
from secure_fvi.aggregation.masked_server import ServerState
from secure_fvi.aggregation.messages import (
    BatchSignature,
    Contribution,
    Deposit,
    DepositRequest,
    Shares,
    pack,
    unpack,
    unpack_any,
)
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.aggregation.ring import Ring
from secure_fvi.aggregation.session import Secret, Session
from secure_fvi.errors import AggregationError, ProtocolError

BAD = 2


def complaining(world, silo, message, owners):
    """The silo's own complaint about these owners, in its answer to a delivery."""
    batch, unheld = world.silos[silo]._state._numbered(message.batch), world.roster.bitmap(frozenset(owners))
    statement = batch.session.unheld_statement(batch.digest, unheld)
    return pack(message._replace(unheld=unheld, complaint=world.identities[silo].sign(statement)))


def dealing(monkeypatch, world, seeds=False, shares=(), commit=True, sealed=""):
    """Let silo BAD deal garbage: its pair seeds (True: all; or those with these places), or its shares to `shares`
    (positions in its list of holders).

    commit: it commits to the garbage as its own, so that only others can tell. sealed: what it seals in place of the
    seeds that it commits to.
    """
    real = onetime.draw

    def draw(session, me, batch, pair_secrets):
        if me != BAD:
            return real(session, me, batch, pair_secrets)
        with monkeypatch.context() as patch:
            if seeds:
                honest = onetime.pair_seeds

                def wrong(*given):
                    right = honest(*given)
                    return os.urandom(len(right)) if seeds is True or given[-1] in seeds else right

                patch.setattr(onetime, "pair_seeds", wrong)
            if shares:
                share = onetime.shamir.share

                def garbage(secrets, holders, threshold):
                    out = np.array(share(secrets, holders, threshold))
                    for at in shares:
                        out[at] = np.frombuffer(os.urandom(out[at].size), np.uint8)
                    return out

                patch.setattr(onetime.shamir, "share", garbage)
            if sealed:
                sealing = onetime._sealing

                def seal(nonce, data, extra, *given):
                    closed = sealing(*given).encrypt(nonce, bytes(len(data)), extra)
                    return closed if sealed == "other seeds" else os.urandom(len(closed))

                patch.setattr(
                    onetime, "_sealing", lambda *given: SimpleNamespace(encrypt=lambda *what: seal(*what, *given))
                )
            if not commit:
                row = onetime.share_row
                patch.setattr(onetime, "share_row", lambda *a: bytes(len(row(*a))))
            return real(session, me, batch, pair_secrets)

    monkeypatch.setattr(masked_silo, "draw", draw)
    carry(world.server.prepare(0), world.silos)


class TestAlteredOnTheWire:
    """Somebody without any key shifts a contribution and loses the signature of its silo on the survivors."""

    def attack(self, world):
        bad = world.ids[BAD]
        ring = Ring(TABLE, 64, len(world.ids))
        messages = world.contribute()
        sent = unpack(messages[bad], Contribution)
        words = np.frombuffer(sent.payload, ring.dtype) + ring.encode(np.full(TABLE.size, 1.0))
        messages[bad] = pack(sent._replace(payload=words.tobytes()))
        return world.total(messages, lost=[{bad}])

    @pytest.mark.parametrize("check", [True, False])
    @pytest.mark.parametrize("count", [4, 10])
    def test_it_is_dropped_and_its_silo_named(self, count, check):
        world = World(count, max_missing=1, consistency_check=check)
        rest = [s for s in world.ids if s != world.ids[BAD]]
        assert is_input(self.attack(world).values, exact(world, rest))
        assert "did not sign" in world.server.faults[world.ids[BAD]]

    @pytest.mark.parametrize("count", [3, 10])
    def test_or_the_sum_is_refused(self, count):
        with pytest.raises(AggregationError, match="past max_missing = 0"):
            self.attack(World(count, max_missing=0))

    @pytest.mark.parametrize(
        ("count", "options"),
        [(4, {"max_missing": 1}), (10, {}), (10, {"consistency_check": False}), (3, {"max_missing": 0}),
         (10, {"max_missing": 0})],
        ids=str,
    )  # fmt: skip
    def test_control_without_signatures_on_contributions_the_total_is_wrong(self, monkeypatch, count, options):
        from sum_adversary import unsigned

        unsigned(monkeypatch)
        world = World(count, **options)
        off = self.attack(world).values - exact(world)
        assert np.abs(off - 1).max() < 1e-6


class TestWrongSeeds:
    """A silo deposits seeds that its neighbours do not have, and sends nothing."""

    def total(self, world, lost=()):
        rest = [s for p, s in enumerate(world.ids) if p != BAD]
        return rest, world.total(world.contribute(ids=rest), lost=lost)

    def test_survivors_know_better(self, monkeypatch):
        world = World(5, prepared=False)
        dealing(monkeypatch, world, seeds=True)
        rest, total = self.total(world)
        assert is_input(total.values, exact(world, rest))
        assert "one of the two sent wrong ones" in world.server.faults[world.ids[BAD]]

    def test_where_a_survivor_is_silent_as_well_the_sum_is_refused_and_both_named(self, monkeypatch):
        world = World(5, prepared=False)
        dealing(monkeypatch, world, seeds=True)
        with pytest.raises(AggregationError, match=f"'{world.ids[BAD]}' sealed is not the one that '{world.ids[0]}'"):
            self.total(world, lost=[(), {world.ids[0]}])

    @pytest.mark.parametrize("held", [True, False])
    def test_without_the_consistency_check_it_is_left_out(self, monkeypatch, held):
        """Of each batch, and sums go on. The control: one silo, silent, stops sum after sum."""
        if not held:
            monkeypatch.setattr(ServerState, "_outvoted", lambda self, batch: set())
        world = World(5, prepared=False, consistency_check=False, max_missing=1, batch=2)
        dealing(monkeypatch, world, seeds=True)
        rest = [s for p, s in enumerate(world.ids) if p != BAD]
        for index in range(4):
            carry(world.server.prepare(index), world.silos)
            says = f"'{world.ids[BAD]}' sealed is not the one"
            with nullcontext() if held else pytest.raises(AggregationError, match=says):
                assert is_input(world.total(world.contribute(index, ids=rest), index).values, exact(world, rest))

    @pytest.mark.parametrize("held", [True, False])
    @pytest.mark.parametrize(("check", "sealed"), [(True, "other seeds"), (False, "other seeds"), (False, "noise")])
    def test_who_seals_other_seeds_than_it_committed_to_is_convicted(self, monkeypatch, check, sealed, held):
        """Nobody knows before its seeds are needed: it is silent, and so is a survivor, where survivors tell theirs.
        The control: a server that leaves nobody out loses sum after sum to one silo."""
        if not held:
            monkeypatch.setattr(ServerState, "leave_out", lambda *arguments: None)
        world = World(7, prepared=False, consistency_check=check, max_missing=1, batch=2)
        dealing(monkeypatch, world, sealed=sealed)
        rest, refused = [s for p, s in enumerate(world.ids) if p != BAD], []
        for index in range(4):
            carry(world.server.prepare(index), world.silos)
            lost = [(), {world.ids[0]}] if check else []
            try:
                total = world.total(world.contribute(index, ids=rest), index, lost=lost)
                assert is_input(total.values, exact(world, rest))
            except AggregationError as error:
                refused.append(str(error))
        what = f"the seeds that silo '{world.ids[BAD]}' sealed are not those that it committed to"
        assert [what in line for line in refused] == [True] * (2 if held else 4)
        assert (BAD in world.server._state.batches[1].present) is not held
        if held:
            assert masked_server.convicts(world.session, BAD, world.server.proofs[world.ids[BAD]])

    @pytest.mark.parametrize(("count", "liars", "out"), [(5, 2, False), (7, 3, False), (4, 2, True), (5, 3, True)])
    def test_most_neighbours_alone_get_a_silo_left_out(self, monkeypatch, count, liars, out):
        """Liars commit to other seeds towards one honest silo, where nobody checks consistency. Half are too few."""
        world = World(count, prepared=False, consistency_check=False, max_missing=1, batch=2)
        honest = count - 1
        for place in range(liars):
            state = world.silos[world.ids[place]]._state

            def lie(request, state=state, place=place, deal=state.on_deposit_request):
                deposit, session = deal(request), state.agreed.session
                rows = list(deposit.seed_rows)
                rows[session.neighbours(place).index(honest)] = bytes(len(rows[0]))
                deposit = deposit._replace(seed_rows=rows)
                signature = state.identity.sign(session.deposit_statement(place, deposit))
                state._batches[request.batch].deposit = deposit = deposit._replace(signature=signature)
                return deposit

            monkeypatch.setitem(world.silos[world.ids[place]]._handlers, DepositRequest, lie)
        carry(world.server.prepare(0), world.silos)
        present = world.server._state.batches[0].present
        assert (honest in present, present >= set(range(honest))) == (not out, True)

    def test_who_differs_from_few_is_not_left_out_and_stops_its_own_sums(self, monkeypatch):
        """Which of two is wrong nobody can say: the sum is refused and both are named."""
        world = World(5, prepared=False, consistency_check=False)
        dealing(monkeypatch, world, seeds=(0,))
        with pytest.raises(AggregationError, match=f"'{world.ids[BAD]}' sealed is not the one that '{world.ids[0]}'"):
            self.total(world)

    @pytest.mark.parametrize("most", [0, 1])
    def test_nobody_is_left_out_where_too_few_would_remain(self, monkeypatch, most):
        world = World(5, prepared=False, consistency_check=False, max_missing=1, min_cohort=5 - most)
        dealing(monkeypatch, world, seeds=True)
        assert (BAD in world.batch.present) is not bool(most)

    @pytest.mark.parametrize("check", [True, False])
    def test_right_seeds_of_a_silent_silo_and_a_silent_survivor_are_enough(self, check):
        world = World(6, consistency_check=check)
        rest, total = self.total(world, lost=[(), {world.ids[0]}] if check else [{world.ids[0]}])
        assert is_input(total.values, exact(world, rest))

    def test_control_without_commitments_the_total_is_garbage(self, monkeypatch):
        monkeypatch.setattr(masked_server.ServerBatch, "is_seed", lambda *arguments: True)
        monkeypatch.setattr(Ring, "_check_range", lambda *arguments: None)
        world = World(5, prepared=False, consistency_check=False)
        dealing(monkeypatch, world, seeds=(0,))
        rest, total = self.total(world)
        assert not is_input(total.values, exact(world, rest))


class TestWrongShares:
    """One silo deals wrong shares to all others; every sum used to fail, in every batch."""

    OTHERS = tuple(range(7))

    @pytest.mark.parametrize("silent", [True, False])
    def test_sums_go_on(self, monkeypatch, silent):
        world = World(7, prepared=False, batch=2)
        dealing(monkeypatch, world, shares=self.OTHERS)
        ids = [s for p, s in enumerate(world.ids) if p != BAD] if silent else world.ids
        for index in range(5):
            carry(world.server.prepare(index), world.silos)
            assert is_input(world.total(world.contribute(index, ids=ids), index=index).values, exact(world, ids))

    def test_needed_they_convict_it_and_the_others_go_on(self, monkeypatch):
        """It contributes and is silent when its masks are to be opened: the others' shares are needed then."""
        world = World(7, prepared=False, batch=2)
        dealing(monkeypatch, world, shares=self.OTHERS)
        bad = world.ids[BAD]
        with pytest.raises(AggregationError, match=f"the shares that silo '{bad}' dealt do not open its commitment"):
            world.total(world.contribute(), lost=[(), {bad}])
        proof = world.server.proofs[bad]
        assert masked_server.convicts(world.session, BAD, proof)
        rest = [s for s in world.ids if s != bad]
        for index in range(1, 5):
            carry(world.server.prepare(index), world.silos)
            total = world.total(world.contribute(index, ids=world.ids if index == 1 else rest), index=index)
            assert is_input(total.values, exact(world, rest))
        # Left out of the next batch, also by a server that was started again.
        assert BAD not in world.server._state.batches[2].present
        again = type(world.server)(world.roster, world.server._store)
        assert again.proofs == world.server.proofs

    def test_control_a_server_that_leaves_nobody_out_loses_sum_after_sum(self, monkeypatch):
        world = World(7, prepared=False, batch=2)
        dealing(monkeypatch, world, shares=self.OTHERS)
        monkeypatch.setattr(type(world.server._state), "leave_out", lambda *arguments: None)
        for index in range(5):
            carry(world.server.prepare(index), world.silos)
            with pytest.raises(AggregationError, match="do not open its commitment"):
                world.total(world.contribute(index), lost=[(), {world.ids[BAD]}], index=index)

    @pytest.mark.parametrize("silent", [True, False])
    @pytest.mark.parametrize("held", [True, False])
    def test_without_the_consistency_check_its_batch_is_lost_and_no_later_one(self, monkeypatch, held, silent):
        """No survivor tells its own secrets there: shares of all are needed, of a silo that says nothing too. The
        control: a server that leaves nobody out."""
        if not held:
            monkeypatch.setattr(ServerState, "leave_out", lambda *arguments: None)
        world = World(10, prepared=False, batch=2, max_missing=1, consistency_check=False)
        dealing(monkeypatch, world, shares=range(10))
        rest, refused = [s for p, s in enumerate(world.ids) if p != BAD], []
        for index in range(5):
            carry(world.server.prepare(index), world.silos)
            ids = rest if silent or BAD not in world.server._state.batches[index // 2].present else world.ids
            try:
                assert is_input(world.total(world.contribute(index, ids=ids), index).values, exact(world, ids))
            except AggregationError as error:
                refused.append(str(error))
        what = f"the shares that silo '{world.ids[BAD]}' dealt do not open its commitment"
        assert [what in line for line in refused] == [True] * (2 if held else 5)

    def test_where_too_many_would_be_missing_the_job_ends_and_names_it(self, monkeypatch):
        world = World(7, prepared=False, batch=2, max_missing=1)
        dealing(monkeypatch, world, shares=self.OTHERS)
        bad = world.ids[BAD]
        with pytest.raises(AggregationError, match=bad):
            world.total(world.contribute(), lost=[(), {bad}])
        messages = world.contribute(1)
        del messages[world.ids[0]]
        with pytest.raises(
            AggregationError, match=f"past max_missing = 1; nothing usable of '{world.ids[0]}', '{bad}'"
        ):
            world.total(messages, index=1)

    def test_no_proof_holds_against_an_honest_silo(self):
        world = World(7)
        deposit, t = world.batch.deposits[BAD], world.session.threshold
        silos = list(world.silos.values())
        shares = [silos[h]._state._batches[0]._held[BAD][0, 0].tobytes() for h in world.session.holders(BAD)[:t]]

        def proof(**changed):
            row = {"deposit": pack(deposit), "index": 0, "kind": b"b", "at": list(range(1, t + 1)), "shares": shares}
            return msgpack.packb(list((row | changed).values()))

        forged = [bytes(32), *shares[1:]]
        rows = [bytes(len(row)) for row in deposit.share_rows]
        first = onetime.share_row(world.session, 0, BAD, world.session.holders(BAD)[0], forged[0], 0)
        fitting = [first + deposit.share_rows[0][len(first) :], *deposit.share_rows[1:]]
        for attempt in (
            proof(),
            proof(shares=forged),
            proof(shares=forged, deposit=pack(deposit._replace(share_rows=rows))),
            proof(at=[1] * t),
            proof(index=99_999),
            proof(index=world.roster.batch),  # the same entry of another batch, whose commitments are others
            proof(at=[1], shares=shares[:1]),  # too few open nothing
            proof(at=[1] * t, shares=shares[:1] * t),
            proof(at=[*range(1, t), len(world.session.holders(BAD)) + 1]),  # a position that nobody holds
            proof(shares=forged, deposit=pack(deposit._replace(share_rows=fitting))),  # unsigned
            proof(kind=b"e", shares=self.shares_of(world, Secret.PAIR)),
            proof(
                kind=b"e",
                shares=self.shares_of(world, Secret.PAIR),
                deposit=pack(deposit._replace(sealed_seeds=bytes(len(deposit.sealed_seeds)))),
            ),
        ):
            assert not masked_server.convicts(world.session, BAD, attempt)

    def shares_of(self, world, kind):
        """An honest silo's shares of b or e of index 0, as its first holders were dealt them."""
        silos, holders = list(world.silos.values()), world.session.holders(BAD)[: world.session.threshold]
        return [silos[h]._state._batches[0]._held[BAD][0, kind.column].tobytes() for h in holders]

    def proofs_by_kind(self, world):
        """By the byte that names the secret and whose shares are shown: a proof against an honest silo."""
        deposit, at = pack(world.batch.deposits[BAD]), list(range(1, world.session.threshold + 1))
        shares = {kind: self.shares_of(world, kind) for kind in Secret}
        return {
            (named, kind): msgpack.packb([deposit, 0, named, at, shares[kind]])
            for named in [bytes([b]) for b in range(256)] + [b"", b"bb", b"be", "b", 98, 0, 1, False, None]
            for kind in Secret
        }

    def test_no_kind_of_secret_convicts_an_honest_silo(self):
        """Shares of b, named as a secret that is not there, were checked as those of b and opened as e."""
        world = World(4)
        for (named, kind), proof in self.proofs_by_kind(world).items():
            if named in [k.value for k in Secret]:
                assert not masked_server.convicts(world.session, BAD, proof), (named, kind)
                continue
            with pytest.raises(ProtocolError, match="a proof is not of the form"):
                masked_server.convicts(world.session, BAD, proof)

    def test_control_where_any_byte_names_a_secret_honest_silos_are_convicted(self, monkeypatch):
        """A third kind whose share is looked up as b's and whose commitment as e's, as it once was."""
        world = World(4)

        class Loose:
            def __init__(self, value):
                self.value, self.asked = value, 0

            @property
            def column(self):
                self.asked += 1
                return int(self.asked > world.session.threshold)  # all shares are looked up first

        monkeypatch.setattr(masked_server, "Secret", Loose)
        monkeypatch.setattr(masked_server, "_PROOF", masked_server.wire.Anything(1 << 20, 8))
        assert masked_server.convicts(world.session, BAD, self.proofs_by_kind(world)[b"x", Secret.SELF])

    def test_shares_it_did_not_commit_to_are_not_held_and_it_is_left_out_of_the_batch(self, monkeypatch):
        world = World(7, prepared=False, batch=2)
        dealing(monkeypatch, world, shares=self.OTHERS, commit=False)
        bad = world.ids[BAD]
        assert "holders were dealt no shares that fit" in world.server.faults[bad]
        assert world.batch.left_out == {BAD}
        assert world.server._state.left_out == {}
        rest = [s for s in world.ids if s != bad]
        assert is_input(world.total(world.contribute()).values, exact(world, rest))
        again = type(world.server)(world.roster, world.server._store)  # started again, in the same batch
        assert again._state.batches[0].left_out == {BAD}

    def complained(self, size=4):
        """One holder says that it was dealt nothing of anybody; another silo is away while deposits are collected."""
        world = World(size, prepared=False, batch=1, max_missing=1)
        liar, away = world.ids[0], world.ids[-1]

        def lie(data):
            message = unpack_any(data)
            if type(message) is BatchSignature:
                return complaining(world, liar, message, frozenset(range(1, size)))
            return data

        def gone(data):
            if type(unpack_any(data)) is DepositRequest:
                raise ProtocolError("away")
            return data

        silos = world.silos | {
            liar: Tampering(world.silos[liar], reply=lie),
            away: Tampering(world.silos[away], request=gone),
        }
        carry(world.server.prepare(0), silos)
        return world, [s for s in world.ids if s != away]

    @pytest.mark.parametrize("size", [4, 5, 6])
    def test_one_liar_while_another_is_away_puts_nobody_out(self, size):
        """It once put all other honest silos out, for the whole session and without a proof."""
        world, here = self.complained(size)
        assert world.server._state.left_out == world.server.proofs == {}
        assert "holders were dealt no shares that fit, as 'silo" in world.server.faults[world.ids[1]]
        total = world.total(world.contribute(ids=here))
        assert set(total.survivors) == set(here)
        assert is_input(total.values, exact(world, here))
        carry(world.server.prepare(1), world.silos)
        assert is_input(world.total(world.contribute(1), index=1).values, exact(world))

    def test_control_put_out_of_the_batch_they_cost_its_sums_and_no_more(self, monkeypatch):
        monkeypatch.setattr(ServerState, "_can_spare", lambda *arguments: True)
        world, here = self.complained()
        assert world.batch.left_out == {1, 2}
        with pytest.raises(AggregationError, match=r"1 silos contributed|past max_missing"):
            world.total(world.contribute(ids=here))
        carry(world.server.prepare(1), world.silos)
        assert is_input(world.total(world.contribute(1), index=1).values, exact(world))

    def test_who_was_left_out_without_a_proof_before_takes_part_again(self):
        world = World(4)
        world.server._store.put({"left_out": msgpack.packb({1: b"", 2: b"a proof"})})
        assert type(world.server)(world.roster, world.server._store)._state.left_out == {2: b"a proof"}

    def test_complaints_of_fewer_than_n_less_t_leave_nobody_out(self, monkeypatch):
        world = World(7, prepared=False)
        lying = {world.ids[p] for p in (0, 1)}

        def complain(silo):
            def change(data):
                message = unpack_any(data)
                return complaining(world, silo, message, {BAD}) if type(message) is BatchSignature else data

            return change

        silos = world.silos | {s: Tampering(world.silos[s], reply=complain(s)) for s in lying}
        carry(world.server.prepare(0), silos)
        assert BAD not in world.server._state.left_out
        assert "2 of 7 holders" in world.server.faults[world.ids[BAD]]
        assert is_input(world.total(world.contribute()).values, exact(world))

    @pytest.mark.parametrize("check", [True, False])
    @pytest.mark.parametrize("control", [False, True])
    def test_nobody_on_the_way_complains_in_a_silos_name(self, check, control, monkeypatch):
        """Who broke the transport put an honest silo out of a batch, by complaints that nobody had made. The control:
        a signature on the batch alone, as it was."""
        if control:
            monkeypatch.setattr(Session, "unheld_statement", lambda session, batch, unheld: batch)
        world = World(7, prepared=False, max_missing=3, consistency_check=check)

        def change(data):
            message = unpack_any(data)
            bad = world.roster.bitmap(frozenset({BAD}))
            return pack(message._replace(unheld=bad)) if type(message) is BatchSignature else data

        spoilt = [world.ids[p] for p in (0, 1, 3)]
        carry(world.server.prepare(0), world.silos | {s: Tampering(world.silos[s], reply=change) for s in spoilt})
        assert world.batch.left_out == ({BAD} if control else set())
        assert ("did not sign" in str(world.server.faults.get(spoilt[0]))) is not control
        if not control:
            assert world.server.faults.keys() == set(spoilt)
            assert is_input(world.total(world.contribute()).values, exact(world))

    def test_a_deposit_is_signed_with_its_commitments(self):
        world = World(5)
        deposit = world.batch.deposits[BAD]
        row = bytes(len(deposit.share_rows[0]))
        for changed in (
            deposit._replace(share_rows=[row, *deposit.share_rows[1:]]),
            deposit._replace(seed_rows=[bytes(len(deposit.seed_rows[0])), *deposit.seed_rows[1:]]),
        ):
            statement = world.session.deposit_statement(BAD, changed)
            assert isinstance(changed, Deposit)
            assert not world.roster.verify(BAD, changed.signature, statement)


class TestToldSecrets:
    def reveal(self, world, place, survivors=range(5)):
        """What one silo answers to an honest, signed request."""
        seen = []
        silos = dict(world.silos)
        silos[world.ids[place]] = Tampering(world.silos[world.ids[place]], reply=lambda data: seen.append(data) or data)
        messages = world.contribute(ids=[world.ids[p] for p in survivors])
        carry(world.server.total(0, world.ids, TABLE, messages, CONTEXT), silos)
        return unpack(seen[-1], Shares)

    def test_a_survivor_tells_b_and_seeds_with_the_dropped_only(self):
        reply = self.reveal(World(5), 0, survivors=(0, 1, 3, 4))
        assert len(reply.own) == 32
        assert len(reply.seeds) == 1

    def test_who_is_missing_tells_nothing_of_its_own(self):
        world = World(5)
        reply = self.reveal(world, BAD, survivors=(0, 1, 3, 4))
        assert (reply.own, reply.seeds) == (b"", [])

    def test_without_the_check_a_threshold_of_shares_is_needed_as_before(self):
        # A lying server could ask one half for b and the other for seeds, with nobody's help.
        reply = self.reveal(World(5, consistency_check=False), 0, survivors=(0, 1, 3, 4))
        assert (reply.own, reply.seeds) == (b"", [])


def shifted(monkeypatch, world, by):
    """The contributions, of which silo BAD adds `by` to each ring element."""
    silo, ring = world.silos[world.ids[BAD]], Ring(TABLE, 64, len(world.ids))
    encode = ring.encode
    ring.encode = lambda values: encode(values) + np.uint64(by)
    silo._ring = lambda table: ring
    return world.contribute()


class TestOutOfRange:
    @pytest.mark.parametrize("most", [0, 3])
    def test_an_element_far_past_its_bound_is_refused_and_the_block_named(self, monkeypatch, most):
        world = World(5, max_missing=most)
        with pytest.raises(AggregationError, match=r"sum 0: block 'gradient': the total lies outside 5 survivors"):
            world.total(shifted(monkeypatch, world, 2**62))

    @pytest.mark.parametrize("most", [0, 3])
    def test_control_without_the_check_it_is_taken(self, monkeypatch, most):
        monkeypatch.setattr(Ring, "_check_range", lambda *arguments: None)
        world = World(5, max_missing=most)
        assert np.abs(world.total(shifted(monkeypatch, world, 2**62)).values).max() > 5 * 10.0

    def test_one_that_leaves_the_total_in_range_is_not_seen(self, monkeypatch):
        """What no range can catch: a silo that lies within what the total could be."""
        world = World(5)
        world.values = {s: np.zeros(TABLE.size) for s in world.ids}
        total = world.total(shifted(monkeypatch, world, 2**20))
        assert np.abs(total.values[:-1]).max() > 0

    @pytest.mark.parametrize("sign", [1, -1])
    @pytest.mark.parametrize("bits", [32, 64])
    def test_all_at_the_bound_are_in_range(self, bits, sign):
        for terms in (3, 7, 1000):
            for bound in (0.7, 1.0, 3e-9, 1e9):
                ring = Ring(BlockTable((Block("b", (2,), bound),)), bits, terms)
                total = np.zeros(2, ring.dtype)
                for _ in range(terms):
                    total += ring.encode(np.full(2, sign * bound))
                ring.decode(total, terms)
                with pytest.raises(AggregationError, match="'b'"):
                    ring.decode(total + np.array(sign * (terms + 1), np.int64).astype(ring.dtype), terms)

    def test_a_uniform_total_passes_with_at_most_a_half_an_element(self):
        rng, passed = np.random.default_rng(0), 0
        ring = Ring(BlockTable((Block("b", (1,), 1.0),)), 64, 4)
        for _ in range(2000):
            try:
                ring.decode(rng.integers(0, 2**64, 1, dtype=np.uint64).astype(ring.dtype), 4)
                passed += 1
            except AggregationError:
                pass
        # Share 1/4 to 1/2; 2,000 draws have an sd of at most 22, so that 1,150 is 6 sds off.
        assert 300 < passed < 1150

    def test_modulo_a_prime_and_for_reals_too(self):
        table = BlockTable((Block("b", (3,), 2.0), Block("n", (1,), 5.0, integer=True)))
        prime = PrimeRing(table, 3)
        words = prime.encode(np.array([2.0, 2.0, 2.0, 5.0]), ())
        prime.decode(words * 3, (), 3)
        with pytest.raises(AggregationError, match="'b'"):
            prime.decode(words * 3, (), 2)
        with pytest.raises(AggregationError, match="'n'"):
            prime.decode(words * 3 + np.array([0, 0, 0, 1]), (), 3)
        reals = RealSlots(table, 3)
        one = int(2.0 ** -step_exponent(3))
        reals.decode(np.full(4, 3 * one), (), 3)
        with pytest.raises(AggregationError, match="'b'"):
            reals.decode(np.full(4, 3 * one), (), 2)

    def test_an_encrypted_total_out_of_range_is_refused(self, monkeypatch):
        ids, table = sorted(names(4)), table_of(6)
        server, silos = local_parties(Homomorphic(max_missing=1), ids)
        carry(server.prepare(0), silos)
        values = random_values(ids, table)
        bad = silos[ids[BAD]]
        codec = bad._codec(table)
        encode = codec.encode
        monkeypatch.setattr(codec, "encode", lambda *given: encode(*given) + 2**56)
        messages = {s: silos[s].contribute(0, ids, table, values[s], CONTEXT) for s in ids}
        with pytest.raises(AggregationError, match="sum 0: block 'gradient': the total lies outside 4 survivors"):
            carry(server.total(0, ids, table, messages, CONTEXT), silos)
