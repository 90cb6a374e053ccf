"""Options of algorithms: what each may be, in types that pydantic checks, and how a learning rate falls over a run.

An algorithm's options are a frozen dataclass whose fields say here what they take; `check` refuses the rest in one line
that names the option and what it was given.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from secure_fvi.errors import InputError


class Says(str):
    """What a value must be, as an error says it after the option's name."""

    __slots__ = ()


Count = Annotated[int, Field(ge=1), Says("must be a whole number of at least 1")]
Whole = Annotated[int, Field(ge=0), Says("must be a whole number of at least 0")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), Says("must be positive and finite")]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), Says("must be at least 0 and finite")]
Spread = Annotated[float, Field(ge=0, allow_inf_nan=False), Says("must be finite and not negative")]
#: Of records or silos that take part.
Share = Annotated[float, Field(gt=0, le=1), Says("must lie in (0, 1]")]
#: Of a whole, none included.
Part = Annotated[float, Field(ge=0, le=1), Says("must lie in [0, 1]")]
Momentum = Annotated[float, Field(ge=0, lt=1), Says("must lie in [0, 1)")]
Schedule = Literal["constant", "linear", "cosine", "exponential"]

#: Factor on the learning rate after a share `t` in [0, 1) of the rounds.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1.0 - 0.99 * t,
    "cosine": lambda t: 0.005 + 0.4975 * (1 + math.cos(math.pi * t)),
    "exponential": lambda t: 0.01**t,
}


def check(options: Any) -> None:
    """Raise InputError, which names the option, for the first value that is not what its field takes."""
    for name, (adapter, says) in _checks(options.__class__).items():
        value = getattr(options, name)
        try:
            adapter.validate_python(value, strict=True)
        except ValidationError:
            raise InputError(f"{name} {says(value)}") from None


def check_schedule(option: str, name: str) -> None:
    """Raise InputError, which names the option, for a schedule that there is not."""
    if name not in SCHEDULES:
        raise InputError(f"{option} '{name}' is unknown; choose {', '.join(SCHEDULES)}")


@functools.cache
def _checks(kind: type) -> dict[str, tuple[TypeAdapter[Any], Callable[[Any], str]]]:
    """By option: what checks it, and what an error says. Options of other types are checked where they are used."""
    hints = get_type_hints(kind, include_extras=True)
    said = {f.name: _says(hints[f.name]) for f in dataclasses.fields(kind)}
    return {name: (TypeAdapter(hints[name]), says) for name, says in said.items() if says is not None}


def _says(hint: Any) -> Callable[[Any], str] | None:
    if get_origin(hint) is Literal:
        *others, last = map(str, get_args(hint))
        known = f"{', '.join(others)} or {last}"
        return lambda value: f"'{value}' is unknown; choose {known}"
    if get_origin(hint) in (Union, types.UnionType):
        found = [says for says in map(_says, get_args(hint)) if says is not None]
        return found[0] if found else None
    says = next((m for m in getattr(hint, "__metadata__", ()) if isinstance(m, Says)), None)
    return None if says is None else lambda value: f"{says}, not {value!r}"
