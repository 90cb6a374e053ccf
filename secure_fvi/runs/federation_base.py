"""What horizontal and vertical runs have in common once their configuration is read."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secure_fvi.errors import InputError
from secure_fvi.privacy.settings import DP
from secure_fvi.runs.config import Config
from secure_fvi.runs.options import resolved
from secure_fvi.runs.wording import nearest


@dataclass(frozen=True)
class FederationBase(ABC):
    """All that a run needs, checked: only for a process that plays all parties."""

    config: Config  # with every default written out
    description: str
    algorithm: Any
    aggregation: Any
    privacy: DP | None

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.config.run.dtype == "float64" else torch.float32

    @property
    def threads(self) -> int:
        assert self.config.run.threads != "auto"
        return self.config.run.threads

    @abstractmethod
    def digest(self) -> str:
        """SHA-256 of all silos' data, in hex: a run is continued and compared on the data it began with."""

    def provenance(self) -> dict[str, str]:
        """What carried the messages, and what all parties agreed on beforehand, for the report; no secret, no path."""
        return {"engine": "one process"}

    @abstractmethod
    def fit(self, **common: Any) -> Any:
        """Run it: a `RunSummary` with `sample` and `save`."""


def digest_of(silos: Mapping[str, Mapping[str, Tensor]]) -> str:
    """SHA-256 over names, shapes, types and values, in hex."""
    state = hashlib.sha256()
    for silo, data in silos.items():
        for name, tensor in sorted(data.items()):
            state.update(repr((silo, name, tuple(tensor.shape), str(tensor.dtype))).encode())
            state.update(tensor.contiguous().numpy().tobytes())
    return state.hexdigest()


def written_out(config: Config, threads: int, algorithm: Any, aggregation: Any, privacy: DP | None) -> Config:
    """`config` with every default in it."""
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"threads": threads}),
            "algorithm": type(config.algorithm)(name=config.algorithm.name, **resolved(algorithm)),
            "aggregation": type(config.aggregation)(kind=config.aggregation.kind, **resolved(aggregation)),
            "privacy": config.privacy and config.privacy.model_copy(update=resolved(privacy)),
        }
    )


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
