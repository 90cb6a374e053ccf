"""Mistakes in arguments, options and data are refused before the first round, in one line that says what to write.

Programs' own mistakes are in tests/contracts/test_programs.py, wrong values of columns in test_wrong_data.py beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import secure_fvi as sf
from secure_fvi.algorithms.vertical import Gaussian, MeanField
from secure_fvi.errors import AggregationError, InputError

pytestmark = pytest.mark.filterwarnings("ignore::secure_fvi.errors.SecureFVIWarning")  # runs of a round or two
_rng = torch.Generator().manual_seed(0)


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_rng)


def level(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


PLAIN = [{"y": _draw(9)} for _ in range(3)]
WIDE = [{"x": _draw(9, 2)} for _ in range(3)]
_net = nn.Linear(2, 2)
_features: Callable[..., Tensor] = lambda rows: rows["y"]  # noqa: E731
Make = Callable[[], Any]

OPTIONS: dict[str, tuple[Make, str]] = {
    "a family by its scale": (
        lambda: sf.SFVI(local_family="diagonal"),  # type: ignore[arg-type]
        "local_family must be Conditional(...) or Amortised(...), not 'diagonal'; write Conditional(scale='diagonal')",
    ),
    "a family by its name": (lambda: sf.PVI(silo_family="conditional"), "write Conditional(...) of secure_fvi"),  # type: ignore[arg-type]
    "a family's class": (lambda: sf.SFVI(local_family=sf.Amortised), "not the class Amortised itself; write"),  # type: ignore[arg-type]
    "an auxiliary by name": (
        lambda: sf.Vertical(auxiliary="amortised"),  # type: ignore[arg-type]
        "write Amortised(...) of secure_fvi.algorithms.vertical",
    ),
    "an auxiliary by its class": (lambda: sf.Vertical(auxiliary=MeanField), "write MeanField(...) of"),  # type: ignore[arg-type]
    "the other Amortised": (
        lambda: sf.Vertical(auxiliary=sf.Amortised(_net, _features)),  # type: ignore[arg-type]
        "not a value of type Amortised; these are of secure_fvi.algorithms.vertical",
    ),
    "an encoder that is none": (lambda: sf.Amortised("net", _features), "encoder must be Module(...), not 'net'"),  # type: ignore[arg-type]
    "features that are none": (lambda: sf.Amortised(_net, "y"), "features must be a function, not 'y'"),  # type: ignore[arg-type]
    "an optimiser's class": (lambda: sf.SFVI(optimizer=torch.optim.Adam), "not the class Adam itself"),  # type: ignore[arg-type]
    "its options as a pair": (lambda: sf.SFVI(optimizer_options=(0.9, 0.99)), "optimizer_options must be a dict"),  # type: ignore[arg-type]
    "rounds as a tensor": (lambda: sf.PVI(rounds=torch.tensor(3)), "not a value of type Tensor"),  # type: ignore[arg-type]
    "rounds as a text": (lambda: sf.PVI(rounds="3"), "rounds must be a whole number of at least 1, not '3'"),  # type: ignore[arg-type]
    "a switch as a text": (lambda: sf.SFVIAvg(scale_entropy="no"), "scale_entropy must be True or False, not 'no'"),  # type: ignore[arg-type]
    "a schedule of none": (lambda: sf.PVI(schedule=None), "schedule None is unknown; choose synchronous"),  # type: ignore[arg-type]
    "a warm start as a number": (lambda: sf.SFVI(warm_start=3), "warm_start must be WarmStart(...), not 3"),  # type: ignore[arg-type]
    "a coupling of 1": (lambda: sf.Conditional(coupling=1), "coupling must be True or False or 'auto', not 1"),  # type: ignore[arg-type]
    "a cohort as a text": (lambda: sf.Masked(min_cohort="2"), "min_cohort must be a whole number"),  # type: ignore[arg-type]
    "a cohort and a half": (lambda: sf.Masked(min_cohort=2.5), "min_cohort must be a whole number"),  # type: ignore[arg-type]
    "a cohort of True": (lambda: sf.Homomorphic(min_cohort=True), "min_cohort must be a whole number"),
    "a share of nan": (lambda: sf.Masked(lost=float("nan")), "lost must lie in [0, 1), not nan"),
    "a scheme by number": (lambda: sf.Homomorphic(scheme=1), "scheme must be a text, not 1"),  # type: ignore[arg-type]
    "epsilon as a text": (lambda: sf.RecordDP(epsilon="1"), "epsilon must be positive and finite, not '1'"),  # type: ignore[arg-type]
    "epsilon of True": (lambda: sf.SiloDP(epsilon=True), "epsilon must be positive and finite, not True"),
    "retries as a float": (lambda: sf.SiloDP(epsilon=1.0, retries=2.0), "retries must be a whole number"),  # type: ignore[arg-type]
    "a ledger's number": (lambda: sf.Books(path=3), "path must be"),  # type: ignore[arg-type]
    "a prior's scale as a text": (lambda: Gaussian(intercept_scale="1"), "intercept_scale must be positive"),  # type: ignore[arg-type]
    "one predictor for all": (lambda: sf.Columns(Gaussian(), _draw(9), predictors=level), "predictors must be a list"),  # type: ignore[arg-type]
    "a response of words": (lambda: sf.Columns(Gaussian(), ["low"] * 9), "the response must be a tensor"),  # type: ignore[arg-type]
}  # fmt: skip
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "an algorithm's class": ({"algorithm": sf.SFVI}, "algorithm must be one, such as sf.PVI(), not the class SFVI"),
    "privacy as a number": ({"privacy": 1.0}, "privacy must be sf.RecordDP(...), sf.SiloDP(...) or None, not 1.0"),
    "sums by name": ({"aggregation": "masked"}, "give sf.Plain(), sf.Masked()"),
    "a seed as a text": ({"seed": "1"}, "seed must be a whole number"),
    "progress that is none": ({"progress": "x"}, "progress must be True, False or None, not 'x'"),
    "a listener that is none": ({"on_round": 3}, "on_round must be a function or None, not 3"),
    "names in one text": ({"silo_ids": "abc"}, "silo_ids must be a list or None, not 'abc'"),
    "names in a dict": ({"silo_ids": {"a": 1, "b": 2, "c": 3}}, "silo_ids must be a list"),
    "numbers for names": ({"silo_ids": [1, 2, 3]}, "silo ids are texts, not int: 1"),
    "two of a name": ({"silo_ids": ["a", "b", "a"]}, "two silos have the id 'a'"),
    "no threads": ({"threads": 0}, "threads must be 'auto' or a whole number of at least 1, not 0"),
    "all threads": ({"threads": "all"}, "threads must be 'auto' or"),
    "a type by name": ({"dtype": "float32"}, "dtype must be torch.float32 or torch.float64, not 'float32'"),
    "compile by a text": ({"compile": "no"}, "compile must be"),
    "a ledger's path for books": ({"books": "a.sqlite"}, "books must be Books(...) or None, not 'a.sqlite'"),
    "a GPU on a machine without": ({"device": "cuda:99"}, "device 'cuda:99': PyTorch finds"),
    "a GPU by its number": ({"device": 0}, "device must be a text or device(...), not 0"),
    "a GPU as it is called": ({"device": "gpu"}, "device 'gpu' is none that runs use; give 'cpu' or 'cuda'"),
    "another maker's": ({"device": "mps"}, "device 'mps' is none that runs use"),
    "no device at all": ({"device": "meta"}, "device 'meta' is none that runs use"),
    "ids as a number": ({"record_ids": 3}, "record_ids must be a list"),
    "a folder that cannot be": ({"checkpoint_dir": "/proc/nowhere/x"}, "checkpoint_dir '/proc/nowhere/x': "),
    "time that runs back": ({"checkpoint_dir": "ck", "checkpoint_seconds": -1}, "checkpoint_seconds must be"),
    "resume as a text": ({"resume": "yes"}, "resume must be True or False, not 'yes'"),
    "a key as a text": ({"privacy": sf.SiloDP(epsilon=1.0), "noise_key": "k"}, "noise_key must be bytes"),
}  # fmt: skip


def _column(value: Any) -> list[dict[str, Any]]:
    return [{"y": value}, *PLAIN[1:]]


DATA: dict[str, tuple[Any, str]] = {
    "one that is masked": (_column(np.ma.masked_array(np.ones(9), mask=[True] * 2 + [False] * 7)), "is masked in 2 of"),
    "of another world": (_column(torch.ones(9, device="meta")), "give plain dense numbers"),
    "a column of a table": (_column(np.ones((9, 1))), "'y' has shape (1,) a record"),
    "a list": ([{"y": [1.0] * 9} for _ in PLAIN], "a list is a shared value; use torch.tensor or numpy.array"),
    "dates": (_column(np.arange(9).astype("datetime64[D]")), "'y' holds dates in 9 of 9 rows"),
    "a silo of nobody": ([*PLAIN, {"y": _draw(0)}], "silo 'silo-4' has no records; leave it out"),
    "a generator": ((s for s in PLAIN), "silos is a list of each silo's data, not generator"),
    "by name": ({f"s{j}": s for j, s in enumerate(PLAIN)}, "names go into silo_ids"),
    "tensors alone": ([s["y"] for s in PLAIN], "its data must be a dict of tensors or arrays by argument name"),
    "no silos": ([], "at least one silo"),
    "one silo": (PLAIN[:1], "masked sums need at least 3 silos, got 1"),
    "the model in their place": (level, "silos is a list of each silo's data, not function"),
}  # fmt: skip
COLUMNS: dict[str, tuple[Any, str]] = {
    "text": ([{"x": np.array(["a"] * 9)}, *WIDE[1:]], "silo 'silo-1': 'x' holds text in 9 of 9 rows"),
    "a list": ([{"x": [1.0] * 9}, *WIDE[1:]], "silo 'silo-1': give its columns as a dict of tensors or arrays"),
    "nothing": ([{}, *WIDE[1:]], "silo 'silo-1': give its columns"),
    "one column": ([{"x": _draw(9)}, *WIDE[1:]], "the linear predictor takes one argument, x (N, D), not x (9,)"),
    "other names": ([{"age": _draw(9)}, *WIDE[1:]], "not age (9,); one column is x (N, 1)"),
    "fewer people": ([{"x": _draw(8, 2)}, *WIDE[1:]], "silo 'silo-1' has 8 records, the response 9"),
}


def _refused(make: Make, words: str) -> None:
    with pytest.raises(InputError) as raised:
        make()
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("mistake", OPTIONS)
def test_an_option_of_the_wrong_kind_is_refused_where_it_is_given(mistake: str) -> None:
    _refused(*OPTIONS[mistake])


@pytest.fixture
def no_round(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def never(self: Any, *_: Any) -> None:
        raise AssertionError("a round was begun")

    with monkeypatch.context() as patched:
        patched.setattr("secure_fvi.driving.Run.__next__", never)
        yield


@pytest.mark.parametrize("mistake", ARGUMENTS)
@pytest.mark.usefixtures("no_round")
def test_an_argument_of_the_wrong_kind_is_refused(mistake: str) -> None:
    given, words = ARGUMENTS[mistake]
    _refused(lambda: sf.fit(level, PLAIN, **given), words)


@pytest.mark.parametrize("mistake", DATA)
@pytest.mark.usefixtures("no_round")
def test_data_of_the_wrong_kind_are_refused(mistake: str) -> None:
    data, words = DATA[mistake]
    _refused(lambda: sf.fit(level, data), words)


@pytest.mark.parametrize("mistake", COLUMNS)
@pytest.mark.usefixtures("no_round")
def test_columns_of_the_wrong_kind_are_refused(mistake: str) -> None:
    data, words = COLUMNS[mistake]
    _refused(lambda: sf.fit(sf.Columns(Gaussian(), torch.ones(9)), data), words)


def counts(age: Tensor, income: Tensor, y: Tensor) -> None:
    a, b = (pyro.sample(name, dist.Normal(0.0, 1.0)) for name in ("a", "b"))
    with pyro.plate("r", len(y)):
        pyro.sample("y", dist.Poisson(torch.exp(a * age + b * income)), obs=y)


def test_what_columns_on_raw_scales_did_is_said_with_their_names_and_what_to_do() -> None:
    """Years and hundreds in a Poisson rate: at 0.1 a coefficient the rate is beyond all numbers."""
    raw = [{"income": 600 + 100 * _draw(9), "age": 50 + 10 * _draw(9), "y": _draw(9).abs()} for _ in range(3)]
    raw = [{**s, "y": s["y"].round()} for s in raw]
    with pytest.raises(AggregationError) as raised:
        sf.fit(counts, raw, sf.SFVI(max_iterations=200), compile=False)
    assert "Of its columns 'income', 'age' are far from 0 or wide: subtract from each a centre" in str(raised.value)
    assert "counts stay, and their rate gets a factor of their size" in str(raised.value)
    fine = [{"income": s["income"] / 100 - 6, "age": s["age"] / 10 - 5, "y": s["y"]} for s in raw]
    assert sf.fit(counts, fine, sf.SFVI(iterations=2), compile=False).rounds == 2  # the remedy


def test_there_are_mistakes() -> None:
    assert len(OPTIONS) + len(ARGUMENTS) + len(DATA) + len(COLUMNS) >= 65


def test_the_controls_pass() -> None:
    """NumPy's numbers, arrays of any order, and names with spaces: none is a mistake."""
    algorithm = sf.SFVI(iterations=np.int64(1), learning_rate=np.float32(0.5))  # type: ignore[arg-type]
    assert type(algorithm.iterations) is int
    assert type(algorithm.learning_rate) is float
    assert sf.RecordDP(epsilon=np.float64(1)).epsilon == 1.0
    assert sf.Masked(bits=np.int64(32)).bits == 32  # type: ignore[arg-type]
    arrays = [{"y": s["y"].numpy()[::-1]} for s in PLAIN]
    names = np.array(["St. Mary's", "b c", "d/e"])
    given: dict[str, Any] = {"seed": np.int64(3), "silo_ids": names}
    done = sf.fit(level, arrays, algorithm, compile=False, **given)
    assert done.silos == sorted(names)
    assert done.seed == 3


def test_frames_and_masks_of_columns_are_columns() -> None:
    pd, x = pytest.importorskip("pandas"), WIDE[0]["x"].numpy()
    silos: list[Any] = [pd.DataFrame({"x[0]": x[:, 0], "x[1]": x[:, 1]}), {"x": x}, {"x": x > 0}]
    done = sf.fit(sf.Columns(Gaussian(), torch.ones(9)), silos, sf.Vertical(rounds=1), compile=False)
    assert done.rounds == 1


def test_a_folder_that_is_a_file_and_half_a_draw_are_refused(tmp_path: Path) -> None:
    done = sf.fit(level, PLAIN, sf.SFVI(iterations=1), compile=False)
    (tmp_path / "notes").write_text("mine")
    _refused(lambda: done.save(tmp_path / "notes"), "cannot be a folder")
    assert (tmp_path / "notes").read_text() == "mine"
    _refused(lambda: done.sample(1e3), "the number of draws must be a whole number of at least 1, not 1000.0")  # type: ignore[arg-type]
    assert done.sample(np.int64(2))["mu"].shape == (2,)  # type: ignore[arg-type]
