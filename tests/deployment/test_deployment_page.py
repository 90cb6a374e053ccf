"""docs/deployment.md, followed to the letter on one machine: a user and a network namespace for each institution."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pages import run_page

from secure_fvi.models.six_cities import load

SITES = ("hub", "north", "south", "east")


def _can() -> bool:
    """Whether this process may make network namespaces, and other users may run this Python."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("setpriv"):
        return False
    user = ["setpriv", "--reuid", "21001", "--regid", "21001", "--clear-groups"]
    if subprocess.run([*user, sys.executable, "-c", ""], capture_output=True, check=False, cwd="/").returncode != 0:
        return False
    made = subprocess.run(["ip", "netns", "add", "fvi-probe"], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", "fvi-probe"], capture_output=True, check=False)
    return made


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that other users may enter: pytest's own are for one user."""
    path = Path(tempfile.mkdtemp(prefix="fvi-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
    for site in SITES:
        subprocess.run(["ip", "netns", "del", f"fvi-{site}"], capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(not _can(), reason="needs root, ip, setpriv, and a Python that all may run")
def test_the_page_works_as_it_stands(folder: Path) -> None:
    records = load().records
    for j, site in enumerate(SITES[1:]):
        np.savez(folder / f"{site}.npz", **{name: v[j::3].numpy() for name, v in records.items()})
    done = run_page("deployment.md", folder, 900, 6)
    logs = "\n".join(p.read_text()[-2000:] for p in folder.glob("*.log"))
    assert done.returncode == 0, done.stderr[-3000:] + logs
    result = json.loads((folder / "hub" / "run" / "result.json").read_text())
    assert result["rounds"] == 400
    assert result["silos"] == ["east", "north", "south"]
    status = json.loads((folder / "north-status.json").read_text())
    assert [job["state"] for job in status["jobs"]] == ["finished"]
    assert done.stdout.count("' agree on ") == 3
    assert "PRIVATE" not in done.stdout + done.stderr
