"""`secure-fvi audit`: attacks on a configuration's model under several protections, as a table and a page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from secure_fvi.runs.federation import Federation

_LINE_SECONDS = 10.0


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--attack", "attacks", multiple=True, metavar="NAME", help="An attack; may be given several times.")
@click.option("--all", "everything", is_flag=True, help="All attacks under all protections.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for audit.json and audit.html.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the configuration.")
@click.option("--data", type=click.Path(path_type=Path), envvar="SECURE_FVI_DATA", help="Folder of data sets.")
@click.option("--epsilon", "epsilons", multiple=True, type=float, help="DP to audit as well (1 and 8 with --all).")
@click.option("--delta", default=1e-5, show_default=True, help="Of the DP that is audited.")
@click.option("--rounds", default=12, show_default=True, help="Rounds of each world.")
@click.option("--worlds", default=50, show_default=True, help="Runs that regressions learn from and are tested on.")
@click.option("--trials", default=100, show_default=True, help="Runs of the game; half of them are guessed at.")
@click.option("--real-data", is_flag=True, help="The data are real, and the institutions agree to an audit of them.")
@click.option("--quiet", is_flag=True, help="No progress, no table.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def audit(
    source: Path, attacks: tuple[str, ...], everything: bool, out: Path, overrides: tuple[str, ...], data: Path | None,
    epsilons: tuple[float, ...], delta: float, rounds: int, worlds: int, trials: int, real_data: bool, quiet: bool,
    debug: bool,
) -> None:  # fmt: skip
    """Attack what the server sees of SOURCE, a configuration file or the folder of a run.

    The configuration's model is run many times on resampled records, under its own secure sum beside a plain one, or
    with --all under plain, masked, homomorphic and private sums. Attacks: latents, latents-network, individuals, sizes,
    game.
    """
    began = time.monotonic()
    import torch

    from secure_fvi.audits.matrix import NAMES, Matrix, Scale, protections
    from secure_fvi.audits.report import table, write
    from secure_fvi.errors import InputError

    chosen = [n for n in NAMES if n != "sizes"] if everything and not attacks else list(dict.fromkeys(attacks))
    if not chosen:
        raise InputError(f"no attack is named: give --attack NAME ({', '.join(NAMES)}) or --all")
    for name in chosen:
        if name not in NAMES:
            raise InputError(f"attack '{name}' is unknown; choose {', '.join(NAMES)}")
    if rounds < 1 or worlds < 10 or trials < 20:
        raise InputError("an audit needs --rounds of at least 1, --worlds of at least 10 and --trials of at least 20")
    federation = _federation(source, overrides, data)
    simulated = federation.config.model.program is not None  # shipped programs read published data
    if not simulated and not real_data:
        raise InputError(
            f"'{source}' reads files of its own; if their institutions agree to an audit of them, say --real-data"
        )
    torch.set_num_threads(1)
    levels = epsilons or ((1.0, 8.0) if everything else ())
    found = protections(levels, delta)
    if not everything:
        named = {federation.aggregation.kind} | ({"plain"} if "sizes" in chosen else set())
        found = [p for p in found if p.name in named or p.privacy is not None]
    progress = _Progress(quiet)
    matrix = Matrix(
        federation.model, federation.algorithm, federation.silos, simulated=simulated, real_data=real_data,
        scale=Scale(rounds, worlds, trials=trials), told=progress.told,
    )  # fmt: skip
    progress.start(matrix.work(chosen, found))
    rows = [row for name in chosen for protection in found for row in matrix.rows(name, protection)]
    seconds = time.monotonic() - began
    about = {
        "model": federation.description,
        "algorithm": federation.algorithm.name,
        "silos": ", ".join(str(n) for n in matrix.sizes) + " records",
        "worlds": f"{worlds} of {rounds} rounds, {trials} games",
        "data": "published or made" if simulated else "real, resampled",
        "seconds": round(seconds, 1),
    }
    write(rows, about, out)
    if not quiet:
        click.echo(table(rows))
        click.echo(f"report: {out / 'audit.html'} ({seconds:.0f} s)")


def _federation(source: Path, overrides: tuple[str, ...], data: Path | None) -> Federation:
    from secure_fvi.errors import InputError
    from secure_fvi.runs.config import read
    from secure_fvi.runs.directory import RunDirectory
    from secure_fvi.runs.federation import Federation, federate

    if source.is_dir():
        if overrides:
            raise InputError("--set is for configuration files; a run is audited as it was")
        found = federate(RunDirectory(source).read_config(), data)
    else:
        found = federate(read(source, overrides), data)
    if not isinstance(found, Federation):
        raise InputError("this audit is for records partitioned over silos; vertical runs have attacks of their own")
    return found


class _Progress:
    """A line on stderr every few seconds, with the time left if worlds go on taking as long as so far."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._total, self._done = quiet, 0, 0
        self._began = self._shown = time.monotonic()
        if not quiet:
            click.echo("a fit to begin the worlds at", err=True)

    def start(self, total: int) -> None:
        self._total, self._began = total, time.monotonic()

    def told(self, what: str) -> None:
        self._done += 1
        now = time.monotonic()
        if self._quiet or now - self._shown < _LINE_SECONDS:
            return
        self._shown = now
        left = (now - self._began) / self._done * max(self._total - self._done, 0)
        click.echo(f"{self._done}/{self._total} worlds, about {left:.0f} s left, {what}", err=True)
