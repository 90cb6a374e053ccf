"""`secure-fvi budget set` and `verify`: a site's budget, and whether its ledger is what it was."""

from __future__ import annotations

from pathlib import Path

import click


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
    from secure_fvi.privacy.ledger import Budget, Ledger
    from secure_fvi.privacy.ledger_keys import key_path

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
    from secure_fvi.privacy.ledger_keys import load_public_key
    from secure_fvi.privacy.ledger_verify import verify as check

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
