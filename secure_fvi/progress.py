"""How a run is going: a bar with the time left on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from secure_fvi import driving

_BAR_SECONDS = 0.1
_LINE_SECONDS = 10.0


class RunProgress:
    """Shows what `update` is told, on stderr. Nothing appears before the first round, so an error stays one line.

    quiet: None, for fits from Python, shows a bar on a terminal and says nothing elsewhere.
    """

    def __init__(self, quiet: bool | None) -> None:
        self._console = Console(stderr=True)
        self._quiet = not self._console.is_terminal if quiet is None else quiet
        self._bar: Progress | None = None
        self._began: float | None = None
        self._first_round = 0
        self._shown = 0.0

    def update(self, progress: driving.Progress) -> None:
        """Take note of a round and, a few times a second at most, show it."""
        now = time.monotonic()
        if self._began is None:
            self._began, self._first_round = now, progress.round
        wait = _BAR_SECONDS if self._console.is_terminal else _LINE_SECONDS
        last = progress.round >= progress.max_rounds or progress.ending
        if self._quiet or (now - self._shown < wait and not last):
            return
        self._shown = now
        if self._console.is_terminal:
            self._show_bar(progress, now - self._began)
        else:
            self._show_line(progress, now - self._began)

    def _show_bar(self, progress: driving.Progress, seconds: float) -> None:
        if self._bar is None:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description:>9}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} rounds{task.fields[objective]}"),
                TextColumn("rate {task.fields[rate]:.2g}{task.fields[r_hat]}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
                transient=True,
            )
            try:
                self._bar.start()
            except LiveError:  # the caller's own bar is there
                self._quiet, self._bar = True, None
                return
            self._bar.add_task("", total=progress.max_rounds, objective="", rate=0.0, r_hat="", left="")
        self._bar.update(
            self._bar.task_ids[0],
            description=progress.phase,
            completed=progress.round,
            objective=_bound(progress),
            rate=progress.learning_rate,
            r_hat=_r_hat(progress),
            left=self._left(progress, seconds),
        )

    def _show_line(self, progress: driving.Progress, seconds: float) -> None:
        left = self._left(progress, seconds)
        print(
            f"round {progress.round}/{progress.max_rounds} ({progress.phase}){_bound(progress)}, "
            f"rate {progress.learning_rate:.2g}{_r_hat(progress)}{', ' * bool(left)}{left}",
            file=sys.stderr,
        )

    def _left(self, progress: driving.Progress, seconds: float) -> str:
        """How long it may take yet. Rounds to come may be slower, a run that converges ends before its last round, and
        sums after the rounds take as long as they take."""
        if progress.ending:
            said = "the rounds are done; weighing the answer by final sums"
            if progress.finals is None:
                return said
            done, most = progress.finals
            return f"{said}, {done} of at most {most} done"
        done = progress.round - self._first_round
        if not done:
            return ""
        rest = seconds / done * (progress.max_rounds - progress.round)
        after = "" if progress.ending is None else ", and the final sums after it"
        return f"about {rest:.0f} s at this pace if it takes all {progress.max_rounds} rounds{after}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _r_hat(progress: driving.Progress) -> str:
    return "" if progress.r_hat is None else f", R-hat {progress.r_hat:.3f}"


def _bound(progress: driving.Progress) -> str:
    """Of this round alone, as the silos told it: of algorithms that draw in each round noisy by several nats."""
    return f", bound {progress.objective:.2f}" if math.isfinite(progress.objective) else ""
