"""A site's policy: the file, edited at the site and nowhere else, that says which jobs it takes part in.

Strict where it is silent: nothing is listed in a new policy, so nothing is allowed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, model_validator

from secure_fvi.aggregation.base import Form
from secure_fvi.deployment.home import check_private
from secure_fvi.deployment.names import Hex32, Table, parse_table
from secure_fvi.errors import InputError
from secure_fvi.files import read_bytes
from secure_fvi.key_files import KEY_FILE_VARIABLE
from secure_fvi.privacy.ledger_terms import Budget
from secure_fvi.runs.config import Alignment, Config, Model

R = TypeVar("R", "ModelRule", "DataRule")

#: What `disclosures` may list: see `secure_fvi.disclosure.DISCLOSURES`.
Allowed = Literal[
    "per_silo_rows",
    "person_rows",
    "single_silos",
    "changing_cohorts",
    "final_likelihood",
    "sampled_records",
    "exact_counts",
    "objective",
    "adaptive_clipping",
]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Delta = Annotated[float, Field(gt=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


class PrivacyRules(Table):
    """The floor. max_epsilon: of one job. min_colluders: that a job with distributed noise has to plan for.
    max_retries: sums beyond its rounds, which its epsilon pays for."""

    dp: Literal["required", "optional"] = "required"
    units: tuple[Literal["record", "silo"], ...] = ("record",)
    max_epsilon: Positive
    max_delta: Delta
    min_noise_multiplier: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    noise: tuple[Literal["distributed", "silo", "server"], ...] = ("distributed", "silo")
    min_colluders: Annotated[int, Field(ge=0)] = 1
    max_retries: Annotated[int, Field(ge=0)] = 20


class ModelRule(Table):
    """An agreed model: by its hash, or by its formula, with the family and, where a job has them, the record's group,
    `most` and `priors` ("any" for all). Other options of a formula follow from the site's own dictionary and data set
    (shared, missing), or change nothing that a site computes (local). function: this site's copy,
    "path/to/file.py:name"; None for a shipped program."""

    hash: Hex32 | None = None
    function: Text | None = None
    formula: Text | tuple[Text, ...] | None = None
    family: Text | tuple[Text, ...] = "gaussian"
    record: Text | None = None
    most: Literal["any"] | dict[Text, int] = Field(default_factory=dict)
    priors: Literal["any"] | dict[Text, float | tuple[float, float]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.hash is None) == (self.formula is None):
            raise ValueError("a model is agreed to by its hash, or by its formula")
        if self.hash is None and self.function is not None:
            raise ValueError("a formula has no function")
        if self.hash is not None and (self.family != "gaussian" or self.record is not None or self.most or self.priors):
            raise ValueError("family, record, most and priors belong to a formula")
        return self

    @property
    def formulas(self) -> tuple[str, ...]:
        return _listed(self.formula) if self.formula is not None else ()

    @property
    def families(self) -> tuple[str, ...]:
        return _listed(self.family)

    def allows(self, model: Model) -> bool:
        """Whether a job's formula is agreed to. It is compared as text, and not read."""
        if self.formula is None or model.formula is None:
            return False
        formulas = [_blanks(text) for text in self.formulas]
        named = ((formulas, _blanks(model.formula)), (self.families, family_of(model)))
        agreed = all("any" in allowed or text in allowed for allowed, text in named)
        agreed = agreed and self.record in ("any", model.options.get("record"))
        agreed = agreed and self.most in ("any", model.options.get("most", {}))
        return agreed and self.priors in ("any", _numbers(model.options.get("priors", {})))


def rule_of(model: Model) -> dict[str, Any]:
    """The `[[model]]` of a policy that allows this job's formula and no other."""
    said: dict[str, Any] = {"formula": _blanks(str(model.formula)), "family": family_of(model)}
    said |= {"record": str(model.options["record"])} if "record" in model.options else {}
    return said | {name: model.options[name] for name in ("most", "priors") if name in model.options}


def _numbers(priors: Any) -> Any:
    """As a rule holds them; what is none of these as it is, which no rule is equal to."""
    if not isinstance(priors, dict):
        return priors
    return {name: tuple(value) if isinstance(value, (list, tuple)) else value for name, value in priors.items()}


def family_of(model: Model) -> str:
    return model.family or "gaussian"


