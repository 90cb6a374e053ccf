"""What the tests of the ledger share: a ledger in a folder, a job, and hands that tamper with the file."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from secure_fvi.privacy.events import Event, Gaussian
from secure_fvi.privacy.ledger import Budget, Job, Ledger, Term

BUDGET = Budget("adult", 1.0, 1e-5)


def gaussian_job(name: str = "job", noise: float = 60.0, count: int = 100, data_set: str = "adult", **more: Any) -> Job:
    return job_of(name, ("gradient", Gaussian(noise), count), data_set=data_set, **more)


def job_of(name: str, *terms: tuple[str, Event, int], data_set: str = "adult", **more: Any) -> Job:
    return Job(name, data_set, more.pop("unit", "record"), 1e-5, tuple(Term(*t) for t in terms), **more)


def new_ledger(folder: Path, silo: str = "a", budget: Budget | None = BUDGET, **more: Any) -> Ledger:
    ledger = Ledger.open(folder / "ledger.sqlite", silo, create=True, **more)
    if budget is not None:
        ledger.set_budget(budget)
    return ledger


def tamper(folder: Path, *statements: str) -> None:
    """Change the file behind the ledger's back."""
    connection = sqlite3.connect(folder / "ledger.sqlite")
    with connection:
        for statement in statements:
            assert connection.execute(statement).rowcount != 0
    connection.close()


class Clock:
    """A clock that the test turns. Seconds since 1970."""

    def __init__(self, now: float = 1.8e9) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
