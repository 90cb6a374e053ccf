"""FedAvg: gradient ascent where it should be, the pooled MAP where silos allow it, a point as a result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import make_intercepts, make_rate
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.fedavg import FedAvgProgram
from secure_fvi.cli import main
from secure_fvi.disclosure import disclose
from secure_fvi.errors import InputError
from secure_fvi.families.gaussian import Point
from secure_fvi.runs.marginals import marginals

SIZES = (12, 30, 18)
NOISE, PRIOR = 0.5, 2.0


def _least_squares(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), PRIOR).to_event(1))
    with pyro.plate("person", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, NOISE), obs=y)


def _logistic(x: Tensor, y: Tensor) -> None:
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), PRIOR).to_event(1))
    with pyro.plate("person", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def _scaled(x: Tensor, y: Tensor) -> None:
    """With a theta, and a positive global site that has no data of its own."""
    shift = pyro.param("shift", torch.tensor(0.0))
    noise = pyro.sample("noise", dist.LogNormal(0.0, 1.0))
    with pyro.plate("person", len(y)):
        pyro.sample("y", dist.Normal(shift + 0.0 * x[..., 0], noise), obs=y)


def _data(logistic: bool = False, seed: int = 0) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    silos = []
    for n in SIZES:
        x = torch.stack([torch.ones(n), torch.randn(n, generator=rng)], 1)
        mean = x @ torch.tensor([0.7, -1.2])
        y = mean + NOISE * torch.randn(n, generator=rng)
        silos.append({"x": x, "y": (torch.rand(n, generator=rng) < mean.sigmoid()).to(x) if logistic else y})
    return silos


def _pooled(silos: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: torch.cat([s[name] for s in silos]) for name in silos[0]}]


def _gradient(beta: Tensor, silo: dict[str, Tensor], logistic: bool, records: int) -> Tensor:
    """Of the mean log posterior of a record, with the prior's share 1 / `records`."""
    x, y = silo["x"].double(), silo["y"].double()
    residual = y - torch.sigmoid(x @ beta) if logistic else (y - x @ beta) / NOISE**2
    return x.T @ residual / len(y) - beta / PRIOR**2 / records


def _fit(silos: list[dict[str, Tensor]], logistic: bool = False, sums: Any = None, **options: Any) -> sf.Result:
    model = sf.FederatedModel(_logistic if logistic else _least_squares, "person")
    options = {"tolerance": 0.0, **options}
    fit = sf.fit(model, silos, sf.FedAvg(**options), sums or sf.Plain(), compile=False)
    assert isinstance(fit, sf.Result)
    return fit


# A tolerance of 0 is never met, and a run that has not come to rest warns.
pytestmark = pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")


