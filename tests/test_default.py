"""What `sf.fit` takes where nobody names an algorithm."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import secure_fvi as sf
from secure_fvi.errors import AggregationError, BoundError, InputError, SecureFVIWarning
from secure_fvi.families.gaussian import FULL_UP_TO
from secure_fvi.fitting import default_algorithm


def _rows(*sizes: int) -> list[dict[str, Tensor]]:
    rng = torch.Generator().manual_seed(3)
    return [{"y": 1 + torch.randn(n, generator=rng, dtype=torch.float64)} for n in sizes]


def _level(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def _wide(n: int) -> Callable[[Tensor], None]:
    def program(y: Tensor) -> None:
        beta = pyro.sample("beta", dist.Normal(torch.zeros(n), 1.0).to_event(1))
        with pyro.plate("r", len(y)):
            pyro.sample("y", dist.Normal(beta.sum(-1), 1.0), obs=y)

    return program


def _with_parameter(y: Tensor) -> None:
    sd = pyro.param("sd", torch.tensor(1.0), constraint=dist.constraints.positive)
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(mu, sd), obs=y)


@pytest.mark.parametrize(
    ("model", "privacy", "wanted"),
    [
        (_level, None, "pvi"),
        (sf.FederatedModel(_level, "r"), None, "pvi"),
        (_wide(FULL_UP_TO), None, "pvi"),
        (_wide(FULL_UP_TO + 1), None, "sfvi"),  # without a full covariance
        (_with_parameter, None, "sfvi"),
        (sf.FederatedModel(_level, "r", start={"mu": 2.0}), None, "sfvi"),
        (_level, sf.SiloDP(noise_multiplier=1.0, clipping_norm=1.0), "sfvi"),
    ],
)
def test_the_default_follows_from_the_model(model: Any, privacy: Any, wanted: str) -> None:
    assert default_algorithm(model, _rows(4, 5, 6), privacy).name == wanted


def test_data_decide_by_their_shapes_alone() -> None:
    """Of numbers that are none the same: the choice is public. The control: other shapes fit no program."""
    silos = _rows(4, 5, 6)
    assert default_algorithm(_level, [{"y": 0 * s["y"]} for s in silos]).name == "pvi"
    assert default_algorithm(_level, [{"x": s["y"]} for s in silos]).name == "sfvi"  # which is refused when it is read
    with pytest.raises(ValueError, match="'x'"):
        sf.fit(_level, [{"x": s["y"]} for s in silos])


def test_a_fit_without_an_algorithm_is_right_in_few_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the closed form, by a twelfth of the steps, and named in the result. SFVI has thousands of rounds."""
    monkeypatch.setattr("secure_fvi.fitting.PVI", lambda: sf.PVI(local_steps=80))
    silos = _rows(7, 40, 13)
    y = torch.cat([s["y"] for s in silos])
    precision = len(y) + 1 / 25
    result = sf.fit(_level, silos, compile=False, threads=1)
    assert result.algorithm == "pvi"
    assert result.converged is True
    assert result.aggregation["exchanges"] <= 40
    assert abs(float(result.posterior["mu"].mean) - float(y.sum()) / precision) < 0.1 * precision**-0.5
    assert float(result.posterior["mu"].sd) == pytest.approx(precision**-0.5, rel=0.1)


@pytest.mark.later
def test_where_a_local_fit_runs_off_sfvi_begins_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bound that no change of a site keeps stands for a fit that runs off. Two controls: who names partitioned VI, or
    has a folder of checkpoints, gets the refusal."""
    own = sf.PVI(local_steps=3, bound=1e-9)
    monkeypatch.setattr("secure_fvi.fitting.PVI", lambda: own)
    monkeypatch.setattr("secure_fvi.fitting.SFVI", lambda: sf.SFVI(iterations=5))
    silos, quick = _rows(7, 40, 13), {"compile": False, "threads": 1}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        result = sf.fit(_level, silos, **quick)  # type: ignore[call-overload]
    assert any("partitioned VI, the default here, was refused (silo '" in str(w.message) for w in heard)
    assert result.algorithm == "sfvi"
    for more in ({"algorithm": own}, {"checkpoint_dir": tmp_path / "run"}):
        with pytest.raises(AggregationError, match="change"):
            sf.fit(_level, silos, **quick, **more)  # type: ignore[call-overload]


def _by_year(x: Tensor, y: Tensor) -> None:
    a, b = pyro.sample("a", dist.Normal(0.0, 1e7)), pyro.sample("b", dist.Normal(0.0, 1e3))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(a + b * x, 1.0), obs=y)


@pytest.mark.parametrize("centred", [False, True])
def test_a_column_far_from_zero_is_refused_before_many_rounds(centred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A calendar year beside a wide prior: SFVI would take minutes, and not converge. The control: the same
    column about its centre, where SFVI is tried."""
    monkeypatch.setattr("secure_fvi.fitting.PVI", lambda: sf.PVI(bound=1e-9))
    monkeypatch.setattr("secure_fvi.fitting.SFVI", lambda: sf.SFVI(iterations=5))
    year = torch.arange(1990.0, 2020.0).double()
    silos = [{"x": year[k::3] - (2005 if centred else 0), "y": (year[k::3] - 2005) / 9} for k in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)
        if centred:
            assert sf.fit(_by_year, silos, compile=False, threads=1).algorithm == "sfvi"
        else:
            with pytest.raises(BoundError, match="Of its columns 'x' are far from 0"):
                sf.fit(_by_year, silos, compile=False, threads=1)


