"""A site's folder serves one process at a time."""

from __future__ import annotations

import errno
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from consortium_run import met
from deployment_world import World

from secure_fvi.deployment.home import Home
from secure_fvi.deployment.site import Site
from secure_fvi.errors import InputError, RecordError

_HOLD = "import sys, time; from secure_fvi.deployment.home import Home; from pathlib import Path; "
_HOLD += "held = Home(Path(sys.argv[1])).hold(); print('held', flush=True); time.sleep(60)"


def _process(path: Path) -> subprocess.Popen[str]:
    """Another process that holds the folder."""
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_until_the_first_is_gone(world: World) -> None:
    """Also where the first is killed. What only reads is not kept out; other folders are free."""
    home = world.homes["north"]
    other = _process(home.path)
    try:
        with pytest.raises(InputError, match="in use by another process of the silo 'north'"):
            Site(home)
        assert Home(home.path).id == "north"
        Site(world.homes["south"]).close()
    finally:
        other.kill()
        other.wait()
    site = Site(home)
    with pytest.raises(InputError, match="in use"):
        Site(home)
    site.close()
    Site(home).close()


def test_a_server_holds_its_folder(world: World) -> None:
    home = world.homes["hub"]
    with home.hold(), pytest.raises(InputError, match="in use by another process of the server 'hub'"):
        home.hold()
    home.hold().close()


def test_a_folder_that_cannot_be_closed_to_others_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system without owners. The control: where it can be closed it is, and is held."""
    home = world.homes["north"]
    home.path.chmod(0o755)

    def refused(path: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "chmod", refused)
        with pytest.raises(InputError, match=r"open to others than its owner .*chmod 700"):
            home.hold()
    home.hold().close()
    assert home.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_a_process_whose_lock_was_removed_answers_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch, rule: bool
) -> None:
    """As somebody does who takes it for one that was left behind: two processes would go on over one state."""
    home = world.homes["north"]
    if not rule:
        monkeypatch.setattr(Home, "check_held", lambda *_: None)
    first = Site(home)
    met(world.homes["hub"], first)
    (home.path / "lock").unlink()
    second = Site(home)
    met(world.homes["hub"], second)
    with pytest.raises(RecordError, match="was removed while this process held it") if rule else nullcontext():
        met(world.homes["hub"], first)
    first.close()
    second.close()
