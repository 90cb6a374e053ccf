"""Gradients of the bound: exact where they can be, unbiased where they are random."""

from __future__ import annotations

import math

import pytest
import torch
from programs import make_intercepts, make_slopes, slopes
from torch import Tensor

import secure_fvi as sf
from secure_fvi.discovery import read_layout
from secure_fvi.families import Conditional, global_family
from secure_fvi.families import conditional as gaussian_rows
from secure_fvi.federated_model import read_data
from secure_fvi.objective import Lengths, server_gradient, shortened, silo_gradient
from secure_fvi.program_density import ProgramDensity


class _Case:
    """One silo of the slopes model at random parameters."""

    def __init__(self, samples: int) -> None:
        torch.manual_seed(3)
        model = sf.FederatedModel(slopes, "person")
        data = {k: v[:3] for k, v in make_slopes().silos[0].items()}
        schema, records = read_data(data, "here", torch.float64)
        layout, _ = read_layout(model, schema, torch.float64)
        self.density, self.rows, self.samples = ProgramDensity(model, layout, schema), records.rows, samples
        self.family = global_family("full", 2)
        self.local = Conditional(varying_scale=True).build(2, 2, samples)
        self.none = Conditional().build(0, 2, 1)
        noisy = {k: v + 0.2 * torch.randn_like(v) for k, v in self.family.init(torch.zeros(2)).items()}
        self.eta = noisy
        self.phi = {k: v + 0.2 * torch.randn_like(v) for k, v in self.local.init(torch.zeros(3, 2)).items()}

    def bound(self, eta: dict[str, Tensor], phi: dict[str, Tensor], eps: Tensor, eps_local: Tensor) -> Tensor:
        """The bound itself for given noise, by its definition."""
        z = self.family.transform(eta, eps)
        moments = self.local.moments(phi, {}, {}, z, z - eta["loc"])
        z_local = gaussian_rows.transform(moments, eps_local)
        log_w = torch.stack(
            [self.density.evaluate(z, torch.zeros(0), zk, {}, self.rows).records for zk in z_local]
        ) - gaussian_rows.log_prob(moments, z_local)
        local = (torch.logsumexp(log_w, 0) - math.log(self.samples)).sum()
        return local + self.density.log_prior(z, {}) - self.family.log_prob(eta, z)

    def gradient(self, eps: Tensor, eps_local: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """What one round computes: gradients in eta_G and eta_L, and the bound's value."""
        z = self.family.transform(self.eta, eps)
        silo = silo_gradient(self.density, self.local, self.none, self.samples)(
            z, z - self.eta["loc"], {}, self.phi, self.none.init(torch.zeros(1, 0)), self.rows, torch.ones(3),
            eps_local, torch.zeros(1, 0),
        )  # fmt: skip
        server = server_gradient(self.density, self.family)(self.eta, {}, eps, silo.direct, silo.path, {})
        return server.eta, silo.local, server.value + silo.value


@pytest.mark.parametrize("samples", [1, 4])
def test_value_is_the_bound(samples: int) -> None:
    case = _Case(samples)
    eps, eps_local = torch.randn(2), torch.randn(samples, 3, 2)
    _, _, value = case.gradient(eps, eps_local)
    torch.testing.assert_close(value, case.bound(case.eta, case.phi, eps, eps_local))


@pytest.mark.parametrize("samples", [1, 4])
def test_gradients_are_unbiased(samples: int) -> None:
    """Mean over 20,000 draws against the plain reparametrised gradient of the bound on the same draws.

    Both estimate the same gradient; each of 27 coordinates must agree within 4.5 standard errors of the paired
    difference. False alarm about 2e-4; the seed is fixed.
    """
    case = _Case(samples)
    n = 20_000
    rng = torch.Generator().manual_seed(5)
    eps, eps_local = torch.randn(n, 2, generator=rng), torch.randn(n, samples, 3, 2, generator=rng)
    ours = torch.func.vmap(case.gradient)(eps, eps_local)
    plain = torch.func.vmap(torch.func.grad(case.bound, argnums=(0, 1)), in_dims=(None, None, 0, 0))(
        case.eta, case.phi, eps, eps_local
    )
    for mine, theirs in zip(ours[:2], plain, strict=True):
        for name, value in mine.items():
            difference = (value - theirs[name]).reshape(n, -1)
            error = difference.std(0) / math.sqrt(n)
            assert (difference.mean(0).abs() <= 4.5 * error + 1e-9).all(), name


def test_naive_weights_would_be_caught() -> None:
    """The control: weights v_k instead of v_k^2 on the paths give another mean, beyond 10 standard errors."""
    case = _Case(4)
    n = 20_000
    rng = torch.Generator().manual_seed(5)
    eps, eps_local = torch.randn(n, 2, generator=rng), torch.randn(n, 4, 3, 2, generator=rng)

    def naive(phi: dict[str, Tensor], eps: Tensor, eps_local: Tensor) -> Tensor:
        """The bound with log q's own parameters held fixed: sticking the landing without the second reweighting."""
        z = case.family.transform(case.eta, eps)
        shift = z - case.eta["loc"]
        z_local = gaussian_rows.transform(case.local.moments(phi, {}, {}, z, shift), eps_local)
        fixed = case.local.moments(case.phi, {}, {}, z, shift)
        log_p = torch.stack([case.density.evaluate(z, torch.zeros(0), zk, {}, case.rows).records for zk in z_local])
        return torch.logsumexp(log_p - gaussian_rows.log_prob(fixed, z_local), 0).sum()

    biased = torch.func.vmap(torch.func.grad(naive), in_dims=(None, 0, 0))(case.phi, eps, eps_local)
    plain = torch.func.vmap(torch.func.grad(case.bound, argnums=1), in_dims=(None, None, 0, 0))(
        case.eta, case.phi, eps, eps_local
    )
    difference = (biased["log_scale"] - plain["log_scale"]).reshape(n, -1)
    assert (difference.mean(0).abs() / (difference.std(0) / math.sqrt(n))).max() > 10


def test_gradient_vanishes_at_the_exact_posterior() -> None:
    """Sticking the landing: with q equal to the posterior every single draw has gradient zero."""
    problem = make_intercepts()
    rows = problem.silos[2]["y"]
    schema, records = read_data({"y": rows}, "here", torch.float64)
    layout, _ = read_layout(problem.model, schema, torch.float64)
    density = ProgramDensity(problem.model, layout, schema)
    marginal = 0.49 + 0.25 / 3  # variance of a record's mean given mu
    precision = 1 / 100 + len(rows) / marginal
    mean = rows.mean(1).sum() / marginal / precision
    shrink = 0.49 / marginal  # of the record's residual
    family, local = global_family("full", 1), Conditional().build(1, 1, 1)
    none = Conditional().build(0, 1, 1)
    eta = {"loc": mean.reshape(1), "log_scale": torch.tensor([-0.5 * math.log(precision)]), "lower": torch.zeros(0)}
    phi = {
        "loc": (shrink * (rows.mean(1) - mean)).unsqueeze(-1),
        "log_scale": torch.full((len(rows), 1), 0.5 * math.log(0.49 * (1 - shrink))),
        "coupling": torch.full((len(rows), 1, 1), -shrink),
    }
    for seed in range(3):
        torch.manual_seed(seed)
        eps = torch.randn(1)
        z = family.transform(eta, eps)
        silo = silo_gradient(density, local, none, 1)(
            z, z - eta["loc"], {}, phi, none.init(torch.zeros(1, 0)), records.rows, torch.ones(len(rows)),
            torch.randn(1, len(rows), 1), torch.zeros(1, 0),
        )  # fmt: skip
        server = server_gradient(density, family)(eta, {}, eps, silo.direct, silo.path, {})
        for gradient in (*server.eta.values(), *silo.local.values()):
            assert gradient.abs().max() < 1e-10 if gradient.numel() else True


def test_what_a_record_tells_of_its_length_moves_no_more_than_the_norm() -> None:
    """One unit in one place, whatever the gradient; with the cut gradient no longer than the norm of both, where the
    gradient as it is would be. What only fills a block up tells nothing."""
    norm, share = 3.0, 0.01
    lengths = Lengths(norm * math.sqrt(1 - share), norm * math.sqrt(share))
    for size, place in ((0.0, 0), (0.3, 0), (1.0, 2), (2.9, 3), (3.1, 4), (20.0, 6), (1e9, 7)):
        gradient = torch.tensor([0.6, 0.8], dtype=torch.float64) * size
        told = lengths.of(gradient, torch.ones(()))
        assert told.nonzero().tolist() == [[place]]
        whole = torch.cat([shortened(gradient, lengths.gradient), told])
        assert whole.norm() <= norm * (1 + 1e-12)
        assert (torch.cat([gradient, told]).norm() > norm) == (place >= 4)
        assert not lengths.of(gradient, torch.zeros(())).any()


def test_gradients_whose_squares_have_no_room_in_32_bits_are_cut_and_not_lost() -> None:
    """Of length 1e25, whose square is infinite in float32."""
    gradient = torch.tensor([6e24, 8e24], dtype=torch.float32)
    assert torch.allclose(shortened(gradient, 2.0), torch.tensor([1.2, 1.6], dtype=torch.float32))
    assert Lengths(2.0, 1.0).of(gradient, torch.ones(()))[-1] == 1
    assert (gradient @ gradient).isinf()
