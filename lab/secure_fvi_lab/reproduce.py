"""`secure-fvi reproduce`: an experiment of a paper, run again, with its numbers and its plot."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import click

from secure_fvi.errors import InputError
from secure_fvi_lab.experiments import REPRODUCTIONS, Request


@click.command(epilog=f"NAME is one of: {', '.join(REPRODUCTIONS)}.")
@click.argument("name", metavar="NAME")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for NAME.json and NAME.png.")
@click.option(
    "--data", metavar="DIR", type=click.Path(path_type=Path), envvar="SECURE_FVI_DATA", help="Folder of data sets."
)
@click.option("--quick", is_flag=True, help="Fewer repeats, less exact references.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def reproduce(name: str, out: Path, data: Path | None, quick: bool, debug: bool) -> None:
    """Run the experiment NAME and write its numbers and its plot.

    Stopped and called again with the same --out, it goes on where it was.
    """
    from secure_fvi.files import write_atomically
    from secure_fvi.runs.wording import nearest
    from secure_fvi_lab.machine import commit

    if name not in REPRODUCTIONS:
        raise InputError(f"NAME = '{name}': must be one of {', '.join(REPRODUCTIONS)}{nearest(name, REPRODUCTIONS)}")
    if out.exists() and not out.is_dir():
        raise InputError(f"--out '{out}': must be a folder, and is a file")
    experiment = importlib.import_module(REPRODUCTIONS[name])
    keep = out / f"{name}.partial"
    content, picture = experiment.reproduce(Request(quick, data, lambda text: click.echo(text, err=True), keep))
    content |= {"quick": quick, "commit": commit()}
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / f"{name}.png", picture)
    write_atomically(out / f"{name}.json", json.dumps(content, indent=2).encode())
    shutil.rmtree(keep, ignore_errors=True)
    click.echo(experiment.table(content))
    click.echo(f"{out / name}.json, {out / name}.png")
