"""`secure-fvi keys authority`: the offline certificate authority of a consortium."""

from __future__ import annotations

from pathlib import Path

import click

from secure_fvi.cli.keys_shared import code_option, confirm, passphrase, unsealed_option

FILE = click.Path(path_type=Path)


@click.group()
def authority() -> None:
    """Issue and revoke TLS certificates, on a machine that is kept offline."""


@authority.command()
@click.argument("folder", type=FILE)
@click.option("--consortium", required=True, help="Its name: letters, digits, dots, dashes.")
@click.option("--ask-passphrase", is_flag=True, help="Ask for a passphrase instead of taking SECURE_FVI_PASSPHRASE.")
@unsealed_option
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def create(folder: Path, consortium: str, ask_passphrase: bool, unsealed: bool, debug: bool) -> None:
    """Make an authority in FOLDER. Its key is encrypted, as those of `keys init` are."""
    from secure_fvi.deployment.authority import Authority, authority_hash
    from secure_fvi.deployment.names import now

    secret = passphrase(None, ask_passphrase, new=not unsealed)
    made = Authority.create(folder, consortium, now(), secret, unsealed)
    click.echo(f"authority of '{consortium}', SHA-256 {authority_hash(made.certificate).hex()}")
    click.echo(f"send to every site: {folder / 'ca.crt'} {folder / 'ca.crl'}")


@authority.command()
@click.argument("folder", type=FILE)
@click.argument("request", type=FILE)
@click.option("--out", required=True, type=FILE, help="The certificate to write.")
@click.option("--days", type=int, default=365, show_default=True, help="How long it is valid.")
@code_option
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def issue(folder: Path, request: Path, out: Path, days: int, yes_code: str | None, debug: bool) -> None:
    """Issue the certificate that REQUEST asks for, once its site has read the same code."""
    from secure_fvi.deployment.authority import Authority
    from secure_fvi.deployment.names import now, read_bytes, write_bytes
    from secure_fvi.deployment.requests import read_request

    asked = read_request(read_bytes(request, "the request"), f"'{request}'")
    opened = Authority(folder, passphrase(folder / "ca.key"))
    click.echo(f"{asked.role} '{asked.id}' of '{opened.consortium}'" + "".join(f", {a}" for a in asked.addresses))
    confirm(asked.code, yes_code, f"Has '{asked.id}' read this code to you?")
    write_bytes(out, opened.issue(asked, now(), days))
    click.echo(f"send to '{asked.id}': {out}")


@authority.command()
@click.argument("folder", type=FILE)
@click.option("--id", "name", required=True, help="Whose certificates.")
@click.option("--serial", help="Only this one, as `list` shows it.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def revoke(folder: Path, name: str, serial: str | None, debug: bool) -> None:
    """Revoke a member's certificates and make a new list of revoked ones."""
    from secure_fvi.deployment.authority import Authority
    from secure_fvi.deployment.names import now

    revoked = Authority(folder, passphrase(folder / "ca.key")).revoke(name, now(), serial)
    click.echo(f"revoked {', '.join(revoked)}; send to every site at once: {folder / 'ca.crl'}")


@authority.command()
@click.argument("folder", type=FILE)
@click.option("--days", type=click.IntRange(1, 3650), default=120, show_default=True, help="How long it is in force.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def crl(folder: Path, days: int, debug: bool) -> None:
    """Make the list of revoked certificates anew, before the last one expires."""
    from secure_fvi.deployment.authority import Authority
    from secure_fvi.deployment.names import now

    Authority(folder, passphrase(folder / "ca.key")).renew_revocations(now(), days)
    click.echo(f"send to every site: {folder / 'ca.crl'}")


@authority.command("list")
@click.argument("folder", type=FILE)
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def issued(folder: Path, debug: bool) -> None:
    """Show what was issued."""
    from secure_fvi.deployment.authority import Authority

    for row in Authority(folder).issued():
        state = f"revoked {row['revoked']}" if row["revoked"] else f"until {row['not_after']}"
        click.echo(f"{row['role']:6} {row['id']:20} {state}  serial {row['serial']}")
