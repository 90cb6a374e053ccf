"""A run with a diagonal q says by how much it is too narrow, from what the rounds' totals show; and does not where
columns are not correlated."""

from __future__ import annotations

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms import noise_aware

N, DIM, ROUNDS = 900, 6, 600


def linear(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(4), 2.0).to_event(1))
    level = pyro.sample("level", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("row", len(x)):
        pyro.sample("y", dist.Normal(x[:, :4] @ beta + x[:, 4:] @ level, 1.0), obs=y)


def logistic(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(4), 2.0).to_event(1))
    level = pyro.sample("level", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("row", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x[:, :4] @ beta + x[:, 4:] @ level), obs=y)


def drawn(program: object, correlation: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, y, and how much wider than the best diagonal q the posterior is; columns of `beta` are correlated."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(N, DIM, generator=rng, dtype=torch.float64)
    x[:, :4] = math.sqrt(1 - correlation) * x[:, :4] + math.sqrt(correlation) * torch.randn(
        N, 1, generator=rng, dtype=torch.float64
    )
    truth = 0.5 * torch.randn(DIM, generator=rng, dtype=torch.float64)
    mean = x @ truth
    weight = torch.ones(N).double()
    if program is linear:
        y = mean + torch.randn(N, generator=rng, dtype=torch.float64)
    else:
        y = (torch.rand(N, generator=rng, dtype=torch.float64) < mean.sigmoid()).double()
        weight = mean.sigmoid() * (-mean).sigmoid()
    precision = x.mT @ (weight.unsqueeze(1) * x) + torch.eye(DIM) / 4
    return x, y, (torch.linalg.inv(precision).diagonal() * precision.diagonal()).sqrt()


def fitted(program: object, correlation: float, **options: object) -> tuple[sf.Result, Tensor, list[str]]:
    """The result, the exact ratio of sds, and warnings."""
    x, y, ratio = drawn(program, correlation, 0)
    silos = [{"x": x[j::3], "y": y[j::3]} for j in range(3)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", sf.SecureFVIWarning)
        result = sf.fit(
            sf.FederatedModel(program, "row"), silos, sf.SFVI(**{"family": "diagonal", **options}), sf.Plain(),
            compile=False,
        )  # fmt: skip
    return result, ratio, [str(w.message) for w in seen if issubclass(w.category, sf.SecureFVIWarning)]


@pytest.mark.later("logistic")
@pytest.mark.parametrize("program", [linear, logistic])
def test_a_diagonal_q_says_by_how_much_it_is_too_narrow(program: object) -> None:
    """Within a tenth of the exact ratio; the site whose columns are correlated is named, the other is not. The control
    has none that are, and no such warning."""
    result, ratio, said = fitted(program, 0.8, iterations=ROUNDS)
    assert float(ratio.max()) > 1.5
    assert result.convergence["widening"] == pytest.approx(float(ratio.max()), rel=0.1)
    (warned,) = (line for line in said if "family = 'full'" in line)
    assert "(beta " in warned
    assert "level" not in warned
    assert "family = 'full'" in str(result.summary().heading)
    result, ratio, said = fitted(program, 0.0, iterations=ROUNDS)
    assert float(ratio.max()) < 1.1
    assert result.convergence["widening"] == pytest.approx(float(ratio.max()), rel=0.05)
    assert not any("family = 'full'" in line for line in said)


@pytest.mark.later
def test_nothing_is_said_of_a_full_q_or_by_too_few_rounds() -> None:
    for options in ({"family": "full", "iterations": ROUNDS}, {"iterations": 40}):
        result, _, said = fitted(linear, 0.8, **options)
        assert "widening" not in result.convergence
        assert not any("family = 'full'" in line for line in said)


def test_a_run_that_stops_by_itself_looks_too() -> None:
    result, _, said = fitted(linear, 0.0)
    assert result.convergence["widening"] < 1.05
    assert not said


def test_what_error_adds_is_taken_off() -> None:
    """Of made traces in sixty dimensions, with noise of 2.5 slopes' own size and no correlation, none alarms, where
    least squares alone do; with less noise and a correlation of .9 between two dimensions all do."""
    n, rounds, rng = 60, 400, torch.Generator().manual_seed(1)
    for correlated, sd in ((0.0, 2.5), (0.9, 0.5)):
        curvature, plain = torch.eye(n, dtype=torch.float64), 0
        curvature[0, 1] = curvature[1, 0] = correlated
        for _ in range(20):
            trace = noise_aware.nothing_seen(n)
            for _ in range(rounds):
                z, noise = torch.randn(2, n, generator=rng, dtype=torch.float64)
                trace = noise_aware.seen(trace, z, -curvature @ z + sd * noise, 1.0)
            found = noise_aware.widening(trace, torch.ones(n), torch.zeros(n, n))
            assert found is not None
            assert (float(found.max()) > 1.15) == (correlated > 0)
            slope = -trace.gz @ torch.linalg.inv(trace.zz)
            values, vectors = torch.linalg.eigh(0.5 * (slope + slope.mT))
            own = (vectors.square() / values.clamp(min=0.1)).sum(1) * slope.diagonal()
            plain += float(own.max().sqrt()) > 1.15
        assert plain == 20
