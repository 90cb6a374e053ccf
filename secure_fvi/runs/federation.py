"""From a configuration to what `fit` takes: model, silos' data and ids, algorithm, secure sum."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secure_fvi.building import build_problem
from secure_fvi.compiled import choose_threads
from secure_fvi.contracts import check_repeats
from secure_fvi.disclosure import Disclosure, disclose
from secure_fvi.errors import InputError
from secure_fvi.federated_model import FederatedModel, check_schemas_agree, read_data
from secure_fvi.fitting import fit, work_of
from secure_fvi.models.base import Dataset, program
from secure_fvi.models.vertical_base import PROGRAMS
from secure_fvi.privacy.settings import DP
from secure_fvi.results import Result
from secure_fvi.runs.config import Config, Partition
from secure_fvi.runs.federation_base import FederationBase, digest_of, python_function, written_out
from secure_fvi.runs.options import chosen
from secure_fvi.runs.tables import RECORD_ID, read_table
from secure_fvi.runs.wording import unknown_key


@dataclass(frozen=True)
class Federation(FederationBase):
    """All that a run over partitioned records needs. Holds every silo's data."""

    model: FederatedModel
    silo_ids: tuple[str, ...]
    silos: tuple[dict[str, Tensor], ...]
    record_ids: tuple[Tensor, ...]

    def digest(self) -> str:
        parts = zip(self.silo_ids, self.silos, self.record_ids, strict=True)
        return digest_of({silo: {**data, RECORD_ID: ids} for silo, data, ids in parts})

    def fit(self, **common: Any) -> Result:
        """Run it; `common` holds the options that all runs share."""
        return fit(
            self.model,
            self.silos,
            self.algorithm,
            self.aggregation,
            self.privacy,
            silo_ids=self.silo_ids,
            record_ids=self.record_ids,
            batch_silos=self.config.run.batch_silos,
            **common,
        )


def federate(config: Config, data_dir: Path | None = None) -> FederationBase:
    """Load what `config` names. Raises InputError, naming the key, for anything that cannot be used."""
    algorithm, aggregation, privacy = chosen(config)
    if config.vertical:
        from secure_fvi.runs.vertical_federation import federate_vertical

        return federate_vertical(config, data_dir, algorithm, aggregation, privacy)
    return _horizontal(config, data_dir, algorithm, aggregation, privacy)


def _horizontal(
    config: Config, data_dir: Path | None, algorithm: Any, aggregation: Any, privacy: DP | None
) -> Federation:
    if config.model.program in PROGRAMS:
        raise InputError(
            f"model.program = '{config.model.program}': its silos hold different columns of the same people; set "
            "algorithm.name = 'vertical'"
        )
    model, description = model_of(config)
    if config.partition is not None:
        ids, silos, record_ids = _partitioned(_dataset(config, data_dir), config.partition, config.seed)
    else:
        ids, silos, record_ids = _from_files(config)
    threads = _threads(silos, algorithm) if config.run.threads == "auto" else config.run.threads
    complete = written_out(config, threads, algorithm, aggregation, privacy)
    return Federation(complete, description, algorithm, aggregation, privacy, model, ids, silos, record_ids)


def disclosure_of(config: Config, data_dir: Path | None = None, traced: bool = False) -> Disclosure:
    """What the job of `config` discloses. traced: with blocks and noise, for which every silo's data are read.

    Raises InputError for a job that no engine runs.
    """
    algorithm, aggregation, privacy = chosen(config)
    if config.vertical:
        if traced:
            raise InputError("blocks of silos with different columns follow from the number of people: a row each")
        count = len(config.silo) or len(federate(config, data_dir).data.silos)  # type: ignore[attr-defined]
        return disclose(algorithm, aggregation, privacy, count)
    ids = config.partition.silo_ids if config.partition is not None else [silo.id for silo in config.silo]
    found = disclose(algorithm, aggregation, privacy, len(ids))
    if not traced:
        return found
    of = federate(config, data_dir)
    assert isinstance(of, Federation)
    schema = check_schemas_agree(
        {name: read_data(rows, name, of.dtype)[0] for name, rows in zip(of.silo_ids, of.silos, strict=True)}
    )
    problem = build_problem(
        of.model, schema, algorithm, sorted(ids), config.seed, config.run.device, of.dtype, False, privacy
    )
    program = algorithm.server(problem)
    return found.of_program(program.tables, program.terms, aggregation)


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
