"""What the machine of a measurement is called, of which code it is, and how many milliseconds."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def processor() -> str:
    """The processor's model, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def machine() -> str:
    """Processor, cores, and torch with its threads, in one line."""
    import torch

    return f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads"


def commit() -> str | None:
    """Of the checkout that this runs from, None where it is none; ends in "+" where files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        asked = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return (asked.stdout.strip() + ("+" if changed.stdout else "")) or None


def milliseconds(found: dict[str, Any]) -> Iterator[str]:
    """Lines of what a benchmark found: its `machine`, and `ms` by name."""
    yield found["machine"]
    for name, ms in found["ms"].items():
        yield f"{name:44} {ms:9.4f} ms"
