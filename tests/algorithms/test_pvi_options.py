"""Power EP's alpha on Gaussian likelihoods, and when theta takes its steps."""

from __future__ import annotations

import pytest
import torch
from pvi_world import REGRESSION, build, make_regression

import secure_fvi as sf
from secure_fvi.algorithms.natural import Natural


def _fitted(alpha: float, family: str, sizes: tuple[int, ...] = (30,), rounds: int = 1) -> tuple[Natural, Natural]:
    silos, exact = make_regression(sizes)
    algorithm = sf.PVI(rounds=rounds, damping=1.0, local_optimizer="closed_form", family=family, alpha=alpha)  # type: ignore[arg-type]
    world = build(REGRESSION, silos, algorithm)
    for _ in range(rounds):
        world.round()
    return world.state.q, exact


def test_alpha_one_matches_the_marginals_and_alpha_to_zero_is_the_variational_fit() -> None:
    """Expectation propagation on one silo has the exact marginal sds, mean-field VI smaller ones (Property 4.1)."""
    (propagated, exact), (variational, _), (limit, _) = (_fitted(a, "diagonal") for a in (1.0, 0.0, 1e-6))
    torch.testing.assert_close(propagated.stddev(), exact.stddev(), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(limit.stddev(), variational.stddev(), rtol=1e-4, atol=0.0)
    assert bool((variational.stddev() < 0.99 * exact.stddev()).any())


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_alpha_changes_nothing_where_the_family_is_exact(alpha: float) -> None:
    q, exact = _fitted(alpha, "full", (7, 30, 12), rounds=2)
    torch.testing.assert_close(q.precision, exact.precision, rtol=1e-9, atol=1e-9)


def test_alpha_needs_closed_forms() -> None:
    with pytest.raises(sf.InputError, match="alpha must lie in"):
        sf.PVI(alpha=0.5)
