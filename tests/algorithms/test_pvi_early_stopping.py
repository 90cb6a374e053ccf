"""Early stopping of PVI's local fit: from a tight start, by the expected log-likelihood."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pvi_world import REGRESSION, build, make_regression

import secure_fvi as sf


def _one_fit(**options: Any) -> tuple[torch.Tensor, int]:
    """Sds of q after one silo's first fit, and the blocks of steps that it took."""
    silos, _ = make_regression((40,))
    world = build(REGRESSION, silos, sf.PVI(rounds=1, damping=1.0, local_steps=1000, **options))
    fit: Any = world.engine.silos["silo-1"].program.fit  # type: ignore[attr-defined]
    block, taken = fit.block, []

    def counted(carry: Any, inputs: Any) -> Any:
        taken.append(None)
        return block(carry, inputs)

    counted.length, counted.observed, counted.steps = block.length, block.observed, block.steps  # type: ignore[attr-defined]
    fit.block = counted
    world.round()
    return world.state.q.stddev(), len(taken)


@pytest.mark.slow
def test_a_fit_that_has_arrived_stops() -> None:
    """The control is the same fit to the end."""
    whole, all_steps = _one_fit()
    early, some_steps = _one_fit(early_stopping=True)
    assert some_steps < 0.2 * all_steps
    torch.testing.assert_close(early, whole, rtol=0.05, atol=0.0)


def test_exact_fits_do_not_stop_early() -> None:
    with pytest.raises(sf.InputError, match="tight start"):
        sf.PVI(local_optimizer="fixed_point", early_stopping=True)
