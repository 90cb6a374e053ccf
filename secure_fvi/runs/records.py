"""The records and the model that a configuration names, read at the machine that holds them: a silo reads its own.

A silo's records are its own table (`secure_fvi.tables`), an npz of tensors, or the part of a program's records that
`[partition]` gives it. A formula is data: its dictionary and options are read here, and no code of a job is.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from secure_fvi.errors import DataError, InputError, JobError
from secure_fvi.federated_model import FederatedModel, Schema, read_data, side_by_side
from secure_fvi.later import Later
from secure_fvi.models.base import Dataset, program
from secure_fvi.privacy.settings import exact_totals
from secure_fvi.runs.config import (
    COLUMNS,
    MODELS,
    OTHERS,
    RECORD_ID,
    TABLE,
    TABLES,
    Config,
    Model,
    Partition,
    SiloFile,
    build,
    chosen,
    named,
    resolved,
)
from secure_fvi.runs.wording import nearest, unknown_key

if TYPE_CHECKING:
    from secure_fvi import dictionary as dictionaries
    from secure_fvi import formula as formulas
    from secure_fvi.dictionary import Dictionary, Missing
    from secure_fvi.mixed_model import MixedModel
    from secure_fvi.tables import Coded, Coding
else:
    dictionaries = Later("secure_fvi.dictionary")  # a silo whose data are arrays has none
    formulas = Later("secure_fvi.formula")

_log = logging.getLogger(__name__)
#: Rows of a record, or groups of a silo, that an option may name: each is laid out for as many.
_MOST = 100_000
_Finite = Annotated[float, Field(allow_inf_nan=False)]


def read_table(path: Path, key: str, spoilt: list[str] | None = None) -> dict[str, Tensor]:
    """The tensors in `path`, each (N, ...) with N at least 1; `key` is the configuration key that named it.

    Without a dictionary every cell of a table is a number, and columns `x[0]`, `x[1]`, ... form one tensor (N, k), all
    float64 but whole `record_id`; npz and safetensors keep their own types. Nothing is unpickled. Raises InputError for
    a missing or malformed file. spoilt: rows that cannot be read are left out, and it is told of them.
    """
    arrays: dict[str, Callable[[Path], dict[str, Tensor]]] = {".npz": _read_npz, ".safetensors": _read_safetensors}
    if path.suffix.lower() in TABLES:
        tensors = _coded(path, key, numbers, spoilt=spoilt)
    elif path.suffix.lower() in arrays:
        with named_file(path, key):
            tensors = arrays[path.suffix.lower()](path)
    else:
        cure = OTHERS.get(path.suffix.lower())
        known = ", ".join((*TABLES, *arrays))
        raise InputError(f"{key} = '{path}': must end in {known}{f': {cure}' if cure else ''}")
    if not tensors:
        raise InputError(f"{key}: {path}: holds no columns")
    sizes = {name: len(t) if t.ndim else None for name, t in tensors.items()}
    if len(set(sizes.values())) > 1 or None in sizes.values():
        rows = ", ".join(f"'{name}' has {size}" for name, size in sizes.items())
        raise InputError(f"{key}: {path}: all arrays must have one row a record, but {rows}")
    if not next(iter(sizes.values())):
        raise InputError(f"{key}: {path}: no records; leave the silo out")
    return tensors


def read_silo(silo: SiloFile, key: str, by_record: bool, spoilt: list[str] | None = None) -> dict[str, Tensor]:
    """A silo's own table, coded by its dictionary if it has one. by_record: whether records are private one by one,
    each of whose rows then has to follow from that record alone: raises InputError for ids beside `record_id`.
    spoilt: rows that cannot be read are left out, and it is told of them."""
    path = Path(silo.data)
    if silo.dictionary is None:
        return read_table(path, key, spoilt=spoilt)
    dictionary = _own_dictionary(silo, key, by_record)
    return _coded(path, key, dictionary, silo, spoilt)


def _own_dictionary(silo: SiloFile, key: str, by_record: bool) -> Dictionary:
    dictionary = site_dictionary(str(silo.dictionary))
    ids = [name for name, column in dictionary.columns.items() if column.kind == "id" and name != RECORD_ID]
    if by_record and ids:
        raise InputError(
            f"{key}: column '{ids[0]}' is an id, whose numbers follow from which others are in the table: under record "
            "privacy a record of a new one would change the others' rows. Give it as a category with its levels, or as "
            "an integer, or leave it out of the dictionary"
        )
    return dictionary


def _coded(
    path: Path, key: str, coding: Coding, silo: SiloFile | None = None, spoilt: list[str] | None = None
) -> dict[str, Tensor]:
    with named_file(path, key):
        found = _read(path, coding, silo, spoilt=spoilt)
        return side_by_side({name: torch.from_numpy(values) for name, values in found.columns.items()}, str(path))


def _read(
    path: Path,
    coding: Coding,
    silo: SiloFile | None = None,
    only: Iterable[str] | None = None,
    missing: Missing | None = None,
    spoilt: list[str] | None = None,
    own: str = RECORD_ID,
) -> Coded:
    """The columns of a table, of those `only`, and in this site's log how many rows were left out. spoilt: is told of
    those that cannot be read, which are left out too. own: the column of records' ids, if any."""
    query, said = (silo.query, silo.missing) if silo is not None else (None, None)
    files = _files(path, silo)
    ending = path.suffix.lower()
    # Of a file with another ending, and of no file, the reader says what to do.
    read_coded: Callable[..., Coded] = named(TABLES, "data", ending if ending in TABLES else ".csv")
    left_out_of = None if spoilt is None else own
    found = read_coded(files, coding, query, missing or said or "refuse", only, spoilt=left_out_of)
    if spoilt is not None:
        spoilt += found.spoilt
    for name, rows in found.left_out.items():
        _log.warning("%s: of %d rows, those with a gap in '%s', %d, are left out", path, found.read, name, rows)
    return found


