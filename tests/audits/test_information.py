"""Mutual information of Gaussian pairs, which is known: below the cap, and above it."""

from __future__ import annotations

import math

import numpy as np
import pytest

import secure_fvi as sf
from secure_fvi.audits.latent_studies import Critic, Sample, collect, gaussian, info_nce, information_rows
from secure_fvi.audits.worlds import MASKED, PLAIN, Protection, Workbench, resampled
from secure_fvi.errors import InputError
from secure_fvi.models.six_cities import PROGRAM, load


def pairs(correlation: float, count: int, columns: int = 5) -> tuple[np.ndarray, np.ndarray, float]:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((count, columns))
    y = correlation * x[:, 0] + math.sqrt(1 - correlation**2) * rng.standard_normal(count)
    return x, y, -0.5 * math.log(1 - correlation**2)


@pytest.mark.parametrize(
    "correlation", [pytest.param(0.5, marks=pytest.mark.slow), 0.8, pytest.param(0.95, marks=pytest.mark.slow)]
)
@pytest.mark.later("0.8")
def test_a_lower_bound_that_is_not_far_below(correlation: float) -> None:
    """500 pairs: 0.14, 0.51 and 1.16 nats under a cap of 2.30."""
    x, y, truth = pairs(correlation, 500)
    found = info_nce(x, y, np.arange(500))
    assert found.cap == pytest.approx(math.log(10))
    assert found.estimate.low < truth + 0.05
    assert found.estimate.value == pytest.approx(truth, abs=0.07 + 0.3 * truth)
    assert not found.near_cap
    closed = gaussian(x, y, np.arange(500))
    assert closed.low < truth < closed.high  # fixed seed; 95% each


def test_information_above_the_cap_is_marked() -> None:
    """Three targets of 3.1 nats each, where ln 10 is 2.3: the estimate stops at the cap and says so."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((300, 3))
    y = 0.999 * x + math.sqrt(1 - 0.999**2) * rng.standard_normal((300, 3))
    found = info_nce(x, y, np.arange(300), Critic(steps=150, repeats=2))
    assert found.near_cap
    assert found.estimate.high <= found.cap
    assert found.estimate.value < 3 * 3.1 / 2


def test_of_several_targets_the_one_that_varies_most() -> None:
    x, y, _ = pairs(0.8, 300)
    both = np.column_stack([0.1 * np.random.default_rng(3).standard_normal(300), y])
    assert gaussian(x, both, np.arange(300)) == gaussian(x, y, np.arange(300))


def test_nothing_is_not_called_something() -> None:
    x, y, _ = pairs(0.0, 300)
    found = info_nce(x, y, np.arange(300), Critic(steps=100, repeats=2), confidence=0.999)
    assert found.estimate.low < 0.01
    assert gaussian(x, y, np.arange(300), 0.999).low < 0.01


@pytest.mark.slow
def test_rows_carry_the_cap() -> None:
    """Worlds of three silos whose messages tell the target; under "masks" they do not."""
    rng = np.random.default_rng(3)
    target = rng.standard_normal(180)
    world = np.repeat(np.arange(60), 3)
    totals = np.repeat(target.reshape(60, 3).mean(1), 3)[:, None]

    class Given:
        """What `information_rows` reads of a `local_latents.Sample`."""

        def __init__(self, messages: np.ndarray, answers: np.ndarray) -> None:
            self.messages, self.target, self.world = messages, answers, world
            self.both = np.concatenate([messages, totals], 1)

        def shuffled(self) -> Given:
            return Given(self.messages, np.roll(self.target, 3))

    plain = Given(np.column_stack([target + 0.1 * rng.standard_normal(180), rng.standard_normal(180)]), target)
    masked = Given(rng.standard_normal((180, 2)), target)
    critic = Critic(steps=60, repeats=2)
    nce, normal = information_rows("plain", plain, plain, critic)  # type: ignore[arg-type]
    assert nce.valid
    assert nce.finding == normal.finding == "leaks"
    assert nce.detail["cap"] == pytest.approx(math.log(10))
    assert nce.value <= nce.detail["cap"]
    hidden = information_rows("masked", masked, plain, critic)[1]  # type: ignore[arg-type]
    assert hidden.valid
    assert hidden.high < 0.5 < normal.low  # what totals tell: at most 1/3 of the variance, 0.2 nats


@pytest.mark.slow
def test_six_cities() -> None:
    """3 x 60 silos of 10 children, 12 rounds late in a run: masks take most of it away, and totals stay."""
    bench = Workbench(PROGRAM.model, sf.SFVI(), resampled(load().records, (179,) * 3, 3), worlds=60)

    def sample(protection: Protection) -> Sample:
        return collect(bench.laboratory(protection), lambda seed: resampled(bench.pool, (10,) * 3, seed), range(60))

    plain = sample(PLAIN)
    rows = [
        row
        for protection, found in ((PLAIN, plain), (MASKED, sample(MASKED)))
        for row in information_rows(protection.name, found, plain)
    ]
    for row in rows:
        print(f"{row.attack:<56} {row.protection:<8} {row.value:.3f} [{row.low:.3f}, {row.high:.3f}] {row.finding}")
    assert all(row.valid for row in rows)
    assert rows[0].low > rows[2].value
    assert rows[1].low > rows[3].high


def test_bad_input() -> None:
    x, y, _ = pairs(0.5, 60)
    with pytest.raises(InputError, match="at least 10"):
        info_nce(x, y, np.repeat(np.arange(6), 10))
    with pytest.raises(InputError, match="no batch of 40"):
        info_nce(x, y, np.arange(60), Critic(batch=40))
