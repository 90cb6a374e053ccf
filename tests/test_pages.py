"""Pages of the documentation, run as they stand from a clean folder: every `sh` and `python` block, in order.

A page's `sh` blocks are one shell (`bash -euo pipefail`), its `python` blocks one program. A page with either is run
here, or named below with the reason why not; `toml` blocks are read. Blocks without a language are not run: commands
that need minutes, files of the reader's own, or are output.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {str(p.relative_to(ROOT)): p for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]}
#: Seconds each.
QUICK = ("README.md", "docs/fedavg.md", "docs/ledger.md", "docs/vertical-alignment.md")
#: Up to minutes each, on two cores shared with other work.
SLOW = (
    "docs/baselines.md",
    "docs/models.md",
    "docs/privacy.md",
    "docs/provisioning.md",
    "docs/pvi.md",
    "docs/sfvi-avg.md",
    "docs/vertical.md",
)
#: Run below by tests of their own, which look at what came out.
LOOKED_AT = ("docs/deployment.md", "docs/end-to-end.md")
NOT_RUN = {
    "docs/audits-data.md": "shows calls; tests/audits/test_properties.py, test_attributes.py, test_replay.py",
    "docs/audits-epsilon.md": "minutes of runs; tests/audits/test_canaries.py makes the same rows",
    "docs/audits-protocol.md": "stands for a reader's own secure sum; tests/audits/test_protocol_audit.py",
    "docs/audits.md": "stands for a reader's own model; tests/audits/test_transcript.py",
    "docs/distributed.md": "names machines that are not here; docs/deployment.md has the same commands and is run",
    "docs/fedvi.md": "stands for a client's own images; tests/algorithms/test_fedvi.py",
    "docs/flower.md": "names machines that are not here; tests/deployment/test_flower.py starts Flower",
    "docs/prodlda.md": "needs the posts of 20 Newsgroups; tests/models/test_prodlda.py",
}

#: What a page's commands print, and how often.
SAYS = {
    "docs/provisioning.md": {
        "roster signed by all, certificate in force": 1,
        "data sets: cohort": 1,
        "is in force: signed by east, hub, north, south": 4,
    },
}


def _blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def _run(page: str, folder: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """The blocks of `page` in `folder`. What it runs is the Python and the package that run the tests."""
    text = PAGES[page].read_text()
    (folder / "page.py").write_text("\n".join(_blocks(text, "python")))
    script = "\n".join([*_blocks(text, "sh"), "python page.py"])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SECURE_FVI_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    logs = "\n".join(p.read_text()[-2000:] for p in folder.glob("*.log"))
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:] + logs
    assert "PRIVATE" not in done.stdout + done.stderr
    return done


def test_every_page_is_run_or_says_why_not() -> None:
    with_code = {name for name, page in PAGES.items() if _blocks(page.read_text(), "(?:sh|python)")}
    named = [*QUICK, *SLOW, *LOOKED_AT, *NOT_RUN]
    assert sorted(named) == sorted(with_code)


@pytest.mark.parametrize("page", [name for name in PAGES if _blocks(PAGES[name].read_text(), "toml")])
def test_configuration_is_toml(page: str) -> None:
    for block in _blocks(PAGES[page].read_text(), "toml"):
        assert tomllib.loads(block)


@pytest.mark.parametrize("page", [name for name in PAGES if _blocks(PAGES[name].read_text(), "python")])
def test_python_compiles_without_names_of_nowhere(page: str) -> None:
    """Also of pages that are not run: what they import from secure_fvi is there."""
    source = "\n".join(_blocks(PAGES[page].read_text(), "python"))
    compile(source, page, "exec")
    imports = re.findall(r"^(?:from secure_fvi|import secure_fvi).*$", source, re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(imports)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_no_page_promises_a_package_on_an_index() -> None:
    """`pip install secure-fvi` would fetch whatever another put there: there is no such release."""
    for name, page in PAGES.items():
        assert not re.search(r"pip install '?secure-fvi", page.read_text()), name


@pytest.mark.parametrize("page", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_page_runs_as_it_stands(page: str, tmp_path: Path) -> None:
    done = _run(page, tmp_path, 900)
    for text, times in SAYS.get(page, {}).items():
        assert done.stdout.count(text) == times


@pytest.mark.slow
def test_end_to_end(tmp_path: Path) -> None:
    """From a Pyro function to a deployed run under a budget, and evidence."""
    done = _run("docs/end-to-end.md", tmp_path, 900)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["rounds"], result["silos"]) == (400, ["east", "north", "south"])
    assert result["privacy"]["epsilon"] <= 3.0
    assert not (tmp_path / "second" / "result.json").exists()
    refusals = [(tmp_path / f"{site}.second.log").read_text() for site in ("north", "south", "east")]
    assert any("the budget of data set 'data' is epsilon 3" in text for text in refusals)
    assert done.stdout.count("' agree on ") == 3
    assert (tmp_path / "audit" / "audit.html").is_file()


def _can() -> bool:
    """Whether this process may make network namespaces, and other users may run this Python."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("setpriv"):
        return False
    # `env` between them, as on the page: setpriv itself still has root's capabilities when it looks for the program.
    user = ["setpriv", "--reuid", "21001", "--regid", "21001", "--clear-groups", "env"]
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
    for site in ("hub", "north", "south", "east"):
        subprocess.run(["ip", "netns", "del", f"fvi-{site}"], capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.skipif(not _can(), reason="needs root, ip, setpriv, and a Python that all may run")
def test_deployment(folder: Path) -> None:
    """A user and a network namespace for each institution; the page's own job converges."""
    done = _run("docs/deployment.md", folder, 900)
    result = json.loads((folder / "hub" / "run" / "result.json").read_text())
    assert result["converged"] is True
    assert result["silos"] == ["east", "north", "south"]
    status = json.loads((folder / "north-status.json").read_text())
    assert [job["state"] for job in status["jobs"]] == ["finished, converged"]
    assert done.stdout.count("' agree on ") == 3
