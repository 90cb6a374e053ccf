"""`secure-fvi compare`: a finished run beside a centralised fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import click

from secure_fvi.errors import InputError


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--chains", type=click.IntRange(2), default=2, show_default=True, help="Chains of NUTS.")
@click.option("--draws", type=click.IntRange(100), default=1000, show_default=True, help="Draws of each chain.")
@click.option("--data", type=click.Path(path_type=Path), envvar="SECURE_FVI_DATA", help="Folder of data sets.")
@click.option("--table", "tables", metavar="SILO=FILE", multiple=True, help="Of a run between sites: a site's table.")
@click.option("--picture", type=click.Path(path_type=Path), help="Write the marginals to this .png or .svg as well.")
@click.option("--exact", is_flag=True, help="Of a private run too: compare.json then has what no noise protects.")
def compare(
    directory: Path,
    chains: int,
    draws: int,
    data: Path | None,
    tables: tuple[str, ...],
    picture: Path | None,
    exact: bool,
) -> None:
    """Pool the data of the finished run in DIR, fit the same model centrally, and set the two side by side.

    For data that may be pooled: simulations, published data, a rehearsal. Writes compare.json beside the run's files,
    of which none is changed. A picture of a private run goes on without the reference.
    """
    from secure_fvi.runs.directory import RunDirectory

    RunDirectory(directory).read_result()
    if unnamed := [text for text in tables if not all(text.partition("="))]:
        raise InputError(f"--table '{unnamed[0]}': must look like SILO=FILE")
    files = {silo: Path(file) for silo, _, file in (text.partition("=") for text in tables)}
    if picture is not None and (picture.suffix not in (".png", ".svg") or not picture.parent.is_dir()):
        raise InputError(f"--picture '{picture}': must be a .png or .svg file in a folder that exists")

    from rich.console import Console

    from secure_fvi_lab.references import compare as run_reference

    console = Console(stderr=True)
    with console.status("pooling the silos' data in this process") as status:
        content = run_reference(
            directory,
            data,
            chains,
            draws,
            lambda text: status.update(f"pooled data: {text}"),
            exact,
            files,
        )
    if picture is not None:
        from secure_fvi.plots import marginal_panels
        from secure_fvi.runs.directory import read_json

        reference = content["marginals"] if RunDirectory(directory).read_config().privacy is None else None
        figure = marginal_panels(read_json(directory / "marginals.json"), reference, "NUTS on the pooled data")
        figure.savefig(picture, dpi=150)
    click.echo("The reference pooled the data of all silos in this process.")
    _print(content)


class ComparisonRow(NamedTuple):
    label: str
    mean: float  # of the reference
    sd: float
    run_mean: float
    run_sd: float
    error: float  # (run_mean - mean) / sd
    ratio: float  # run_sd / sd


def comparison_rows(comparison: dict[str, Any]) -> list[ComparisonRow]:
    """One row for each parameter of a formula, or each element of each compared site, of compare.json."""
    import numpy as np

    from secure_fvi.runs.marginals import shape_of
    from secure_fvi.summary import labels

    keys = ("mean", "sd", "run_mean", "run_sd", "mean_error_in_sd", "sd_ratio")
    rows = []
    for site, values in comparison.get("parameters", comparison["sites"]).items():
        names, numbers = labels(site, shape_of(values["mean"])), (np.ravel(values[key]).tolist() for key in keys)
        rows += [ComparisonRow(*row) for row in zip(names, *numbers, strict=True)]
    return rows


def _print(comparison: dict[str, Any]) -> None:
    from rich.table import Table

    from secure_fvi.cli.tables import MOST_ROWS, plain_console, say_left_out
    from secure_fvi.summary import shown

    known = f"smallest effective sample size {comparison['ess']:.0f}, R-hat {comparison['r_hat']:.3f}"
    console = plain_console()
    console.print(f"the run beside NUTS on the pooled data ({known})", highlight=False, soft_wrap=True)
    table = Table()
    rows = comparison_rows(comparison)
    table.add_column("site", overflow="fold", min_width=min(24, max(len(row.label) for row in rows)))
    for heading in ("NUTS\nmean", "NUTS\nsd", "run\nmean", "run\nsd", "error\n/ sd", "sd\nratio"):
        table.add_column(heading, justify="right")
    for row in rows[:MOST_ROWS]:
        table.add_row(
            row.label,
            shown(row.mean, row.sd),
            shown(row.sd, row.sd),
            shown(row.run_mean, row.sd),
            shown(row.run_sd, row.sd),
            f"{row.error:+.3f}",
            f"{row.ratio:.3f}",
        )
    console.print(table)
    say_left_out(console, len(rows), "compare.json")
