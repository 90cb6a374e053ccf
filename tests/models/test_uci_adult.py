"""The loader of UCI Adult: documented columns, fixed scales, bad lines refused by number."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from secure_fvi.errors import InputError
from secure_fvi.models.uci_adult import feature_names, load

ROW = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, {}, {}"
)


def folder(tmp_path: Path, *rows: str, file: str = "adult.data") -> Path:
    (tmp_path / "uci_adult").mkdir(exist_ok=True)
    (tmp_path / "uci_adult" / file).write_text("|1x3 Cross validator\n" + "\n".join(rows) + "\n\n")
    return tmp_path


def test_a_row_becomes_the_documented_features(tmp_path: Path) -> None:
    data = load(folder(tmp_path, ROW.format("?", ">50K."), ROW.format("Cuba", "<=50K"), file="adult.test"), "test")
    x, y = data.records["x"], data.records["y"]
    at = {name: i for i, name in enumerate(feature_names())}
    assert x.shape == (2, len(at)) == (2, 114)
    assert y.tolist() == [1.0, 0.0]
    assert x[0, at["native-country=?"]] == 1
    assert x[1, at["native-country=Cuba"]] == 1
    assert x[0, at["age"]] == pytest.approx((39 - 40) / 15)
    assert x[0, at["capital-gain"]] == pytest.approx(torch.log1p(torch.tensor(2174.0)).item() / 8)
    levels = [i for name, i in at.items() if "=" in name]
    assert x[:, levels].sum(1).tolist() == [8.0, 8.0]


def test_features_of_a_row_do_not_depend_on_other_rows(tmp_path: Path) -> None:
    """A scale estimated from the records would be a release of its own."""
    first = load(folder(tmp_path, ROW.format("Cuba", ">50K"))).records["x"]
    other = ROW.format("Peru", ">50K").replace("39,", "90,").replace("2174", "99999")
    assert torch.equal(load(folder(tmp_path, ROW.format("Cuba", ">50K"), other)).records["x"][:1], first)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (ROW.format("Atlantis", ">50K"), "line 3: not a record"),
        (ROW.format("Cuba", "60K"), "line 3: not a record"),
        (ROW.format("Cuba", ">50K").replace("77516", "many"), "line 3: not a record"),
        ("39, State-gov", "line 3: 2 columns where 15"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        load(folder(tmp_path, ROW.format("Cuba", ">50K"), row))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--data DIR"):
        load(None)
    with pytest.raises(InputError, match=r"adult\.test"):
        load(folder(tmp_path, ROW.format("Cuba", ">50K")), "test")
    with pytest.raises(InputError, match="split = 'half'"):
        load(tmp_path, "half")


def test_the_published_files() -> None:
    data = os.environ.get("SECURE_FVI_DATA")
    if not data or not (Path(data) / "uci_adult").is_dir():
        pytest.skip("SECURE_FVI_DATA holds no uci_adult")
    for split, size, rich in (("train", 32561, 7841), ("test", 16281, 3846)):
        found = load(Path(data), split)
        assert len(found) == size
        assert found.records["y"].sum() == rich
