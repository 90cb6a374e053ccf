"""What was released, as data: each mechanism by the numbers that its privacy depends on, and nothing else.

An event is a frozen value that is checked when it is made. Sensitivities are for the adjacency of the unit (a
record or a silo added or removed). Events go to files and messages as plain dicts by `to_dict`; `from_dict`
reads only the kinds listed here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from secure_fvi.errors import InputError

#: Numbers of events lie between these, so that their squares and those squares' inverses are numbers too.
_LEAST, _MOST = 1e-150, 1e150


def _positive(what: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value > 0):  # type: ignore[arg-type, operator]
        raise InputError(f"{what} must be a positive finite number, not {value!r}")
    if not _LEAST <= value <= _MOST:  # type: ignore[operator]
        raise InputError(f"{what} must lie in [{_LEAST:g}, {_MOST:g}], not {value!r}")


@dataclass(frozen=True)
class Gaussian:
    """A sum with Gaussian noise. noise_multiplier: sd of the noise over the L2 sensitivity."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        _positive("noise_multiplier", self.noise_multiplier)


@dataclass(frozen=True)
class Skellam:
    """A sum of integer vectors with symmetric Skellam noise of `variance` in each coordinate.

    l1, l2: sensitivities of the integer sum, rounding included (Agarwal et al. 2021).
    """

    variance: float
    l1: float
    l2: float

    def __post_init__(self) -> None:
        _positive("variance", self.variance)
        _positive("l2", self.l2)
        _positive("l1", self.l1)
        if self.l1 < self.l2 * (1 - 1e-12):
            raise InputError(f"l1 = {self.l1} is below l2 = {self.l2}; no vector has such norms")


Mechanism = Gaussian | Skellam


@dataclass(frozen=True)
class PoissonSampled:
    """`event` on a batch that each record joins independently with probability `rate`, unseen by the adversary."""

    rate: float
    event: Mechanism

    def __post_init__(self) -> None:
        _positive("sampling rate", self.rate)
        if self.rate > 1:
            raise InputError(f"sampling rate must lie in (0, 1], not {self.rate}")
        if not isinstance(self.event, Mechanism):
            raise InputError(f"only a mechanism can be subsampled, not {type(self.event).__name__}")


@dataclass(frozen=True)
class Repeated:
    """`event`, `count` times in a row, each free to depend on what came before (adaptive composition)."""

    event: Mechanism | PoissonSampled
    count: int

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise InputError(f"count must be a whole number of at least 1, not {self.count!r}")
        if not isinstance(self.event, Mechanism | PoissonSampled):
            raise InputError(f"only a mechanism can be repeated, not {type(self.event).__name__}")


@dataclass(frozen=True)
class Composed:
    """Several events one after the other."""

    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.events, tuple) or not all(isinstance(e, Event) for e in self.events):
            raise InputError("a composition is a tuple of events")


Event = Gaussian | Skellam | PoissonSampled | Repeated | Composed

_KINDS: dict[str, Any] = {
    "gaussian": Gaussian,
    "skellam": Skellam,
    "poisson_sampled": PoissonSampled,
    "repeated": Repeated,
    "composed": Composed,
}
_NAMES = {cls: name for name, cls in _KINDS.items()}
_DEEPEST = 32


def to_dict(event: Event) -> dict[str, Any]:
    """`event` as dicts, lists, strings and numbers."""

    def plain(value: Any) -> Any:
        if isinstance(value, Event):
            return to_dict(value)
        return [to_dict(e) for e in value] if isinstance(value, tuple) else value

    fields = {f.name: plain(getattr(event, f.name)) for f in dataclasses.fields(event)}
    return {"kind": _NAMES[type(event)], **fields}


def from_dict(data: object, _depth: int = 0) -> Event:
    """The event that `data` describes. Raises InputError for an unknown kind or field and for bad numbers."""
    if not isinstance(data, Mapping) or _depth > _DEEPEST:
        raise InputError("an event must be a table with a kind and its numbers")
    kind = data.get("kind")
    if kind not in _KINDS:
        raise InputError(f"unknown event {kind!r}; known are {', '.join(_KINDS)}")
    cls = _KINDS[kind]
    names = {f.name for f in dataclasses.fields(cls)}
    given = set(data) - {"kind"}
    if given != names:
        raise InputError(f"event '{kind}' needs {', '.join(sorted(names))}; given were {', '.join(sorted(given))}")
    values = {name: data[name] for name in names}
    if "event" in values:
        values["event"] = from_dict(values["event"], _depth + 1)
    if "events" in values:
        if not isinstance(values["events"], list | tuple):
            raise InputError("the events of a composition must be a list")
        values["events"] = tuple(from_dict(e, _depth + 1) for e in values["events"])
    event: Event = cls(**values)
    return event
