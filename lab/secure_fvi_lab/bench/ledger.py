"""What is kept costs: a release charged in the privacy ledger, a ledger verified; an exchange in the paper trail.

Releases are charged in one row each or in blocks, exchanges written down in groups or one by one.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment import trail, trail_verify
from secure_fvi.deployment.trail import Exchange, JobEntry, Trail
from secure_fvi.errors import InputError
from secure_fvi.privacy.events import Gaussian
from secure_fvi.privacy.ledger import Budget, Job, Ledger, OpenJob, Term
from secure_fvi.privacy.ledger_account import verify
from secure_fvi_lab.machine import milliseconds as lines
from secure_fvi_lab.machine import processor

__all__ = ["lines", "measure", "measure_trail"]

_BLOCKS = (1, 16, 256)
_BYTES = 100_000  # of a message in the paper trail


def measure(releases: int, folder: Path | None) -> dict[str, Any]:
    """Milliseconds: the mean of a release by block (the fsync of its block shared), the median of the rest."""
    ms: dict[str, float] = {}
    with _within(folder) as scratch:
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


def _within(folder: Path | None) -> tempfile.TemporaryDirectory[str]:
    if folder is not None and not folder.is_dir():
        raise InputError(f"--folder '{folder}' is no folder")
    return tempfile.TemporaryDirectory(dir=folder)


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


def measure_trail(exchanges: int, folder: Path | None) -> dict[str, Any]:
    """Milliseconds; messages of 100 KB each way, whose hashing is in the numbers."""
    ms: dict[str, float] = {}
    message = os.urandom(_BYTES)
    entry = JobEntry("bench", bytes(32), bytes(32), bytes(32), bytes(32), True)
    with _within(folder) as scratch:
        files = {name: Path(scratch) / f"{name}.sqlite" for name in ("site", "server")}
        logs = {name: Trail.open(path, name, Identity(), create=True) for name, path in files.items()}
        for log in logs.values():
            log.job(entry)
        grouped = trail.SYNC_ROWS
        for name, rows in ((f"an exchange, forced every {grouped}", grouped), ("an exchange, forced each time", 1)):
            trail.SYNC_ROWS = rows
            times = []
            for i in range(exchanges):
                request = b"%d/%d" % (rows, i) + message
                began = time.perf_counter()
                logs["site"].exchanges("bench", [Exchange("server", "bench", request, message, "bench 0")])
                times.append(time.perf_counter() - began)
                logs["server"].exchanges("bench", [Exchange("site", "bench", message, request)])
            ms[f"{name}: mean"] = statistics.fmean(times) * 1e3
            ms[f"{name}: median"] = statistics.median(times) * 1e3
        trail.SYNC_ROWS = grouped
        began = time.perf_counter()
        logs["server"].exchanges(
            "bench", [Exchange(f"s{i}", "bench", bytes([i]) + message, message) for i in range(50)]
        )
        ms["a server's exchange with 50 sites"] = (time.perf_counter() - began) * 1e3
        for log in logs.values():
            log.close()
        began = time.perf_counter()
        length = trail_verify.verify(files["site"]).length
        ms[f"verify {length} rows"] = (time.perf_counter() - began) * 1e3
        began = time.perf_counter()
        trail_verify.compare(files["site"], files["server"])
        ms[f"compare {length} rows with the server's"] = (time.perf_counter() - began) * 1e3
    return {"machine": f"{processor()}, {os.cpu_count()} cores", "exchanges": exchanges, "ms": ms}
