"""UCI Bank Marketing: does a client subscribe to a term deposit? 45,211 telephone calls of a Portuguese bank.

Data: S. Moro, R. Laureano and P. Cortez (2011), UCI Machine Learning Repository. Reads `bank-full.csv` as published.
Features: `models.tabular`; a client who was not contacted before has -1 in `pdays`, which counts as missing.
`duration` is known after the call alone: what predicts with it describes calls, it does not choose them.
"""

from __future__ import annotations

from pathlib import Path

from secure_fvi.models.base import Dataset, Program, data_folder
from secure_fvi.models.tabular import MODEL, Design

_CATEGORIES = {
    "job": "admin. unknown unemployed management housemaid entrepreneur student blue-collar self-employed retired "
    "technician services",
    "marital": "married divorced single",
    "education": "unknown secondary primary tertiary",
    "default": "yes no",
    "housing": "yes no",
    "loan": "yes no",
    "contact": "unknown telephone cellular",
    "month": "jan feb mar apr may jun jul aug sep oct nov dec",
    "poutcome": "unknown other failure success",
}
#: (centre, unit) of each number, of its logarithm where one is taken.
_NUMBERS = {
    "age": (40.0, 10.0),
    "balance": (6.0, 3.0),
    "day": (16.0, 8.0),
    "duration": (5.0, 1.0),
    "campaign": (1.0, 0.5),
    "pdays": (5.0, 1.0),
    "previous": (0.0, 1.0),
}
COLUMNS = (
    "age", "job", "marital", "education", "default", "balance", "housing", "loan", "contact", "day", "month",
    "duration", "campaign", "pdays", "previous", "poutcome",
)  # fmt: skip
_DESIGN = Design(
    COLUMNS,
    _CATEGORIES,
    _NUMBERS,
    {"yes": 1.0, "no": 0.0},
    logarithms=("balance", "duration", "campaign", "pdays", "previous"),
    missing={"pdays": "-1"},
    delimiter=";",
    header=(*COLUMNS, "y"),
)


def feature_names() -> list[str]:
    """Names of the columns of `x`, the intercept first."""
    return _DESIGN.feature_names


def load(data_dir: Path | None = None) -> Dataset:
    """`x` (45211, 53) float64 and `y` (45211,), 1 for a subscription."""
    return _DESIGN.load(data_folder("uci_bank", data_dir) / "bank-full.csv")


PROGRAM = Program(
    name="bank",
    description="logistic regression of a subscription on 16 answers (UCI Bank Marketing, 45,211 calls)",
    model=MODEL,
    load=load,
)
