"""From a configuration to what `fit_vertical` takes: silos with different columns of the same people, aligned."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from secure_fvi.algorithms.vertical.likelihoods import Likelihood
from secure_fvi.algorithms.vertical.predictors import linear
from secure_fvi.alignment import Alignment, AlignmentKey, Normalisation, adopt, match, prepare
from secure_fvi.compiled import choose_threads
from secure_fvi.errors import InputError
from secure_fvi.models.vertical_base import PROGRAMS, VerticalDataset, vertical_program
from secure_fvi.privacy.settings import DP
from secure_fvi.randomness import derive_key
from secure_fvi.runs.config import Config
from secure_fvi.runs.federation_base import FederationBase, digest_of, python_function, written_out
from secure_fvi.runs.options import LIKELIHOODS, build, named
from secure_fvi.runs.tables import read_ids, read_table
from secure_fvi.runs.wording import nearest, unknown_key
from secure_fvi.vertical_fitting import fit_vertical, numbers_of
from secure_fvi.vertical_results import VerticalResult

#: The name under which the response's file takes part in the alignment.
_RESPONSE = "response"


@dataclass(frozen=True)
class VerticalFederation(FederationBase):
    """All that a vertical run needs, checked. Holds every silo's data: only for a process that plays all parties."""

    likelihood: Likelihood
    data: VerticalDataset
    alignment: dict[str, Any] | None  # rows by party that matched or did not, where rows were joined by id

    def digest(self) -> str:
        known = {"y": self.data.response}
        if self.data.offset is not None:
            known["offset"] = self.data.offset
        return digest_of({**self.data.silos, _RESPONSE: known})

    def fit(self, **common: Any) -> VerticalResult:
        """Run it; `common` holds the options that all runs share."""
        ids = list(self.data.silos)
        result = fit_vertical(
            self.likelihood,
            [self.data.silos[n] for n in ids],
            self.data.response,
            [self.data.predictors[n] for n in ids],
            self.data.offset,
            self.algorithm,
            self.aggregation,
            self.privacy,
            silo_ids=ids,
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
    alignment = None
    if config.model.program is not None:
        name = config.model.program
        if name not in PROGRAMS:
            raise InputError(f"model.program = '{name}': must be one of {', '.join(PROGRAMS)}{nearest(name, PROGRAMS)}")
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
        data, alignment = _from_files(config, likelihood)
        description = f"{kind} response of predictors summed over {len(data.silos)} silos"
    threads = config.run.threads
    if threads == "auto":
        threads = choose_threads(numbers_of(list(data.silos.values())))
    complete = written_out(config, threads, algorithm, aggregation, privacy)
    return VerticalFederation(complete, description, algorithm, aggregation, privacy, likelihood, data, alignment)


def _from_files(config: Config, likelihood: Likelihood) -> tuple[VerticalDataset, dict[str, Any] | None]:
    """Each silo's file, and the response's, with the rows of people that all hold; and how many rows matched."""
    assert config.response is not None
    by = config.alignment.column if config.alignment is not None else None
    aligned = _aligned(config, by) if by is not None else {}
    tables = {s.id: read_table(Path(s.data), f"silo[{j}].data", by) for j, s in enumerate(config.silo)}
    outcome = read_table(Path(config.response.data), "response.data", by)
    if aligned:
        at = {name: torch.from_numpy(a.rows) for name, a in aligned.items()}
        tables = {name: {k: v[at[name]] for k, v in table.items()} for name, table in tables.items()}
        outcome = {k: v[at[_RESPONSE]] for k, v in outcome.items()}
    # The hints stay at the silos: they tell how ids are written.
    counted = ("matched", "unmatched", "missing", "duplicated")
    found = {n: {k: getattr(a, k) for k in counted} for n, a in aligned.items()} or None
    columns = {}
    for key in ("column", "offset"):
        name = getattr(config.response, key)
        if name is not None and name not in outcome:
            raise InputError(f"response.{key} = '{name}': no such column{nearest(name, outcome)}")
        columns[key] = outcome[name] if name is not None else None
    response = columns["column"]
    assert response is not None
    classes = likelihood.columns
    built = {s.id: _silo(s.predictor, f"silo[{j}]", tables[s.id], classes) for j, s in enumerate(config.silo)}
    rows, predictors = {n: b[0] for n, b in built.items()}, {n: b[1] for n, b in built.items()}
    return VerticalDataset(rows, predictors, response, columns["offset"]), found


def _aligned(config: Config, by: str) -> dict[str, Alignment]:
    """Rows by party, in the common order, from keyed hashes of the ids (`secure_fvi.alignment`).

    One process plays all parties here, so that the key follows from the seed and a run repeats; between institutions
    the silos share a secret one.
    """
    assert config.alignment is not None
    assert config.response is not None
    if _RESPONSE in {s.id for s in config.silo}:
        raise InputError(f"a silo cannot be called '{_RESPONSE}' where rows are aligned")
    rule = build(Normalisation, config.alignment.options, "alignment")
    key = AlignmentKey(derive_key(config.seed.to_bytes(16, "big"), b"alignment"))
    files = {s.id: (Path(s.data), f"silo[{j}].data") for j, s in enumerate(config.silo)}
    files[_RESPONSE] = (Path(config.response.data), "response.data")
    prepared = {n: prepare(read_ids(path, where, by), key, "run", n, rule) for n, (path, where) in files.items()}
    common = match([p.message for p in prepared.values()])
    if not common.tags:
        raise InputError(f"alignment: no '{by}' stands in all files; are ids written alike everywhere?")
    return {n: adopt(p, common.tags) for n, p in prepared.items()}


def _silo(
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
