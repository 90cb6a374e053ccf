"""Properties 2.1, 2.2 (b), 3.1, 3.2 and 3.3 of Ashman et al. (2022) on random logistic regressions.

Expectations are over fixed draws that all silos share, so that what the paper proves holds to rounding."""

from __future__ import annotations

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pvi_world import World, build, near
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.natural import Natural, kl

SIZES = (6, 25, 11)


def _logistic(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(x.new_zeros(x.shape[-1]), 1.5).to_event(1))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


MODEL = sf.FederatedModel(_logistic, "row")


def make_logistic(d: int = 3, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(SIZES), d, generator=rng, dtype=torch.float64)
    y = (torch.rand(len(x), generator=rng) < torch.sigmoid(x @ torch.randn(d, generator=rng).double())).double()
    return {"x": x, "y": y}


def split(data: dict[str, Tensor], sizes: tuple[int, ...]) -> list[dict[str, Tensor]]:
    parts = {name: value.split(sizes) for name, value in data.items()}
    return [{name: parts[name][j] for name in parts} for j in range(len(sizes))]


def _run(data: dict[str, Tensor], sizes: tuple[int, ...], rounds: int, **options: Any) -> World:
    world = build(MODEL, split(data, sizes), sf.PVI(rounds=max(rounds, 1), damping=1.0, start_spread=0.0, **options))
    for _ in range(rounds):
        world.round()
    return world


def _exact(world: World) -> Any:
    return world.engine.silos["silo-1"].program.fit.exact  # type: ignore[attr-defined]


def _target(world: World, name: str) -> Natural:
    target: Natural = _exact(world).target(world.state.q, {}, world.engine.silos[name].view)
    return target


@pytest.mark.parametrize("family", [pytest.param("full", marks=pytest.mark.slow), "diagonal"])
@pytest.mark.parametrize("optimizer", [pytest.param("fixed_point", marks=pytest.mark.slow), "gradient"])
@pytest.mark.later("gradient-diagonal")
def test_one_local_step_is_global_vi_whatever_the_partition(family: str, optimizer: str) -> None:
    """Properties 3.1 and 3.3: five rounds of one step each, on three silos and on all records at once."""
    data = make_logistic()
    options = {"family": family, "local_optimizer": optimizer, "local_steps": 1, "learning_rate": 0.02}
    many, one = (_run(data, sizes, 5, **options).state.q for sizes in (SIZES, (sum(SIZES),)))
    assert near(many, one, 1e-12)
    ten = {**options, "local_steps": 10}
    assert not near(_run(data, SIZES, 5, **ten).state.q, _run(data, (sum(SIZES),), 5, **ten).state.q, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_at_a_fixed_point_sites_are_gradients_and_q_is_an_optimum_of_global_vi(family: str) -> None:
    """Properties 3.2 and 2.2 (b); the control is q after the first round, where neither holds."""
    options = {"family": family, "local_optimizer": "fixed_point", "local_steps": 25}
    data = make_logistic()
    begun, ended = _run(data, SIZES, 1, **options), _run(data, SIZES, 36, **{**options, "schedule": "sequential"},
                                                        reveal_changes=True)  # fmt: skip
    names = sorted(ended.engine.silos)

    def residual(world: World) -> float:
        """Largest entry of the global free energy's natural gradient, prior + sum of targets - q."""
        total = world.state.prior
        for name in names:
            total = total.plus(_target(world, name))
        return max(float(part.abs().max()) for part in total.minus(world.state.q))

    assert residual(ended) < 1e-5
    assert residual(begun) > 1e-2
    message = ended.server.program.broadcast(ended.state, 10**6, ended.server.state.accepted)
    for name in names:
        silo: Any = ended.engine.silos[name]
        silo.settle(ended.server.state.accepted)
        site = silo.program.site(silo.local, message, name)
        assert near(site, _target(ended, name), 1e-6)


@pytest.mark.slow
def test_the_local_free_energy_is_a_divergence_from_the_tilted_distribution() -> None:
    """Property 2.1 with one coefficient: F_k(q) + KL(q || tilted) = log of the tilted normaliser, for any q."""
    world = _run(make_logistic(d=1), SIZES, 3, family="full", local_optimizer="fixed_point")
    name = "silo-2"
    silo: Any = world.engine.silos[name]
    silo.settle(world.server.state.accepted)
    message = world.server.program.broadcast(world.state, 10**6, world.server.state.accepted)
    cavity = world.state.q.minus(silo.program.site(silo.local, message, name))
    grid = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    likelihood = _exact(world).likelihood(silo.view)
    log_likelihood = torch.vmap(lambda z: likelihood(z, {}))(grid.unsqueeze(1))
    log_tilted = _log_density(cavity, grid) + log_likelihood
    step = float(grid[1] - grid[0])
    log_z = float(torch.logsumexp(log_tilted, 0)) + math.log(step)
    for mean, sd in ((0.0, 1.0), (0.7, 0.3), (-1.0, 0.6)):
        q = Natural(torch.tensor([mean / sd**2]).double(), torch.tensor([[1 / sd**2]]).double())
        log_q = _log_density(q, grid)
        weight = log_q.exp() * step
        free_energy = float(weight @ log_likelihood) - float(kl(q, cavity))
        divergence = float(weight @ (log_q - log_tilted)) + log_z
        assert divergence > 1e-3
        assert free_energy + divergence == pytest.approx(log_z, abs=1e-8)


def _log_density(q: Natural, at: Tensor) -> Tensor:
    return q.shift[0] * at - 0.5 * q.precision[0, 0] * at.square() - q.log_normaliser()


def test_fixed_points_are_refused_where_they_cannot_be() -> None:
    with pytest.raises(sf.InputError, match="takes all records"):
        sf.PVI(local_optimizer="fixed_point", sampling_rate=0.5)
    with pytest.raises(sf.InputError, match="at most 1"):
        sf.PVI(local_optimizer="fixed_point", learning_rate=1.5)
