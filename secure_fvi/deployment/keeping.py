"""What is done to a site's folder: files that come from others are installed, keys rotated, expiry foreseen."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey, generate_private_key

from secure_fvi.deployment.certificates import (
    check_revocations,
    key_hash,
    read_certificate,
    read_revocations,
    subject_of,
)
from secure_fvi.deployment.consortium import ConsortiumRoster, parse_roster
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.names import format_time, read_bytes, write_bytes
from secure_fvi.deployment.requests import make_request
from secure_fvi.deployment.rotation import endorse, read_endorsement, read_succession, succeed
from secure_fvi.deployment.signatures import check_signature, read_signature, sign_roster, signature_folder
from secure_fvi.errors import InputError, ProtocolError, SecureFVIError
from secure_fvi.key_files import create_key, load_key, store_private


def request_text(home: Home, tls: str = "tls.key", identity: str = "identity.pem") -> str:
    """The site's request, with the keys in these files of its folder."""
    signer = load_key(home.path / identity, home.passphrase)
    return make_request(home.id, home.role, signer, home.tls_key(tls), home.addresses)


def install(home: Home, source: Path, now: datetime.datetime) -> str:
    """Put a file that came from others where it belongs, and say what it was.

    The authority's certificate and list, this site's certificate, a roster, a signature, an endorsement, a succession.
    Raises InputError for anything else, ProtocolError for a file that does not hold what it should.
    """
    content = read_bytes(source, "the file", 1 << 26)
    where = f"'{source}'"
    if b"BEGIN X509 CRL" in content:
        return _install_revocations(home, content, where, now)
    if b"BEGIN CERTIFICATE-----" in content:
        return _install_certificate(home, content, where, now)
    if source.suffix == ".sig":
        signature = read_signature(content, where)
        path = home.newest_roster_file()
        roster = _read_roster(path)
        check_signature(roster, signature)
        _put(signature_folder(path) / f"{signature.member}.sig", content)
        return f"signature of '{signature.member}' under roster {roster.serial}"
    if b'kind = "tls-endorsement"' in content:
        endorsement = read_endorsement(content, where)
        _put(home.path / "endorsements" / f"{endorsement.member}.toml", content)
        return f"endorsement of a TLS key of '{endorsement.member}'"
    if b'kind = "identity-succession"' in content:
        succession = read_succession(content, where)
        _put(home.path / "successions" / f"{succession.member}-{succession.after.hex()[:16]}.toml", content)
        return f"succession of the identity of '{succession.member}'"
    roster = parse_roster(content, where)
    home.check_own(roster)
    home.check_not_older(roster)
    path = home.roster_file(roster.serial)
    if not path.exists() or path.read_bytes() != content:
        shutil.rmtree(signature_folder(path), ignore_errors=True)  # they are under another draft
        _put(path, content)
    return f"roster {roster.serial} of '{roster.consortium}', not in force before all have signed it"


def _install_revocations(home: Home, content: bytes, where: str, now: datetime.datetime) -> str:
    found = read_revocations(content, where)
    check_revocations(found, home.authority(), now)
    path = home.path / "ca.crl"
    before = path.read_bytes() if path.exists() else None
    write_bytes(path, content)
    try:
        home.revocations(now)  # not older than what was seen
    except SecureFVIError:
        if before is not None:
            write_bytes(path, before)
        raise
    return f"revocation list with {len(found)} {'entry' if len(found) == 1 else 'entries'}"


def _install_certificate(home: Home, content: bytes, where: str, now: datetime.datetime) -> str:
    found = read_certificate(content, where)
    if found.issuer == found.subject:
        path = home.path / "ca.crt"
        if path.exists() and path.read_bytes() != content:
            raise InputError(f"{where} is another authority than '{path}'; move that one away first")
        write_bytes(path, content)
        return "the authority's certificate; the signed roster will say whether it is the right one"
    subject = subject_of(found)
    if (subject.id, subject.role) != (home.id, home.role):
        raise InputError(f"{where} is for {subject.role} '{subject.id}', this site is {home.role} '{home.id}'")
    following = home.path / "next" / "tls.key"
    public = found.public_key()
    if following.exists() and home.tls_key("next/tls.key").public_key() == public:
        assert isinstance(public, EllipticCurvePublicKey)
        told = _endorse(home, public, now) if home.in_force else ""
        _retire(home, "tls.key", now)
        following.rename(home.path / "tls.key")
    elif home.tls_key().public_key() == public:
        told = ""
    else:
        raise InputError(f"{where} is for another key than this site's TLS key")
    write_bytes(home.path / "tls.crt", content)
    return f"certificate of this site, valid until {format_time(found.not_valid_after_utc)}{told}"


