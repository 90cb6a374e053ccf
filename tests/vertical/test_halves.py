"""The halves of a round together are the gradient of the whole bound, written down here once more from the paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from secure_fvi.algorithms.vertical import (
    Amortised,
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    MeanField,
    Poisson,
    Predictor,
    Vertical,
    VerticalServer,
    VerticalSilo,
    linear,
    shared_batch,
)
from secure_fvi.algorithms.vertical.predictors import log_normal
from secure_fvi.algorithms.vertical.steps import Incoming, Noise, Response, SiloParams
from secure_fvi.compiled import Traced
from secure_fvi.errors import InputError
from secure_fvi.optimizers import Optimizer
from secure_fvi.trees import part

N, J = 9, 3
RHO = 0.7
KINDS: list[Likelihood] = [Bernoulli(), Gaussian(), Poisson(), Categorical(3)]
WEIGHTS = torch.linspace(0.5, 1.5, N)
OFFSET = torch.linspace(-0.4, 0.4, N)


class Case:
    """Three silos of two columns each, at random parameters."""

    def __init__(self, config: Vertical, likelihood: Likelihood) -> None:
        rng = torch.Generator().manual_seed(3)
        self.config, self.likelihood = config, likelihood
        columns = likelihood.columns
        self.rows = [{"x": torch.randn(N, 2, generator=rng)} for _ in range(J)]
        top = {Bernoulli: 2, Poisson: 6, Categorical: 3}.get(type(likelihood))
        y = torch.randn(N, generator=rng) if top is None else torch.randint(top, (N,), generator=rng).double()
        self.response = Response(y, OFFSET)
        self.known: Any = self.response if config.response == "shared" else ()
        predictors = [Predictor(linear(columns), rows, columns) for rows in self.rows]
        self.silos = [VerticalSilo(config, likelihood, p, J, Optimizer("adam", 0.01)) for p in predictors]
        self.params = []
        for silo in self.silos:
            start = silo.init(N, rng)[0]
            self.params.append(
                SiloParams(*({k: v + 0.3 * torch.randn(v.shape, generator=rng) for k, v in p.items()} for p in start))
            )
        self.noise = [
            Noise(torch.randn(s.family.noise_size, generator=rng), torch.randn(N, columns, generator=rng))
            for s in self.silos
        ]
        self.server = VerticalServer(likelihood, Optimizer("adam", 0.01), torch.float64)
        self.gamma = 0.3 * torch.randn(likelihood.gamma_size, generator=rng)
        self.shares = torch.tensor([0.5, 0.3, 0.2]) if config.is_power else torch.ones(J)

    def by_halves(self, keep_own: bool = False) -> tuple[list[SiloParams], Tensor, Tensor]:
        """Gradients of the silos' parameters and of gamma, and the bound, through s and D alone."""
        draws = [
            s.draw(p, r, self.known, WEIGHTS, e)
            for s, p, r, e in zip(self.silos, self.params, self.rows, self.noise, strict=True)
        ]
        s = torch.stack([d.z for d in draws]).sum(0)
        zero = torch.zeros(())
        if self.config.is_power:
            second = [
                silo.slope(d, self.response, WEIGHTS, s, self.gamma, w)
                for silo, d, w in zip(self.silos, draws, self.shares, strict=True)
            ]
            everything, in_gamma, value = (torch.stack([c[i] for c in second]).sum(0) for i in range(3))
            incoming = [
                Incoming(everything - (0 if keep_own else c[0]), zero, s - d.z, self.gamma, w)
                for c, d, w in zip(second, draws, self.shares, strict=True)
            ]
        else:
            answer = self.server.respond(self.response, s, self.gamma, WEIGHTS)
            in_gamma, value = answer.gamma, answer.value
            incoming = [Incoming(answer.pull, zero, torch.zeros_like(s), self.gamma, torch.ones(()))] * J
        gradients = [
            silo.gradient(p, r, self.known, WEIGHTS, e, d.z, i)
            for silo, p, r, e, d, i in zip(self.silos, self.params, self.rows, self.noise, draws, incoming, strict=True)
        ]
        return gradients, in_gamma, value + sum(d.local for d in draws)

    def bound(self, free: list[SiloParams], gamma: Tensor) -> Tensor:
        """One draw of the ELBO of section 4.3 or 4.4; densities of q at the held parameters."""
        etas, zs, total = [], [], torch.zeros(())
        for silo, f, held, rows, noise in zip(self.silos, free, self.params, self.rows, self.noise, strict=True):
            theta = silo.family.transform(part(f.shared, "theta"), noise.theta)
            eta, log_prior = silo.predictor.evaluate(theta, {}, rows)
            features = self.likelihood.features(self.response.y) if self.known else eta[:, :0]
            loc, log_scale = silo.auxiliary.moments(part(f.shared, "z"), f.record, eta, features)
            z = loc + log_scale.exp() * noise.z
            q_loc, q_log_scale = silo.auxiliary.moments(part(held.shared, "z"), held.record, eta, features)
            prior = torch.distributions.Normal(eta, RHO).log_prob(z).sum(-1)
            total = total + (WEIGHTS * (prior - log_normal(z, q_loc, q_log_scale))).sum()
            total = total + log_prior - silo.family.log_prob(part(held.shared, "theta"), theta)
            etas.append(eta)
            zs.append(z)
        offset = OFFSET[:, None]
        if not self.config.is_power:
            terms = self.likelihood.log_prob(self.response.y, sum(zs) + offset, gamma)
            return total + (WEIGHTS * terms).sum()
        for j in range(J):
            others = sum((zs[k] for k in range(J) if k != j), offset)
            terms = self.likelihood.log_prob(self.response.y, etas[j] + others, gamma)
            total = total + self.shares[j] * (WEIGHTS * terms).sum()
        return total


