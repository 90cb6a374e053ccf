"""`secure-fvi flower`: jobs launched by Flower. docs/flower.md says how."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from secure_fvi.cli.keys_shared import home_option, open_home
from secure_fvi.cli.serving import sandbox_option

FILE = click.Path(path_type=Path)
_debug = click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
_any_app = click.option("--any-app", is_flag=True, help="Also run apps other than ours: whatever code a run ships.")


@click.group()
def flower() -> None:
    """Jobs that Flower launches (pip install '.[flower]' in a checkout). docs/flower.md says how they work."""


@flower.command()
@home_option
@_debug
def key(home: Path, debug: bool) -> None:
    """Print where the public key of this site's SuperNode is, made on first use; the server registers it."""
    from secure_fvi.engines.flower_setup import node_key

    click.echo(node_key(open_home(home).path))


@flower.command()
@click.argument("public_key", type=FILE)
@home_option
@click.option("--name", help="What Flower's list of nodes calls it.")
@_debug
def register(public_key: Path, home: Path, name: str | None, debug: bool) -> None:
    """Let the SuperNode with PUBLIC_KEY in, at the server whose SuperLink runs."""
    import subprocess

    from secure_fvi.engines.flower_setup import check_flower, environment, program

    check_flower()
    command = [program("flwr"), "supernode", "register", str(public_key), "local", *(["--name", name] if name else [])]
    sys.exit(subprocess.run(command, env=environment(open_home(home).path), check=False).returncode)


@flower.command()
@home_option
@click.option("--listen", default="0.0.0.0:9092", show_default=True, metavar="HOST:PORT", help="Where nodes dial in.")
@_any_app
@_debug
def superlink(home: Path, listen: str, any_app: bool, debug: bool) -> None:
    """Run the server's SuperLink on loopback, and before it a filter that lets nodes in and no control."""
    from secure_fvi.engines.flower_setup import check_flower
    from secure_fvi.engines.flower_superlink import run_superlink
    from secure_fvi.engines.stream_client import split_address

    check_flower()
    run_superlink(open_home(home), split_address(listen), any_app)


@flower.command()
@home_option
@click.option("--superlink", "address", required=True, metavar="HOST:PORT", help="Where the server's nodes dial in.")
@click.option("--data", type=FILE, help="The silo's data file, instead of the policy's.")
@click.option("--data-dir", type=FILE, envvar="SECURE_FVI_DATA", help="Folder of data sets of shipped programs.")
@click.option("--repeatable", is_flag=True, help="For tests, as in `secure-fvi silo start`.")
@_any_app
@_debug
def supernode(
    home: Path, address: str, data: Path | None, data_dir: Path | None, repeatable: bool, any_app: bool, debug: bool
) -> None:
    """Run this site's SuperNode: it waits for runs, and starts this site's party in them."""
    from secure_fvi.engines.flower_setup import check_flower
    from secure_fvi.engines.flower_supernode import run_supernode

    check_flower()
    site = open_home(home)
    words = {"home": str(site.path.resolve()), "data": data and str(data.resolve())}
    words["data-dir"] = data_dir and str(data_dir.resolve())
    named = [f'secure-fvi-{name}="{value}"' for name, value in words.items() if value]
    named += ["secure-fvi-repeatable=true"] if repeatable else []
    sys.exit(run_supernode(site, address, named, any_app, click.echo))


@flower.command()
@click.argument("config", type=FILE)
@home_option
@click.option("--out", required=True, type=FILE, help="Folder for the results; the same again to continue a job.")
@click.option("--listen", default="0.0.0.0:8443", show_default=True, metavar="HOST:PORT", help="The stream's port.")
@click.option("--address", metavar="HOST:PORT", help="What silos dial; --listen unless given.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key, such as seed=7.")
@sandbox_option
@_debug
@click.pass_context
def run(
    context: click.Context,
    config: Path,
    home: Path,
    out: Path,
    listen: str,
    address: str | None,
    overrides: tuple[str, ...],
    sandbox: Literal["required", "off"],
    debug: bool,
) -> None:
    """Have Flower run the job that CONFIG describes, and show its log. The SuperLink of --home must be running.

    Started again with the same --out, after whatever crashed, it goes on. Exits 4 where the job ended without
    converging.
    """
    from secure_fvi.cli.tables import exit_code
    from secure_fvi.engines.flower_setup import check_flower
    from secure_fvi.engines.flower_superlink import launch
    from secure_fvi.errors import SecureFVIError
    from secure_fvi.runs.directory import RunDirectory

    check_flower()
    launch(open_home(home), config, out, listen, address or listen, overrides, sandbox)
    if not (out / "result.json").exists():
        raise SecureFVIError(f"the run has ended before the job; its log says why; start it again to continue '{out}'")
    click.echo(f"report: {out / 'report.html'}")
    context.exit(exit_code(RunDirectory(out).read_result()))
