"""`scale_rate` and `decay` of PVI's local fits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pvi_world import REGRESSION, build, make_regression
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.local_fit import NaturalSteps
from secure_fvi.algorithms.natural import Natural


def _steps(**options: Any) -> NaturalSteps:
    """Of a model with 3 weights; what follows uses more, which the steps do not mind."""
    silos, _ = make_regression((5,))
    world = build(REGRESSION, silos, sf.PVI(rounds=1, family="diagonal", **options))
    steps: Any = world.engine.silos["silo-1"].program.fit.block.steps  # type: ignore[attr-defined]
    assert isinstance(steps, NaturalSteps)
    return steps


def test_the_scale_takes_its_share_of_a_step() -> None:
    eps, gradient, one = torch.tensor([0.3, -0.5]), torch.tensor([0.4, 0.9]), torch.tensor(1.0)
    start = {"loc": torch.zeros(2), "factor": torch.ones(2)}
    whole = _steps(learning_rate=0.1).step(start, eps, gradient, one)
    slow = _steps(learning_rate=0.1, scale_rate=0.2).step(start, eps, gradient, one)
    torch.testing.assert_close(slow["loc"], whole["loc"])
    torch.testing.assert_close(slow["factor"].log(), 0.2 * whole["factor"].log())
    assert float(whole["factor"].log().abs().min()) > 0.001


def _precision(scale_rate: float) -> float:
    """Mean precision over 500 weights that the data give a precision of 1, each gradient with noise of sd 5: about
    what the draws of other weights do."""
    steps, rng = _steps(learning_rate=0.1, scale_rate=scale_rate), torch.Generator().manual_seed(0)
    state = steps.init(Natural(torch.zeros(500), torch.ones(500)), tight=False)
    seen: list[Tensor] = []
    for _ in range(250):
        eps, noise = torch.randn(2, 500, generator=rng, dtype=state["loc"].dtype)
        gradient = 5 * noise - steps.draw(state, eps)
        state = steps.step(state, eps, gradient, torch.tensor(1.0))
        seen.append(state["factor"].pow(-2).mean())
    return float(torch.stack(seen[150:]).mean())


def test_scales_that_follow_the_noise_are_too_small_and_slow_ones_less_so() -> None:
    assert _precision(1.0) > 1.6
    assert _precision(0.05) == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
def test_the_rate_falls_from_fit_to_fit() -> None:
    """A second fit without a rate ends where it began, at q, so that q stays. The control moves."""
    moved = []
    for decay in (1.0, 1e-6):
        silos, _ = make_regression((40, 40))
        world = build(REGRESSION, silos, sf.PVI(rounds=2, damping=0.5, local_steps=1, decay=decay))
        world.round()
        before = world.state.q
        world.round()
        moved.append(float(((world.state.q.mean() - before.mean()) / before.stddev()).abs().max()))
    assert moved[0] > 0.05
    assert moved[1] < 1e-4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scale_rate": 0.0}, "scale_rate must lie in"),
        ({"decay": math.nan}, "decay must lie in"),
        ({"scale_rate": 0.5, "local_optimizer": "adam"}, "scale_rate is for"),
        ({"decay": 0.9, "local_optimizer": "closed_form"}, "no noise"),
    ],
)
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(sf.InputError, match=said):
        sf.PVI(**options)
