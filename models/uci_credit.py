"""UCI Credit approval: is an application for a credit card granted? 690 applications, all names made meaningless.

Data: J. R. Quinlan, UCI Machine Learning Repository. Reads `crx.data` as published. Features: `models.tabular`.
"""

from __future__ import annotations

from pathlib import Path

from secure_fvi.models.base import Dataset, Program, data_folder
from secure_fvi.models.tabular import MODEL, Design

_CATEGORIES = {
    "A1": "b a",
    "A4": "u y l t",
    "A5": "g p gg",
    "A6": "c d cc i j k m r q w x e aa ff",
    "A7": "v h bb j n z dd ff o",
    "A9": "t f",
    "A10": "t f",
    "A12": "t f",
    "A13": "g p s",
}
#: (centre, unit) of each number; the last four are taken as log(1 + x) first. A missing number is put at its centre.
_NUMBERS = {
    "A2": (30.0, 12.0),
    "A3": (5.0, 5.0),
    "A8": (1.0, 1.0),
    "A11": (1.0, 1.0),
    "A14": (5.0, 2.0),
    "A15": (3.0, 3.0),
}
COLUMNS = tuple(f"A{i}" for i in range(1, 16))
_DESIGN = Design(
    COLUMNS,
    _CATEGORIES,
    _NUMBERS,
    {"+": 1.0, "-": 0.0},
    logarithms=("A8", "A11", "A14", "A15"),
    missing=dict.fromkeys(COLUMNS, "?"),
)


def feature_names() -> list[str]:
    """Names of the columns of `x`, the intercept first."""
    return _DESIGN.feature_names


def load(data_dir: Path | None = None) -> Dataset:
    """`x` (690, 63) float64 and `y` (690,), 1 for "+"."""
    return _DESIGN.load(data_folder("uci_credit_approval", data_dir) / "crx.data")


PROGRAM = Program(
    name="credit",
    description="logistic regression of approval on 15 answers (UCI Credit approval, 690 applications)",
    model=MODEL,
    load=load,
)
