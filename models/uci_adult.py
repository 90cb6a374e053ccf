"""UCI Adult: does a person's yearly income exceed 50,000 dollars? Census records of 1994, 32,561 + 16,281 people.

Data: B. Becker and R. Kohavi (1996), UCI Machine Learning Repository. Reads the files as published, `adult.data`
and `adult.test`. Features: `models.tabular`.
"""

from __future__ import annotations

from pathlib import Path

from secure_fvi.errors import InputError
from secure_fvi.models.base import Dataset, Program, data_folder
from secure_fvi.models.tabular import MODEL, Design

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
COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation", "relationship",
    "race", "sex", "capital-gain", "capital-loss", "hours-per-week", "native-country",
)  # fmt: skip
_FILES = {"train": ("adult.data",), "test": ("adult.test",), "all": ("adult.data", "adult.test")}
_LABELS = {"<=50K": 0.0, ">50K": 1.0}
_DESIGN = Design(
    COLUMNS,
    _CATEGORIES,
    _NUMBERS,
    _LABELS | {f"{text}.": value for text, value in _LABELS.items()},  # adult.test ends them with a stop
    logarithms=("fnlwgt", "capital-gain", "capital-loss"),
    missing=dict.fromkeys(_CATEGORIES, "?"),
)


def feature_names() -> list[str]:
    """Names of the columns of `x`, the intercept first."""
    return _DESIGN.feature_names


def load(data_dir: Path | None = None, split: str = "train") -> Dataset:
    """`x` (N, 114) float64 and `y` (N,), 1 for more than 50,000 dollars. `split`: "train", "test" or "all"."""
    if split not in _FILES:
        raise InputError(f"split = '{split}' is unknown; choose {', '.join(_FILES)}")
    folder = data_folder("uci_adult", data_dir)
    return _DESIGN.load(*(folder / file for file in _FILES[split]))


PROGRAM = Program(
    name="adult",
    description="logistic regression of income on 14 census answers (UCI Adult, 32,561 people)",
    model=MODEL,
    load=load,
)
