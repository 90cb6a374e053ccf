"""`secure-fvi budget`: plan a private job, set a site's budget, check its ledger, report what was spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

# ---- `secure-fvi budget set` and `verify`: a site's budget, and whether its ledger is what it was ----


@click.command("set")
@click.argument("ledger", type=click.Path(path_type=Path))
@click.option("--silo", required=True, help="Whose ledger.")
@click.option(
    "--data-set", required=True, help="The population that the budget protects, as the site's policy names it."
)
@click.option("--epsilon", required=True, type=float, help="What all jobs on it may spend together.")
@click.option("--delta", required=True, type=float, help="Below 1 / number of records.")
@click.option("--unit", type=click.Choice(["record", "silo"]), default="record", show_default=True, help="Protected.")
@click.option("--records", type=click.IntRange(1), help="Size of the population; warns when delta is too large for it.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def set_budget(
    ledger: Path, silo: str, data_set: str, epsilon: float, delta: float, unit: str, records: int | None, debug: bool
) -> None:
    """Set, raise or lower a data set's budget in LEDGER; what was spent stays spent.

    Makes ledger and signing key where there are none. The key (LEDGER.keys/SILO.pem) is encrypted when
    SECURE_FVI_PASSPHRASE is set.
    """
    from secure_fvi.key_files import key_path
    from secure_fvi.privacy.ledger import Budget, Ledger

    budget = Budget(data_set, epsilon, delta, unit)
    opened = Ledger.open(ledger, silo, create=True)
    try:
        opened.set_budget(budget, records)
        chain = opened.chain
    finally:
        opened.close()
    click.echo(f"silo '{silo}', data set '{data_set}': {budget}")
    click.echo(f"row {chain.length}, {chain.head.hex()}; public key {key_path(ledger, silo).with_suffix('.pub')}")


@click.command()
@click.argument("ledger", type=click.Path(path_type=Path))
@click.option("--silo", help="Check this silo's chain only.")
@click.option("--public-key", type=click.Path(path_type=Path), help="The silo's .pub file, from where you trust it.")
@click.option(
    "--receipts", multiple=True, type=click.Path(path_type=Path), help="A witness's receipt; may be repeated."
)
@click.option("--witness-key", multiple=True, type=click.Path(path_type=Path), help="Witness's .pub; may be repeated.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def verify(
    ledger: Path,
    silo: str | None,
    public_key: Path | None,
    receipts: tuple[Path, ...],
    witness_key: tuple[Path, ...],
    debug: bool,
) -> None:
    """Check every row of LEDGER: hashes, signatures, order, budgets, counts. Exits 1 and names the first bad row.

    Rows that were cut off at the end are found with receipts of witnesses only.
    """
    from secure_fvi.errors import InputError
    from secure_fvi.key_files import load_public_key
    from secure_fvi.privacy.ledger_account import verify as check

    try:
        shown = [path.read_bytes() for path in receipts]
    except OSError as error:
        raise InputError(f"cannot read the receipt '{error.filename}': {error.strerror}") from None
    pinned = None if public_key is None else load_public_key(public_key)
    accepted = [load_public_key(path) for path in witness_key] or None
    for chain in check(ledger, silo, pinned, shown, accepted):
        click.echo(f"silo '{chain.silo}': {chain.length} rows, {len(chain.jobs)} jobs, head {chain.head.hex()}")
        click.echo(f"  key {chain.public_key.hex()}" + ("" if pinned else " (not pinned)"))
    click.echo(f"verified, against {len(shown)} {'receipt' if len(shown) == 1 else 'receipts'}")


@click.group()
def budget() -> None:
    """Privacy budgets: plan jobs, set what a site allows, verify and report what was spent."""


budget.add_command(set_budget)
budget.add_command(verify)


@budget.command()
@click.option("--epsilon", type=float, help="What the whole job may cost.")
@click.option("--delta", type=float, required=True, help="Well below 1 / number of records.")
@click.option("--sampling-rate", type=float, help="Chance that a record joins a round's batch; 1: all do.")
@click.option("--rounds", type=int, help="Releases of the job.")
@click.option("--noise-multiplier", type=float, help="Noise's standard deviation over the clipping norm.")
@click.option("--unit", type=click.Choice(["record", "silo"]), default="record", show_default=True, help="Protected.")
@click.option(
    "--accountant",
    type=click.Choice(["ledger", "rdp", "opacus-rdp", "prv", "pld"]),
    default="ledger",
    show_default=True,
    help="ledger: what a run takes and a ledger charges. The others tell what tighter accounting would say.",
)
@click.option(
    "--noise",
    type=click.Choice(["silo", "distributed", "server"]),
    help="Who adds the noise. Left out: as of a run by default, distributed.",
)
@click.option("--silos", type=int, help="Silos in a round.")
@click.option("--dropouts", type=int, default=0, show_default=True, help="Silos that a round may lose.")
@click.option("--colluders", type=int, default=1, show_default=True, help="Silos whose noise is not counted on.")
@click.option("--retries", type=int, default=20, show_default=True, help="Sums held in reserve, charged like rounds.")
@click.option("--dimension", type=int, default=1000, show_default=True, help="Numbers in a release (distributed).")
@click.option("--records", type=int, help="Size of the population; warns when delta is too large for it.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--debug", is_flag=True, expose_value=False, help="Show the stack trace of a failure.")
def plan(dimension: int, records: int | None, form: str, **asked: Any) -> None:
    """Solve for the one of epsilon, sampling rate, rounds and noise multiplier that is left out.

    The answer is on the safe side: its epsilon is at most the one asked for. It is what a run of these numbers uses and
    what the ledger of a data set on which nothing was spent yet charges, retries included.
    """
    from secure_fvi.cli.budget_plan import Asked, command

    command(Asked(**asked), dimension, records, form)


@budget.command()
@click.argument("ledger", type=click.Path(path_type=Path))
@click.option("--silo", help="Whose chain, where LEDGER holds several.")
@click.option("--data-set", help="Which data set, where the silo has several.")
@click.option(
    "--format", "form", type=click.Choice(["text", "json", "html", "yaml"]), default="text", show_default=True
)
@click.option("--audit", type=click.Path(path_type=Path), help="audit.json: its bounds on epsilon beside the claims.")
@click.option("--facts", type=click.Path(path_type=Path), help="yaml: answers that the ledger cannot know, in a file.")
@click.option("--curator", multiple=True, help="yaml: who publishes the results; may be repeated.")
@click.option("--use", "intended_use", help="yaml: what the results are for.")
@click.option("--out", type=click.Path(path_type=Path), help="Write to this file.")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the stack trace of a failure.")
def report(
    ledger: Path,
    silo: str | None,
    data_set: str | None,
    form: str,
    audit: Path | None,
    facts: Path | None,
    curator: tuple[str, ...],
    intended_use: str | None,
    out: Path | None,
) -> None:
    """Say what was spent of a data set's budget in LEDGER, what is left, and what that does not cover.

    yaml: the fields of the Differential Privacy Deployments Registry, tiers 1 to 3.
    """
    from secure_fvi.cli.budget_report import command

    command(ledger, silo, data_set, form, facts, curator, intended_use, out, audit)
