"""docs/provisioning.md, followed to the letter: its commands run as they stand, in order, in one shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "provisioning.md"
JOB = """
[model]
program = "six-cities"

[partition]
ids = ["north", "south", "east"]
count = 3
"""


@pytest.mark.slow
def test_the_page_works_as_it_stands(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 7
    (tmp_path / "job.toml").write_text(JOB)
    environment = {k: v for k, v in os.environ.items() if k != "SECURE_FVI_HOME"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "roster signed by all, certificate in force" in done.stdout
    assert "data sets: cohort" in done.stdout
    assert done.stdout.count("is in force: signed by east, hub, north, south") == 4
    assert "PRIVATE" not in done.stdout + done.stderr
