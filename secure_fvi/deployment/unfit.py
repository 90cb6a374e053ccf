"""What is wrong with a site's data in a job, for its own people, where no refusal tells of it.

Under differential privacy data that do not fit go on as noise. In masked sums without it a silo that cannot answer a
question makes the total none, and others see that some silo did.

It is a file in the job's folder, which `secure-fvi status` reads, and lines of the process's own log. The paper trail
has no row of it: others see how long that is.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from secure_fvi.deployment.names import printable
from secure_fvi.files import write_atomically

_log = logging.getLogger(__name__)
_FILE, _LONGEST = "unfit", 2000
#: What comes of it.
_UNUSED = "none of them is used in this job, which is charged like any other, and what leaves is noise"
_LEFT_OUT = "the job goes on without the records that cannot be read, and with the others as they are"
_SPOILT = "no total of this job comes about any more, and whose data are why is told to nobody"


class Unfit:
    """Of one job. whole: none of its site's records is used in it any more, whatever is mended meanwhile. spoilt: it
    spoils the job's totals; data_set: on which."""

    def __init__(self, folder: Path, silo: str, data_set: str = "") -> None:
        """As it stands in the job's `folder`, if it does."""
        self._path, self._silo = folder / _FILE, silo
        found = json.loads(self._path.read_text()) if self._path.exists() else {}
        self.whole, self._lines = bool(found.get("whole")), list[str](found.get("lines", ()))
        self.spoilt, self.data_set = bool(found.get("spoilt")), str(found.get("data_set", data_set))

    @property
    def said(self) -> str:
        """In one line, with what to do; empty where all is well."""
        return self._with_remedy("; ".join(self._lines)) if self._lines else ""

    @property
    def others_spoilt(self) -> list[str]:
        """The other jobs on this data set whose totals it spoilt."""
        files = [path for path in self._path.parent.parent.glob(f"*/{_FILE}") if path != self._path]
        found = {path.parent.name: Unfit(path.parent, self._silo) for path in files}
        return sorted(job for job, one in found.items() if one.spoilt and one.data_set == self.data_set)

    def tell(self, what: object, whole: bool = False, spoilt: bool = False) -> None:
        """Write it down, for good, and log it."""
        line = printable(str(what).removeprefix(f"silo '{self._silo}': "), _LONGEST)
        if line not in self._lines or whole > self.whole or spoilt > self.spoilt:
            self._lines, self.whole = list(dict.fromkeys([*self._lines, line])), self.whole or whole
            self.spoilt = self.spoilt or spoilt
            held = {"whole": self.whole, "spoilt": self.spoilt, "data_set": self.data_set, "lines": self._lines}
            write_atomically(self._path, json.dumps(held).encode(), private=True)
        _log.error("%s", self._with_remedy(line))

    def _with_remedy(self, what: str) -> str:
        job = self._path.parent.name
        return (
            f"the data of '{self._silo}' do not fit job '{job}', which nobody else is told: {what}; "
            f"{_SPOILT if self.spoilt else _UNUSED if self.whole else _LEFT_OUT}. Put them right before the next job"
        )
