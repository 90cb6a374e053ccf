"""What a release is: a wheel that anybody builds again to the same bytes, and a signature over its hash."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import secure_fvi

ROOT = Path(__file__).parents[1]


def test_the_version_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "secure_fvi.__version__"}
    assert f"version: {secure_fvi.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    assert lab["version"] == secure_fvi.__version__
    assert lab["dependencies"][0].endswith(f"=={secure_fvi.__version__}")
    changes = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert any(line.split()[0] == secure_fvi.__version__ for line in changes)


def _checkout(place: Path, moment: int) -> Path:
    """The tracked files, written at another moment with other modes."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, names)):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, place / name, follow_symlinks=False)
        if not (place / name).is_symlink():
            os.utime(place / name, (moment, moment))
    return place


def _wheel(checkout: Path, epoch: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
    subprocess.run(command, cwd=checkout, env=environment, check=True, umask=0o022, timeout=600)
    (made,) = (checkout / "out").glob("*.whl")
    return made


@pytest.mark.slow
def test_a_wheel_built_twice_is_the_same(tmp_path: Path) -> None:
    """In two folders, of files written at two moments. The control is another time of the commit."""
    first, second = (
        _checkout(tmp_path / name, at) for name, at in (("one", 1_700_000_000), ("two/deeper", 1_600_000_000))
    )
    wheels = [_wheel(first, "1750000000"), _wheel(second, "1750000000")]
    assert wheels[0].name == wheels[1].name
    assert wheels[0].name.startswith(f"secure_fvi-{secure_fvi.__version__}-")
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels]
    assert hashes[0] == hashes[1]
    with zipfile.ZipFile(wheels[0]) as held:
        names = held.namelist()
    assert {"secure_fvi/privacy/gate.py", "secure_fvi/models/six_cities_counts.csv", "secure_fvi/py.typed"} <= set(
        names
    )
    assert not any(name.startswith(("lab/", "tests/", "secure_fvi_lab/")) for name in names)
    shutil.rmtree(first / "out")
    assert hashlib.sha256(_wheel(first, "1750086400").read_bytes()).hexdigest() != hashes[0]


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs OpenSSH")
def test_a_release_is_verified_as_security_md_says(tmp_path: Path) -> None:
    """The commands of the Makefile and of SECURITY.md, on a file that stands for the wheel; altered, or signed with
    another key, it is refused."""
    sign = re.search(r"ssh-keygen -q -Y sign .* SHA256SUMS", (ROOT / "Makefile").read_text())
    verify = re.search(r"^ssh-keygen -Y verify .*$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    assert sign is not None
    assert verify is not None

    def run(command: str) -> int:
        return subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, check=False).returncode

    for name in ("key", "other"):
        assert run(f"ssh-keygen -q -t ed25519 -N '' -f {name}") == 0
    (tmp_path / "release_signers").write_text(f"release {(tmp_path / 'key.pub').read_text()}")
    (tmp_path / "secure_fvi.whl").write_bytes(b"a wheel")

    def signed(key: str) -> bool:
        (tmp_path / "SHA256SUMS.sig").unlink(missing_ok=True)
        assert run("sha256sum *.whl > SHA256SUMS") == 0
        assert run(sign[0].replace("$(abspath $(SIGNING_KEY))", key)) == 0
        return run(verify[0]) == 0

    assert not signed("other")
    assert signed("key")
    (tmp_path / "secure_fvi.whl").write_bytes(b"another wheel")
    assert run(verify[0]) != 0
    assert run("sha256sum *.whl > SHA256SUMS") == 0  # a hash that fits, which nobody signed
    assert run(verify[0]) != 0
