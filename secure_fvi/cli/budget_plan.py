"""The work behind `secure-fvi budget plan`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any, NamedTuple

import click

from secure_fvi.errors import InputError
from secure_fvi.privacy.events import Event
from secure_fvi.privacy.ledger_terms import warn_of_large_delta
from secure_fvi.privacy.plan import MakeJob, Plan, gaussian_job, plan


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


def command(asked: Asked, dimension: int, records: int | None, form: str) -> None:
    """Solve and print. Raises InputError for numbers out of range and for options that contradict each other."""
    placement = _placement(asked, dimension)
    if asked.retries < 0:
        raise InputError(f"--retries must be at least 0, not {asked.retries}")
    if asked.noise == "distributed" and asked.accountant not in ("ledger", "rdp"):
        raise InputError(
            f"distributed noise is Skellam noise on vectors, for which '{asked.accountant}' has no bound; "
            "use ledger or rdp"
        )
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
        result = {
            **asdict(found),
            "unit": asked.unit,
            "retries": asked.retries,
            "best_guess": found.best_guess,
            **placement,
            **spread,
        }
        click.echo(json.dumps(result, indent=2))
    else:
        click.echo(_text(found, asked, spread))
        if _on_the_lattice(asked):
            click.echo(f"The noise is that of releases of {dimension:,} numbers (--dimension); longer ones need more.")


def _placement(asked: Asked, dimension: int) -> dict[str, Any]:
    if asked.noise == "distributed" and asked.silos is None:
        raise InputError("distributed noise is planned for a number of silos: give --silos")
    for name, value in (("silos", asked.silos), ("dropouts", asked.dropouts), ("colluders", asked.colluders)):
        if value is not None and value < (1 if name == "silos" else 0):
            raise InputError(f"--{name} must be at least {1 if name == 'silos' else 0}, not {value}")
    if dimension < 1:
        raise InputError(f"--dimension must be at least 1, not {dimension}")
    placed = {} if asked.noise is None else {"noise": asked.noise, "silos": asked.silos}
    return placed | ({"dimension": dimension} if _on_the_lattice(asked) else {})


def _on_the_lattice(asked: Asked) -> bool:
    """Whether it is Skellam noise that is planned, as a run takes it unless told otherwise: wide releases need more."""
    return asked.noise == "distributed" or (asked.noise is None and asked.accountant in ("ledger", "rdp"))


def _honest(asked: Asked) -> int:
    assert asked.silos is not None
    return asked.silos - asked.dropouts - asked.colluders


def _make(asked: Asked, dimension: int) -> MakeJob:
    if not _on_the_lattice(asked):
        return gaussian_job
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
