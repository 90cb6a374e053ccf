"""Homomorphic sums: the total of the survivors, whoever drops out; nobody but the holder has the secret key."""

from dataclasses import replace

import numpy as np
import pytest
from homomorphic_world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sum_network import CONTEXT, carry, names, random_values, run_sum, table_of

from secure_fvi.aggregation import Block, BlockTable, homomorphic
from secure_fvi.aggregation.homomorphic import Homomorphic, HomomorphicServer, HomomorphicSilo, WithHolder
from secure_fvi.aggregation.homomorphic_schemes import (
    BFV,
    BFV_PRIME,
    PrimeRing,
    ResidueStream,
    SecretContext,
    flooding_sd,
    masked,
)
from secure_fvi.aggregation.key_holder import KEY_HOLDER, KeyHolder, holder_entry
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.aggregation.prg import Mask
from secure_fvi.aggregation.roster import Identity
from secure_fvi.errors import AggregationError, InputError, ProtocolError


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize(("silos", "size"), [(3, 2), (5, 50), (3, 8192 + 5)])
def test_bfv_totals_are_exact_within_the_resolution(masks, silos, size):
    ids, table = names(silos), table_of(size)
    server, parties = local_parties(Homomorphic(masks=masks), ids)
    for index in range(2):
        values = random_values(ids, table, seed=index)
        total = run_sum(server, parties, index, table, values)
        assert total.survivors == tuple(sorted(ids))
        np.testing.assert_allclose(total.values, sum(values.values()), rtol=0, atol=1e-12)
        assert total.values[-1] == sum(v[-1] for v in values.values())


@pytest.mark.later
@pytest.mark.parametrize("kind", [Homomorphic(), Homomorphic(masks=False), Homomorphic(scheme="ckks")], ids=repr)
def test_a_total_says_whether_some_silos_is_not_zero(kind):
    ids, table = names(3), BlockTable((Block("g", (1,), 8.0), Block("far", (3,), 1.0, integer=True, rows="some")))
    server, parties = local_parties(kind, ids)
    values = {s: np.array([0.5, 0.0, s == ids[1], s != ids[0]]) for s in ids}
    np.testing.assert_allclose(run_sum(server, parties, 0, table, values).values, [1.5, 0, 1, 1], atol=1e-2)


def test_a_ckks_total_is_off_by_its_flooding_alone_and_integers_are_exact():
    ids = names(4)
    table = BlockTable((Block("gradient", (5000,), 10.0), Block("count", (1,), 500.0, integer=True)))
    server, parties = local_parties(Homomorphic(scheme="ckks"), ids)
    rng = np.random.default_rng(1)
    values = {s: np.append(rng.uniform(-10, 10, 5000), float(rng.integers(0, 500))) for s in ids}
    total = run_sum(server, parties, 0, table, values)
    exact = sum(values.values())
    assert total.values[-1] == exact[-1]
    # The mean square of 5,000 Gaussian errors is chi-square; two-sided false alarm 2e-6.
    sd = 10 * flooding_sd(4)
    square = np.sum((total.values[:-1] - exact[:-1]) ** 2) / sd**2
    low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], 5000)
    # Rounding to steps between sd/2 and sd adds up to sd^2/12 to the variance.
    assert low < square < high * (1 + 1 / 12)


@pytest.mark.later
@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("stage", ["contribute", "sign", "reveal"])
def test_dropout_at_each_stage(stage, masks):
    world = World(7, masks=masks)
    away = set(world.ids[2:4])
    messages = {s: m for s, m in world.contribute().items() if stage != "contribute" or s not in away}
    lost = {"contribute": [], "sign": [away, away], "reveal": [(), away]}[stage]
    total = world.total(messages, lost=lost)
    assert set(total.survivors) == set(messages)
    np.testing.assert_allclose(total.values, sum(world.values[s] for s in messages), atol=1e-12)
    again = run_sum(world.local, world.silos, 1, world.table, world.values)
    np.testing.assert_allclose(again.values, sum(world.values.values()), atol=1e-12)


def test_a_silo_that_missed_the_key_drops_out_and_is_given_it_later():
    ids, table = names(5), table_of(20)
    server, parties = local_parties(Homomorphic(max_missing=1), ids)
    carry(server.prepare(0), parties, lost=[(ids[1],)])
    values = random_values(ids, table)
    with pytest.raises(ProtocolError, match="key has not come in"):
        parties[ids[1]].contribute(0, ids, table, values[ids[1]], CONTEXT)
    assert "key holder's key" in server.server.faults[ids[1]]
    rest = {s: v for s, v in values.items() if s != ids[1]}
    assert len(run_sum(server, parties, 0, table, rest).survivors) == 4
    assert len(run_sum(server, parties, 1, table, values).survivors) == 5
    assert ids[1] not in server.server.faults


def test_without_the_key_holder_there_is_no_total_and_the_next_sum_has_one():
    world = World()
    messages = world.contribute()
    answers, world.holder.handle = world.holder.handle, lambda _: (_ for _ in ()).throw(ProtocolError("away"))
    with pytest.raises(AggregationError, match="key holder did not answer"):
        world.total(messages)
    world.holder.handle = answers
    total = run_sum(world.local, world.silos, 1, world.table, world.values)
    np.testing.assert_allclose(total.values, sum(world.values.values()), atol=1e-12)


def test_a_bad_value_is_refused_and_named_by_its_block():
    for scheme in ("bfv", "ckks"):
        ids = names(3)
        table = BlockTable((Block("gradient", (4,), 10.0),))
        server, parties = local_parties(Homomorphic(scheme=scheme), ids)
        carry(server.prepare(0), parties)
        for bad in (np.nan, np.inf, 10.5):
            with pytest.raises(AggregationError, match="'gradient'"):
                parties[ids[0]].contribute(0, ids, table, np.array([1.0, bad, 0.0, 0.0]), CONTEXT)
        run_sum(server, parties, 0, table, {s: np.ones(4) for s in ids})


def test_options_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="'bfv' or 'ckks'"):
        Homomorphic(scheme="bgv")
    with pytest.raises(InputError, match="needs scheme = 'bfv'"):
        Homomorphic(scheme="ckks", masks=True)
    with pytest.raises(InputError, match="masks"):
        Homomorphic(masks="no")
    with pytest.raises(InputError, match="min_cohort"):
        Homomorphic(min_cohort=1)
    with pytest.raises(InputError, match="at least 3 silos"):
        local_parties(Homomorphic(), names(2))
    with pytest.raises(InputError, match="key holder's name"):
        local_parties(Homomorphic(), ["a", "b", KEY_HOLDER])
    big = BlockTable((Block("count", (1,), 1e6, integer=True),))
    server, parties = local_parties(Homomorphic(scheme="ckks"), names(3))
    carry(server.prepare(0), parties)
    with pytest.raises(InputError, match="use scheme = 'bfv'"):
        parties[names(3)[0]].contribute(0, names(3), big, np.ones(1), CONTEXT)


@pytest.mark.parametrize("checked", [True, False], ids=["", "control"])
def test_no_silo_of_a_session_has_the_key_holders_name(monkeypatch, checked):
    """Between institutions a session's roster is made without `Homomorphic.roster`. The control: what the server asks
    this silo goes to the key holder, so that each total lacks it."""
    if not checked:
        monkeypatch.setattr(homomorphic, "check_roster", lambda roster: None)
    sums, ids, holder, key = Homomorphic(max_missing=1), ["a", "b", "c", KEY_HOLDER], Identity(), SecretContext(BFV)
    identities = {silo: Identity() for silo in ids}
    roster = sums.beneath().roster({silo: identity.public_key for silo, identity in identities.items()})
    roster = replace(roster, key_holder=holder_entry(holder.public_key, BFV, True, key.public_bytes))

    def parties():
        silos = {s: HomomorphicSilo(roster, s, identities[s], sums, unbound=True) for s in ids}
        return HomomorphicServer(roster, BFV, True), silos

    if checked:
        with pytest.raises(InputError, match="key holder's name"):
            parties()
        with pytest.raises(InputError, match="key holder's name"):
            HomomorphicServer(roster, BFV, True)
        return
    server, silos = parties()
    local = WithHolder(server, KeyHolder(roster, holder, key, True).handle)
    carry(local.prepare(0), silos)
    sent = {s: silos[s].contribute(0, ids, table_of(2), np.ones(2), CONTEXT) for s in ids if s != KEY_HOLDER}
    assert carry(local.total(0, ids, table_of(2), sent, CONTEXT), silos).survivors == ("a", "b", "c")


class TestWhoHoldsTheSecretKey:
    def test_silos_and_server_hold_public_contexts(self):
        world = World(3)
        for party in (world.server, *world.silos.values()):
            context = party._key._context
            assert context.is_public()
            assert not context.has_secret_key()
            vector = party._key.read(party._key.encrypt(np.arange(3)), 3)[0]
            with pytest.raises(ValueError, match="secret_key"):
                vector.decrypt()
        # The control: the holder's own context does decrypt.
        key = world.holder._key
        assert key._context.has_secret_key()
        assert key.decrypt(world.server._key.read(world.server._key.encrypt(np.arange(3)), 3)).tolist() == [0, 1, 2]

    def test_no_party_but_the_holder_reaches_the_key_pair(self):
        world = World(3)

        def reachable(thing, seen):
            if id(thing) in seen:
                return False
            seen.add(id(thing))
            if isinstance(thing, SecretContext | KeyHolder):
                return True
            children = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
            if isinstance(thing, dict):
                children += list(thing.values())
            if isinstance(thing, list | tuple):
                children += list(thing)
            return any(reachable(child, seen) for child in children)

        assert not reachable(world.server, set())
        assert not any(reachable(silo, set()) for silo in world.silos.values())
        assert reachable(world.holder, set())

    def test_secrets_stay_out_of_repr(self):
        world = World(3)
        for thing in (world.holder, world.holder._key, world.silos[world.ids[0]], ResidueStream(bytes(32), 97)):
            assert len(repr(thing)) < 60
            assert "0x" not in repr(thing)

    def test_the_holder_restarts_from_its_stored_key_pair(self):
        world = World(3)
        stored = SecretContext.from_bytes(BFV, world.holder._key.to_bytes())
        world.holder = KeyHolder(world.roster, world.holder._identity, stored, True, world.stores[KEY_HOLDER])
        total = run_sum(world.local, world.silos, 0, world.table, world.values)
        np.testing.assert_allclose(total.values, sum(world.values.values()), atol=1e-12)
        with pytest.raises(InputError, match="no secret key"):
            SecretContext.from_bytes(BFV, world.holder._key.public_bytes)
        with pytest.raises(InputError, match="cannot be read"):
            SecretContext.from_bytes(BFV, b"nothing")

    def test_a_holder_or_silo_that_the_roster_does_not_name_is_refused(self):
        world = World(3)
        with pytest.raises(InputError, match="another key holder"):
            KeyHolder(world.roster, Identity(), world.holder._key, True)
        with pytest.raises(InputError, match="another key holder"):
            KeyHolder(world.roster, world.holder._identity, world.holder._key, masks=False)


