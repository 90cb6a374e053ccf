"""`secure-fvi bench`: what an iteration costs on this machine."""

from __future__ import annotations

from pathlib import Path

import click


@click.group()
def bench() -> None:
    """Measure speed on this machine."""


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True, help="Timed blocks of each.")
@click.option("--iterations", type=click.IntRange(1), default=100, show_default=True, help="Iterations a block.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def step(as_json: bool, repeats: int, iterations: int, debug: bool) -> None:
    """Time one iteration on six cities: ours beside Pyro's SVI and, where installed, NumPyro's jitted SVI."""
    import json

    from secure_fvi.cli.bench_step import measure

    found = measure(repeats, iterations)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for name, milliseconds in found["ms_per_iteration"].items():
        text = "not installed" if milliseconds is None else f"{milliseconds:8.3f} ms"
        ratio = found["speed_relative_to_pyro_svi"].get(name)
        click.echo(f"{name:12} {text}" + (f"   {ratio:6.1f} x Pyro's SVI" if ratio is not None else ""))


@bench.command("local-step")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--data", metavar="DIR", type=click.Path(path_type=Path), envvar="SECURE_FVI_DATA", help="Folder of data sets."
)
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True, help="Timed blocks of each.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def local_step(as_json: bool, data: Path | None, repeats: int, debug: bool) -> None:
    """Time a local step of PVI on adult, minibatches of 128, beside a step of Pyro's SVI."""
    from secure_fvi.cli.bench_local_step import command

    command(as_json, data, repeats)


@bench.command("secure-sum")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quick", is_flag=True, help="Fewer and smaller rows: some 20 s instead of some 5 minutes.")
@click.option("--plot", metavar="FILE.png", help="Draw the times into this file as well.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def secure_sum(as_json: bool, quick: bool, plot: str | None, debug: bool) -> None:
    """Time secure sums: plain, masked and homomorphic, beside their floor, Flower's SecAgg+ and TenSEAL alone.

    Every total is compared with NumPy's. docs/benchmarks-secure-sum.md says what is in each number.
    """
    from secure_fvi.cli.bench_secure_sum import command

    command(as_json, quick, plot)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def accountants(as_json: bool, debug: bool) -> None:
    """Epsilon of ten named jobs by every accountant, and the check values. docs/accounting.md has the table."""
    from secure_fvi.cli.bench_accountants import command

    command(as_json)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--releases", type=click.IntRange(1), default=2000, show_default=True, help="Charged at each block length."
)
@click.option(
    "--folder", type=click.Path(path_type=Path), help="On the disk to measure; default: the temporary folder."
)
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def ledger(as_json: bool, releases: int, folder: Path | None, debug: bool) -> None:
    """Time the privacy ledger: a release charged, a ledger opened and verified."""
    from secure_fvi.cli.bench_ledger import command

    command(as_json, releases, folder)


@bench.command("audit-log")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--exchanges", type=click.IntRange(1), default=1000, show_default=True, help="Written down each way.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="On the disk to measure; default: the temporary folder."
)
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def audit_log(as_json: bool, exchanges: int, folder: Path | None, debug: bool) -> None:
    """Time the paper trail: an exchange written down, a log verified and compared with the server's."""
    from secure_fvi.cli.bench_audit_log import command

    command(as_json, exchanges, folder)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--rounds", type=click.IntRange(10), default=1000, show_default=True, help="Timed rounds of each.")
@click.option("--compile/--traced", default=True, show_default=True, help="How the silos' steps run.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def engine(as_json: bool, rounds: int, compile: bool, debug: bool) -> None:
    """Time a round of SFVI with three silo processes over mutual TLS, beside one process and a bare gRPC round trip."""
    from secure_fvi.cli.bench_engine import command

    command(as_json, rounds, compile)


@bench.command()
@click.option(
    "--data", metavar="DIR", type=click.Path(path_type=Path), envvar="SECURE_FVI_DATA", help="Holds uci_adult."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quick", is_flag=True, help="A quarter of the rounds.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def privacy(data: Path | None, as_json: bool, quick: bool, debug: bool) -> None:
    """What privacy costs on UCI Adult: ours at two epsilons, Opacus on pooled data beside it, and a step's time."""
    from secure_fvi.cli.bench_privacy import command

    command(as_json, data, quick)


@bench.command("flower")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--rounds", type=click.IntRange(100), default=500, show_default=True, help="Timed on each stream.")
@click.option("--exchanges", type=click.IntRange(1), default=5, show_default=True, help="Timed as Flower's messages.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def flower_(as_json: bool, rounds: int, exchanges: int, debug: bool) -> None:
    """Time a round by carrier: silos that dial the server, silos that Flower started, Flower's messages. Needs flwr."""
    from secure_fvi.cli.bench_flower import command

    command(as_json, rounds, exchanges)
