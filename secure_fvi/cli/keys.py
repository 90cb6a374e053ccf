"""`secure-fvi keys`: a site's own keys, and the files that make a consortium of several sites."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from secure_fvi.deployment.consortium import ConsortiumRoster
    from secure_fvi.deployment.home import Home

FILE = click.Path(path_type=Path)


home_option = click.option(
    "--home",
    type=click.Path(path_type=Path),
    envvar="SECURE_FVI_HOME",
    required=True,
    help="This site's folder, which `keys init` made; SECURE_FVI_HOME unless given.",
)
unsealed_option = click.option(
    "--unsealed", is_flag=True, help="Leave the private keys unencrypted: whoever reads the disk or a backup has them."
)
code_option = click.option("--yes-code", metavar="CODE", help="The code that was read out, instead of being asked.")


def passphrase(key: Path | None, ask: bool = False, new: bool = False) -> str | None:
    """What opens the key file, or is to encrypt a new one: asked for where a terminal is there, else the variable's."""
    from secure_fvi.key_files import is_encrypted

    if ask or (new and not _given() and sys.stdin.isatty()):
        return str(click.prompt("passphrase for the new keys", hide_input=True, confirmation_prompt=True, err=True))
    if key is None or _given() or not key.exists() or not is_encrypted(key):
        return None
    return str(click.prompt(f"passphrase of '{key}'", hide_input=True, err=True)) if sys.stdin.isatty() else None


def _given() -> bool:
    """Whether the environment has a passphrase, or names its file."""
    from secure_fvi.key_files import KEY_FILE_VARIABLE, PASSPHRASE_VARIABLE

    return bool(os.environ.get(PASSPHRASE_VARIABLE) or os.environ.get(KEY_FILE_VARIABLE))


def open_home(path: Path) -> Home:
    """The site in `path`; says so where its keys lie there unsealed."""
    from secure_fvi.deployment.home import Home

    opened = Home(path, passphrase(path / "identity.pem"))
    if (path / "identity.pem").exists() and not opened.sealed:
        click.echo(
            f"warning: the private keys in '{path}' are not encrypted; whoever reads the disk or a backup has them. "
            "Set SECURE_FVI_PASSPHRASE or SECURE_FVI_KEY_FILE and run `secure-fvi keys seal`",
            err=True,
        )
    return opened


def install_files(home: Home, files: Iterable[Path]) -> None:
    """Put what came from others into the site's folder, and say what each file was."""
    from secure_fvi.deployment.keeping import install
    from secure_fvi.deployment.names import now

    for path in files:
        click.echo(f"{path}: {install(home, path, now())}")


def confirm(code: str, given: str | None, question: str) -> None:
    """Go on only if people, or `given`, have the same code. Raises InputError otherwise."""
    from secure_fvi.deployment.names import same_code
    from secure_fvi.errors import InputError

    click.echo(f"code: {code}")
    if given is not None:
        if not same_code(given, code):
            raise InputError("--yes-code is another code: do not go on, the files are not the same")
        return
    if not click.confirm(question, err=True):
        raise InputError("the codes were not confirmed; nothing was done")


@click.group()
def keys() -> None:
    """Identities, certificates and the roster of a consortium. docs/provisioning.md walks through it."""


@keys.command()
@click.option("--id", "name", required=True, help="The site's name in the consortium: letters, digits, dots, dashes.")
@click.option("--role", type=click.Choice(["silo", "server", "holder"]), required=True)
@home_option
@click.option("--address", "addresses", multiple=True, help="A server's host name or IP address; may be repeated.")
@click.option("--ask-passphrase", is_flag=True, help="Ask for a passphrase instead of taking SECURE_FVI_PASSPHRASE.")
@unsealed_option
def init(name: str, role: str, home: Path, addresses: tuple[str, ...], ask_passphrase: bool, unsealed: bool) -> None:
    """Make this site's keys and its request to join, in a new folder. Private keys never leave it.

    Keys are encrypted: with SECURE_FVI_PASSPHRASE, what the file SECURE_FVI_KEY_FILE holds, or what is typed.
    """
    from secure_fvi.deployment.home import Home
    from secure_fvi.deployment.keeping import request_text, write_template
    from secure_fvi.deployment.names import ROLES
    from secure_fvi.files import write_bytes

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
def install(files: tuple[Path, ...], home: Path) -> None:
    """Put FILES that came from others into this site's folder: a roster, signatures, successions. Each is checked."""
    install_files(open_home(home), files)


