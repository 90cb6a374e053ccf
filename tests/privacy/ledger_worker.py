"""A silo's process that only charges and releases, to be killed at any moment. Run as a script, by test_ledger_kill.

    python ledger_worker.py FOLDER BLOCK [release-first]

Each line on stdin forks a worker, whose pid is answered; when it is gone, how it ended. Forking spares the workers the
start of an interpreter. A worker goes on with the one job: charge, then release, and so on; `release-first` does it
the wrong way round, so that the test can show that it would notice.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from secure_fvi.privacy.accounting import rdp
from secure_fvi.privacy.events import Gaussian
from secure_fvi.privacy.ledger import Budget, Job, Ledger, Term

JOB = Job("job", "adult", "record", 1e-5, (Term("gradient", Gaussian(1e5), 10_000_000),))
BUDGET = Budget("adult", 1.0, 1e-5)


def work(folder: Path, block: int, release_first: bool) -> None:
    sent = os.open(folder / "released", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    ledger = Ledger.open(folder / "ledger.sqlite", "a", create=True)
    job = ledger.open_job(JOB, default_budget=BUDGET, block=block)
    # A block may have been lost half used; indices go on well above whatever it covered.
    index = job.last_index("gradient") + 1000
    while True:
        message = f"{index}\n".encode()
        if release_first:
            send(sent, message)
        job.charge("gradient", index, hashlib.sha256(message).digest())
        if not release_first:
            send(sent, message)
        index += 1


def send(descriptor: int, message: bytes) -> None:
    """The message leaves."""
    os.write(descriptor, message)
    os.fsync(descriptor)


def main() -> None:
    rdp(JOB.terms[0].event)  # loads the accountant, which would take longer than most workers live
    folder, block = Path(sys.argv[1]), int(sys.argv[2])
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                work(folder, block, "release-first" in sys.argv)
            finally:
                os._exit(1)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
