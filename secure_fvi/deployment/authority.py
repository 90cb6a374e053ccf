"""The consortium's certificate authority: a folder on a machine that is kept offline.

    ca.key         P-256 key of the authority, encrypted with SECURE_FVI_PASSPHRASE
    ca.crt         its certificate; the roster names its hash
    ca.crl         serial numbers of revoked certificates, signed; newly made by each revocation
    issued.json    what was issued to whom

It vouches for TLS keys only. Whom a site takes for a member is the roster's business, which all sites sign: an
authority that issues a certificate of its own making to an outsider admits nobody.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key

from secure_fvi.deployment.certificates import (
    USES,
    general_name,
    member_uri,
    pinned_name,
    read_certificate,
)
from secure_fvi.deployment.names import check_id, format_time, read_bytes, write_bytes
from secure_fvi.deployment.requests import Request
from secure_fvi.errors import InputError
from secure_fvi.key_files import load_private, store_private

#: Clocks of two sites may differ by this much.
SKEW = datetime.timedelta(minutes=10)
CERTIFICATE_DAYS, REVOCATIONS_DAYS, AUTHORITY_YEARS = 365, 120, 10


def authority_hash(certificate: x509.Certificate) -> bytes:
    """SHA-256 of the authority's certificate in DER form, as rosters name it."""
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


class Authority:
    """The authority in a folder. The private key is read when something is signed."""

    def __init__(self, folder: Path, passphrase: str | None = None) -> None:
        """Raises InputError where the folder holds no authority."""
        self.folder, self._passphrase = folder, passphrase
        register = read_bytes(folder / "issued.json", "the authority's register", 1 << 26)
        try:
            self._register: dict[str, Any] = json.loads(register)
            self.consortium = str(self._register["consortium"])
        except (ValueError, KeyError, TypeError):
            raise InputError(f"'{folder / 'issued.json'}' is no authority's register") from None
        self.certificate = read_certificate(
            read_bytes(folder / "ca.crt", "the authority's certificate"), f"'{folder / 'ca.crt'}'"
        )

    def __repr__(self) -> str:
        return f"Authority({self.consortium!r})"

    @classmethod
    def create(
        cls,
        folder: Path,
        consortium: str,
        now: datetime.datetime,
        passphrase: str | None = None,
        unsealed: bool = False,
    ) -> Authority:
        """A new authority in `folder`. Raises InputError where there is one."""
        try:
            check_id(consortium)
        except ValueError as error:
            raise InputError(f"consortium: {error}") from None
        if (folder / "ca.key").exists():
            raise InputError(f"'{folder}' holds an authority; give a new folder")
        key = generate_private_key(SECP256R1())
        store_private(folder / "ca.key", key, passphrase, unsealed)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"{consortium} authority")])
        public = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        built = (
            _builder(name, name, key.public_key(), now, datetime.timedelta(days=round(365.25 * AUTHORITY_YEARS)))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(public, critical=False)
        )
        certificate = built.sign(key, hashes.SHA256())
        write_bytes(folder / "ca.crt", certificate.public_bytes(serialization.Encoding.PEM))
        write_bytes(folder / "issued.json", _json({"consortium": consortium, "revocations": 0, "issued": []}))
        authority = cls(folder, passphrase)
        authority.renew_revocations(now)
        return authority

    def issued(self) -> list[dict[str, Any]]:
        """What was issued, oldest first: id, role, identity, serial, not_after, revoked (a time, or None)."""
        return list(self._register["issued"])

    def issue(self, request: Request, now: datetime.datetime, days: int = CERTIFICATE_DAYS) -> bytes:
        """The certificate, in PEM form, of the key in `request`, whose code was compared with its site.

        Raises InputError where another identity holds valid certificates under this id.
        """
        if not 1 <= days <= 3650:
            raise InputError(f"days must lie in 1..3650, not {days}")
        for row in self._register["issued"]:
            valid = row["revoked"] is None and row["not_after"] > format_time(now)
            if valid and row["id"] == request.id and row["identity"] != request.identity.hex():
                raise InputError(
                    f"'{request.id}' has a certificate under another identity; revoke it first "
                    f"(`keys authority revoke --id {request.id}`)"
                )
        until = min(now + datetime.timedelta(days=days), self.certificate.not_valid_after_utc)
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(member_uri(self.consortium, request.role, request.id)),
            x509.DNSName(pinned_name(request.tls_key)),
            *map(general_name, request.addresses),
        ]
        key = self._key()
        built = (
            _builder(
                x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, request.id)]),
                self.certificate.subject,
                request.public_key,
                now,
                until - now,
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(USES[request.role]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(request.public_key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        )
        certificate = built.sign(key, hashes.SHA256())
        row = {
            "id": request.id,
            "role": request.role,
            "identity": request.identity.hex(),
            "serial": f"{certificate.serial_number:x}",
            "not_after": format_time(certificate.not_valid_after_utc),
            "revoked": None,
        }
        self._write({**self._register, "issued": [*self._register["issued"], row]})
        return certificate.public_bytes(serialization.Encoding.PEM)

    def revoke(self, name: str, now: datetime.datetime, serial: str | None = None) -> list[str]:
        """Revoke the certificates of member `name`, or the one of `serial` (hex), and make a new list; the serials.

        Raises InputError where none of them is in force.
        """
        rows, found = [dict(row) for row in self._register["issued"]], []
        for row in rows:
            if row["id"] == name and row["revoked"] is None and serial in (None, row["serial"]):
                row["revoked"] = format_time(now)
                found.append(str(row["serial"]))
        if not found:
            which = "" if serial is None else f" with serial {serial}"
            raise InputError(f"'{name}' has no certificate{which} that could be revoked")
        self._write({**self._register, "issued": rows})
        self.renew_revocations(now)
        return found

    def renew_revocations(self, now: datetime.datetime, days: int = REVOCATIONS_DAYS) -> bytes:
        """Make the list of revoked certificates anew, in force for `days`, and return it in PEM form."""
        number = int(self._register["revocations"]) + 1
        built = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now - SKEW)
            .next_update(now + datetime.timedelta(days=days))
            .add_extension(x509.CRLNumber(number), critical=False)
        )
        for row in self._register["issued"]:
            if row["revoked"] is not None:
                revoked = x509.RevokedCertificateBuilder().serial_number(int(row["serial"], 16)).revocation_date(now)
                built = built.add_revoked_certificate(revoked.build())
        pem = built.sign(self._key(), hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        self._write({**self._register, "revocations": number})
        write_bytes(self.folder / "ca.crl", pem)
        return pem

    def _key(self) -> EllipticCurvePrivateKey:
        key = load_private(self.folder / "ca.key", self._passphrase)
        if not isinstance(key, EllipticCurvePrivateKey):
            raise InputError(f"'{self.folder / 'ca.key'}' holds a key of another kind than P-256")
        return key

    def _write(self, register: dict[str, Any]) -> None:
        self._register = register
        write_bytes(self.folder / "issued.json", _json(register))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: Any, now: datetime.datetime, valid: datetime.timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + valid)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _json(table: dict[str, Any]) -> bytes:
    return json.dumps(table, indent=2).encode()
