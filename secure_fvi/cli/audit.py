"""`secure-fvi audit`: attacks on a configuration's model under several protections, as a table and a page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

_LINE_SECONDS = 10.0


def _count(name: str, default: int, least: int, about: str) -> Callable[..., Any]:
    return click.option(name, default=default, type=click.IntRange(least), show_default=True, help=about)


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--attack", "attacks", multiple=True, metavar="NAME", help="An attack; may be given several times.")
@click.option("--all", "everything", is_flag=True, help="All attacks that fit, under all protections.")
@click.option("--list", "listed", is_flag=True, help="Tell the attacks, and which of them fit; run nothing.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for audit.json and audit.html.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the configuration.")
@click.option("--data", type=click.Path(path_type=Path), envvar="SECURE_FVI_DATA", help="Folder of data sets.")
@click.option("--epsilon", "epsilons", multiple=True, type=float, help="DP to audit as well (1 and 8 with --all).")
@click.option("--delta", default=1e-5, show_default=True, help="Of the DP that is audited.")
@click.option("--rounds", type=click.IntRange(1), help="Rounds of each world  [12; 60 in vertical runs]")
@_count("--worlds", 50, 10, "Runs that regressions learn from and are tested on.")
@_count("--individuals", 50, 10, "Silos of one record in each of two worlds.")
@_count("--trials", 100, 20, "Runs of the game; half of them are guessed at.")
@_count("--canary-runs", 200, 20, "Runs with one canary, at most, for the empirical epsilon.")
@_count("--canary-rounds", 3, 1, "Rounds of each; a fault that begins later is missed.")
@click.option("--unit", type=click.Choice(["record", "silo"]), help="Of canaries  [record where a run takes it]")
@click.option("--argument", help="Of the model, whose mean over a silo is a property to infer.")
@click.option("--attribute", metavar="NAME[:COLUMN[:COMPLEMENT]]", help="Of a record, to infer: a yes or no.")
@_count("--workers", min(2, os.cpu_count() or 1), 1, "Processes to attack in.")
@click.option("--real-data", is_flag=True, help="The data are real, and the institutions agree to an audit of them.")
@click.option("--export", "exported", is_flag=True, help="Scores too, in the files of LeakPro and Privacy Meter.")
@click.option("--quiet", is_flag=True, help="No progress, no table.")
def audit(
    attacks: tuple[str, ...],
    everything: bool,
    listed: bool,
    out: Path | None,
    epsilons: tuple[float, ...],
    delta: float,
    workers: int,
    quiet: bool,
    **ordered: Any,
) -> None:
    """Attack what the server sees of SOURCE, a configuration file or the folder of a run.

    The configuration's model is run many times on resampled records, under its own secure sum beside a plain one, and
    with its own privacy; or with --all under plain, masked, homomorphic and private sums, as they are by default.
    --list tells the attacks.
    """
    began, exported = time.monotonic(), ordered.pop("exported")
    from secure_fvi.runs.reading import read

    if not ordered["source"].is_dir():  # before PyTorch is loaded: what is wrong with the file is said at once
        read(ordered["source"], ordered["overrides"])

    from secure_fvi import __version__
    from secure_fvi.audits.matrix import Order, attacked, check, is_simulated, own_protections, protections
    from secure_fvi.audits.report import export, table, write
    from secure_fvi.errors import InputError
    from secure_fvi.runs.directory import check_folder

    if out is not None:
        check_folder(out, "--out")
    order = Order(**{**ordered, "real_data": ordered["real_data"] or listed})
    progress = _Progress(quiet or listed)
    federation, subject = order.subject(progress.told)
    fitting = subject.fitting()
    if listed:
        for name, what in subject.known.items():
            why = "" if name in fitting else f"  [{subject.why_not(name) or 'not in --all'}]"
            click.echo(f"{name:<16} {what}{why}")
        return
    chosen = fitting if everything and not attacks else list(dict.fromkeys(attacks))
    if not chosen:
        raise InputError(f"no attack is named: give --attack NAME ({', '.join(subject.known)}) or --all")
    for name in chosen:
        check(subject, name)
    if out is None:
        raise InputError("--out is missing: a folder for audit.json and audit.html")
    own = federation.aggregation, federation.privacy
    if not epsilons and (everything or (chosen == ["epsilon"] and own[1] is None)):
        epsilons = 1.0, 8.0
    found = protections(epsilons, delta) if everything else own_protections(*own, epsilons, delta)
    progress.start(subject.work(chosen, found))
    rows = attacked(order, subject, chosen, found, workers, progress.show)
    seconds = time.monotonic() - began
    about = {
        "model": federation.description,
        "algorithm": federation.algorithm.name,
        "silos": subject.sizes,
        "attacked": ", ".join(p.name for p in found),
        "scale": subject.scale_in_words,
        "data": "published or made" if is_simulated(federation) else "real, resampled",
        "seconds": round(seconds, 1),
        "seed": federation.config.seed,
        "version": __version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    write(rows, about, out)
    count = export(rows, about, out) if exported else 0
    if not quiet:
        click.echo(table(rows))
        click.echo(f"report: {out / 'audit.html'} ({seconds:.0f} s)")
        if exported:
            click.echo(f"{count} of {len(rows)} rows tell two kinds apart: {out / 'leakpro'}, {out / 'privacy_meter'}")


class _Progress:
    """A line on stderr every few seconds, with the time left if worlds go on taking as long as so far."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._total, self._done = quiet, 0, 0
        self._began = self._shown = time.monotonic()

    def start(self, total: int) -> None:
        self._total, self._began = total, time.monotonic()
        if not self._quiet:
            click.echo(f"about {total} worlds, after a fit to begin them at", err=True)

    def told(self, what: str) -> None:
        self.show(self._done + 1, what)

    def show(self, done: int, what: str = "") -> None:
        self._done = done
        now = time.monotonic()
        if self._quiet or not done or now - self._shown < _LINE_SECONDS:
            return
        self._shown = now
        left = (now - self._began) / done * max(self._total - done, 0)
        click.echo(f"{done}/{self._total} worlds, about {left:.0f} s left{what and ', ' + what}", err=True)
