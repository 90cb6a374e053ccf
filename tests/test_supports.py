"""Supports of our own: their transforms, and what they make of a density that is flat near 0."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import biject_to, constraints

from secure_fvi.opening import _support
from secure_fvi.supports import ReachesFar, ReachesZero


@pytest.mark.parametrize("kind", [ReachesZero, ReachesFar])
def test_an_sd_comes_back_and_its_jacobian_is_the_slope(kind: type[ReachesZero]) -> None:
    transform = biject_to(kind(0.25))
    x = torch.logspace(-12, 8, 41, dtype=torch.float64)
    z = transform.inv(x)
    torch.testing.assert_close(transform(z), x, rtol=1e-12, atol=0.0)
    slope = torch.func.vmap(torch.func.grad(transform))(z)
    torch.testing.assert_close(transform.log_abs_det_jacobian(z, x), slope.log())
    assert (z[1:] > z[:-1]).all()


def test_a_density_that_is_flat_near_0_falls_off_as_a_normals() -> None:
    """Its mean and sd fit it: of a density that is flat from 0 to 1, the half below 0.5. Control: by the logarithm its
    left tail is exponential, so that beyond six sds it has a hundred thousand times as much of it as a normal."""
    x = torch.linspace(1e-9, 1.0, 400_001, dtype=torch.float64)
    beyond = []
    for support in (ReachesZero(0.25), ReachesFar(0.25), constraints.positive):
        z = biject_to(support).inv(x)
        beyond.append(float((z < z.mean() - 6 * z.std()).double().mean()))
    assert max(beyond[:2]) < 1e-5
    assert beyond[2] > 5e-4


def test_the_sd_of_few_groups_has_a_shorter_tail_on_the_right() -> None:
    """Its posterior given six effects, under a flat prior: beyond four sds 14 times what a normal has. Controls: by the
    logarithm it is 57 times as much, and where 0 alone is near 178."""
    log_sd = torch.linspace(-4, 12, 400_001, dtype=torch.float64)
    weight = (-4 * log_sd - 5 * 0.3**2 / 2 * (-2 * log_sd).exp()).softmax(0)
    normal = float(torch.special.ndtr(torch.tensor(-4.0, dtype=torch.float64)))
    beyond = []
    for support in (ReachesFar(0.1), constraints.positive, ReachesZero(0.25)):
        z = biject_to(support).inv(log_sd.exp())
        mean = weight @ z
        sd = (weight @ (z - mean).square()).sqrt()
        beyond.append(float(weight[z > mean + 4 * sd].sum()) / normal)
    assert beyond[0] < 20
    assert min(beyond[1:]) > 50


def test_a_result_names_it() -> None:
    for support in (ReachesZero(0.25), ReachesFar(1e-7), constraints.independent(ReachesZero(2.5), 1)):
        assert str(_support(str(support))) == str(support)


def test_two_supports_of_one_unit_have_different_transforms() -> None:
    for one, other in [(ReachesZero, ReachesFar), (ReachesFar, ReachesZero)]:
        assert biject_to(one(0.25)) != biject_to(other(0.25))
        assert biject_to(one(0.25)) == biject_to(one(0.25)) != biject_to(one(0.5))
