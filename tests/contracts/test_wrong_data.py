"""Data that do not fit the model are refused before the first round, by a line with the column and the count of rows.

The cases are made: each column of each model in each wrong coding that its support has, at 3 of 12 rows of one silo of
three. Every model also builds with the right data, so that none is refused whatever it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import secure_fvi as sf
from secure_fvi.errors import DataError, InputError
from secure_fvi.federated_model import read_data
from secure_fvi.fitting import build_parties

N, BAD = 12, 3
WHERE = torch.tensor([1, 4, 10])


class Case(NamedTuple):
    """A program, its right data, and wrong values by column."""

    fn: Callable[..., None]
    right: dict[str, Any]
    wrong: dict[str, list[Any]]  # by column: what is written into three rows


def _univariate(make: Callable[..., Any]) -> Callable[..., None]:
    """y_i from `make(level)`, level real."""

    def fn(y: Tensor) -> None:
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("r", len(y)):
            pyro.sample("y", make(level), obs=y)

    return fn


def _binomial(r: Tensor, n: Tensor) -> None:
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("r", len(r)):
        pyro.sample("y", dist.Binomial(n, logits=level), obs=r)


def _groups(g: Tensor, y: Tensor) -> None:
    with pyro.plate("groups", 3):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(level[g.long()], 1.0), obs=y)


def _two_way(g: Tensor, h: Tensor, y: Tensor) -> None:
    """Indexed in two axes, through arithmetic and through gather."""
    table = pyro.sample("table", dist.Normal(torch.zeros(4, 3), 1.0).to_event(2))
    shift = pyro.sample("shift", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("r", len(y)):
        mean = table[g + 1, h] + torch.gather(shift, 0, index=h)
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def _one_hot(g: Tensor, y: Tensor) -> None:
    level = pyro.sample("level", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("r", len(y)):
        mean = torch.nn.functional.one_hot(g, 3).to(level.dtype) @ level
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def _scaled(offset: Tensor, y: Tensor) -> None:
    """The exposure of a rate: its logarithm is not finite at 0."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Poisson((level + offset.log()).exp()), obs=y)


def _weighted(w: Tensor, y: Tensor) -> None:
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("r", len(y)), pyro.poutine.scale(scale=w):
        pyro.sample("y", dist.Normal(level, 1.0), obs=y)


def _weighted_latents(w: Tensor, y: Tensor) -> None:
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("r", len(y)), pyro.poutine.scale(scale=w):
        own = pyro.sample("own", dist.Normal(level, 1.0))
        pyro.sample("y", dist.Normal(own, 1.0), obs=y)


def _rooted(dose: Tensor, y: Tensor) -> None:
    """Finite at a dose of 0, and its gradient is not."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal((level * dose).abs().sqrt(), 1.0), obs=y)


def _unexposed(e: Tensor, y: Tensor) -> None:
    """Of nobody: a rate of exp(log 0) = 0 and no case, which has a density, and no gradient."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Poisson((level + e.log()).exp()), obs=y)