@keys.command()
@home_option
@click.option("--ask-passphrase", is_flag=True, help="Ask for a passphrase instead of taking SECURE_FVI_PASSPHRASE.")
def seal(home: Path, ask_passphrase: bool) -> None:
    """Encrypt the private keys of a site that lie in its folder unsealed. End its processes first."""
    from secure_fvi.deployment.home import Home

    done = Home(home, passphrase(None, ask_passphrase, new=True)).seal()
    for path in done:
        click.echo(f"sealed {path}")
    if not done:
        click.echo("all keys were sealed before")


@keys.command()
@click.argument("what", type=click.Choice(["tls", "identity"]))
@home_option
def rotate(what: str, home: Path) -> None:
    """Make the next TLS key or identity. The present one serves until a roster names the next."""
    from secure_fvi.deployment.keeping import rotate_identity, rotate_tls
    from secure_fvi.deployment.names import now
    from secure_fvi.files import write_bytes

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
@click.pass_context
def check(context: click.Context, home: Path, days: int) -> None:
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


# ---- `secure-fvi keys roster`: the file that says who belongs to a consortium, and its signatures ----


@keys.group()
def roster() -> None:
    """Make, show, sign and verify the roster."""


@roster.command()
@click.argument("requests", nargs=-1, type=FILE)
@click.option("--consortium", help="Its name; that of the roster before, where there is one.")
@click.option("--out", required=True, type=FILE, help="The roster to write.")
@click.option("--previous", type=FILE, help="The roster before: its members stay, with new keys where REQUESTS say so.")
@click.option("--remove", multiple=True, metavar="ID", help="A member that leaves; may be repeated.")
@click.option("--succession", multiple=True, type=FILE, help="A member's old identity announces its new one.")
@click.option("--replace", multiple=True, metavar="ID", help="A member whose old identity is lost.")
@click.option("--min-cohort", type=int, help="Fewest silos in a sum; 3 unless given.")
@click.option("--max-missing", type=click.IntRange(0), help="Most silos that a sum may lack.")
@click.option("--bits", type=click.Choice(["32", "64"]), help="Width of masked sums; 64 unless given.")
@click.option("--days", type=click.IntRange(1, 3650), default=365, show_default=True, help="How long it is in force.")
def make(
    requests: tuple[Path, ...],
    consortium: str | None,
    out: Path,
    previous: Path | None,
    remove: tuple[str, ...],
    succession: tuple[Path, ...],
    replace: tuple[str, ...],
    days: int,
    **sums: Any,
) -> None:
    """Write a roster of the sites whose REQUESTS are given. It counts once all of them have signed it."""
    from secure_fvi.deployment.consortium import Sums, parse_roster, read_succession, write_roster
    from secure_fvi.deployment.keeping import check_changes, read_request
    from secure_fvi.deployment.names import now
    from secure_fvi.errors import InputError
    from secure_fvi.files import read_bytes, write_bytes

    if out.exists():
        raise InputError(f"--out: '{out}' is there already, and may have been signed; name another, or take it away")
    before = None if previous is None else parse_roster(read_bytes(previous, "the roster before"), f"'{previous}'")
    name = consortium or (before.consortium if before is not None else None)
    if name is None:
        raise InputError("give --consortium, or --previous with the roster before")
    members = {} if before is None else dict(before.members)
    for gone in remove:
        if members.pop(gone, None) is None:
            raise InputError(f"--remove {gone}: no such member in the roster before")
    for path in requests:
        r = read_request(read_bytes(path, "the request"), f"'{path}'")
        members[r.id] = r
    if before is not None:
        known = [read_succession(read_bytes(path, "the succession"), f"'{path}'") for path in succession]
        for line in check_changes(before, members.values(), known, replace):
            click.echo(line)
    options: dict[str, Any] = {} if before is None else before.sums.model_dump()
    options |= {name: int(value) for name, value in sums.items() if value is not None}
    if options.get("min_cohort", 3) < 2:
        raise InputError(f"--min-cohort must be at least 2, not {options['min_cohort']}; a sum of one is no sum")
    made = write_roster(name, list(members.values()), now(), Sums(**options), before, days)
    write_bytes(out, made.content)
    _show(made)
    click.echo(f"send to every member, who installs and signs it: {out}")


