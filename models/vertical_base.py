"""What a shipped vertical program is: silos' columns of the same people, a program for each, and the response."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from secure_fvi.errors import InputError

#: Program name -> "module:attribute" of its `VerticalProgram`, imported only when asked for.
PROGRAMS = {
    "heart": "secure_fvi.models.vertical_programs:HEART",
    "vertical-adult": "secure_fvi.models.vertical_programs:ADULT",
    "vertical-logistic": "secure_fvi.models.vertical_programs:LOGISTIC",
    "vertical-poisson": "secure_fvi.models.vertical_programs:POISSON",
}


@dataclass(frozen=True)
class VerticalDataset:
    """Aligned records: row i is the same person everywhere."""

    silos: Mapping[str, dict[str, Tensor]]  # by id, the arguments of the silo's predictor, (N, ...)
    predictors: Mapping[str, Callable[..., Tensor]]  # by id, a Pyro program that returns eta
    response: Tensor  # (N,)
    offset: Tensor | None = None  # (N,)

    def __post_init__(self) -> None:
        if set(self.silos) != set(self.predictors):
            raise InputError("each silo needs its predictor")


@dataclass(frozen=True)
class VerticalProgram:
    """What `[model] program = "..."` names in a vertical run. `load` as in `models.base.Program`."""

    name: str
    description: str
    likelihood: str  # as in `[model] likelihood`
    load: Callable[..., VerticalDataset]
    likelihood_options: Mapping[str, Any] = field(default_factory=dict)
    scaled_by_records: bool = False  # `load` estimates scales from all people, which no epsilon covers


def vertical_program(name: str) -> VerticalProgram:
    """The program called `name`, one of PROGRAMS."""
    module, attribute = PROGRAMS[name].split(":")
    found: VerticalProgram = getattr(importlib.import_module(module), attribute)
    return found
