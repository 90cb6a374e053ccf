"""`secure-fvi bench`: what an iteration costs on this machine."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

#: What was measured, and what makes lines of it.
Finding = tuple[dict[str, Any], Callable[[dict[str, Any]], Iterable[str]]]
_data = click.option(
    "--data", metavar="DIR", type=click.Path(path_type=Path), envvar="SECURE_FVI_DATA", help="Folder of data sets."
)
_folder = click.option(
    "--folder", type=click.Path(path_type=Path), help="On the disk to measure; default: the temporary folder."
)


@click.group()
def bench() -> None:
    """Measure speed on this machine."""


def _measuring(name: str, of: str = "") -> Callable[[Callable[..., Any]], click.Command]:
    """A command that prints what its function measures: the lines for a terminal that come with it, or --json. of:
    "module:function" of this package that measures in its place, by the command's options; `lines` of that module."""

    def made(measure: Callable[..., Any]) -> click.Command:
        @bench.command(name)
        @click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
        @functools.wraps(measure)
        def command(as_json: bool, **options: Any) -> None:
            if of:
                path, _, function = of.partition(":")
                module = importlib.import_module(f"secure_fvi_lab.bench.{path}")
                found, lines = getattr(module, function)(**options), module.lines
            else:
                found, lines = measure(**options)
            click.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))

        return command

    return made


@_measuring("step", "step:measure")
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True, help="Timed blocks of each.")
@click.option("--iterations", type=click.IntRange(1), default=100, show_default=True, help="Iterations a block.")
def step() -> None:
    """Time one iteration on six cities: ours beside Pyro's SVI and, where installed, NumPyro's jitted SVI."""


@_measuring("batch")
@click.option("--silos", type=click.IntRange(2), default=50, show_default=True, help="Silos.")
@click.option("--records", type=click.IntRange(2), default=1200, show_default=True, help="Images of a silo.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--dtype", type=click.Choice(["float64", "float32"]), default="float32", show_default=True)
@click.option("--rounds", type=click.IntRange(3), default=20, show_default=True, help="Timed iterations.")
@click.option("--compile", "compiled", is_flag=True, help="Time batched steps that are compiled as well.")
def batch(silos: int, records: int, device: str, dtype: str, rounds: int, compiled: bool) -> Finding:
    """Time an iteration over many silos with small networks: batched by vmap, in a loop, and the roofline."""
    import torch

    from secure_fvi_lab.bench.batch import lines, measure

    return measure(silos, records, torch.device(device), getattr(torch, dtype), rounds, compiled), lines


@bench.command()
@click.option("--device", default="cuda", show_default=True, help="cuda, or cpu to try the command itself.")
@click.option("--quick", is_flag=True, help="Small sizes: whether it works, not how fast.")
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path), required=True, help="The JSON to write.")
def gpu(device: str, quick: bool, out: Path) -> None:
    """Fit on a device and on the CPU, compare where they end, and only then time the device."""
    from secure_fvi_lab.bench.batch import report

    report(device, quick, out)


@_measuring("local-step", "step:measure_local")
@_data
@click.option("--repeats", type=click.IntRange(1), default=9, show_default=True, help="Timed blocks of each.")
def local_step() -> None:
    """Time a local step of PVI on adult, minibatches of 128, beside a step of Pyro's SVI."""


@bench.command("secure-sum")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option("--quick", is_flag=True, help="Fewer and smaller rows: some 20 s instead of some 5 minutes.")
@click.option("--plot", metavar="FILE.png", help="Draw the times into this file as well.")
@click.option("--values", type=click.IntRange(1), help="Masked sums of so many values among 11 silos alone.")
def secure_sum(as_json: bool, quick: bool, plot: str | None, values: int | None) -> None:
    """Time secure sums: plain, masked and homomorphic, beside their floor, Flower's SecAgg+ and TenSEAL alone.

    Every total is compared with NumPy's. docs/benchmarks-secure-sum.md says what is in each number.
    """
    from secure_fvi_lab.bench.secure_sum import command

    command(as_json, quick, plot, values)


@_measuring("accountants", "accountants:measure")
def accountants() -> None:
    """Epsilon of ten named jobs by every accountant, and the check values. docs/accounting.md has the table."""


@_measuring("ledger", "ledger:measure")
@click.option(
    "--releases", type=click.IntRange(1), default=2000, show_default=True, help="Charged at each block length."
)
@_folder
def ledger() -> None:
    """Time the privacy ledger: a release charged, a ledger opened and verified."""