def _close(a: SiloParams, b: SiloParams) -> None:
    for mine, theirs in zip(a, b, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            # Float64 sums of a few hundred terms, differently ordered.
            torch.testing.assert_close(mine[name], theirs[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("likelihood", KINDS, ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("auxiliary", [Amortised((4,)), MeanField()], ids=["amortised", "mean-field"])
@pytest.mark.parametrize("setting", [("augmented", "private"), ("augmented", "shared"), ("power", "shared")])
def test_halves_are_the_gradient_of_the_whole(
    likelihood: Likelihood, auxiliary: Amortised | MeanField, setting: tuple[Any, Any]
) -> None:
    case = Case(Vertical(model=setting[0], response=setting[1], rho=RHO, auxiliary=auxiliary), likelihood)
    gradients, in_gamma, value = case.by_halves()
    expected, expected_gamma = torch.func.grad(case.bound, argnums=(0, 1))(case.params, case.gamma)
    torch.testing.assert_close(value, case.bound(case.params, case.gamma))
    torch.testing.assert_close(in_gamma, expected_gamma, rtol=1e-9, atol=1e-10)
    for mine, theirs in zip(gradients, expected, strict=True):
        _close(mine, theirs)


def test_a_wrong_pull_is_noticed() -> None:
    """The control of the test above: D instead of D - d_j."""
    case = Case(Vertical(model="power", rho=RHO), Bernoulli())
    expected = torch.func.grad(case.bound)(case.params, case.gamma)
    _close(case.by_halves()[0][0], expected[0])
    with pytest.raises(AssertionError):
        _close(case.by_halves(keep_own=True)[0][0], expected[0])


def test_the_quadratic_bounds_the_likelihood_from_below() -> None:
    """Several local steps answer pull (z' - z) - h/2 (z' - z)^2; J silos that move a 1/J-th share each never lose."""
    rng = torch.Generator().manual_seed(0)
    for likelihood in (Bernoulli(), Categorical(3)):
        case = Case(Vertical(rho=RHO), likelihood)
        s = torch.randn(N, likelihood.columns, generator=rng)
        answer = case.server.respond(case.response, s, case.gamma, torch.ones(N))
        for _ in range(50):
            move = 3 * torch.randn(s.shape, generator=rng)
            gain = (answer.pull * move - 0.5 * answer.curvature * move.square()).sum(-1)
            offset = OFFSET[:, None]
            now = likelihood.log_prob(case.response.y, s + offset, case.gamma)
            then = likelihood.log_prob(case.response.y, s + move + offset, case.gamma)
            assert bool((then - now >= gain - 1e-12).all())


@pytest.mark.later
@pytest.mark.parametrize("steps", [1, 4])
def test_an_update_can_be_traced(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secure_fvi.compiled.TRACE_AFTER_CALLS", 0)
    case = Case(Vertical(model="power", rho=RHO, local_steps=steps), Bernoulli())
    silo, params, rows = case.silos[0], case.params[0], case.rows[0]
    moments = silo.init(N, torch.Generator())[1]
    incoming = Incoming(
        torch.full((N, 1), 0.1), torch.tensor(0.25), torch.ones(N, 1), case.gamma, torch.tensor(1.0 / J)
    )
    traced = Traced(silo.update, (None,) * 8, "traced", by_shape=True)
    args = (params, moments, rows, case.response, WEIGHTS, case.noise[0], incoming, torch.tensor(1.0))
    plain = silo.update(*args)
    for _ in range(2):  # the call that traces, and the trace
        found = traced(*args)
        _close(SiloParams(*found[0]), plain[0])
    assert traced.mode == "traced"


def test_damped_steps_go_a_share_of_the_way() -> None:
    whole = Case(Vertical(rho=RHO, local_steps=3, damping=1.0), Bernoulli())
    damped = Case(Vertical(rho=RHO, local_steps=3), Bernoulli())
    results = []
    for case in (whole, damped):
        incoming = Incoming(torch.ones(N, 1), torch.tensor(0.25), torch.zeros(N, 1), case.gamma, torch.tensor(1.0))
        moments = case.silos[0].init(N, torch.Generator())[1]
        new = case.silos[0].update(
            case.params[0], moments, case.rows[0], case.known, WEIGHTS, case.noise[0], incoming, torch.tensor(1.0)
        )[0]
        results.append({k: v - case.params[0].shared[k] for k, v in new.shared.items()})
    for name, change in results[0].items():
        torch.testing.assert_close(results[1][name], change / J)


def test_the_network_sees_the_response_only_where_silos_know_it() -> None:
    private = Case(Vertical(rho=RHO, response="private"), Bernoulli())
    shared = Case(Vertical(rho=RHO), Bernoulli())
    assert private.params[0].shared["z/weight0"].shape == (1, 16)
    assert shared.params[0].shared["z/weight0"].shape == (2, 16)


def test_amortised_parameters_do_not_grow_with_records() -> None:
    silo = Case(Vertical(rho=RHO), Bernoulli()).silos[0]
    few, many = (silo.init(n, torch.Generator())[0] for n in (10, 10_000))
    assert few.record == many.record == {}
    assert [v.shape for v in few.shared.values()] == [v.shape for v in many.shared.values()]


def test_the_power_likelihood_needs_the_response_at_the_silos() -> None:
    with pytest.raises(InputError, match="power-likelihood model needs the response at every silo"):
        Vertical(model="power", response="private")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rho": 0.0}, "rho"),
        ({"model": "pooled"}, "augmented or power"),
        ({"local_steps": 0}, "local_steps"),
        ({"damping": 1.5}, "damping"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        Vertical(**options)


def test_contributions_do_not_grow_with_the_silos() -> None:
    """Upload a round: batch x columns numbers a phase, whatever J is."""
    blocks = Vertical(model="power").blocks(512, 1, 1)
    assert {name: sum(b.size for b in of) for name, of in blocks.items()} == {"auxiliary": 514, "slope": 514}
    assert Vertical().blocks(512, 1, 1).keys() == {"auxiliary"}


def test_shared_batches() -> None:
    first, again, other = (shared_batch(5, r, 100, 10) for r in (0, 0, 1))
    assert (first == again).all()
    assert (first != other).any()
    assert len(set(first.tolist())) == 10
    assert shared_batch(5, 0, 100, None).tolist() == list(range(100))
