"""`secure-fvi server`, `silo` and `holder`: the processes of a job between institutions."""

from __future__ import annotations

import datetime
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from secure_fvi.cli.keys import home_option, open_home
from secure_fvi.errors import visible

if TYPE_CHECKING:
    from secure_fvi.deployment.home import Home

FILE = click.Path(path_type=Path)
sandbox_option = click.option(
    "--sandbox",
    type=click.Choice(["required", "off"]),
    default="required",
    show_default=True,
    help="Where a model of one's own, a function of a file, is run to be traced: in a sandbox, which needs bubblewrap, "
    "or in this process, which holds the site's keys.",
)
log_option = click.option(
    "--log", "log_format", type=click.Choice(["text", "json"]), default="text", show_default=True,
    help="Form of the log on standard error.",
)  # fmt: skip


@click.group()
def server() -> None:
    """The server of a job between institutions. docs/distributed.md says how it works."""


@server.command()
@click.argument("config", type=FILE)
@home_option
@click.option("--out", required=True, type=FILE, help="Folder for the results; the same again to continue a job.")
@click.option("--listen", default="0.0.0.0:8443", show_default=True, metavar="HOST:PORT", help="Where silos dial in.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key, such as seed=7.")
@sandbox_option
@log_option
@click.option("--quiet", is_flag=True, help="No progress, no table, no log.")
@click.pass_context
def start(
    context: click.Context,
    config: Path,
    home: Path,
    out: Path,
    listen: str,
    overrides: tuple[str, ...],
    sandbox: Literal["required", "off"],
    log_format: str,
    quiet: bool,
) -> None:
    """Offer the job that CONFIG describes to its silos, run it with them and write the results to the folder --out.

    Waits until all silos have connected and accepted. Killed and started again with the same --out, it goes on.
    Exits 4 where the job ended without converging; the files are written all the same.
    """
    from secure_fvi.errors import InputError
    from secure_fvi.runs.reading import read

    job = read(config, overrides)  # before PyTorch is loaded: what is wrong with the file is said at once

    from secure_fvi.cli.tables import exit_code, print_result
    from secure_fvi.deployment.serving import remote_federation
    from secure_fvi.progress import RunProgress
    from secure_fvi.runs.directory import RunDirectory
    from secure_fvi.runs.running import execute_federation

    site = open_home(home)
    start_log(quiet, log_format, site=site.id, role=site.role)
    folder = RunDirectory(out)
    folder.check_writable()
    if job.engine is not None and job.engine.kind == "flare":
        raise InputError(f"'{config}': [engine] kind = \"flare\": start it with `secure-fvi flare run`")
    federation = remote_federation(job, site, folder, listen, sandbox=sandbox)
    with RunProgress(quiet) as progress:
        result = execute_federation(federation, folder, True, progress.update)
    if result is None:
        click.echo(f"the job in '{out}' is finished; its results are in {out / 'result.json'}")
    elif not quiet:
        print_result(result)
        click.echo(f"report: {out / 'report.html'}")
    context.exit(exit_code(folder.read_result() if result is None else result.to_json()))


@click.group()
def silo() -> None:
    """A silo's own process. docs/distributed.md says how it works."""


@silo.command("start")
@home_option
@click.option("--server", "address", required=True, metavar="HOST:PORT", help="Where the server listens.")
@click.option("--data-dir", type=FILE, envvar="SECURE_FVI_DATA", help="Folder of data sets of shipped programs.")
@click.option("--once", is_flag=True, help="Leave after the first job.")
@click.option(
    "--repeatable",
    is_flag=True,
    help="For tests: draw from the job's seed as `secure-fvi run` does, so that results agree to the last bit. The "
    "server can then work out what this silo draws.",
)
@log_option
@click.option("--quiet", is_flag=True, help="No log.")
def start_silo(
    home: Path,
    address: str,
    data_dir: Path | None,
    once: bool,
    repeatable: bool,
    log_format: str,
    quiet: bool,
) -> None:
    """Dial the server, take part in the jobs that this site's policy allows, and dial again when it is away.

    Killed and started again, it goes on where it was. Its own posterior goes to `results` in its folder. With --once it
    exits 2 after a job under differential privacy that its data did not fit: nobody else hears of that.
    """
    from secure_fvi.deployment.site import run_site
    from secure_fvi.deployment.site_job import Local

    site = _opened(home, "silo")
    start_log(quiet, log_format, site=site.id, role=site.role)
    run_site(site, address, Local(data_dir, repeatable), once)


@click.group()
def holder() -> None:
    """The key holder of homomorphic sums. docs/distributed.md says how it works."""


@holder.command("start")
@home_option
@click.option("--server", "address", required=True, metavar="HOST:PORT", help="Where the server listens.")
@click.option("--once", is_flag=True, help="Leave after the first job.")
@log_option
@click.option("--quiet", is_flag=True, help="No log.")
def start_holder(home: Path, address: str, once: bool, log_format: str, quiet: bool) -> None:
    """Dial the server, and decrypt the totals of jobs that this site's policy allows, each once.

    Makes a key for each session and removes it with the session. Killed and started again, it goes on where it was.
    """
    from secure_fvi.deployment.site import run_site

    site = _opened(home, "holder")
    start_log(quiet, log_format, site=site.id, role=site.role)
    run_site(site, address, once=once)


def _opened(path: Path, role: str) -> Home:
    """The folder of a site of this role. Raises InputError for another's, and for a policy that cannot be read: each
    job reads it anew, and before one comes nobody would hear of it."""
    from secure_fvi.deployment.policy import read_policy
    from secure_fvi.errors import InputError

    found = open_home(path)
    if found.role != role:
        raise InputError(f"'{path}' is the folder of a {found.role}; a {role}'s is needed here")
    read_policy(found.policy_file)
    return found


# ---- What these processes write to standard error: lines to read, or one JSON object a line to collect ----


class JsonLines(logging.Formatter):
    """One object a line. `event` is the message before names and numbers are put in: the same for all of a kind."""

    def __init__(self, **always: str) -> None:
        """`always`: fields of every line, such as the site's id."""
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        written = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": written.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            **self._always,
            "logger": record.name,
            "event": str(record.msg),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class Lines(logging.Formatter):
    """A line to read. What others sent may stand in it: it moves no cursor and begins no line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record))

    def formatException(self, info: Any) -> str:
        return "\n".join(f"  {visible(line)}" for line in super().formatException(info).splitlines())


def start_log(quiet: bool, form: str, **always: str) -> None:
    """Log this package's messages in the `form` that `log_option` takes; errors only where `quiet`."""
    # A handler of its own: libraries that are imported later set up the root logger to their taste.
    handler = logging.StreamHandler()
    text = Lines("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(JsonLines(**always) if form == "json" else text)
    logger = logging.getLogger("secure_fvi")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.ERROR if quiet else logging.INFO)
