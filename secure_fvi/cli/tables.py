"""Tables on stdout: the posterior of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from secure_fvi.errors import NOT_CONVERGED
from secure_fvi.federated_model import FederatedModel
from secure_fvi.runs.marginals import is_point, posterior_rows, reason, standing
from secure_fvi.summary import counts_noise, plain, shown

if TYPE_CHECKING:
    from secure_fvi.results import RunSummary

#: Rows of a table; those of a network's weights would fill screens.
MOST_ROWS = 60


def exit_code(result: dict[str, Any]) -> int:
    """What a command exits with after the run of result.json: 0, or 4 where it ended without converging."""
    return NOT_CONVERGED if result["converged"] is False else 0


def plain_console() -> Console:
    """Names of sites are what somebody wrote: no markup."""
    return Console(markup=False, emoji=False)


def print_posterior(result: dict[str, Any]) -> None:
    state = standing(result)
    title = f"{result['algorithm']}, {result['aggregation']['kind']} sums: {result['rounds']} rounds, {state}"
    console = plain_console()
    console.print(f"{title}, {result['seconds']:.0f} s", highlight=False)
    if why := reason(result):
        console.print(f"{state}: {why}", highlight=False, soft_wrap=True)
    rows = posterior_rows(result)
    point = is_point(rows)
    if said := counts_noise(result.get("privacy"), point):
        console.print(said, highlight=False, soft_wrap=True)
    noisy = any(row.noise is not None for row in rows)
    table = Table()
    table.add_column("site")
    columns = ["mean"] if point else ["mean", "sd"] + ["of it noise"] * noisy
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows[:MOST_ROWS]:
        numbers = (row.mean, row.sd, row.noise)[: len(columns)]
        table.add_row(plain(row.label), *(shown(value, row.sd) for value in numbers))
    console.print(table)
    say_left_out(console, len(rows), "result.json")


def print_result(result: RunSummary, priors: bool = False) -> None:
    """A run's posterior: of a formula in the user's units, with its `priors` where asked for, of any other model by
    site."""
    model = getattr(getattr(result, "problem", None), "model", None)
    if isinstance(model, FederatedModel) and hasattr(model, "summary") and hasattr(model, "describe"):
        click.echo("\n".join([str(model.summary(result)), *(["", *model.describe()] if priors else [])]))
        if hasattr(model, "checked") and (check := model.checked(result)) is not None:
            click.echo(f"\n{check}")
    else:
        print_posterior(result.to_json())


def say_left_out(console: Console, rows: int, file: str) -> None:
    if rows > MOST_ROWS:
        console.print(f"and {rows - MOST_ROWS} more, in {file}", highlight=False)
