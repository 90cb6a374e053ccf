"""Predictors from Pyro programs."""

from __future__ import annotations

import pyro
import pytest
import torch
from pyro.distributions import Beta, HalfNormal, Normal, Poisson
from torch import Tensor

import secure_fvi as sf
from secure_fvi.algorithms.vertical import Bernoulli, Predictor, Vertical, grouped_slopes, linear
from secure_fvi.algorithms.vertical.predictors import check_predictor, check_predictor_at_silo
from secure_fvi.errors import DataError, InputError
from secure_fvi.trees import Params

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
LEVEL = torch.tensor([0, 1, 0, 1, 1, 0])


def test_linear() -> None:
    predictor = Predictor(linear(scale=2.0), {"x": X})
    theta = torch.tensor([0.5, -1.0, 2.0])
    eta, log_prior = predictor.evaluate(theta, {}, {"x": X})
    torch.testing.assert_close(eta, (X @ theta)[:, None])
    torch.testing.assert_close(log_prior, Normal(0.0, 2.0).log_prob(theta).sum())


def test_linear_with_columns() -> None:
    predictor = Predictor(linear(4), {"x": X}, columns=4)
    theta = torch.arange(12.0)
    torch.testing.assert_close(predictor.evaluate(theta, {}, {"x": X})[0], X @ theta.reshape(3, 4))


def test_grouped_slopes() -> None:
    rows = {"x": X, "level": LEVEL}
    predictor = Predictor(grouped_slopes(2), rows)
    theta = 0.1 * torch.arange(float(predictor.n))
    values = predictor.constrain(theta, {})
    eta, log_prior = predictor.evaluate(theta, {}, rows)
    expected = torch.stack([X[i] @ values["beta"][LEVEL[i]] for i in range(6)])
    torch.testing.assert_close(eta[:, 0], expected)
    by_hand = (
        Normal(0.0, 1.0).log_prob(values["mu"]).sum()
        + (HalfNormal(1.0).log_prob(values["sigma"]) + values["sigma"].log()).sum()
        + Normal(values["mu"], values["sigma"]).log_prob(values["beta"]).sum()
    )
    torch.testing.assert_close(log_prior, by_hand)


def test_points_and_transforms() -> None:
    def program(x: Tensor) -> Tensor:
        weight = pyro.param("weight", torch.ones(3, 2))
        share = pyro.sample("share", Beta(2.0, 2.0))
        return torch.tanh(x @ weight) @ torch.stack([share, 1 - share])

    predictor = Predictor(program, {"x": X})
    assert predictor.n == 1
    assert set(predictor.points) == {"weight"}
    torch.testing.assert_close(predictor.constrain(predictor.start, predictor.points)["share"], torch.tensor(0.5))
    doubled = {"weight": 2 * predictor.points["weight"]}
    expected = torch.tanh(X @ torch.full((3, 2), 2.0)).mean(-1, keepdim=True)
    torch.testing.assert_close(predictor.evaluate(predictor.start, doubled, {"x": X})[0], expected)


def _started_at_a_row(x: Tensor) -> Tensor:
    slope = pyro.sample("slope", Normal(x[0], 1.0).to_event(1))
    return x @ (slope * pyro.param("scale", lambda: x.std(0)))


def test_a_start_follows_from_made_data() -> None:
    """Equal for any rows, also where the program would begin at one of them."""
    one, other = (Predictor(_started_at_a_row, {"x": rows}) for rows in (X, 7 * X))
    assert torch.equal(one.start, other.start)
    assert torch.equal(one.points["scale"], other.points["scale"])


def _sorted(x: Tensor) -> Tensor:
    return x.sort(0).values[:, 0] * pyro.sample("slope", Normal(0.0, 1.0))


def _counted(level: Tensor) -> Tensor:
    share = (level == 1).double().mean()
    return (level - share) * pyro.sample("slope", Normal(0.0, 1.0))


def _drawn(x: Tensor) -> Tensor:
    return x[:, 0] * pyro.sample("slope", Normal(0.0, 1.0)) + torch.randn(len(x))


def _prior_of_rows(x: Tensor) -> Tensor:
    return x @ pyro.sample("slope", Normal(torch.zeros(3), x.std(0)).to_event(1))


