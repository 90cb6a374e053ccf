"""Plans fit, and barely: the accountant asked again gives at most the target and nearly all of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from secure_fvi.errors import InputError
from secure_fvi.privacy import accountants
from secure_fvi.privacy.events import Composed, Event, Gaussian, PoissonSampled, Repeated, Skellam
from secure_fvi.privacy.plan import gaussian_job, plan, solve_noise, solve_rate, solve_rounds


@pytest.mark.later
@pytest.mark.parametrize(
    ("accountant", "epsilon"),
    [
        ("rdp", 0.2),
        ("rdp", 8.0),
        ("opacus-rdp", 1.0),
        ("prv", 1.0),
        ("pld", 0.2),
        pytest.param("pld", 1.0, marks=pytest.mark.slow),
    ],
)
def test_noise(accountant: str, epsilon: float) -> None:
    found = plan(epsilon=epsilon, delta=1e-5, sampling_rate=0.02, rounds=200, accountant=accountant)
    again = accountants.epsilon(gaussian_job(found.noise_multiplier, 0.02, 200), 1e-5, accountant)
    assert again == found.epsilon <= epsilon
    # A thousandth less noise no longer fits, up to the discretisation of the numerical accountants.
    less = accountants.epsilon(gaussian_job(found.noise_multiplier * 0.998, 0.02, 200), 1e-5, accountant)
    assert less > epsilon * (1 - 1e-4)
    assert found.release_epsilon < found.epsilon


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
def test_rate_and_rounds(accountant: str) -> None:
    rate = plan(epsilon=1.0, delta=1e-6, noise_multiplier=2.5, rounds=50, accountant=accountant)
    assert 0.995 < rate.epsilon <= 1.0
    rounds = plan(epsilon=1.0, delta=1e-6, noise_multiplier=2.5, sampling_rate=0.1, accountant=accountant)
    assert rounds.epsilon <= 1.0
    assert accountants.epsilon(gaussian_job(2.5, 0.1, rounds.rounds + 1), 1e-6, accountant) > 1.0


def test_a_full_gaussian_release_has_its_closed_form() -> None:
    noise = solve_noise(Gaussian, 1.0, 1e-5, "pld", tolerance=1e-4)
    phi = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
    exact = phi(0.5 / noise - noise) - math.exp(1.0) * phi(-0.5 / noise - noise)
    assert 0.999 * 1e-5 <= exact <= 1e-5


def test_skellam_by_rdp() -> None:
    def make(noise: float) -> Event:
        scale = 1000
        return Repeated(PoissonSampled(0.05, Skellam((noise * scale) ** 2, 30 * (scale + 30), scale + 30)), 100)

    noise = solve_noise(make, 1.0, 1e-5, "rdp")
    assert 0.998 < accountants.epsilon(make(noise), 1e-5, "rdp") <= 1.0
    assert noise > solve_noise(lambda z: gaussian_job(z, 0.05, 100), 1.0, 1e-5, "rdp")
    with pytest.raises(InputError, match="use rdp"):
        solve_noise(make, 1.0, 1e-5, "pld")


def test_everything_fits_or_nothing_does() -> None:
    assert solve_rate(lambda q: gaussian_job(100.0, q, 1), 1.0, 1e-5) == 1.0
    with pytest.raises(InputError, match="one round alone"):
        solve_rounds(lambda t: gaussian_job(0.5, 1.0, t), 1.0, 1e-5)
    with pytest.raises(InputError, match="rounds fit"):
        solve_rounds(lambda t: gaussian_job(1e7, 1.0, t), 1.0, 1e-5, "rdp")
    with pytest.raises(InputError, match="nothing keeps this within"):
        solve_noise(lambda z: Composed((Gaussian(z), Gaussian(0.1))), 1.0, 1e-5, "rdp")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"epsilon": 0.0}, "epsilon must be"),
        ({"epsilon": -1.0}, "epsilon must be"),
        ({"epsilon": math.nan}, "epsilon must be"),
        ({"epsilon": math.inf}, "epsilon must be"),
        ({"delta": 0.0}, "delta must lie"),
        ({"delta": 1.0}, "delta must lie"),
        ({"sampling_rate": 1.7}, "sampling rate must lie"),
        ({"sampling_rate": 0.0}, "sampling rate must be"),
        ({"rounds": 0}, "count must be"),
        ({"noise_multiplier": 1.0}, "none is left out"),
        ({"rounds": None}, "noise multiplier and rounds are left out"),
        ({"noise_multiplier": -1.0, "epsilon": None}, "noise_multiplier must be"),
        ({"accountant": "gdp"}, "unknown accountant"),
    ],
)
def test_bad_numbers_are_named(bad: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "sampling_rate": 0.01, "rounds": 10}
    with pytest.raises(InputError, match=message):
        plan(**{**good, **bad})


def test_bad_requests_are_refused_before_anything_is_computed() -> None:
    def make(_: float) -> Any:
        pytest.fail("an event was asked for")

    for delta, accountant, what in ((2.0, "rdp", "delta must"), (1e-5, "guess", "unknown accountant")):
        for solve in (solve_noise, solve_rate, solve_rounds):
            with pytest.raises(InputError, match=what):
                solve(make, 1.0, delta, accountant)


def test_a_rate_too_small_to_be_a_plan_is_none() -> None:
    """So little noise that one record in billions would still cost too much. The control: more noise."""
    with pytest.raises(InputError, match=r"no sampling rate keeps this within epsilon 1;"):
        solve_rate(lambda rate: gaussian_job(0.5, rate, 1000), 1.0, 1e-9, "rdp")
    assert 1e-3 < solve_rate(lambda rate: gaussian_job(2.0, rate, 1000), 1.0, 1e-9, "rdp") < 1
