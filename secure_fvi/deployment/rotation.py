"""New keys for a member that is known already, announced by the key that the others trust.

    endorsement   "my TLS key is from now on ..."    signed by the identity; replaces one roster's pin at once
    succession    "my identity is from now on ..."   signed by the old identity and by the new; enters the next roster

A stolen TLS key is ended by revoking its certificate, a stolen identity by a new roster that everybody signs.
"""

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

LABEL_ENDORSEMENT = b"secure-fvi/tls-endorsement/1/"
LABEL_SUCCESSION = b"secure-fvi/identity-succession/1/"


class Endorsement(NamedTuple):
    """A member's word for a TLS key (SHA-256 of the public key) under the roster of a hash, and under no other."""

    member: str
    roster: bytes
    tls_key: bytes
    made: datetime.datetime
    signature: bytes


class Succession(NamedTuple):
    """An identity's word for the one that follows it, and that one's own."""

    member: str
    before: bytes
    after: bytes
    made: datetime.datetime
    signature: bytes
    signature_after: bytes


class _EndorsementFile(Table):
    format: Literal[1]
    kind: Literal["tls-endorsement"]
    member: Id
    roster: Hex32
    tls_key: Hex32
    made: Time
    signature: Hex64


class _SuccessionFile(Table):
    format: Literal[1]
    kind: Literal["identity-succession"]
    member: Id
    before: Hex32
    after: Hex32
    made: Time
    signature: Hex64
    signature_after: Hex64


def endorse(member: str, identity: Identity, roster: bytes, tls_key: bytes, now: datetime.datetime) -> bytes:
    """An endorsement file by the holder of `identity`; roster: its hash."""
    made = format_time(now)
    signature = identity.sign(LABEL_ENDORSEMENT + _digest(member, roster + tls_key, made))
    return wording.dumps(
        {
            "format": 1,
            "kind": "tls-endorsement",
            "member": member,
            "roster": roster.hex(),
            "tls_key": tls_key.hex(),
            "made": made,
            "signature": signature.hex(),
        }
    ).encode()


def read_endorsement(content: bytes, source: str) -> Endorsement:
    """Raises InputError where there is none; its signature is checked by `pinned_key`."""
    f = parse_table(content, _EndorsementFile, source)
    roster, tls_key = bytes.fromhex(f.roster), bytes.fromhex(f.tls_key)
    return Endorsement(f.member, roster, tls_key, parse_time(f.made), bytes.fromhex(f.signature))


def pinned_key(roster: ConsortiumRoster, member: Member, endorsements: Iterable[Endorsement]) -> bytes:
    """The TLS key (hash) that `member` is to use: of its newest endorsement under this roster, or the roster's own.

    Raises ProtocolError for an endorsement that its identity did not sign.
    """
    newest: Endorsement | None = None
    for e in endorsements:
        if e.member != member.id or e.roster != roster.hash:
            continue
        statement = _digest(e.member, e.roster + e.tls_key, format_time(e.made))
        if not signed(member.identity_key, LABEL_ENDORSEMENT, statement, e.signature):
            raise ProtocolError(f"the endorsement of a TLS key of '{e.member}' is not signed by its identity")
        if newest is None or e.made > newest.made:
            newest = e
    return bytes.fromhex(member.tls_key) if newest is None else newest.tls_key


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
