"""What the paper trail costs: an exchange written down in groups or one by one, a log opened and verified."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment import trail
from secure_fvi.deployment.trail import Exchange, JobEntry, Trail
from secure_fvi.deployment.trail_verify import compare, verify
from secure_fvi.errors import InputError
from secure_fvi_lab.machine import milliseconds as lines
from secure_fvi_lab.machine import processor

__all__ = ["lines", "measure"]

_BYTES = 100_000


def measure(exchanges: int, folder: Path | None) -> dict[str, Any]:
    """Milliseconds; messages of 100 KB each way, whose hashing is in the numbers."""
    if folder is not None and not folder.is_dir():
        raise InputError(f"--folder '{folder}' is no folder")
    ms: dict[str, float] = {}
    message = os.urandom(_BYTES)
    entry = JobEntry("bench", bytes(32), bytes(32), bytes(32), bytes(32), True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
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
        length = verify(files["site"]).length
        ms[f"verify {length} rows"] = (time.perf_counter() - began) * 1e3
        began = time.perf_counter()
        compare(files["site"], files["server"])
        ms[f"compare {length} rows with the server's"] = (time.perf_counter() - began) * 1e3
    return {"machine": f"{processor()}, {os.cpu_count()} cores", "exchanges": exchanges, "ms": ms}
