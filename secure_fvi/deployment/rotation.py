"""A new identity for a member that is known already, announced by the one that the others trust (`keeping.succeed`):
"My identity is from now on ..." is signed by the old identity and by the new, and enters the next roster."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgpack

from secure_fvi.deployment.consortium import Member
from secure_fvi.deployment.names import Hex32, Hex64, Id, Table, Time, parse_table, parse_time
from secure_fvi.errors import ProtocolError
from secure_fvi.privacy.chain import signed

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
    statement = digest_of(f.member, found.before + found.after, f.made)
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


def digest_of(member: str, key: bytes, made: str) -> bytes:
    return hashlib.sha256(msgpack.packb([member, key, made])).digest()
