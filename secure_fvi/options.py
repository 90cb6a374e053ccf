"""Options: what each may be, in types that pydantic checks, and how a learning rate falls over a run.

The options of an algorithm, a sum, privacy or a family are a frozen dataclass, those of a run a TypedDict; the types of
their fields say what they take. `check` and `checked` refuse the rest in one line that names the option and what it was
given. NumPy's numbers are taken for Python's own; nothing else is converted: True is no number, and 2.5 no count.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import AfterValidator, Field, InstanceOf, TypeAdapter, ValidationError

from secure_fvi.errors import InputError


class Says(str):
    """What a value must be, as an error says it after the option's name."""

    __slots__ = ()


Count = Annotated[int, Field(ge=1), Says("must be a whole number of at least 1")]
Whole = Annotated[int, Field(ge=0), Says("must be a whole number of at least 0")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), Says("must be positive and finite")]
#: Of what a silo contributes. The step of a masked sum is 2^-60 of it, times the silos, and more of an encrypted one.
Bound = Annotated[float, Field(gt=0, le=2.0**40), Says("must lie in (0, 2^40]: sums are rounded by a share of it")]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), Says("must be at least 0 and finite")]
Spread = Annotated[float, Field(ge=0, allow_inf_nan=False), Says("must be finite and not negative")]
#: Of records or silos that take part.
Share = Annotated[float, Field(gt=0, le=1), Says("must lie in (0, 1]")]
#: Of a whole, none included.
Part = Annotated[float, Field(ge=0, le=1), Says("must lie in [0, 1]")]
Momentum = Annotated[float, Field(ge=0, lt=1), Says("must lie in [0, 1)")]
#: Of a whole, never all of it.
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), Says("must lie in [0, 1)")]
#: Neither nothing nor all.
Inside = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False), Says("must lie in (0, 1)")]
Schedule = Literal["constant", "linear", "cosine", "exponential"]

#: Factor on the learning rate after a share `t` in [0, 1) of the rounds.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1.0 - 0.99 * t,
    "cosine": lambda t: 0.005 + 0.4975 * (1 + math.cos(math.pi * t)),
    "exponential": lambda t: 0.01**t,
}


def check(options: Any) -> None:
    """Raise InputError, which names the option, for the first value of a dataclass that is not what its field takes."""
    kind = options.__class__
    given = {name: getattr(options, name) for name in (f.name for f in dataclasses.fields(kind) if f.init)}
    for name, value in checked(kind, given).items():
        if value is not given[name]:
            object.__setattr__(options, name, value)


def checked(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """`given`, whose types the class `kind` names, with NumPy's numbers as Python's. Raises InputError as `check`."""
    checks, found = _checks(kind), {}
    for name, value in given.items():
        adapter, says = checks[name]
        found[name] = value.item() if isinstance(value, np.generic) else value
        try:
            adapter.validate_python(found[name], strict=True)
        except ValidationError:
            raise InputError(f"{name} {says(found[name])}") from None
    return found


def check_schedule(option: str, name: str) -> None:
    """Raise InputError, which names the option, for a schedule that there is not."""
    if name not in SCHEDULES:
        raise InputError(f"{option} '{name}' is unknown; choose {', '.join(SCHEDULES)}")


@functools.cache
def _checks(kind: type) -> dict[str, tuple[TypeAdapter[Any], Callable[[Any], str]]]:
    """By option: what checks it, and what an error says."""
    hints = get_type_hints(kind, include_extras=True)
    own = {name: hint for name, hint in hints.items() if not str(hint).startswith("typing.ClassVar")}
    return {name: (TypeAdapter(_checkable(hint)), _says(hint)) for name, hint in own.items()}


def _checkable(hint: Any) -> Any:
    """The type as pydantic is to check it: of a class, that a value is one; of what a container or a function is made
    of, nothing, since whoever uses it says more."""
    if get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(map(_checkable, get_args(hint)))]  # noqa: UP007 - of a tuple
    if get_origin(hint) is Annotated:
        return Annotated[(_checkable(get_args(hint)[0]), *get_args(hint)[1:])]
    origin = get_origin(hint) or hint
    if origin is Literal or hint in (bool, int, float, str, bytes, None, types.NoneType, Any):
        return hint
    if origin is Sequence:
        return Annotated[Any, AfterValidator(_listed_items)]
    of_a_class = isinstance(origin, type) and not getattr(origin, "_is_protocol", False)
    return InstanceOf[origin] if of_a_class else Any  # type: ignore[misc, valid-type]


def _listed_items(value: Any) -> Any:
    """An array is a list as well; a text, which is one of letters, is none, nor is a dict, whose order says nothing."""
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        raise ValueError("no list")
    return value


_NAMES = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", bytes: "bytes"}


def _says(hint: Any) -> Callable[[Any], str]:
    """What an error says of a value, after the option's name: the first `Says` of the type, or its parts by name."""
    if get_origin(hint) is Literal:
        known = _listed(map(str, get_args(hint)))
        return lambda value: f"{_shown(value)} is unknown; choose {known}"
    parts = list(_parts(hint))
    said = next((m for part in parts for m in getattr(part, "__metadata__", ()) if isinstance(m, Says)), None)
    if said is None and len(parts) == 2 and get_origin(parts[0]) is Literal and parts[1] in (None, types.NoneType):
        return _says(parts[0])
    named = said or f"must be {_listed(map(_named, parts))}"
    return lambda value: f"{named}, not {_shown(value)}{_hint(value, parts)}"


def _parts(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(part for option in get_args(hint) for part in _parts(option))
    if get_origin(hint) is Annotated and not any(isinstance(m, Says) for m in hint.__metadata__):
        return _parts(get_args(hint)[0])
    return (hint,)


def _listed(names: Any) -> str:
    *others, last = dict.fromkeys(names)
    return f"{', '.join(others)} or {last}" if others else last


def _named(part: Any) -> str:
    if get_origin(part) is Literal:
        return _listed(map(repr, get_args(part)))
    origin = get_origin(part) or part
    if origin in (None, types.NoneType):
        return "None"
    if origin is Callable:
        return "a function"
    return _NAMES.get(origin) or {Mapping: "a dict", Sequence: "a list"}.get(origin) or f"{origin.__name__}(...)"


def _shown(value: Any) -> str:
    """A value in an error: numbers and texts as they are, of all else the kind, since it may hold data."""
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    if isinstance(value, str):
        return repr(value[:60])
    return (
        repr(value) if value is None or type(value) in (bool, int, float) else f"a value of type {type(value).__name__}"
    )


def _hint(value: Any, parts: Sequence[Any]) -> str:
    """What was meant, where that can be told: an instance for its class, or for a text that names it or an option."""
    classes: list[type] = [part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)]
    for part in classes:
        if value is part or (isinstance(value, str) and value.lower() == part.__name__.lower()):
            return f"; write {part.__name__}(...) of {_home(part)}"
        for name, hint in get_type_hints(part).items() if isinstance(value, str) else ():
            if any(value in get_args(option) for option in _parts(hint) if get_origin(option) is Literal):
                return f"; write {part.__name__}({name}={value!r}) of {_home(part)}"
    return f"; these are of {_home(classes[0])}" if classes else ""


def _home(part: type) -> str:
    """Where users import it from."""
    top = sys.modules["secure_fvi"]
    known = part.__name__ in top.__all__ and getattr(top, part.__name__) is part
    return "secure_fvi" if known else part.__module__.rpartition(".")[0]
