"""Predictions without what is predicted, draws from the prior, and a silo's log likelihood against closed forms."""

from __future__ import annotations

import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import make_intercepts
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.base import Posterior
from secure_fvi.draws import LocalPosterior

pytestmark = pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning", "ignore::FutureWarning")
_rng = torch.Generator().manual_seed(5)
SILOS = [{"x": torch.randn(n, generator=_rng), "y": torch.randn(n, generator=_rng)} for n in (12, 15, 9)]


def line(x: Tensor, y: Tensor | None = None) -> None:
    b = pyro.sample("b", dist.Normal(2.0, 0.5))
    with pyro.plate("records", len(x)):
        mean = pyro.deterministic("mean", b * x)
        pyro.sample("y", dist.Normal(mean, 0.5), obs=y)


def no_default(x: Tensor, y: Tensor) -> None:
    line(x, y)


def sized_by_y(x: Tensor, y: Tensor | None = None) -> None:
    b = pyro.sample("b", dist.Normal(2.0, 0.5))
    with pyro.plate("records", len(y)):  # type: ignore[arg-type]
        pyro.sample("y", dist.Normal(b * x, 0.5), obs=y)


def _fit(model: Any, silos: Any = SILOS, algorithm: Any = None, **options: Any) -> sf.Result:
    return sf.fit(model, silos, algorithm or sf.SFVI(iterations=3), sf.Plain(), compile=False, **options)


@pytest.fixture(scope="module")
def fitted() -> sf.Result:
    return _fit(line)


@pytest.mark.parametrize("model", [line, no_default])
def test_what_is_left_out_or_none_is_predicted(model: Any) -> None:
    fitted = _fit(model)
    new = {"x": torch.tensor([-1.0, 0.0, 2.0])}
    given = fitted.predict({**new, "y": torch.full((3,), 1e6)}, n=40, seed=2)
    for without in (new, {**new, "y": None}):
        found = fitted.predict(without, n=40, seed=2)
        assert found.keys() == {"y", "mean"}
        assert torch.equal(found["y"], given["y"]), "values of what is observed do not matter"
    assert found["mean"].shape == found["y"].shape == (40, 3)
    assert torch.equal(found["mean"][:, 1], torch.zeros(40))


def test_a_program_that_needs_what_is_left_out_is_refused_by_name() -> None:
    fitted = _fit(sized_by_y)
    with pytest.raises(sf.InputError, match=r"does not run without 'y' \(TypeError\): where obs=None"):
        fitted.predict({"x": torch.ones(3)})
    assert fitted.predict({"x": torch.ones(3), "y": torch.zeros(3)}, n=2)["y"].shape == (2, 3)


def test_covariates_are_not_made_up_and_densities_need_all(fitted: sf.Result) -> None:
    with pytest.raises(sf.InputError, match="does not run without 'x'"):
        fitted.predict({"y": torch.ones(3)})
    with pytest.raises(sf.InputError, match="needs the tensors of the fit"):
        fitted.log_predictive({"x": torch.ones(3)})
    for wrong in ({"x": torch.ones(3, 2)}, {"x": torch.ones(3), "z": torch.ones(3)}):
        with pytest.raises(sf.InputError, match="needs the tensors of the fit"):
            fitted.predict(wrong)


# ---- the prior ----


def grown(x: Tensor, y: Tensor | None = None, groups: int = 3) -> None:
    """Latents of all kinds, a param, and a discrete one."""
    scale = pyro.param("scale", lambda: torch.tensor(0.25), constraint=dist.constraints.positive)
    mu = pyro.sample("mu", dist.Normal(torch.zeros(groups), 2.0).to_event(1))
    with pyro.plate("records", len(x)):
        z = pyro.sample("z", dist.Categorical(torch.ones(groups)))
        b = pyro.sample("b", dist.Normal(mu[z], scale))
        pyro.sample("y", dist.Normal(b + x, 0.1), obs=y)


@pytest.mark.slow
def test_draws_from_the_prior_have_its_moments() -> None:
    """2,000 draws: sds within 5 standard errors, 8%; param at its start."""
    pyro.clear_param_store()
    found = sf.prior_predictive(grown, {"x": torch.tensor([0.0, 100.0])}, n=2000, seed=1)
    assert {name: tuple(value.shape[1:]) for name, value in found.items()} == {
        "mu": (3,), "z": (2,), "b": (2,), "y": (2,),
    }  # fmt: skip
    assert found["mu"].std(0) == pytest.approx(torch.full((3,), 2.0).tolist(), rel=0.08)
    gap = found["b"] - found["mu"].gather(1, found["z"])
    assert float(gap.std()) == pytest.approx(0.25, rel=0.08)
    assert float((found["y"] - found["b"])[:, 1].mean()) == pytest.approx(100.0, abs=0.02)
    assert not list(pyro.get_param_store()), "nothing is left behind"
    again = sf.prior_predictive(grown, {"x": torch.tensor([0.0, 100.0]), "y": None}, n=3, seed=1)
    assert torch.equal(again["y"], found["y"][:3])


