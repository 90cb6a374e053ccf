"""Asynchronous PVI with late changes: who answers when, what a late change counts, and that q stays exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pvi_world import REGRESSION, World, build, logistic, make_regression
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.natural import Natural
from secure_fvi.algorithms.pvi import after_turn, delays, first_turns, next_cohort
from secure_fvi.errors import InputError
from secure_fvi.fitting import build_parties

LATE: dict[str, Any] = {"schedule": "asynchronous", "buffer": 3, "delay": 3, "reveal_changes": True}
EXACT: dict[str, Any] = {"local_optimizer": "closed_form", "family": "full"}
SIZES = (7, 30, 12, 20, 9)


def _off(got: Natural, want: Natural) -> float:
    """Largest difference of precisions, relative, or of means."""
    precision = float((got.precision - want.precision).abs().max() / want.precision.abs().max())
    return max(precision, float((got.mean() - want.mean()).abs().max()))


def test_nobody_answers_before_its_fit_is_done_and_fast_silos_answer_more_often() -> None:
    delay = torch.tensor([0.0, 1.0, 4.0, 9.0, 2.0, 0.0])
    turns, times = first_turns(6), [[] for _ in delay]  # type: ignore[var-annotated]
    for round_ in range(200):
        cohort = next_cohort(turns, 2, 0, round_)
        assert len(cohort) == 2
        assert cohort == next_cohort(turns, 2, 0, round_)
        before, turns = turns, after_turn(turns, cohort, delay, round_)
        assert turns.clock >= before.clock + 1
        assert (before.free[cohort] <= turns.clock).all()
        for j in cohort:
            times[j].append(turns.clock)
    for j, at in enumerate(times):
        assert (np.diff(at) >= max(1.0, float(delay[j]))).all()
    counts = [len(at) for at in times]
    assert min(counts[0], counts[5]) > 1.5 * counts[3] > 0


def test_the_server_waits_for_a_full_buffer() -> None:
    delay = torch.tensor([0.0, 5.0, 5.0])
    turns = after_turn(first_turns(3), [0, 1, 2], delay, 0)
    turns = after_turn(turns, next_cohort(turns, 2, 0, 1), delay, 1)
    assert turns.clock == 6.0  # one silo is free at 2, the next at 6


def test_delays_follow_from_the_seed() -> None:
    assert torch.equal(delays(50, 4, 1), delays(50, 4, 1))
    assert not torch.equal(delays(50, 4, 1), delays(50, 4, 2))
    assert set(delays(50, 4, 1).tolist()) == {0.0, 1.0, 2.0, 3.0, 4.0}


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
    """Late changes and lost messages. What a silo asks for does not depend on q here, so that a turn of age 3 takes a
    quarter of what its site lacks; it comes every other round, and 80 rounds leave .75^40 of it."""
    silos, exact = make_regression(SIZES)
    world = _world(sf.PVI(rounds=200, damping=1.0, **EXACT, **LATE), silos)
    assert len(set(world.server.program.delays.tolist())) > 1  # type: ignore[attr-defined]
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


@pytest.mark.slow
def test_a_late_change_is_fitted_against_the_older_q_and_counts_by_its_age() -> None:
    """The control: against the q of the same round, or at full weight, the change would be another one.

    With a diagonal family what a silo asks for depends on q even where likelihoods are Gaussian.
    """
    silos, _ = make_regression(SIZES)
    world = _world(sf.PVI(rounds=50, **{**EXACT, "family": "diagonal"}, **LATE), silos)
    program: Any = world.engine.silos["silo-1"].program
    delay = dict(zip(world.server.problem.silos, program.delays.tolist(), strict=True))
    wanted: dict[str, tuple[int, Natural, Natural]] = {}  # round of the q, the site it asks for, q
    seen = 0
    for round_ in range(25):
        index = world.server.state.last_index + 1
        message = world.server.program.broadcast(world.server.state.algorithm, index, world.server.state.accepted)
        q, sites = world.state.q, {}
        for name in message.cohort:
            silo = world.engine.silos[name]
            silo.settle(world.server.state.accepted)
            sites[name] = program.site(silo.local, message, name)
        world.round()
        for name, site in sites.items():
            silo = world.engine.silos[name]
            cavity = q.minus(site)
            fresh = program.fit(index, {}, q, cavity, silo.local.parts[0].own, silo.view).q.minus(cavity)
            sent = silo.pending.local.change  # type: ignore[union-attr]
            if delay[name] > 0 and name in wanted:
                then, target, old_q = wanted[name]
                late = target.minus(site)
                torch.testing.assert_close(sent.shift, late.shift / (1 + round_ - then), rtol=1e-9, atol=1e-9)
                torch.testing.assert_close(sent.precision, late.precision / (1 + round_ - then), rtol=1e-9, atol=1e-9)
                if not torch.allclose(old_q.precision, q.precision) and round_ < 8:
                    assert not torch.allclose(sent.shift, fresh.minus(site).shift, rtol=1e-3)
                    seen += 1
            else:
                torch.testing.assert_close(sent.shift, fresh.minus(site).shift, rtol=1e-9, atol=1e-9)
            wanted[name] = (round_, fresh, q)
    assert seen > 3


@pytest.mark.slow
def test_late_changes_of_heterogeneous_silos_end_where_prompt_ones_do() -> None:
    """6 silos of one label each: q stays proper, and ends within .25 posterior sd of a synchronous run. Local fits are
    of 40 steps, whose noise is a tenth of a sd."""
    rng = torch.Generator().manual_seed(3)
    silos = []
    for j in range(6):
        x = torch.randn(12, 2, generator=rng) + 0.5 * torch.randn(2, generator=rng)
        silos.append({"x": x, "y": torch.full((12,), float(j % 2))})
    model = sf.FederatedModel(logistic, "row")
    prompt = build(model, silos, sf.PVI(rounds=40, local_steps=40))
    for _ in range(10):
        prompt.round()
    late = build(model, silos, sf.PVI(rounds=400, local_steps=40, **LATE))
    for _ in range(30):
        late.round()
        assert late.state.q.proper
    assert ((late.state.q.mean() - prompt.state.q.mean()).abs() < 0.25 * prompt.state.q.stddev()).all()
    assert _off(late.product(), late.state.q) < 1e-8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
def test_a_resumed_run_keeps_its_late_answers(tmp_path: Path) -> None:
    silos, _ = make_regression(SIZES)
    algorithm = sf.PVI(rounds=9, local_steps=20, family="diagonal", **LATE)
    whole = sf.fit(REGRESSION, silos, algorithm, sf.Plain(), seed=1, compile=False)

    class _Stop(Exception):
        pass

    def stop(progress: sf.Progress) -> None:
        if progress.round == 5:
            raise _Stop

    options: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_seconds": 0.0, "compile": False, "seed": 1}
    with pytest.raises(_Stop):
        sf.fit(REGRESSION, silos, algorithm, sf.Plain(), on_round=stop, **options)
    resumed = sf.fit(REGRESSION, silos, algorithm, sf.Plain(), resume=True, **options)
    assert torch.equal(resumed.posterior["beta"].mean, whole.posterior["beta"].mean)
    assert torch.equal(resumed.posterior["beta"].sd, whole.posterior["beta"].sd)


def test_masked_sums_and_silo_privacy_take_late_changes() -> None:
    """Masked: the same as plain within the ring's resolution. Under privacy a change is what was released."""
    silos, _ = make_regression(SIZES)
    ends = []
    for sums in (sf.Plain(), sf.Masked()):
        server, engine, _ = build_parties(REGRESSION, silos, sf.PVI(rounds=9, **EXACT, **LATE), sums, seed=1)
        world = World(server, engine)
        for _ in range(9):
            world.round()
        ends.append(world.state.q)
    assert _off(ends[1], ends[0]) < 1e-5
    privacy = sf.SiloDP(noise_multiplier=0.1, clipping_norm=5.0, noise="silo")
    server, engine, _ = build_parties(
        REGRESSION, silos, sf.PVI(rounds=9, **EXACT, **LATE), sf.Plain(), seed=1, privacy=privacy, noise_key=b"k" * 32
    )
    world = World(server, engine)
    for _ in range(9):
        world.round()
        assert _off(world.product(), world.state.q) < 1e-8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": 2}, "delay is for schedule = 'asynchronous'"),
        ({**LATE, "delay": -1}, "whole number of rounds"),
        ({**LATE, "delay": 0.5}, "whole number of rounds"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sf.PVI(**options)
