"""From a configuration to what `fit` takes: model, silos' data and ids, algorithm, secure sum."""

from __future__ import annotations

import hashlib
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fvi.algorithms.vertical.likelihoods import Likelihood
from secure_fvi.alignment import Alignment, Normalisation, Prepared, align, prepare, sorted_order
from secure_fvi.building import Machine, build_problem, numbers_of, work_of
from secure_fvi.checkpoints import text_of
from secure_fvi.columns import Columns, VerticalResult
from secure_fvi.compiled import choose_threads
from secure_fvi.disclosure import Disclosure, disclose
from secure_fvi.errors import InputError
from secure_fvi.exported import Elsewhere
from secure_fvi.federated_model import FederatedModel, check_repeats, read_data
from secure_fvi.fitting import check_schemas_agree, fit
from secure_fvi.mixed_model import MixedModel
from secure_fvi.models.base import VERTICAL
from secure_fvi.models.vertical_programs import VerticalDataset, vertical_program
from secure_fvi.privacy.settings import DP
from secure_fvi.randomness import derive_key
from secure_fvi.results import Result
from secure_fvi.runs.columns import read_people, response_columns, silo_columns
from secure_fvi.runs.config import LIKELIHOODS, RECORD_ID, Config, SiloFile, build, chosen, named, resolved
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.records import (
    Parts,
    _by_record,
    _check_ids,
    _dataset,
    _partitioned,
    formula_rows,
    model_of,
    read_silo,
    read_table,
    settled,
)
from secure_fvi.runs.wording import nearest, unknown_key

_log = logging.getLogger(__name__)

# ---- What horizontal and vertical runs have in common once their configuration is read ----


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
        return self.config.run.torch_dtype

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

    def seal(self, folder: RunDirectory) -> None:  # noqa: B027 - one process has nobody to sign for
        """What is done once all files of a finished run are in `folder`; may be asked for again."""

    @abstractmethod
    def fit(self, **common: Any) -> Any:
        """Run it: a `RunSummary` with `sample` and `save`."""


def digest_of(silos: Mapping[str, Mapping[str, Tensor]]) -> str:
    """SHA-256 over names, shapes, types and values, in hex."""
    state = hashlib.sha256()
    for silo, data in silos.items():
        for name, tensor in sorted(data.items()):
            if not isinstance(tensor, Tensor):  # a plain argument
                state.update(repr((silo, name, tensor)).encode())
                continue
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


@dataclass(frozen=True)
class Federation(FederationBase):
    """All that a run over partitioned records needs. Holds every silo's data."""

    model: FederatedModel
    silo_ids: tuple[str, ...]
    silos: tuple[dict[str, Tensor], ...]
    record_ids: tuple[Tensor, ...] | None  # None: each silo numbers its own, as in `sf.fit` without them

    def digest(self) -> str:
        if self.record_ids is None:
            return digest_of(dict(zip(self.silo_ids, self.silos, strict=True)))
        parts = zip(self.silo_ids, self.silos, self.record_ids, strict=True)
        return digest_of({silo: {**data, RECORD_ID: ids} for silo, data, ids in parts})

    def provenance(self) -> dict[str, str]:
        return {**super().provenance(), "model": text_of(self.model)}

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
            progress=False,  # the command shows it
            **common,
        )


def federate(config: Config, data_dir: Path | None = None) -> FederationBase:
    """Load what `config` names. Raises InputError, naming the key, for anything that cannot be used."""
    config = settled(config)
    algorithm, aggregation, privacy = chosen(config)
    if config.vertical:
        return federate_vertical(config, data_dir, algorithm, aggregation, privacy)
    return _horizontal(config, data_dir, algorithm, aggregation, privacy)