def test_given_outcomes_do_not_matter_to_the_prior() -> None:
    model = sf.FederatedModel(no_default, "records")
    x = torch.ones(4)
    found = sf.prior_predictive(model, {"x": x, "y": torch.full((4,), 1e9)}, n=5)
    assert torch.equal(found["y"], sf.prior_predictive(model, {"x": x}, n=5)["y"])
    assert found["y"].abs().max() < 20


def improper(x: Tensor) -> None:
    pyro.sample("flat", dist.ImproperUniform(dist.constraints.real, (), ()))


def weighed(x: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    pyro.factor("prefer", mu)


@pytest.mark.parametrize(
    ("program", "data", "words"),
    [
        (improper, {"x": torch.ones(2)}, "site 'flat' .ImproperUniform. has a density and no draws"),
        (weighed, {"x": torch.ones(2)}, "pyro.factor 'prefer' weighs what is drawn"),
        (sized_by_y, {"x": torch.ones(2)}, "does not run without 'y'"),
        (line, {}, "no tensor in its data"),
        (3, {"x": torch.ones(2)}, "must be an sf.FederatedModel or a Pyro function"),
    ],
)
def test_what_has_no_prior_to_draw_from_is_refused(program: Any, data: Any, words: str) -> None:
    with pytest.raises(sf.InputError, match=words):
        sf.prior_predictive(program, data, n=2)
    with pytest.raises(sf.InputError, match="at least 1, not 0"):
        sf.prior_predictive(line, {"x": torch.ones(2)}, n=0)


# ---- a silo's log likelihood ----


def level(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def test_log_likelihoods_are_those_of_the_draws(fitted: sf.Result) -> None:
    found = fitted.local["silo-2"].log_likelihood(7, seed=3)
    b = fitted.sample(7, seed=3)["b"].unsqueeze(-1)
    assert found.shape == (7, 15)
    assert torch.allclose(found, dist.Normal(b * SILOS[1]["x"], 0.5).log_prob(SILOS[1]["y"]))
    for n, samples in ((0, 1), (3, 0)):
        with pytest.raises(sf.InputError, match="at least 1, not 0"):
            fitted.local["silo-2"].log_likelihood(n, samples=samples)


def test_a_records_own_latents_are_integrated_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the closed form. A q twice as wide as the posterior, 400 samples: sd of
    the log .036 (E w^2 = 2 / 1.75^.5), and 14 numbers within 4.2 of them; false alarm 4e-4."""
    problem = make_intercepts()
    fitted = _fit(problem.model, problem.silos)
    local = fitted.local["silo-1"]
    rows = problem.silos[0]["y"]
    exact_scale = (0.49 * 0.25 / 3 / (0.49 + 0.25 / 3)) ** 0.5
    params = local._fit.params
    mu = fitted.variational.eta["loc"]
    with torch.no_grad():
        for name in params:
            params[name].zero_()
        params["loc"][:7, 0] = 0.49 / (0.49 + 0.25 / 3) * (rows.mean(1) - mu)
        params["log_scale"].fill_(float(torch.tensor(2 * exact_scale).log()))
    found = local.log_likelihood(2, seed=1, samples=400)
    centre = fitted.sample(2, seed=1)["mu"].reshape(2, 1, 1).expand(2, 7, 3)
    covariance = 0.49 * torch.ones(3, 3) + 0.25 * torch.eye(3)
    exact = dist.MultivariateNormal(centre, covariance).log_prob(rows)
    assert (found - exact).abs().max() < 0.15
    monkeypatch.setattr("secure_fvi.draws.NUMBERS_AT_ONCE", 1)  # one draw at a time
    assert (local.log_likelihood(2, seed=1, samples=400) - exact).abs().max() < 0.15


def test_leave_one_out_of_a_silos_own_records_is_the_exact_one() -> None:
    """With the exact posterior as q: PSIS-LOO by arviz of 4,000 draws within .1 nat of the closed form for 30 records,
    whose sum over draws has an sd of .02."""
    arviz = pytest.importorskip("arviz")
    y = torch.randn(30, generator=torch.Generator().manual_seed(8))
    fitted = _fit(level, [{"y": y}])
    precision = 30 + 0.01
    q = fitted.variational
    eta = {**q.eta, "loc": y.sum().reshape(1) / precision, "log_scale": -0.5 * torch.tensor([precision]).log()}
    local = LocalPosterior(fitted.local["silo-1"]._silo, fitted.problem, Posterior(q.family, eta, q.theta))
    found = local.to_arviz(4000, seed=2)
    assert found.log_likelihood["records"].shape == (1, 4000, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loo = arviz.loo(found)
    rest = (y.sum() - y) / (precision - 1)
    exact = dist.Normal(rest, (1 + 1 / (precision - 1)) ** 0.5).log_prob(y).sum()
    within = dist.Normal(y.sum() / precision, (1 + 1 / precision) ** 0.5).log_prob(y).sum()
    assert loo.elpd_loo == pytest.approx(float(exact), abs=0.1)
    assert abs(within - exact) > 0.5, "the control: the density of records that were fitted is another"
