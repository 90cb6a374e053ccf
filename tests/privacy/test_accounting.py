"""Four accountants of the same events: they agree, they are ordered, and they refuse what they cannot bound."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mpmath
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import rdp_privacy_accountant as reference
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor

import secure_fvi as sf
from secure_fvi.errors import InputError
from secure_fvi.fitting import build_parties
from secure_fvi.privacy import accountants, accounting
from secure_fvi.privacy.events import (
    Composed,
    Event,
    Gaussian,
    PoissonSampled,
    Repeated,
    Skellam,
)
from secure_fvi_lab.bench.accountants import JOBS

CHECK = Repeated(PoissonSampled(0.01, Gaussian(1.0)), 10_000)


def test_check_values() -> None:
    assert accountants.epsilon(CHECK, 1e-5, "pld") == pytest.approx(6.188, abs=1e-3)
    assert 6.188 <= accountants.epsilon(CHECK, 1e-5, "prv") <= 6.198
    assert accountants.epsilon(CHECK, 1e-5, "rdp") == pytest.approx(6.713, abs=1e-3)


@pytest.mark.parametrize("noise", [0.3, 1.0, 8.0])
def test_the_gaussian_has_its_exact_curve_and_its_exact_delta(noise: float) -> None:
    event = Gaussian(noise)
    np.testing.assert_allclose(accounting.rdp(event), np.array(accounting.ORDERS) / (2 * noise**2))
    # Balle and Wang 2018, Thm 5, at an epsilon where delta is neither 0 nor 1.
    epsilon = 1 / noise
    phi = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
    exact = phi(0.5 / noise - epsilon * noise) - math.exp(epsilon) * phi(-0.5 / noise - epsilon * noise)
    assert exact <= accountants.delta(event, epsilon, "pld") <= exact * 1.001
    assert accountants.delta(event, epsilon, "rdp") >= exact


@pytest.mark.parametrize("noise", [0.1, 1.0, 5.0])
def test_a_gaussian_alone_is_on_a_coarse_grid_which_raises_its_epsilon_by_next_to_nothing(noise: float) -> None:
    """By less than a millionth of it. The control composes it, on a finer one."""

    def exact(epsilon: float) -> float:
        tail = norm.logcdf(-0.5 / noise - epsilon * noise)
        return float(norm.cdf(0.5 / noise - epsilon * noise) - math.exp(epsilon + tail)) - 1e-5

    epsilon = float(brentq(exact, 0, 700, xtol=1e-12))
    found = accountants.epsilon(Gaussian(noise), 1e-5)
    assert epsilon * (1 - 1e-9) <= found <= epsilon * (1 + 1e-6)
    alone, often = (
        accountants.loss_distribution(of, scale)._pmf_remove._discretization
        for of, scale in (({(1.0, noise): 1}, epsilon), ({(0.9, 5.0): 2}, 2.0))
    )
    assert alone >= 0.99e-4 * epsilon
    assert often <= 1e-4


def _by_convolution(parts: Mapping[tuple[float, float], int], delta: float) -> float:
    """Epsilon of {(rate, noise multiplier): count}, by no library: privacy losses of either direction on a grid, each
    cell's mass shared so that the mean of exp(-loss) is kept, and composed by an FFT. Exact to two parts in 10^5."""
    n, grid, worst = 1 << 17, 2e-4, 0.0
    for removed in (True, False):
        spectrum, missing = np.ones(n // 2 + 1, complex), 0.0
        for (q, z), count in parts.items():
            x = np.linspace(-12 * z, 12 * z + 1, 100_001)
            loss = np.logaddexp(math.log1p(-q) if q < 1 else -np.inf, math.log(q) + (2 * x - 1) / (2 * z * z))
            lower, upper = ([np.diff(norm.cdf(y)), -np.diff(norm.sf(y))] for y in (x / z, (x - 1) / z))
            absent, present = (np.where(x[1:] < 0.5, *tails) for tails in (lower, upper))
            mass = (1 - q) * absent + q * present if removed else absent
            middle = (loss[1:] + loss[:-1]) / 2 * (1 if removed else -1)
            low = np.floor(middle / grid).astype(int)
            up = np.expm1(low * grid - middle) / math.expm1(-grid)
            assert np.abs(low).max() + 1 < n // 2
            cells = np.bincount(low % n, mass * (1 - up), n) + np.bincount((low + 1) % n, mass * up, n)
            missing += count * (1 - mass.sum())
            spectrum *= np.fft.rfft(cells) ** count
        total, losses = np.fft.irfft(spectrum, n).clip(0), np.fft.fftfreq(n, 1 / n) * grid

        def over(epsilon: float, mass: Any = total, at: Any = losses, more: float = missing) -> float:
            return float(more + (mass * -np.expm1(np.minimum(epsilon - at, 0))).sum() - delta)

        worst = max(worst, float(brentq(over, 0, n // 2 * grid - 1)) if over(0) > 0 else 0.0)
    return worst


@pytest.mark.parametrize(
    "parts",
    [{(1.0, 4.0): 1}, {(0.05, 4.0): 420}, {(0.5, 4.0): 60}, {(0.02, 1.2): 50, (1.0, 6.0): 2, (0.3, 3.0): 7}],
    ids=["one release", "sampled", "half", "jobs of several kinds"],
)
def test_epsilon_is_that_of_losses_that_are_composed_here(parts: dict[tuple[float, float], int]) -> None:
    """The control: a hundredth less noise costs more than what we say."""
    sampled = [Repeated(PoissonSampled(q, Gaussian(z)), count) for (q, z), count in parts.items()]
    said, exact = accountants.epsilon(Composed(tuple(sampled)), 1e-5), _by_convolution(parts, 1e-5)
    assert exact * (1 - 5e-5) <= said <= exact * 1.001
    assert _by_convolution({(q, 0.99 * z): count for (q, z), count in parts.items()}, 1e-5) > said


@pytest.mark.parametrize(
    ("algorithm", "privacy", "sampled"),
    [
        (sf.SFVI(iterations=40), sf.RecordDP, (1.0, 40)),
        (sf.SFVI(iterations=40, sampling_rate=0.05), sf.RecordDP, (0.05, 40)),
        (sf.PVI(rounds=3), sf.RecordDP, (1.0, 3)),
        (sf.PVI(rounds=3, private="steps", local_steps=5, sampling_rate=0.2, scale_rate=0.2), sf.RecordDP, (0.2, 15)),
        (sf.FedAvg(rounds=3, local_steps=2, weights="equal", total_records=60), sf.SiloDP, (1.0, 3)),
    ],
    ids=["SFVI", "SFVI, sampled", "PVI", "PVI, steps", "FedAvg"],
)
def test_what_a_run_says_that_it_costs_is_that(algorithm: Any, privacy: Any, sampled: tuple[float, int]) -> None:
    """By the noise that its gate adds, the records that it samples and the sums that it makes, four of them in reserve:
    these too are paid for."""

    def model(x: Tensor, y: Tensor) -> None:
        beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("row", len(y)):
            pyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)

    silos = [{"x": torch.randn(20, 2), "y": torch.randn(20)} for _ in range(3)]
    dp = privacy(epsilon=1.0, delta=1e-5, clipping_norm=2.0, noise="silo", retries=4)
    server, engine, _ = build_parties(
        sf.FederatedModel(model, "row"), silos, algorithm, sf.Plain(), compile=False, privacy=dp
    )
    gate, (rate, sums) = engine.silos["silo-1"].gate, sampled
    terms = gate.terms
    assert terms is not None
    claim, noise = server.claim(), math.sqrt(terms.variance(1, 2.0)) / 2.0
    exact = _by_convolution({(rate, noise): sums + 4 * sums // terms.rounds}, 1e-5)
    assert exact * (1 - 5e-5) <= claim["epsilon"] <= exact * 1.001
    assert claim["epsilon"] <= claim["charged"] <= 1.0


def test_the_conversion_is_dp_accountings() -> None:
    curve = accounting.rdp(CHECK)
    for delta in (1e-9, 1e-5, 0.1):
        expected, order = reference.compute_epsilon(accounting.ORDERS, curve, delta)
        assert accounting.best_order(curve, delta) == (pytest.approx(expected, rel=1e-12), order)
    for epsilon in (0.5, 3.0, 8.0):
        expected, _ = reference.compute_delta(accounting.ORDERS, curve, epsilon)
        assert accountants.delta(CHECK, epsilon, "rdp") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.3, 2.0), (0.001, 0.7), (0.9, 6.0)])
def test_the_sampled_gaussian_is_dp_accountings(rate: float, noise: float) -> None:
    orders = np.array(accounting.ORDERS)
    theirs = reference.RdpAccountant(list(accounting.ORDERS))
    theirs.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)))
    ours, whole = accounting.rdp(PoissonSampled(rate, Gaussian(noise))), orders == np.floor(orders)
    np.testing.assert_allclose(ours[whole], theirs.rdp[whole], rtol=1e-9)
    # Between whole orders dp-accounting stops its series early, always too high, or gives up with inf.
    finite = np.isfinite(theirs.rdp)
    assert (ours[finite] <= theirs.rdp[finite] * (1 + 2e-8)).all()


