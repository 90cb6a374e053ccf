"""`secure-fvi bench accountants`: ten named jobs by four accountants, whose disagreement would be an error in one."""

from __future__ import annotations

import json
import platform
import time
from importlib.metadata import version
from typing import Any

import click

from secure_fvi.privacy.accounting import ACCOUNTANTS, epsilon
from secure_fvi.privacy.events import Composed, Event, Gaussian, PoissonSampled, Repeated


def _job(rate: float, noise: float, rounds: int) -> Event:
    return Repeated(PoissonSampled(rate, Gaussian(noise)), rounds)


#: (job, delta) by name.
JOBS: dict[str, tuple[Event, float]] = {
    "check: Poisson, 10,000 rounds": (_job(0.01, 1.0, 10_000), 1e-5),
    "one full batch": (_job(1.0, 1.0, 1), 1e-5),
    "100 full batches": (_job(1.0, 20.0, 100), 1e-5),
    "low epsilon": (_job(0.01, 4.0, 500), 1e-6),
    "very low epsilon": (_job(0.001, 2.0, 1_000), 1e-5),
    "high epsilon": (_job(0.1, 0.6, 200), 1e-5),
    "very high epsilon": (_job(0.5, 0.5, 50), 1e-5),
    "nearly full batches": (_job(0.9, 5.0, 100), 1e-5),
    "tiny delta": (_job(0.02, 1.2, 2_000), 1e-9),
    "composed: two rates and full batches": (
        Composed((_job(0.01, 1.0, 1_000), _job(0.05, 2.0, 500), _job(1.0, 8.0, 20))),
        1e-5,
    ),
}


def measure() -> dict[str, Any]:
    """{machine, versions, rows: [{job, delta, epsilon: {accountant: value}, seconds}]}."""
    rows = []
    for name, (event, delta) in JOBS.items():
        start = time.perf_counter()
        found = {accountant: epsilon(event, delta, accountant) for accountant in ACCOUNTANTS}
        rows.append({"job": name, "delta": delta, "epsilon": found, "seconds": time.perf_counter() - start})
    return {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "versions": {name: version(name) for name in ("dp-accounting", "opacus")},
        "rows": rows,
    }


def command(as_json: bool) -> None:
    """Print the table."""
    found = measure()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    click.echo("| job | delta | PLD | PRV | RDP | Opacus RDP |")
    click.echo("|---|---|---|---|---|---|")
    for row in found["rows"]:
        e = row["epsilon"]
        values = " | ".join(f"{e[name]:.4f}" for name in ("pld", "prv", "rdp", "opacus-rdp"))
        click.echo(f"| {row['job']} | {row['delta']:.0e} | {values} |")
