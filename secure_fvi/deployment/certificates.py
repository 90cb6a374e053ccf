"""TLS certificates of a consortium: whose they are, what pins them, and how one is checked.

A member's certificate carries its name as URI `secure-fvi://CONSORTIUM/ROLE/ID`, and a DNS name made from the SHA-256
of its public key. A client that expects the pinned key asks TLS for that DNS name, so that a certificate of another
key, such as a member's old one, fails in the handshake. Keys are P-256, since BoringSSL (gRPC) takes no Ed25519.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID

from secure_fvi.deployment.names import ROLES, Role, format_time
from secure_fvi.errors import InputError, ProtocolError

_SCHEME = "secure-fvi://"
_ZONE = "secure-fvi.invalid"
CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
#: What a role's certificate may do. Silos and holders dial out; the server also speaks to itself in health checks.
USES = {"silo": [CLIENT], "holder": [CLIENT], "server": [SERVER, CLIENT]}


class Subject(NamedTuple):
    """Whom a certificate names. tls_key: SHA-256 of the public key, 32 bytes."""

    consortium: str
    role: Role
    id: str
    tls_key: bytes
    serial: int
    not_after: datetime.datetime


def key_hash(key: EllipticCurvePublicKey) -> bytes:
    """SHA-256 of the public key in DER form: 32 bytes."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).digest()


def pinned_name(tls_key: bytes) -> str:
    """The DNS name that only certificates of this key (32 bytes, `key_hash`) have: what a client asks TLS for."""
    return f"{base64.b32encode(tls_key).decode().rstrip('=').lower()}.{_ZONE}"


def member_uri(consortium: str, role: str, name: str) -> str:
    return f"{_SCHEME}{consortium}/{role}/{name}"


def general_name(address: str) -> x509.GeneralName:
    """A host name or IP address as a certificate holds it. Raises InputError for neither."""
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        pass
    try:
        return x509.DNSName(address.encode("idna").decode())
    except (UnicodeError, ValueError):
        raise InputError(f"address '{address}' is neither a host name nor an IP address") from None


def is_p256(key: object) -> bool:
    return isinstance(key, EllipticCurvePublicKey | EllipticCurvePrivateKey) and isinstance(key.curve, SECP256R1)


def read_certificate(pem: bytes, source: str) -> x509.Certificate:
    """The one certificate in `pem`. Raises InputError."""
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        raise InputError(f"{source} is no certificate in PEM form") from None


def read_revocations(pem: bytes, source: str) -> x509.CertificateRevocationList:
    """The revocation list in `pem`. Raises InputError."""
    try:
        return x509.load_pem_x509_crl(pem)
    except ValueError:
        raise InputError(f"{source} is no revocation list in PEM form") from None


def subject_of(certificate: x509.Certificate) -> Subject:
    """What a certificate says of itself; unchecked. Raises ProtocolError where it is none of a consortium's."""
    key = certificate.public_key()
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        dns = names.get_values_for_type(x509.DNSName)
    except (x509.ExtensionNotFound, ValueError):
        uris, dns = [], []
    if len(uris) != 1 or not uris[0].startswith(_SCHEME) or not isinstance(key, EllipticCurvePublicKey):
        raise ProtocolError("the certificate names no member of a consortium")
    consortium, _, rest = uris[0].removeprefix(_SCHEME).partition("/")
    role, _, name = rest.partition("/")
    found = next((r for r in ROLES if r == role), None)
    if found is None or not consortium or not name:
        raise ProtocolError("the certificate names no member of a consortium")
    tls_key = key_hash(key)
    if pinned_name(tls_key) not in dns:
        raise ProtocolError(f"the certificate of {role} '{name}' does not carry the name of its own key")
    return Subject(consortium, found, name, tls_key, certificate.serial_number, certificate.not_valid_after_utc)


def check_revocations(
    revocations: x509.CertificateRevocationList, authority: x509.Certificate, now: datetime.datetime
) -> None:
    """Raises ProtocolError unless the authority signed this list and it is still in force."""
    key = authority.public_key()
    if not isinstance(key, EllipticCurvePublicKey) or not revocations.is_signature_valid(key):
        raise ProtocolError("the revocation list is not signed by the consortium's authority")
    until = revocations.next_update_utc
    if until is None or until < now:
        raise ProtocolError(
            f"the revocation list expired at {format_time(until) if until else 'an unknown time'}: "
            "ask the authority for a new one (`keys authority crl`)"
        )


def check_certificate(
    certificate: x509.Certificate,
    authority: x509.Certificate,
    revocations: x509.CertificateRevocationList,
    now: datetime.datetime,
) -> Subject:
    """Whose certificate it is. Raises ProtocolError: not by the authority, revoked, not yet or no longer valid."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        raise ProtocolError("the certificate was not issued by the consortium's authority") from None
    subject = subject_of(certificate)
    who = f"the certificate of {subject.role} '{subject.id}'"
    if now > certificate.not_valid_after_utc:
        raise ProtocolError(f"{who} expired at {format_time(certificate.not_valid_after_utc)}")
    if now < certificate.not_valid_before_utc:
        raise ProtocolError(f"{who} is not valid before {format_time(certificate.not_valid_before_utc)}")
    if now > authority.not_valid_after_utc:
        raise ProtocolError(f"the authority's certificate expired at {format_time(authority.not_valid_after_utc)}")
    check_revocations(revocations, authority, now)
    if revocations.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None:
        raise ProtocolError(f"{who} was revoked (serial {certificate.serial_number:x})")
    return subject


def revocation_number(revocations: x509.CertificateRevocationList) -> int:
    """The number of a revocation list, which grows with each."""
    try:
        return int(revocations.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number)
    except x509.ExtensionNotFound:
        raise InputError("the revocation list has no number; `keys authority crl` makes one") from None