def _unmappable(x: Tensor) -> Tensor:
    slope = pyro.sample("slope", Normal(0.0, 1.0))
    return x[:, 0] * slope if bool((x > 0).all()) else -x[:, 0] * slope


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("program", "rows", "words"),
    [
        (_sorted, {"x": X}, "depends on other rows"),
        (_counted, {"level": LEVEL}, "depends on other rows"),
        (_drawn, {"x": X}, "another eta each time"),
        (_prior_of_rows, {"x": X}, "prior of its sites depends on rows"),
    ],
)
def test_coupled_programs_are_refused_on_made_data(program: object, rows: Params, words: str, alone: bool) -> None:
    predictor = Predictor(program, rows)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=words):
        check_predictor(predictor, alone)


def test_a_program_that_vmap_cannot_map_is_refused_where_rows_are_evaluated_alone() -> None:
    predictor = Predictor(_unmappable, {"x": X})
    check_predictor(predictor, False)
    with pytest.raises(InputError, match="evaluates each row alone"):
        check_predictor(predictor, True)


def test_what_only_a_silos_rows_show_is_refused_there() -> None:
    """Negative numbers, which made data have not; the message counts rows."""

    def program(x: Tensor) -> Tensor:
        return (x[:, 0] + (x < 0).double().sum()) * pyro.sample("slope", Normal(0.0, 1.0))

    predictor = Predictor(program, {"x": X})
    check_predictor(predictor, False)
    with pytest.raises(DataError, match="silo 'a': predictor: in 6 of 6 rows looked at"):
        check_predictor_at_silo(predictor, {"x": X}, "a")
    check_predictor_at_silo(predictor, {"x": X.abs()}, "a")


def test_what_eight_rows_do_not_show_is_seen_among_all() -> None:
    """A lag of 24 rows, which takes eight rows, and four, to themselves."""

    def program(x: Tensor) -> Tensor:
        return x.roll(24, 0)[:, 0] * pyro.sample("slope", Normal(0.0, 1.0))

    rows = {"x": torch.randn(48, 1, generator=torch.Generator().manual_seed(2))}
    predictor = Predictor(program, rows)
    few = torch.linspace(0, 47, 8).round().long()
    check_predictor_at_silo(predictor, {"x": rows["x"][few]}, "a")  # the control: these alone agree
    with pytest.raises(DataError, match=r"predictor: in \d+ of \d+ rows looked at, a row of eta depends on other rows"):
        check_predictor_at_silo(predictor, rows, "a")


@pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")
def test_what_rows_share_comes_by_sf_shared() -> None:
    """The remedy: the numbers that a program would have worked out itself."""

    def program(x: Tensor, mean: Tensor) -> Tensor:
        return (x - mean) @ pyro.sample("slope", Normal(torch.zeros(3), 1.0).to_event(1))

    silos = [{"x": X, "mean": sf.Shared(X.mean(0))}, {"x": X}]
    result = sf.fit(
        sf.Columns(Bernoulli(), (X[:, 0] > 0).double(), [program, linear()]), silos, Vertical(rounds=3), sf.Plain()
    )
    eta = result.local["silo-1"].eta({"x": X.mean(0, keepdim=True)}, 2)
    torch.testing.assert_close(eta, torch.zeros(2, 1, 1))


def _by_record(x: Tensor) -> Tensor:
    return pyro.sample("u", Normal(torch.zeros(len(x)), 1.0).to_event(1))


def _observed(x: Tensor) -> Tensor:
    pyro.sample("y", Normal(0.0, 1.0), obs=x[0, 0])
    return x[:, 0]


def _discrete(x: Tensor) -> Tensor:
    return x[:, 0] * pyro.sample("k", Poisson(1.0))


def _wrong_shape(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("program", "word"),
    [(_by_record, "grows"), (_observed, "observed"), (_discrete, "discrete"), (_wrong_shape, "shape")],
)
def test_programs_that_are_no_predictors(program: object, word: str) -> None:
    with pytest.raises(InputError, match=word):
        Predictor(program, {"x": X})  # type: ignore[arg-type]
