"""Data files of one silo: CSV, npz and safetensors, as tensors with one row a record."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from secure_fvi.errors import InputError

#: The optional column or array with the records' own ids: whole numbers, all different, over all silos.
RECORD_ID = "record_id"
#: What other programs put between columns.
_OTHER_MARKS = ";\t|"
#: Whole numbers from here on are not told apart as floating point ones.
_TOLD_APART = 2**53
_INDEXED = re.compile(r"(?P<name>[^\[\]]+)\[(?P<index>\d+)\]")


def read_ids(path: Path, key: str, column: str) -> list[str | None]:
    """The texts of one column of a CSV, empty ones as None: ids of people, which are no numbers."""
    if path.suffix != ".csv":
        raise InputError(f"{key} = '{path}': ids are read from .csv files, as text")
    rows = _csv_rows(path, key)
    header = [name.strip() for name in rows[0]]
    if column not in header:
        raise InputError(f"{key}: {path}: no column '{column}' to align by")
    at = header.index(column)
    return [row[at] or None if at < len(row) else None for row in rows[1:] if row]


def read_table(path: Path, key: str, leave_out: str | None = None) -> dict[str, Tensor]:
    """The tensors in `path`, each (N, ...) with N at least 1; `key` is the configuration key that named it.

    In a CSV, columns `x[0]`, `x[1]`, ... form one tensor (N, k) and every other column one of shape (N,),
    all float64; npz and safetensors keep their own types. Nothing is unpickled. Raises InputError for a
    missing or malformed file. The column `leave_out` of a CSV is not read: it may hold text.
    """
    readers: dict[str, Callable[[Path], dict[str, Tensor]]] = {
        ".csv": partial(_read_csv, leave_out=leave_out),
        ".npz": _read_npz,
        ".safetensors": _read_safetensors,
    }
    if path.suffix not in readers:
        raise InputError(f"{key} = '{path}': must end in {', '.join(readers)}")
    try:
        tensors = readers[path.suffix](path)
    except FileNotFoundError:
        raise InputError(f"{key}: no file '{path}'") from None
    except OSError as error:
        raise InputError(f"{key}: cannot read '{path}': {error.strerror or error}") from error
    except InputError as error:
        raise InputError(f"{key}: {error}") from error
    if not tensors:
        raise InputError(f"{key}: {path}: holds no columns")
    sizes = {name: len(t) if t.ndim else None for name, t in tensors.items()}
    if len(set(sizes.values())) > 1 or None in sizes.values():
        rows = ", ".join(f"'{name}' has {size}" for name, size in sizes.items())
        raise InputError(f"{key}: {path}: all arrays must have one row a record, but {rows}")
    if not next(iter(sizes.values())):
        raise InputError(f"{key}: {path}: no records; leave the silo out")
    return tensors


def _csv_rows(path: Path, key: str | None = None) -> list[list[str]]:
    where = f"{key}: {path}" if key is not None else str(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except FileNotFoundError:
        if key is None:
            raise
        raise InputError(f"{key}: no file '{path}'") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{where}: not a CSV file: {error}") from error
    if not rows or not any(rows[0]):
        raise InputError(f"{where}: the first line must name the columns")
    return rows


def _read_csv(path: Path, leave_out: str | None) -> dict[str, Tensor]:
    rows = _csv_rows(path)
    header = [name.strip() for name in rows[0]]
    if len(header) == 1 and any(mark in header[0] for mark in _OTHER_MARKS):
        raise InputError(f"{path}: columns are separated by commas, and its first line has none")
    for name in header:
        if header.count(name) > 1 or not name:
            raise InputError(f"{path}: column names must differ and not be empty, but '{name}' is not so")
    numbers = [
        [_number(path, line, name, cell) for name, cell in _cells(path, line, header, row) if name != leave_out]
        for line, row in enumerate(rows[1:], start=2)
        if row
    ]
    kept = [name for name in header if name != leave_out]
    values = np.array(numbers, dtype=np.float64).reshape(len(numbers), len(kept))
    return _grouped(path, kept, torch.from_numpy(values))


def _cells(path: Path, line: int, header: list[str], row: list[str]) -> list[tuple[str, str]]:
    if len(row) != len(header):
        raise InputError(f"{path}, line {line}: {len(row)} values for {len(header)} columns")
    return list(zip(header, row, strict=True))


def _number(path: Path, line: int, column: str, cell: str) -> float:
    # The value itself stays out of the message: messages may end in logs that others read.
    if not cell.strip():
        raise InputError(f"{path}, line {line}: column '{column}' is empty; remove or impute it first")
    try:
        number = float(cell.replace("_", "no digit"))  # 3_12 is a label: Python alone reads 312
    except ValueError:
        raise InputError(f"{path}, line {line}: column '{column}' is not a number") from None
    if not math.isfinite(number):
        raise InputError(f"{path}, line {line}: column '{column}' is NaN or infinite; remove or impute it first")
    return number


def _grouped(path: Path, header: list[str], values: Tensor) -> dict[str, Tensor]:
    """Columns by name, those of `x[0]`, `x[1]`, ... side by side."""
    columns: dict[str, dict[int, int]] = {}
    tensors: dict[str, Tensor] = {}
    for position, name in enumerate(header):
        match = _INDEXED.fullmatch(name)
        if match is None:
            tensors[name] = values[:, position].contiguous()
        else:
            columns.setdefault(match["name"], {})[int(match["index"])] = position
    for name, positions in columns.items():
        if name in tensors or sorted(positions) != list(range(len(positions))):
            raise InputError(f"{path}: columns of '{name}' must be {name}[0], {name}[1], ... without a gap")
        tensors[name] = values[:, [positions[i] for i in range(len(positions))]].contiguous()
    if RECORD_ID in tensors:
        ids = tensors[RECORD_ID]
        broken, long = int((ids % 1 != 0).sum()), int((ids.abs() >= _TOLD_APART).sum())
        if broken:
            raise InputError(f"{path}: column '{RECORD_ID}' holds no whole number in {broken} of {len(values)} rows")
        if long:
            raise InputError(
                f"{path}: column '{RECORD_ID}' holds numbers of more than 15 digits in {long} of {len(values)} rows, "
                "which are not told apart; number the records anew"
            )
        tensors[RECORD_ID] = tensors[RECORD_ID].to(torch.int64)
    return tensors


def _read_npz(path: Path) -> dict[str, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: torch.from_numpy(np.array(archive[name])) for name in archive.files}
    except FileNotFoundError:
        raise
    except (ValueError, TypeError, OSError, AttributeError) as error:
        # numpy also ends here when an array would have to be unpickled.
        raise InputError(f"{path}: not an npz file of plain numbers") from error
    except Exception as error:
        # zipfile and zlib have errors of their own for a damaged archive, without a common base.
        raise InputError(f"{path}: a damaged npz file") from error


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load(path.read_bytes())
    except SafetensorError as error:
        raise InputError(f"{path}: not a safetensors file") from error
