"""`secure-fvi flare`: jobs that NVIDIA FLARE carries. docs/flare.md says how."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from secure_fvi.cli.keys import home_option, open_home
from secure_fvi.cli.serving import log_option, sandbox_option, start_log

if TYPE_CHECKING:
    from secure_fvi.engines.flare_kits import Scheme

FILE = click.Path(path_type=Path)
_kit = click.argument("kit", type=click.Path(path_type=Path, exists=True, file_okay=False))


@click.group()
def flare() -> None:
    """Jobs that NVIDIA FLARE carries (pip install '.[flare]' in a checkout). docs/flare.md says how they work."""


@flare.command()
@home_option
@click.option("--host", required=True, help="The server's name or address, as sites reach it.")
@click.option("--port", type=click.IntRange(1, 65535), default=8002, show_default=True)
@click.option("--admin", required=True, metavar="EMAIL", help="Who submits jobs.")
@click.option(
    "--scheme", type=click.Choice(["tcp", "grpc", "http"]), default="tcp", show_default=True,
    help="What carries messages, by mutual TLS: tcp is the fastest, http is for sites behind proxies.",
)  # fmt: skip
@click.option("--out", required=True, type=FILE, help="File for `nvflare provision -p`.")
def project(home: Path, host: str, port: int, admin: str, scheme: Scheme, out: Path) -> None:
    """Write what FLARE's own provisioning reads, from the roster in force: each member under its own name."""
    from secure_fvi.deployment.names import now
    from secure_fvi.engines.flare_kits import project as text
    from secure_fvi.files import write_bytes

    write_bytes(out, text(open_home(home).roster(now()), host, port, admin, scheme).encode())
    click.echo(f"next: nvflare provision -p {out} -w kits --force; then give each member its folder below kits")


@flare.command()
@_kit
@home_option
@click.option("--data-dir", type=FILE, envvar="SECURE_FVI_DATA", help="Folder of data sets of shipped programs.")
@click.option("--repeatable", is_flag=True, help="For tests, as in `secure-fvi silo start`.")
@click.option(
    "--sandbox", type=click.Choice(["required", "off"]), default="required", show_default=True,
    help="Whether FLARE's process, which does what FLARE's server says, sees no more of a site than its own folder and "
    "the network; that needs bubblewrap.",
)  # fmt: skip
@log_option
def start(
    kit: Path,
    home: Path,
    data_dir: Path | None,
    repeatable: bool,
    sandbox: Literal["required", "off"],
    log_format: str,
) -> None:
    """Run FLARE's process of this member, of the startup kit KIT, until it is stopped.

    First the kit is guarded: of it keys, certificates and addresses alone are used, and between honest members no job
    brings code, or names a class other than ours. A silo's keys, data and log stay in this process: FLARE's own, which
    does what FLARE's server says, brings it letters, and sees none of them. A process that dies is started again.
    """
    import signal
    import sys

    from secure_fvi.deployment.site_job import Local
    from secure_fvi.engines.flare import run
    from secure_fvi.engines.flare_kits import check_flare

    check_flare()
    site = open_home(home)
    start_log(False, log_format, site=site.id, role=site.role)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # and FLARE's process with it
    run(kit, site, Local(data_dir, repeatable), sandbox)


@flare.command()
@click.argument("config", type=FILE)
@home_option
@click.option("--admin", "kit", required=True, type=FILE, help="The administrator's startup kit.")
@click.option("--out", required=True, type=FILE, help="Folder for the results; the same again to continue a job.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key, such as seed=7.")
@sandbox_option
@click.pass_context
def run(
    context: click.Context,
    config: Path,
    home: Path,
    kit: Path,
    out: Path,
    overrides: tuple[str, ...],
    sandbox: Literal["required", "off"],
) -> None:
    """Have FLARE carry the job that CONFIG describes. To be run at the server's machine, where FLARE's server runs.

    Where FLARE ends the job since one of its processes died, it is submitted again and goes on. Exits 4 where the job
    ended without converging.
    """
    from secure_fvi.cli.tables import exit_code
    from secure_fvi.engines import flare_kits
    from secure_fvi.runs.directory import RunDirectory

    flare_kits.check_flare()
    RunDirectory(out).check_writable()
    flare_kits.launch(open_home(home), config, out, kit, overrides, sandbox, click.echo)
    click.echo(f"report: {out / 'report.html'}")
    context.exit(exit_code(RunDirectory(out).read_result()))
