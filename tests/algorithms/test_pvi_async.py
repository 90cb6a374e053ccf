"""Asynchronous PVI: some silos a round; q stays the prior times the sites, whoever is lost."""

from __future__ import annotations

from typing import Any

import pytest
from pvi_world import REGRESSION, World, make_regression
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.natural import Natural
from secure_fvi.fitting import build_parties

SOME: dict[str, Any] = {"schedule": "asynchronous", "buffer": 3, "reveal_changes": True}
EXACT: dict[str, Any] = {"local_optimizer": "closed_form", "family": "full"}
SIZES = (7, 30, 12, 20, 9)


def _off(got: Natural, want: Natural) -> float:
    """Largest difference of precisions, relative, or of means."""
    precision = float((got.precision - want.precision).abs().max() / want.precision.abs().max())
    return max(precision, float((got.mean() - want.mean()).abs().max()))


def _world(algorithm: sf.PVI, silos: list[dict[str, Tensor]], seed: int = 1) -> World:
    server, engine, _ = build_parties(REGRESSION, silos, algorithm, sf.Plain(), seed=seed, compile=False)
    return World(server, engine)


LOSSES: list[dict[str, Any]] = [
    {},
    {"lost_before": ("silo-1",)},
    {"lost_after": ("silo-2",)},
    {"lost_before": ("silo-3",), "lost_after": ("silo-4",)},
    {"lost_after": ("silo-1",), "lost_before": ("silo-5",)},
]


@pytest.mark.slow
def test_q_is_the_prior_times_the_sites_and_reaches_the_exact_posterior() -> None:
    """With lost messages. What a silo asks for does not depend on q here, so that its turn takes all that its site
    lacks."""
    silos, exact = make_regression(SIZES)
    world = _world(sf.PVI(rounds=200, damping=1.0, **EXACT, **SOME), silos)
    for losses in [{}, *LOSSES * 2]:
        try:
            world.round(**losses)
        except sf.SecureFVIError:
            assert losses  # a cohort of which nobody answered
        assert _off(world.product(), world.state.q) < 1e-10
    for _ in range(80):
        world.round()
    assert _off(world.product(), world.state.q) < 1e-10
    assert _off(world.state.q, exact) < 1e-4


def test_masked_sums_and_silo_privacy_take_some_silos_a_round() -> None:
    """Masked: the same as plain within the ring's resolution. Under privacy a change is what was released."""
    silos, _ = make_regression(SIZES)
    ends = []
    for sums in (sf.Plain(), sf.Masked()):
        server, engine, _ = build_parties(REGRESSION, silos, sf.PVI(rounds=9, **EXACT, **SOME), sums, seed=1)
        world = World(server, engine)
        for _ in range(9):
            world.round()
        ends.append(world.state.q)
    assert _off(ends[1], ends[0]) < 1e-5
    privacy = sf.SiloDP(noise_multiplier=0.1, clipping_norm=5.0, noise="silo")
    server, engine, _ = build_parties(
        REGRESSION, silos, sf.PVI(rounds=9, **EXACT, **SOME), sf.Plain(), seed=1, privacy=privacy, noise_key=b"k" * 32
    )
    world = World(server, engine)
    for _ in range(9):
        world.round()
        assert _off(world.product(), world.state.q) < 1e-8
