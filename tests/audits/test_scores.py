"""Scores: published values, coverage of their intervals, and that controls decide whether an audit counts."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from secure_fvi.audits.base import Control, Estimate, judge
from secure_fvi.audits.scores import (
    advantage,
    auc,
    cross_fitted,
    gain,
    power_of_advantage,
    proportion,
    r_squared,
    ridge,
    tpr_at_fpr,
)
from secure_fvi.errors import InputError


def nearest(known: np.ndarray, answers: np.ndarray, unknown: np.ndarray) -> np.ndarray:
    """An attack: the answer of the row that is least far away."""
    return answers[np.linalg.norm(unknown[:, None] - known, axis=2).argmin(1)]


def test_clopper_pearson() -> None:
    """0 of 10: 1 - .025^(1/10); 1 of 10 as tabulated; 100 of 100 gives the 'rule of three'."""
    assert proportion(0, 10) == pytest.approx((0.0, 0.0, 0.30850), abs=1e-5)
    assert proportion(1, 10) == pytest.approx((0.1, 0.00253, 0.44502), abs=1e-5)
    assert proportion(100, 100).low == pytest.approx(0.025 ** (1 / 100))
    assert advantage(75, 100).value == pytest.approx(0.5)
    assert advantage(61, 100).low > 0 > advantage(60, 100).low  # P[Bin(100, .5) >= 60] = .028
    with pytest.raises(InputError, match="cannot be"):
        proportion(11, 10)


def test_the_power_of_an_audit_is_that_of_repeating_it() -> None:
    """Against 4,000 repeats; 4 sds, false alarm below 1e-4."""
    estimate = Estimate(0.5, 0.3, 0.7)
    claimed = power_of_advantage(estimate, 100)
    right = np.random.default_rng(0).binomial(100, 0.65, 4000)
    found = np.mean([advantage(int(k), 100).low > 0 for k in right])
    assert abs(found - claimed) < 4 * np.sqrt(claimed * (1 - claimed) / 4000)


def test_auc_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(1)
    truth, guesses = (rng.random(60) < 0.4).astype(float), np.round(rng.standard_normal(60), 1)
    guesses[truth > 0] += 0.5
    inside, outside = guesses[truth > 0][:, None], guesses[truth == 0][None, :]
    pairs = ((inside > outside) + 0.5 * (inside == outside)).mean()
    assert auc(truth, guesses, truth).value == pytest.approx(pairs)
    assert auc(truth, truth, truth).low == pytest.approx(0.025 ** (1 / min(truth.sum(), 60 - truth.sum())))
    with pytest.raises(InputError, match="both kinds"):
        auc(np.ones(5), np.ones(5), np.ones(5))


def test_coverage_of_the_intervals() -> None:
    """Over 400 repeats each holds the truth in 95%, give or take 4.5 sds of a count (and the bootstrap's known error):
    false alarm below 1e-4 where the interval is exact."""
    rng = np.random.default_rng(2)
    shift, covered = 1.0, np.zeros(3)
    area = 0.7602499  # Phi(1 / sqrt 2)
    for _ in range(400):
        truth = (rng.random(100) < 0.5).astype(float)
        guesses = rng.standard_normal(100) + shift * truth
        found = auc(truth, guesses, truth)
        covered[0] += found.low <= area <= found.high
        signal = rng.standard_normal(200)
        y = signal + rng.standard_normal(200)  # R^2 of the signal: 1/2
        found = r_squared(y, signal, np.arange(200))
        covered[1] += found.low <= 0.5 <= found.high
        found = gain(y, signal, 0.5 * signal, np.arange(200))  # 1/2 - 3/8
        covered[2] += found.low <= 0.125 <= found.high
    assert (covered / 400 > 0.90).all()
    assert (covered / 400 < 0.995).all()


def test_rate_at_a_low_false_positive_rate() -> None:
    """Fresh rows pass the threshold at 1% on average; the mean of 2,000 has a standard error of 0.02% or so. Where the
    threshold is the true one, 1 - Phi(2.326 - 3) = .750 of the rows inside pass it."""
    rng = np.random.default_rng(3)
    truth = np.repeat([0.0, 1.0], 500)
    found = [tpr_at_fpr(truth, rng.standard_normal(1000) + 3 * truth, 0.01) for _ in range(2000)]
    assert np.mean(norm.sf([at for _, at in found])) == pytest.approx(5 / 501, rel=0.08)
    assert 0.72 < np.mean([rate.value for rate, _ in found]) < 0.75  # below, since the ROC curve is concave
    assert tpr_at_fpr(np.repeat([0.0, 1.0], 20), np.arange(40.0), 0.01)[0].value == 0  # 20 rows allow no 1%


def test_a_gain_over_guesses_worse_than_the_mean_is_none() -> None:
    rng = np.random.default_rng(7)
    y, groups = rng.standard_normal(200), np.arange(200)
    bad, worse = 0.1 * rng.standard_normal(200), 0.5 * rng.standard_normal(200)
    assert r_squared(y, bad, groups).value < 0
    assert gain(y, bad, worse, groups).low < 0
    assert gain(y, y, worse, groups).value == pytest.approx(1.0)


def test_grouped_rows_widen_the_interval() -> None:
    """40 groups of 25 equal rows know as much as 40 rows."""
    rng = np.random.default_rng(4)
    y, guess = rng.standard_normal((2, 40))
    guess = y + guess
    alone = r_squared(y, guess, np.arange(40))
    repeated = r_squared(np.repeat(y, 25), np.repeat(guess, 25), np.repeat(np.arange(40), 25))
    naive = r_squared(np.repeat(y, 25), np.repeat(guess, 25), np.arange(1000))
    assert repeated.value == pytest.approx(alone.value)
    assert repeated.high - repeated.low == pytest.approx(alone.high - alone.low)
    assert naive.high - naive.low < 0.5 * (alone.high - alone.low)


def test_the_attack_finds_what_is_there_and_nothing_else() -> None:
    rng = np.random.default_rng(5)
    x, groups = rng.standard_normal((300, 40)), np.arange(300)
    linear = x[:, 0] + 0.3 * rng.standard_normal(300)
    noise = rng.standard_normal(300)
    assert r_squared(linear, cross_fitted(ridge, x, linear, groups), groups).low > 0.8
    assert r_squared(noise, cross_fitted(ridge, x, noise, groups), groups).low < 0


def test_an_attack_never_trains_on_the_group_it_guesses() -> None:
    """Answers that are the same within a group and noise between groups cannot be guessed."""
    rng = np.random.default_rng(6)
    groups = np.repeat(np.arange(60), 5)
    identity = np.repeat(rng.standard_normal((60, 8)), 5, 0) + 0.01 * rng.standard_normal((300, 8))
    y = np.repeat(rng.standard_normal(60), 5)
    assert r_squared(y, cross_fitted(nearest, identity, y, groups), groups).low < 0
    assert r_squared(y, cross_fitted(nearest, identity, y, np.arange(300)), groups).value > 0.4  # the control


def test_controls_decide_whether_an_audit_counts() -> None:
    strong, none = Estimate(0.9, 0.8, 0.95), Estimate(0.0, -0.1, 0.1)

    def row(found: Estimate, positive: Estimate, negative: Estimate):  # type: ignore[no-untyped-def]
        return judge("a", "masked", "advantage", found, Control(positive, "plain"), Control(negative, "shuffled"))

    assert row(none, strong, none).finding == "nothing found"
    assert row(strong, strong, none).finding == "leaks"
    weak = row(none, none, none)
    assert (weak.valid, weak.finding) == (False, "invalid")
    assert "too weak" in weak.detail["why_invalid"]
    assert row(strong, strong, strong).finding == "invalid"
    keys = {"attack", "protection", "score", "value", "low", "high", "positive_control", "negative_control", "valid"}
    assert keys <= weak.to_json().keys()
