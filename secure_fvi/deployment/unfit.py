"""What is wrong with a site's data in a job under differential privacy, for its own people: no refusal tells of it.

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
#: What comes of it: by `Unfit.whole`.
_COMES = {
    True: "none of them is used in this job, which is charged like any other, and what leaves is noise",
    False: "the job goes on without the records that cannot be read, and with the others as they are",
}


class Unfit:
    """Of one job. whole: none of its site's records is used in it any more, whatever is mended meanwhile."""

    def __init__(self, folder: Path, silo: str) -> None:
        """As it stands in the job's `folder`, if it does."""
        self._path, self._silo = folder / _FILE, silo
        found = json.loads(self._path.read_text()) if self._path.exists() else {}
        self.whole, self._lines = bool(found.get("whole")), list[str](found.get("lines", ()))

    @property
    def said(self) -> str:
        """In one line, with what to do; empty where all is well."""
        return self._with_remedy("; ".join(self._lines)) if self._lines else ""

    def tell(self, what: object, whole: bool = False) -> None:
        """Write it down, for good, and log it."""
        line = printable(str(what).removeprefix(f"silo '{self._silo}': "), _LONGEST)
        if line not in self._lines or whole > self.whole:
            self._lines, self.whole = list(dict.fromkeys([*self._lines, line])), self.whole or whole
            held = json.dumps({"whole": self.whole, "lines": self._lines})
            write_atomically(self._path, held.encode(), private=True)
        _log.error("%s", self._with_remedy(line))

    def _with_remedy(self, what: str) -> str:
        job = self._path.parent.name
        return (
            f"the data of '{self._silo}' do not fit job '{job}', which nobody else is told: {what}; "
            f"{_COMES[self.whole]}. Put them right before the next job"
        )