@pytest.mark.parametrize("logistic", [False, True])
def test_one_silo_is_gradient_descent(logistic: bool) -> None:
    """Three rounds of four steps against the same twelve by hand, in float64: 1e-12."""
    silos = _pooled(_data(logistic))
    beta = torch.zeros(2, dtype=torch.float64)
    for _ in range(12):
        beta = beta + 0.05 * _gradient(beta, silos[0], logistic, 60)
    result = _fit(silos, logistic, rounds=3, local_steps=4, learning_rate=0.05)
    torch.testing.assert_close(result.posterior["beta"].mean, beta, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("logistic", [False, True])
@pytest.mark.later("False")
def test_one_local_step_is_pooled_gradient_descent(logistic: bool) -> None:
    """Uneven silos, thirty rounds, masked sums of 64 bits against the pooled descent: 1e-6."""
    silos = _data(logistic)
    options = {"rounds": 30, "local_steps": 1, "learning_rate": 0.1}
    apart = _fit(silos, logistic, sf.Masked(), **options).posterior["beta"].mean
    together = _fit(_pooled(silos), logistic, **options).posterior["beta"].mean
    torch.testing.assert_close(apart, together, rtol=1e-6, atol=1e-6)
    equal = _fit(silos, logistic, weights="equal", **options).posterior["beta"].mean
    assert (equal - together).abs().max() > 1e-3  # the weights matter


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_momentum_and_the_servers_rate_are_sgds(schedule: str) -> None:
    """Against torch's SGD on the pooled objective: 1e-10."""
    silos = _pooled(_data())
    beta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD([beta], lr=0.5 * 0.05, momentum=0.8)
    falling = torch.optim.lr_scheduler.LambdaLR(sgd, lambda k: 1.0 if schedule == "constant" else 1 - 0.99 * k / 20)
    for _ in range(20):
        beta.grad = -_gradient(beta.detach(), silos[0], False, 60)
        sgd.step()
        falling.step()
    options = {"rounds": 20, "local_steps": 1, "learning_rate": 0.05, "server_schedule": schedule}
    found = _fit(_data(), server_learning_rate=0.5, server_momentum=0.8, **options).posterior["beta"].mean
    torch.testing.assert_close(found, beta.detach(), rtol=1e-10, atol=1e-10)


def test_it_reaches_the_pooled_map_and_stops_by_itself() -> None:
    """Least squares in closed form. The average gradient is below 1e-4 at the end, over a curvature of 4: 1e-4."""
    silos = _data()
    x, y = (_pooled(silos)[0][name].double() for name in ("x", "y"))
    exact = torch.linalg.solve(x.T @ x / NOISE**2 + torch.eye(2) / PRIOR**2, x.T @ y / NOISE**2)
    result = _fit(silos, local_steps=1, learning_rate=0.1, tolerance=1e-4)
    assert result.converged
    assert result.rounds < 500
    torch.testing.assert_close(result.posterior["beta"].mean, exact, rtol=0, atol=1e-4)
    no_prior = _fit(silos, local_steps=1, learning_rate=0.1, tolerance=1e-4, prior=False)
    torch.testing.assert_close(
        no_prior.posterior["beta"].mean, torch.linalg.lstsq(x, y.unsqueeze(1)).solution[:, 0], rtol=0, atol=1e-4
    )
    assert no_prior.aggregation["exchanges"] == no_prior.rounds  # nobody counted


@pytest.mark.slow
def test_several_local_steps_settle_near_the_map() -> None:
    """Ten steps a round, silos of one population: between the silos' own optima, within 0.05 of the pooled one."""
    silos = _data(logistic=True)
    one = _fit(silos, True, local_steps=1, learning_rate=0.5, tolerance=1e-4, rounds=2000)
    ten = _fit(silos, True, local_steps=10, learning_rate=0.5, tolerance=1e-4)
    assert ten.converged
    assert ten.rounds < one.rounds / 3
    error = (ten.posterior["beta"].mean - one.posterior["beta"].mean).abs().max()
    assert 1e-3 < error < 0.05  # it is not the maximum: docs/fedavg.md


@pytest.mark.slow
def test_minibatches_come_near_the_map() -> None:
    """A constant rate wanders: 0.1 allowed.

    Half of 30 records with residuals of score sd 2 leave a mean score of sd 2 / sqrt(30), and steps of 0.02 at a
    curvature of 4 let sqrt(0.02 x 4 / 2) of it through, over the curvature: 0.02.
    """
    silos = _data()
    whole = _fit(silos, local_steps=5, learning_rate=0.02, rounds=100).posterior["beta"].mean
    half = _fit(silos, local_steps=5, learning_rate=0.02, rounds=100, sampling_rate=0.5).posterior["beta"].mean
    assert 1e-6 < (half - whole).abs().max() < 0.1
    assert whole.abs().max() > 1.0


@pytest.mark.slow
def test_theta_and_a_positive_site() -> None:
    """The joint maximum over shift and log noise, by many steps of torch's Adam: 1e-3."""
    silos = _data()
    y = _pooled(silos)[0]["y"].double()
    shift, log_noise = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    adam = torch.optim.Adam([shift, log_noise], 0.02)
    for _ in range(3000):
        adam.zero_grad()
        likelihood = torch.distributions.Normal(shift, log_noise.exp()).log_prob(y).sum()
        # The prior of log noise: what LogNormal(0, 1) is in the unconstrained space, its Jacobian included.
        (-likelihood - torch.distributions.Normal(0.0, 1.0).log_prob(log_noise)).backward()  # type: ignore[no-untyped-call]
        adam.step()
    model = sf.FederatedModel(_scaled, "person")
    result = sf.fit(model, silos, sf.FedAvg(local_steps=1, learning_rate=0.2), sf.Plain(), compile=False)
    assert result.converged
    assert result.theta["shift"].item() == pytest.approx(shift.item(), abs=1e-3)
    assert result.posterior["noise"].mean.item() == pytest.approx(log_noise.exp().item(), abs=1e-3)
    assert result.posterior["noise"].sd.item() == 0.0


# ---- the result ----


def test_a_point_goes_wherever_a_posterior_does(tmp_path: Path) -> None:
    silos = _data()
    result = _fit(silos, rounds=5)
    mean = result.posterior["beta"].mean
    assert torch.equal(result.posterior["beta"].sd, torch.zeros(2, dtype=torch.float64))
    assert torch.equal(result.sample(7)["beta"], mean.expand(7, 2))
    assert result.predict(silos[0], n=50)["y"].shape == (50, SIZES[0])
    assert result.log_predictive(silos[0], n=3).isfinite().all()
    assert result.elbo is None
    assert result.metrics["log_posterior"] < 0
    assert marginals(result.sample(100)).keys() == {"beta[0]", "beta[1]"}
    result.save(tmp_path)
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["posterior"]["beta"] == {"mean": mean.tolist(), "sd": [0.0, 0.0]}


def test_log_posterior_is_the_joint_at_what_was_sent() -> None:
    """Of the first round: at zero, by hand."""
    silos = _data()
    y = _pooled(silos)[0]["y"].double()
    by_hand = dist.Normal(0.0, NOISE).log_prob(y).sum() + 2 * dist.Normal(0.0, PRIOR).log_prob(torch.tensor(0.0))
    assert _fit(silos, rounds=1).metrics["log_posterior"] == pytest.approx(float(by_hand), rel=1e-6)


def test_the_point_family() -> None:
    point, eta = Point(3), {"loc": torch.arange(3.0)}
    assert torch.equal(point.transform(eta, torch.zeros(0)), eta["loc"])
    assert (float(point.log_prob(eta, eta["loc"])), float(point.log_prob(eta, eta["loc"] + 1))) == (0.0, -torch.inf)
    assert not point.covariance(eta).any()


class _KilledError(Exception):
    pass


@pytest.mark.later
def test_a_killed_run_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    model, silos = sf.FederatedModel(_least_squares, "person"), _data()
    algorithm = sf.FedAvg(rounds=8, sampling_rate=0.5, server_momentum=0.5, tolerance=0.0)
    whole = sf.fit(model, silos, algorithm, sf.Plain(), compile=False)

    def kill(progress: sf.Progress) -> None:
        if progress.round == 4:
            raise _KilledError

    keep: dict[str, Any] = {"checkpoint_dir": tmp_path, "checkpoint_seconds": 0.0, "compile": False}
    with pytest.raises(_KilledError):
        sf.fit(model, silos, algorithm, sf.Plain(), on_round=kill, **keep)
    resumed = sf.fit(model, silos, algorithm, sf.Plain(), resume=True, **keep)
    assert torch.equal(resumed.posterior["beta"].mean, whole.posterior["beta"].mean)


_CONFIGURATION = """
[model]
function = "model.py:least_squares"
record_plate = "person"

[algorithm]
name = "fedavg"
rounds = 20

[aggregation]
kind = "plain"

[[silo]]
id = "a"
data = "a.npz"

[[silo]]
id = "b"
data = "b.npz"
"""
_PROGRAM = """
import pyro
import pyro.distributions as dist
import torch

def least_squares(x, y):
    beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("person", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, 0.5), obs=y)
"""


@pytest.mark.slow
def test_run_and_compare_from_a_configuration(tmp_path: Path) -> None:
    """The whole folder is written, report included; NUTS' mean is within a posterior sd."""
    (tmp_path / "config.toml").write_text(_CONFIGURATION)
    (tmp_path / "model.py").write_text(_PROGRAM)
    for name, silo in zip("ab", _data(), strict=False):
        np.savez(tmp_path / f"{name}.npz", **{k: v.numpy() for k, v in silo.items()})
    out = tmp_path / "out"
    for command in (
        ["run", str(tmp_path / "config.toml"), "--out", str(out)],
        ["compare", str(out), "--draws", "300"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(command)
        assert stop.value.code == 0
    result = json.loads((out / "result.json").read_text())
    assert (result["algorithm"], result["converged"], result["elbo"]) == ("fedavg", True, None)
    compared = json.loads((out / "compare.json").read_text())["sites"]["beta"]
    assert compared["run_sd"] == compared["sd_ratio"] == [0.0, 0.0]
    assert max(map(abs, compared["mean_error_in_sd"])) < 1.0
    assert "fedavg" in (out / "report.html").read_text()


# ---- what it refuses, and privacy ----


def test_local_latents_are_refused() -> None:
    problem = make_intercepts()
    with pytest.raises(InputError, match="models without local latents, and this one has b"):
        sf.fit(problem.model, problem.silos, sf.FedAvg())
    with pytest.raises(InputError, match="use sfvi-avg"):
        sf.fit(make_rate().model, make_rate().silos, sf.FedAvg())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "size"}, "choose records or equal"),
        ({"rounds": 0}, "rounds must be a whole number of at least 1"),
        ({"local_steps": 2.0}, "local_steps must be a whole number"),
        ({"total_records": 0}, "total_records must be"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"server_learning_rate": -1.0}, "server_learning_rate must be positive"),
        ({"server_momentum": 1.0}, r"server_momentum must lie in \[0, 1\)"),
        ({"server_schedule": "steps"}, "server_schedule 'steps' is unknown"),
        ({"sampling_rate": 2.0}, "sampling_rate must lie in"),
        ({"participation": 0.0}, "participation must lie in"),
        ({"tolerance": -1.0}, "tolerance must be at least 0"),
        ({"bound": 0.0}, "bound must lie in"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sf.FedAvg(**options)


def test_another_number_of_records_than_all_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """By which silos share the prior out. The control does not look at the number that every total has: the prior is
    all but forgotten, and the run calls itself converged."""

    def narrow(x: Tensor, y: Tensor) -> None:
        beta = pyro.sample("beta", dist.Normal(torch.zeros(2), 0.1).to_event(1))
        with pyro.plate("person", len(y)):
            pyro.sample("y", dist.Normal(x @ beta, NOISE), obs=y)

    def fitted(total: int | None) -> Any:
        algorithm = sf.FedAvg(total_records=total)
        return sf.fit(sf.FederatedModel(narrow, "person"), _data(), algorithm, sf.Plain(), compile=False)

    exact = fitted(None).posterior["beta"].mean
    torch.testing.assert_close(fitted(sum(SIZES)).posterior["beta"].mean, exact)
    with pytest.raises(InputError, match="total_records = 60000, and the silos have 60 records together"):
        fitted(60_000)
    monkeypatch.setattr(FedAvgProgram, "_check_total", lambda *_: None)
    found = fitted(60_000)
    assert found.converged
    assert (found.posterior["beta"].mean - exact).abs().max() > 0.1


@pytest.mark.parametrize("looked", [True, False])
def test_an_average_that_creeps_along_is_not_at_rest(monkeypatch: pytest.MonkeyPatch, looked: bool) -> None:
    """Of a column that is a millionth of another its coefficient is as far as at the start, and its changes are small:
    on other scales it is the rest that the data have. The control looks at the size of changes alone."""
    silos = [{"x": s["x"] * torch.tensor([1.0, 1e-6]).to(s["x"]), "y": s["y"]} for s in _data()]
    if not looked:
        monkeypatch.setattr(FedAvgProgram, "at_rest", lambda self, s: (s.movement or 1.0) < self.config.tolerance)

    def raw(x: Tensor, y: Tensor) -> None:
        beta = pyro.sample("beta", dist.Normal(torch.zeros(2), torch.tensor([1.0, 1e6])).to_event(1))
        with pyro.plate("person", len(y)):
            pyro.sample("y", dist.Normal(x @ beta, NOISE), obs=y)

    fit = sf.fit(sf.FederatedModel(raw, "person"), silos, sf.FedAvg(rounds=100), sf.Plain(), compile=False)
    assert fit.converged is not looked
    assert abs(float(fit.posterior["beta"].mean[1])) < 1e-3
    assert ("moved little, but as much as at the start" in fit.convergence["reason"]) == looked


def test_a_rate_that_is_too_large_is_named() -> None:
    with pytest.raises((InputError, sf.SecureFVIError), match="lower learning_rate"):
        _fit(_data(), learning_rate=50.0, rounds=400)


@pytest.mark.later
def test_silo_privacy_noises_the_change() -> None:
    """Twelve silos, little noise: near the MAP without privacy, and every round was charged.

    Each silo's noise has sd 0.01, their average 0.003 a round; at a contraction of 0.6 a round that adds up to less
    than 0.02 at five sds.
    """
    rows = _pooled(_data())[0]
    silos = [{name: value[k::12] for name, value in rows.items()} for k in range(12)]
    model = sf.FederatedModel(_least_squares, "person")
    algorithm = sf.FedAvg(rounds=40, local_steps=1, learning_rate=0.1, weights="equal", total_records=60, tolerance=0.0)
    privacy = sf.SiloDP(noise_multiplier=0.01, clipping_norm=1.0, noise="silo")
    plain = sf.fit(model, silos, algorithm, sf.Plain(), compile=False)
    noised = sf.fit(model, silos, algorithm, sf.Masked(), privacy, compile=False, noise_key=b"n" * 32)
    error = (noised.posterior["beta"].mean - plain.posterior["beta"].mean).abs().max()
    assert 1e-6 < error < 0.02
    assert noised.privacy is not None
    assert noised.privacy["releases"] == 40 + privacy.retries
    assert noised.metrics["log_posterior"] is None
    assert noised.metrics["records"] is None


@pytest.mark.parametrize(
    ("options", "privacy", "message"),
    [
        ({}, sf.RecordDP(epsilon=1.0), "takes no record privacy"),
        ({}, sf.SiloDP(epsilon=8.0), "weights = 'equal'"),
        ({"weights": "equal"}, sf.SiloDP(epsilon=8.0), "needs total_records"),
    ],
)
def test_privacy_that_cannot_be_had_is_refused(options: dict[str, Any], privacy: Any, message: str) -> None:
    model = sf.FederatedModel(_least_squares, "person")
    with pytest.raises(InputError, match=message):
        sf.fit(model, _data(), sf.FedAvg(**options), privacy=privacy)


@pytest.mark.later
@pytest.mark.parametrize(("rate", "alone"), [(0.1, True), (1e-3, False)])
def test_the_last_batch_may_be_all_that_a_total_rests_on(rate: float, alone: bool) -> None:
    """At a rate that is the inverse of the curvature the last nonempty batch, of one record, leaves nothing of the
    steps before: the total is a sum of one record a silo, so that such a job is one over few records however many its
    steps have seen. The control: at a small rate it is no such sum. Of 2.7e4 sums some lies within 1e-6 of another
    number with a chance of a thousandth."""
    rng = torch.Generator().manual_seed(3)
    silos = [{"y": 40 + 25 * torch.rand(30, generator=rng)} for _ in range(3)]

    def level(y: Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(y.new_zeros(()), 1e6))
        with pyro.plate("row", len(y)):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    options: dict[str, Any] = {"weights": "equal", "prior": False, "sampling_rate": 0.1 / 30, "local_steps": 900}
    algorithm = sf.FedAvg(rounds=1, learning_rate=rate, **options)
    assert disclose(algorithm, sf.Masked(), None, 3).kinds == ("sampled_records",)
    result = sf.fit(sf.FederatedModel(level, "row"), silos, algorithm, sf.Plain(), compile=False)
    total = 3 * float(result.variational.eta["loc"])
    a, b, c = (silo["y"].double() for silo in silos)
    nearest = float((a[:, None, None] + b[:, None] + c - total).abs().min())
    assert (nearest < 1e-6) == alone


def test_no_bound_rounds_a_sum_away() -> None:
    """The step of a sum follows from the bound. The largest that is taken leaves the answer as it is; the control sets
    one past it, under which all changes are nothing, and averages at rest where they began."""
    point = {}
    for bound in (2.0**30, 2.0**40, 1e22):
        algorithm = sf.FedAvg(bound=min(bound, 2.0**40), rounds=20)
        object.__setattr__(algorithm, "bound", bound)
        model = sf.FederatedModel(_least_squares, "person")
        fit = sf.fit(model, _data(), algorithm, sf.Masked(), compile=False)
        point[bound] = fit.posterior["beta"].mean
        assert fit.converged or bound < 1e22
    torch.testing.assert_close(point[2.0**40], point[2.0**30], rtol=0, atol=1e-5)
    assert not point[1e22].any()
    for algorithm in (sf.FedAvg, sf.FedVI, sf.SFVI, sf.SFVIAvg, sf.PVI, sf.BCM):
        with pytest.raises(InputError, match=r"bound must lie in \(0, 2\^40\]: sums are rounded"):
            algorithm(bound=1e22)