def _files(path: Path, silo: SiloFile | None) -> dict[str, Path]:
    return {TABLE: path} | ({n: Path(other) for n, other in silo.tables.items()} if silo is not None else {})


def numbers(names: Iterable[str], ids: Collection[str] = ()) -> Dictionary:
    """Of a table without a dictionary: all columns hold numbers, but those named `ids`."""
    kinds: dict[str, Literal["id", "integer", "number"]] = dict.fromkeys(ids, "id")
    kinds |= {n: "integer" if n == RECORD_ID else "number" for n in names if n not in kinds}
    return dictionaries.Dictionary({n: dictionaries.Column(k) for n, k in kinds.items()})


@contextmanager
def named_file(path: Path, key: str) -> Iterator[None]:
    """Errors with the configuration key and the file in front."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{key}: no file '{path}'") from None
    except OSError as error:
        raise InputError(f"{key}: cannot read '{path}': {error.strerror or error}") from error
    except InputError as error:
        raise InputError(f"{key}: {error}" if str(path) in str(error) else f"{key}: {path}: {error}") from None


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


def silo_part(
    config: Config,
    silo: str,
    data_dir: Path | None = None,
    spoilt: list[str] | None = None,
    as_read: dict[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], Tensor, bool]:
    """One silo's records and their ids, without a look at another silo's file; whether the ids are the data's own.

    The part of a program's records that `config` gives the silo, or its own file, whose rows are numbered where it
    has no column of ids. spoilt: rows that cannot be read are left out, and it is told of them. as_read: is given the
    file's columns before any row is left out for what the job asks, as numbers that its type does not hold.
    """
    if config.partition is not None:
        ids, silos, record_ids = _partitioned(_dataset(config, data_dir), config.partition, config.seed)
        at = ids.index(silo)
        return silos[at], record_ids[at], True
    file, key = file_of(config, silo)
    table = read_silo(file, key, _by_record(config), spoilt)
    if as_read is not None:
        as_read.update(table)
    given = table.pop(RECORD_ID, None)
    own = torch.arange(len(next(iter(table.values())))) if given is None else given
    _check_ids(key, own)
    if spoilt is not None:
        kept = _whole(table, own, spoilt, _fitted_as(config))
        table, own = {name: value[kept] for name, value in table.items()}, own[kept]
    return table, own, given is not None


def _whole(table: Mapping[str, Tensor], ids: Tensor, spoilt: list[str], dtype: torch.dtype) -> Tensor:
    """(N,) which rows are finite throughout, in numbers of the run's `dtype`, and have an id of their own. spoilt: is
    told which columns are not."""
    fits = ids >= 0
    _, place, counts = ids.unique(return_inverse=True, return_counts=True)
    fits &= (counts == 1)[place]
    wrong = {RECORD_ID: ~fits}
    for name, value in table.items():
        if value.is_floating_point():
            wrong[name] = ~torch.isfinite(value.to(dtype).reshape(len(value), -1)).all(1)
    for name, bad in wrong.items():
        fits &= ~bad
        if bool(bad.any()):
            spoilt.append(f"column '{name}': no finite number, or no id of its own, in {int(bad.sum())} rows")
    return fits


def _by_record(config: Config) -> bool:
    return config.privacy is not None and config.privacy.unit == "record"


def model_of(config: Config) -> tuple[FederatedModel, str]:
    """The model that `config` names, from this machine's files, and what it is called."""
    if config.model.program is not None:
        try:
            found = program(config.model.program)
        except InputError as error:
            raise InputError(f"model.program: {error}") from error
        return found.model, f"{found.name}: {found.description}"
    if config.model.formula is not None:
        return formula_model(config.model), config.model.formula
    path, _, name = str(config.model.function).rpartition(":")
    roles: dict[str, Any] = {}
    if config.model.record_plate is not None:
        roles["record_plate"] = config.model.record_plate
    if config.model.silo_sites is not None:
        roles["silo_sites"] = config.model.silo_sites
    roles["start"] = config.model.start
    return FederatedModel(python_function(Path(path), name, "model.function"), **roles), f"{name} in {Path(path).name}"


