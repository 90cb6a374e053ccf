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

    from secure_fvi_lab.bench.step import measure

    found = measure(repeats, iterations)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for name, milliseconds in found["ms_per_iteration"].items():
        text = "not installed" if milliseconds is None else f"{milliseconds:8.3f} ms"
        ratio = found["speed_relative_to_pyro_svi"].get(name)
        click.echo(f"{name:12} {text}" + (f"   {ratio:6.1f} x Pyro's SVI" if ratio is not None else ""))


@bench.command()
@click.option("--silos", type=click.IntRange(2), default=50, show_default=True, help="Silos.")
@click.option("--records", type=click.IntRange(2), default=1200, show_default=True, help="Images of a silo.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float32", show_default=True)
@click.option("--rounds", type=click.IntRange(3), default=20, show_default=True, help="Timed iterations.")
@click.option("--compile", "compiled", is_flag=True, help="Time batched steps that are compiled as well.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def batch(
    silos: int, records: int, device: str, dtype: str, rounds: int, compiled: bool, as_json: bool, debug: bool
) -> None:
    """Time an iteration over many silos with small networks: batched by vmap, in a loop, and the roofline."""
    from secure_fvi_lab.bench.batch import command

    command(as_json, silos, records, device, dtype, rounds, compiled)


@bench.command()
@click.option("--device", default="cuda", show_default=True, help="cuda, or cpu to try the command itself.")
@click.option("--quick", is_flag=True, help="Small sizes: whether it works, not how fast.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), required=True, help="The JSON to write.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def gpu(device: str, quick: bool, out: Path, debug: bool) -> None:
    """Fit on a device and on the CPU, compare where they end, and only then time the device."""
    from secure_fvi_lab.bench.batch import report

    report(device, quick, out)


@bench.command("local-step")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--data", metavar="DIR", type=click.Path(path_type=Path), envvar="SECURE_FVI_DATA", help="Folder of data sets."
)
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True, help="Timed blocks of each.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def local_step(as_json: bool, data: Path | None, repeats: int, debug: bool) -> None:
    """Time a local step of PVI on adult, minibatches of 128, beside a step of Pyro's SVI."""
    from secure_fvi_lab.bench.local_step import command

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
    from secure_fvi_lab.bench.secure_sum import command

    command(as_json, quick, plot)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def accountants(as_json: bool, debug: bool) -> None:
    """Epsilon of ten named jobs by every accountant, and the check values. docs/accounting.md has the table."""
    from secure_fvi_lab.bench.accountants import command

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
    from secure_fvi_lab.bench.ledger import command

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
    from secure_fvi_lab.bench.audit_log import command

    command(as_json, exchanges, folder)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--rounds", type=click.IntRange(10), default=1000, show_default=True, help="Timed rounds of each.")
@click.option("--unattended", type=click.IntRange(100), help="One masked job of so many rounds, from start to end.")
@click.option("--compile/--traced", default=True, show_default=True, help="How the silos' steps run.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def engine(as_json: bool, rounds: int, unattended: int | None, compile: bool, debug: bool) -> None:
    """Time a round of SFVI with three silo processes over mutual TLS, beside one process and a bare gRPC round trip."""
    from secure_fvi_lab.bench.engine import command

    command(as_json, rounds, compile, unattended or 0)


@bench.command()
@click.option(
    "--data", metavar="DIR", type=click.Path(path_type=Path), envvar="SECURE_FVI_DATA", help="Holds uci_adult."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quick", is_flag=True, help="A quarter of the rounds.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def privacy(data: Path | None, as_json: bool, quick: bool, debug: bool) -> None:
    """What privacy costs on UCI Adult: ours at two epsilons, Opacus on pooled data beside it, and a step's time."""
    from secure_fvi_lab.bench.privacy import command

    command(as_json, data, quick)


@bench.command()
@click.option("--kills", type=click.IntRange(1), default=200, show_default=True, help="Over as many jobs as it takes.")
@click.option(
    "--on-loss",
    type=click.Choice(["wait", "drop"]),
    default="wait",
    show_default=True,
    help="drop: four silos, of which one may be missing at a time.",
)
@click.option("--seed", default=1, show_default=True, help="Of moments and victims.")
@click.option("--kind", "kinds", multiple=True, help="Jobs of this kind alone; may be repeated.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep all parties' folders in this one, which is new.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
@click.pass_context
def kills(
    context: click.Context,
    kills: int,
    on_loss: str,
    seed: int,
    kinds: tuple[str, ...],
    folder: Path | None,
    as_json: bool,
    debug: bool,
) -> None:
    """Kill server, silos and key holder at random moments of jobs between sites, and check what the jobs find.

    Exits 1 where a job failed, hung, or ended with another posterior, ledger or log than it should have.
    docs/faults.md.
    """
    from secure_fvi_lab.bench.kills import command

    if not command(as_json, kills, on_loss, seed, kinds, folder):
        context.exit(1)


@bench.command()
@click.option("--latency-ms", type=click.FloatRange(0), default=100.0, show_default=True, help="Of a round trip.")
@click.option("--loss", type=click.FloatRange(0, 0.5), default=0.02, show_default=True, help="Of packets, each way.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def network(latency_ms: float, loss: float, as_json: bool, debug: bool) -> None:
    """Time PVI and SFVI between sites over a relay that behaves as a slow network does. docs/faults.md."""
    from secure_fvi_lab.bench.network import command

    command(as_json, latency_ms, loss)


@bench.command()
@click.option("--silos", type=click.IntRange(4), default=50, show_default=True, help="Processes.")
@click.option("--length", type=click.IntRange(2), default=100_000, show_default=True, help="Values of a sum.")
@click.option("--leave", type=click.FloatRange(0, 0.3), default=0.1, show_default=True, help="Share killed in a round.")
@click.option("--deadline", default=60.0, show_default=True, help="Seconds after which a silo is dropped.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def silos(silos: int, length: int, leave: float, deadline: float, as_json: bool, debug: bool) -> None:
    """Masked sums of many silo processes, of which some are killed in a round; the memory of each. docs/faults.md."""
    from secure_fvi_lab.bench.silos import command

    command(as_json, silos, length, leave, deadline)


@bench.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--family", "families", multiple=True, help="Of sf.glmm; all by default.")
@click.option("--sites", multiple=True, type=click.IntRange(3), help="Numbers of sites; 3 and 10 by default.")
@click.option("--draws", type=click.IntRange(50), default=1000, show_default=True, help="Of NUTS, a chain.")
@click.option("--quick", is_flag=True, help="The design alone, of a tenth of the rows.")
@click.option("--debug", is_flag=True, help="Show the stack trace of a failure.")
def glmm(
    as_json: bool, families: tuple[str, ...], sites: tuple[int, ...], draws: int, quick: bool, debug: bool
) -> None:
    """Fit formulas over sites of 13 to 200 records beside NUTS and meta-analysis, and time a design. Hours for all."""
    from secure_fvi.mixed_model import FAMILIES
    from secure_fvi_lab.bench.glmm import command

    command(as_json, families or tuple(FAMILIES), sites or (3, 10), draws, quick)
