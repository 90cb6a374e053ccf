"""A party's state as bytes: NamedTuples of tensors, arrays, dicts of tensors and plain values. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import torch
from torch import Tensor

from secure_fvi import wire
from secure_fvi.errors import InputError
from secure_fvi.trees import Params, write

#: Version of `pack_state`, and its codes for a tensor and an array.
_PACKED, _TENSOR, _ARRAY = 2, 1, 2
_MOVED = "moved rows"
_STATE = wire.Row(wire.whole(), wire.Anything(1 << 26, 64, extended=True))
_STORED = wire.Row(wire.text(16), wire.Listed(wire.whole(), 64), wire.binary())
_DTYPES = frozenset(np.dtype(t).str for t in ["?", "b", "B", "h", "H", "i", "I", "q", "Q", "e", "f", "d", "F", "D"])


class Moved(NamedTuple):
    """A state after a step that moved few of its rows and is not written into it yet: there is one such state, and no
    copy of it. Of which there are such steps has `by_row`, its tensors (N, ...) by name, and `with_rows(tensors)`."""

    at: Tensor  # (B,) the rows
    before: Params  # (B, ...) each, by name: what they hold
    after: Params  # and will hold
    rest: Any  # the next state, tensors by row aside
    mark: str = _MOVED  # tells it from a state, in bytes

    def into(self, local: Any, counts: bool) -> Any:
        """The next state, in the tensors of `local`; or, where the step does not count, that one as it was. Either may
        be said again, and the other after it."""
        rows: Params = local.by_row
        write(rows, self.at, self.after if counts else self.before)
        return self.rest.with_rows(rows) if counts else local


def moves(state: Any) -> bool:
    """Whether `state`, or a part of it, is one after a step that moved few rows."""
    return isinstance(state, Moved) or (isinstance(state, tuple) and any(isinstance(part, Moved) for part in state))


def pack_state(state: Any) -> bytes:
    """One party's state as bytes: MessagePack, tensors and arrays as they lie in memory."""
    packed: bytes = msgpack.packb([_PACKED, state], default=_pack_array)
    return packed


def unpack_state(packed: bytes, template: Any, source: Path) -> Any:
    """The state that `pack_state` packed, shaped like `template`. Raises InputError, which names `source`."""
    version, state = wire.own(packed, f"the checkpoint in {source}", _STATE, ext_hook=_unpack_array)
    if version != _PACKED:
        raise _of_another(source)
    return like(state, template, source)


def _pack_array(value: Any) -> Any:
    if isinstance(value, Tensor):
        code, array = _TENSOR, value.detach().cpu().numpy()
    elif isinstance(value, np.ndarray):
        code, array = _ARRAY, value
    elif isinstance(value, Mapping):
        return dict(value)
    else:
        raise TypeError(f"a {type(value).__name__} cannot be checkpointed")
    return msgpack.ExtType(code, msgpack.packb([array.dtype.str, array.shape, array.tobytes()]))


def _unpack_array(code: int, data: bytes) -> Any:
    dtype, shape, content = wire.own(data, "an array of a checkpoint", _STORED)
    if dtype not in _DTYPES:
        raise ValueError("no array of numbers")
    array = np.frombuffer(bytearray(content), dtype).reshape(shape)
    return torch.from_numpy(array) if code == _TENSOR else array


def like(value: Any, template: Any, source: Path) -> Any:
    """`value` with lists turned into what `template` has in their places, and tensors on its devices."""
    if isinstance(value, Tensor):
        return value.to(template.device) if isinstance(template, Tensor) else value
    if isinstance(value, dict):
        known = template if isinstance(template, Mapping) else {}
        return {k: like(v, known.get(k), source) for k, v in value.items()}
    if not isinstance(value, list):
        return value
    named = hasattr(template, "_fields")
    if value and isinstance(value[-1], str) and value[-1] == _MOVED and hasattr(template, "by_row"):
        at, before, after, rest, _ = (like(v, t, source) for v, t in zip(value, _moved(template), strict=True))
        return Moved(at, before, after, rest)
    if not named and (type(template) is not tuple or len(template) != len(value)):  # of a length that varies
        return tuple(like(v, None, source) for v in value)
    if len(template) != len(value):
        raise _of_another(source)
    parts = [like(v, t, source) for v, t in zip(value, template, strict=True)]
    return type(template)(*parts) if named else tuple(parts)


def _moved(template: Any) -> Moved:
    """What a step over states like `template` is like."""
    rows = template.by_row
    return Moved(next(iter(rows.values())), rows, rows, template)


def _of_another(source: Path) -> InputError:
    return InputError(f"the checkpoint in {source} was written by another version or algorithm")
