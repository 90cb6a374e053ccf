"""The loader of UCI Bank Marketing: header, semicolons, quotes, a number that stands for none."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from secure_fvi.errors import InputError
from secure_fvi.models.uci_bank import COLUMNS, feature_names, load

HEADER = ";".join(f'"{name}"' for name in (*COLUMNS, "y")).replace('"age"', "age", 1)
ROW = '{};"management";"married";"tertiary";"no";{};"yes";"no";"unknown";5;"may";261;1;{};0;"unknown";"{}"'


def _folder(tmp_path: Path, *lines: str) -> Path:
    (tmp_path / "uci_bank").mkdir(exist_ok=True)
    (tmp_path / "uci_bank" / "bank-full.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_row_becomes_the_documented_features(tmp_path: Path) -> None:
    data = load(_folder(tmp_path, HEADER, ROW.format(50, 2143, -1, "no"), ROW.format(30, -72, 147, "yes")))
    x = {name: data.records["x"][:, i].tolist() for i, name in enumerate(feature_names())}
    assert len(x) == 53
    assert data.records["y"].tolist() == [0.0, 1.0]
    assert x["age"] == [1.0, -1.0]
    assert x["balance"] == pytest.approx([(math.log(2144) - 6) / 3, (-math.log(73) - 6) / 3])
    assert x["pdays=-1"] == [1.0, 0.0]
    assert x["pdays"] == pytest.approx([0.0, math.log(148) - 5])
    levels = [values for name, values in x.items() if "=" in name and not name.startswith("pdays")]
    assert [sum(column) for column in zip(*levels, strict=True)] == [9.0, 9.0]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ((HEADER.replace("marital", "martial"), ROW.format(50, 1, -1, "no")), "line 1: the header is not"),
        ((HEADER, ROW.format(50, 1, -1, "perhaps")), "line 2: not a record"),
        ((HEADER, ROW.format("nan", 1, -1, "no")), "line 2: not a record"),
        ((HEADER, "50;1"), "line 2: 2 columns where 17"),
        ((HEADER,), "holds no records"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, lines: tuple[str, ...], why: str) -> None:
    with pytest.raises(InputError, match=why):
        load(_folder(tmp_path, *lines))