def _measured(sd: Tensor, y: Tensor) -> None:
    """Known standard errors, as in a meta-analysis."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(level, sd), obs=y)


def _several(y: Tensor) -> None:
    level = pyro.sample("level", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Bernoulli(logits=level).to_event(1), obs=y)


_rng = torch.Generator().manual_seed(0)
_u = torch.rand(N, generator=_rng)
_g = torch.arange(N) % 3
_simplex = torch.softmax(torch.randn(N, 3, generator=_rng), -1)
_counts = torch.tensor([[2.0, 1.0, 1.0], [0.0, 4.0, 0.0]]).repeat(N // 2, 1)
_eye = torch.eye(3)
_ONES = torch.ones(3)

CASES = {
    "bernoulli": Case(
        _univariate(lambda m: dist.Bernoulli(logits=m)), {"y": (_u > 0.5).double()}, {"y": [2.0, -1.0, 0.5, 99.0]}
    ),
    "bernoulli whole": Case(_univariate(lambda m: dist.Bernoulli(logits=m)), {"y": _g % 2}, {"y": [2, -1, 9]}),
    "three bernoullis": Case(_several, {"y": (_simplex > 0.3).double()}, {"y": [2.0, -9.0, 0.1]}),
    "binomial": Case(
        _binomial, {"r": _g.double(), "n": torch.full((N,), 5.0)}, {"r": [6.0, -1.0, 0.5], "n": [-1.0, -0.5]}
    ),
    "poisson": Case(_univariate(lambda m: dist.Poisson(m.exp())), {"y": _g.double()}, {"y": [-1.0, 0.5, 2.25, -999.0]}),
    "poisson whole": Case(_univariate(lambda m: dist.Poisson(m.exp())), {"y": _g}, {"y": [-1, -999]}),
    "geometric": Case(_univariate(lambda m: dist.Geometric(logits=m)), {"y": _g.double()}, {"y": [-1.0, 0.5]}),
    "negative binomial": Case(
        _univariate(lambda m: dist.NegativeBinomial(4.0, logits=m)), {"y": _g.double()}, {"y": [-2.0, 1.5]}
    ),
    "zero-inflated": Case(
        _univariate(lambda m: dist.ZeroInflatedPoisson(m.exp(), gate=torch.tensor(0.3))),
        {"y": _g.double()}, {"y": [-1.0, 0.5]},
    ),
    "categorical": Case(
        _univariate(lambda m: dist.Categorical(logits=m * torch.arange(3.0))), {"y": _g}, {"y": [3, -1, 99]}
    ),
    "categorical in floats": Case(
        _univariate(lambda m: dist.Categorical(logits=m * torch.arange(3.0))),
        {"y": _g.double()}, {"y": [3.0, 0.5, -1.0]},
    ),
    "ordered": Case(
        _univariate(lambda m: dist.OrderedLogistic(m, torch.tensor([-1.0, 1.0]))), {"y": _g}, {"y": [3, -1]}
    ),
    "one-hot": Case(
        _univariate(lambda m: dist.OneHotCategorical(logits=m * torch.arange(3.0))),
        {"y": _eye[_g]}, {"y": [_ONES, 0 * _ONES, 2 * _eye[0]]},
    ),
    "multinomial": Case(
        _univariate(lambda m: dist.Multinomial(4, logits=m * torch.arange(3.0))),
        {"y": _counts}, {"y": [2.0 * _ONES, torch.tensor([-1.0, 4.0, 1.0]), torch.tensor([0.5, 2.5, 1.0])]},
    ),
    "lognormal": Case(_univariate(lambda m: dist.LogNormal(m, 1.0)), {"y": _u + 0.1}, {"y": [0.0, -1.0]}),
    "gamma": Case(_univariate(lambda m: dist.Gamma(m.exp() + 1.0, 1.0)), {"y": _u + 0.1}, {"y": [0.0, -1.0]}),
    "exponential": Case(_univariate(lambda m: dist.Exponential(m.exp())), {"y": _u}, {"y": [-1.0, -999.0]}),
    "weibull": Case(_univariate(lambda m: dist.Weibull(m.exp(), 1.5)), {"y": _u + 0.1}, {"y": [0.0, -1.0]}),
    "half-normal": Case(_univariate(lambda m: dist.HalfNormal(m.exp())), {"y": _u}, {"y": [-1.0]}),
    "half-cauchy": Case(_univariate(lambda m: dist.HalfCauchy(m.exp())), {"y": _u}, {"y": [-0.5]}),
    "inverse gamma": Case(_univariate(lambda m: dist.InverseGamma(m.exp(), 1.0)), {"y": _u + 0.1}, {"y": [0.0, -1.0]}),
    "pareto": Case(_univariate(lambda m: dist.Pareto(1.0, m.exp())), {"y": _u + 1.5}, {"y": [0.5, 0.0]}),
    "beta": Case(
        _univariate(lambda m: dist.Beta(m.exp() + 1, 2.0)),
        {"y": _u * 0.9 + 0.05}, {"y": [0.0, 1.0, 1.5, -0.5, 50.0]},
    ),
    "uniform": Case(
        _univariate(lambda m: dist.TransformedDistribution(dist.Normal(m, 1.0), [dist.transforms.SigmoidTransform()])),
        {"y": _u * 0.9 + 0.05}, {"y": [-0.5, 1.5]},
    ),
    "dirichlet": Case(
        _univariate(lambda m: dist.Dirichlet(m.exp() * torch.ones(3) + 1)),
        {"y": _simplex}, {"y": [_ONES, torch.tensor([0.5, 0.7, -0.2]), 100 * _simplex[0]]},
    ),
    "groups": Case(_groups, {"g": _g, "y": _u}, {"g": [-1, 3, 99]}),
    "groups in floats": Case(_groups, {"g": _g.double(), "y": _u}, {"g": [-1.0, 3.0, 0.5]}),
    "two groupings": Case(_two_way, {"g": _g, "h": _g, "y": _u}, {"g": [3, -2], "h": [-1, 3]}),
    "one-hot groups": Case(_one_hot, {"g": _g, "y": _u}, {"g": [-1, 3]}),
    "exposure": Case(_scaled, {"offset": _u + 0.5, "y": _g.double()}, {"offset": [0.0, -1.0]}),
    "exposure of nobody": Case(_unexposed, {"e": _u + 0.5, "y": 0 * _u}, {"e": [0.0]}),
    "weights": Case(_weighted, {"w": _u, "y": _u}, {"w": [-1.0, -0.001]}),
    "weights of latents": Case(_weighted_latents, {"w": _u, "y": _u}, {"w": [-1.0, 0.0]}),
    "root": Case(_rooted, {"dose": _u + 0.5, "y": _u}, {"dose": [0.0]}),
    "standard errors": Case(_measured, {"sd": _u + 0.5, "y": _u}, {"sd": [0.0, -1.0]}),
}  # fmt: skip
NOT_FINITE = [float("nan"), float("inf"), -float("inf")]


def _cases() -> Iterator[Any]:
    for name, case in CASES.items():
        for column, values in case.wrong.items():
            for value in values:
                shown = value.tolist() if isinstance(value, Tensor) else value
                yield pytest.param(case, column, value, id=f"{name}: {column} = {shown}")
        for column, right in case.right.items():
            if right.is_floating_point():
                for value in NOT_FINITE:
                    yield pytest.param(case, column, value, id=f"{name}: {column} = {value}")


def _build(fn: Callable[..., None], *silos: Any, **options: Any) -> None:
    build_parties(sf.FederatedModel(fn, "r"), list(silos), sf.SFVI(iterations=1), sf.Plain(), **options)


def _refusal(fn: Callable[..., None], *silos: Any, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        _build(fn, *silos, **options)
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_a_gradient_that_no_row_has_is_the_programs_own() -> None:
    """A mixture that is written as most people do, a rate of 0 where z is 1: its rows are all right."""

    def inflated(y: Tensor) -> None:
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("r", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.3))
            pyro.sample("y", dist.Poisson((1 - z) * level.exp()), obs=y)

    said = _refusal(inflated, *[{"y": _g.double()}] * 3)
    assert "the program's log density has a gradient that is not finite" in said
    assert f"in every one of {N} rows" in said
    assert "take them out" not in said


def test_slopes_of_raw_units_begin_where_their_gradient_is_finite() -> None:
    """Incomes of millions, whose slope of 1e-6 or so is 0 at the start: a tenth beside it every exp is infinite."""

    def weibull(income: Tensor, years: Tensor) -> None:
        shape = pyro.sample("shape", dist.Gamma(2.0, 1.0))
        slope = pyro.sample("slope", dist.Normal(0.0, 1e-6))
        with pyro.plate("r", len(years)):
            off = torch.log(years) - slope * income
            pyro.factor("likelihood", torch.log(shape) - torch.log(years) + shape * off - torch.exp(shape * off))

    rows = {"income": 2.5e6 + 8e5 * _g.double(), "years": _g.double().exp()}
    _build(weibull, *[rows] * 3)


def test_there_are_a_hundred() -> None:
    assert len(list(_cases())) >= 100


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_right_data_are_taken(case: Case) -> None:
    _build(case.fn, case.right, case.right, case.right)


@pytest.mark.parametrize(("case", "column", "value"), list(_cases()))
def test_wrong_coding(case: Case, column: str, value: Any) -> None:
    """Three rows of one silo's column: the line names silo, column and count, and quotes no value."""
    bad = case.right[column].clone()
    bad[WHERE] = torch.as_tensor(value, dtype=bad.dtype)
    said = _refusal(case.fn, case.right, {**case.right, column: bad}, case.right)
    assert said.startswith("silo 'silo-2':")
    assert f"'{column}'" in said
    assert f"{BAD} of {N} rows" in said


