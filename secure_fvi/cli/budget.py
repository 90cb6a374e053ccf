"""`secure-fvi budget`: plan a private job, set a site's budget, check its ledger, report what was spent."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from secure_fvi.errors import InputError, visible
from secure_fvi.files import read_bytes, write_bytes

if TYPE_CHECKING:
    from secure_fvi.privacy.events import Event
    from secure_fvi.privacy.plan import MakeJob, Plan
    from secure_fvi.privacy.report import Report

# ---- `secure-fvi budget set` and `verify`: a site's budget, and whether its ledger is what it was ----


@click.command("set")
@click.argument("ledger", type=click.Path(path_type=Path))
@click.option("--silo", required=True, help="Whose ledger.")
@click.option(
    "--data-set", required=True, help="The population that the budget protects, as the site's policy names it."
)
@click.option("--epsilon", required=True, type=float, help="What all jobs on it may spend together.")
@click.option("--delta", required=True, type=float, help="Below 1 / number of records.")
@click.option("--unit", type=click.Choice(["record", "silo"]), default="record", show_default=True, help="Protected.")
@click.option("--records", type=click.IntRange(1), help="Size of the population; warns when delta is too large for it.")
def set_budget(
    ledger: Path, silo: str, data_set: str, epsilon: float, delta: float, unit: str, records: int | None
) -> None:
    """Set, raise or lower a data set's budget in LEDGER; what was spent stays spent.

    Makes ledger and signing key where there are none. The key (LEDGER.keys/SILO.pem) is encrypted when
    SECURE_FVI_PASSPHRASE is set.
    """
    from secure_fvi.key_files import key_path
    from secure_fvi.privacy.ledger import Budget, Ledger

    budget = Budget(data_set, epsilon, delta, unit)
    opened = Ledger.open(ledger, silo, create=True)
    try:
        opened.set_budget(budget, records)
        chain = opened.chain
    finally:
        opened.close()
    click.echo(f"silo '{silo}', data set '{data_set}': {budget}")
    click.echo(f"row {chain.length}, {chain.head.hex()}; public key {key_path(ledger, silo).with_suffix('.pub')}")


@click.command()
@click.argument("ledger", type=click.Path(path_type=Path))
@click.option("--silo", help="Check this silo's chain only.")
@click.option("--public-key", type=click.Path(path_type=Path), help="The silo's .pub file, from where you trust it.")
@click.option(
    "--receipts", multiple=True, type=click.Path(path_type=Path), help="A witness's receipt; may be repeated."
)
@click.option("--witness-key", multiple=True, type=click.Path(path_type=Path), help="Witness's .pub; may be repeated.")
def verify(
    ledger: Path,
    silo: str | None,
    public_key: Path | None,
    receipts: tuple[Path, ...],
    witness_key: tuple[Path, ...],
) -> None:
    """Check every row of LEDGER: hashes, signatures, order, budgets, counts. Exits 1 and names the first bad row.

    Rows that were cut off at the end are found with receipts of witnesses only.
    """
    from secure_fvi.deployment.names import printable
    from secure_fvi.key_files import load_public_key
    from secure_fvi.privacy.ledger_account import verify as check

    shown = [read_bytes(path, "the receipt") for path in receipts]
    pinned = None if public_key is None else load_public_key(public_key)
    accepted = [load_public_key(path) for path in witness_key] or None
    for chain in check(ledger, silo, pinned, shown, accepted):
        click.echo(
            f"silo '{printable(chain.silo)}': {chain.length} rows, {len(chain.jobs)} jobs, head {chain.head.hex()}"
        )
        click.echo(f"  key {chain.public_key.hex()}" + ("" if pinned else " (not pinned)"))
    click.echo(f"verified, against {len(shown)} {'receipt' if len(shown) == 1 else 'receipts'}")


@click.group()
def budget() -> None:
    """Privacy budgets: plan jobs, set what a site allows, verify and report what was spent."""


budget.add_command(set_budget)
budget.add_command(verify)


@budget.command()
@click.option("--epsilon", type=float, help="What the whole job may cost.")
@click.option("--delta", type=float, required=True, help="Well below 1 / number of records.")
@click.option("--sampling-rate", type=float, help="Chance that a record joins a round's batch; 1: all do.")
@click.option("--rounds", type=int, help="Releases of the job.")
@click.option("--noise-multiplier", type=float, help="Noise's standard deviation over the clipping norm.")
@click.option("--unit", type=click.Choice(["record", "silo"]), default="record", show_default=True, help="Protected.")
@click.option(
    "--accountant",
    type=click.Choice(["ledger", "rdp", "opacus-rdp", "prv", "pld"]),
    default="ledger",
    show_default=True,
    help="ledger: what a run takes and a ledger charges. The others tell what tighter accounting would say.",
)
@click.option(
    "--noise",
    type=click.Choice(["silo", "distributed", "server"]),
    help="Who adds the noise. Left out: as of a run by default, distributed.",
)
@click.option("--silos", type=int, help="Silos in a round.")
@click.option("--dropouts", type=int, default=0, show_default=True, help="Silos that a round may lose.")
@click.option("--colluders", type=int, default=1, show_default=True, help="Silos whose noise is not counted on.")
@click.option("--retries", type=int, default=20, show_default=True, help="Sums held in reserve, charged like rounds.")
@click.option("--dimension", type=int, default=1000, show_default=True, help="Numbers in a release (distributed).")
@click.option("--records", type=int, help="Size of the population; warns when delta is too large for it.")
@click.option(
    "--linked",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Records of one person at most, as in so many silos; epsilon and delta are then of all of them.",
)
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def plan(dimension: int, records: int | None, form: str, **asked: Any) -> None:
    """Solve for the one of epsilon, sampling rate, rounds and noise multiplier that is left out.

    The answer is on the safe side: its epsilon is at most the one asked for. It is what a run of these numbers uses and
    what the ledger of a data set on which nothing was spent yet charges, retries included.
    """
    _solve(Asked(**asked), dimension, records, form)


@budget.command()
@click.argument("ledger", type=click.Path(path_type=Path))
@click.option("--silo", help="Whose chain, where LEDGER holds several.")
@click.option("--data-set", help="Which data set, where the silo has several.")
@click.option("--format", "form", type=click.Choice(["text", "json", "html"]), default="text", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write to this file.")
def report(
    ledger: Path,
    silo: str | None,
    data_set: str | None,
    form: str,
    out: Path | None,
) -> None:
    """Say what was spent of a data set's budget in LEDGER, what is left, and what that does not cover."""
    from secure_fvi.privacy.report import read_report

    report = read_report(ledger, silo, data_set)
    text = _render(report, form)
    if out is None:
        # What a ledger says may be another's, and a page is not made for terminals.
        click.echo("\n".join(map(visible, text.split("\n"))), nl=False)
        return
    write_bytes(out, text.encode())


