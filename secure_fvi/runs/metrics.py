"""metrics.jsonl: how the run went, one line every so many rounds."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from secure_fvi.driving import Progress
from secure_fvi.files import write_atomically

#: Rounds between two lines, and the span that a line's mean objective covers.
INTERVAL = 50


class MetricsLog:
    """Appends to `path`: round, objective (mean over the interval, nats; null: not released), learning_rate, r_hat,
    phase, cohort (silos in the last sum), bytes_up and bytes_down (totals over all silos) and seconds, both over all
    pieces of a resumed run.
    """

    def __init__(self, path: Path, resumed_from: int = 0) -> None:
        """Lines of rounds after `resumed_from` are dropped: the run will write them again."""
        self.path = path
        kept = [row for row in read_metrics(path) if row["round"] <= resumed_from]
        if path.exists():
            write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        last = kept[-1] if kept else {}
        self._seconds_before = last.get("seconds", 0.0)
        self._began = time.monotonic()
        self._objectives: list[float] = []
        self._file = path.open("a", encoding="utf-8")

    def add(self, progress: Progress) -> bool:
        """Take note of a round; true when that ended an interval and a line was written."""
        self._objectives.append(progress.objective)
        if progress.round % INTERVAL:
            return False
        self._write(progress)
        return True

    def _write(self, progress: Progress) -> None:
        mean = sum(self._objectives) / len(self._objectives)
        row = {
            "round": progress.round,
            "objective": mean if math.isfinite(mean) else None,
            "learning_rate": progress.learning_rate,
            "r_hat": progress.r_hat,
            "phase": progress.phase,
            "cohort": progress.cohort,
            "bytes_up": progress.bytes_up,
            "bytes_down": progress.bytes_down,
            "seconds": round(self._seconds_before + time.monotonic() - self._began, 3),
        }
        self._objectives.clear()
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self, last: Progress | None) -> None:
        """Write what the last interval holds so far."""
        if self._objectives and last is not None:
            self._write(last)
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; a line that a crash tore ends them. No file, no rows."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows
