"""The k-regular graph: its bound against SciPy's, its shape, sums over it with dropouts."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import hypergeom
from sum_adversary import TABLE, World, is_input
from sum_network import carry

from secure_fvi.aggregation import Masked
from secure_fvi.aggregation.graph import (
    complete_threshold,
    log2_hypergeometric_tail,
    neighbourhood,
    ring_neighbours,
)
from secure_fvi.aggregation.parties import local_parties
from secure_fvi.errors import InputError


def test_a_thousand_silos_with_a_tenth_corrupt_and_a_tenth_lost():
    hood = neighbourhood(1000, 0.1, 0.1)
    assert (hood.k, hood.threshold, hood.complete) == (106, 71, False)
    # Bell et al. (2020): the neighbourhood's colluders and survivors are hypergeometric.
    secrecy = hypergeom(999, 100, 106).sf(2 * 71 - 106 - 1)
    recovery = 1000 * hypergeom(999, 999 - 100, 106).cdf(70)
    assert hood.log2_secrecy == pytest.approx(math.log2(secrecy), abs=1e-6)
    assert hood.log2_recovery == pytest.approx(math.log2(recovery), abs=1e-6)
    assert secrecy <= 2**-40
    assert recovery <= 2**-30
    assert "k = 106, t = 71, failure of secrecy 2^-41.6" in str(hood)


def test_the_graph_is_queryable_at_the_server():
    server, _ = local_parties(Masked(), [f"s{i}" for i in range(5)])
    assert server.neighbourhood.startswith("5 silos, complete graph: k = 4, t = 4")


@given(population=st.integers(10, 400), marked=st.floats(0, 1), draws=st.floats(0, 1), at_least=st.integers(0, 60))
@settings(max_examples=50, deadline=None)
def test_tails_agree_with_scipy(population, marked, draws, at_least):
    m, d = int(marked * population), int(draws * population)
    exact = hypergeom(population, m, d).sf(at_least - 1)
    ours = log2_hypergeometric_tail(population, m, d, at_least)
    if exact > 1e-280:
        assert ours == pytest.approx(math.log2(exact), abs=1e-6)
    else:
        assert ours < -900


@pytest.mark.parametrize(("corrupt", "lost"), [(0.0, 0.0), (0.05, 0.1), (0.1, 0.1), (0.2, 0.05)])
@pytest.mark.parametrize("silos", [33, 64, 100, 255, 400, 1000, 3000])
def test_every_graph_keeps_its_promise(silos, corrupt, lost):
    try:
        hood = neighbourhood(silos, corrupt, lost)
    except InputError:
        assert corrupt == 0.2
        assert silos > 255
        return
    if hood.complete:
        assert (hood.k, hood.threshold) == (silos - 1, complete_threshold(silos))
        return
    assert hood.k % 2 == 0
    assert hood.k < silos - 1
    assert hood.k < 2 * hood.threshold
    assert max(hood.log2_secrecy, hood.log2_disconnected) <= -40
    assert hood.log2_recovery <= -30


def test_complete_thresholds_are_majorities_and_leave_one_to_spare_from_three_on():
    assert [complete_threshold(n) for n in (2, 3, 4, 5, 6, 9, 32)] == [2, 2, 3, 4, 5, 7, 22]
    for n in range(2, 256):
        assert n < 2 * complete_threshold(n) <= 2 * n


@pytest.mark.parametrize(("corrupt", "lost"), [(0.4, 0.0), (0.0, 0.4), (-0.1, 0.0), (math.nan, 0.0)])
def test_assumptions_out_of_range_are_refused(corrupt, lost):
    with pytest.raises(InputError, match="corrupt and lost"):
        neighbourhood(100, corrupt, lost)


@given(count=st.integers(3, 60), half=st.integers(1, 10), seed=st.integers(0, 99))
def test_neighbourhoods_are_symmetric_and_of_the_right_size(count, half, seed):
    order = np.random.default_rng(seed).permutation(count).tolist()
    k = 2 * half
    near = {m: ring_neighbours(order, at, k) for at, m in enumerate(order)}
    for m, others in near.items():
        assert m not in others
        assert list(others) == sorted(set(others))
        assert len(others) == min(k, count - 1)
        assert all(m in near[v] for v in others)


def regular(count=48):
    """A world on a graph with k = 24, since nothing larger is needed for what it assumes."""
    world = World(count, prepared=False, corrupt=0.0, lost=0.07, batch=2)
    assert not world.roster.neighbourhood.complete
    return world


@pytest.mark.later
@pytest.mark.parametrize("stage", ["none", "key", "deposit", "delivery", "activation", "contribute", "sign", "reveal"])
def test_dropout_at_every_stage_on_a_regular_graph(stage):
    world = regular()
    away = set(world.ids[::16])
    steps = {"key": 0, "deposit": 3, "delivery": 4, "activation": 5}
    before = [away if steps.get(stage) == step else () for step in range(6)]
    carry(world.server.prepare(0), world.silos, before)
    gone = away if stage in (*steps, "contribute") else set()
    present = [s for s in world.ids if s not in gone]
    during = {"sign": [away, away], "reveal": [(), away]}.get(stage, [])
    total = world.total(world.contribute(ids=present), lost=during)
    assert total.survivors == tuple(present)
    assert is_input(total.values, sum(world.values[s] for s in present))


@pytest.mark.later
def test_the_order_is_fresh_in_every_session():
    orders = set()
    for _ in range(3):
        world = regular(40)
        carry(world.server.prepare(0), world.silos)
        assert TABLE.size == 12
        orders.add(world.session._order)
        assert sorted(world.session._order) == list(range(40))
    assert len(orders) == 3
