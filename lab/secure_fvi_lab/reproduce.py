"""`secure-fvi reproduce`: an experiment run again, with its numbers and its plot."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import click

from secure_fvi.errors import InputError
from secure_fvi_lab.experiments import REPRODUCTIONS, Request, experiment, made


@click.command(epilog=f"NAME is one of: {', '.join(REPRODUCTIONS)}.")
@click.argument("name", metavar="NAME")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for NAME.json and NAME.png.")
@click.option(
    "--data", metavar="DIR", type=click.Path(path_type=Path), envvar="SECURE_FVI_DATA", help="Folder of data sets."
)
@click.option("--quick", is_flag=True, help="Fewer repeats, less exact references.")
def reproduce(name: str, out: Path, data: Path | None, quick: bool) -> None:
    """Run the experiment NAME and write its numbers and its plot.

    Stopped and called again with the same --out, it goes on where it was.
    """
    from secure_fvi.files import write_atomically
    from secure_fvi.runs.directory import check_folder
    from secure_fvi.runs.wording import nearest

    if name not in REPRODUCTIONS:
        raise InputError(f"NAME = '{name}': must be one of {', '.join(REPRODUCTIONS)}{nearest(name, REPRODUCTIONS)}")
    check_folder(out, "--out")
    keep = out / f"{name}.partial"
    content, figure = made(name, Request(quick, data, lambda text: click.echo(text, err=True), keep))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / f"{name}.png", picture.getvalue())
    write_atomically(out / f"{name}.json", json.dumps(content, indent=2).encode())
    shutil.rmtree(keep, ignore_errors=True)
    click.echo(experiment(name).table(content))
    click.echo(f"{out / name}.json, {out / name}.png")
