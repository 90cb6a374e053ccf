"""One party's columns, as a vertical job names them: identifiers, the response, and the arguments of a predictor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secure_fvi.algorithms.vertical.predictors import linear
from secure_fvi.errors import InputError
from secure_fvi.federated_model import side_by_side
from secure_fvi.runs.config import Response
from secure_fvi.runs.records import named_file, numbers, python_function
from secure_fvi.runs.wording import nearest
from secure_fvi.tables import ENDINGS, GAP, read_coded, with_gaps


def read_people(
    path: Path, key: str, columns: Sequence[str], spoilt: list[str] | None = None
) -> tuple[dict[str, Tensor], list[Any]]:
    """Of one reading of a table, so that row for row they are one person's: its other columns, numbers all of them, as
    `read_table` has them; and each row's identifier, a text without blanks about it, of `columns`, as
    `alignment.prepare` takes them: of one column, or of several, None for a gap. spoilt: is told of cells that cannot
    be read, which are NaN."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{key} = '{path}': ids are read from a table ({', '.join(ENDINGS)}), as text")
    coding = functools.partial(numbers, ids=columns)
    with named_file(path, key):
        found = read_coded(path, coding) if spoilt is None else with_gaps(path, coding)
        of = {n: torch.from_numpy(values) for n, values in found.columns.items() if n not in found.names}
        table = side_by_side(of, str(path))
    if not table:
        raise InputError(f"{key}: {path}: holds no columns beside its ids")
    if spoilt is not None:
        spoilt += found.spoilt
    parts = []
    for column in columns:
        names, places = found.names[column], found.columns[column]
        gaps = {int(row) - 1 for f in found.findings if f.what == GAP and f.column == column for row in f.rows}
        parts.append([None if i in gaps else names[place] for i, place in enumerate(places)])
    return table, list(zip(*parts, strict=True)) if len(columns) > 1 else parts[0]


def response_columns(
    of: Response, table: Mapping[str, Tensor]
) -> tuple[tuple[Tensor, Tensor | None], dict[str, Tensor]]:
    """Response and offset, (N,) each, from the table of their file, and its other columns. Raises InputError, which
    names the key."""
    found = []
    for key in ("column", "offset"):
        name = getattr(of, key)
        if name is not None and name not in table:
            raise InputError(f"response.{key} = '{name}': no such column{nearest(name, table)}")
        found.append(table[name] if name is not None else None)
    response, offset = found
    assert response is not None
    others = {name: value for name, value in table.items() if name not in of.columns}
    if of.silo is not None and not others:
        raise InputError(
            f"silo '{of.silo}' has no column but the response, and a silo adds a predictor of its own: add a column, "
            "or let the server hold the response"
        )
    return (response, offset), others


def silo_columns(
    function: str | None, key: str, table: dict[str, Tensor], classes: int
) -> tuple[dict[str, Tensor], Callable[..., Tensor]]:
    """The arguments of a silo's predictor, and the predictor: by default all columns side by side, linearly."""
    if function is None:
        return {"x": torch.cat([v.reshape(len(v), -1).double() for v in table.values()], 1)}, linear(classes)
    path, _, name = function.rpartition(":")
    if not path.endswith(".py"):
        raise InputError(f"{key}.predictor = '{function}': must look like 'path/to/file.py:name'")
    program = python_function(Path(path), name, f"{key}.predictor")
    wanted = list(inspect.signature(program).parameters)
    for column in wanted:
        if column not in table:
            raise InputError(
                f"{key}: '{name}' takes '{column}', and {key}.data has no such column{nearest(column, table)}"
            )
    return {column: table[column] for column in wanted}, program