@dataclass(frozen=True)
class FormulaOptions:
    """What `[model.options]` of a formula may hold: see `secure_fvi.mixed_model.glmm`."""

    priors: dict[str, _Finite | tuple[_Finite, _Finite]] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    record: str | None = None
    missing: Literal["refuse", "drop"] = "refuse"
    most: dict[str, Annotated[int, Field(ge=1, le=_MOST)]] = field(default_factory=dict)


def formula_columns(formula: str, dictionary: Dictionary) -> list[str]:
    """The table's columns that a formula uses. Raises InputError."""
    columns_of: Callable[[str, Dictionary], list[str]] = named(COLUMNS, "model", "formula")
    return columns_of(formula, dictionary)


def formula_families() -> tuple[str, ...]:
    """All that there are."""
    return tuple(formulas.FAMILIES)


def formula_model(model: Model) -> MixedModel:
    """The mixed model of a formula and a dictionary. Nothing of it is run but listed functions of columns.

    Raises InputError.
    """
    options: FormulaOptions = build(FormulaOptions, model.options, "model.options")
    glmm: Callable[..., MixedModel] = named(MODELS, "model", "formula")
    return glmm(str(model.formula), model.family or "gaussian", dictionary=job_dictionary(model), **vars(options))


def site_dictionary(path: str) -> Dictionary:
    """The dictionary in a site's own file. Raises InputError."""
    return dictionaries.read_dictionary(Path(path))


def job_dictionary(model: Model) -> Dictionary:
    """The dictionary of a formula, from its file or as the job has it. Raises InputError."""
    if isinstance(model.dictionary, dict):
        return dictionaries.dictionary_of(model.dictionary, "model.dictionary")
    return site_dictionary(str(model.dictionary))


