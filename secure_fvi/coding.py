"""Columns in memory as numbers, by a dictionary and by nothing else: pandas', polars' and Arrow's, arrays and lists."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from secure_fvi.dictionary import DATE, DAY_ZERO, MEASURED, NUMBER, TOLD_APART, Column
from secure_fvi.errors import DataError, InputError


def names_of(table: Any, silo: str) -> list[str]:
    names = getattr(table, "column_names", None) or (list(table) if isinstance(table, Mapping) else None)
    names = names if names is not None else getattr(table, "columns", None)
    if names is None or hasattr(table, "collect"):
        raise InputError(
            f"silo '{silo}': a table is a dict of columns, or a pandas, polars or Arrow table, not "
            f"{type(table).__name__}"
        )
    return [str(name) for name in names]


def cells_of(values: Any) -> np.ndarray[Any, Any]:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    found = values.to_numpy() if hasattr(values, "to_numpy") else values
    return found if isinstance(found, np.ndarray) else np.array(found, dtype=object)


_TRUE, _FALSE = ("true", "yes", "1", "t", "y"), ("false", "no", "0", "f", "n")


def code(cells: np.ndarray[Any, Any], column: Column, where: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Numbers or codes (rows,), 0 where there is none, and where there is none. Raises DataError, which counts rows,
    for what is no number, out of range or no level of the dictionary."""
    import pandas as pd

    if cells.ndim != 1:
        raise DataError(f"{where} is no column of one cell a row")
    rows = len(cells)
    codes, different = pd.factorize(cells, use_na_sentinel=True)
    texts = [_text(cell) for cell in different]
    known = [t not in ("", *column.missing) for t in texts]
    if column.kind == "id":
        order = {t: k for k, t in enumerate(sorted({t for t, ok in zip(texts, known, strict=True) if ok}))}
        table = [float(order[t]) if ok else math.nan for t, ok in zip(texts, known, strict=True)]
    else:
        read = _reader(column)
        table = [read(t) if ok else math.nan for t, ok in zip(texts, known, strict=True)]
    values = np.append(np.array(table, dtype=np.float64), math.nan)[codes]  # -1, no value, is the last
    if bad := int(np.isinf(values).sum()):
        raise DataError(f"{where} holds {_WRONG[column.kind]} in {bad} of {rows} rows")
    gap = np.isnan(values)
    if column.kind in MEASURED:
        low = -math.inf if column.low is None else column.low
        high = math.inf if column.high is None else column.high
        below, above = int((values < low).sum()), int((values > high).sum())
        if below or above:
            raise DataError(
                f"{where} is {'below' if below else 'above'} the dictionary's {'low' if below else 'high'} in "
                f"{below or above} of {rows} rows"
            )
    whole = column.kind in ("category", "boolean", "id", "integer")
    filled = np.where(gap, 0.0, values)
    return (filled.astype(np.int64) if whole else filled), gap


_WRONG = {
    "number": "what is no number", "integer": "what is no whole number of at most 15 digits",
    "date": "what is no date such as 2024-12-31", "category": "a level that the dictionary has not",
    "boolean": "what is neither true nor false",
}  # fmt: skip


def _text(cell: Any) -> str:
    """A cell as its table would write it."""
    if isinstance(cell, (bool, np.bool_)):
        return "true" if cell else "false"
    if isinstance(cell, (float, np.floating)) and float(cell).is_integer() and abs(float(cell)) < TOLD_APART:
        return str(int(float(cell)))
    return repr(float(cell)) if isinstance(cell, (float, np.floating)) else str(cell).strip()


def _reader(column: Column) -> Callable[[str], float]:
    """The number that a text stands for; infinite where it stands for none."""
    if column.kind == "category" or column.levels:
        codes = {level: float(k) for k, level in enumerate(column.levels)}
        return lambda text: codes.get(text, math.inf)
    if column.kind == "boolean":
        both = {**dict.fromkeys(_TRUE, 1.0), **dict.fromkeys(_FALSE, 0.0)}
        return lambda text: both.get(text.lower(), math.inf)

    def number(text: str) -> float:
        """As a file's cells are read (`tables`): NumPy takes "today" for a date, and Python 1_2 for a number."""
        if not re.fullmatch(DATE if column.kind == "date" else NUMBER, text, re.ASCII):
            return math.inf
        if column.kind == "date":
            try:
                return float((np.datetime64(text[:10], "D") - np.datetime64(DAY_ZERO, "D")).astype(int))
            except ValueError:  # 30 February
                return math.inf
        found = float(text)
        return found if column.kind == "number" or (found % 1 == 0 and abs(found) < TOLD_APART) else math.inf

    return number
