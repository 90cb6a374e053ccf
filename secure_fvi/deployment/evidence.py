"""What a server states of a job that has ended, and its signature over the files of the run.

    evidence.json   versions, the roster and who signed it, the model, each site's policy, how far logs and ledgers were
    report.sig      SHA-256 of each file of the run, report and evidence among them, signed by the server's identity

A site's policy stands there by a digest under a key of the site's own, as of when it joined last: the site can tell
whether it is right, and nobody can try policies against it. Heads are those that their owners stated to the server last
before the job's end, and the server's own at that end. Public.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgpack
from pydantic import AfterValidator, Field, ValidationError

from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment.consortium import ConsortiumRoster
from secure_fvi.deployment.names import Bytes64, Hex32, Id, Table, Time, format_time, now, parse_table
from secure_fvi.deployment.trail import JOB
from secure_fvi.deployment.trail_verify import rows, verify
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.files import read_bytes, write_atomically
from secure_fvi.privacy.chain import signed
from secure_fvi.runs import wording
from secure_fvi.runs.directory import EVIDENCE, REPORT, SIGNATURE, TABLE

_LABEL = b"secure-fvi/report/1/"
_FILES = (
    REPORT, EVIDENCE, "config.toml", "marginals.json", "metrics.jsonl", "posterior.safetensors", "result.json",
    "run.json", TABLE,
)  # fmt: skip


class Head(Table):
    """A log or ledger up to a row: how many there are, and the hash of the last."""

    rows: Annotated[int, Field(ge=0)]
    head: Hex32


class _Roster(Table):
    number: Annotated[int, Field(ge=1)]
    hash: Hex32
    signed_by: dict[Id, Hex32]  # by member, the identity that signed


class _Versions(Table):
    secure_fvi: str
    package: Hex32
    protocol: Annotated[int, Field(ge=1)]


class Evidence(Table):
    """All that the server states. policies: at each site's last word; see `deciding.stated_policy`."""

    format: Literal[1]
    job: str
    offer: Hex32
    server: Id
    roster: _Roster
    versions: _Versions
    model: Hex32
    policies: dict[Id, Hex32]
    logs: dict[Id, Head]
    ledgers: dict[Id, Head]


def _plain_name(name: str) -> str:
    if name not in _FILES:
        raise ValueError(f"'{name}' is no file of a run")
    return name


class _Signed(Table):
    format: Literal[1]
    member: Id
    roster: Hex32
    job: str
    time: Time
    files: dict[Annotated[str, AfterValidator(_plain_name)], Hex32]
    signature: Bytes64


class Checked(NamedTuple):
    """A report whose signature is right. files: those that are here, each as it was signed; absent: those that are
    signed and not here."""

    evidence: Evidence
    member: str
    time: str
    files: tuple[str, ...]
    absent: tuple[str, ...]


def sign_report(folder: Path, roster: ConsortiumRoster, name: str, identity: Identity) -> None:
    """Sign what lies in the folder of a finished run, as the roster's member `name`. Raises InputError unless the
    roster names this identity, and where report or evidence is missing."""
    if roster.member(name).identity_key != identity.public_key:
        raise InputError(f"the roster names another identity for '{name}' than the one here")
    job = _evidence(folder).job
    here = [file for file in _FILES if file == REPORT or (folder / file).exists()]
    files = {file: _digest(folder / file) for file in here}
    unsigned = {"format": 1, "member": name, "roster": roster.hash.hex(), "job": job, "time": format_time(now())}
    signature = identity.sign(_LABEL + _statement(unsigned, files))
    table = {**unsigned, "signature": signature.hex(), "files": files}
    write_atomically(folder / SIGNATURE, wording.dumps(table).encode())


def signed_under(page: Path) -> str:
    """The hash of the roster under which a report says that it was signed: a claim, not checked."""
    return _signed(page.parent).roster


