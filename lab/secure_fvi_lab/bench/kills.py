"""Parties killed at random moments: a campaign over many short jobs, each checked once it has ended."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click

from secure_fvi.errors import InputError
from secure_fvi.runs.config import parse
from secure_fvi_lab.bench.kills_job import KINDS, Outcome, quota, run_job, table
from secure_fvi_lab.bench.replay import posterior
from secure_fvi_lab.machine import machine

_PER_JOB = 20
_PATIENCE = 300.0  # seconds in which a job has to end
_DEADLINE = 1.0  # under "drop"


def command(as_json: bool, kills: int, on_loss: str, seed: int, kinds: tuple[str, ...], folder: Path | None) -> bool:
    """Run the campaign and print it; whether every job was as it should."""
    with tempfile.TemporaryDirectory() as made:
        found = campaign(folder or Path(made), kills, on_loss, seed, kinds, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for row in found["kills"]:
            click.echo(
                f"{row['role']:8} {row['kills']:4} kills   back after {_seconds(row['median'])} median, "
                f"{_seconds(row['longest'])} at most ({row['timed']} timed)"
            )
        for row in found["jobs"]:
            click.echo(f"{row['kind']:24} {row['jobs']:3} jobs {row['kills']:4} kills   {row['right']} right")
        for fault in found["faults"]:
            click.echo(f"! {fault}")
    return not found["faults"]


def campaign(
    root: Path, kills: int, on_loss: str, seed: int, kinds: tuple[str, ...] = (), tell: Callable[[str], None] = print
) -> dict[str, Any]:
    """Jobs, one kind after the other, until `kills` kills are done. The parties' folders are made in `root`.

    Raises InputError for an unknown kind.
    """
    unknown = sorted(set(kinds) - KINDS.keys())
    if unknown:
        raise InputError(f"--kind '{unknown[0]}': must be one of {', '.join(KINDS)}")
    rng = random.Random(seed)
    names = kinds or tuple(n for n, k in KINDS.items() if on_loss == "wait" or not k.privacy)
    roles = {"server", "silo"} | ({"holder"} if any(KINDS[n].holder for n in names) else set())
    choose = quota(rng, dict.fromkeys(roles, -(-kills // 4)))
    outcomes: list[Outcome] = []

    @cache
    def reference(name: str) -> bytes:
        return posterior(parse(table(KINDS[name], "wait", 1.0), "reference"))

    for number, name in enumerate(_in_turn(names)):
        left = kills - sum(len(o.kills) for o in outcomes)
        if left <= 0 or len(outcomes) > 10 + kills:
            break
        found = run_job(
            root / f"job-{number}", name, min(left, _PER_JOB), rng, choose, on_loss, _DEADLINE, _PATIENCE, reference
        )
        outcomes.append(found)
        by = ", ".join(f"{sum(k.role == role for k in found.kills)} {role}" for role in sorted(roles))
        tell(f"{name}: kills of {by}; {found.seconds:.0f} s, {found.fault or 'right'}")
    return {
        "machine": machine(),
        "on_loss": on_loss,
        "seed": seed,
        "kills": [_of_role(role, outcomes) for role in sorted(roles)],
        "jobs": [_of_kind(name, outcomes) for name in names],
        "faults": [f"job {i}, {o.kind}: {o.fault}" for i, o in enumerate(outcomes) if o.fault],
        "seconds": sum(o.seconds for o in outcomes),
    }


def _in_turn(names: tuple[str, ...]) -> Iterator[str]:
    """One kind after the other; where there is one with a key holder, it is every third, since no other has one."""
    held = [name for name in names if KINDS[name].holder]
    others = [name for name in names if name not in held]
    if not held or not others:
        yield from itertools.cycle(names)
    plain, keyed = itertools.cycle(others), itertools.cycle(held)
    while True:
        yield from (next(plain), next(plain), next(keyed))


def _of_role(role: str, outcomes: list[Outcome]) -> dict[str, Any]:
    kills = [k for o in outcomes for k in o.kills if k.role == role]
    times = [k.seconds for k in kills if k.seconds is not None]
    return {
        "role": role,
        "kills": len(kills),
        "timed": len(times),
        "median": statistics.median(times) if times else None,
        "longest": max(times, default=None),
    }


def _of_kind(name: str, outcomes: list[Outcome]) -> dict[str, Any]:
    of = [o for o in outcomes if o.kind == name]
    return {
        "kind": name,
        "jobs": len(of),
        "kills": sum(len(o.kills) for o in of),
        "right": sum(not o.fault for o in of),
        "left_out": sum(o.left_out for o in of),
        "seconds": sum(o.seconds for o in of),
    }


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
