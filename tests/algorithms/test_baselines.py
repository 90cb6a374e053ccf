"""The baselines of PVI on models with known answers, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import make_intercepts
from pvi_world import NOISE, REGRESSION, make_regression
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.local_fit import Families
from secure_fvi.algorithms.natural import Natural, distance, from_moments
from secure_fvi.errors import InputError, SecureFVIError
from secure_fvi.runs.config import ALGORITHMS, build, named, resolved

EXACT: dict[str, Any] = {"local_optimizer": "closed_form", "family": "full"}
SIZES = (7, 30, 12)
PRIOR = Natural(torch.zeros(3), torch.eye(3) / 4.0)  # of `pvi_world.regression`


def _q(result: sf.Result) -> Natural:
    eta, family = result.variational.eta, result.variational.family
    return from_moments(eta["loc"].double(), family.covariance(eta).double())


def _assert_close(got: Natural, want: Natural, tolerance: float = 1e-8) -> None:
    scale = float(want.precision.abs().max())
    torch.testing.assert_close(got.precision, want.precision, rtol=0, atol=tolerance * scale)
    torch.testing.assert_close(got.mean(), want.mean(), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("algorithm", "sums"),
    [
        (sf.BCM(**EXACT), 1),
        (sf.BCM(prior="split", **EXACT), 2),
        (sf.BCM(prior="split", total_records=sum(SIZES), **EXACT), 1),
        (sf.VCL(reveal_changes=True, **EXACT), 3),
    ],
)
def test_regression_with_known_noise_is_exact(algorithm: Any, sums: int) -> None:
    """Gaussian factors multiply without error, in one round or one pass; 1e-8 is float64's rounding on these sizes."""
    silos, exact = make_regression(SIZES)
    result = sf.fit(REGRESSION, silos, algorithm, sf.Plain())
    _assert_close(_q(result), exact)
    assert result.converged is None
    assert result.elbo is None
    assert result.aggregation["exchanges"] == sums


def test_masked_sums_give_the_committee_machine_too() -> None:
    """Within the ring's resolution at the default bound, 2^30 in 64 bits."""
    silos, exact = make_regression(SIZES)
    _assert_close(_q(sf.fit(REGRESSION, silos, sf.BCM(prior="split", **EXACT), sf.Masked())), exact, 1e-6)


