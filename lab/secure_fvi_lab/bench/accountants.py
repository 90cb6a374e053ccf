"""`secure-fvi bench accountants`: ten named jobs by four accountants, whose disagreement would be an error in one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from secure_fvi.privacy.accountants import ACCOUNTANTS, epsilon
from secure_fvi.privacy.events import Composed, Event
from secure_fvi.privacy.plan import gaussian_job
from secure_fvi_lab.machine import machine

#: (job, delta) by name.
JOBS: dict[str, tuple[Event, float]] = {
    "check: Poisson, 10,000 rounds": (gaussian_job(1.0, 0.01, 10_000), 1e-5),
    "one full batch": (gaussian_job(1.0, 1.0, 1), 1e-5),
    "100 full batches": (gaussian_job(20.0, 1.0, 100), 1e-5),
    "low epsilon": (gaussian_job(4.0, 0.01, 500), 1e-6),
    "very low epsilon": (gaussian_job(2.0, 0.001, 1_000), 1e-5),
    "high epsilon": (gaussian_job(0.6, 0.1, 200), 1e-5),
    "very high epsilon": (gaussian_job(0.5, 0.5, 50), 1e-5),
    "nearly full batches": (gaussian_job(5.0, 0.9, 100), 1e-5),
    "tiny delta": (gaussian_job(1.2, 0.02, 2_000), 1e-9),
    "composed: two rates and full batches": (
        Composed((gaussian_job(1.0, 0.01, 1_000), gaussian_job(2.0, 0.05, 500), gaussian_job(8.0, 1.0, 20))),
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
        "machine": machine(),
        "versions": {name: version(name) for name in ("dp-accounting", "opacus")},
        "rows": rows,
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield "| job | delta | PLD | PRV | RDP | Opacus RDP |"
    yield "|---|---|---|---|---|---|"
    for row in found["rows"]:
        values = " | ".join(f"{row['epsilon'][name]:.4f}" for name in ("pld", "prv", "rdp", "opacus-rdp"))
        yield f"| {row['job']} | {row['delta']:.0e} | {values} |"
