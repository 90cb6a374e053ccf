"""The roster file of a consortium: who belongs to it, under which keys and settings. All members sign it.

    N.toml         roster N, in one fixed layout, without comments, so that what is read is what is signed
    N.sig/ID.sig   the signature of each member over SHA-256(label, bytes of N.toml)

Members compare the roster's code aloud before they sign. Each has checked its own keys in it; equal codes mean equal
rosters; so every key in it is the right one, whoever wrote or carried the file. Rosters are numbered, and each names
the hash of the one before. Public.

It is all that a site trusts: TLS takes the certificates in it and no others, and a key is replaced or taken back by
the next roster.

A new identity of a member that is known already is announced by the one that the others trust (`keeping.succeed`):
"My identity is from now on ..." is signed by the old identity and by the new, and enters the next roster.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, Self

import msgpack
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from pydantic import AfterValidator, Field, ValidationError, model_validator

from secure_fvi.aggregation.masked import Masked
from secure_fvi.aggregation.prg import digest
from secure_fvi.aggregation.roster import Identity, Roster
from secure_fvi.deployment.certificates import from_text, key_hash, named_by, pem_of, pinned_name, read_certificate
from secure_fvi.deployment.names import (
    Bytes32,
    Bytes64,
    Hex32,
    Id,
    Role,
    Table,
    Time,
    format_time,
    parse_table,
    parse_time,
    printable,
    reading_code,
)
from secure_fvi.errors import HomeError, InputError, ProtocolError
from secure_fvi.files import read_bytes
from secure_fvi.privacy.chain import signed
from secure_fvi.runs import wording

LABEL_ROSTER = b"secure-fvi/roster-file/1/"
LABEL_SESSION = b"deployment-session"
ROSTER_DAYS = 365


def _certificate(text: str) -> str:
    from_text(text)
    return text


class Member(Table):
    """One institution. identity: Ed25519 public key; certificate: of its TLS key, by that key, DER in base64."""

    id: Id
    role: Role
    identity: Hex32
    certificate: Annotated[str, AfterValidator(_certificate)]

    @model_validator(mode="after")
    def _own(self) -> Self:
        if named_by(self.x509) != self.id:
            raise ValueError(f"the certificate of '{self.id}' is made out to '{printable(named_by(self.x509), 80)}'")
        return self

    @property
    def identity_key(self) -> bytes:
        return bytes.fromhex(self.identity)

    @property
    def x509(self) -> x509.Certificate:
        return from_text(self.certificate)

    @property
    def tls_key(self) -> str:
        """SHA-256 of the certificate's public key, in hex."""
        key = self.x509.public_key()
        assert isinstance(key, EllipticCurvePublicKey)
        return key_hash(key).hex()


class Sums(Table):
    """What every masked sum of the consortium keeps to; a job may only be stricter.

    max_missing: silos that a total may lack of those asked for it, whatever a site's policy or a job's noise allow;
    left out, these alone count.
    """

    min_cohort: Annotated[int, Field(ge=2)] = 3
    max_missing: Annotated[int, Field(ge=0)] | None = None
    bits: Literal[32, 64] = 64
    consistency_check: bool = True
    corrupt: Annotated[float, Field(ge=0, lt=1)] = 0.1
    lost: Annotated[float, Field(ge=0, lt=1)] = 0.1