def _endorse(home: Home, public: EllipticCurvePublicKey, now: datetime.datetime) -> str:
    notice = home.path / f"{home.id}.endorsement.toml"
    roster = _read_roster(home.roster_file(home.in_force))
    write_bytes(notice, endorse(home.id, home.identity(), roster.hash, key_hash(public), now))
    _put(home.path / "endorsements" / f"{home.id}.toml", notice.read_bytes())
    return f"; send '{notice}' to the other members, who install it"


def sign(home: Home, now: datetime.datetime) -> tuple[ConsortiumRoster, Path]:
    """Sign the newest roster, whose code was compared. The roster, and the signature file to send."""
    file = home.newest_roster_file()
    roster = _read_roster(file)
    home.check_own(roster)
    home.check_not_older(roster)
    roster.check_time(now)
    path = signature_folder(file) / f"{home.id}.sig"
    _put(path, sign_roster(roster, home.id, home.identity_in(roster)))
    return roster, path


def accept(home: Home, now: datetime.datetime) -> ConsortiumRoster:
    """Check the newest roster with everybody's signatures; from here on it is in force at this site."""
    roster = home.check_roster(home.newest_roster_file(), now)
    home.accept(roster)
    following = home.path / "next" / "identity.pem"
    if following.exists() and home.identity_in(roster).public_key != home.identity().public_key:
        _retire(home, "identity.pem", now)
        _retire(home, "identity.pub", now)
        for name in ("identity.pem", "identity.pub"):
            (home.path / "next" / name).rename(home.path / name)
    return roster


def rotate_tls(home: Home) -> str:
    """Make the next TLS key; the text of the request for its certificate. The present one serves until that comes."""
    home.identity()  # where the keys here are locked, that is what is wrong
    store_private(home.path / "next" / "tls.key", generate_private_key(SECP256R1()), home.passphrase, not home.sealed)
    return request_text(home, tls="next/tls.key")


def rotate_identity(home: Home, now: datetime.datetime) -> tuple[str, bytes]:
    """Make the next identity; the texts of its request and of its succession. The present one serves until the roster
    that names the next is accepted."""
    home.identity()
    following = create_key(home.path / "next" / "identity.pem", home.passphrase, not home.sealed)
    return request_text(home, identity="next/identity.pem"), succeed(home.id, home.identity(), following, now)


def expiring(home: Home, now: datetime.datetime, within: datetime.timedelta) -> Iterator[tuple[bool, str]]:
    """What runs out, or is wrong: (True where it is past or within `within`, a line that says so)."""
    looked: list[tuple[str, str, datetime.datetime | None]] = []
    try:
        roster = home.roster(now)
        revocations = read_revocations(read_bytes(home.path / "ca.crl", "the revocation list", 1 << 26), "'ca.crl'")
        looked = [
            ("certificate", "rotate it: keys rotate tls", home.certificate().not_valid_after_utc),
            ("authority", "make a new one and a new roster", home.authority().not_valid_after_utc),
            ("revocation list", "ask the authority: keys authority crl", revocations.next_update_utc),
            ("roster", "make and sign the next: keys roster make --previous", roster.expires),
        ]
    except SecureFVIError as error:
        yield True, str(error)
    for what, remedy, until in looked:
        if until is None:
            continue
        days = (until - now).days
        soon = until - now <= within
        state = "EXPIRED" if until < now else f"expires in {days} days"
        yield soon, f"{what}: {state} ({format_time(until)}){f'; {remedy}' if soon else ''}"
    if looked:
        try:
            home.admission(now).member(home.certificate().public_bytes(serialization.Encoding.PEM), now)
            yield False, "roster signed by all, certificate in force"
        except (ProtocolError, InputError) as error:
            yield True, str(error)


def _read_roster(path: Path) -> ConsortiumRoster:
    return parse_roster(read_bytes(path, "the roster"), f"'{path}'")


def _retire(home: Home, name: str, now: datetime.datetime) -> None:
    old = home.path / "old"
    old.mkdir(mode=0o700, exist_ok=True)
    stem, _, suffix = name.partition(".")
    (home.path / name).rename(old / f"{stem}-{now:%Y%m%dT%H%M%S}.{suffix}")


def _put(path: Path, content: bytes) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_bytes(path, content)
