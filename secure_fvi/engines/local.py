"""All parties in one process: every message is still made, carried and checked as bytes."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from greenlet import greenlet
from torch import Tensor

from secure_fvi.compiled import Traced, agree, flatten, structure
from secure_fvi.engines.transport import Transport
from secure_fvi.silo import Silo

_log = logging.getLogger(__name__)


class LocalEngine(Transport):
    """Delivers the server's messages to the silos' `handle`: in turn, or computing together (`run_together`)."""

    def __init__(self, silos: Mapping[str, Silo], batched: bool = False) -> None:
        super().__init__(list(silos))
        self.silos, self.batched = silos, batched

    def _deliver(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        work = {silo: partial(self.silos[silo].handle, message) for silo, message in messages.items()}
        return run_together(work) if self.batched else {silo: handle() for silo, handle in work.items()}


# ---- Silos of one process, computing together: the same step of many small silos runs as one ----
#
# Each silo's code runs unchanged, in a greenlet of its own. Where it calls a traced function it waits; once every silo
# waits or is done, calls of one function on equal shapes are stacked, run as one call mapped over silos, and handed
# back. Silos of other shapes run one by one. The numbers are those of single calls, up to the order of float sums.

T = TypeVar("T")
Args = tuple[Any, ...]


class _Wait(NamedTuple):
    fn: Traced
    args: Args


class _Task(greenlet):
    """One silo's work."""

    def wait_for(self, fn: Traced, *args: Any) -> Any:
        """What `fn` gives, once all silos wait or are done."""
        return cast(greenlet, self.parent).switch(_Wait(fn, args))


def run_together(work: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """What each silo's function returns.

    The first that raises ends all, as in a loop: who is not done by then does not go on.
    """
    done: dict[str, T] = {}
    tasks = {name: _Task(fn) for name, fn in work.items()}
    waits: dict[str, _Wait] = {}

    def go_on(name: str, *answer: Any) -> None:
        said = tasks[name].switch(*answer)
        if tasks[name].dead:
            done[name] = said
        else:
            waits[name] = said

    for name in work:
        go_on(name)
    while waits:
        asked, waits = waits, {}
        groups: defaultdict[Hashable, list[str]] = defaultdict(list)
        for name, wait in asked.items():
            groups[id(wait.fn), wait.fn.shapes(wait.args)].append(name)
        for names in groups.values():
            fn, calls = asked[names[0]].fn, [asked[name].args for name in names]
            answers = _together(fn, calls) if len(calls) > 1 else [fn.alone(*calls[0])]
            for name, answer in zip(names, answers, strict=True):
                go_on(name, answer)
    return {name: done[name] for name in work}


def _together(fn: Traced, calls: list[Args]) -> list[Any]:
    """Several silos' calls of equal shapes, as one."""
    if fn.mapped is None:
        fn.mapped = Mapped(fn)
    return fn.mapped(calls)


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
