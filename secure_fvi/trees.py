"""Small operations on dicts of tensors, which is what parameters, optimiser state and rows of data are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Params = dict[str, Tensor]


def merge(**parts: Params) -> Params:
    """One dict with keys "<part>/<name>"."""
    return {f"{prefix}/{name}": value for prefix, part in parts.items() for name, value in part.items()}


def part(merged: Params, prefix: str) -> Params:
    """The part of a merged dict, its prefix removed."""
    return {k.removeprefix(prefix + "/"): v for k, v in merged.items() if k.startswith(prefix + "/")}


def take(rows: Params, at: Tensor | None) -> Params:
    """The rows at the given positions; None means all."""
    return rows if at is None else {name: value.index_select(0, at) for name, value in rows.items()}


def put(rows: Params, at: Tensor | None, new: Params) -> Params:
    """`rows` with `new` at the given positions: records that took no part keep their state."""
    return new if at is None else {name: value.index_copy(0, at, new[name]) for name, value in rows.items()}


def write(rows: Params, at: Tensor, new: Params) -> None:
    """Put `new` into `rows` at the given positions, where they lie: no copy is made."""
    for name, value in new.items():
        rows[name].index_copy_(0, at, value)


def averages(latest: Params, average: Params, seen: Tensor, first: int, now: int) -> Params:
    """Means over steps `first` to `now` of rows of which `average` holds the steps up to the one in which each was last
    `seen` (B,), and which have stood still at `latest` since; before the first step `latest` itself."""
    if now < first:
        return latest
    share = (seen - first + 1).clamp(min=0).to(torch.float64) / (now - first + 1)
    return {
        name: value + share.to(value).reshape(-1, *[1] * (value.dim() - 1)) * (average[name] - value)
        for name, value in latest.items()
    }


def stacked(blocks: Sequence[Params]) -> Params:
    """Rows of one block after the other's."""
    return {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}


def running_average(average: Params, latest: Params, count: int) -> Params:
    """The average including `latest` as its `count`-th term; `latest` itself outside the averaging phase."""
    if count <= 1:
        return latest
    return {name: torch.lerp(old, latest[name], 1.0 / count) for name, old in average.items()}


def unflatten(flat: Tensor, like: Params) -> Params:
    """`flat` cut into tensors of the shapes of `like`, names in sorted order."""
    names = sorted(like)
    parts = flat.split([like[name].numel() for name in names])
    return {name: value.reshape(like[name].shape) for name, value in zip(names, parts, strict=True)}


def plain(tensors: Params) -> Params:
    """As files take them: on the CPU, each in memory of its own."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


def to_numpy(tensor: Tensor) -> npt.NDArray[np.float64]:
    """Float64 on the CPU."""
    return tensor.detach().cpu().numpy().astype(np.float64)