def _horizontal(
    config: Config, data_dir: Path | None, algorithm: Any, aggregation: Any, privacy: DP | None
) -> Federation:
    if config.model.program in VERTICAL:
        raise InputError(
            f"model.program = '{config.model.program}': its silos hold different columns of the same people; set "
            "algorithm.name = 'vertical'"
        )
    model, description = model_of(config)
    model.check_declared(privacy)
    ids, silos, record_ids = _records(config, data_dir, model)
    threads = config.run.threads  # written into the configuration: sums depend on their number in the last bits
    threads = choose_threads(work_of(silos, algorithm, privacy)) if threads == "auto" else threads
    complete = written_out(config, threads, algorithm, aggregation, privacy)
    return Federation(complete, description, algorithm, aggregation, privacy, model, ids, silos, record_ids)


def _records(
    config: Config, data_dir: Path | None, model: FederatedModel | Elsewhere
) -> tuple[tuple[str, ...], tuple[dict[str, Tensor], ...], tuple[Tensor, ...] | None]:
    """Every silo's id, its data and the numbers of its records, where it does not number its own."""
    if config.partition is not None:
        return _partitioned(_dataset(config, data_dir), config.partition, config.seed)
    check_files_differ(config.silo)
    if isinstance(model, MixedModel):
        laid = model.prepared({s.id: formula_rows(s, f"silo[{j}].data", model) for j, s in enumerate(config.silo)})
        return tuple(laid), tuple(laid.values()), None
    return _from_files(config)


def check_files_differ(silos: Sequence[SiloFile]) -> None:
    """Refuse one file for two silos, where both read all of it or the same of it: its records would count twice."""
    seen: dict[tuple[Path, str | None], str] = {}
    for silo in silos:
        other = seen.setdefault((Path(silo.data).resolve(), silo.query), silo.id)
        if other != silo.id:
            raise InputError(f"silos '{other}' and '{silo.id}' have the same data, '{silo.data}': it would count twice")


def _from_files(config: Config) -> Parts:
    tables = [read_silo(s, f"silo[{j}].data", _by_record(config)) for j, s in enumerate(config.silo)]
    given = [table.pop(RECORD_ID, None) for table in tables]
    if any(ids is None for ids in given):
        if not all(ids is None for ids in given):
            raise InputError(f"'{RECORD_ID}' must stand in all silos' files or in none")
        for silo, table in zip(config.silo, tables, strict=True):
            check_repeats(table, silo.id)
        starts = _starts([len(next(iter(table.values()))) for table in tables])
        given = [torch.arange(a, b) for a, b in starts]
    record_ids = tuple(ids for ids in given if ids is not None)
    for j, ids in enumerate(record_ids):
        _check_ids(f"silo[{j}].data", ids)
    return tuple(silo.id for silo in config.silo), tuple(tables), record_ids


