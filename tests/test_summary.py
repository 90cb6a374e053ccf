"""Summaries, correlations and arviz of a result, against the posterior that they say; and the progress bar of a fit."""

from __future__ import annotations

import builtins
import io
import math
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from programs import make_clinics, make_intercepts, make_rate, make_slopes
from rich.console import Console
from rich.errors import LiveError
from torch import Tensor

import secure_fvi as sf
from secure_fvi import progress
from secure_fvi.results import Refined, summarise
from secure_fvi.summary import MOST_ROWS, Summary, correlated, labels, quantiles, shown, weighted_moments

pytestmark = pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning", "ignore::FutureWarning")
FEW = sf.SFVI(iterations=4)


def _fit(problem: Any, algorithm: Any = FEW, **options: Any) -> Any:
    return sf.fit(problem.model, problem.silos, algorithm, sf.Plain(), compile=False, **options)


@pytest.fixture(scope="module")
def slopes() -> sf.Result:
    return _fit(make_slopes())


@pytest.fixture(scope="module")
def rate() -> sf.Result:
    return _fit(make_rate())


def test_quantiles_of_a_real_site_are_those_of_its_normal(slopes: sf.Result) -> None:
    table = slopes.summary()
    assert [row.name for row in table.rows] == ["beta[0]", "beta[1]"]
    mean, sd = (float(value[1]) for value in slopes.posterior["beta"])
    row, far = table.rows[1], 1.6448536269514722 * sd
    assert (row.mean, row.sd, row.q50) == pytest.approx((mean, sd, mean), rel=1e-12)
    assert (row.q5, row.q95) == pytest.approx((mean - far, mean + far), rel=1e-9)
    assert table.to_dict()["beta[1]"].keys() == {"mean", "sd", "5%", "50%", "95%"}


def test_quantiles_of_a_positive_site_are_those_of_its_log_normal(rate: sf.Result) -> None:
    """20,000 draws: the 5% quantile within 5 standard errors of .015 sd; the seed is fixed."""
    row = rate.summary().rows[0]
    loc, sd = float(rate.variational.eta["loc"]), float(rate.variational.family.stddev(rate.variational.eta))
    for found, level in ((row.q5, -1.6448536), (row.q50, 0.0), (row.q95, 1.6448536)):
        assert found is not None
        assert abs(math.log(found) - loc - level * sd) < 5 * 0.015 * sd


def test_latents_of_silos_and_records_have_no_row() -> None:
    table = _fit(make_clinics()).summary()
    assert [row.name for row in table.rows] == ["mu"]


def test_the_first_line_says_whether_it_converged_and_why_not(slopes: sf.Result) -> None:
    found = replace(slopes, converged=False, convergence={"reason": "R-hat 1.4 [bold]above[/bold] 1.1"})
    first = str(found.summary()).splitlines()[0]
    assert first == "sfvi, 4 rounds, not converged: R-hat 1.4 [bold]above[/bold] 1.1"  # as it stands, on one line
    long = replace(slopes, converged=None, convergence={"reason": "word " * 60})
    assert str(long.summary()).splitlines()[0].count("word") == 60
    assert str(replace(slopes, converged=True).summary()).splitlines()[0] == "sfvi, 4 rounds, converged"
    assert repr(found.summary()) == str(found.summary())


@pytest.mark.parametrize(
    ("value", "sd", "said"),
    [
        (0.39123, 0.1234, "0.391"), (0.000391234, 0.0000123, "0.0003912"), (96.8812, 1.59, "96.88"),
        (1234567.8, 4321.0, "1234570"), (-0.0004, 0.5, "0.000"), (3.21e-9, 1.5e-10, "3.21e-09"), (12.0, 0.0, "12"),
        (12.3456, None, "12.35"), (None, 1.0, "-"), (math.nan, 1.0, "nan"), (0.0, 1e-9, "0"),
    ],
)  # fmt: skip
def test_numbers_have_the_digits_that_their_sds_warrant(value: float | None, sd: float | None, said: str) -> None:
    """Control: at three decimals, as tables are otherwise printed, the second is 0."""
    assert shown(value, sd) == said
    assert f"{0.000391234:.3f}" == "0.000"