@_measuring("matching", "matching:measure")
@click.option("--ids", type=click.IntRange(20), default=50_000, show_default=True, help="Identifiers of each silo.")
@click.option("--silos", type=click.IntRange(2), default=3, show_default=True, help="All in this process.")
def matching() -> None:
    """Time private matching, and see that exactly those people are found that all silos hold."""


@_measuring("audit-log", "ledger:measure_trail")
@click.option("--exchanges", type=click.IntRange(1), default=1000, show_default=True, help="Written down each way.")
@_folder
def audit_log() -> None:
    """Time the paper trail: an exchange written down, a log verified and compared with the server's."""


@_measuring("engine")
@click.option("--rounds", type=click.IntRange(10), default=1000, show_default=True, help="Timed rounds of each.")
@click.option("--unattended", type=click.IntRange(100), help="One masked job of so many rounds, from start to end.")
@click.option("--compile/--traced", default=True, show_default=True, help="How the silos' steps run.")
def engine(rounds: int, unattended: int | None, compile: bool) -> Finding:
    """Time a round of SFVI with three silo processes over mutual TLS, beside one process and a bare gRPC round trip."""
    from secure_fvi_lab.bench.engine import lines, measure, whole_job

    return (whole_job(unattended, compile) if unattended else measure(rounds, compile)), lines