# ---- What `plan` prints ----


class Asked(NamedTuple):
    """The options of the command, None where left out."""

    epsilon: float | None
    delta: float
    sampling_rate: float | None
    rounds: int | None
    noise_multiplier: float | None
    unit: str
    accountant: str
    noise: str | None
    silos: int | None
    dropouts: int
    colluders: int
    retries: int
    linked: int


def _solve(asked: Asked, dimension: int, records: int | None, form: str) -> None:
    """Solve and print. Raises InputError for numbers out of range and for options that contradict each other."""
    from secure_fvi.privacy.accountants import of_each
    from secure_fvi.privacy.ledger_terms import warn_of_large_delta
    from secure_fvi.privacy.plan import plan

    placement = _placement(asked, dimension)
    if asked.retries < 0:
        raise InputError(f"--retries must be at least 0, not {asked.retries}")
    if asked.noise == "distributed" and asked.accountant not in ("ledger", "rdp"):
        raise InputError(
            f"distributed noise is Skellam noise on vectors, for which '{asked.accountant}' has no bound; "
            "use ledger or rdp"
        )
    whole, together = asked, _together(asked)
    if asked.linked > 1 and not together:
        if asked.epsilon is None:
            raise InputError("--linked divides an epsilon among a person's records of a sample: give --epsilon")
        each = of_each(asked.epsilon, asked.delta, asked.linked)
        asked = asked._replace(epsilon=each[0], delta=each[1])
    rate = asked.sampling_rate
    if asked.unit == "silo":
        if rate is not None and rate != 1:
            raise InputError("a silo takes part in every round: leave --sampling-rate out or give 1")
        rate = 1.0
    found = plan(
        delta=asked.delta,
        epsilon=asked.epsilon,
        noise_multiplier=asked.noise_multiplier,
        sampling_rate=rate,
        rounds=asked.rounds,
        accountant=asked.accountant,
        retries=asked.retries,
        make=_make(asked, dimension),
    )
    if records is not None and asked.unit == "record":
        warn_of_large_delta(found.delta, records)
    spread = _spread(asked, found.noise_multiplier)
    if form == "json":
        by = {"by": "noise for all of them" if together else "group privacy"}
        result = {
            **asdict(found),
            "unit": asked.unit,
            "retries": asked.retries,
            "best_guess": found.best_guess,
            **placement,
            **spread,
            **({"linked": {"records": whole.linked, "delta": whole.delta, **by}} if whole.linked > 1 else {}),
        }
        click.echo(json.dumps(result, indent=2))
    else:
        click.echo(_text(found, asked, spread))
        if together:
            click.echo(
                f"Of someone with up to {whole.linked} records, as in so many silos: give a run these with linked = "
                f"{whole.linked}."
            )
        elif whole.linked > 1:
            click.echo(
                f"Of one record: give a run these. Someone with up to {whole.linked} of them, as in so many silos, has "
                f"epsilon {whole.epsilon:g} at delta {whole.delta:g} in all, by group privacy."
            )
        if _on_the_lattice(asked):
            click.echo(f"The noise is that of releases of {dimension:,} numbers (--dimension); longer ones need more.")


