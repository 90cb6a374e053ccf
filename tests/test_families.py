"""Families: densities against PyTorch's distributions, draws against their own moments."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import MultivariateNormal, Normal

from secure_fvi.errors import InputError
from secure_fvi.families import Conditional, global_family
from secure_fvi.families import conditional as gaussian_rows


@pytest.mark.parametrize("name", ["diagonal", "full", "low_rank"])
def test_global_density_is_the_gaussian_of_its_covariance(name: str) -> None:
    torch.manual_seed(0)
    family = global_family(name, 6, rank=2)
    eta = {k: v + 0.4 * torch.randn_like(v) for k, v in family.init(torch.randn(6)).items()}
    z = torch.randn(6)
    expected = MultivariateNormal(eta["loc"], family.covariance(eta)).log_prob(z)
    torch.testing.assert_close(family.log_prob(eta, z), expected)
    torch.testing.assert_close(family.stddev(eta), family.covariance(eta).diagonal().sqrt())


@pytest.mark.parametrize("name", ["diagonal", "full", "low_rank"])
def test_global_draws_have_the_stated_covariance(name: str) -> None:
    """The Jacobian J of the draw in its noise satisfies J J' = covariance, exactly."""
    torch.manual_seed(0)
    family = global_family(name, 5, rank=2)
    eta = {k: v + 0.3 * torch.randn_like(v) for k, v in family.init(torch.zeros(5)).items()}
    jacobian = torch.func.jacfwd(lambda eps: family.transform(eta, eps))(torch.randn(family.noise_size))
    torch.testing.assert_close(jacobian @ jacobian.T, family.covariance(eta))


def test_auto_family_is_full_for_few_dimensions_and_diagonal_for_many() -> None:
    assert global_family("auto", 256).name == "full"
    assert global_family("auto", 257).name == "diagonal"


def test_unknown_family_names_the_choices() -> None:
    with pytest.raises(InputError, match="choose auto, diagonal, full or low_rank"):
        global_family("normal", 3)


@pytest.mark.parametrize("scale", ["diagonal", "block", "dense"])
@pytest.mark.parametrize("varying", [False, True])
def test_local_density_matches_its_draws(scale: str, varying: bool) -> None:
    """log q(f(eps)) = log N(eps) - log |det df/d eps|, over all rows together."""
    torch.manual_seed(0)
    family = Conditional(scale=scale, varying_scale=varying).build(2, 3, 1)  # type: ignore[arg-type]
    params = {k: v + 0.3 * torch.randn_like(v) for k, v in family.init(torch.randn(4, 2)).items()}
    shift, eps = torch.randn(3), torch.randn(4, 2)
    moments = family.moments(params, {}, {}, torch.zeros(3), shift)
    jacobian = torch.func.jacfwd(lambda e: gaussian_rows.transform(moments, e.reshape(4, 2)).flatten())(eps.flatten())
    log_det = torch.linalg.slogdet(jacobian).logabsdet
    expected = Normal(0.0, 1.0).log_prob(eps).sum() - log_det
    z = gaussian_rows.transform(moments, eps)
    torch.testing.assert_close(gaussian_rows.log_prob(moments, z).sum(), expected)


def test_conditional_mean_moves_with_the_global_draw() -> None:
    family = Conditional().build(1, 2, 1)
    params = family.init(torch.zeros(3, 1))
    params["coupling"] = torch.ones(3, 1, 2)
    moments = family.moments(params, {}, {}, torch.zeros(2), torch.tensor([0.5, 0.25]))
    assert moments["loc"].flatten().tolist() == [0.75] * 3


def test_varying_scale_is_the_default_with_importance_samples() -> None:
    assert "scale_coupling" in Conditional().build(1, 2, 20).init(torch.zeros(3, 1))
    assert "scale_coupling" not in Conditional().build(1, 2, 1).init(torch.zeros(3, 1))


def test_many_latents_are_uncorrelated_by_default() -> None:
    assert "lower" in Conditional().build(256, 2, 1).init(torch.zeros(1, 256))
    assert "lower" not in Conditional().build(257, 2, 1).init(torch.zeros(1, 257))  # a silo's network, say
