"""What the machine of a measurement is called."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """The processor's model, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