# ---- tables ----

_normal = _univariate(lambda m: dist.Normal(m, 1.0))
_Y = _u.numpy().astype(float)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (np.array([*"abcdefghijkl"]), "'y' holds text in 12 of 12 rows; code it as numbers"),
        (np.array([1.0, "n/a", None, *range(9)], dtype=object), "no numbers in 1 of 12 rows"),
        (np.array([1.0, None, None, *range(9)], dtype=object), "'y' holds NaN or infinite values in 2 of 12 rows"),
        (
            np.array([1.0, None, np.datetime64("NaT"), *range(9)], dtype=object),
            "NaN or infinite values in 2 of 12 rows",
        ),
        (np.array([1.0, np.ones(2), *range(10)], dtype=object), "no numbers in 1 of 12 rows"),
        (np.array(["2026-01-01"] * N, dtype="datetime64[D]"), "'y' holds dates in 12 of 12 rows"),
        (_Y + 1j, "'y' holds complex numbers in 12 of 12 rows"),
        (torch.complex(_u, _u), "'y' is a tensor of torch.complex128"),
        (torch.eye(N).to_sparse(), "'y' is a tensor of torch.float64, torch.sparse_coo"),
        (np.array(3.0), "'y' has no first dimension"),
        (_u[:0], "has no records"),
        (_u[:, None], "'y': its data have shape (2, 1) where the distribution has (2,)"),
        (_u.reshape(3, 4), "'y': its data have shape (2, 4)"),
        ([0.1] * N, "no tensor in its data; each record needs one row of at least one tensor ('y': a list"),
        (np.where(np.arange(N) < 2, 1e300, 1.0), "'y' holds NaN or infinite values in 2 of 12 rows"),
        (np.array([f"{k},5" for k in range(N)]), "'y' holds text in 12 of 12 rows; code it as numbers"),
        (np.array([Decimal(1), "1.5", *range(10)], dtype=object), "no numbers in 1 of 12 rows"),
        (np.array([10**400, *range(11)], dtype=object), "'y' holds whole numbers of 2^63 and more in 1 of 12 rows"),
        (np.array([2**63] * N, dtype=np.uint64), "'y' holds whole numbers of 2^63 and more in 12 of 12 rows"),
        (torch.tensor([2**63 + 5] * N, dtype=torch.uint64), "whole numbers of 2^63 and more in 12 of 12 rows"),
        (np.array([(1.0, 2.0)] * N, dtype="f8,f8"), "'y' holds several fields a row in 12 of 12 rows"),
        (torch.nested.nested_tensor([_u, _u], layout=torch.jagged), "'y' is a tensor of nested; give plain dense"),
        (tuple(range(N)), "each record needs one row of at least one tensor ('y': a list"),
        (range(N), "each record needs one row of at least one tensor ('y': a list"),
    ],
)
def test_malformed_column(column: Any, words: str) -> None:
    wide = column is not None and isinstance(column, np.ndarray) and column.dtype == np.float64 and column.max() > 1e299
    assert words in _refusal(_normal, *[{"y": column}] * 3, dtype=torch.float32 if wide else torch.float64)


