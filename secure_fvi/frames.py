"""What columns in memory have in common, whoever's they are: NumPy's, those of pandas and polars, lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from secure_fvi.errors import InputError


def is_gap(cell: Any) -> bool:
    """Whether a cell holds nothing: None, NaN, and pandas' NA and NaT, which are equal to nothing either."""
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):
        return True
    different = cell != cell
    return isinstance(different, (bool, np.bool_)) and bool(different)  # an array in a cell is none


def check_aligned(columns: Iterable[Any], where: str = "") -> None:
    """Raise InputError for columns with row labels, as pandas' series have them, that are not the same: taken by place,
    rows of different people would be one."""
    indexes = [column.index for column in columns if hasattr(column, "to_numpy") and hasattr(column, "index")]
    if any(not index.equals(indexes[0]) for index in indexes):
        raise InputError(
            f"{where}its columns have different indexes, or the same in another order: align them, as by "
            "pandas.DataFrame(columns), or give arrays, which are taken by place"
        )