@pytest.mark.later
@pytest.mark.parametrize(("rate", "noise"), [(0.01, 1.0), (0.3, 2.0), (0.001, 0.4), (0.97, 12.0)])
def test_fractional_orders_against_quadrature_in_many_digits(rate: float, noise: float) -> None:
    with mpmath.workdps(40):
        q, s = mpmath.mpf(rate), mpmath.mpf(noise)
        for order in (1.05, 1.7, 4.1, 10.9):
            a = mpmath.mpf(order)
            moment = mpmath.quad(
                lambda z: mpmath.npdf(z, 0, s) * (1 - q + q * mpmath.exp((2 * z - 1) / (2 * s**2))) ** a,  # noqa: B023
                [-15 * s, -5 * s, 0, 0.5, 1, 2, 5, a, a + 5 * s, a + 15 * s],
            )
            exact = float(mpmath.log(moment) / (a - 1))
            ours = accounting.rdp(PoissonSampled(rate, Gaussian(noise)))[accounting.ORDERS.index(order)]
            assert exact <= ours <= exact * (1 + 2e-8)


def test_tiny_rates_are_not_rounded_to_nothing() -> None:
    curve = accounting.rdp(PoissonSampled(1e-10, Gaussian(1.0)))
    # To leading order, D_alpha = alpha q^2 (exp(1 / sigma^2) - 1) / 2.
    assert curve[accounting.ORDERS.index(3.0)] == pytest.approx(1.5e-20 * math.expm1(1.0), rel=1e-6)
    assert (curve > 0).all()