@roster.command()
@click.argument("file", type=FILE)
def show(file: Path) -> None:
    """Show the roster in FILE, its code, its hash for policies, and who has signed it."""
    from secure_fvi.deployment.consortium import parse_roster, signature_folder
    from secure_fvi.files import read_bytes

    found = parse_roster(read_bytes(file, "the roster"), f"'{file}'")
    _show(found)
    click.echo(f"code: {found.code}")
    signed = {path.stem for path in signature_folder(file).glob("*.sig")}
    missing = [name for name in found.members if name not in signed]
    click.echo(
        "signature files: " + ("complete" if not missing else f"missing {', '.join(missing)}") + " (not verified)"
    )


@roster.command()
@click.argument("file", required=False, type=FILE)
@home_option
@code_option
def sign(file: Path | None, home: Path, yes_code: str | None) -> None:
    """Sign the roster in FILE, or the one installed last, once all members have read the same code to each other.

    FILE is installed first, as by `keys install`.
    """
    from secure_fvi.deployment.consortium import parse_roster
    from secure_fvi.deployment.keeping import sign as sign_installed
    from secure_fvi.deployment.names import now
    from secure_fvi.files import read_bytes

    opened = open_home(home)
    install_files(opened, () if file is None else (file,))
    path = opened.newest_roster_file()
    found = parse_roster(read_bytes(path, "the roster"), f"'{path}'")
    opened.check_own(found)
    _show(found)
    confirm(found.code, yes_code, "Have all members read this code?")
    _, signature = sign_installed(opened, now())
    click.echo(f"signed by '{opened.id}'; send to every member: {signature}")


@roster.command()
@click.argument("signatures", nargs=-1, type=FILE)
@home_option
def verify(signatures: tuple[Path, ...], home: Path) -> None:
    """Check the roster that was installed last with its signatures and put it in force; older ones are refused then.

    SIGNATURES that came from others are installed first, as by `keys install`.
    """
    from secure_fvi.deployment.keeping import accept
    from secure_fvi.deployment.names import now

    opened = open_home(home)
    install_files(opened, signatures)
    found = accept(opened, now())
    click.echo(f"roster {found.serial} of '{found.consortium}' is in force: signed by {', '.join(found.members)}")
    click.echo(f'for the policy: rosters = ["{found.hash.hex()}"]')


def _show(found: ConsortiumRoster) -> None:
    from secure_fvi.deployment.names import format_time

    click.echo(f"roster {found.serial} of '{found.consortium}', until {format_time(found.expires)}")
    for m in found.members.values():
        until = format_time(m.x509.not_valid_after_utc)
        click.echo(f"  {m.role:6} {m.id:20} identity {m.identity[:16]}...  TLS {m.tls_key[:16]}... until {until}")
    s = found.sums
    lacking = "" if s.max_missing is None else f", at most {s.max_missing} of those asked missing"
    click.echo(f"  sums of at least {s.min_cohort} silos{lacking}, {s.bits} bits")
    click.echo(f"  hash {found.hash.hex()}")
