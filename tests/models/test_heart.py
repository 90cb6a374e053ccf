"""The heart disease loader: documented columns, bad lines refused by number, scales of the training records alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from secure_fvi.algorithms.vertical import Predictor
from secure_fvi.errors import InputError
from secure_fvi.models.heart import HEADER, bayesian_network, feature_names, load, split_network, standardise

ROW = "54,M,NAP,150,195,0,Normal,122,N,0.5,Up,0"
SICK = "58,F,ASY,0,0,1,ST,99,Y,-1,Flat,1"


def folder(tmp_path: Path, *rows: str, header: str = ",".join(HEADER)) -> Path:
    (tmp_path / "heart_failure_prediction").mkdir(exist_ok=True)
    (tmp_path / "heart_failure_prediction" / "heart.csv").write_text("\n".join([header, *rows]) + "\n")
    return tmp_path


def test_rows_become_columns_by_silo(tmp_path: Path) -> None:
    data = load(folder(tmp_path, ROW, SICK))
    assert [tuple(x.shape) for x in data.x] == [(2, 9), (2, 12)]
    assert data.y.tolist() == [0.0, 1.0]
    assert data.record_ids.tolist() == [0, 1]
    for silo, categories in enumerate((2, 4)):
        names = feature_names(silo)
        one = {name: float(v) for name, v in zip(names, data.x[silo][1], strict=True)}
        assert sum(v for name, v in one.items() if "=" in name) == categories
        assert [n for n, is_number in zip(names, data.numeric[silo], strict=True) if is_number] == [
            n for n in names if "=" not in n
        ]
    assert data.x[0][1, feature_names(0).index("ChestPainType=ASY")] == 1
    assert data.x[1][1, feature_names(1).index("Oldpeak")] == -1
    assert data.x[0][1, feature_names(0).index("Cholesterol")] == 0


def test_missing_numbers_are_marked_on_request(tmp_path: Path) -> None:
    data = load(folder(tmp_path, ROW, SICK, ROW.replace("195", "295")), missing=True)
    names = feature_names(0, missing=True)
    at, mark = names.index("Cholesterol"), names.index("Cholesterol=?")
    assert data.x[0][:, mark].tolist() == [0.0, 1.0, 0.0]
    scaled = standardise(data.x[0], data.numeric[0], torch.ones(3, dtype=torch.bool))
    assert scaled[:, at].tolist() == [-1.0, 0.0, 1.0]
    assert scaled[:, mark].tolist() == [0.0, 1.0, 0.0]


def test_scales_come_from_the_training_records_alone() -> None:
    x = torch.tensor([[1.0, 7.0], [3.0, 7.0], [1000.0, 9.0]])
    train, numeric = torch.tensor([True, True, False]), torch.tensor([True, False])
    scaled = standardise(x, numeric, train)
    assert scaled[:, 0].tolist() == [-1.0, 1.0, 998.0]
    assert torch.equal(scaled[:, 1], x[:, 1])  # indicators stay as they are
    with pytest.raises(InputError, match="no record is left"):
        standardise(x, numeric, ~train & train)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (ROW.replace("NAP", "ABC"), "line 3: not a record"),
        (ROW[:-1] + "2", "line 3: not a record"),
        (ROW.replace("150", "high"), "line 3: not a record"),
        (ROW.replace("150", "nan"), "line 3: not a record"),
        ("54,M,NAP", "line 3: 3 columns where 12"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        load(folder(tmp_path, ROW, row))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--data DIR"):
        load(None)
    with pytest.raises(InputError, match="no folder 'heart_failure_prediction'"):
        load(tmp_path)
    with pytest.raises(InputError, match="line 1: the columns should be Age,Sex"):
        load(folder(tmp_path, ROW, header="a,b"))
    with pytest.raises(InputError, match="holds no records"):
        load(folder(tmp_path))
    (tmp_path / "heart_failure_prediction" / "heart.csv").unlink()
    with pytest.raises(InputError, match=r"no file .*heart\.csv"):
        load(tmp_path)


def test_programs_have_the_sites_of_the_paper() -> None:
    rows = {"x": torch.randn(4, 9, generator=torch.Generator().manual_seed(0))}
    points = Predictor(split_network(seed=1), rows)
    assert points.n == 2
    assert {k: tuple(v.shape) for k, v in points.points.items()} == {
        "weight0": (9, 8), "bias0": (8,), "weight1": (8, 8), "bias1": (8,), "weight2": (8, 2), "bias2": (2,),
    }  # fmt: skip
    assert Predictor(split_network(seed=1, bayesian=False), rows).n == 0
    sampled = Predictor(bayesian_network(), rows)
    assert not sampled.points
    assert sampled.n == 9 * 8 + 8 + 64 + 8 + 16 + 2 + 2
    assert Predictor(bayesian_network((4,), linear=True), rows).n == 36 + 4 + 4 + 9
    assert sampled.evaluate(sampled.start, {}, rows)[0].shape == (4, 1)


def test_a_seed_draws_the_starting_weights() -> None:
    rows = {"x": torch.zeros(3, 5)}
    one, same, other = (Predictor(split_network(seed=s), rows).points for s in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["weight0"], other["weight0"])


def test_wrong_options_are_refused() -> None:
    with pytest.raises(InputError, match="hidden holds the units"):
        split_network(())
    with pytest.raises(InputError, match="activation 'elu'"):
        bayesian_network(activation="elu")  # type: ignore[arg-type]


def test_the_published_file() -> None:
    data = os.environ.get("SECURE_FVI_DATA")
    if not data or not (Path(data) / "heart_failure_prediction").is_dir():
        pytest.skip("SECURE_FVI_DATA holds no heart_failure_prediction")
    found = load(Path(data), missing=True)
    assert len(found.y) == 918
    assert float(found.y.sum()) == 508
    assert float(found.x[0][:, feature_names(0, missing=True).index("Cholesterol=?")].sum()) == 172
