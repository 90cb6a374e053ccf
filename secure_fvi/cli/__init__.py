"""The command line: `secure-fvi`. Commands import what is heavy only when they run."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, TextIO

import click

from secure_fvi.cli.audit import audit
from secure_fvi.cli.budget import budget
from secure_fvi.cli.data import data
from secure_fvi.cli.fit import fit
from secure_fvi.cli.flare import flare
from secure_fvi.cli.keys import keys
from secure_fvi.cli.poc import poc
from secure_fvi.cli.policy import policy
from secure_fvi.cli.run import report, run
from secure_fvi.cli.serving import holder, server, silo
from secure_fvi.cli.status import audit_log, status, watch
from secure_fvi.errors import InputError, SecureFVIError, visible

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

_BAD_USAGE = 2
_INTERRUPTED = 130
#: By command: how one that was interrupted goes on. Of all others nothing is left.
_GOES_ON = {"run": "; continue with --resume"} | dict.fromkeys(
    ("flare", "holder", "reproduce", "server", "silo"), "; the same command goes on"
)
#: By library: the extra that brings it.
_EXTRAS = {
    "formulaic": "formula",
    "pandas": "formula",
    "grpc": "distributed",
    "matplotlib": "report",
}

#: Commands of the other package of this repository, and how one gets it.
_LAB = ("bench", "compare", "reproduce", "results")
_NO_LAB = "'{}' is a command of secure-fvi-lab, which is not installed: pip install ./lab in a checkout"


class _Commands(click.Group):
    """Our own commands, and those that other installed packages have as entry points. These are looked for only where
    a command is none of ours, and for the list of all; ours cannot be replaced by them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_others().names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (ours := super().get_command(ctx, cmd_name)) is not None:
            return ours
        found = _others().select(name=cmd_name)
        if not found:
            return _missing(cmd_name, _NO_LAB.format(cmd_name)) if cmd_name in _LAB else None
        try:
            return _with_debug(next(iter(found)).load())
        except Exception as error:  # of whatever kind: the other commands are not lost for it
            return _missing(cmd_name, f"'{cmd_name}' cannot be loaded: {error}")


def _with_debug(command: click.Command) -> click.Command:
    """The command, or each of a group, with --debug, which `main` looks for itself."""
    if isinstance(command, click.Group):
        for each in command.commands.values():
            _with_debug(each)
    elif not any(option.name == "debug" for option in command.params):
        text = "Show the stack trace of a failure."
        command.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help=text))
    return command


def _others() -> EntryPoints:
    from importlib.metadata import entry_points

    return entry_points(group="secure_fvi.commands")


def _missing(name: str, why: str) -> click.Command:
    """A command that says why it is none, whatever it is given."""

    def refuse() -> NoReturn:
        raise InputError(why)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    return click.Command(name, settings, refuse, short_help="(cannot be loaded)")


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="secure-fvi")
def cli() -> None:
    """Fit one Bayesian model across institutions that may not pool their data.

    Exit codes: 0 done, 1 failed, 2 bad input, 3 privacy budget exhausted, 4 a run ended without converging
    (its results are written), 130 interrupted.
    """


for _command in (
    audit, audit_log, budget, data, fit, flare, holder, keys, poc, policy, report, run, server, silo, status, watch,
):  # fmt: skip
    cli.add_command(_with_debug(_command))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. Every failure is one line on stderr; --debug adds the stack trace."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    warnings.showwarning = _show_warning
    _warned.clear()
    _keep_memory()
    if sys.stderr.isatty() and "--quiet" not in arguments:
        sys.meta_path.insert(0, _SaysLoading())
    try:
        code = cli.main(args=arguments, prog_name="secure-fvi", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(_BAD_USAGE)
    except click.MissingParameter as error:
        about = getattr(error.param, "help", None)  # an argument has none
        _fail(error.format_message() + (f" {about}" if about else ""), _BAD_USAGE, debug)
    except click.ClickException as error:
        _fail(error.format_message(), _BAD_USAGE, debug)
    except SecureFVIError as error:
        _fail(str(error), error.exit_code, debug)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted" + _GOES_ON.get(arguments[0] if arguments else "", ""), _INTERRUPTED, debug)
    except Exception as error:
        missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if missing in _EXTRAS:
            _fail(f"this needs {missing}: pip install '.[{_EXTRAS[missing]}]' in a checkout", _BAD_USAGE, debug)
        text = f"{type(error).__name__}: {error}"
        _fail(f"{text} (an error in the model or in secure-fvi; --debug shows where)", 1, debug)
    sys.exit(code if isinstance(code, int) else 0)


class _SaysLoading(importlib.abc.MetaPathFinder):
    """Finds nothing; on a terminal it says why the next seconds are silent, once."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torch" and self in sys.meta_path:
            sys.meta_path.remove(self)
            click.echo("secure-fvi: loading PyTorch", err=True)


#: Of glibc (malloc.h), and bytes: what lies free at the heap's end, and tensors from which each has memory of its own.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _KEPT = -1, -3, 2**28


def _keep_memory() -> None:
    """By default glibc gives the memory of every large tensor back, and has it cleared anew for the next: up to a
    quarter of a fit's processor time. Other C libraries go on as they do."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        set_option = ctypes.CDLL(None).mallopt
        for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            set_option(option, _KEPT)


def _fail(message: str, code: int, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    click.echo(f"secure-fvi: {_one_line(message)}", err=True)
    sys.exit(code)


def _one_line(message: str) -> str:
    """What others wrote may stand in it."""
    return visible(" ".join(message.split()))


#: What this command has warned of.
_warned: set[str] = set()


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

    text = _one_line(str(message))
    if issubclass(category, SecureFVIWarning) and text not in _warned:  # Python forgets where filters change
        _warned.add(text)
        click.echo(f"secure-fvi: warning: {text}", err=True)
