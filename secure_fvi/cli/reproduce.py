"""`secure-fvi reproduce`: an experiment of a paper, run again, with its numbers and its plot."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import click

from secure_fvi.errors import InputError


@click.command()
@click.argument("name", metavar="NAME")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for NAME.json and NAME.png.")
@click.option("--quick", is_flag=True, help="Fewer repeats, less exact references.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def reproduce(name: str, out: Path, quick: bool, debug: bool) -> None:
    """Run the experiment NAME and write its numbers and its plot. NAME: sfvi-six-cities."""
    from secure_fvi.reproductions import REPRODUCTIONS
    from secure_fvi.runs.checkpoint import write_atomically
    from secure_fvi.runs.wording import nearest

    if name not in REPRODUCTIONS:
        raise InputError(f"NAME = '{name}': must be one of {', '.join(REPRODUCTIONS)}{nearest(name, REPRODUCTIONS)}")
    if out.exists() and not out.is_dir():
        raise InputError(f"--out '{out}': must be a folder, and is a file")
    module, function = REPRODUCTIONS[name].split(":")
    content, picture = getattr(importlib.import_module(module), function)(quick, lambda t: click.echo(t, err=True))
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / f"{name}.png", picture)
    write_atomically(out / f"{name}.json", json.dumps(content, indent=2).encode())
    click.echo(_table(content))
    click.echo(f"{out / name}.json, {out / name}.png")


def _table(content: dict[str, Any]) -> str:
    """The rows, narrow enough for a terminal, and the summary."""
    lines = [f"{'algorithm':<28}{'split':>6}{'error':>8}{'rounds':>8}{'exchanges':>11}{'bytes a silo':>14}{'s':>7}"]
    for row in content["rows"]:
        size = row["bytes_up_per_silo"] + row["bytes_down_per_silo"]
        lines.append(
            f"{row['algorithm']:<28}{row['split']:>6}{row['error']:>8.2f}{row['rounds']:>8}{row['exchanges']:>11}"
            f"{size:>14,}{row['seconds']:>7.0f}"
        )
    ours = content["ours"]
    lines.append(f"median {ours['median']:.2f}, largest {ours['largest']:.2f}; {content['setting']}")
    return "\n".join(lines)
