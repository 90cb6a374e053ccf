"""A write that finds no room is refused by one clear line, at once, and leaves nothing in the way of the next trial.

No file may grow here, which is what a full disk is to whoever writes. Each has a control: the same with room.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from secure_fvi.cli import main
from secure_fvi.errors import InputError, RecordError
from secure_fvi.files import write_atomically
from secure_fvi.key_files import create_key
from secure_fvi.privacy.ledger import Ledger


@contextmanager
def full() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_is_not_written_whole_leaves_nothing_beside_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("old")
    with full(), pytest.raises(OSError, match="File too large"):
        write_atomically(tmp_path / "policy.toml", b"new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("policy.toml", "old")]
    write_atomically(tmp_path / "policy.toml", b"new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("policy.toml", "new")]


def test_a_key_that_cannot_be_written_is_refused_by_its_path(tmp_path: Path) -> None:
    with full(), pytest.raises(InputError, match=r"cannot write '.*identity\.pem': File too large"):
        create_key(tmp_path / "next" / "identity.pem", unsealed=True)
    assert list((tmp_path / "next").iterdir()) == []
    create_key(tmp_path / "next" / "identity.pem", unsealed=True)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write '.*file/identity\.pem': "):
        create_key(tmp_path / "file" / "identity.pem", unsealed=True)


def test_a_draft_that_cannot_be_written_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("age\n1.5\n2.5\n")
    with full(), pytest.raises(SystemExit, match="2"):
        main(["data", "describe", "t.csv", "--output", "d.toml"])
    assert "cannot write 'd.toml': File too large" in capsys.readouterr().err
    assert not Path("d.toml").exists()
    with pytest.raises(SystemExit, match="0"):
        main(["data", "describe", "t.csv", "--output", "d.toml"])
    assert Path("d.toml").stat().st_size


def test_a_ledger_without_room_does_not_wait_as_for_another_process(tmp_path: Path) -> None:
    """It waited a minute for a lock that nobody held, in silence."""
    began = time.monotonic()
    with full(), pytest.raises(RecordError, match=r"disk.*nothing was charged, so nothing may leave"):
        Ledger.open(tmp_path / "ledger.sqlite", "a", create=True)
    assert time.monotonic() - began < 20
    Ledger.open(tmp_path / "ledger.sqlite", "a", create=True)