def _placement(asked: Asked, dimension: int) -> dict[str, Any]:
    if asked.noise == "distributed" and asked.silos is None:
        raise InputError("distributed noise is planned for a number of silos: give --silos")
    for name, value in (("silos", asked.silos), ("dropouts", asked.dropouts), ("colluders", asked.colluders)):
        if value is not None and value < (1 if name == "silos" else 0):
            raise InputError(f"--{name} must be at least {1 if name == 'silos' else 0}, not {value}")
    if asked.rounds is not None and asked.rounds < 1:
        raise InputError(f"--rounds must be at least 1, not {asked.rounds}")
    if dimension < 1:
        raise InputError(f"--dimension must be at least 1, not {dimension}")
    placed = {} if asked.noise is None else {"noise": asked.noise, "silos": asked.silos}
    return placed | ({"dimension": dimension} if _on_the_lattice(asked) else {})


def _on_the_lattice(asked: Asked) -> bool:
    """Whether it is Skellam noise that is planned, as a run takes it unless told otherwise: wide releases need more."""
    return asked.noise == "distributed" or (asked.noise is None and asked.accountant in ("ledger", "rdp"))


def _together(asked: Asked) -> bool:
    """Whether the noise is made for all of a person's records, as runs make it where each round takes all records."""
    return asked.linked > 1 and asked.unit == "record" and asked.sampling_rate == 1


def _honest(asked: Asked) -> int:
    assert asked.silos is not None
    return asked.silos - asked.dropouts - asked.colluders


