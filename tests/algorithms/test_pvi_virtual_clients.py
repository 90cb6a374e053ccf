"""Virtual clients of PVI, which record privacy refuses, and record privacy by clipping and noising a silo's change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pvi_world import REGRESSION, World, build, make_regression
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.natural import Natural
from secure_fvi.fitting import build_parties

EXACT = {"local_optimizer": "closed_form", "family": "full"}
CLIP = 2.0


def _near(a: Natural, b: Natural, tolerance: float) -> bool:
    scale = float(b.precision.abs().max())
    return all(float((x - y).abs().max()) < tolerance * scale for x, y in zip(a, b, strict=True))


@pytest.mark.slow
def test_virtual_clients_have_sites_of_their_own_and_reach_the_exact_posterior() -> None:
    silos, exact = make_regression((17, 30, 12))
    world = build(REGRESSION, silos, sf.PVI(rounds=60, virtual_clients=3, **EXACT))  # type: ignore[arg-type]
    for k in range(60):
        world.round()
        if k < 3:
            assert _near(world.product(), world.state.q, 1e-10)
    assert _near(world.state.q, exact, 1e-8)
    silo: Any = world.engine.silos["silo-1"]
    sites = [part.site.precision for part in silo.local.parts]
    assert len(sites) == 3
    assert not torch.allclose(sites[0], sites[1])


def _private(silos: list[dict[str, Tensor]], ids: list[Tensor], noise: float, clip: float) -> World:
    algorithm = sf.PVI(rounds=6, damping=0.1, **EXACT)  # type: ignore[arg-type]
    privacy = sf.RecordDP(noise_multiplier=noise, clipping_norm=clip, noise="silo")
    server, engine, _ = build_parties(
        REGRESSION, silos, algorithm, sf.Plain(), record_ids=ids, privacy=privacy, noise_key=b"k" * 32
    )
    return World(server, engine)


def test_under_record_privacy_sites_count_what_was_released() -> None:
    silos, _ = make_regression((20, 20, 20))
    world = _private(silos, list(torch.arange(60).split(20)), noise=0.2, clip=CLIP)
    for _ in range(6):
        world.round()
        assert world.state.q.proper
        assert _near(world.product(), world.state.q, 1e-8)


@pytest.mark.parametrize("clip", [CLIP, 1e9])
def test_a_record_moves_a_release_by_no_more_than_the_clipping_norm(clip: float) -> None:
    """Neighbours differ in an outlier at silo 1, which joins as its last record, under the same noise. The control is a
    clipping norm that clips nothing."""
    silos, _ = make_regression((20, 20, 20))
    outlier = {"x": torch.full((1, 3), 30.0), "y": torch.full((1,), -500.0)}
    joined = [{n: torch.cat([v, outlier[n]]) for n, v in silos[0].items()}, *silos[1:]]
    ids = torch.arange(60).split([20, 20, 20])
    ends = []
    for data, first in ((silos, ids[0]), (joined, torch.cat([ids[0], torch.tensor([99])]))):
        world = _private(data, [first, *ids[1:]], noise=1e-6, clip=clip)
        world.round()
        silo: Any = world.engine.silos["silo-1"]
        ends.append(silo.pending.local.change.pack())
    moved = float((ends[0] - ends[1]).norm())
    if clip == CLIP:
        assert 0.1 * CLIP < moved <= CLIP + 1e-5  # noise of 2e-6, the same in both
    else:
        assert moved > 100 * CLIP


def test_what_virtual_clients_cannot_do_is_refused() -> None:
    with pytest.raises(sf.InputError, match="virtual_clients must be a whole number"):
        sf.PVI(virtual_clients=0)
    privacy, algorithm = sf.RecordDP(noise_multiplier=1.0, noise="silo", objective_share=0.1), sf.PVI(rounds=2, **EXACT)  # type: ignore[arg-type]
    with pytest.raises(sf.InputError, match="releases no objective"):
        sf.fit(REGRESSION, make_regression((5, 5, 5))[0], algorithm, sf.Plain(), privacy=privacy)


@pytest.mark.parametrize("clients", [2, 7])
def test_virtual_clients_are_refused_under_record_privacy(clients: int) -> None:
    """One record would move all parts' states (`test_conditional_sensitivity`). The controls: the silo as the unit, and
    one part."""
    silos, algorithm = make_regression((5, 5, 5))[0], sf.PVI(rounds=1, virtual_clients=clients, **EXACT)  # type: ignore[arg-type]
    one = sf.PVI(rounds=1, **EXACT)  # type: ignore[arg-type]
    record, silo = (kind(noise_multiplier=1.0, noise="silo") for kind in (sf.RecordDP, sf.SiloDP))
    with pytest.raises(sf.InputError, match="virtual_clients under record privacy"):
        build_parties(REGRESSION, silos, algorithm, sf.Plain(), privacy=record)
    build_parties(REGRESSION, silos, algorithm, sf.Plain(), privacy=silo)
    build_parties(REGRESSION, silos, one, sf.Plain(), privacy=record)
