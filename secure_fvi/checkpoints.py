"""Checkpoints: the states of all parties in this process as one SQLite store, switched over together.

A party's state is a NamedTuple of tensors, arrays, dicts of tensors and plain values (`states.pack_state`); nothing is
pickled. Keys and masks of a secure sum are not part of it: a resumed run opens a new session, and sums do not depend on
masks.

With the states goes what the run was begun with (`Begun`), and a run that goes on says the same or is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secure_fvi.aggregation.store import SqliteStore, Store
from secure_fvi.errors import InputError
from secure_fvi.states import pack_state, unpack_state

#: Differences that an error names, and letters of a value that it shows.
_MOST_NAMED, _LONGEST_SHOWN = 3, 60
#: The store in a folder of checkpoints, and its slots: states by party, rounds done, what the run was begun with.
STORE_FILE = "state.sqlite"
_STATE, _ROUND, _BEGUN = "state", "round", "begun"
#: What earlier versions kept in such a folder.
_EARLIER = "LATEST"


#: What decides on what a run infers, by name: options as text, and digests of what is too long or nobody's to read.
Begun = Mapping[str, str]


class Checkpoints:
    """Where the states of the parties in this process are kept, at least `seconds` apart; 0: after every round. In a
    folder, of a run that was begun with `begun`; or in a `store` that is open, where only the server is in this process
    and fast to write."""

    def __init__(
        self, directory: Path, seconds: float = 0.0, begun: Begun | None = None, store: Store | None = None
    ) -> None:
        self.directory, self.seconds, self.begun, self._store = directory, seconds, begun, store

    def check(self) -> None:
        """Before anything is charged: raise InputError where the folder has a run that was begun with something else
        than `begun`."""
        if self.begun is not None and latest_round(self.directory) is not None:
            with self._opened() as store:
                _check_same(json.loads(store.get(_BEGUN) or b"{}"), self.begun, self.directory)

    def load(self, templates: Mapping[str, Any]) -> dict[str, Any] | None:
        """States by party, shaped like `templates`; None when there are none. Raises InputError for a checkpoint of
        other parties or another configuration."""
        if self._store is None and latest_round(self.directory) is None:
            return None
        with self._opened() as store:
            packed = store.get(_STATE)
        if packed is None:
            return None
        found: dict[str, Any] = unpack_state(packed, dict(templates), self.directory)
        if found.keys() != templates.keys():
            raise InputError(f"the checkpoint in {self.directory} is of another set of silos")
        return found

    def save(self, round_: int, parties: Mapping[str, Any]) -> None:
        """Keep the states of the parties after `round_` rounds."""
        begun = {} if self.begun is None else {_BEGUN: json.dumps(dict(self.begun)).encode()}
        with self._opened() as store:
            store.put({_STATE: pack_state(dict(parties)), _ROUND: str(round_).encode(), **begun})

    def _opened(self) -> AbstractContextManager[Store]:
        return _opened(self.directory) if self._store is None else nullcontext(self._store)


@contextmanager
def _opened(directory: Path) -> Iterator[Store]:
    directory.mkdir(parents=True, exist_ok=True)
    with closing(SqliteStore(directory / STORE_FILE)) as store:  # its owner's alone: silos' latents are in it
        yield store


def latest_round(directory: Path) -> int | None:
    """Rounds done at the checkpoint to resume from; None when there is none. Raises InputError for an earlier
    version's."""
    if not (directory / STORE_FILE).exists():
        if (directory / _EARLIER).exists():
            raise InputError(
                f"the checkpoint in {directory} is of an earlier version, which alone can resume it; give another "
                "folder, or empty this one"
            )
        return None
    with _opened(directory) as store:
        kept = store.get(_ROUND)
    return None if kept is None else int(kept)


def _check_same(then: Begun, now: Begun, directory: Path) -> None:
    """Raises InputError, which names what differs."""

    def told(name: str) -> str:
        old, new = then.get(name), now.get(name)
        if (old or new or "").startswith(DIGEST):
            return f"another {name}"
        return f"{name} = {'none' if old is None else old}, not {'none' if new is None else new}"

    differ = [told(name) for name in dict.fromkeys([*now, *then]) if then.get(name) != now.get(name)]
    if differ:
        more = f" and {len(differ) - _MOST_NAMED} more" if len(differ) > _MOST_NAMED else ""
        raise InputError(
            f"the checkpoint in {directory} is of a run with {', '.join(differ[:_MOST_NAMED])}{more}; resume with what "
            "it was begun with, or give another folder"
        )