def check_report(page: Path, roster: ConsortiumRoster) -> Checked:
    """Check a report, the page itself, with what lies beside it, by a roster whose signatures are checked already.

    Raises InputError for files that are none, ProtocolError, which names what is wrong, for all else.
    """
    folder = page.parent
    found = _signed(folder)
    if found.roster != roster.hash.hex():
        raise ProtocolError(
            f"the report was signed under roster {found.roster[:16]}..., this is {roster.hash.hex()[:16]}..."
        )
    signer = roster.member(found.member)
    if signer.role != "server":
        raise ProtocolError(f"the report was signed by '{found.member}', which is no server in the roster")
    statement = _statement(found.model_dump(), found.files)
    if not signed(signer.identity_key, _LABEL, statement, found.signature):
        raise ProtocolError(f"the signature is not by the identity of '{found.member}' over this list of files")
    if missing := {REPORT, EVIDENCE} - found.files.keys():
        raise ProtocolError(f"the signature does not cover {' and '.join(sorted(missing))}")
    beside = {name: folder / name for name in found.files if name != REPORT}
    here = {REPORT: page} | {name: path for name, path in beside.items() if name == EVIDENCE or path.exists()}
    for name, path in here.items():
        if _digest(path) != found.files[name]:
            raise ProtocolError(
                f"'{path}' is not the {name} that '{found.member}' signed: it was altered, or is of another run"
            )
    evidence = _evidence(folder)
    members = {m.id: m.identity for m in roster.members.values()}
    named = (evidence.roster.hash, evidence.roster.signed_by, evidence.server, evidence.job)
    if named != (roster.hash.hex(), members, found.member, found.job):
        raise ProtocolError(f"'{folder / EVIDENCE}' is of another roster, server or job than the signature beside it")
    return Checked(evidence, found.member, found.time, tuple(here), tuple(n for n in found.files if n not in here))


def check_log(evidence: Evidence, log: Path) -> tuple[str, list[bytes]]:
    """Whether a member's log, checked row by row, goes through the head that the evidence has of it: whose log it is,
    and the hashes of the policies (32 bytes) under which it accepted the job, none at the server's.

    Raises ProtocolError where it does not.
    """
    verify(log)
    party, found = rows(log)
    stated = evidence.logs.get(party)
    if stated is None:
        raise ProtocolError(f"the report names no log of '{party}'")
    if len(found) < stated.rows or found[stated.rows - 1].hash.hex() != stated.head:
        raise ProtocolError(
            f"the log of '{party}' is not the one of the report, which knows of {stated.rows} rows up to "
            f"{stated.head[:16]}...: it was cut, begun anew, or is another job's server's"
        )
    entries = [r.fields() for r in found[: stated.rows] if r.kind == JOB]
    own = [e for e in entries if e["job"] == evidence.job and e["accepted"] is True]
    if not own:
        raise ProtocolError(f"the log of '{party}' has not accepted job '{evidence.job}'")
    for what, says in (("offer", evidence.offer), ("roster", evidence.roster.hash), ("model", evidence.model)):
        if own[-1][what].hex() != says:
            raise ProtocolError(f"the log of '{party}' has another {what} of job '{evidence.job}' than the report")
    return party, list(dict.fromkeys(entry["policy"] for entry in own if any(entry["policy"])))


def write_evidence(folder: Path, evidence: Evidence) -> None:
    """Into the folder of a run, for its report."""
    write_atomically(folder / EVIDENCE, evidence.model_dump_json(indent=2).encode())


def _signed(folder: Path) -> _Signed:
    path = folder / SIGNATURE
    return parse_table(read_bytes(path, "the report's signature"), _Signed, f"'{path}'")


def _evidence(folder: Path) -> Evidence:
    path = folder / EVIDENCE
    try:
        return Evidence.model_validate_json(read_bytes(path, "what the server states"))
    except ValidationError:
        raise InputError(f"'{path}' is not what a server states of a job that has ended") from None


def _digest(path: Path) -> str:
    """SHA-256, in hex."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}") from None


def _statement(fields: Mapping[str, Any], files: Mapping[str, str]) -> bytes:
    named: Sequence[Any] = [fields[name] for name in ("format", "member", "roster", "job", "time")]
    return bytes(msgpack.packb([*named, sorted(files.items())]))
