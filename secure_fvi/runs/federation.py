"""From a configuration to what `fit` takes: model, silos' data and ids, algorithm, secure sum."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secure_fvi.compiled import choose_threads
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel
from secure_fvi.fitting import work_of
from secure_fvi.models.base import Dataset, program
from secure_fvi.privacy.settings import DP
from secure_fvi.runs.config import Config, Partition
from secure_fvi.runs.options import AGGREGATIONS, ALGORITHMS, PRIVACIES, build, named, resolved
from secure_fvi.runs.tables import RECORD_ID, read_table
from secure_fvi.runs.wording import nearest, unknown_key


@dataclass(frozen=True)
class Federation:
    """All that a run needs, checked. Holds every silo's data: only for a process that plays all parties."""

    config: Config  # with every default written out
    model: FederatedModel
    description: str
    silo_ids: tuple[str, ...]
    silos: tuple[dict[str, Tensor], ...]
    record_ids: tuple[Tensor, ...]
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

    def digest(self) -> str:
        """SHA-256 of all silos' data, in hex: a run is continued and compared on the data it began with."""
        state = hashlib.sha256()
        for silo, data, ids in zip(self.silo_ids, self.silos, self.record_ids, strict=True):
            for name, tensor in sorted({**data, RECORD_ID: ids}.items()):
                state.update(repr((silo, name, tuple(tensor.shape), str(tensor.dtype))).encode())
                state.update(tensor.contiguous().numpy().tobytes())
        return state.hexdigest()


def federate(config: Config, data_dir: Path | None = None) -> Federation:
    """Load what `config` names. Raises InputError, naming the key, for anything that cannot be used."""
    algorithm = build(named(ALGORITHMS, "algorithm.name", config.algorithm.name), config.algorithm.options, "algorithm")
    aggregation = build(
        named(AGGREGATIONS, "aggregation.kind", config.aggregation.kind),
        config.aggregation.options,
        "aggregation",
    )
    privacy = None
    if config.privacy is not None:
        cls = named(PRIVACIES, "privacy.unit", config.privacy.unit)
        privacy = build(cls, config.privacy.options, "privacy")
    model, description = _model(config)
    if config.partition is not None:
        ids, silos, record_ids = _partitioned(_dataset(config, data_dir), config.partition, config.seed)
    else:
        ids, silos, record_ids = _from_files(config)
    threads = _threads(silos, algorithm) if config.run.threads == "auto" else config.run.threads
    complete = config.model_copy(
        update={
            "run": config.run.model_copy(update={"threads": threads}),
            "algorithm": type(config.algorithm)(name=config.algorithm.name, **resolved(algorithm)),
            "aggregation": type(config.aggregation)(kind=config.aggregation.kind, **resolved(aggregation)),
            "privacy": config.privacy and config.privacy.model_copy(update=resolved(privacy)),
        }
    )
    return Federation(complete, model, description, ids, silos, record_ids, algorithm, aggregation, privacy)


def _model(config: Config) -> tuple[FederatedModel, str]:
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
    return FederatedModel(_function(Path(path), name), **roles), f"{name} in {Path(path).name}"


def _function(path: Path, name: str) -> Any:
    """The attribute `name` of the Python file `path`, which is run as any module is on import."""
    if not path.is_file():
        raise InputError(f"model.function: no file '{path}'")
    spec = importlib.util.spec_from_file_location(f"secure_fvi_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(f"model.function: {path} fails on import: {type(error).__name__}: {error}") from error
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if not callable(getattr(module, name, None)):
        raise InputError(f"model.function: {path} has no function '{name}'{nearest(name, functions)}")
    return getattr(module, name)


def _dataset(config: Config, data_dir: Path | None) -> Dataset:
    load = program(str(config.model.program)).load
    options = [name for name in inspect.signature(load).parameters if name != "data_dir"]
    for key in config.data:
        if key not in options:
            raise InputError(unknown_key("data", key, options))
    dataset: Dataset = load(data_dir, **config.data)
    return dataset


def _threads(silos: Sequence[Mapping[str, Tensor]], algorithm: Any) -> int:
    """Written into the configuration, since sums depend on the number of threads in their last bits."""
    return choose_threads(work_of(silos, algorithm))


Parts = tuple[tuple[str, ...], tuple[dict[str, Tensor], ...], tuple[Tensor, ...]]


def _partitioned(dataset: Dataset, partition: Partition, seed: int) -> Parts:
    total, ids = len(dataset), partition.silo_ids
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


def _even(total: int, count: int) -> tuple[int, ...]:
    return tuple(total // count + (j < total % count) for j in range(count))


def _from_files(config: Config) -> Parts:
    tables = [read_table(Path(s.data), f"silo[{j}].data") for j, s in enumerate(config.silo)]
    given = [table.pop(RECORD_ID, None) for table in tables]
    if any(ids is None for ids in given):
        if not all(ids is None for ids in given):
            raise InputError(f"'{RECORD_ID}' must stand in all silos' files or in none")
        starts = _starts([_rows(table) for table in tables])
        given = [torch.arange(a, b) for a, b in starts]
    record_ids = tuple(ids for ids in given if ids is not None)
    for j, ids in enumerate(record_ids):
        if ids.dtype != torch.int64 or ids.ndim != 1:
            raise InputError(f"silo[{j}].data: '{RECORD_ID}' must be whole numbers, one a record")
    return tuple(silo.id for silo in config.silo), tuple(tables), record_ids


def _rows(table: Mapping[str, Tensor]) -> int:
    return len(next(iter(table.values()))) if table else 0


def _starts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = [sum(sizes[: j + 1]) for j in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]
