"""Signatures of all members under a roster: `NAME.sig/ID.sig` beside `NAME.toml`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Literal, NamedTuple

from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment.consortium import LABEL_ROSTER, ConsortiumRoster, parse_roster
from secure_fvi.deployment.names import Hex32, Hex64, Id, Table, parse_table, read_bytes
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.chain import signed
from secure_fvi.runs import wording


class Signature(NamedTuple):
    """A detached signature: whose, over which roster (its hash)."""

    member: str
    roster: bytes
    signature: bytes


class _SignatureFile(Table):
    format: Literal[1]
    member: Id
    roster: Hex32
    signature: Hex64


def sign_roster(roster: ConsortiumRoster, name: str, identity: Identity) -> bytes:
    """Member `name`'s signature file. Raises InputError unless the roster names this identity."""
    if roster.member(name).identity_key != identity.public_key:
        raise InputError(f"the roster names another identity for '{name}' than the one here")
    signature = identity.sign(LABEL_ROSTER + roster.hash)
    table = {"format": 1, "member": name, "roster": roster.hash.hex(), "signature": signature.hex()}
    return wording.dumps(table).encode()


def read_signature(content: bytes, source: str) -> Signature:
    """Raises InputError where there is none."""
    file = parse_table(content, _SignatureFile, source)
    return Signature(file.member, bytes.fromhex(file.roster), bytes.fromhex(file.signature))


def check_signature(roster: ConsortiumRoster, signature: Signature) -> None:
    """Raises ProtocolError, which says why, unless `signature` is a member's over this roster."""
    whose = f"the signature of '{signature.member}'"
    if signature.member not in roster.members:
        raise ProtocolError(f"{whose} is on the roster, but no member of that name is in it: unknown signer")
    if signature.roster != roster.hash:
        raise ProtocolError(
            f"{whose} is over roster {signature.roster.hex()[:16]}..., this one is {roster.hash.hex()[:16]}...: "
            "the roster was altered, or the signature is of another version"
        )
    statement = LABEL_ROSTER + roster.hash
    if not signed(roster.members[signature.member].identity_key, b"", statement, signature.signature):
        raise ProtocolError(f"{whose} is not by the identity that the roster names")


def load_roster(path: Path, now: datetime.datetime) -> ConsortiumRoster:
    """The roster in `path`, signed by all of its members (`NAME.sig/` beside it), and in force.

    Raises InputError for files that are none, ProtocolError, which names the reason, for all else.
    """
    roster = parse_roster(read_bytes(path, "the roster"), f"'{path}'")
    check_signatures(roster, signature_folder(path))
    roster.check_time(now)
    return roster


def check_signatures(roster: ConsortiumRoster, folder: Path) -> None:
    """Raises ProtocolError unless `folder` holds the signature of every member, and of nobody else."""
    seen = set()
    for path in sorted(folder.glob("*.sig")):
        signature = read_signature(read_bytes(path, "the signature"), f"'{path}'")
        check_signature(roster, signature)
        seen.add(signature.member)
    missing = [name for name in roster.members if name not in seen]
    if missing:
        raise ProtocolError(
            f"roster {roster.serial} is not signed by {', '.join(missing)}: signature missing in '{folder}'"
        )


def signature_folder(roster: Path) -> Path:
    """Where the signatures of the roster file lie."""
    return roster.with_suffix(".sig")