class _Lazy:
    """As much of polars' lazy frame as matters."""

    columns = ("y",)

    def __getitem__(self, name: str) -> None:
        raise TypeError("not subscriptable")

    def collect(self) -> None: ...


def test_decimals_are_numbers() -> None:
    """As databases give them."""
    _build(_normal, *[{"y": np.array([Decimal("0.25")] * N, dtype=object)}] * 3)


def test_objects_are_the_numbers_that_they_are() -> None:
    """As frames with gaps keep labels and truth values: whole numbers index, truth values mask."""

    def masked(g: Tensor, seen: Tensor, y: Tensor) -> None:
        level = pyro.sample("level", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("r", len(y)), pyro.poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(level[g], 1.0), obs=y)

    seen = np.array([True, False] * (N // 2), dtype=object)
    _build(masked, *[{"g": np.array(_g.tolist(), dtype=object), "seen": seen, "y": _u}] * 3)


def test_a_distribution_is_called_by_its_own_name() -> None:
    """Not by that of what it is made from."""
    wrong = {"y": torch.where(torch.arange(N) < BAD, -1.0, _u + 1.1)}
    for make, name in [(dist.LogNormal, "LogNormal"), (dist.Pareto, "Pareto"), (dist.Weibull, "Weibull")]:
        said = _refusal(_univariate(lambda m, make=make: make(torch.ones(()), m.exp())), *[wrong] * 3)
        assert f"{name} takes numbers" in said


@pytest.mark.parametrize(
    ("silos", "words"),
    [
        ([{"y": _u}, {"y": _u[:, None]}], "'y' has shape () a record and type torch.float64 at silo 'silo-1'"),
        ([{"y": _u}, {"y": _g}], "but () and torch.int64 at silo 'silo-2'"),
        ([{"y": _u}, {"Y": _u}], "hold different tensors: ['y'] and ['Y']"),
        (
            [{"y": _u, "k": [1]}, {"y": _u, "k": [2]}],
            "shared value 'k' differs between silos 'silo-1' and 'silo-2'; a list",
        ),
        ([{"y": _u}, [1, 2]], "silo 'silo-2': its data must be a dict of tensors"),
        (
            [{"y": _u}, _Lazy()],
            "a dict of arrays or a frame in memory, not a _Lazy; collect() or to_pandas() makes one",
        ),
        ([{"y": _u}, None], "silo 'silo-2': its data must be a dict of tensors"),
        ([{"y": _u, 3: _u}], "columns are named by the model function's arguments, not by 3"),
        ([{"y": _u, "z": _u}], "does not take the data's names ['y', 'z']"),
        ([{"y": _u, "z": _u[:4]}], "'z' has 4 rows and 'y' has 12"),
    ],
)
def test_malformed_silos(silos: list[Any], words: str) -> None:
    assert words in _refusal(_normal, *silos)


@pytest.mark.parametrize("silos", [{"a": {"y": _u}}, _u, "silos", None, 3])
def test_silos_that_are_no_list(silos: Any) -> None:
    with pytest.raises(InputError, match="silos is a list of each silo's data"):
        sf.fit(sf.FederatedModel(_normal, "r"), silos)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (
            [torch.arange(N), torch.tensor([0, 1, *range(20, 30)])],
            "in 2 rows of silo 'silo-1', 2 rows of silo 'silo-2'",
        ),
        (
            [torch.arange(N), torch.arange(N) + 20.5],
            "silo 'silo-2': record_ids are no whole numbers of at least 0 in 12",
        ),
        (
            [torch.arange(N) - 2, torch.arange(N) + 20],
            "silo 'silo-1': record_ids are no whole numbers of at least 0 in 2",
        ),
        ([torch.arange(N)[:, None], torch.arange(N)], "silo 'silo-1': record_ids must be whole numbers"),
        (
            [torch.arange(N) + 2.0**60, torch.arange(N)],
            "silo 'silo-1': record_ids are floats of too many digits to be told apart in 12 of 12 rows",
        ),
        (
            [(torch.arange(N) + 2.0**24).float(), torch.arange(N)],
            "silo 'silo-1': record_ids are floats of too many digits to be told apart in 12 of 12 rows",
        ),
        ([["a"] * N, torch.arange(N)], "silo 'silo-1': record_ids must be whole numbers"),
        ([torch.arange(N), torch.arange(3) + 50], "silo 'silo-2': 3 record ids for 12 records"),
    ],
)
def test_wrong_record_ids(ids: list[Any], words: str) -> None:
    assert words in _refusal(_normal, {"y": _u}, {"y": _u}, record_ids=ids)


