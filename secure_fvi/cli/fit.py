"""`secure-fvi fit`: a formula, the sites' tables and their dictionary, to a table of estimates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from secure_fvi.errors import InputError

if TYPE_CHECKING:
    from secure_fvi.runs.config import Aggregation, Model

#: Algorithms that check a fit against its tables, and by how many replicates.
_CHECKED, _REPLICATES = ("pvi", "sfvi", "sfvi-avg"), 200
_QUERY = "One SELECT over a site's table, which it calls data: one for all sites, or one for each --data."


@click.command()
@click.argument("formula")
@click.argument("more", nargs=-1, metavar="")
@click.option("--family", default="gaussian", show_default=True, help="gaussian, bernoulli, poisson, ordinal, ...")
@click.option("--data", "files", required=True, multiple=True, type=click.Path(path_type=Path), help="A site's table.")
@click.option("--dictionary", required=True, type=click.Path(path_type=Path), help="What the columns are (TOML).")
@click.option("--query", "queries", multiple=True, metavar="SQL", help=_QUERY)
@click.option("--shared", multiple=True, metavar="COLUMN", help="Its groups span sites.")
@click.option("--local", multiple=True, metavar="COLUMN", help="Its groups are others at each site.")
@click.option("--missing", type=click.Choice(["refuse", "drop"]), help="Of rows with a gap; refused unless said.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="A key of a run's file, such as seed=7.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the results, if they are to be kept.")
@click.option("--priors", is_flag=True, help="Print priors, and where groups live, below the table.")
@click.option("--quiet", is_flag=True, help="No progress.")
def fit(
    more: tuple[str, ...],
    files: tuple[Path, ...],
    queries: tuple[str, ...],
    overrides: tuple[str, ...],
    out: Path | None,
    priors: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Fit FORMULA, as in lme4 and brms, to one table a site; all parties run in this process.

    Columns are coded from the dictionary, never from data. Prints estimates in the units of the tables. Exits 4 where
    the run ended without converging.
    """
    from secure_fvi.dictionary import read_dictionary
    from secure_fvi.runs.config import parse
    from secure_fvi.runs.reading import override

    if more:
        cure = "the formula is one argument, in quotes, and each table stands behind a --data of its own"
        raise InputError(f"'{more[0]}' belongs to no option: {cure}")
    numbered = [f"site-{k + 1}" for k in range(len(files))]
    named = ([f.stem for f in files], [f.absolute().parent.name for f in files], numbered)
    ids = next(names for names in named if len(set(names)) == len(names))
    model: dict[str, Any] = {name: str(given.pop(name)) for name in ("formula", "family")}
    model["dictionary"] = read_dictionary(given.pop("dictionary")).to_table()  # once: a pipe is empty after it
    said = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items() if value}
    if len(queries) not in (0, 1, len(files)):
        raise InputError(f"--query: {len(queries)} for {len(files)} tables; give one for all, or one for each --data")
    each = [{"query": query} for query in queries] * (len(files) // max(1, len(queries))) or [{}] * len(files)
    silos = [{"id": name, "data": str(path), **more} for name, path, more in zip(ids, files, each, strict=True)]
    table: dict[str, Any] = {"model": {**model, "options": said}, "silo": silos}
    for text in overrides:
        override(table, text)
    algorithm = table.setdefault("algorithm", {})
    checked = isinstance(algorithm, dict) and algorithm.get("name", "pvi") in _CHECKED
    # After a fixed number of iterations no final sum says where to look.
    if checked and "privacy" not in table and "iterations" not in algorithm:
        algorithm.setdefault("replicates", _REPLICATES)
    config = parse(table, "fit")
    _check_response(config.model)
    _check_cohort(len(files), config.aggregation)

    from secure_fvi.runs.directory import RunDirectory

    folder = RunDirectory(out) if out is not None else None
    if folder is not None:
        folder.check_new()

    from secure_fvi.cli.tables import exit_code, print_result
    from secure_fvi.progress import RunProgress
    from secure_fvi.results import Result
    from secure_fvi.runs.federation import Federation, federate
    from secure_fvi.runs.running import execute_federation

    federation = federate(config)
    assert isinstance(federation, Federation)
    with RunProgress(quiet) as progress:
        if folder is not None:
            result = execute_federation(federation, folder, on_round=progress.update)
        else:
            settings = federation.config.run
            result = federation.fit(
                seed=federation.config.seed, device=settings.device, dtype=federation.dtype,
                compile=settings.compile, threads=federation.threads, on_round=progress.update,
            )  # fmt: skip
    assert isinstance(result, Result)
    print_result(result, priors)
    if out is not None:
        click.echo(f"report: {out / 'report.html'}")
    click.get_current_context().exit(exit_code(result.to_json()))


def _check_cohort(sites: int, aggregation: Aggregation) -> None:
    """Raises InputError for fewer tables than a sum needs, with what to type."""
    least = aggregation.options.get("min_cohort", 3)
    if aggregation.kind == "plain" or not isinstance(least, int) or sites >= min(least, 3):
        return
    pooled = "where the tables may be pooled anyway, --set aggregation.kind=plain takes sums that hide nothing"
    if sites == 1:
        raise InputError(f"one table: a sum of one hides nothing. Give one --data a site; {pooled}")
    raise InputError(
        "two tables, and a sum needs three silos: of two, each learns the other's part by taking off its own. Where "
        f"both may know that, add --set aggregation.min_cohort=2; {pooled}"
    )


def _check_response(model: Model) -> None:
    """Raises InputError where the family does not fit the response: at once, before PyTorch is there."""
    from secure_fvi.dictionary import dictionary_of
    from secure_fvi.formula import family_named, parse, response_of

    if model.formula is not None and isinstance(model.dictionary, dict):
        family, dictionary = family_named(model.family or "gaussian"), dictionary_of(model.dictionary, "dictionary")
        response_of(parse(model.formula), family, dictionary)