def test_it_prints_in_a_console_and_cuts_what_would_fill_screens(slopes: sf.Result) -> None:
    wide = Summary("many", slopes.summary().rows * MOST_ROWS, None, None, None)
    text = str(wide)
    assert f"and {MOST_ROWS} more, in .rows" in text
    assert text.count("beta[0]") + text.count("beta[1]") == MOST_ROWS
    console = Console(file=io.StringIO(), width=60)
    console.print(slopes.summary())
    assert "beta[1]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_name_begins_no_line_and_moves_no_cursor(slopes: sf.Result) -> None:
    """The control: a name that can be read stands as it is."""
    row, table = slopes.summary().rows[0], Summary("fit", [], None, None, None)
    table.rows = [row._replace(name=name) for name in ("b\nomega  9.99", "b\x1b[2K", "größe [m]")]
    said = str(table)
    assert len(said.splitlines()) == 1 + 3 + len(table.rows) + 1
    assert all(name in said for name in ("b?omega  9.99", "b?[2K", "größe [m]"))


def test_a_frame_where_there_is_pandas_and_a_line_where_there_is_none(
    slopes: sf.Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    pandas = pytest.importorskip("pandas")
    frame = slopes.summary().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame.loc["beta[1]", "95%"] == slopes.summary().rows[1].q95
    _without(monkeypatch, "pandas")
    with pytest.raises(sf.InputError, match="to_pandas needs pandas"):
        slopes.summary().to_pandas()


def _without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As on a machine where `package` is not installed."""
    real = builtins.__import__

    def missing(name: str, *args: Any, **more: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", missing)


# ---- weighted draws, as a refined posterior has them ----


REFINED = Refined(
    {"beta": torch.tensor([[0.0, 10.0], [1.0, 20.0], [2.0, 40.0]], dtype=torch.float64)},
    torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64),
    khat=0.31, ess=412.0, log_evidence=0.0, integration_error=0.0,
)  # fmt: skip


@pytest.fixture
def refined(slopes: sf.Result) -> sf.Result:
    return replace(slopes, refined=REFINED, posterior=summarise(slopes.problem, slopes.variational, REFINED))


def test_moments_and_quantiles_come_from_weighted_draws(refined: sf.Result) -> None:
    table = refined.summary()
    first, second = table.rows
    assert first.mean == pytest.approx(0.75)
    assert first.sd == pytest.approx((0.5 * 0.75**2 + 0.25 * 0.25**2 + 0.25 * 1.25**2) ** 0.5)
    assert (first.q5, first.q50, first.q95) == (0.0, 0.0, 2.0)
    assert (second.q5, second.q50, second.q95) == (10.0, 10.0, 40.0)
    assert "by 3 weighted draws: k-hat 0.31, effective sample size 412" in str(table)
    assert (table.khat, table.ess, table.draws) == (0.31, 412.0, 3)


def test_a_large_k_hat_is_said_to_be_one(slopes: sf.Result) -> None:
    table = Summary("x", slopes.summary().rows, 0.9, 3.0, 100)
    assert "k-hat 0.90, 0.7 or more: the weights are not to be trusted" in str(table)


def test_correlations_follow_the_weights(refined: sf.Result) -> None:
    w, x = REFINED.weights, REFINED.draws["beta"]
    centred = x - w @ x
    exact = (w * centred[:, 0] * centred[:, 1]).sum() / ((w @ centred**2).prod() ** 0.5)
    assert float(refined.correlations().matrix[0, 1]) == pytest.approx(float(exact))


def test_weighted_quantiles_are_those_of_repeated_draws() -> None:
    """Whole weights are copies: the same moments, and the same quantiles to within one draw."""
    rng = torch.Generator().manual_seed(0)
    draws, copies = torch.randn(500, 2, generator=rng), torch.randint(1, 5, (500,), generator=rng)
    weights = (copies / copies.sum()).double()
    repeated = draws.repeat_interleave(copies, 0)
    equal = torch.full((len(repeated),), 1 / len(repeated), dtype=torch.float64)
    assert torch.equal(quantiles(draws, weights), quantiles(repeated, equal))
    mean, sd = weighted_moments(draws, weights)
    assert torch.allclose(mean, repeated.mean(0))
    assert torch.allclose(sd, repeated.std(0, correction=0))
    assert not torch.equal(quantiles(draws, weights), quantiles(draws, torch.full((500,), 0.002).double())), "control"


# ---- correlations ----


def test_correlations_are_those_of_q(slopes: sf.Result) -> None:
    """20,000 draws: standard error at most .007."""
    covariance = slopes.variational.family.covariance(slopes.variational.eta)
    exact = covariance[0, 1] / (covariance[0, 0] * covariance[1, 1]).sqrt()
    found = slopes.correlations()
    assert abs(float(found.matrix[0, 1] - exact)) < 5 * 0.007
    assert torch.allclose(found.matrix.diagonal(), torch.ones(2, dtype=torch.float64))
    assert found.strongest() == [("beta[0]", "beta[1]", pytest.approx(float(found.matrix[0, 1])))]
    assert found.to_dict()["beta[0]"]["beta[1]"] == float(found.matrix[0, 1])
    assert "beta[1]" in str(found)
    with pytest.raises(sf.InputError, match="no global site 'gamma'"):
        slopes.correlations(["gamma"])


def test_many_scalars_show_the_strongest_pairs_and_constants_none() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(5000, 20, generator=rng, dtype=torch.float64)
    x[:, 7] = x[:, 3] * -0.9 + 0.1 * x[:, 7]
    x[:, 0] = 1.0
    found = correlated({"x": x}, torch.full((5000,), 1 / 5000, dtype=torch.float64))
    first, second, value = found.strongest(1)[0]
    assert (first, second) == ("x[3]", "x[7]")
    assert value < -0.98
    assert found.matrix[0].isnan().all()
    assert "the strongest of 190 pairs" in str(found)
    with pytest.raises(sf.InputError, match="2001 scalars are too many"):
        correlated({"x": torch.zeros(2, 2001)}, torch.ones(2) / 2)


def test_a_point_has_neither_spread_nor_correlations() -> None:
    fitted = sf.fit(_level, make_intercepts().silos, sf.FedAvg(rounds=2), sf.Plain(), compile=False)
    row = fitted.summary().rows[0]
    assert (row.sd, row.q5, row.q50, row.q95) == (None, None, None, None)
    assert row.mean == float(fitted.posterior["level"].mean)
    with pytest.raises(sf.InputError, match="fedavg found a point, which has no correlations"):
        fitted.correlations()


def _level(y: Tensor) -> None:
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(level, 1.0).expand([3]).to_event(1), obs=y)


def test_names_of_elements() -> None:
    assert labels("omega", ()) == ["omega"]
    assert labels("S", (2, 2)) == ["S[0,0]", "S[0,1]", "S[1,0]", "S[1,1]"]
    assert labels("none", (0,)) == []


# ---- arviz ----


def test_arviz_has_the_draws_and_no_data(slopes: sf.Result) -> None:
    found = slopes.to_arviz(300, seed=4)
    assert found.groups() == ["posterior"]
    assert torch.equal(torch.from_numpy(found.posterior["beta"].values[0]), slopes.sample(300, seed=4)["beta"])
    assert "sfvi, 4 rounds" in found.posterior.attrs["summary"]


def test_without_arviz_there_is_one_line(slopes: sf.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, "arviz")
    with pytest.raises(sf.InputError, match="to_arviz needs arviz: pip install 'arviz<1'"):
        slopes.to_arviz()


# ---- the progress bar ----


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, **options: Any) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(progress, "_BAR_SECONDS", 0.0)
    _fit(make_intercepts(), **options)
    return stream.getvalue()


def test_a_fit_is_quiet_where_nobody_looks_and_shows_a_bar_where_somebody_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _shown(monkeypatch, io.StringIO()) == ""
    assert _shown(monkeypatch, io.StringIO(), progress=False) == ""
    assert _shown(monkeypatch, _Terminal(), progress=False) == ""
    lines = _shown(monkeypatch, io.StringIO(), progress=True)
    assert "round 1/4" in lines
    assert "round 4/4" in lines
    assert "rounds" in _shown(monkeypatch, _Terminal())


def test_a_bar_of_the_callers_own_ends_no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(self: Any) -> None:
        raise LiveError("Only one live display may be active at once")

    monkeypatch.setattr("rich.progress.Progress.start", busy)
    _shown(monkeypatch, _Terminal(), progress=True)
