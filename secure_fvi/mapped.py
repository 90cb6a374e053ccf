"""A traced function, mapped over silos by `vmap`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secure_fvi.compiled import Traced, agree, flatten, structure

_log = logging.getLogger(__name__)


class Mapped:
    """Calls of `alone` on equal shapes as one call. Where `vmap` cannot map the function they are made one by one."""

    def __init__(self, alone: Traced) -> None:
        self.alone = alone
        # Steps in place, as PyTorch's optimisers make them, would be mapped by a loop.
        mapped = torch.func.vmap(torch.func.functionalize(alone.fn))
        self._all = Traced(mapped, (None,) * len(alone.record_axis), alone.mode, by_shape=True)
        self._works: bool | None = None  # not known before the first call
        self._last: dict[Any, list[tuple[list[Tensor], Tensor]]] = {}  # by shapes: tensors and their stack

    def __call__(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        """The result of each call, in their order."""
        if self._works:
            return self._mapped(calls)
        expected = [self.alone.alone(*args) for args in calls]
        if self._works is None:
            self._works = self._as(expected, calls)
        return expected

    def _as(self, expected: list[Any], calls: list[tuple[Any, ...]]) -> bool:
        """Whether the mapped function says the same."""
        try:
            works = agree(flatten(self._mapped(calls)), flatten(expected))
        except Exception:  # a program that branches on values, say
            _log.debug("mapping failed", exc_info=True)
            works = False
        if not works:
            _log.warning("%s cannot be mapped over silos; they run one by one", self.alone.name)
        return works

    def _mapped(self, calls: list[tuple[Any, ...]]) -> list[Any]:
        leaves = [flatten(args) for args in calls]
        supply = iter(self._stacked(leaves))
        found = self._all(*(structure(arg)(supply) for arg in calls[0]))
        out, build = flatten(found), structure(found)
        return [build(iter([t[k] for t in out])) for k in range(len(calls))]

    def _stacked(self, leaves: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """Tensors of all calls side by side. Those of data are the same objects in every round: stacked once."""
        shapes = tuple(t.shape for t in leaves[0])
        before = self._last.get(shapes, [])
        kept = []
        for position, tensors in enumerate(map(list, zip(*leaves, strict=True))):
            old = before[position] if before else ([], tensors[0])
            same = len(old[0]) == len(tensors) and all(a is b for a, b in zip(old[0], tensors, strict=True))
            kept.append(old if same else (tensors, torch.stack(tensors)))
        self._last[shapes] = kept
        return [stack for _, stack in kept]
