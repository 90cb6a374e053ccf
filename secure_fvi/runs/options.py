"""A dataclass of options from a TOML table: names, types and allowed values are read off the dataclass."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from secure_fvi.errors import InputError
from secure_fvi.runs.wording import first_error, nearest, unknown_key

if TYPE_CHECKING:
    from secure_fvi.privacy.settings import DP
    from secure_fvi.runs.config import Config

#: Key that chooses between the dataclasses of an option.
KIND = "kind"

#: What `[algorithm] name` may be, and where its dataclass is.
ALGORITHMS = {
    "bcm": "secure_fvi.algorithms.baselines:BCM",
    "fedavg": "secure_fvi.algorithms.fedavg:FedAvg",
    "fedvi": "secure_fvi.algorithms.fedvi:FedVI",
    "pvi": "secure_fvi.algorithms.pvi:PVI",
    "sfvi": "secure_fvi.algorithms.sfvi:SFVI",
    "sfvi-avg": "secure_fvi.algorithms.sfvi_avg:SFVIAvg",
    "soul": "secure_fvi.algorithms.vertical.soul:Soul",
    "streaming-vb": "secure_fvi.algorithms.baselines:StreamingVB",
    "vcl": "secure_fvi.algorithms.baselines:VCL",
    "vertical": "secure_fvi.algorithms.vertical.vertical:Vertical",
}
#: What `[aggregation] kind` may be.
AGGREGATIONS = {
    "homomorphic": "secure_fvi.aggregation.homomorphic:Homomorphic",
    "masked": "secure_fvi.aggregation.masked:Masked",
    "plain": "secure_fvi.aggregation.plain:Plain",
}
#: What makes the model of a `[model]` that is no program and no function of a file.
MODELS = {"formula": "secure_fvi.mixed_model:glmm"}
COLUMNS = {"formula": "secure_fvi.formula:columns_of"}

#: What reads and codes a table, by its file's ending.
TABLES = dict.fromkeys(
    (".csv", ".tsv", ".txt", ".parquet", ".json", ".ndjson", ".jsonl", ".duckdb", ".sqlite", ".sqlite3", ".db"),
    "secure_fvi.tables:read_coded",
)
_EXPORT = "write it as CSV or Parquet there, where numbers and texts are told apart"
#: By another ending, what makes a table of such a file.
OTHERS = {
    **dict.fromkeys((".gz", ".zip", ".zst", ".bz2", ".xz"), "unpack it first"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as 'CSV UTF-8'"),
    **dict.fromkeys((".sav", ".dta", ".sas7bdat", ".rds", ".rdata", ".feather", ".arrow", ".pkl"), _EXPORT),
}
#: Those whose records say which columns there are.
OBJECTS = (".json", ".ndjson", ".jsonl")

#: What `[model] likelihood` may be in a vertical run.
LIKELIHOODS = {
    name: f"secure_fvi.algorithms.vertical.likelihoods:{name.capitalize()}"
    for name in ("bernoulli", "categorical", "gaussian", "poisson")
}

#: What `[privacy] unit` may be.
PRIVACIES = {"record": "secure_fvi.privacy.settings:RecordDP", "silo": "secure_fvi.privacy.settings:SiloDP"}


def named(choices: Mapping[str, str], key: str, name: str) -> type[Any]:
    """The class that `name` stands for in `choices`; raises InputError naming the dotted `key` otherwise."""
    if name not in choices:
        raise InputError(f"{key} = '{name}': must be one of {', '.join(sorted(choices))}{nearest(name, choices)}")
    module, attribute = choices[name].split(":")
    found: type[Any] = getattr(importlib.import_module(module), attribute)
    return found


def build(cls: type[Any], table: Mapping[str, Any], where: str) -> Any:
    """`cls(**table)` with each value checked against its field's type; `where` is the table's dotted key.

    A field whose default is a dataclass itself is given as a nested table. Raises InputError for an unknown
    key, a value of the wrong type, and whatever the class refuses.
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    hints = _hints(cls)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in fields:
            raise InputError(unknown_key(where, key, fields))
        nested = _nested(fields[key], hints[key])
        if nested:
            if not isinstance(value, Mapping):
                raise InputError(f"{where}.{key} must be a table, [{where}.{key}]")
            inner = dict(value)
            kind = inner.pop(KIND, next(iter(nested))) if len(nested) > 1 else next(iter(nested))
            if kind not in nested:
                raise InputError(f"{where}.{key}.{KIND} = '{kind}': must be one of {', '.join(sorted(nested))}")
            values[key] = build(nested[kind], inner, f"{where}.{key}")
        else:
            values[key] = checked(hints[key], value, f"{where}.{key}")
    try:
        return cls(**values)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except TypeError as error:
        raise InputError(f"{where}: {str(error).replace(f'{cls.__name__}.__init__() ', '')}") from error


_hints: Any = functools.cache(functools.partial(get_type_hints, include_extras=True))


def chosen(config: Config) -> tuple[Any, Any, DP | None]:
    """Algorithm, secure sum and privacy as `config` sets them. Raises InputError, naming the key, and where privacy is
    not claimed on the device that it names."""
    from secure_fvi.privacy.settings import check_device

    algorithm = build(named(ALGORITHMS, "algorithm.name", config.algorithm.name), config.algorithm.options, "algorithm")
    kind = named(AGGREGATIONS, "aggregation.kind", config.aggregation.kind)
    aggregation = build(kind, config.aggregation.options, "aggregation")
    privacy = None
    if config.privacy is not None:
        cls = named(PRIVACIES, "privacy.unit", config.privacy.unit)
        privacy = build(cls, config.privacy.options, "privacy")
    check_device(privacy, config.run.device)
    return algorithm, aggregation, privacy


def checked(hint: Any, value: Any, key: str) -> Any:
    """`value`, parsed from TOML, as a `hint`; raises InputError naming `key` when it is none.

    JSON's strict rules are the ones wanted: a whole number passes for a float and a list for a tuple, but a
    string never passes for a number nor true for 1.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        return adapter.validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        raise InputError(first_error(error, value, key)) from error


def resolved(instance: Any) -> dict[str, Any]:
    """All options of a dataclass that a file can hold, defaults included; the inverse of `build`."""
    table: dict[str, Any] = {}
    hints = get_type_hints(type(instance))
    for f in dataclasses.fields(instance):
        value = getattr(instance, f.name)
        if dataclasses.is_dataclass(value):
            kinds = _nested(f, hints[f.name])
            table[f.name] = resolved(value)
            if len(kinds) > 1:
                table[f.name][KIND] = next(k for k, cls in kinds.items() if type(value) is cls)
        elif isinstance(value, Mapping):
            table[f.name] = dict(value)
        elif isinstance(value, bool | int | str | list | tuple) or (isinstance(value, float) and not math.isnan(value)):
            table[f.name] = list(value) if isinstance(value, tuple) else value
    return table


def _nested(field: dataclasses.Field[Any], hint: Any) -> dict[str, type[Any]]:
    """The dataclasses that a field may hold, by kind and the default's first; empty for a field of plain values."""
    made = field.default_factory is not dataclasses.MISSING
    default: Any = field.default_factory() if made else field.default  # type: ignore[operator]
    if not dataclasses.is_dataclass(default) or isinstance(default, type):
        return {}
    choices: list[Any] = [type(default), *(c for c in get_args(hint) if dataclasses.is_dataclass(c))]
    return {re.sub(r"(?<!^)(?=[A-Z])", "_", c.__name__).lower(): c for c in choices}
