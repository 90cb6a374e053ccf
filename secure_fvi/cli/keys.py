"""`secure-fvi keys`: a site's own keys, and the files that make a consortium of several sites."""

from __future__ import annotations

from pathlib import Path

import click

from secure_fvi.cli.keys_roster import roster
from secure_fvi.cli.keys_shared import home_option, install_files, open_home, passphrase, unsealed_option

FILE = click.Path(path_type=Path)


@click.group()
def keys() -> None:
    """Identities, certificates and the roster of a consortium. docs/provisioning.md walks through it."""


keys.add_command(roster)


@keys.command()
@click.option("--id", "name", required=True, help="The site's name in the consortium: letters, digits, dots, dashes.")
@click.option("--role", type=click.Choice(["silo", "server", "holder"]), required=True)
@home_option
@click.option("--address", "addresses", multiple=True, help="A server's host name or IP address; may be repeated.")
@click.option("--ask-passphrase", is_flag=True, help="Ask for a passphrase instead of taking SECURE_FVI_PASSPHRASE.")
@unsealed_option
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def init(
    name: str, role: str, home: Path, addresses: tuple[str, ...], ask_passphrase: bool, unsealed: bool, debug: bool
) -> None:
    """Make this site's keys and its request to join, in a new folder. Private keys never leave it.

    Keys are encrypted: with SECURE_FVI_PASSPHRASE, what the file SECURE_FVI_KEY_FILE holds, or what is typed.
    """
    from secure_fvi.deployment.home import Home
    from secure_fvi.deployment.keeping import request_text
    from secure_fvi.deployment.names import ROLES, write_bytes
    from secure_fvi.deployment.policy import write_template

    secret = passphrase(None, ask_passphrase, new=not unsealed)
    made = Home.create(home, name, next(r for r in ROLES if r == role), addresses, secret, unsealed)
    if role != "server":
        write_template(made.policy_file)
    path = home / f"{name}.request.toml"
    write_bytes(path, request_text(made).encode())
    click.echo(f"{made.role} '{made.id}' in {home}")
    click.echo(f"send to whoever writes the roster: {path}")
    if role != "server":
        click.echo(f"policy, which allows nothing yet: {made.policy_file}")


@keys.command()
@click.argument("files", nargs=-1, required=True, type=FILE)
@home_option
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def install(files: tuple[Path, ...], home: Path, debug: bool) -> None:
    """Put FILES that came from others into this site's folder: a roster, signatures, successions. Each is checked."""
    install_files(open_home(home), files)


@keys.command()
@home_option
@click.option("--ask-passphrase", is_flag=True, help="Ask for a passphrase instead of taking SECURE_FVI_PASSPHRASE.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def seal(home: Path, ask_passphrase: bool, debug: bool) -> None:
    """Encrypt the private keys of a site that lie in its folder unsealed. End its processes first."""
    from secure_fvi.deployment.home import Home

    done = Home(home, passphrase(None, ask_passphrase, new=True)).seal()
    for path in done:
        click.echo(f"sealed {path}")
    if not done:
        click.echo("all keys were sealed before")


@keys.command("authority", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1)
def _authority(words: tuple[str, ...]) -> None:
    _gone()


@keys.command("code", hidden=True)
@click.argument("words", nargs=-1)
def _code(words: tuple[str, ...]) -> None:
    _gone()


def _gone() -> None:
    from secure_fvi.errors import InputError

    raise InputError(
        "there is no authority any more, and no request to compare: each site's certificate stands in the roster, "
        "whose code all compare before they sign it; a key is taken back by the next roster (docs/provisioning.md)"
    )


@keys.command()
@click.argument("what", type=click.Choice(["tls", "identity"]))
@home_option
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def rotate(what: str, home: Path, debug: bool) -> None:
    """Make the next TLS key or identity. The present one serves until a roster names the next."""
    from secure_fvi.deployment.keeping import rotate_identity, rotate_tls
    from secure_fvi.deployment.names import now, write_bytes

    opened = open_home(home)
    path = home / f"{opened.id}.request.toml"
    if what == "tls":
        text = rotate_tls(opened)
    else:
        text, succession = rotate_identity(opened, now())
        notice = home / f"{opened.id}.succession.toml"
        write_bytes(notice, succession)
        click.echo(f"for the next roster (keys roster make --succession): {notice}")
    write_bytes(path, text.encode())
    click.echo(f"for the next roster (keys roster make --previous): {path}")


@keys.command()
@home_option
@click.option("--days", type=click.IntRange(0), default=30, show_default=True, help="Warn this long before.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
@click.pass_context
def check(context: click.Context, home: Path, days: int, debug: bool) -> None:
    """Say what expires, and whether everything at this site fits together. Exits 1 where something needs doing."""
    import datetime

    from secure_fvi.deployment.keeping import expiring
    from secure_fvi.deployment.names import now

    needed = False
    for soon, line in expiring(open_home(home), now(), datetime.timedelta(days=days)):
        needed |= soon
        click.echo(("! " if soon else "  ") + line)
    if needed:
        context.exit(1)
