"""Heart disease in 918 patients, columns held by two clinics (Hassan et al. 2024, section 5.3).

Data: fedesoriano (2021), Heart Failure Prediction, Kaggle. Reads `heart.csv` as published. Silo 1 holds the first five
columns, silo 2 the other six; the response is HeartDisease. Categories become one indicator each, as documented.
Numbers stay raw here: `standardise` takes mean and sd of each from the records that train, which every silo can do
alone. A cholesterol or blood pressure of 0 means that it is missing; it is kept as it is, as in the paper, unless
`missing` asks for an indicator.

The predictors are programs for `secure_fvi.algorithms.vertical.Predictor`: eta_j = h(x_j)' w_j.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import pyro
import torch
from pyro.distributions import Normal
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.models.base import data_folder

NUMBERS = ("Age", "RestingBP", "Cholesterol", "MaxHR", "Oldpeak")
CATEGORIES = {
    "Sex": ("M", "F"),
    "ChestPainType": ("TA", "ATA", "NAP", "ASY"),
    "FastingBS": ("0", "1"),
    "RestingECG": ("Normal", "ST", "LVH"),
    "ExerciseAngina": ("Y", "N"),
    "ST_Slope": ("Up", "Flat", "Down"),
}
#: The raw columns of each silo, in the order of the file.
SILO_COLUMNS = (
    ("Age", "Sex", "ChestPainType", "RestingBP", "Cholesterol"),
    ("FastingBS", "RestingECG", "MaxHR", "ExerciseAngina", "Oldpeak", "ST_Slope"),
)
RESPONSE = "HeartDisease"
HEADER = (*SILO_COLUMNS[0], *SILO_COLUMNS[1], RESPONSE)
#: Numbers whose 0 stands for a missing value.
_ZERO_IS_MISSING = ("RestingBP", "Cholesterol")
_FOLDER, _FILE = "heart_failure_prediction", "heart.csv"

Program = Callable[[Tensor], Tensor]
Activation = Literal["tanh", "relu"]
_ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}


class Heart(NamedTuple):
    """Aligned columns of both silos."""

    x: tuple[Tensor, ...]  # (N, D_j) a silo, float64; numbers raw, NaN where missing values were asked to be marked
    numeric: tuple[Tensor, ...]  # (D_j,) bool a silo: which columns are numbers
    y: Tensor  # (N,) float64, 1 for heart disease
    record_ids: Tensor  # (N,) int64


def feature_names(silo: int, missing: bool = False) -> list[str]:
    """Names of the columns of `x[silo]`."""
    names: list[str] = []
    for column in SILO_COLUMNS[silo]:
        if column in CATEGORIES:
            names += [f"{column}={level}" for level in CATEGORIES[column]]
        else:
            names += [column, f"{column}=?"] if missing and column in _ZERO_IS_MISSING else [column]
    return names


def load(data_dir: Path | None = None, missing: bool = False) -> Heart:
    """`x` (N, 9) and (N, 12). With `missing`, a 0 that stands for a missing number is NaN beside an indicator column.

    Raises InputError for a file that is not of the documented form.
    """
    path = data_folder(_FOLDER, data_dir) / _FILE
    names = [feature_names(j, missing) for j in range(len(SILO_COLUMNS))]
    rows: list[list[list[float]]] = [[] for _ in SILO_COLUMNS]
    labels = []
    for line, row in _rows(path):
        try:
            labels.append({"0": 0.0, "1": 1.0}[row[RESPONSE]])
            for j, columns in enumerate(SILO_COLUMNS):
                values = dict.fromkeys(names[j], 0.0)
                for column in columns:
                    values.update(_features(column, row[column], missing))
                rows[j].append([values[name] for name in names[j]])
        except (KeyError, ValueError):
            raise InputError(f"{path}, line {line}: not a record of the documented form") from None
    if not labels:
        raise InputError(f"'{path}' holds no records")
    return Heart(
        tuple(torch.tensor(r, dtype=torch.float64) for r in rows),
        tuple(torch.tensor([name in NUMBERS for name in n]) for n in names),
        torch.tensor(labels, dtype=torch.float64),
        torch.arange(len(labels)),
    )


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    if not path.is_file():
        raise InputError(f"no file '{path}'")
    with path.open(newline="", encoding="utf-8") as file:
        for line, row in enumerate(csv.reader(file), 1):
            if line == 1 and tuple(row) != HEADER:
                raise InputError(f"{path}, line 1: the columns should be {','.join(HEADER)}")
            if line > 1 and row:
                if len(row) != len(HEADER):
                    raise InputError(f"{path}, line {line}: {len(row)} columns where {len(HEADER)} are documented")
                yield line, dict(zip(HEADER, row, strict=True))


def _features(column: str, text: str, missing: bool) -> dict[str, float]:
    """What one entry sets; KeyError or ValueError where it is not documented."""
    if column in CATEGORIES:
        if text not in CATEGORIES[column]:
            raise KeyError(text)
        return {f"{column}={text}": 1.0}
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    if missing and column in _ZERO_IS_MISSING and number == 0:
        return {column: math.nan, f"{column}=?": 1.0}
    return {column: number}


def standardise(x: Tensor, numeric: Tensor, train: Tensor) -> Tensor:
    """z-scores of the numbers of one silo (N, D), mean and sd from the records of `train` (N,) bool; missing ones 0.

    A column that does not vary among them is only centred.
    """
    if not bool(train.any()):
        raise InputError("no record is left to train on")
    known = x[train]
    mean = known.nanmean(0)
    sd = (known - mean).square().nanmean(0).sqrt()
    scaled = (x - mean) / torch.where(sd > 0, sd, 1.0)
    return torch.where(numeric, scaled.nan_to_num(0.0), x)


def split_network(
    hidden: Sequence[int] = (8, 8, 2), activation: Activation = "tanh", seed: int = 0, bayesian: bool = True
) -> Program:
    """eta = h(x)' w, h a network whose weights are points (`pyro.param`), one entry of `hidden` a layer.

    The paper's has two layers of 8 units and a last one of 2. `bayesian`: w ~ N(0, 1); otherwise w and a last bias are
    points too, as in a split NN. `seed` draws the starting weights, N(0, 1 / inputs).
    """
    act = _checked(hidden, activation)

    def program(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(seed)

        def start(*shape: int) -> Callable[[], Tensor]:
            return lambda: torch.randn(shape, generator=generator, dtype=x.dtype) / math.sqrt(shape[0])

        h = x
        for layer, units in enumerate(hidden):
            weight = pyro.param(f"weight{layer}", start(h.shape[-1], units))
            h = act(h @ weight + pyro.param(f"bias{layer}", lambda units=units: x.new_zeros(units)))
        if bayesian:
            w = pyro.sample("w", Normal(x.new_zeros(hidden[-1]), 1.0).to_event(1))
            return h @ w
        return h @ pyro.param("w", start(hidden[-1])) + pyro.param("bias", lambda: x.new_zeros(()))

    return program


def bayesian_network(
    hidden: Sequence[int] = (8, 8, 2), activation: Activation = "tanh", linear: bool = False, scale: float = 1.0
) -> Program:
    """The same network with every weight sampled: weights N(0, 1 / inputs), biases N(0, 1), w ~ N(0, scale^2).

    `linear` adds x' beta with beta ~ N(0, 1). The prior's mean is a saddle: start elsewhere.
    """
    act = _checked(hidden, activation)

    def program(x: Tensor) -> Tensor:
        h = x
        for layer, units in enumerate(hidden):
            n_in = h.shape[-1]
            weight = pyro.sample(f"weight{layer}", Normal(x.new_zeros(n_in, units), 1 / math.sqrt(n_in)).to_event(2))
            h = act(h @ weight + pyro.sample(f"bias{layer}", Normal(x.new_zeros(units), 1.0).to_event(1)))
        eta = h @ pyro.sample("w", Normal(x.new_zeros(hidden[-1]), scale).to_event(1))
        if linear:
            eta = eta + x @ pyro.sample("beta", Normal(x.new_zeros(x.shape[-1]), 1.0).to_event(1))
        return eta

    return program


def _checked(hidden: Sequence[int], activation: str) -> Callable[[Tensor], Tensor]:
    if not hidden or any(type(units) is not int or units < 1 for units in hidden):
        raise InputError(f"hidden holds the units of each layer, whole numbers from 1 on, not {tuple(hidden)!r}")
    if activation not in _ACTIVATIONS:
        raise InputError(f"activation '{activation}' is unknown; choose {' or '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[activation]
