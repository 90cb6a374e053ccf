"""Keyed draws: a function of key, id and round; standard normal; unknown without the key."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from secure_fvi.errors import ProtocolError
from secure_fvi.randomness import LARGEST, UNIT_ID, KeyedDraws, server_draws

SECRET = b"s" * 32


def test_draws_belong_to_ids_and_rounds() -> None:
    together = KeyedDraws(SECRET, b"records", np.array([4, 9, 2]))
    alone = KeyedDraws(SECRET, b"records", np.array([9]))
    for round_ in (0, 1, 63, 64, 1000):
        assert torch.equal(together.normals(round_, 5)[1], alone.normals(round_, 5)[0])
    assert torch.equal(together.normals(7, 5, np.array([2, 0])), together.normals(7, 5)[[2, 0]])


def test_rounds_may_come_in_any_order() -> None:
    draws = KeyedDraws(SECRET, b"records", np.array([1, 2]))
    forward = [draws.normals(r, 3).clone() for r in range(200)]
    again = KeyedDraws(SECRET, b"records", np.array([1, 2]))
    for round_ in (150, 3, 199, 0):
        assert torch.equal(again.normals(round_, 3), forward[round_])


def test_other_key_purpose_id_or_round_gives_other_draws() -> None:
    base = KeyedDraws(SECRET, b"records", np.array([1])).normals(0, 8)
    others = [
        KeyedDraws(b"t" * 32, b"records", np.array([1])).normals(0, 8),
        KeyedDraws(SECRET, b"batches", np.array([1])).normals(0, 8),
        KeyedDraws(SECRET, b"records", np.array([2])).normals(0, 8),
        KeyedDraws(SECRET, b"records", np.array([1])).normals(1, 8),
    ]
    assert all((base != other).all() for other in others)


def test_normals_are_standard() -> None:
    """Kolmogorov-Smirnov on 200,000 draws: the 1e-6 quantile of sqrt(n) D is 2.69; the seed is fixed."""
    draws = KeyedDraws(SECRET, b"records", np.arange(1000)).normals(0, 200).flatten().sort().values
    n = len(draws)
    distance = (torch.special.ndtr(draws) - torch.arange(1, n + 1) / n).abs().max()
    assert distance * np.sqrt(n) < 2.69


def test_server_draws_follow_from_the_seed() -> None:
    assert torch.equal(server_draws(3).normals(9, 4), server_draws(3).normals(9, 4))
    assert not torch.equal(server_draws(3).normals(9, 4), server_draws(-3).normals(9, 4))


@pytest.mark.parametrize("number", [-1, LARGEST, LARGEST + 7, 2**40])
def test_numbers_that_do_not_fit_are_refused(number: int) -> None:
    """Cut to 32 bits, 7 + 2^32 would meet the draws of 7. The control: the largest that fits has draws of its own."""
    draws = KeyedDraws(SECRET, b"records", np.array([1, 2]))
    for draw in (draws.normals, draws.uniforms):
        with pytest.raises(ProtocolError, match="past the last"):
            draw(number, 3)
    with pytest.raises(ProtocolError, match="past the last"):
        draws.stratified(number, 3, 4)
    assert not torch.equal(draws.normals(LARGEST - 1, 3), draws.normals(0, 3))


def test_no_two_draws_meet_in_one_block() -> None:
    """What enters the cipher is different for different ids, numbers and positions, and so is what leaves it."""
    ids = np.array([-2, -1, 0, 1, 2**62])
    draws = KeyedDraws(SECRET, b"records", ids)
    numbers = (0, 1, 2**16, 2**31, LARGEST - 1)
    seen = np.concatenate([draws.uniforms(n, 6).ravel() for n in numbers])
    assert len(np.unique(seen)) == len(ids) * len(numbers) * 6


def test_repr_shows_no_key() -> None:
    assert repr(KeyedDraws(SECRET, b"records", np.array([1, 2]))) == "KeyedDraws(2 ids)"


def _subsets(sample: Callable[[int], np.ndarray], draws: int) -> np.ndarray:
    """How often each subset of four places came about."""
    return np.bincount([int((1 << sample(k)).sum()) for k in range(draws)], minlength=16)


def test_poisson_samples_have_the_law_of_independent_coins() -> None:
    """All 16 subsets of four places, at two rates: chi square of 20,000 draws at a fixed seed, false alarms 1e-9 each.
    Waits that leave out 0 (no two neighbours) and a fixed number of places are found out by the same test."""
    draws, one = KeyedDraws(SECRET, b"joining", np.array([UNIT_ID])), 20_000
    limit = chi2.isf(1e-9, 15)

    def distance(counts: np.ndarray, rate: float) -> float:
        heads = np.array([bin(s).count("1") for s in range(16)])
        expected = one * rate**heads * (1 - rate) ** (4 - heads)
        return float(((counts - expected) ** 2 / expected).sum())

    for rate in (0.2, 0.7):
        assert distance(_subsets(lambda k, r=rate: draws.poisson(k, 4, r), one), rate) < limit
    apart = _subsets(lambda k: 2 * draws.poisson(k, 2, 0.2), one)
    assert distance(apart, 0.2) > limit
    rng = np.random.default_rng(0)
    fixed = _subsets(lambda k: rng.choice(4, 1, replace=False), one)
    assert distance(fixed, 0.25) > limit


def test_poisson_samples_are_as_large_as_they_should_be_and_lie_everywhere() -> None:
    """2,000 samples of 10,000 places at a rate of 1 in 100: mean and variance of the number, and how places spread over
    tenths; each within 6 standard errors, false alarms 1e-8 in all."""
    draws = KeyedDraws(SECRET, b"joining", np.array([UNIT_ID]))
    samples = [draws.poisson(k, 10_000, 0.01) for k in range(2_000)]
    sizes = np.array([len(s) for s in samples])
    assert abs(sizes.mean() - 100) < 6 * np.sqrt(99 / 2_000)
    assert abs(sizes.var() - 99) < 6 * 99 * np.sqrt(2 / 2_000)
    tenths = np.bincount(np.concatenate(samples) // 1_000, minlength=10)
    assert (np.abs(tenths - 20_000) < 6 * np.sqrt(20_000 * 0.99)).all()
    assert all((np.diff(s) > 0).all() for s in samples)


@pytest.mark.parametrize("rate", [1e-300, 1e-6, 0.3, 0.999, 1 - 2**-53])
def test_a_poisson_sample_of_more_places_begins_as_that_of_fewer(rate: float) -> None:
    """So a record that is added at the end moves nobody's coin, and numbers that are drawn again are the same."""
    draws = KeyedDraws(SECRET, b"joining", np.array([UNIT_ID]))
    for number in range(50):
        longer = draws.poisson(number, 3_000, rate)
        for size in (0, 1, 17, 2_999):
            assert np.array_equal(draws.poisson(number, size, rate), longer[longer < size])
