"""A site's request to join: its identity and a certificate request for its TLS key, in one file signed by both keys.

The same file goes to the authority, which issues the certificate, and to whoever writes the roster. It holds no secret.
"""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple

import msgpack
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment.certificates import general_name, is_p256, key_hash
from secure_fvi.deployment.names import Hex32, Hex64, Id, Role, Table, parse_table, reading_code
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.chain import signed
from secure_fvi.runs import wording

LABEL_REQUEST = b"secure-fvi/request/1/"


class _File(Table):
    format: Literal[1]
    id: Id
    role: Role
    identity: Hex32
    addresses: tuple[str, ...] = ()
    csr: str
    signature: Hex64


class Request(NamedTuple):
    """Who asks. identity: Ed25519 public key; public_key: of TLS; tls_key: its hash, as rosters pin it."""

    id: str
    role: Role
    identity: bytes
    addresses: tuple[str, ...]
    public_key: EllipticCurvePublicKey
    tls_key: bytes

    @property
    def code(self) -> str:
        """What the site reads to the authority: of id, role and both keys."""
        return reading_code("request", _statement(self.id, self.role, self.identity, self.addresses, self.tls_key))


def make_request(
    name: str, role: Role, identity: Identity, tls: EllipticCurvePrivateKey, addresses: tuple[str, ...] = ()
) -> str:
    """The text of a request file. addresses: host names and IP addresses under which a server is reached."""
    for address in addresses:
        general_name(address)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(tls, hashes.SHA256())
    statement = _statement(name, role, identity.public_key, addresses, key_hash(tls.public_key()))
    return wording.dumps(
        {
            "format": 1,
            "id": name,
            "role": role,
            "identity": identity.public_key.hex(),
            "addresses": list(addresses),
            "csr": csr.public_bytes(serialization.Encoding.PEM).decode(),
            "signature": identity.sign(LABEL_REQUEST + statement).hex(),
        }
    )


def read_request(content: bytes, source: str) -> Request:
    """The request in `content`. Raises InputError for no request, ProtocolError where a signature does not hold."""
    file = parse_table(content, _File, source)
    try:
        csr = x509.load_pem_x509_csr(file.csr.encode())
    except ValueError:
        raise InputError(f"{source}: 'csr' is no certificate request in PEM form") from None
    key = csr.public_key()
    if not isinstance(key, EllipticCurvePublicKey) or not is_p256(key):
        raise InputError(f"{source}: the TLS key must be on P-256, as `keys init` makes it")
    if not csr.is_signature_valid:
        raise ProtocolError(f"{source}: the certificate request is not signed with its own key")
    identity, tls_key = bytes.fromhex(file.identity), key_hash(key)
    statement = _statement(file.id, file.role, identity, file.addresses, tls_key)
    if not signed(identity, LABEL_REQUEST, statement, bytes.fromhex(file.signature)):
        raise ProtocolError(f"{source}: the request is not signed by the identity that it names; it was altered")
    return Request(file.id, file.role, identity, file.addresses, key, tls_key)


def _statement(name: str, role: str, identity: bytes, addresses: tuple[str, ...], tls_key: bytes) -> bytes:
    return hashlib.sha256(msgpack.packb([name, role, identity, list(addresses), tls_key])).digest()
