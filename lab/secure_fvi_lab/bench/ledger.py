"""What the privacy ledger costs: a release charged, one row each or in blocks; a ledger opened and verified."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from secure_fvi.errors import InputError
from secure_fvi.privacy.events import Gaussian
from secure_fvi.privacy.ledger import Budget, Job, Ledger, OpenJob, Term
from secure_fvi.privacy.ledger_account import verify
from secure_fvi_lab.machine import milliseconds as lines
from secure_fvi_lab.machine import processor

__all__ = ["lines", "measure"]

_BLOCKS = (1, 16, 256)


def measure(releases: int, folder: Path | None) -> dict[str, Any]:
    """Milliseconds: the mean of a release by block (the fsync of its block shared), the median of the rest."""
    if folder is not None and not folder.is_dir():
        raise InputError(f"--folder '{folder}' is no folder")
    ms: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path = Path(scratch) / "ledger.sqlite"
        ledger = Ledger.open(path, "a", create=True)
        began = time.perf_counter()
        jobs = [(block, _open_job(ledger, block, releases)) for block in _BLOCKS]
        ms["open_job, the accountant's start included"] = (time.perf_counter() - began) / len(jobs) * 1e3
        for block, job in jobs:
            began = time.perf_counter()
            for index in range(releases):
                job.charge("gradient", index, index.to_bytes(32, "little"))
            ms[f"charge, block {block}"] = (time.perf_counter() - began) / releases * 1e3
        ms["the disk alone: append 300 bytes and fsync"] = _fsync(Path(scratch) / "plain")
        rows = ledger.chain.length
        ms[f"open a ledger of {rows} rows"] = _median(lambda: Ledger.open(path, "a").close())
        ms[f"verify {rows} rows"] = _median(lambda: verify(path))
        ledger.close()
    return {"machine": f"{processor()}, {os.cpu_count()} cores", "releases": releases, "ms": ms}


def _open_job(ledger: Ledger, block: int, releases: int) -> OpenJob:
    terms = (Term("gradient", Gaussian(1e4), releases),)
    job = Job(f"block {block}", "data", "record", 1e-5, terms)
    return ledger.open_job(job, default_budget=Budget("data", 10.0, 1e-5), block=block)


def _fsync(path: Path) -> float:
    with path.open("ab", buffering=0) as file:

        def once() -> None:
            file.write(bytes(300))
            os.fsync(file.fileno())

        return _median(once, 200)


def _median(action: Any, times: int = 5) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e3