def _listed(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _blanks(text: str) -> str:
    """A formula with one blank for each run of them, but for what stands in quotes."""
    return text if set(text) & set("'\"`") else " ".join(text.split())


class DataRule(Table):
    """A population. path: None for the data of a shipped program; predictor: of a vertical run, "path/to/file.py:name".
    response: the columns that this site tells the other silos of a vertical job, as its outcome and offset.
    dictionary, query, tables, missing: how the file is read (`secure_fvi.runs.config.SiloFile`). cohort:
    whether other rows than those of the first job, or than those of a digest, are refused, or said in the site's log.
    alignment: by which columns, and how, the people of a vertical job are found; the job has to say the same. largest:
    places that each other party's list may have then, and so identifiers that it may test against this one's, of n
    parties (n - 1) times as many; matchings: jobs for which the data set is matched, each another chance; fewest:
    people that are matched, at least, since the server, which compares the lists, names who they are.
    epsilon, delta, unit: its budget over all jobs. from_job: the tables of a job, and so of its server, that may say
    which of a program's records are the site's."""

    id: Text
    path: Text | None = None
    predictor: Text | None = None
    response: tuple[Text, ...] = ()
    alignment: Alignment | None = None
    largest: Annotated[int, Field(ge=1)] = 1 << 20
    matchings: Annotated[int, Field(ge=0)] = 10
    fewest: Annotated[int, Field(ge=1)] = 100
    dictionary: Text | None = None
    query: Text | None = None
    tables: dict[Text, Text] = Field(default_factory=dict)
    missing: Literal["refuse", "drop"] = "refuse"
    cohort: Literal["said", "pinned"] | Hex32 = "said"
    epsilon: Positive | None = None
    delta: Delta | None = None
    unit: Literal["record", "silo"] = "record"
    from_job: tuple[Literal["partition", "data"], ...] = ()

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.path is not None and self.from_job:
            raise ValueError("a data set is the file of its path, or what a job takes from a program (from_job)")
        if (self.epsilon is None) != (self.delta is None):
            raise ValueError("a budget needs both epsilon and delta")
        if self.dictionary is None and (self.query or self.tables or self.missing != "refuse"):
            raise ValueError("query, tables and missing need a dictionary, which `secure-fvi data describe` drafts")
        if self.path is None and (self.alignment is not None or self.predictor is not None or self.response):
            raise ValueError("alignment, predictor and response are of a vertical job, which needs the path of a table")
        if self.dictionary is not None and self.alignment is not None:
            raise ValueError("a vertical job reads numbers and ids, and no dictionary")
        if self.dictionary is not None and self.path is None:
            raise ValueError("a dictionary needs the path of a table")
        return self

    @property
    def budget(self) -> Budget | None:
        """What the ledger is to hold the data set to."""
        if self.epsilon is None or self.delta is None:
            return None
        return Budget(self.id, self.epsilon, self.delta, self.unit)


def files_of(config: Config) -> list[Path]:
    """What code of a model's author must not see of a site: each table and dictionary that a job's silos name here, and
    the file of the passphrase."""
    found = [p for s in config.silo for p in (s.data, s.dictionary, *s.tables.values()) if p is not None]
    return [Path(p) for p in (*found, os.environ.get(KEY_FILE_VARIABLE)) if p]


class _File(Table):
    format: Literal[1]
    rosters: tuple[Hex32, ...]
    algorithms: tuple[Text, ...]
    aggregations: tuple[Form, ...]
    min_cohort: Annotated[int, Field(ge=2)]
    max_rounds: Annotated[int, Field(ge=0)]
    sandbox: Literal["required", "off"] = "required"
    package: Literal["same", "any"] | tuple[Hex32, ...] = "same"
    silos: Literal["all"] | Annotated[float, Field(gt=0, le=1)] = "all"
    must_include: tuple[Text, ...] = ()
    disclosures: tuple[Allowed, ...] = ()
    max_missing: Annotated[int, Field(ge=0)] | None = None
    max_differences: Annotated[int, Field(ge=0)] = 0
    max_unanswered: Annotated[int, Field(ge=1)] = 3  # which job is one shows once it was let in
    privacy: PrivacyRules
    model: tuple[ModelRule, ...] = ()
    data: tuple[DataRule, ...] = ()

    @model_validator(mode="after")
    def _differ(self) -> Self:
        hashes = [m.hash for m in self.model if m.hash is not None]
        for what, values in (("model hash", hashes), ("data set", [d.id for d in self.data])):
            twice = next((v for v in values if values.count(v) > 1), None)
            if twice is not None:
                raise ValueError(f"{what} '{twice}' stands twice")
        return self


class SitePolicy:
    """A policy as its file says it. Made by `read_policy`."""

    def __init__(self, content: bytes, file: _File, folder: Path) -> None:
        self.hash = hashlib.sha256(b"secure-fvi/policy/1/" + content).digest()
        self.rosters = frozenset(bytes.fromhex(r) for r in file.rosters)
        self.algorithms, self.aggregations = file.algorithms, file.aggregations
        self.min_cohort, self.max_rounds, self.privacy = file.min_cohort, file.max_rounds, file.privacy
        self.sandbox, self.package = file.sandbox, file.package
        self.must_include, self.disclosures = file.must_include, file.disclosures
        self.share = 1.0 if file.silos == "all" else file.silos  # of the roster's silos that a job has to ask
        self.max_differences, self._max_missing = file.max_differences, file.max_missing
        self.max_unanswered = file.max_unanswered
        models = [_located(m, folder) for m in file.model]
        self.models: Mapping[bytes, ModelRule] = {bytes.fromhex(m.hash): m for m in models if m.hash is not None}
        self.formulas = tuple(m for m in models if m.formula is not None)
        self.data: Mapping[str, DataRule] = {d.id: _located(d, folder) for d in file.data}
        taken = [d.id for d in self.data.values() if d.path is None and d.from_job]
        if len(taken) > 1:
            raise InputError(
                f"of data sets '{taken[0]}' and '{taken[1]}' jobs name the records (from_job), which may be the same: "
                "each would bring a budget of its own over them; keep one"
            )
        named = [p for d in self.data.values() for p in (d.path, d.dictionary, *d.tables.values()) if p is not None]
        self.files = tuple(Path(p) for p in named)  # no model's code sees them
        for rule in self.data.values():
            for path in (rule.path, *rule.tables.values()):
                if path is not None and (other := data_set_with(self.data, Path(path), rule.id)) is not None:
                    raise InputError(_twice(path, rule.id, other))

    def __repr__(self) -> str:
        return f"SitePolicy({self.hash.hex()[:16]})"

    def max_missing(self, exact: bool) -> int | None:
        """Silos of a cohort that a total may lack. exact: the server sees totals without noise (`Disclosure.exact`); 0
        then, where the file is silent. Otherwise None is whatever the job's noise allows."""
        return 0 if exact and self._max_missing is None else self._max_missing


def data_set_with(rules: Mapping[str, DataRule], file: Path, besides: str = "") -> str | None:
    """The data set, other than `besides`, that reads this file, by whatever name or link, as its table or beside it."""
    for name, rule in rules.items():
        paths = [Path(p) for p in (rule.path, *rule.tables.values()) if p is not None]
        if name != besides and any(_same(path, file) for path in paths):
            return name
    return None


def _same(one: Path, other: Path) -> bool:
    try:
        return one.resolve() == other.resolve() or one.samefile(other)
    except (OSError, RuntimeError):  # one is not there, or links to itself
        return False


def _twice(path: Path | str, name: str, other: str) -> str:
    return (
        f"'{path}' is read by data set '{other}', and may not be by '{name}' as well: over one population's rows there "
        f"is one budget and one rule, and a second name would add a budget of its own; let jobs name '{other}'"
    )


def check_one_name(policy: SitePolicy, file: Path, name: str) -> None:
    """Raise InputError where `file` stands in the policy under another data set than `name`."""
    if (other := data_set_with(policy.data, file, name)) is not None:
        raise InputError(_twice(file, name, other))


def read_policy(path: Path) -> SitePolicy:
    """The policy in `path`. Files that it names are relative to its folder.

    Raises InputError for an unknown key, a value that is none, a file that others may write to, or two data sets that
    read one file.
    """
    content = read_bytes(path, "the policy", makes="`secure-fvi policy init`")
    check_private(path)
    check_private(path.resolve().parent)
    return SitePolicy(content, parse_table(content, _File, f"'{path}'"), path.resolve().parent)


def _located(rule: R, folder: Path) -> R:
    names = ("function", "path", "predictor", "dictionary")
    paths: dict[str, Any] = {n: str(folder / getattr(rule, n)) for n in names if getattr(rule, n, None) is not None}
    if isinstance(rule, DataRule):
        paths["tables"] = {name: str(folder / path) for name, path in rule.tables.items()}
    return rule.model_copy(update=paths)