@pytest.mark.parametrize(
    ("ids", "first"),
    [(np.float64, 2.0**53), (np.float32, 2.0**24), (np.float16, 2.0**11), (object, 2.0**53)],
)
def test_groups_by_floats_that_are_not_told_apart(ids: Any, first: float) -> None:
    """Below, as floats with fractions, and as whole numbers of as many digits they are."""
    model = sf.FederatedModel(_normal, group="patient")

    def groups(start: Any, kind: Any) -> int:
        column = np.array([start + k for k in range(N)], dtype=kind)
        return len(model.prepared({"a": {"patient": column, "y": _Y}})["a"]["y"])

    with pytest.raises(DataError, match=r"'patient' holds floats of too many digits to be told apart in 12 of 12 rows"):
        groups(first, ids)
    assert groups(int(first), np.int64) == groups(first / 2 - N, ids) == N
    assert groups(0.5, ids) == N


def test_a_file_joined_to_itself() -> None:
    """Refused where measurements say so; taken with ids of their own, and where values are codes that recur."""
    twice = {"y": torch.cat([_u, _u])}
    assert "12 of 24 rows repeat another one in all of 'y'" in _refusal(_normal, {"y": _u}, twice)
    ids = [torch.arange(N), torch.arange(2 * N) + 100]
    _build(_normal, {"y": _u}, twice, record_ids=ids)
    _build(_normal, {"y": _u}, {"y": _g.repeat(2).double()})
    _build(_normal, {"y": _u}, {"y": torch.cat([_u, _u[:5]])})


def _gain(score: Tensor) -> None:
    gain = pyro.sample("gain", dist.Normal(0.0, 10.0))
    with pyro.plate("r", len(score)):
        pyro.sample("y", dist.Normal(gain, 5.0), obs=(score[:, 1] - score[:, 0]).to(torch.get_default_dtype()))


