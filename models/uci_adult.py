"""UCI Adult: does a person's yearly income exceed 50,000 dollars? Census records of 1994, 32,561 + 16,281 people.

Data: B. Becker and R. Kohavi (1996), UCI Machine Learning Repository. Reads the files as published, `adult.data`
and `adult.test`. Features are built from the file's documentation alone, never from its rows: fixed units for
numbers, one column for each documented category and one for a missing value. A scale that was estimated from the
records would be a release of its own.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from secure_fvi.errors import InputError
from secure_fvi.models.base import Dataset, Program, data_folder
from secure_fvi.models.logistic import MODEL

#: Columns in the order of the file: categories, or (centre, unit) of a number.
_CATEGORIES = {
    "workclass": "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
    "education": "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th Masters "
    "1st-4th 10th Doctorate 5th-6th Preschool",
    "marital-status": "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
    "Married-AF-spouse",
    "occupation": "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty Handlers-cleaners "
    "Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv Protective-serv Armed-Forces",
    "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
    "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
    "sex": "Female Male",
    "native-country": "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) India "
    "Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica Vietnam Mexico Portugal Ireland "
    "France Dominican-Republic Laos Ecuador Taiwan Haiti Columbia Hungary Guatemala Nicaragua Scotland Thailand "
    "Yugoslavia El-Salvador Trinadad&Tobago Peru Hong Holand-Netherlands",
}
_NUMBERS = {
    "age": (40.0, 15.0),
    "fnlwgt": (12.0, 1.0),
    "education-num": (10.0, 3.0),
    "capital-gain": (0.0, 8.0),
    "capital-loss": (0.0, 8.0),
    "hours-per-week": (40.0, 12.0),
}
_LOGARITHMS = ("fnlwgt", "capital-gain", "capital-loss")
COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship",
    "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country",
)  # fmt: skip
_MISSING = "?"
_FILES = {"train": ("adult.data",), "test": ("adult.test",), "all": ("adult.data", "adult.test")}


def _levels(column: str) -> list[str]:
    return [*_CATEGORIES[column].split(), _MISSING]


def feature_names() -> list[str]:
    """Names of the columns of `x`, the intercept first."""
    names = ["intercept"]
    for column in COLUMNS:
        names += [column] if column in _NUMBERS else [f"{column}={level}" for level in _levels(column)]
    return names


def load(data_dir: Path | None = None, split: str = "train") -> Dataset:
    """`x` (N, 114) float64 and `y` (N,), 1 for more than 50,000 dollars. `split`: "train", "test" or "all"."""
    if split not in _FILES:
        raise InputError(f"split = '{split}' is unknown; choose {', '.join(_FILES)}")
    folder = data_folder("uci_adult", data_dir)
    where = {name: i for i, name in enumerate(feature_names())}
    positions, values, labels = [], [], []
    for file in _FILES[split]:
        for line, row in _rows(folder / file):
            try:
                at, value = _features(row, where)
                labels.append({"<=50K": 0.0, ">50K": 1.0}[row[-1].rstrip(".")])
            except (KeyError, ValueError):
                raise InputError(f"{folder / file}, line {line}: not a record of the documented form") from None
            positions.append(at)
            values.append(value)
    x = torch.zeros(len(labels), len(where), dtype=torch.float64)
    x.scatter_(1, torch.tensor(positions), torch.tensor(values, dtype=torch.float64))
    return Dataset({"x": x, "y": torch.tensor(labels, dtype=torch.float64)}, torch.arange(len(labels)))


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    if not path.is_file():
        raise InputError(f"no file '{path}'")
    with path.open(newline="", encoding="ascii") as file:
        for line, row in enumerate(csv.reader(file, skipinitialspace=True), 1):
            if row and not row[0].startswith("|"):
                if len(row) != len(COLUMNS) + 1:
                    raise InputError(f"{path}, line {line}: {len(row)} columns where {len(COLUMNS) + 1} are documented")
                yield line, row


def _features(row: list[str], where: dict[str, int]) -> tuple[list[int], list[float]]:
    """Positions and values of what is not zero: the intercept, numbers in their units, one level a category."""
    at, value = [where["intercept"]], [1.0]
    for column, text in zip(COLUMNS, row, strict=False):
        if column in _NUMBERS:
            number = math.log1p(float(text)) if column in _LOGARITHMS else float(text)
            centre, unit = _NUMBERS[column]
            at.append(where[column])
            value.append((number - centre) / unit)
        else:
            at.append(where[f"{column}={text}"])
            value.append(1.0)
    return at, value


PROGRAM = Program(
    name="adult",
    description="logistic regression of income on 14 census answers (UCI Adult, 32,561 people)",
    model=MODEL,
    load=load,
)