def _starts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    ends = [sum(sizes[: j + 1]) for j in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def disclosure_of(
    config: Config, data_dir: Path | None = None, model: FederatedModel | Elsewhere | None = None
) -> Disclosure:
    """What the job of `config` discloses. model: its model, traced on every silo's data, for blocks and noise as well;
    the job may be somebody else's, so that who calls says where the model's code runs.

    Raises InputError for a job that no engine runs.
    """
    config = settled(config)
    algorithm, aggregation, privacy = chosen(config)
    if config.vertical:
        if model is not None:
            raise InputError("blocks of silos with different columns follow from the number of people: a row each")
        count = len(config.silo) or len(federate(config, data_dir).data.silos)  # type: ignore[attr-defined]
        return disclose(algorithm, aggregation, privacy, count)
    ids = config.partition.silo_ids if config.partition is not None else [silo.id for silo in config.silo]
    found = disclose(algorithm, aggregation, privacy, len(ids))
    if model is None:
        return found
    if isinstance(model, FederatedModel):
        model.check_declared(privacy)
    names, silos, _ = _records(config, data_dir, model)
    dtype = config.run.torch_dtype
    schema = check_schemas_agree(
        {name: read_data(rows, name, dtype)[0] for name, rows in zip(names, silos, strict=True)}
    )
    problem = build_problem(
        model, schema, algorithm, sorted(ids), config.seed, privacy, Machine(config.run.device, dtype, False)
    )
    program = algorithm.server(problem)
    found = found.of_program(program.tables, program.terms, aggregation)
    return replace(found, uncounted=program.uncounted or "")


# ----
# From a configuration to what `fit` takes: silos with different columns of the same people, aligned

#: The name under which the response's file takes part in the alignment.
_RESPONSE = "response"


@dataclass(frozen=True)
class VerticalFederation(FederationBase):
    """All that a vertical run needs, checked. Holds every silo's data: only for a process that plays all parties."""

    likelihood: Likelihood
    data: VerticalDataset
    alignment: dict[str, Any] | None  # rows by party that matched or did not, where rows were joined by id
    order: str | None  # the digest of their common order, in hex

    def digest(self) -> str:
        known = {"y": self.data.response}
        if self.data.offset is not None:
            known["offset"] = self.data.offset
        return digest_of({**self.data.silos, _RESPONSE: known})

    def provenance(self) -> dict[str, str]:
        model = [self.likelihood, *(self.data.predictors[name] for name in self.data.silos)]
        # Under privacy who was matched is the parties' own: whoever knows all but one would try the last.
        aligned = {} if self.order is None or self.privacy is not None else {"alignment": self.order}
        return {**super().provenance(), "model": text_of(model), **aligned}

    def fit(self, **common: Any) -> VerticalResult:
        """Run it; `common` holds the options that all runs share."""
        ids = list(self.data.silos)
        model = Columns(self.likelihood, self.data.response, [self.data.predictors[n] for n in ids], self.data.offset)
        result = fit(
            model,
            [self.data.silos[n] for n in ids],
            self.algorithm,
            self.aggregation,
            self.privacy,
            silo_ids=ids,
            progress=False,
            **common,
        )
        if self.alignment is None:
            return result
        return replace(result, metrics={**result.metrics, "alignment": self.alignment})


def federate_vertical(
    config: Config, data_dir: Path | None, algorithm: Any, aggregation: Any, privacy: DP | None
) -> VerticalFederation:
    """Load what `config` names. Raises InputError, naming the key, for anything that cannot be used."""
    if config.run.batch_silos:
        raise InputError("run.batch_silos: silos with different columns compute one after the other")
    aligned: dict[str, Alignment] = {}
    if config.model.program is not None:
        name = config.model.program
        if name not in VERTICAL:
            raise InputError(f"model.program = '{name}': must be one of {', '.join(VERTICAL)}{nearest(name, VERTICAL)}")
        program = vertical_program(name)
        if privacy is not None and program.scaled_by_records:
            raise InputError(
                f"model.program = '{name}' standardises columns by the people's own means, which privacy would not "
                "cover; write the silos' files in fixed units and name them under [[silo]]"
            )
        options = [p for p in inspect.signature(program.load).parameters if p != "data_dir"]
        for key in config.data:
            if key not in options:
                raise InputError(unknown_key("data", key, options))
        data = program.load(data_dir, **{k: tuple(v) if isinstance(v, list) else v for k, v in config.data.items()})
        likelihood = build(
            named(LIKELIHOODS, "model.likelihood", program.likelihood), program.likelihood_options, "model.options"
        )
        description = f"{name}: {program.description}"
    else:
        kind = str(config.model.likelihood)
        likelihood = build(named(LIKELIHOODS, "model.likelihood", kind), config.model.options, "model.options")
        tables, ids = _read_files(config)
        aligned = _aligned(config, ids)
        data = _columns_from_files(config, likelihood, tables, aligned)
        description = f"{kind} response of predictors summed over {len(data.silos)} silos"
    threads = config.run.threads
    if threads == "auto":
        threads = choose_threads(numbers_of(list(data.silos.values())))
    complete = written_out(config, threads, algorithm, aggregation, privacy)
    # The hints stay at the silos: they tell how identifiers are written.
    counted = ("matched", "unmatched", "missing", "invalid", "duplicated")
    found = {n: {k: getattr(a, k) for k in counted} for n, a in aligned.items()} or None
    order = next((a.order.hex() for a in aligned.values()), None)
    return VerticalFederation(complete, description, algorithm, aggregation, privacy, likelihood, data, found, order)


def _read_files(config: Config) -> tuple[dict[str, dict[str, Tensor]], dict[str, list[Any]]]:
    """Of each silo's file, and the response's, the columns, and where rows are joined the identifiers. Raises
    InputError."""
    assert config.response is not None
    files = {s.id: (Path(s.data), f"silo[{j}].data") for j, s in enumerate(config.silo)}
    if config.response.data is not None:
        if config.alignment is not None and _RESPONSE in files:
            raise InputError(f"a silo cannot be called '{_RESPONSE}' where rows are aligned")
        files[_RESPONSE] = (Path(config.response.data), "response.data")
    if config.alignment is None:
        return {name: read_table(*file) for name, file in files.items()}, {}
    read = {name: read_people(*file, config.alignment.columns) for name, file in files.items()}
    return {name: table for name, (table, _) in read.items()}, {name: ids for name, (_, ids) in read.items()}


def _columns_from_files(
    config: Config, likelihood: Likelihood, tables: dict[str, dict[str, Tensor]], aligned: Mapping[str, Alignment]
) -> VerticalDataset:
    """Of what each silo's file, and the response's, holds: rows of people whom all hold where they are `aligned`."""
    assert config.response is not None
    if aligned:
        at = {name: torch.from_numpy(a.rows) for name, a in aligned.items()}
        tables = {name: {k: v[at[name]] for k, v in table.items()} for name, table in tables.items()}
    holder = config.response.silo or _RESPONSE
    (response, offset), tables[holder] = response_columns(config.response, tables[holder])
    classes = likelihood.columns
    built = {s.id: silo_columns(s.predictor, f"silo[{j}]", tables[s.id], classes) for j, s in enumerate(config.silo)}
    rows, predictors = {n: b[0] for n, b in built.items()}, {n: b[1] for n, b in built.items()}
    return VerticalDataset(rows, predictors, response, offset)


def _aligned(config: Config, ids: Mapping[str, list[Any]]) -> dict[str, Alignment]:
    """Rows by party, in the common order (`secure_fvi.alignment`); none where rows are not joined by identifiers.

    One process plays all parties here, so that keys follow from the seed and a run repeats; between institutions each
    silo draws its own.
    """
    if config.alignment is None:
        return {}
    rule, by = build(Normalisation, config.alignment.options, "alignment"), config.alignment.columns
    if config.alignment.how == "sorted":
        return _sorted({n: prepare(i, rule) for n, i in ids.items()})
    found = align(ids, rule, derive_key(config.seed.to_bytes(16, "big"), b"alignment"), _matching_goes_on)
    if not next(iter(found.values())).matched:
        raise InputError(f"alignment: no '{', '.join(by)}' stands in all files; is it written alike everywhere?")
    return found


def _sorted(prepared: Mapping[str, Prepared]) -> dict[str, Alignment]:
    """Rows as they stand, of tables that hold the same people in the order of their identifiers."""
    found: dict[str, Alignment] = {}
    for name, own in prepared.items():
        try:
            order = sorted_order(own)
        except InputError as error:
            raise InputError(f"alignment: the file of '{name}': {error}") from None
        size = len(own.rows)
        found[name] = Alignment(np.arange(size), size, 0, 0, 0, 0, order, {})
    first, *others = found
    for name in others:
        if found[name].order != found[first].order:
            raise InputError(f"alignment: the files of '{first}' and '{name}' are not of the same people in one order")
    return found


def _matching_goes_on(done: int, of: int) -> None:
    _log.info("matching: %d of %d identifiers", done, of)
