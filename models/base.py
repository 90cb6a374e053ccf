"""What a shipped program is, and the registry that finds one by name without importing the others."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel

#: Program name -> the module whose `PROGRAM` it is. A module is imported only when its program is asked for.
MODULES = {
    "adult": "secure_fvi.models.uci_adult",
    "credit": "secure_fvi.models.uci_credit",
    "mnist": "secure_fvi.models.mnist",
    "newsgroups": "secure_fvi.models.newsgroups",
    "prodlda-simulated": "secure_fvi.models.prodlda",
    "six-cities": "secure_fvi.models.six_cities",
    "writers-simulated": "secure_fvi.models.writers",
}

#: Program name -> "module:attribute" of its `VerticalProgram`, imported only when asked for.
VERTICAL = {
    "heart": "secure_fvi.models.vertical_programs:HEART",
    "vertical-adult": "secure_fvi.models.vertical_programs:ADULT",
    "vertical-logistic": "secure_fvi.models.vertical_programs:LOGISTIC",
    "vertical-poisson": "secure_fvi.models.vertical_programs:POISSON",
}


@dataclass(frozen=True)
class Dataset:
    """Records that may be split over silos.

    `records` holds the keyword arguments of the Pyro function, each with shape (N, ...): one row a record.
    `record_ids` is int64 of shape (N,), all different: a record keeps its id however the records are split.
    `clients` is int64 of shape (N,), from 0 on, for data whose records come from clients; None otherwise.
    """

    records: dict[str, Tensor]
    record_ids: Tensor
    clients: Tensor | None = None

    def __post_init__(self) -> None:
        size = len(self.record_ids)
        if self.record_ids.dtype != torch.int64 or self.record_ids.ndim != 1:
            raise InputError("record_ids must be an int64 tensor with one dimension")
        if len(torch.unique(self.record_ids)) != size:
            raise InputError("record_ids must all be different")
        for name, tensor in self.records.items():
            if tensor.ndim == 0 or len(tensor) != size:
                raise InputError(f"'{name}' has shape {tuple(tensor.shape)}, but there are {size} record_ids")

    def __len__(self) -> int:
        return len(self.record_ids)


@dataclass(frozen=True)
class Program:
    """A model with its data: what `[model] program = "..."` names.

    `load` takes the folder of downloaded data sets (None where none was given; a program whose data are
    shipped does not look at it) and, as keywords, whatever options the program's loader has.
    """

    name: str
    description: str
    model: FederatedModel
    load: Callable[..., Dataset]


def program(name: str) -> Program:
    """The program called `name`; raises InputError with the known names otherwise."""
    if name not in MODULES:
        close = difflib.get_close_matches(name, MODULES, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise InputError(f"no program is called '{name}'{hint} (known: {', '.join(sorted(MODULES))})")
    found: Program = importlib.import_module(MODULES[name]).PROGRAM
    return found


def data_folder(name: str, data_dir: Path | None) -> Path:
    """`data_dir / name`, for a program whose data are not shipped; raises InputError where it is missing."""
    if data_dir is None:
        raise InputError(f"this program reads '{name}' from a folder: give --data DIR or set SECURE_FVI_DATA")
    folder = data_dir / name
    if not folder.is_dir():
        raise InputError(f"no folder '{name}' in {data_dir}")
    return folder