def test_curves_add_and_count() -> None:
    a, b = PoissonSampled(0.02, Gaussian(1.5)), Skellam(400.0, 12.0, 3.0)
    composed = Composed((Repeated(a, 3), Composed((b, a))))
    np.testing.assert_allclose(accounting.rdp(composed), 4 * accounting.rdp(a) + accounting.rdp(b), rtol=1e-12)
    assert accounting.grouped(composed) == {a: 4, b: 1}
    assert accountants.epsilon(Composed(()), 1e-5, "pld") == 0 == accountants.epsilon(Composed(()), 1e-5, "rdp")


def test_a_full_batch_is_not_subsampled() -> None:
    for accountant in accountants.ACCOUNTANTS:
        full = accountants.epsilon(Repeated(PoissonSampled(1.0, Gaussian(4.0)), 16), 1e-5, accountant)
        assert full == pytest.approx(accountants.epsilon(Gaussian(1.0), 1e-5, accountant), rel=1e-9)


@pytest.mark.parametrize("target", [0.05, 0.2, 1.0, 5.0])
def test_the_grid_of_orders_loses_nothing(target: float) -> None:
    # The best real order of a Gaussian: minimise over a fine grid at the noise that gives about this epsilon.
    noise = math.sqrt(2 * math.log(1.25e5)) / target
    orders = np.exp(np.linspace(math.log(1.02), math.log(20_000), 200_000))
    best = (orders / (2 * noise**2) + np.log1p(-1 / orders) - np.log(1e-5 * orders) / (orders - 1)).min()
    assert best <= accountants.epsilon(Gaussian(noise), 1e-5, "rdp") <= best * 1.005