def _flat(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def test_a_prior_that_partitioned_vi_cannot_start_from_is_sfvis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: who names partitioned VI gets the refusal."""
    monkeypatch.setattr("secure_fvi.fitting.SFVI", lambda: sf.SFVI(iterations=5))
    silos, quick = _rows(7, 40, 13), {"compile": False, "threads": 1}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert sf.fit(_flat, silos, **quick).algorithm == "sfvi"  # type: ignore[call-overload]
    assert any("was refused (the prior of the global sites has no Gaussian" in str(w.message) for w in heard)
    with (
        pytest.warns(SecureFVIWarning, match="no finite centre"),
        pytest.raises(InputError, match="cannot start from it; SFVI can"),
    ):
        sf.fit(_flat, silos, sf.PVI(), **quick)  # type: ignore[call-overload]


def test_where_sfvi_runs_off_it_begins_anew_at_a_lower_rate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps of ten sds leave the bound, of two do not. Controls: who names the
    algorithm, or has a folder of checkpoints, gets the refusal; so do data of which a lower rate mends nothing."""
    fast, silos = sf.SFVI(iterations=6, learning_rate=10.0, bound=1e5), _rows(7, 40, 13)
    model, quick = sf.FederatedModel(_level, "r", start={"mu": 2.0}), {"compile": False, "threads": 1}
    monkeypatch.setattr("secure_fvi.fitting.SFVI", lambda: fast)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        assert sf.fit(model, silos, **quick).rounds == 6  # type: ignore[call-overload]
    said = [str(w.message) for w in heard]
    assert sum("SFVI, the default here, ran off after" in one and "its learning rate, 2" in one for one in said) == 1
    for more in ({"algorithm": fast}, {"checkpoint_dir": tmp_path / "run"}):
        with pytest.raises(AggregationError, match="exceeds the declared bound"):
            sf.fit(model, silos, **quick, **more)  # type: ignore[call-overload]
    monkeypatch.setattr("secure_fvi.fitting.SFVI", lambda: sf.SFVI(iterations=6, bound=1e-9))
    with pytest.raises(AggregationError, match="exceeds the declared bound"):
        sf.fit(model, silos, **quick)  # type: ignore[call-overload]


@pytest.mark.slow
def test_sfvi_of_many_dimensions_does_not_run_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logistic regression of 80 columns. The control: entries of long rows of the scale matrix take steps as those of
    short ones, and the bound is lost by orders."""
    rng = torch.Generator().manual_seed(0)
    silos = [{"x": torch.randn(100, 80, generator=rng), "y": torch.rand(100, generator=rng).round()} for _ in range(3)]

    def program(x: torch.Tensor, y: torch.Tensor) -> None:
        b = pyro.sample("b", dist.Normal(torch.zeros(80), 1.0).to_event(1))
        with pyro.plate("r", len(y)):
            pyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)

    def worst(long_row: int) -> float:
        monkeypatch.setattr("secure_fvi.algorithms.structured._LONG_ROW", long_row)
        told: list[float] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sf.fit(
                program, silos, sf.SFVI(iterations=300), sf.Plain(), compile=False, threads=1,
                on_round=lambda step: told.append(step.objective),
            )  # fmt: skip
        return max(map(abs, told[-100:]))

    assert worst(4) < 400
    assert worst(10**6) > 2000
