"""A new identity for a member that is known already, announced by the one that the others trust, and what a roster
changes. "My identity is from now on ..." is signed by the old identity and by the new, and enters the next roster."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgpack

from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment.consortium import ConsortiumRoster, Member
from secure_fvi.deployment.names import Hex32, Hex64, Id, Table, Time, format_time, parse_table, parse_time
from secure_fvi.errors import ProtocolError
from secure_fvi.privacy.chain import signed
from secure_fvi.runs import wording

LABEL_SUCCESSION = b"secure-fvi/identity-succession/1/"


class Succession(NamedTuple):
    """An identity's word for the one that follows it, and that one's own."""

    member: str
    before: bytes
    after: bytes
    made: datetime.datetime
    signature: bytes
    signature_after: bytes


class _SuccessionFile(Table):
    format: Literal[1]
    kind: Literal["identity-succession"]
    member: Id
    before: Hex32
    after: Hex32
    made: Time
    signature: Hex64
    signature_after: Hex64


def succeed(member: str, before: Identity, after: Identity, now: datetime.datetime) -> bytes:
    """A succession file: from one identity to the next."""
    made = format_time(now)
    statement = LABEL_SUCCESSION + _digest(member, before.public_key + after.public_key, made)
    return wording.dumps(
        {
            "format": 1,
            "kind": "identity-succession",
            "member": member,
            "before": before.public_key.hex(),
            "after": after.public_key.hex(),
            "made": made,
            "signature": before.sign(statement).hex(),
            "signature_after": after.sign(statement).hex(),
        }
    ).encode()


def read_succession(content: bytes, source: str) -> Succession:
    """Raises InputError where there is none, ProtocolError unless both identities signed it."""
    f = parse_table(content, _SuccessionFile, source)
    found = Succession(
        f.member,
        bytes.fromhex(f.before),
        bytes.fromhex(f.after),
        parse_time(f.made),
        bytes.fromhex(f.signature),
        bytes.fromhex(f.signature_after),
    )
    statement = _digest(f.member, found.before + found.after, f.made)
    for key, signature in ((found.before, found.signature), (found.after, found.signature_after)):
        if not signed(key, LABEL_SUCCESSION, statement, signature):
            raise ProtocolError(f"{source}: the succession of '{f.member}' is not signed by both identities")
    return found


def keys_of(member: Member, known: Iterable[Succession]) -> tuple[bytes, ...]:
    """The public keys under which a member may keep records: that of its identity, then those before it, as successions
    that are `known` say."""
    keys, announced = [member.identity_key], list(known)
    while True:
        before = next((s.before for s in announced if s.member == member.id and s.after == keys[-1]), None)
        if before is None or before in keys:
            return tuple(keys)
        keys.append(before)


def check_changes(
    before: ConsortiumRoster, members: Iterable[Member], successions: Iterable[Succession], replaced: Iterable[str] = ()
) -> list[str]:
    """What a roster after `before` changes, in lines for people.

    Raises ProtocolError for a member whose identity changed with no succession, unless `replaced` names it: its key was
    lost, and the new one is checked by voice.
    """
    lines, known, allowed = [], list(successions), set(replaced)
    now = {m.id: m for m in members}
    for name, old in before.members.items():
        new = now.get(name)
        if new is None:
            lines.append(f"{name}: leaves")
        elif new.identity != old.identity:
            announced = any(
                s.member == name and s.before == old.identity_key and s.after == new.identity_key for s in known
            )
            if not announced and name not in allowed:
                raise ProtocolError(
                    f"'{name}' has another identity than in roster {before.serial}, not announced by its old one; "
                    f"give its succession file, or say --replace {name} if the old key is lost"
                )
            lines.append(f"{name}: new identity, {'announced by the old' if announced else 'NOT announced by the old'}")
        elif new.role != old.role:
            lines.append(f"{name}: {old.role} becomes {new.role}")
        elif new.tls_key != old.tls_key:
            lines.append(f"{name}: new TLS key")
    return lines + [f"{name}: joins" for name in now if name not in before.members]


def _digest(member: str, key: bytes, made: str) -> bytes:
    return hashlib.sha256(msgpack.packb([member, key, made])).digest()
