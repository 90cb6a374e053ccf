"""The configuration file of a run: what may stand in it, and how it is read, overridden and written back."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from secure_fvi.errors import InputError
from secure_fvi.runs import wording
from secure_fvi.runs.wording import first_error, nearest, unknown_key

if TYPE_CHECKING:
    import torch

    from secure_fvi.privacy.settings import DP

#: Algorithms for silos that hold different columns of the same people.
VERTICAL = ("soul", "vertical")

Name = Annotated[str, Field(min_length=1)]
#: A job's may be another's: as long as anybody writes one.
Formula = Annotated[str, Field(min_length=1, max_length=10_000)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
#: A job's count of silos may be another's as well, and each gets a name.
_MOST_SILOS = 100_000


class Table(BaseModel):
    """A table of the file: unknown keys are refused, values are never converted behind the user's back."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Table):
    """A shipped program, a function `path/to/file.py:name` with the roles of its sites, a formula with its family and
    the dictionary of its columns (a file, or what stands in one), or, where silos hold different columns of the same
    people, the likelihood of their summed predictors. options: of a formula (as of `sf.glmm`) or a likelihood."""

    program: Name | None = None
    function: Name | None = None
    record_plate: Name | None = None
    silo_sites: tuple[Name, ...] | None = None
    start: dict[Name, float] = Field(default_factory=dict)
    formula: Formula | None = None
    family: Name | None = None
    dictionary: Name | dict[str, Any] | None = None
    likelihood: Name | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(s is not None for s in (self.program, self.function, self.formula, self.likelihood)) != 1:
            raise ValueError(
                'give one of program = "six-cities", function = "path/to/file.py:name", formula = "y ~ x" and, for '
                'silos that hold different columns of the same people, likelihood = "bernoulli"'
            )
        if self.options and self.likelihood is None and self.formula is None:
            raise ValueError("options belong to a formula or a likelihood")
        if (self.formula is None) != (self.dictionary is None) or (self.formula is None and self.family is not None):
            raise ValueError('a formula needs dictionary = "dictionary.toml", and family and dictionary need a formula')
        if self.formula is not None and (self.record_plate or self.silo_sites is not None or self.start):
            raise ValueError("a formula says its record_plate, silo_sites and start; leave them out")
        if self.program is not None and (self.record_plate is not None or self.silo_sites is not None or self.start):
            raise ValueError("a program knows its record_plate, silo_sites and start; leave them out")
        if self.likelihood is not None and self.start:
            raise ValueError("start belongs to a function: silos with different columns begin at their priors")
        if self.function is not None and not self.function.rpartition(":")[0].endswith(".py"):
            raise ValueError(f"function = '{self.function}' must look like 'path/to/file.py:name'")
        return self


class Partition(Table):
    """A random split of a program's records, by `seed` (the run's own unless given); by_client: by their origin."""

    sizes: Annotated[tuple[int, ...], Field(min_length=1)] | None = None
    count: Annotated[int, Field(ge=1, le=_MOST_SILOS)] | None = None
    ids: tuple[Name, ...] | None = None
    seed: Seed | None = None
    by_client: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.sizes is None) == (self.count is None):
            raise ValueError("give either sizes = [300, 237] or count = 3")
        if self.by_client and (self.count is None or self.seed is not None):
            raise ValueError("by_client takes a program's own clients: give their count, and neither sizes nor a seed")
        for silo, size in zip(self.silo_ids, self.sizes or (), strict=False):
            if size < 1:
                raise ValueError(f"sizes gives silo '{silo}' {size} records; each silo needs at least one")
        silos = self.count or len(self.sizes or ())
        if self.ids is not None and len(self.ids) != silos:
            raise ValueError(f"ids names {len(self.ids)} silos, but there are {silos}")
        _differ(self.silo_ids)
        return self

    @property
    def silo_ids(self) -> tuple[str, ...]:
        silos = self.count or len(self.sizes or ())
        return self.ids or tuple(f"silo-{j + 1}" for j in range(silos))


class SiloFile(Table):
    """One silo with its data: a table (`TABLES`), or arrays (.npz, .safetensors); in a vertical run also
    its own predictor. dictionary: codes the table. query: one SELECT over it, as `data`, and over the files that
    `tables` names. missing: whether rows with a gap are refused, as they are if nothing is said, or left out; complete:
    by whose gaps too, whether the formula reads these columns or not; fitting: which formulas a record has to fit too,
    under record privacy."""

    id: Name
    data: Name
    predictor: Name | None = None
    dictionary: Name | None = None
    query: Name | None = None
    tables: dict[Name, Name] = Field(default_factory=dict)
    missing: Literal["refuse", "drop"] | None = None
    complete: tuple[Name, ...] = ()
    fitting: tuple[Model, ...] = Field(default=(), exclude=True)  # a site's own word, of which no job has one


