"""A run killed with SIGKILL and resumed ends in the same bytes as one that was left alone."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from secure_fvi.checkpoints import latest_round

CONFIG = Path(__file__).parents[2] / "examples" / "six_cities.toml"
SETTINGS = ["algorithm.iterations=400", "algorithm.importance_samples=2", "run.checkpoint_seconds=0.05"]


def _run(out: Path, *more: str) -> subprocess.Popen[bytes]:
    options = [part for setting in SETTINGS for part in ("--set", setting)]
    code = "from secure_fvi.cli import main; main()"
    command = [sys.executable, "-c", code, "run", str(CONFIG), "--out", str(out), "--quiet", *options, *more]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


@pytest.mark.slow
def test_killed_and_resumed_ends_in_the_same_bytes(tmp_path: Path) -> None:
    """Three kills: two at moments drawn with a fixed seed after a checkpoint appears, one during the resumption."""
    assert _run(tmp_path / "whole").wait() == 0
    rng = random.Random(11)
    killed = tmp_path / "killed"
    for _ in range(3):
        before = latest_round(killed / "checkpoint")
        process = _run(killed, "--resume")
        while process.poll() is None and latest_round(killed / "checkpoint") == before:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.5))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL  # it was still at work
        assert not (killed / "result.json").exists()
    assert _run(killed, "--resume").wait() == 0
    name = "posterior.safetensors"
    assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
