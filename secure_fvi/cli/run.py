"""`secure-fvi run`: a configured fit, from the file to the report."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for the results; new or empty.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key, such as seed=7.")
@click.option("--data", type=click.Path(path_type=Path), envvar="SECURE_FVI_DATA", help="Folder of data sets.")
@click.option("--resume", is_flag=True, help="Continue the run that --out holds.")
@click.option("--quiet", is_flag=True, help="No progress, no table.")
@click.pass_context
def run(
    context: click.Context,
    config: Path,
    out: Path,
    overrides: tuple[str, ...],
    data: Path | None,
    resume: bool,
    quiet: bool,
) -> None:
    """Fit the model that CONFIG (a TOML file) describes; all parties run in this process.

    Writes result.json, posterior.safetensors, metrics.jsonl and report.html to the folder --out. Exits 4 where the run
    ended without converging; the files are written all the same.
    """
    from secure_fvi.runs.directory import RunDirectory

    folder = RunDirectory(out)
    if not resume:
        folder.check_new()

    from secure_fvi.cli.tables import exit_code, print_result
    from secure_fvi.progress import RunProgress
    from secure_fvi.runs.config import read
    from secure_fvi.runs.running import execute

    settings = read(config, overrides)
    with RunProgress(quiet) as progress:
        result = execute(settings, folder, data, resume, progress.update)
    if result is None:
        click.echo(f"the run in '{out}' is finished; its results are in {out / 'result.json'}")
        context.exit(exit_code(folder.read_result()))
    if not quiet:
        print_result(result)
        for party, rows in result.metrics.get("alignment", {}).items():
            left_out = sum(rows.values()) - rows["matched"]
            click.echo(f"{party}: {rows['matched']} rows matched, {left_out} left out")
        if settings.vertical:
            click.echo(f"each silo's own posterior, for its eyes alone: a file in {out / 'silos'}")
        click.echo(f"report: {out / 'report.html'}")
    context.exit(exit_code(result.to_json()))
