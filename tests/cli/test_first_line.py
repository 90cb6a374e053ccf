"""What somebody at a terminal sees before PyTorch is there."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _first(arguments: list[str], folder: Path, terminal: bool) -> tuple[bytes, float]:
    """The first bytes on stderr, and the seconds until they came."""
    own, theirs = pty.openpty() if terminal else os.pipe()
    words = [sys.executable, "-c", "from secure_fvi.cli import main; main()", *arguments]
    began = time.monotonic()
    process = subprocess.Popen(words, cwd=folder, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    try:
        ready = select.select([own], [], [], 60)[0]
        return os.read(own, 4096) if ready else b"", time.monotonic() - began
    finally:
        process.kill()
        process.wait()
        os.close(own)


@pytest.mark.later
@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_a_command_that_loads_pytorch_says_so_first(tmp_path: Path, quiet: tuple[str, ...]) -> None:
    """At a terminal, long before PyTorch is there (a second on an idle machine; 20 here, whatever its load). The
    controls: --quiet, and a log, in which an error stays one line."""
    device = ["--set", "run.device=cuda:77"]  # which there is not: an error once PyTorch is there
    words = ["run", str(ROOT / "examples" / "six_cities.toml"), "--out", str(tmp_path / "out"), *device, *quiet]
    said, seconds = _first(words, tmp_path, terminal=True)
    assert said.startswith(b"secure-fvi: loading PyTorch") == (not quiet)
    if quiet:
        assert said.startswith(b"secure-fvi: ")
        return
    assert seconds < 20
    assert b"loading" not in _first(words, tmp_path, terminal=False)[0]
