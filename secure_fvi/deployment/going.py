"""How the job that a server's process is at stands: a file of its folder, which `secure-fvi status` reads beside the
log, since that has an exchange only once it is over. It holds names, numbers of rounds and times, as the log does."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from secure_fvi.deployment.names import format_time, now

_FILE, _SECONDS = "going.json", 1.0


class Going(NamedTuple):
    """job: its id; name: what it is called here. At most `rounds` of them. waiting: who has not answered the question
    that was asked at the time `since`; nobody while the server itself is at work."""

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
    """Writes it down, once a second where it has changed, until it is closed."""

    def __init__(self, home: Path, job: str, name: str, waiting: Callable[[], tuple[int, Sequence[str]]]) -> None:
        """waiting: the number of the exchange that is open, and who has not answered it."""
        self._path, self._waiting = home / _FILE, waiting
        self._state: dict[str, Any] = {"phase": "joining", "round": 0, "rounds": 0}
        self._always = {"job": job, "name": name, "process": os.getpid()}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()

    def round(self, number: int, at_most: int, phase: str) -> None:
        """A round is over."""
        self._state = {"phase": phase, "round": number, "rounds": at_most}

    def close(self) -> None:
        """Nothing is under way any more."""
        self._closed.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _tell(self) -> None:
        asked: object = None
        since, written = "", dict[str, Any]()
        while True:
            number, away = self._waiting()
            if (number, bool(away)) != asked:
                asked, since = (number, bool(away)), format_time(now())
            told = {**self._always, **self._state, "waiting": list(away), "since": since}
            if told != written:
                # For people to look at: it need not outlive the machine, and a full disk ends no job for it.
                with contextlib.suppress(OSError):
                    part = self._path.with_suffix(".part")
                    part.write_text(json.dumps(told))
                    part.replace(self._path)
                    written = told
            if self._closed.wait(_SECONDS):
                return


def seconds_since(going: Going, at: datetime.datetime) -> float:
    """How long those are waited for."""
    return (at - datetime.datetime.fromisoformat(going.since)).total_seconds()
