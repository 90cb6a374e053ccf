"""Checking paper trails from the outside: one log by itself, and two logs of the same job against each other.

A site's log and the server's tell of the same messages. What the server says it received must stand in the site's log
as sent, answer to the same request; what a site says it was asked must stand in the server's log as sent to it. An
answer that was lost on the way is in the site's log alone, and is counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secure_fvi.deployment.trail import EXCHANGE, JOB, TRAIL, Exchanged, Seen, TrailChain, read_exchange
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.chain import Row
from secure_fvi.privacy.chain_file import ChainFile, verify_chain
from secure_fvi.privacy.witness import check_receipt


def verify(
    path: str | os.PathLike[str],
    public_key: bytes | None = None,
    receipts: Iterable[bytes] = (),
    witness_keys: Iterable[bytes] | None = None,
) -> TrailChain:
    """Check every row of the log in `path` and return what it says.

    public_key: pins its key. receipts: of witnesses, from where they are trusted; those in the log count too.
    witness_keys: whose receipts count. Raises ProtocolError that names the first bad row.
    """
    keys = None if witness_keys is None else frozenset(witness_keys)
    shown = [check_receipt(data, keys, TRAIL) for data in receipts]
    file = ChainFile(Path(path), TRAIL, read_only=True)
    try:
        parties = file.silos()
        if len(parties) != 1:
            raise InputError(f"'{path}' holds {len(parties)} audit logs instead of one")
        return verify_chain(file, TrailChain(parties[0]), public_key, shown)
    finally:
        file.close()


def check_key(chain: TrailChain, keys: Sequence[bytes]) -> None:
    """Raises ProtocolError for a log under none of `keys`, those of the party that it says it is of."""
    if chain.public_key not in keys:
        raise ProtocolError(
            f"a log that says it is of '{chain.silo}' is under key {chain.public_key.hex()[:16]}..., which "
            "the roster does not name for it; where an identity before began it, name its succession"
        )


def rows(path: str | os.PathLike[str]) -> tuple[str, list[Row]]:
    """Party and rows of the log as they are stored, unchecked."""
    file = ChainFile(Path(path), TRAIL, read_only=True)
    try:
        parties = file.silos()
        return (parties[0], list(file.rows(parties[0]))) if parties else ("", [])
    finally:
        file.close()


@dataclass(frozen=True)
class Agreement:
    """What two logs of a site and a server have in common. Counts of exchanges."""

    site: str
    server: str
    jobs: tuple[str, ...]
    agreed: int
    lost_answers: int  # the site answered, and the server did not get it
    unanswered: int  # the server asked, and the site has no answer in its log


def compare(site_path: str | os.PathLike[str], server_path: str | os.PathLike[str]) -> Agreement:
    """Check a site's log against the server's, both verified by themselves before, and under the keys of both.

    Raises ProtocolError that names the first exchange on which they differ, or the job of which one of them has
    exchanges with the other and the other none.
    """
    site, site_seen, site_jobs = _exchanges(site_path)
    server, server_seen, server_jobs = _exchanges(server_path)
    asked = {job for job, seen in site_seen.items() if any(e.peer == server for e in seen)}
    answered = {job for job, seen in server_seen.items() if any(e.peer == site and e.received for e in seen)}
    jobs = sorted(asked | answered)
    if not jobs:
        raise InputError(f"the logs of '{site}' and '{server}' have no job in common")
    agreed = lost = unanswered = 0
    for job in jobs:
        for has, has_not, told in ((site, server, server_seen), (server, site, site_seen)):
            if job not in told:
                raise ProtocolError(
                    f"job '{job}': '{has}' has exchanges with '{has_not}', whose log has none: left out there, or this "
                    "is an older copy of it"
                )
        for name in ("offer", "roster", "model"):
            if site_jobs[job][name] != server_jobs[job][name]:
                raise ProtocolError(f"'{site}' and '{server}' have another '{name}' for job '{job}'")
        theirs: dict[bytes, set[Seen | None]] = {}  # by request, what the server has as answers
        for e in server_seen[job]:
            if e.peer == site and e.sent is not None:
                theirs.setdefault(e.sent.digest, set()).add(e.received)
        ours: dict[bytes, set[Seen | None]] = {}
        for e in site_seen[job]:
            if e.peer == server and e.received is not None:
                ours.setdefault(e.received.digest, set()).add(e.sent)
        for request, answers in ours.items():
            if request not in theirs:
                raise ProtocolError(
                    f"job '{job}': '{site}' was asked {_shown(request)}, which '{server}' does not say it sent: "
                    "altered on the way, or left out of the server's log"
                )
            lost += len(answers - theirs[request] - {None})
        for request, received in theirs.items():
            for answer in received:
                if answer is None:
                    continue
                if answer not in ours.get(request, set()):
                    raise ProtocolError(
                        f"job '{job}': '{server}' says that '{site}' answered {_shown(request)} with "
                        f"{_shown(answer.digest)}, which is not in the log of '{site}': altered on the way, forged, or "
                        "left out of the site's log"
                    )
                agreed += 1
            unanswered += request not in ours
    return Agreement(site, server, tuple(jobs), agreed, lost, unanswered)


def _exchanges(path: str | os.PathLike[str]) -> tuple[str, dict[str, list[Exchanged]], dict[str, dict[str, Any]]]:
    """Party, exchanges by job, and what each job's newest row says of it."""
    party, found = rows(path)
    seen: dict[str, list[Exchanged]] = {}
    jobs: dict[str, dict[str, Any]] = {}
    for row in found:
        if row.kind == EXCHANGE:
            e = read_exchange(row.fields())
            seen.setdefault(e.job, []).append(e)
        elif row.kind == JOB:
            fields = row.fields()
            jobs[str(fields["job"])] = fields
    return party, seen, jobs


def _shown(digest: bytes) -> str:
    return f"message {digest.hex()[:16]}..."
