"""Virtual clients of PVI, under record privacy with one site for all, and record privacy of a silo's whole change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pvi_world import REGRESSION, World, build, make_regression, near
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.natural import Natural
from secure_fvi.disclosure import disclose
from secure_fvi.fitting import build_parties

EXACT = {"local_optimizer": "closed_form", "family": "full"}
CLIP = 2.0


@pytest.mark.slow
def test_virtual_clients_have_sites_of_their_own_and_reach_the_exact_posterior() -> None:
    silos, exact = make_regression((17, 30, 12))
    world = build(REGRESSION, silos, sf.PVI(rounds=60, virtual_clients=3, **EXACT))  # type: ignore[arg-type]
    for k in range(60):
        world.round()
        if k < 3:
            assert near(world.product(), world.state.q, 1e-10)
    assert near(world.state.q, exact, 1e-8)
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
        assert near(world.product(), world.state.q, 1e-8)


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


def _in_parts(rounds: int, noise: float, sums: Any, placement: Any, **options: Any) -> tuple[World, Natural]:
    silos, exact = make_regression((60, 100, 40))
    algorithm = sf.PVI(rounds=rounds, virtual_clients=8, **EXACT, **options)  # type: ignore[arg-type]
    privacy = sf.RecordDP(noise_multiplier=noise, clipping_norm=1e5, noise=placement, retries=0)
    server, engine, _ = build_parties(REGRESSION, silos, algorithm, sums, privacy=privacy, noise_key=b"k" * 32)
    return World(server, engine), exact


def test_parts_under_record_privacy_have_one_site_and_reach_the_exact_posterior() -> None:
    """With hardly any noise, in shares, over many rounds: q is the prior times all parts' sites, which are alike and
    what the server sent. By "auto" nothing but e^-4 of the first q is left of the distance."""
    world, exact = _in_parts(30, 1e-7, sf.Masked(), "distributed")
    start = world.state.q
    for k in range(30):
        world.round()
        if k < 3:
            assert near(world.product(), world.state.q, 1e-10)
    left = world.state.q.minus(exact).precision.norm() / start.minus(exact).precision.norm()
    assert float(left) == pytest.approx((1 - 4 / 30) ** 30, rel=1e-3)
    silo: Any = world.engine.silos["silo-1"]
    assert len(silo.local.parts) == 8
    assert all(part.site is silo.local.parts[0].site for part in silo.local.parts)


def test_q_of_parts_stays_proper_under_noise_that_would_take_its_precision() -> None:
    """The control is the whole step."""
    world, _ = _in_parts(5, 1e-2, sf.Plain(), "silo", damping=0.5)
    improper = False
    for _ in range(5):
        before = world.state.q
        world.round()
        assert world.state.q.proper
        improper |= not before.plus(world.state.residual, 0.5).proper
    assert improper


@pytest.mark.parametrize("privacy", [sf.RecordDP, sf.SiloDP])
def test_no_part_of_record_privacy_follows_what_silos_release(privacy: Any) -> None:
    """So that noise may come in shares over several rounds. The control: with the silo as the unit parts' sites follow
    their silo's release."""
    algorithm = sf.PVI(rounds=3, virtual_clients=4, **EXACT)  # type: ignore[arg-type]
    dp = privacy(noise_multiplier=1.0, retries=0)
    if privacy is sf.RecordDP:
        assert disclose(algorithm, sf.Masked(), dp, 3).privacy is dp
    else:
        with pytest.raises(sf.InputError, match="a silo's state follows what it released"):
            disclose(algorithm, sf.Masked(), dp, 3)
