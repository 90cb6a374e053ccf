"""How the job that a party's process is at stands: a file of its folder, which `secure-fvi status` reads beside the
log, since that has an exchange only once it is over. It holds names, numbers of rounds and times, as the log does."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from secure_fvi.deployment.names import format_time, now

_FILE, _SECONDS = "going.json", 1.0


class Stand(NamedTuple):
    """What a process is at. job: its id, empty where there is none; name: what it is called here. There are at most
    `rounds`. asked: the number of the question that is open. waiting: whose answer, or at a site whose next question,
    has not come; nobody while this party itself is at work."""

    job: str = ""
    name: str = ""
    phase: str = "joining"
    round: int = 0
    rounds: int = 0
    asked: int = 0
    waiting: tuple[str, ...] = ()


class Going(NamedTuple):
    """A `Stand` as it was told by `process`, and the time `since` which those in it are waited for."""

    job: str
    name: str
    phase: str
    round: int
    rounds: int
    waiting: tuple[str, ...]
    since: str
    process: int


def read_going(home: Path) -> Going | None:
    """What was written last in the folder `home`; None where there is nothing, or its process has ended."""
    try:
        held = json.loads((home / _FILE).read_text())
        found = Going(**{**held, "waiting": tuple(held["waiting"])})
        os.kill(found.process, 0)
    except PermissionError:  # another user's, so it is there
        return found
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found


class Teller:
    """Writes down how things stand, once a second where that has changed, until it is closed."""

    def __init__(self, home: Path, stand: Callable[[], Stand]) -> None:
        """stand: asked for from a thread of its own."""
        self._path, self._stand = home / _FILE, stand
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing is under way any more."""
        self._closed.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _tell(self) -> None:
        before: object = None
        since, written = "", ""
        while True:
            stand = self._stand()
            if (stand.job, stand.asked, bool(stand.waiting)) != before:
                before, since = (stand.job, stand.asked, bool(stand.waiting)), format_time(now())
            fields = {name: value for name, value in stand._asdict().items() if name != "asked"}
            told = json.dumps({**fields, "since": since, "process": os.getpid()})
            if told != written:
                # For people to look at: it need not outlive the machine, and a full disk ends no job for it.
                with contextlib.suppress(OSError):
                    part = self._path.with_suffix(".part")
                    part.write_text(told)
                    part.replace(self._path)
                    written = told
            if self._closed.wait(_SECONDS):
                return


def seconds_since(going: Going, at: datetime.datetime) -> float:
    """How long those are waited for."""
    return (at - datetime.datetime.fromisoformat(going.since)).total_seconds()
