"""What is written down before a job's first round: the site's budget, and the most that the job will release.

All of it is public within the federation: numbers, names and declarations, never data. Bodies of ledger rows are
made from these and read back into them, so that a row passes the same checks as a caller.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from secure_fvi.errors import InputError, SecureFVIWarning
from secure_fvi.privacy.chain import ChainKind, check_keys
from secure_fvi.privacy.events import Event, from_dict, to_dict

UNITS = ("record", "silo")
#: How the filter weighs its orders (docs/ledger.md); written into each budget row.
POLICY = "rdp-filter/1"
_LONGEST_NAME = 200
_MOST_RELEASES = 10**12

Plain = str | int | float | bool | list[Any]


def check_name(what: str, name: object) -> str:
    """`name` if it can name something in a row; raises InputError otherwise."""
    if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise InputError(f"{what} must be 1 to {_LONGEST_NAME} printable characters, not {name!r}")
    return name


def check_delta(delta: object) -> None:
    """Raises InputError unless 0 < delta < 1."""
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta < 1:
        raise InputError(f"delta must lie between 0 and 1, both excluded, not {delta!r}")


def warn_of_large_delta(delta: float, records: int) -> None:
    """Warn where delta is 1 / records or more. The text says how many records there are: for their own silo's eyes."""
    if delta * records >= 1:
        warnings.warn(
            f"delta {delta:.3g} is not below 1 / {records} records: such a guarantee allows to publish "
            f"whole records; choose at most {0.1 / records:.1g}",
            SecureFVIWarning,
            stacklevel=3,
        )


def check_unit(unit: object) -> str:
    if unit not in UNITS:
        raise InputError(f"unit must be {' or '.join(UNITS)}, not {unit!r}")
    return str(unit)


@dataclass(frozen=True)
class Budget:
    """What a site allows all jobs on one data set together: (epsilon, delta), adjacency by `unit`.

    data_set: an id that names a population in the site's policy. It outlives files, versions and new rows.
    """

    data_set: str
    epsilon: float
    delta: float
    unit: str = "record"

    def __post_init__(self) -> None:
        check_name("data_set", self.data_set)
        number = type(self.epsilon) in (int, float)
        if not (number and math.isfinite(self.epsilon) and self.epsilon > 0):
            raise InputError(f"epsilon must be a positive finite number, not {self.epsilon!r}")
        check_delta(self.delta)
        check_unit(self.unit)

    def __str__(self) -> str:
        return f"epsilon {self.epsilon:.6g} at delta {self.delta:.3g} (unit: {self.unit})"

    def to_body(self) -> dict[str, Any]:
        return {
            "data_set": self.data_set,
            "unit": self.unit,
            "epsilon": float(self.epsilon),
            "delta": float(self.delta),
            "policy": POLICY,
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Budget:
        check_keys(body, "data_set", "unit", "epsilon", "delta", "policy")
        if body["policy"] != POLICY:
            raise InputError(f"a budget of policy {body['policy']!r}; this version knows {POLICY}")
        return cls(body["data_set"], body["epsilon"], body["delta"], body["unit"])


@dataclass(frozen=True)
class Term:
    """One kind of release of a job: at most `count` of `event`, planned retries included."""

    phase: str
    event: Event
    count: int

    def __post_init__(self) -> None:
        check_name("phase", self.phase)
        if not isinstance(self.event, Event):
            raise InputError(f"phase '{self.phase}': a term needs a privacy event, not {type(self.event).__name__}")
        if type(self.count) is not int or not 1 <= self.count <= _MOST_RELEASES:
            raise InputError(f"phase '{self.phase}': count must be a whole number of at least 1, not {self.count!r}")


@dataclass(frozen=True)
class Job:
    """A job's declared terms: charged whole, at `count` of each term, before the first round.

    job: an id that no other job of this silo has. delta: at which the report states the job's own epsilon.
    description: algorithm, noise placement, clipping, what is declared public, RNG status; for the report. It must
    be the same when the job is resumed.
    """

    job: str
    data_set: str
    unit: str
    delta: float
    terms: tuple[Term, ...]
    description: Mapping[str, Plain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("job", self.job)
        check_name("data_set", self.data_set)
        check_unit(self.unit)
        check_delta(self.delta)
        if not isinstance(self.terms, tuple) or not self.terms or not all(isinstance(t, Term) for t in self.terms):
            raise InputError(f"job '{self.job}': terms must be a tuple of at least one Term")
        phases = [t.phase for t in self.terms]
        if len(set(phases)) != len(phases):
            raise InputError(f"job '{self.job}': phases must differ, got {', '.join(phases)}")
        for key, value in self.description.items():
            if not isinstance(key, str) or not _plain(value):
                raise InputError(f"job '{self.job}': description '{key}' must be text, numbers, booleans or a list")

    def term(self, phase: str) -> Term:
        """The term of `phase`; raises InputError for a phase that was not declared."""
        for term in self.terms:
            if term.phase == phase:
                return term
        declared = ", ".join(t.phase for t in self.terms)
        raise InputError(f"job '{self.job}' declared no phase '{phase}'; it declared {declared}")

    def difference(self, other: Job) -> str | None:
        """The first field in which `other` differs, or None."""
        ours, theirs = self.to_body(), other.to_body()
        return next((name for name in ours if ours[name] != theirs[name]), None)

    def to_body(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "data_set": self.data_set,
            "unit": self.unit,
            "delta": float(self.delta),
            "terms": [[t.phase, to_dict(t.event), t.count] for t in self.terms],
            "description": {key: _lists(value) for key, value in self.description.items()},
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Job:
        check_keys(body, "job", "data_set", "unit", "delta", "terms", "description")
        rows, description = body["terms"], body["description"]
        if not isinstance(rows, list) or any(not isinstance(r, list) or len(r) != 3 for r in rows):
            raise InputError("the terms of a job must be [phase, event, count]")
        if not isinstance(description, dict):
            raise InputError("the description of a job must be a table")
        terms = tuple(Term(phase, from_dict(event), count) for phase, event, count in rows)
        return cls(body["job"], body["data_set"], body["unit"], body["delta"], terms, description)


def _lists(value: Any) -> Any:
    # As it comes back from a row.
    return [_lists(v) for v in value] if isinstance(value, list | tuple) else value


def _plain(value: object, depth: int = 0) -> bool:
    if isinstance(value, list | tuple):
        return depth < 4 and all(_plain(v, depth + 1) for v in value)
    if isinstance(value, bool | str):
        return True
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, float) and math.isfinite(value)


# ---- The chain that is a privacy ledger, and its kinds of row beyond those of every chain ----

LEDGER = ChainKind(
    name="ledger",
    remedy="`secure-fvi budget set` makes one",
    on_failure="nothing was charged, so nothing may leave",
    otherwise="count the budget as spent",
)
BUDGET, JOB, RELEASE, CLOSE = "budget", "job", "release", "close"