class _File(Table):
    format: Literal[2]
    consortium: Id
    serial: Annotated[int, Field(ge=1, lt=2**31)]
    previous: Hex32 | Literal[""]
    made: Time
    expires: Time
    sums: Sums
    member: Annotated[tuple[Member, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("id", "identity", "tls_key"):
            values = [getattr(m, name) for m in self.member]
            twice = next((v for v in values if values.count(v) > 1), None)
            if twice is not None:
                raise ValueError(f"two members have the {name} '{twice}'")
        if [m.id for m in self.member] != sorted(m.id for m in self.member):
            raise ValueError("members must be sorted by id")
        if parse_time(self.expires) <= parse_time(self.made):
            raise ValueError("'expires' must be after 'made'")
        if (self.serial == 1) != (self.previous == ""):
            raise ValueError("'previous' is the hash of the roster before, and empty for serial 1 alone")
        silos = sum(m.role == "silo" for m in self.member)
        if silos < self.sums.min_cohort:
            raise ValueError(f"{silos} silos cannot make a cohort of {self.sums.min_cohort}; see sums.min_cohort")
        return self


def trusted(members: Iterable[Member]) -> bytes:
    """What TLS needs to take these members, and nobody else, for the other end: their certificates in PEM form."""
    return b"".join(pem_of(m.x509) for m in members)


class ConsortiumRoster:
    """A roster as its bytes say it, signed or not. Made by `parse_roster` and `write_roster`."""

    def __init__(self, content: bytes, file: _File) -> None:
        self.content, self._file = content, file
        self.consortium, self.serial, self.sums = file.consortium, file.serial, file.sums
        self.previous = bytes.fromhex(file.previous)
        self.made, self.expires = parse_time(file.made), parse_time(file.expires)
        self.members: Mapping[str, Member] = {m.id: m for m in file.member}

    def __repr__(self) -> str:
        return f"ConsortiumRoster({self.consortium!r}, serial={self.serial}, hash={self.hash.hex()[:16]})"

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 over the bytes of the file: what members sign and policies name. 32 bytes."""
        return hashlib.sha256(LABEL_ROSTER + self.content).digest()

    @cached_property
    def code(self) -> str:
        """What members read to each other."""
        return reading_code("roster", self.content)

    def of_role(self, role: Role) -> tuple[Member, ...]:
        """The members of a role, sorted by id."""
        return tuple(m for m in self.members.values() if m.role == role)

    def member(self, name: str) -> Member:
        """The member called `name`; raises ProtocolError when there is none."""
        if name not in self.members:
            raise ProtocolError(f"'{name}' is no member of consortium '{self.consortium}' (roster {self.serial})")
        return self.members[name]

    def check_time(self, now: datetime.datetime) -> None:
        """Raises ProtocolError for a roster that has expired or is of the future."""
        if now > self.expires:
            raise ProtocolError(f"roster {self.serial} of '{self.consortium}' expired at {format_time(self.expires)}")
        if now + datetime.timedelta(days=1) < self.made:
            raise ProtocolError(f"roster {self.serial} was made at {format_time(self.made)}, which is yet to come")

    def whose(self, certificate: bytes, now: datetime.datetime, *roles: Role) -> Member:
        """The member whose certificate (PEM, as TLS accepted it) this is; of one of `roles`, where any are given.

        Raises ProtocolError naming the reason.
        """
        self.check_time(now)
        seen = read_certificate(certificate, "what the other side presented")
        found = self._by_certificate.get(seen.public_bytes(serialization.Encoding.DER))
        if found is None:
            named = self.member(printable(named_by(seen), 80))
            raise ProtocolError(
                f"the certificate of '{named.id}' is for another TLS key than roster {self.serial} names: it was "
                "replaced, or somebody else made it"
            )
        if roles and found.role not in roles:
            expected = " or ".join(roles)
            raise ProtocolError(f"'{found.id}' is a {found.role} in the roster; here a {expected} is expected")
        if now > seen.not_valid_after_utc:
            raise ProtocolError(
                f"the certificate of {found.role} '{found.id}' expired at {format_time(seen.not_valid_after_utc)}"
            )
        if now < seen.not_valid_before_utc:
            raise ProtocolError(
                f"the certificate of {found.role} '{found.id}' is not valid before "
                f"{format_time(seen.not_valid_before_utc)}"
            )
        return found

    @cached_property
    def _by_certificate(self) -> dict[bytes, Member]:
        return {m.x509.public_bytes(serialization.Encoding.DER): m for m in self.members.values()}

    def tls_name(self, name: str) -> str:
        """What to ask TLS for when dialing a member (gRPC: `grpc.ssl_target_name_override`): only its key has it."""
        return pinned_name(bytes.fromhex(self.member(name).tls_key))

    def session(
        self,
        session: bytes,
        silos: Sequence[str] | None = None,
        aggregation: Masked | None = None,
        key_holder: bytes = b"",
    ) -> Roster:
        """The roster of one session of masked sums over `silos` (all by default), named by 32 bytes (`session_id`).

        aggregation: the job's settings, at least as strict as [sums]. key_holder: as in `aggregation.roster`.
        Raises InputError for looser settings and for who is no silo.
        """
        chosen = [m.id for m in self.of_role("silo")] if silos is None else list(silos)
        for name in chosen:
            if self.member(name).role != "silo":
                raise InputError(f"'{name}' is a {self.members[name].role} in the roster, not a silo")
        made = Masked(**self.sums.model_dump(exclude_none=True)) if aggregation is None else aggregation
        if (
            made.min_cohort < self.sums.min_cohort
            or (self.sums.max_missing is not None and made.max_missing > self.sums.max_missing)
            or made.bits != self.sums.bits
            or made.consistency_check < self.sums.consistency_check
            or made.corrupt < self.sums.corrupt
            or made.lost < self.sums.lost
        ):
            raise InputError(f"the job's sums are not as strict as the [sums] of roster {self.serial}: {self.sums!r}")
        found = made.roster({name: self.members[name].identity_key for name in chosen}, session)
        return replace(found, key_holder=key_holder)


def session_id(roster: ConsortiumRoster, job: bytes, nonces: Mapping[str, bytes], protocol: int) -> bytes:
    """A session's 32 bytes, from the job's hash, 32 fresh bytes of each silo and the version of the protocol in which
    it goes on: new if one silo's are new, another for whom another version is named."""
    if any(len(n) != 32 for n in nonces.values()) or not nonces:
        raise ProtocolError("a session needs 32 fresh bytes of each silo")
    return digest(LABEL_SESSION, roster.hash, job, msgpack.packb([protocol, sorted(nonces.items())]))


def write_roster(
    consortium: str,
    members: Sequence[Member],
    now: datetime.datetime,
    sums: Sums | None = None,
    previous: ConsortiumRoster | None = None,
    days: int = ROSTER_DAYS,
) -> ConsortiumRoster:
    """A new roster, or the one after `previous`. Raises InputError."""
    if previous is not None and previous.consortium != consortium:
        raise InputError(f"the roster before is of consortium '{previous.consortium}', not '{consortium}'")
    try:
        file = _File(
            format=2,
            consortium=consortium,
            serial=1 if previous is None else previous.serial + 1,
            previous="" if previous is None else previous.hash.hex(),
            made=format_time(now),
            expires=format_time(now + datetime.timedelta(days=days)),
            sums=sums or Sums(),
            member=tuple(sorted(members, key=lambda m: m.id)),
        )
    except ValidationError as error:
        row = error.errors(include_url=False)[0]
        raise InputError(f"the roster: {row.get('ctx', {}).get('error', row['msg'])}") from None
    return ConsortiumRoster(_canonical(file), file)


def parse_roster(content: bytes, source: str) -> ConsortiumRoster:
    """The roster in `content`. Raises InputError unless it has the one layout that `write_roster` gives it."""
    file = parse_table(content, _File, source)
    if _canonical(file) != content:
        raise InputError(
            f"{source}: not in the layout that `keys roster make` writes (comments, blanks, order); a roster is signed "
            "as it stands and must not be edited"
        )
    return ConsortiumRoster(content, file)


def _canonical(file: _File) -> bytes:
    table = file.model_dump(mode="json")
    return wording.dumps(table).encode()


# ---- Signatures of all members ----


class Signature(Table):
    """A detached signature: whose, over which roster (its hash)."""

    format: Literal[1]
    member: Id
    roster: Bytes32
    signature: Bytes64


def sign_roster(roster: ConsortiumRoster, name: str, identity: Identity) -> bytes:
    """Member `name`'s signature file. Raises InputError unless the roster names this identity."""
    if roster.member(name).identity_key != identity.public_key:
        raise InputError(f"the roster names another identity for '{name}' than the one here")
    signature = identity.sign(LABEL_ROSTER + roster.hash)
    table = {"format": 1, "member": name, "roster": roster.hash.hex(), "signature": signature.hex()}
    return wording.dumps(table).encode()


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
    """Raises ProtocolError unless `folder` holds the signature of every member, and of nobody else; HomeError where
    one is missing."""
    seen = set()
    for path in sorted(folder.glob("*.sig")):
        signature = parse_table(read_bytes(path, "the signature"), Signature, f"'{path}'")
        check_signature(roster, signature)
        seen.add(signature.member)
    missing = [name for name in roster.members if name not in seen]
    if missing:
        raise HomeError(
            f"roster {roster.serial} is not signed by {', '.join(missing)}: signature missing in '{folder}'"
        )


def signature_folder(roster: Path) -> Path:
    """Where the signatures of the roster file lie."""
    return roster.with_suffix(".sig")


# ---- A new identity for a member ----

LABEL_SUCCESSION = b"secure-fvi/identity-succession/1/"


class Succession(Table):
    """An identity's word for the one that follows it, and that one's own."""

    format: Literal[1]
    kind: Literal["identity-succession"]
    member: Id
    before: Bytes32
    after: Bytes32
    made: Time
    signature: Bytes64
    signature_after: Bytes64


def read_succession(content: bytes, source: str) -> Succession:
    """Raises InputError where there is none, ProtocolError unless both identities signed it."""
    found = parse_table(content, Succession, source)
    statement = digest_of(found.member, found.before + found.after, found.made)
    for key, signature in ((found.before, found.signature), (found.after, found.signature_after)):
        if not signed(key, LABEL_SUCCESSION, statement, signature):
            raise ProtocolError(f"{source}: the succession of '{found.member}' is not signed by both identities")
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