def formula_said(model: Model) -> dict[str, Any]:
    """All that a formula's model follows from, in one form: what its hash is over. Raises InputError."""
    options = resolved(build(FormulaOptions, model.options, "model.options"))
    said = {"formula": model.formula, "family": model.family or "gaussian", "options": options}
    return {**said, "dictionary": job_dictionary(model).to_table()}


def settled(config: Config) -> Config:
    """The job of a formula as it leaves this machine: with its dictionary in place of the file, and the algorithm that
    its model chooses where nobody named one. Others stay as they are. Raises InputError."""
    if config.model.formula is None:
        return config
    held = config.model.model_copy(update={"dictionary": job_dictionary(config.model).to_table()})
    found = config.model_copy(update={"model": held})
    if "name" in config.algorithm.model_fields_set:
        return found
    own = formula_model(held).default_algorithm
    options = {**resolved(own), **config.algorithm.options}
    return found.model_copy(update={"algorithm": type(config.algorithm)(name=own.name, **options)})


def formula_part(
    config: Config, silo: str, model: MixedModel, spoilt: list[str] | None = None
) -> tuple[dict[str, Any], Coded]:
    """One silo's records as a formula's program takes them, and its rows as they were read: coded by the silo's own
    dictionary, or the job's where it has none. spoilt: records that cannot be read, or do not fit the formula, are left
    out, and it is told of them; of the rows as they were read, the former alone. Raises DataError, InputError."""
    file, key = file_of(config, silo)
    read = used = _formula_read(file, key, model, spoilt)
    if spoilt is not None:
        used = model.those_that_fit(read, silo, spoilt, _fitted_as(config), _besides(file.fitting, model))
    laid: dict[str, Any] = model.prepared({silo: _own(used, model)}, limited=spoilt is None)[silo]
    return laid, _own(read, model)


def _fitted_as(config: Config) -> torch.dtype:
    """The type that holds a record's numbers, if the record is to be used: where the server sees totals exactly the
    shortest that a job may ask for, or else two jobs' would differ by a record of which one's holds none."""
    return torch.float32 if exact_totals(chosen(config)[2]) else config.run.torch_dtype


def _besides(listed: Sequence[Model], model: MixedModel) -> list[MixedModel]:
    """The models of formulas that are there beside `model`. How many rows a record may have is asked of those with the
    same records: by another's, one row would take others out."""
    found = []
    for said in listed:
        with suppress(InputError):  # of another family's response, or other columns
            made = formula_model(said)
            if made.record_label != model.record_label:
                options = {name: value for name, value in said.options.items() if name != "most"}
                made = formula_model(said.model_copy(update={"options": options}))
            if (made.text, made.family, made.of.most) != (model.text, model.family, model.of.most):
                found.append(made)
    return found


def formula_rows(silo: SiloFile, key: str, model: MixedModel, spoilt: list[str] | None = None) -> Coded:
    """A silo's rows as a formula's model reads them; `key` is the configuration key that named its table. spoilt: rows
    that cannot be read are left out, and it is told of them. Raises DataError, InputError."""
    return _own(_formula_read(silo, key, model, spoilt), model)


def formula_rows_alone(config: Config, silo: str, model: MixedModel) -> Coded:
    """The same under record privacy, also those with a gap in a column that is another formula's."""
    file, key = file_of(config, silo)
    return formula_rows(file.model_copy(update={"complete": ()}), key, model, [])


def file_of(config: Config, silo: str) -> tuple[SiloFile, str]:
    """A silo's own table, and the key of `config` that names it."""
    return next((s, f"silo[{at}].data") for at, s in enumerate(config.silo) if s.id == silo)


def _own(found: Coded, model: MixedModel) -> Coded:
    """The columns of `model` alone."""
    used = {name: found.columns[name] for name in found.columns if name in model.columns}
    return found._replace(columns=used, names={name: found.names[name] for name in found.names if name in used})


