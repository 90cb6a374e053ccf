"""What the commands about keys share: the site's folder, passphrases, codes that people compare."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from secure_fvi.deployment.home import Home

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
