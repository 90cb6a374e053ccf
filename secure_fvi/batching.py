"""Silos of one process, computing together: the same step of many small silos runs as one.

Each silo's code runs unchanged, in a greenlet of its own. Where it calls a traced function it waits; once every silo
waits or is done, calls of one function on equal shapes are stacked, run as one call mapped over silos, and handed back.
Silos of other shapes run one by one. The numbers are those of single calls, up to the order of float sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from greenlet import getcurrent, greenlet

T = TypeVar("T")
Args = tuple[Any, ...]


class Batchable(Protocol):
    """What a silo may wait for: `compiled.Traced`."""

    def alone(self, *args: Any) -> Any:
        """One call."""

    def together(self, calls: list[Args]) -> list[Any]:
        """Several calls of equal `shapes`, as one."""

    def shapes(self, args: Args) -> Hashable:
        """Of all tensors."""


class _Wait(NamedTuple):
    fn: Batchable
    args: Args


class _Task(greenlet):
    """One silo's work."""


def waiting(fn: Batchable) -> Callable[..., Any] | None:
    """Within a silo's work of `run_together`: a function that waits until `fn` is called for all. Elsewhere None."""
    task = getcurrent()
    if not isinstance(task, _Task):
        return None
    parent = cast(greenlet, task.parent)
    return lambda *args: parent.switch(_Wait(fn, args))


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
            answers = fn.together(calls) if len(calls) > 1 else [fn.alone(*calls[0])]
            for name, answer in zip(names, answers, strict=True):
                go_on(name, answer)
    return {name: done[name] for name in work}