def _formula_read(silo: SiloFile, key: str, model: MixedModel, spoilt: list[str] | None = None) -> Coded:
    """With the columns of other formulas beside it."""
    path = Path(silo.data)
    with named_file(path, f"silo '{silo.id}' ({key})"):
        dictionary, missing = _of_formula(silo, model)
        own = RECORD_ID if model.record_label is None else ""  # records that are groups of rows have no column of ids
        return _read(path, dictionary, silo, {*model.columns, *silo.complete}, missing, spoilt, own)


def _of_formula(silo: SiloFile, model: MixedModel) -> tuple[Dictionary, Missing | None]:
    """By which a silo's rows are coded for a formula, and whether the formula says what is done about gaps."""
    dictionary = model.of.dictionary
    if silo.dictionary is None:
        return dictionary, model.of.missing
    own = site_dictionary(silo.dictionary)  # whether a gap may be left out is then its owner's to say
    if unlike := dictionary.differences(own):
        raise InputError(f"its dictionary is not that of the formula: {'; '.join(unlike)}")
    return own, None


def schema_beforehand(config: Config, silo: str, model: MixedModel | None, dtype: torch.dtype) -> Schema:
    """The schema of one silo's records by job, dictionary and the names of its file's columns: whatever rows it has,
    and whether or not they can be read. model: of a formula. Raises InputError where a record would have a say, or
    where the site's own files are not in order: what no two tables that differ in a record differ in."""
    if config.partition is not None:
        raise InputError("[partition]: the records of a program say what they are")
    own, key = file_of(config, silo)
    path = Path(own.data)
    with named_file(path, key):
        for file in _files(path, own).values():
            with file.open("rb"):
                pass
        if path.suffix.lower() not in TABLES:
            raise InputError(f"which arrays it holds, and of which shapes, is seen in it alone; {_WITH_DICTIONARY}")
        if model is not None:
            dictionary, only = _of_formula(own, model)[0], model.columns
        elif own.dictionary is not None:
            dictionary = _own_dictionary(own, key, _by_record(config))
            only = list(dictionary.columns)
        else:
            with _reader(path).opened(_files(path, own), own.query, spoilt=True) as table:
                dictionary, only = numbers(table.types), list(table.types)
        dictionary.check_reviewed(only)
        _check_columns(path, own, only)
        made = _reader(path).made_row({name: dictionary[name] for name in only})
        rows: dict[str, Any]
        if model is not None:
            rows = model.prepared({silo: made})[silo]
        else:
            rows = side_by_side({n: torch.from_numpy(v) for n, v in made.columns.items() if n != RECORD_ID}, str(path))
        return read_data(rows, silo, dtype)[0]


def _reader(path: Path) -> Any:
    """The module that reads such tables, which a silo whose data are arrays does without."""
    return importlib.import_module(TABLES[path.suffix.lower()].partition(":")[0])


def _check_columns(path: Path, silo: SiloFile, wanted: Collection[str]) -> None:
    """Raise InputError where a table lacks a column."""
    files = _files(path, silo)
    try:
        with _reader(path).opened(files, silo.query, spoilt=True) as table:
            known = list(table.types)
    except DataError:  # of a cell, perhaps: to be seen when all are read
        return
    lacking = [name for name in wanted if name not in known]
    if lacking:
        raise InputError(f"the table has no column '{lacking[0]}'{nearest(lacking[0], known)}")


_WITH_DICTIONARY = "a table with a dictionary says it beforehand"


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
            raise JobError(unknown_key("data", key, options))
    dataset: Dataset = load(data_dir, **config.data)
    return dataset


def _partitioned(dataset: Dataset, partition: Partition, seed: int) -> Parts:
    total, ids = len(dataset), partition.silo_ids
    if partition.by_client:
        return _by_client(dataset, ids)
    count = len(ids)
    sizes = partition.sizes or tuple(total // count + (j < total % count) for j in range(count))
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


def _check_ids(key: str, ids: Tensor) -> None:
    if ids.dtype != torch.int64 or ids.ndim != 1:
        raise InputError(f"{key}: '{RECORD_ID}' must be whole numbers, one a record")
