"""What a program keeps outside of itself, between its runs: a list that it fills, a counter, an array that it changes.

Such a program is another model at every party and in every run, and the log density need not show it at once: what was
worked out from made data, or from the first silo's, is used at the others.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from secure_fvi.errors import SecureFVIWarning

#: Containers within containers, and functions that functions call, that are looked into; elements of each.
_DEEP, _ELEMENTS = 3, 1000
#: Bytes of an array up to which its numbers are compared.
_BYTES = 2**20


@contextlib.contextmanager
def watched(model: Any) -> Iterator[None]:
    """Warns with SecureFVIWarning where a program, run meanwhile, has changed what its closure or its module's names
    hold."""
    fn = getattr(model, "fn", model)
    before = _held(fn)
    yield
    after = _held(fn)
    changed = sorted(name for name, value in before.items() if after.get(name) != value)
    if changed:
        warnings.warn(
            f"the program changes what it holds outside of itself ({', '.join(changed)}): what one run leaves there, "
            "of made data or of another silo, the next one finds. Work such values out before the fit, and pass them "
            "with sf.Shared",
            SecureFVIWarning,
            stacklevel=3,
        )


def _held(fn: Any, deep: int = _DEEP) -> dict[str, Any]:
    """By name, a mark of each variable that a function, and those of its module that it calls, finds outside."""
    fn = inspect.unwrap(fn) if callable(fn) else fn
    if not isinstance(fn, types.FunctionType):
        return {}
    names = {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not filled yet
            names[name] = cell.cell_contents
    names |= {f"default of {k}": value for k, value in enumerate(fn.__defaults__ or ())}
    found = {name: _mark(value, _DEEP) for name, value in names.items() if not callable(value)}
    for value in names.values():
        if deep and isinstance(value, Callable) and getattr(value, "__module__", "") == fn.__module__:  # type: ignore[arg-type]
            found = {**_held(value, deep - 1), **found}
    return found


def _mark(value: Any, deep: int) -> Any:
    """Equal for what has not changed."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes() if value.nbytes <= _BYTES and value.dtype != object else id(value)
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        return repr(value)
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        items = [*value.items()] if isinstance(value, dict) else [*value]
        inner = [_mark(item, deep - 1) for item in items[:_ELEMENTS]] if deep else ()
        return type(value), len(items), tuple(inner)
    return id(value)
