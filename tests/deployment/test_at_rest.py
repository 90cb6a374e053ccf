"""What a site's parties keep between messages can be read by that site alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from secure_fvi.deployment.holding import open_held
from secure_fvi.deployment.home import Home
from secure_fvi.errors import InputError


def test_a_partys_state_lies_sealed_on_the_disk(tmp_path: Path) -> None:
    """That the search finds a value in a store that is not sealed, `test_sealed_store.py` shows."""
    value = os.urandom(64)
    home, other = (Home.create(tmp_path / name, name, "silo") for name in ("north", "south"))
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
        with pytest.raises(InputError, match="was not sealed"):
            moved.get("party/state")
        moved.close()


def test_the_passphrase_guards_the_key(tmp_path: Path) -> None:
    home = Home.create(tmp_path / "north", "north", "silo", passphrase="a long one")
    secret = home.state_secret()
    assert b"BEGIN ENCRYPTED" in (home.path / "state.key").read_bytes()
    assert (home.path / "state.key").stat().st_mode & 0o777 == 0o600
    assert Home(home.path, "a long one").state_secret() == secret
    with pytest.raises(InputError, match="passphrase is wrong"):
        Home(home.path, "another").state_secret()
