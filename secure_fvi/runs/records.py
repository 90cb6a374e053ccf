"""The records and the model that a configuration names, read at the machine that holds them: a silo reads its own.

A silo's records are its own table (CSV, or npz of tensors), or the part of a program's records that `[partition]` gives
it.
"""

from __future__ import annotations

import csv
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from secure_fvi.contracts import check_repeats
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.models.base import Dataset, program
from secure_fvi.runs.config import Config, Partition
from secure_fvi.runs.wording import nearest, unknown_key

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


# ---- a silo's part, and the model ----

Parts = tuple[tuple[str, ...], tuple[dict[str, Tensor], ...], tuple[Tensor, ...]]


def silo_part(config: Config, silo: str, data_dir: Path | None = None) -> tuple[dict[str, Tensor], Tensor, bool]:
    """One silo's records and their ids, without a look at another silo's file; whether the ids are the data's own.

    The part of a program's records that `config` gives the silo, or its own file, whose rows are numbered where it
    has no column of ids.
    """
    if config.partition is not None:
        ids, silos, record_ids = _partitioned(_dataset(config, data_dir), config.partition, config.seed)
        at = ids.index(silo)
        return silos[at], record_ids[at], True
    at = next(j for j, s in enumerate(config.silo) if s.id == silo)
    table = read_table(Path(config.silo[at].data), f"silo[{at}].data")
    given = table.pop(RECORD_ID, None)
    own = torch.arange(_rows(table)) if given is None else given
    _check_ids(at, own)
    return table, own, given is not None


def model_of(config: Config) -> tuple[FederatedModel, str]:
    """The model that `config` names, from this machine's files, and what it is called."""
    if config.model.program is not None:
        try:
            found = program(config.model.program)
        except InputError as error:
            raise InputError(f"model.program: {error}") from error
        return found.model, f"{found.name}: {found.description}"
    path, _, name = str(config.model.function).rpartition(":")
    roles: dict[str, Any] = {}
    if config.model.record_plate is not None:
        roles["record_plate"] = config.model.record_plate
    if config.model.silo_sites is not None:
        roles["silo_sites"] = config.model.silo_sites
    roles["start"] = config.model.start
    return FederatedModel(python_function(Path(path), name, "model.function"), **roles), f"{name} in {Path(path).name}"


def python_function(path: Path, name: str, key: str) -> Any:
    """The attribute `name` of the Python file `path`, which is run as any module is on import; `key` names it."""
    if not path.is_file():
        raise InputError(f"{key}: no file '{path}'")
    spec = importlib.util.spec_from_file_location(f"secure_fvi_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"{key}: {path} fails on import: {type(error).__name__}: {error}") from error
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if not callable(getattr(module, name, None)):
        raise InputError(f"{key}: {path} has no function '{name}'{nearest(name, functions)}")
    return getattr(module, name)


def _dataset(config: Config, data_dir: Path | None) -> Dataset:
    load = program(str(config.model.program)).load
    options = [name for name in inspect.signature(load).parameters if name != "data_dir"]
    for key in config.data:
        if key not in options:
            raise InputError(unknown_key("data", key, options))
    dataset: Dataset = load(data_dir, **config.data)
    return dataset


def _partitioned(dataset: Dataset, partition: Partition, seed: int) -> Parts:
    total, ids = len(dataset), partition.silo_ids
    if partition.by_client:
        return _by_client(dataset, ids)
    sizes = partition.sizes or _even(total, len(ids))
    if sum(sizes) != total:
        raise InputError(f"partition.sizes = {list(sizes)}: must add up to the {total} records, not {sum(sizes)}")
    if min(sizes) < 1:
        raise InputError(f"partition.count = {len(ids)}: must be at most {total}, so that no silo is without records")
    chosen = partition.seed if partition.seed is not None else seed
    order = torch.randperm(total, generator=torch.Generator().manual_seed(chosen))
    # Records keep their order within a silo, so that two splits into the same sets are the same.
    rows = [part.sort().values for part in order.split(list(sizes))]
    silos = tuple({name: t[r] for name, t in dataset.records.items()} for r in rows)
    return ids, silos, tuple(dataset.record_ids[r] for r in rows)


def _by_client(dataset: Dataset, ids: tuple[str, ...]) -> Parts:
    if dataset.clients is None:
        raise InputError("partition.by_client: this program's records come from no clients; leave it out")
    found = int(dataset.clients.max()) + 1
    if found != len(ids):
        raise InputError(f"partition.count = {len(ids)}: the records come from {found} clients")
    rows = [torch.nonzero(dataset.clients == k).squeeze(1) for k in range(found)]
    silos = tuple({name: t[r] for name, t in dataset.records.items()} for r in rows)
    return ids, silos, tuple(dataset.record_ids[r] for r in rows)


def _even(total: int, count: int) -> tuple[int, ...]:
    return tuple(total // count + (j < total % count) for j in range(count))


def _from_files(config: Config) -> Parts:
    tables = [read_table(Path(s.data), f"silo[{j}].data") for j, s in enumerate(config.silo)]
    given = [table.pop(RECORD_ID, None) for table in tables]
    if any(ids is None for ids in given):
        if not all(ids is None for ids in given):
            raise InputError(f"'{RECORD_ID}' must stand in all silos' files or in none")
        for silo, table in zip(config.silo, tables, strict=True):
            check_repeats(table, silo.id)
        starts = _starts([_rows(table) for table in tables])
        given = [torch.arange(a, b) for a, b in starts]
    record_ids = tuple(ids for ids in given if ids is not None)
    for j, ids in enumerate(record_ids):
        _check_ids(j, ids)
    return tuple(silo.id for silo in config.silo), tuple(tables), record_ids


def _check_ids(at: int, ids: Tensor) -> None:
    if ids.dtype != torch.int64 or ids.ndim != 1:
        raise InputError(f"silo[{at}].data: '{RECORD_ID}' must be whole numbers, one a record")


def _rows(table: Mapping[str, Tensor]) -> int:
    return len(next(iter(table.values()))) if table else 0


def _starts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = [sum(sizes[: j + 1]) for j in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