def _make(asked: Asked, dimension: int) -> MakeJob:
    from secure_fvi.privacy.plan import gaussian_job

    records = asked.linked if _together(asked) else 1
    if not _on_the_lattice(asked):
        return lambda noise_multiplier, *how: gaussian_job(noise_multiplier / records, *how)
    from secure_fvi.privacy.settings import RecordDP, SiloDP
    from secure_fvi.privacy.terms import Extent, agree

    kind = RecordDP if asked.unit == "record" else SiloDP
    silos = asked.dropouts + asked.colluders + 1 if asked.silos is None else asked.silos  # the event is that of any

    def make(noise_multiplier: float, sampling_rate: float, rounds: int) -> Event:
        settings = kind(
            noise_multiplier=noise_multiplier,
            delta=asked.delta,
            noise="distributed",
            dropouts=asked.dropouts,
            colluders=asked.colluders,
            retries=0,  # `plan` adds them
        )
        if isinstance(settings, RecordDP):
            settings = replace(settings, linked=records)
        return agree(settings, silos, sampling_rate, rounds, Extent(dimension, 0, 0)).job

    return make


def _spread(asked: Asked, noise_multiplier: float) -> dict[str, Any]:
    """What one silo adds and what a complete sum carries, both as noise multipliers."""
    if asked.noise == "distributed":
        share = noise_multiplier / math.sqrt(_honest(asked))
        assert asked.silos is not None
        return {
            "dropouts": asked.dropouts,
            "colluders": asked.colluders,
            "honest_survivors": _honest(asked),
            "share_multiplier": share,
            "sum_multiplier": share * math.sqrt(asked.silos),
        }
    if asked.noise == "silo" and asked.silos is not None:
        return {"share_multiplier": noise_multiplier, "sum_multiplier": noise_multiplier * math.sqrt(asked.silos)}
    if asked.noise == "server":
        return {"sum_multiplier": noise_multiplier}
    return {}


def _text(found: Plan, asked: Asked, spread: dict[str, Any]) -> str:
    mark = {
        name: "  <- solved for"
        for name in ("epsilon", "noise_multiplier", "sampling_rate", "rounds")
        if getattr(asked, name) is None and not (name == "sampling_rate" and asked.unit == "silo")
    }

    def line(label: str, name: str, value: str) -> str:
        return f"  {label:17} {value}{mark.get(name, '')}"

    reserve = f" and {asked.retries} retries" if asked.retries else ""
    lines = [
        f"A job that protects each {asked.unit} (one added or removed):",
        line("epsilon", "epsilon", f"{found.epsilon:.6g}"),
        line("delta", "delta", f"{found.delta:.6g}"),
        line("noise multiplier", "noise_multiplier", f"{found.noise_multiplier:.6g}"),
        line("sampling rate", "sampling_rate", f"{found.sampling_rate:.6g}"),
        line("rounds", "rounds", f"{found.rounds}"),
        line("accountant", "accountant", found.accountant),
        "",
        f"Each round adds noise with a standard deviation of {found.noise_multiplier:.4g} clipping norms "
        f"and, seen alone, costs epsilon {found.release_epsilon:.4g}.",
        f"All {found.rounds} rounds{reserve} together: someone who gives even odds to a {asked.unit} being in the "
        "data, and guesses whether it is from all that is released, "
        f"is right at most {found.best_guess:.1%} of the time.",
    ]
    if asked.noise == "distributed":
        lines.append(
            f"Each of {asked.silos} silos adds {spread['share_multiplier']:.4g} clipping norms; "
            f"{spread['honest_survivors']} honest survivors are counted on, and a complete sum carries "
            f"{spread['sum_multiplier']:.4g}."
        )
    elif "share_multiplier" in spread:
        lines.append(
            f"Each of {asked.silos} silos adds all of it; their sum carries {spread['sum_multiplier']:.4g} "
            "clipping norms."
        )
    elif asked.noise == "server":
        lines.append("The server adds it and is trusted with the sums before that.")
    if found.sampling_rate < 1:
        lines.append("The sampling counts only against parties who cannot see which records joined a round.")
    return "\n".join(lines)


# ---- What `report` prints ----


def _render(report: Report, form: str) -> str:
    from secure_fvi.privacy.report import report_html, report_text

    if form == "json":
        return json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n"
    return report_html(report) if form == "html" else report_text(report)
