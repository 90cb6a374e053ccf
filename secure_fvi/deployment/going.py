"""How the job that a party's process is at stands: a file of its folder, which `secure-fvi status` reads beside the
log, since that has an exchange only once it is over. It holds names, numbers of rounds and times, as the log does."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from secure_fvi.deployment.names import format_time, now, printable
from secure_fvi.files import own_file, write_atomically

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


# ---- What is wrong with a site's data in a job, for its own people, where no refusal tells of it ----
#
# Under differential privacy data that do not fit go on as noise. In masked sums without it a silo that cannot answer a
# question makes the total none, and others see that some silo did. It is a file in the job's folder, which
# `secure-fvi status` reads, and lines of the process's own log. The paper trail has no row of it: others see how long
# that is.

_log = logging.getLogger(__name__)
_UNFIT, _LONGEST = "unfit", 2000
_PUT_BACK = "put its newest copy back; without one, remove it once that job is over, which is then counted no more"
#: What comes of it.
_UNUSED = "none of them is used in this job, which is charged like any other, and what leaves is noise"
_LEFT_OUT = "the job goes on without the records that cannot be read, and with the others as they are"
_HID = "it is hidden, and so is all of this silo that the job asks for at its end from then on"
_SPOILT = (
    "no total of this job with this silo in it comes about any more, and why is told to nobody; whose data it was "
    "shows where others' totals come about without it"
)


class Unfit:
    """Of one job. whole: none of its site's records is used in it any more, whatever is mended meanwhile. spoilt: it
    spoils the job's totals; hid: it hid what was too large to tell; data_set: on which."""

    def __init__(self, folder: Path, silo: str, data_set: str = "") -> None:
        """As it stands in the job's `folder`, if it does. Raises RecordError for a file that cannot be read."""
        self._path, self._silo = folder / _UNFIT, silo
        with own_file(self._path, _PUT_BACK):
            found = json.loads(self._path.read_text()) if self._path.exists() else {}
            self.whole, self._lines = bool(found.get("whole")), list[str](found.get("lines", ()))
        self.spoilt, self.data_set = bool(found.get("spoilt")), str(found.get("data_set", data_set))
        self.hid = bool(found.get("hid"))

    @property
    def said(self) -> str:
        """In one line, with what to do; empty where all is well."""
        return self._with_remedy("; ".join(self._lines)) if self._lines else ""

    @property
    def others(self) -> list[str]:
        """The other jobs on this data set whose totals it spoilt, or of which it hid what they asked."""
        files = [path for path in self._path.parent.parent.glob(f"*/{_UNFIT}") if path != self._path]
        found = {path.parent.name: Unfit(path.parent, self._silo) for path in files}
        return sorted(j for j, one in found.items() if (one.spoilt or one.hid) and one.data_set == self.data_set)

    def tell(self, what: object, whole: bool = False, spoilt: bool = False, hid: bool = False) -> None:
        """Write it down, for good, and log it."""
        line = printable(str(what).removeprefix(f"silo '{self._silo}': "), _LONGEST)
        if line not in self._lines or whole > self.whole or spoilt > self.spoilt or hid > self.hid:
            self._lines, self.whole = list(dict.fromkeys([*self._lines, line])), self.whole or whole
            self.spoilt, self.hid = self.spoilt or spoilt, self.hid or hid
            held: dict[str, object] = {"whole": self.whole, "spoilt": self.spoilt, "hid": self.hid}
            held |= {"data_set": self.data_set, "lines": self._lines}
            write_atomically(self._path, json.dumps(held).encode(), private=True)
        _log.error("%s", self._with_remedy(line))

    def _with_remedy(self, what: str) -> str:
        job = self._path.parent.name
        so = _SPOILT if self.spoilt else _HID if self.hid else _UNUSED if self.whole else _LEFT_OUT
        return (
            f"the data of '{self._silo}' do not fit job '{job}', which nobody else is told: {what}; "
            f"{so}. Put them right before the next job"
        )
