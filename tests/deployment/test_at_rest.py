"""What a site's parties keep between messages can be read by that site alone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from secure_fvi.cli.keys import open_home
from secure_fvi.deployment.holding import open_held
from secure_fvi.deployment.home import Home
from secure_fvi.errors import InputError, RecordError
from secure_fvi.files import write_atomically


def test_a_partys_state_lies_sealed_on_the_disk(tmp_path: Path) -> None:
    """That the search finds a value in a store that is not sealed, `test_sealed_store.py` shows."""
    value = os.urandom(64)
    home, other = (Home.create(tmp_path / name, name, "silo", unsealed=True) for name in ("north", "south"))
    store = open_held(tmp_path / "s.sqlite", home.state_secret())
    with store.together():
        store.put({"party/state": value})
    store.close()
    assert not any(value in path.read_bytes() for path in tmp_path.glob("s.sqlite*"))
    again = open_held(tmp_path / "s.sqlite", home.state_secret())
    assert again.get("party/state") == value
    again.close()
    (tmp_path / "s.sqlite").rename(tmp_path / "t.sqlite")  # as the store of another session
    for name, secret in (("t.sqlite", home.state_secret()), ("t.sqlite", other.state_secret())):
        moved = open_held(tmp_path / name, secret)
        with pytest.raises(RecordError, match=r"t.sqlite' is not what was written there: .* was not sealed"):
            moved.get("party/state")
        moved.close()


@pytest.mark.parametrize("name", ["questions.signed", "matching.evaluated", "session.sqlite"])
@pytest.mark.parametrize("below", ["", "checkpoint"])  # as at the server, whose folders of jobs all have one
def test_a_job_reads_nothing_that_was_sealed_for_another(tmp_path: Path, name: str, below: str) -> None:
    """Files of one name lie in every job's folder: the record of what was signed, put into another job's, is no record
    of that job. The control is the file where it was."""
    secret, named = os.urandom(32), {"a": "a", "b": "b"} if below else dict.fromkeys("ab")
    for job in ("a", "b"):
        (tmp_path / job / below).mkdir(parents=True)
        store = open_held(tmp_path / job / below / name, secret, job=named[job])
        store.put({"slot": job.encode()})
        store.close()
    for file in (tmp_path / "a" / below).iterdir():
        shutil.copy(file, tmp_path / "b" / below / file.name)
    kept, moved = (open_held(tmp_path / job / below / name, secret, job=named[job]) for job in ("a", "b"))
    assert kept.get("slot") == b"a"
    with pytest.raises(RecordError, match="for this place"):
        moved.get("slot")


def test_the_passphrase_guards_the_key(tmp_path: Path) -> None:
    home = Home.create(tmp_path / "north", "north", "silo", passphrase="a long one")
    secret = home.state_secret()
    assert b"BEGIN ENCRYPTED" in (home.path / "state.key").read_bytes()
    assert (home.path / "state.key").stat().st_mode & 0o777 == 0o600
    assert Home(home.path, "a long one").state_secret() == secret
    with pytest.raises(RecordError, match="passphrase is wrong"):
        Home(home.path, "another").state_secret()


def test_private_keys_are_sealed_unless_somebody_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused, and nothing is made, without a passphrase; a key file does as well; the control is `unsealed`, after
    which the key is in clear on the disk, a warning says so at each use, and `keys seal` encrypts it."""
    for name in ("SECURE_FVI_PASSPHRASE", "SECURE_FVI_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "north"
    with pytest.raises(InputError, match="new private keys need a passphrase"):
        Home.create(path, "north", "silo")
    assert not path.exists()

    home = Home.create(path, "north", "silo", unsealed=True)
    secret = home.state_secret()
    assert b"BEGIN PRIVATE" in (path / "identity.pem").read_bytes() + (path / "state.key").read_bytes()
    open_home(path)
    assert "secure-fvi keys seal" in capsys.readouterr().err
    (tmp_path / "secret").write_text("a long one\n")
    (tmp_path / "secret").chmod(0o644)
    monkeypatch.setenv("SECURE_FVI_KEY_FILE", str(tmp_path / "secret"))
    with pytest.raises(InputError, match="others than its owner may read"):
        Home(path).seal()
    (tmp_path / "secret").chmod(0o600)
    keys = sorted(p.name for p in Home(path).seal())
    assert keys == ["identity.pem", "state.key", "tls.key"]
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SECURE_FVI_KEY_FILE", "gone")
        with pytest.raises(RecordError, match="cannot read 'gone'"):  # which is no word on the passphrase
            Home(path).state_secret()
    assert all(b"BEGIN ENCRYPTED" in (path / name).read_bytes() for name in keys)
    assert Home(path).seal() == []
    open_home(path)
    assert capsys.readouterr().err == ""
    assert Home(path).state_secret() == Home(path, "a long one").state_secret() == secret
    assert Home.create(tmp_path / "south", "south", "silo").sealed
    monkeypatch.delenv("SECURE_FVI_KEY_FILE")
    with pytest.raises(InputError, match="is encrypted; set"):
        Home(path).identity()


@pytest.mark.parametrize("private", [True, False], ids=["", "control"])
def test_a_private_file_is_nobody_elses_from_the_moment_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    """Whoever opened it before its mode was changed would go on reading. The control: a file that is not private."""
    path, opened, made = tmp_path / "secret", os.open, list[int]()

    def looked_at(file: str, flags: int, mode: int = 0o777) -> int:
        handle = opened(file, flags, mode)
        made.append(os.fstat(handle).st_mode & 0o777)
        return handle

    before = os.umask(0o022)
    try:
        path.with_name("secret.tmp").touch(0o644)  # of a process that was killed
        monkeypatch.setattr(os, "open", looked_at)
        write_atomically(path, b"secret", private=private)
    finally:
        os.umask(before)
    assert path.read_bytes() == b"secret"
    assert made[0] == (0o600 if private else 0o644)