class TestPrimeRing:
    def test_the_prime_is_the_largest_that_packs(self):
        galois = pytest.importorskip("galois")
        assert galois.is_prime(BFV_PRIME)
        assert BFV_PRIME % (2 * 8192) == 1
        assert BFV_PRIME < 2**58
        above = range(BFV_PRIME + 2 * 8192, 2**58, 2 * 8192)
        assert not any(galois.is_prime(candidate) for candidate in above)

    @pytest.mark.later
    @given(data=st.data(), terms=st.integers(2, 40), bound=st.floats(1e-6, 1e6))
    @settings(max_examples=40, deadline=None)
    def test_masked_encodings_add_up(self, data, terms, bound):
        ring = PrimeRing(BlockTable((Block("b", (5,), bound),)), terms)
        element = st.sampled_from([-bound, bound, 0.0]) | st.floats(-bound, bound)
        rows = [np.array(data.draw(st.lists(element, min_size=5, max_size=5))) for _ in range(terms)]
        keys = [bytes([k]) * 32 for k in range(terms)]
        total = [0] * 5
        for k, row in enumerate(rows):
            for at, residue in enumerate(ring.encode(row, [Mask(keys[k], k % 2 == 0)]).tolist()):
                total[at] = (total[at] + residue) % BFV_PRIME
        centred = np.array([t - BFV_PRIME if t > BFV_PRIME // 2 else t for t in total])
        decoded = ring.decode(centred, [Mask(key, k % 2 == 1) for k, key in enumerate(keys)])
        tolerance = terms * ring.resolution / 2 + 2**-50 * terms * bound
        assert (np.abs(decoded - sum(rows)) <= tolerance).all()

    @pytest.mark.parametrize("own", [True, False])
    def test_how_many_silos_are_not_zero_is_not_in_the_total(self, own):
        """One of four, or all: the residue is uniform. In the control no silo has a mask of its own."""
        ring = PrimeRing(BlockTable((Block("far", (2,), 1.0, integer=True, rows="some"),)), 4)
        for on in (1, 4):
            read = []
            for k in range(200):
                keys = [Mask(bytes([k, on, silo]) + bytes(29), False) if own else None for silo in range(4)]
                terms = [ring.encode(np.array([0.0, silo < on]), (), key) for silo, key in enumerate(keys)]
                total = sum(terms) % BFV_PRIME
                assert total[0] == 0
                read.append(total[1])
            if own:
                assert stats.kstest(np.array(read) / BFV_PRIME, "uniform").pvalue > 1e-4
            else:
                assert set(read) == {on}

    def test_many_masks_are_reduced_in_time(self):
        masks = [Mask(bytes([k]) * 32, False) for k in range(100)]
        exact = sum(ResidueStream(m.key, BFV_PRIME).take(7).astype(object) for m in masks) % BFV_PRIME
        got = masked(np.zeros(7, np.int64), masks, BFV_PRIME).astype(object) % BFV_PRIME
        assert (got == exact).all()

    def test_residues_do_not_depend_on_how_they_are_taken(self):
        for modulus in (97, BFV_PRIME):
            stream = ResidueStream(bytes(32), modulus)
            pieces = np.concatenate([stream.take(n) for n in (1, 20_000, 0, 7, 40_000)])
            assert (pieces == ResidueStream(bytes(32), modulus).take(60_008)).all()

    def test_rejection_makes_residues_uniform(self):
        # 65 of 128: nearly half of the words are rejected. One-sided false alarm 1e-6, key fixed.
        residues = ResidueStream(b"k" * 32, 65).take(65_000)
        limit = stats.chi2.ppf(1 - 1e-6, 64)
        assert residues.max() == 64
        assert np.sum((np.bincount(residues) - 1000) ** 2 / 1000) < limit
        # The control: reducing the same 7 bits instead is caught.
        words = ResidueStream(b"k" * 32, 128).take(65_000) % 65
        assert np.sum((np.bincount(words) - 1000) ** 2 / 1000) > limit
