"""`secure-fvi run`: a configured fit, from the file to the report."""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import click

if TYPE_CHECKING:
    from rich.progress import Progress

    from secure_fvi import driving


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for the results; new or empty.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key, such as seed=7.")
@click.option("--data", type=click.Path(path_type=Path), envvar="SECURE_FVI_DATA", help="Folder of data sets.")
@click.option("--resume", is_flag=True, help="Continue the run that --out holds.")
@click.option("--quiet", is_flag=True, help="No progress, no table.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
@click.pass_context
def run(
    context: click.Context,
    config: Path,
    out: Path,
    overrides: tuple[str, ...],
    data: Path | None,
    resume: bool,
    quiet: bool,
    debug: bool,
) -> None:
    """Fit the model that CONFIG (a TOML file) describes; all parties run in this process.

    Writes result.json, posterior.safetensors, metrics.jsonl and report.html to the folder --out. Exits 4 where the run
    ended without converging; the files are written all the same.
    """
    from secure_fvi.runs.directory import RunDirectory

    folder = RunDirectory(out)
    if not resume:
        folder.check_new()

    from secure_fvi.cli.tables import exit_code, print_posterior
    from secure_fvi.runs.config import read
    from secure_fvi.runs.running import execute

    settings = read(config, overrides)
    with RunProgress(quiet) as progress:
        result = execute(settings, folder, data, resume, progress.update)
    if result is None:
        click.echo(f"the run in '{out}' is finished; its results are in {out / 'result.json'}")
        context.exit(exit_code(folder.read_result()))
    if not quiet:
        print_posterior(result.to_json())
        for party, rows in result.metrics.get("alignment", {}).items():
            left_out = rows["unmatched"] + rows["missing"] + rows["duplicated"]
            click.echo(f"{party}: {rows['matched']} rows matched, {left_out} left out")
        if settings.vertical:
            click.echo(f"each silo's own posterior, for its eyes alone: a file in {out / 'silos'}")
        click.echo(f"report: {out / 'report.html'}")
    context.exit(exit_code(result.to_json()))


# ---- How a run is going: a bar with the time left on a terminal, a plain line now and then elsewhere ----

_BAR_SECONDS = 0.1
_LINE_SECONDS = 10.0


class RunProgress:
    """Shows what `update` is told, on stderr. Nothing appears before the first round, so an error stays one line."""

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console

        self._quiet = quiet
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._began: float | None = None
        self._first_round = 0
        self._shown = 0.0
        self._objective: float | None = None

    def update(self, progress: driving.Progress) -> None:
        """Take note of a round and, a few times a second at most, show it."""
        # The objective of one round is noisy by several nats; a decaying mean shows where it goes.
        old = self._objective
        self._objective = progress.objective if old is None else old + 0.02 * (progress.objective - old)
        now = time.monotonic()
        if self._began is None:
            self._began, self._first_round = now, progress.round
        wait = _BAR_SECONDS if self._console.is_terminal else _LINE_SECONDS
        if self._quiet or (now - self._shown < wait and progress.round < progress.max_rounds):
            return
        self._shown = now
        if self._console.is_terminal:
            self._show_bar(progress)
        else:
            self._show_line(progress, now - self._began)

    def _show_bar(self, progress: driving.Progress) -> None:
        if self._bar is None:
            from rich.progress import (
                BarColumn,
                Progress,
                SpinnerColumn,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description:>9}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} rounds{task.fields[objective]}"),
                TextColumn("rate {task.fields[rate]:.2g}{task.fields[r_hat]}"),
                TimeElapsedColumn(),
                TextColumn("to the last round about"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._bar.add_task("", total=progress.max_rounds, objective="", rate=0.0, r_hat="")
        self._bar.update(
            self._bar.task_ids[0],
            description=progress.phase,
            completed=progress.round,
            objective=self._bound,
            rate=progress.learning_rate,
            r_hat=_r_hat(progress),
        )

    def _show_line(self, progress: driving.Progress, seconds: float) -> None:
        done = progress.round - self._first_round
        # An estimate: rounds to come may be slower, and a run that converges ends before its last round.
        rest = seconds / done * (progress.max_rounds - progress.round) if done else 0.0
        left = f", about {rest:.0f} s to round {progress.max_rounds} at this pace" if done else ""
        click.echo(
            f"round {progress.round}/{progress.max_rounds} ({progress.phase}){self._bound}, "
            f"rate {progress.learning_rate:.2g}{_r_hat(progress)}{left}",
            err=True,
        )

    @property
    def _bound(self) -> str:
        shown = self._objective is not None and math.isfinite(self._objective)
        return f", bound {self._objective:.2f}" if shown else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _r_hat(progress: driving.Progress) -> str:
    return "" if progress.r_hat is None else f", R-hat {progress.r_hat:.3f}"
