"""The command line: `secure-fvi`. Commands import what is heavy only when they run."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn, TextIO

import click

from secure_fvi.cli.audit import audit
from secure_fvi.cli.audit_log import audit_log
from secure_fvi.cli.bench import bench
from secure_fvi.cli.budget import budget
from secure_fvi.cli.compare import compare
from secure_fvi.cli.flower import flower
from secure_fvi.cli.keys import keys
from secure_fvi.cli.policy import policy
from secure_fvi.cli.reproduce import reproduce
from secure_fvi.cli.results import results
from secure_fvi.cli.run import run
from secure_fvi.cli.serving import holder, server, silo
from secure_fvi.cli.status import status
from secure_fvi.cli.watch import watch
from secure_fvi.errors import SecureFVIError

_BAD_USAGE = 2
_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="secure-fvi")
def cli() -> None:
    """Fit one Bayesian model across institutions that may not pool their data.

    Exit codes: 0 done, 1 failed, 2 bad input, 3 privacy budget exhausted, 4 a run ended without converging
    (its results are written), 130 interrupted.
    """


cli.add_command(run)
cli.add_command(compare)
cli.add_command(audit)
cli.add_command(audit_log)
cli.add_command(bench)
cli.add_command(budget)
cli.add_command(holder)
cli.add_command(flower)
cli.add_command(keys)
cli.add_command(policy)
cli.add_command(reproduce)
cli.add_command(results)
cli.add_command(server)
cli.add_command(silo)
cli.add_command(status)
cli.add_command(watch)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. Every failure is one line on stderr; --debug adds the stack trace."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    warnings.showwarning = _show_warning
    try:
        code = cli.main(args=arguments, prog_name="secure-fvi", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(_BAD_USAGE)
    except click.ClickException as error:
        _fail(error.format_message(), _BAD_USAGE, debug)
    except SecureFVIError as error:
        _fail(str(error), error.exit_code, debug)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted; continue with --resume", _INTERRUPTED, debug)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        _fail(f"{text} (an error in the model or in secure-fvi; --debug shows where)", 1, debug)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    click.echo(f"secure-fvi: {' '.join(message.split())}", err=True)
    sys.exit(code)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    # Libraries warn about their own insides; only our warnings are for the user of the command line.
    from secure_fvi.errors import SecureFVIWarning

    if issubclass(category, SecureFVIWarning):
        click.echo(f"secure-fvi: warning: {message}", err=True)