def _gain_by_row(score: Tensor) -> None:
    gain = pyro.sample("gain", dist.Normal(0.0, 10.0))
    with pyro.plate("r", len(score)):
        gained = torch.vmap(lambda one: one[1] - one[0])(score)
        pyro.sample("y", dist.Normal(gain, 5.0), obs=gained.to(torch.get_default_dtype()))


_SCORES = np.array([[20, 15], [10, 30], [40, 41]] * 4)  # four of twelve go down


def test_arithmetic_that_wraps_round() -> None:
    """Columns of eight bits side by side stay so: 15 - 20 is 251 there. What keeps within 0 to 255 is taken."""
    ups, down = torch.from_numpy(np.sort(_SCORES, 1).astype(np.uint8)), torch.from_numpy(_SCORES.astype(np.uint8))
    assert (down[:, 1] - down[:, 0])[0] == 251  # what a fit would go by
    said = _refusal(_gain, {"score": ups}, {"score": down})
    assert "silo 'silo-2': sub() of whole numbers of eight bits, from 'score', goes past what these hold" in said
    assert "in 4 of 12 rows" in said
    assert "from 'score', goes past what these hold in 4 of 12 rows" in _refusal(_gain_by_row, {"score": down})
    _build(_gain, {"score": ups}, {"score": ups})
    _build(_gain_by_row, {"score": ups}, {"score": ups})
    _build(_gain, {"score": down.long()}, {"score": down.long()})


def _factors(smokes: Tensor, drinks: Tensor, y: Tensor) -> None:
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(slope * (smokes + drinks), 1.0), obs=y)


def test_truth_values_that_are_added_up() -> None:
    """True + True is True, where a person has two risks. What is true of nobody twice is taken, as are numbers."""
    yes, no = torch.arange(N) % 3 == 0, torch.arange(N) % 3 == 1
    once, both = {"smokes": yes, "drinks": no, "y": _u}, {"smokes": yes, "drinks": yes, "y": _u}
    said = _refusal(_factors, once, both)
    assert "silo 'silo-2': add() of truth values, from 'drinks', 'smokes', goes past what these hold" in said
    assert "in 4 of 12 rows" in said
    _build(_factors, once, once)
    _build(_factors, *({k: v.double() for k, v in d.items()} for d in (once, both)))


def test_groups_of_eight_bits_are_whole_numbers() -> None:
    """A frame's column of eight bits, laid out by group, is what it is without groups."""
    model = sf.FederatedModel(_gain, group="patient")
    given = {"patient": np.repeat(np.arange(6), 2), "score": _SCORES[:, 0].astype(np.uint8)}
    score = model.prepared({"a": given})["a"]["score"]
    assert score.shape == (6, 2)
    assert score.dtype == torch.int64
    assert int((score[:, 1] - score[:, 0]).min()) == -20


@pytest.mark.parametrize("look_up", [lambda a, g: torch.vmap(lambda one: a[one])(g), torch.take, Tensor.take])
def test_labels_that_are_looked_up_a_row_at_a_time(look_up: Callable[..., Tensor]) -> None:
    """-1 for what is missing takes the last group's value, within torch.vmap too, and by torch.take."""

    def fn(g: Tensor, y: Tensor) -> None:
        level = pyro.sample("level", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("r", len(y)):
            pyro.sample("y", dist.Normal(look_up(level, g), 1.0), obs=y)

    right, wrong = {"g": torch.arange(N) % 3, "y": _u}, {"g": torch.arange(N) % 3 - 1, "y": _u}
    assert look_up(torch.tensor([1.0, 2.0, 5.0]), wrong["g"])[0] == 5.0  # without a word
    _build(fn, right, right)
    assert "silo 'silo-2': 'g' points outside of what it indexes in 4 of 12 rows" in _refusal(fn, right, wrong)


def test_shared_numbers_of_eight_bits_do_not_wrap_round() -> None:
    """3 - 5 would be 254 in a table of eight bits, which all silos know."""
    table = sf.Shared(torch.tensor([[5, 3], [2, 9]]).byte())
    schema, _ = read_data({"y": torch.ones(3), "table": table}, "here", torch.float64)
    shared = schema.constants["table"]
    assert (shared[:, 1] - shared[:, 0]).tolist() == [-2, 7]
    assert (table.tensor[:, 1] - table.tensor[:, 0]).tolist() == [254, 7]