class Response(Table):
    """The response of a vertical run: a column of a data file at the server, or of a silo's own file, and the column of
    its offset."""

    data: Name | None = None
    silo: Name | None = None
    column: Name = "y"
    offset: Name | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,) if self.offset is None else (self.column, self.offset)


class Options(BaseModel):
    """A table whose other keys are the options of the class it names."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Algorithm(Options):
    name: Name = "sfvi"


class Aggregation(Options):
    kind: Name = "masked"


class Alignment(Options):
    """The column of identifiers in every file of a vertical run, or the several that make one up together: rows are
    joined by them. how: by private matching, or not at all, since all files have the same people and are sorted by
    their identifiers as they are matched, which is checked. Other keys say how these are written."""

    column: Name | Annotated[tuple[Name, ...], Field(min_length=1)]
    how: Literal["matching", "sorted"] = "matching"

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,) if isinstance(self.column, str) else self.column


class Privacy(Options):
    """Differential privacy, and the ledger that it is charged to (the run's own unless given)."""

    unit: Name
    ledger: Name | None = None
    data_set: Name = "data"


class Run(Table):
    """How the run is carried out; none of it changes what is estimated."""

    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    dtype: Literal["float64", "float32"] = "float64"
    compile: bool | Literal["auto"] = "auto"
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    batch_silos: bool = False
    checkpoint_seconds: Positive = 5.0

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return torch.float64 if self.dtype == "float64" else torch.float32


class Engine(Table):
    """How a server carries a job to silos elsewhere. kind: silos dial the server (direct), or NVIDIA FLARE starts both
    ends and carries their messages (flare). on_loss: wait for a silo that does not answer, or drop it for the time
    being after `deadline` seconds."""

    kind: Literal["direct", "flare"] = "direct"
    on_loss: Literal["wait", "drop"] = "wait"
    deadline: Positive = 60.0


class Config(Table):
    """A whole file."""

    seed: Seed = 0
    model: Model
    data: dict[str, Any] = Field(default_factory=dict)
    partition: Partition | None = None
    silo: tuple[SiloFile, ...] = ()
    response: Response | None = None
    alignment: Alignment | None = None
    algorithm: Algorithm = Field(default_factory=Algorithm)
    aggregation: Aggregation = Field(default_factory=Aggregation)
    privacy: Privacy | None = None
    run: Run = Field(default_factory=Run)
    engine: Engine | None = None

    @model_validator(mode="after")
    def _silos_given_once(self) -> Self:
        if self.partition is not None and self.silo:
            raise ValueError("give either [partition] or [[silo]] tables, not both")
        if self.vertical:
            self._check_vertical()
            return self
        for name in ("response", "alignment"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"[{name}] is for vertical runs, where silos hold different columns: name = 'vertical'"
                )
        if self.partition is None and not self.silo:
            raise ValueError("no silos: give a [partition] of the program's records, or [[silo]] tables")
        if self.partition is not None and self.model.program is None:
            raise ValueError("[partition] splits a program's records; a function or a formula needs [[silo]] tables")
        if self.silo and self.data:
            raise ValueError("[data] is for a program's loader; [[silo]] tables name their own files")
        _differ([silo.id for silo in self.silo])
        for silo in self.silo:
            self._check_coding(silo)
        return self

    def _check_coding(self, silo: SiloFile) -> None:
        if silo.dictionary is not None:
            return
        if self.model.formula is None and (silo.query or silo.tables or silo.missing is not None):
            needs = "query, tables and missing need a dictionary, which `secure-fvi data describe` drafts"
            raise ValueError(f"silo '{silo.id}': {needs}")
        if silo.missing is not None:
            raise ValueError(
                f"silo '{silo.id}': missing of a formula is one for all silos, in [model.options], but for a silo that "
                "has a dictionary of its own"
            )

    @property
    def vertical(self) -> bool:
        """Whether silos hold different columns of the same people."""
        return self.algorithm.name in VERTICAL

    def _check_vertical(self) -> None:
        coded = next((silo.id for silo in self.silo if silo.dictionary is not None), None)
        if coded is not None:
            raise ValueError(f"silo '{coded}': in a vertical run files hold numbers and ids, and no dictionary is read")
        if self.partition is not None:
            raise ValueError("[partition] splits records; in a vertical run the program says which silo holds what")
        if self.model.function is not None or self.model.formula is not None:
            raise ValueError(
                "in a vertical run each [[silo]] has its own predictor, and [model] the likelihood of their sum"
            )
        if self.model.likelihood is not None and not (self.silo and self.response):
            raise ValueError(
                "a likelihood needs [[silo]] tables with the silos' files and a [response] with the outcome's"
            )
        if self.model.program is not None and (self.silo or self.response or self.alignment):
            raise ValueError("a program brings its silos and its response; leave out [[silo]], [response], [alignment]")
        ids = [silo.id for silo in self.silo]
        _differ(ids)
        if self.response is not None:
            self._check_response(self.response, ids)

    def _check_response(self, response: Response, silos: Sequence[str]) -> None:
        if (response.data is None) == (response.silo is None):
            raise ValueError("[response] names the file with the outcome (data), or the silo whose file has it (silo)")
        if response.silo is not None and response.silo not in silos:
            raise ValueError(f"response.silo = '{response.silo}': no [[silo]] has this id")
        said = self.algorithm.options.get("response", "shared")
        if (response.silo is not None) != (said == "silos"):
            where = "lies at a silo" if response.silo is not None else "has a file of the server's (response.data)"
            right = "'shared' or 'private', or name response.silo"
            if response.silo is not None:  # no silo keeps it alone
                right = "'silos': each needs the slope at each person for its steps, which tells the label"
            raise ValueError(f"algorithm.response = '{said}': the response {where}; set {right}")

    def to_toml(self) -> str:
        """The file that reads back to this configuration."""
        table = self.model_dump(mode="json", exclude_none=True)
        return wording.dumps({key: value for key, value in table.items() if value != []})


def title(config: Config) -> str:
    """What is fitted, in a few words, as who wrote the configuration puts it."""
    model = config.model
    if model.likelihood is not None:
        return f"{model.likelihood} regression over columns"
    return model.formula or model.program or Path(str(model.function)).name


def _differ(ids: Sequence[str]) -> None:
    seen = set[str]()
    for silo in ids:
        if silo in seen:
            raise ValueError(f"two silos have the id '{silo}'; ids must differ")
        seen.add(silo)


def _keys(model: type[BaseModel], prefix: str = "") -> dict[str, list[str]]:
    """The keys of each table by its dotted name, for suggestions."""
    found = {prefix: list(model.model_fields)}
    for name, inner in (
        ("model", Model),
        ("partition", Partition),
        ("silo", SiloFile),
        ("response", Response),
        ("run", Run),
        ("engine", Engine),
    ):
        if not prefix and model is Config:
            found |= _keys(inner, name)
    return found


def parse(table: Mapping[str, Any], source: str) -> Config:
    """The configuration that a parsed file stands for. Raises InputError, prefixed with `source`."""
    try:
        return Config.model_validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        raise InputError(f"{source}: {first_error(error, table, allowed=_keys(Config))}") from error


# ---- A dataclass of options from a TOML table: names, types and allowed values are read off the dataclass ----

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

#: The optional column with the records' own ids: whole numbers, all different, over all silos.
RECORD_ID = "record_id"
#: The name of a job's own file in a query.
TABLE = "data"
#: What reads and codes a table, by its file's ending.
TABLES = dict.fromkeys(
    (".csv", ".tsv", ".txt", ".parquet", ".duckdb", ".sqlite", ".sqlite3", ".db"),
    "secure_fvi.tables:read_coded",
)
_EXPORT = "write it as CSV or Parquet there, where numbers and texts are told apart"
#: By another ending, what makes a table of such a file.
OTHERS = {
    **dict.fromkeys((".gz", ".zip", ".zst", ".bz2", ".xz"), "unpack it first"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "save the sheet as 'CSV UTF-8'"),
    **dict.fromkeys(
        (".json", ".ndjson", ".jsonl", ".sav", ".dta", ".sas7bdat", ".rds", ".rdata", ".feather", ".arrow", ".pkl"),
        _EXPORT,
    ),
}

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


def _of_others(keys: Iterable[str]) -> str:
    """Which algorithms have the first of these keys, which the one that is asked has not; "" if none has."""
    key = next(iter(keys), "")
    has = [name for name in ALGORITHMS if key in {f.name for f in dataclasses.fields(named(ALGORITHMS, "", name))}]
    return f"; '{key}' is of algorithm.name = {', '.join(repr(name) for name in has)}" if has else ""


_hints: Any = functools.cache(functools.partial(get_type_hints, include_extras=True))


def chosen(config: Config) -> tuple[Any, Any, DP | None]:
    """Algorithm, secure sum and privacy as `config` sets them. Raises InputError, naming the key, and where privacy is
    not claimed on the device that it names."""
    from secure_fvi.privacy.settings import check_device

    cls = named(ALGORITHMS, "algorithm.name", config.algorithm.name)
    try:
        algorithm = build(cls, config.algorithm.options, "algorithm")
    except InputError as error:
        own = {f.name for f in dataclasses.fields(cls)}
        raise InputError(f"{error}{_of_others(key for key in config.algorithm.options if key not in own)}") from error
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
    try:
        return _adapter(hint).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        raise InputError(first_error(error, value, key)) from error


@functools.cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))


def resolved(instance: Any) -> dict[str, Any]:
    """All options of a dataclass that a file can hold, defaults included; the inverse of `build`."""
    table: dict[str, Any] = {}
    hints = _hints(type(instance))
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
