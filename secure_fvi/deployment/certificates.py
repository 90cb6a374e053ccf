"""TLS certificates of a consortium: each member makes its own, and the roster that all sign holds it.

There is no authority: a member's certificate signs itself, and either end of a connection trusts those of the roster
and no others. A certificate carries a DNS name made from the SHA-256 of its public key, which a client asks TLS for.
Keys are P-256, since BoringSSL (gRPC) takes no Ed25519.
"""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import ipaddress
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from secure_fvi.deployment.names import Role
from secure_fvi.errors import InputError

_ZONE = "secure-fvi.invalid"
CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
#: What a role's certificate may do. Silos and holders dial out; the server also speaks to itself in health checks.
USES = {"silo": [CLIENT], "holder": [CLIENT], "server": [SERVER, CLIENT]}
#: Clocks of two sites may differ by this much.
SKEW = datetime.timedelta(hours=1)
#: Longer than a roster lasts: the next roster brings the next certificate.
CERTIFICATE_DAYS = 730


def make_certificate(
    key: EllipticCurvePrivateKey,
    name: str,
    role: Role,
    addresses: Sequence[str],
    now: datetime.datetime,
    days: int = CERTIFICATE_DAYS,
) -> x509.Certificate:
    """A certificate of `key` for member `name`, by that key. addresses: host names and IP addresses of a server. It
    signs no other: neither its key usage nor its constraints let it. Raises InputError for a bad address."""
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    public = key.public_key()
    names = [x509.DNSName(pinned_name(key_hash(public))), *map(general_name, addresses)]
    usage = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    usage |= dict.fromkeys(("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"), False)
    return (
        x509.CertificateBuilder(
            own, own, public, x509.random_serial_number(), now - SKEW, now + datetime.timedelta(days=days)
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=True, **usage), critical=True)
        .add_extension(x509.ExtendedKeyUsage(USES[role]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )


def key_hash(key: EllipticCurvePublicKey) -> bytes:
    """SHA-256 of the public key in DER form: 32 bytes."""
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).digest()


def pinned_name(tls_key: bytes) -> str:
    """The DNS name that only certificates of this key (32 bytes, `key_hash`) have: what a client asks TLS for."""
    return f"{base64.b32encode(tls_key).decode().rstrip('=').lower()}.{_ZONE}"


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


def pem_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def named_by(certificate: x509.Certificate) -> str:
    """Whom a certificate says that it is of; unchecked, and maybe nobody."""
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


# ---- As rosters and requests hold it: DER in base64 ----


def as_text(certificate: x509.Certificate) -> str:
    return base64.b64encode(certificate.public_bytes(serialization.Encoding.DER)).decode()


@functools.lru_cache(4096)
def from_text(text: str) -> x509.Certificate:
    """Raises ValueError unless it is a certificate as `make_certificate` makes it: on P-256, signed with its own
    key, with the DNS name of that key, and no authority's."""
    # Of kinds of keys, signatures and names that it does not know, `cryptography` raises errors without a common base.
    try:
        found = x509.load_der_x509_certificate(base64.b64decode(text, validate=True))
    except Exception:
        raise ValueError("must be a certificate: DER in base64") from None
    try:
        key = found.public_key()
    except Exception:
        key = None
    if not isinstance(key, EllipticCurvePublicKey) or not is_p256(key):
        raise ValueError("the TLS key must be on P-256, as `keys init` makes it")
    try:
        found.verify_directly_issued_by(found)
    except Exception:
        raise ValueError("the certificate is not signed with its own key") from None
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        carried = names.get_values_for_type(x509.DNSName)
        constraints = found.extensions.get_extension_for_class(x509.BasicConstraints).value
    except Exception:
        raise ValueError("the certificate lacks what `keys init` writes into it") from None
    if pinned_name(key_hash(key)) not in carried:
        raise ValueError("the certificate does not carry the name of its own key")
    if constraints.ca:
        raise ValueError("the certificate is an authority's, which signs others")
    return found