def test_curves_are_ordered_and_convex() -> None:
    events: list[Event] = [
        PoissonSampled(0.01, Gaussian(0.6)),
        PoissonSampled(0.01, Skellam(9.0, 6.0, 3.0)),
        PoissonSampled(1e-5, Gaussian(20.0)),
    ]
    for event in events:
        curve = accounting.rdp(event)
        assert np.isfinite(curve).all()
        assert (curve >= 0).all()
        assert (np.diff(curve) >= -1e-15 - 1e-6 * curve[1:]).all()


@pytest.mark.parametrize("accountant", ["pld", "prv", "opacus-rdp"])
def test_integer_noise_is_left_to_rdp(accountant: str) -> None:
    noise = Skellam(100.0, 4.0, 2.0)
    for event in (noise, PoissonSampled(0.1, noise), Composed((Gaussian(1.0), noise))):
        with pytest.raises(InputError, match="use rdp"):
            accountants.epsilon(event, 1e-5, accountant)


@pytest.mark.parametrize("delta", [0, 1, -1e-5, 1.5, math.nan, math.inf, True, "1e-5"])
def test_delta_is_checked(delta: float) -> None:
    with pytest.raises(InputError, match="delta must lie between 0 and 1"):
        accountants.epsilon(CHECK, delta, "rdp")


def test_bad_requests_are_named() -> None:
    with pytest.raises(InputError, match="unknown accountant 'gdp'"):
        accountants.epsilon(CHECK, 1e-5, "gdp")
    with pytest.raises(InputError, match="epsilon must be"):
        accountants.delta(CHECK, math.nan)
    with pytest.raises(InputError, match="use pld or rdp"):
        accountants.delta(CHECK, 1.0, "prv")
    with pytest.raises(InputError, match="unknown privacy event"):
        accounting.rdp("gaussian")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="orders"):
        accounting.epsilon_of_rdp(np.zeros(3), 1e-5)


def test_prv_refuses_where_it_would_hang() -> None:
    with pytest.raises(InputError, match="use pld"):
        accountants.epsilon(Repeated(PoissonSampled(0.9, Gaussian(0.3)), 1_000), 1e-5, "prv")
    with pytest.raises(InputError, match="use pld"):
        accountants.epsilon(Repeated(PoissonSampled(1e-4, Gaussian(4.0)), 10**9), 1e-5, "prv")


@pytest.mark.later
@pytest.mark.parametrize(
    "name", [pytest.param(job, marks=pytest.mark.slow if job == "very high epsilon" else ()) for job in JOBS]
)
def test_the_accountants_agree_on_ten_jobs(name: str) -> None:
    event, delta = JOBS[name]
    pld, prv, rdp = (accountants.epsilon(event, delta, by) for by in ("pld", "prv", "rdp"))
    assert pld == pytest.approx(prv, rel=0.01)
    assert rdp >= pld
    # Opacus' orders end at 63, so that ours can only be better.
    assert rdp <= accountants.epsilon(event, delta, "opacus-rdp") * (1 + 1e-4)