def _in_units_of(scale: float) -> sf.FederatedModel:
    """A slope of 2 / scale, and how far it could be a priori."""

    def line(x: Tensor, y: Tensor) -> None:
        slope = pyro.sample("slope", dist.Normal(0.0, 10.0 / scale))
        with pyro.plate("row", len(y)):
            pyro.sample("y", dist.Normal(x * slope, 1.0), obs=y)

    return sf.FederatedModel(line, "row")


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e6])
def test_masked_sums_round_no_slope_on_a_raw_scale(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A covariate in large or small units: changes are stated in units of q's sds. The control states them as they are:
    precisions of 1e-6 were less than a sum's step, and the slope was many sds off, without a word; those of 1e12 were
    past the bound."""
    rng = torch.Generator().manual_seed(1)
    x = [scale * torch.randn(n, generator=rng, dtype=torch.float64) for n in SIZES]
    silos = [{"x": part, "y": 2 * part / scale + torch.randn(len(part), generator=rng)} for part in x]
    algorithm = sf.BCM(prior="split", **EXACT)
    exact, masked = (_q(sf.fit(_in_units_of(scale), silos, algorithm, sums)) for sums in (sf.Plain(), sf.Masked()))
    assert distance(exact, masked) < 1e-6
    monkeypatch.setattr(Families, "units", lambda self, q: torch.ones(self.n, dtype=torch.float64))
    if scale < 1:
        assert distance(exact, _q(sf.fit(_in_units_of(scale), silos, algorithm, sf.Masked()))) > 1
    else:
        with pytest.raises(SecureFVIError, match="exceeds the declared bound"):
            sf.fit(_in_units_of(scale), silos, algorithm, sf.Masked())


def test_streaming_vb_counts_the_data_once_a_pass() -> None:
    """Two passes: the prior once, every likelihood twice. The control: one pass is exact."""
    silos, exact = make_regression(SIZES)
    likelihood = exact.minus(PRIOR)
    for passes in (1, 2):
        algorithm = sf.StreamingVB(passes=passes, reveal_changes=True, **EXACT)
        result = sf.fit(REGRESSION, silos, algorithm, sf.Plain())
        _assert_close(_q(result), PRIOR.plus(likelihood, passes))
        assert result.rounds == passes * len(SIZES)


@pytest.mark.parametrize("split", [False, True])
def test_a_diagonal_committee_machine_has_the_wrong_mean(split: bool) -> None:
    """The product of the silos' mean-field posteriors in closed form; PVI's diagonal answer has the exact mean."""
    silos, exact = make_regression(SIZES)
    shift, precision = (torch.zeros(3), torch.zeros(3)) if split else (torch.zeros(3), -2 * PRIOR.precision.diagonal())
    for silo in silos:
        share = len(silo["y"]) / sum(SIZES) if split else 1.0
        own = silo["x"].T @ silo["x"] / NOISE**2 + share * PRIOR.precision
        mean = torch.linalg.solve(own, silo["x"].T @ silo["y"] / NOISE**2)
        shift, precision = shift + own.diagonal() * mean, precision + own.diagonal()
    algorithm = sf.BCM(prior="split" if split else "same", local_optimizer="closed_form", family="diagonal")
    result = sf.fit(REGRESSION, silos, algorithm, sf.Plain())
    torch.testing.assert_close(result.posterior["beta"].mean, shift / precision, rtol=0, atol=1e-8)
    torch.testing.assert_close(result.posterior["beta"].sd, precision.rsqrt(), rtol=1e-8, atol=0)
    assert ((result.posterior["beta"].mean - exact.mean()).abs() > 0.4 * exact.stddev()).any()


@pytest.mark.slow
def test_latents_of_records_stay_and_are_integrated_out() -> None:
    """One global Gaussian site: each silo's marginal likelihood is a Gaussian factor, so one round is exact up to the
    noise of stochastic local fits, 0.15 sd as in the tests of PVI."""
    problem = make_intercepts()
    result = sf.fit(problem.model, problem.silos, sf.BCM(local_steps=300), sf.Plain())
    assert (result.posterior["mu"].mean - problem.mean["mu"]).abs() < 0.15 * problem.sd["mu"]
    assert (result.posterior["mu"].sd / problem.sd["mu"] - 1).abs() < 0.1
    assert result.local["silo-1"].sample(3)["b"].shape == (3, 7)


def _heavy_tails(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.StudentT(2.0, mu, 0.3), obs=y)


@pytest.mark.later
def test_an_improper_product_fails_instead_of_answering() -> None:
    """Two outliers on either side make each silo's posterior wider than the prior: taken together, ten silos leave a
    negative precision. PVI damps it; the prior split over the silos keeps the product proper."""
    silos = [{"y": torch.tensor([-2.0, 2.0])} for _ in range(10)]
    model = sf.FederatedModel(_heavy_tails, "row")
    with pytest.raises(SecureFVIError, match="is no distribution"):
        sf.fit(model, silos, sf.BCM(local_steps=30), sf.Plain())
    result = sf.fit(model, silos, sf.BCM(prior="split", local_steps=30), sf.Plain())
    assert result.posterior["mu"].sd > 0


@pytest.mark.slow
def test_resumed_run_ends_where_the_whole_one_does(tmp_path: Path) -> None:
    problem = make_intercepts()
    algorithm = sf.StreamingVB(passes=2, reveal_changes=True, local_steps=20)
    options: dict[str, Any] = {"compile": False, "checkpoint_seconds": 0.0}
    whole = sf.fit(problem.model, problem.silos, algorithm, sf.Plain(), compile=False)

    class _Stop(Exception):
        pass

    def stop(progress: sf.Progress) -> None:
        assert progress.max_rounds == 6
        if progress.round == 4:
            raise _Stop

    with pytest.raises(_Stop):
        sf.fit(problem.model, problem.silos, algorithm, sf.Plain(), checkpoint_dir=tmp_path, on_round=stop, **options)
    resumed = sf.fit(
        problem.model, problem.silos, algorithm, sf.Plain(), checkpoint_dir=tmp_path, resume=True, **options
    )
    assert torch.equal(resumed.posterior["mu"].mean, whole.posterior["mu"].mean)


def test_silo_privacy_clips_and_noises_the_committee() -> None:
    """A norm far above the changes and little noise: near the exact answer, and a claim that comes with it."""
    silos, exact = make_regression((200, 200, 200, 200))
    privacy = sf.SiloDP(noise_multiplier=1e-3, clipping_norm=2e4, noise="silo")
    result = sf.fit(REGRESSION, silos, sf.BCM(**EXACT), sf.Plain(), privacy=privacy, noise_key=b"k" * 32)
    assert result.privacy is not None
    assert result.metrics["records"] is None
    assert not torch.equal(_q(result).precision, exact.precision)
    with pytest.raises(InputError, match="needs total_records"):
        sf.fit(REGRESSION, silos, sf.BCM(prior="split", **EXACT), sf.Plain(), privacy=privacy)


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (sf.VCL, {}, "vcl visits one silo after the other and shows the server"),
        (sf.StreamingVB, {}, "say reveal_changes = true"),
        (sf.StreamingVB, {"reveal_changes": True, "passes": 0}, "passes must be a whole number"),
        (sf.BCM, {"prior": "half"}, "choose same or split"),
        (sf.BCM, {"total_records": 5}, "leave it out"),
        (sf.BCM, {"local_steps": 0}, "local_steps must be a whole number"),
    ],
)
def test_bad_options_are_refused(algorithm: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        algorithm(**options)


def test_what_cannot_be_done_is_refused() -> None:
    silos, _ = make_regression(SIZES)
    with pytest.raises(InputError, match="hide it in name only"):  # a masked sum of one silo's term is that term
        sf.fit(REGRESSION, silos, sf.VCL(reveal_changes=True, **EXACT), sf.Masked())
    with pytest.raises(SecureFVIError, match="cohort"):  # nor that of one of two
        sf.fit(REGRESSION, silos[:2], sf.BCM(**EXACT), sf.Masked())
    with pytest.raises(InputError, match="bcm takes no record privacy"):
        sf.fit(REGRESSION, silos, sf.BCM(**EXACT), privacy=sf.RecordDP(epsilon=1.0, delta=1e-5))
    with pytest.raises(InputError, match="this silo alone has more records"):
        sf.fit(REGRESSION, silos, sf.BCM(prior="split", total_records=5, **EXACT), sf.Plain())


@pytest.mark.parametrize("name", ["bcm", "vcl", "streaming-vb"])
def test_options_from_a_file(name: str) -> None:
    cls = named(ALGORITHMS, "algorithm.name", name)
    table: dict[str, Any] = {"local_steps": 50, "family": "diagonal", "local_family": {"scale": "diagonal"}}
    table |= {"prior": "split"} if name == "bcm" else {"reveal_changes": True}
    made = build(cls, table, "algorithm")
    assert (made.name, made.local_steps, made.family) == (name, 50, "diagonal")
    assert build(cls, json.loads(json.dumps(resolved(made))), "algorithm") == made