# ---- What a run was begun with ----

#: Begins a value of `Begun` that is no text to show.
DIGEST = "sha256:"
#: Whose functions are taken by name: another version of them is not another model.
_LIBRARIES = ("torch", "pyro", "numpy", "scipy", "pandas", "polars", "secure_fvi", "builtins", "math", "functools")
_PLAIN = (type(None), bool, int, float, str, bytes)


def options_of(name: str, settings: Any) -> dict[str, str]:
    """`Begun` of a dataclass of options: its kind, and each of them by name."""
    if settings is None:
        return {name: "None"}
    told = {name: type(settings).__name__}
    for f in dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ():
        told[f"{name}.{f.name}"] = text_of(getattr(settings, f.name))
    return told


def text_of(value: Any) -> str:
    """A value of `Begun`: plain ones as they are, a digest of all others."""
    if isinstance(value, _PLAIN) and len(repr(value)) <= _LONGEST_SHOWN:
        return repr(value)
    digest = hashlib.sha256()
    _feed(digest, value, ())
    return DIGEST + digest.hexdigest()


def _feed(digest: Any, value: Any, above: tuple[int, ...]) -> None:
    """Numbers, tensors and frames by what they hold; a program by its code, and what that names; weights that are
    fitted by their shapes. `above`: what `value` is part of, where that may lead back to it."""

    def note(kind: str, *parts: Any) -> None:
        digest.update(f"{kind};".encode())
        for part in parts:
            _feed(digest, part, (*above, id(value)))

    if id(value) in above:
        note("again")
    elif isinstance(value, _PLAIN):
        digest.update(f"{value!r};".encode())
    elif isinstance(value, Tensor | np.ndarray) or (hasattr(value, "to_numpy") and not hasattr(value, "columns")):
        array = value.detach().cpu() if isinstance(value, Tensor) else value
        array = np.ascontiguousarray(array.to_numpy() if hasattr(array, "to_numpy") else array)
        content = repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes()
        digest.update(f"array {array.dtype.kind}{array.shape};".encode() + content)
    elif isinstance(value, Mapping):
        note("dict", *[part for key in sorted(value, key=str) for part in (str(key), value[key])])
    elif hasattr(value, "columns") and hasattr(value, "to_numpy"):  # a frame; its columns stand for a dict of them
        note("dict", *[part for key in sorted(value.columns, key=str) for part in (str(key), value[key])])
    elif isinstance(value, list | tuple):
        note("list", *value)
    elif isinstance(value, torch.nn.Module):
        fitted = {name: tuple(p.shape) for name, p in value.named_parameters() if p.requires_grad}
        held = {name: t for name, t in value.state_dict().items() if name not in fitted}
        note(type(value).__qualname__, fitted, held, type(value).forward)
    elif isinstance(value, functools.partial):
        note("partial", value.func, value.args, value.keywords)
    elif isinstance(value, types.MethodType):
        note("method", value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or ()]
        note("function", value.__code__, value.__defaults__, value.__kwdefaults__, cells, *_named_by(value))
    elif isinstance(value, types.CodeType):
        inner = [c if isinstance(c, (*_PLAIN, tuple, types.CodeType)) else repr(type(c)) for c in value.co_consts]
        note("code", value.co_code, value.co_names, value.co_varnames, inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        note(type(value).__qualname__, *[getattr(value, f.name) for f in dataclasses.fields(value)])
    elif isinstance(getattr(type(value), "__call__", None), types.FunctionType) and _own(type(value)):  # noqa: B004
        note(type(value).__qualname__, type(value).__call__, vars(value))
    else:
        note(f"{getattr(value, '__qualname__', '')} {type(value).__module__}.{type(value).__qualname__}")


def _own(thing: Any) -> bool:
    """Whether it is of the user, not of a library."""
    return str(thing.__module__).partition(".")[0] not in _LIBRARIES


def _named_by(fn: types.FunctionType) -> list[Any]:
    """What a program names outside of itself: its own functions, and constants; nothing that changes, as lists do."""
    if not _own(fn):
        return []
    found = [fn.__globals__.get(name) for name in fn.__code__.co_names]
    own = [v for v in found if isinstance(v, types.FunctionType) and v.__module__ == fn.__module__]
    return [*own, *(v for v in found if isinstance(v, (*_PLAIN, tuple, Tensor, np.ndarray)))]
