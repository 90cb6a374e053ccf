"""The one-run bound: published check values, and its coverage on a mechanism of known epsilon."""

from __future__ import annotations

import numpy as np
import pytest

from secure_fvi.audits.canaries import gaussian_study, guess, lower_bound
from secure_fvi.errors import InputError


@pytest.mark.parametrize(
    ("m", "r", "v", "pure", "approximate"),
    [(1000, 100, 100, 3.4930, 3.4654), (1000, 100, 95, 2.1724, 2.1652), (5000, 200, 190, 2.3979, 2.3760)],
)
def test_check_values(m: int, r: int, v: int, pure: float, approximate: float) -> None:
    assert lower_bound(m, r, v, 0.0).epsilon == pytest.approx(pure, abs=5e-5)
    assert lower_bound(m, r, v, 1e-5).epsilon == pytest.approx(approximate, abs=5e-5)


def test_a_gaussian_mechanism_is_bounded_below_and_hardly_ever_above_the_truth() -> None:
    """sigma = 1, 10,000 canaries, 200 guesses, 200 repeats. Truth 4.37; more than 10 of 200 above it would be a
    false alarm at 5% each with probability below 0.42; the seed is fixed, and there are none."""
    found = gaussian_study()
    assert found.truth == pytest.approx(4.37, abs=0.02)
    assert found.median >= 2.2
    assert found.above_truth <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("each_side", [50, 100, 150, 200])
def test_the_bound_for_100_to_400_guesses(each_side: int) -> None:
    found = gaussian_study(each_side=each_side, seed=2)
    print(f"{2 * each_side} guesses: median {found.median:.3f}, above the truth {found.above_truth:.1%}")
    assert found.median >= 2.2
    assert found.above_truth <= 0.05


def test_guessing_at_random_proves_nothing() -> None:
    rng = np.random.default_rng(2)
    assert guess(rng.standard_normal(5000), rng.random(5000) < 0.5, 200, 1e-5).epsilon < 0.2
    assert lower_bound(100, 50, 20, 1e-5).epsilon == 0


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(InputError, match="cannot be"):
        lower_bound(100, 50, 51, 0.0)
