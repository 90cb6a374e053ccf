"""docs/provisioning.md, followed to the letter: its commands run as they stand, in order, in one shell."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import run_page

JOB = """
[model]
program = "six-cities"

[partition]
ids = ["north", "south", "east"]
count = 3
"""


@pytest.mark.slow
def test_the_page_works_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    done = run_page("provisioning.md", tmp_path, 600, 7)
    assert done.returncode == 0, done.stderr
    assert "roster signed by all, certificate in force" in done.stdout
    assert "data sets: cohort" in done.stdout
    assert done.stdout.count("is in force: signed by east, hub, north, south") == 4
    assert "PRIVATE" not in done.stdout + done.stderr