@_measuring("privacy")
@_data
@click.option("--quick", is_flag=True, help="A quarter of the rounds.")
def privacy(data: Path | None, quick: bool) -> Finding:
    """What privacy costs on UCI Adult: ours at two epsilons, Opacus on pooled data beside it, and a step's time."""
    from secure_fvi_lab.bench.privacy import ROUNDS, lines, measure

    return measure(data, ROUNDS // 4 if quick else ROUNDS), lines


@_measuring("coverage", "coverage:measure")
@click.option("--fits", type=click.IntRange(2), default=200, show_default=True, help="Of each cell.")
@click.option("--seed", default=0, show_default=True, help="Of data, noise and draws.")
@click.option(
    "--cells",
    multiple=True,
    type=click.Choice(["default", "without", "pvi", "adult"]),
    default=("default", "without", "pvi"),
    show_default=True,
    help="Of SFVI as it is by default, without released curvature, of PVI, of UCI Adult; may be repeated.",
)
@_data
def coverage() -> None:
    """How often 95% intervals of private fits cover, the noise counted and not. docs/private-intervals.md."""


@_measuring("integrated", "integrated:measure")
@click.option("--fits", type=click.IntRange(2), default=100, show_default=True, help="Of each cell.")
@click.option("--seed", default=0, show_default=True, help="Of data, noise and draws.")
def integrated() -> None:
    """How often they cover in six cities, children's latents integrated out. docs/private-intervals.md."""


@_measuring("pvi-modes", "pvi_modes:measure")
@click.option("--fits", type=click.IntRange(2), default=50, show_default=True, help="Of each mode.")
@click.option("--seed", default=0, show_default=True, help="Of data and noise.")
@click.option("--mode", "modes", multiple=True, help="This one alone, as the table names it; may be repeated.")
@click.option("--records", type=click.IntRange(200), default=3000, show_default=True, help="Of all silos together.")
def pvi_modes() -> None:
    """How wide the intervals of each way to make PVI private are at equal epsilon, beside SFVI's. docs/pvi.md."""


@_measuring("pvi-private", "pvi_private:measure")
@click.option("--fits", type=click.IntRange(2), default=10, show_default=True, help="Of each cell.")
@click.option("--seed", default=0, show_default=True, help="Of data; noise is the operating system's.")
@click.option("--kind", "kinds", multiple=True, type=click.Choice(["linear", "logistic"]), help="This one alone.")
@click.option("--mode", "modes", multiple=True, help="This one alone, as the table names it; may be repeated.")
@click.option("--silos", "counts", type=click.IntRange(2), multiple=True, help="Instead of 3 and 10.")
def pvi_private() -> None:
    """How far whole private runs of PVI and SFVI end from the exact posterior, at equal epsilon. docs/pvi.md."""


@bench.command()
@click.option("--kills", type=click.IntRange(1), default=200, show_default=True, help="Over as many jobs as it takes.")
@click.option("--each", is_flag=True, help="So many kills of each party, in place of all together.")
@click.option(
    "--on-loss",
    type=click.Choice(["wait", "drop"]),
    default="wait",
    show_default=True,
    help="drop: four silos, of which one may be missing at a time.",
)
@click.option("--seed", default=1, show_default=True, help="Of moments and victims.")
@click.option("--kind", "kinds", multiple=True, help="Jobs of this kind alone; may be repeated.")
@click.option(
    "--engine",
    type=click.Choice(["stream", "flare"]),
    default="stream",
    show_default=True,
    help="flare: --kills of each of FLARE's processes, of the job and its parent, at a site and at the server.",
)
@click.option("--folder", type=click.Path(path_type=Path), help="Keep all parties' folders in this one, which is new.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.pass_context
def kills(
    context: click.Context,
    kills: int,
    each: bool,
    on_loss: str,
    seed: int,
    kinds: tuple[str, ...],
    engine: str,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Kill server, silos and key holder at random moments of jobs between sites, and check what the jobs find.

    Exits 1 where a job failed, hung, or ended with another posterior, ledger or log than it should have.
    docs/faults.md.
    """
    from secure_fvi_lab.bench.kills import command

    if not command(as_json, kills, on_loss, seed, kinds, folder, each, engine):
        context.exit(1)


@_measuring("records", "scale:measure_records")
@click.option("--records", type=click.IntRange(1000), default=1_000_000, show_default=True, help="Of the silo.")
@click.option("--batch", type=click.IntRange(1), default=256, show_default=True, help="Expected records of a round.")
@click.option("--latents", is_flag=True, help="Each record has a latent of its own.")
@click.option("--private", is_flag=True, help="Under record privacy.")
@click.option("--stored", is_flag=True, help="What a site between institutions keeps is written, sealed and synced.")
@click.option("--rounds", type=click.IntRange(1), default=100, show_default=True, help="Timed.")
@click.option("--by", type=click.Choice(["sfvi", "sfvi-avg", "pvi"]), default="sfvi", show_default=True)
@click.option("--local-steps", type=click.IntRange(40), default=1000, show_default=True, help="Of sfvi-avg and pvi.")
def records() -> None:
    """A round at one silo of many records, in batches: processor's time, memory, bytes written."""


@_measuring("one-process", "scale:measure_silos")
@click.option("--silos", type=click.IntRange(3), default=200, show_default=True, help="Under masked sums.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Timed.")
@click.option("--missing", type=click.IntRange(0), default=0, show_default=True, help="Silos that a sum may lack.")
def one_process() -> None:
    """A masked round of SFVI over many small silos in one process: processor's time and memory."""


@_measuring("posteriors")
@click.option("--entry", "names", multiple=True, help="Of the gallery; all by default.")
@click.option("--peers", is_flag=True, help="NumPyro's guides and NUTS beside, where it has the program.")
@click.option("--quick", is_flag=True, help="A twelfth of the local steps.")
def posteriors(names: tuple[str, ...], peers: bool, quick: bool) -> Finding:
    """Fit the gallery by default, against posteriors that are known. An hour and more for all."""
    from secure_fvi_lab.bench.posteriors import lines, measure

    return measure(names, peers, quick, functools.partial(click.echo, err=True)), lines


@_measuring("calibration")
@click.option("--model", "names", multiple=True, help="All four by default.")
@click.option("--sets", type=click.IntRange(10), default=100, show_default=True, help="Data sets of a model.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
def calibration(names: tuple[str, ...], sets: int, seed: int) -> Finding:
    """Whether true values are ranked evenly among draws of fits to data that they made. Half an hour."""
    from secure_fvi_lab.bench.calibration import lines, measure

    return measure(names, sets, seed, functools.partial(click.echo, err=True)), lines


@_measuring("glmm")
@click.option("--family", "families", multiple=True, help="Of sf.glmm; all by default, and a design is timed too.")
@click.option("--sites", multiple=True, type=click.IntRange(3), help="Numbers of sites; 3, 10 and 40 by default.")
@click.option("--draws", type=click.IntRange(50), default=1000, show_default=True, help="Of NUTS, a chain of two.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Keeps rows and references: what lies there is not measured again.",
)
@click.option("--quick", is_flag=True, help="The design alone, of a tenth of the rows.")
def glmm(families: tuple[str, ...], sites: tuple[int, ...], draws: int, folder: Path | None, quick: bool) -> Finding:
    """Fit formulas over sites of 13 to 200 records beside NUTS and meta-analysis, and time a design. An hour."""
    from secure_fvi.formula import FAMILIES
    from secure_fvi_lab.bench.glmm import lines, measure

    design = 100_000 if quick else 0 if families else 1_000_000
    chosen = () if quick else families or tuple(FAMILIES)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    return measure(chosen, sites or (3, 10, 40), draws, design, folder, functools.partial(click.echo, err=True)), lines
