"""Which member stands at the other end of a TLS connection."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509

from secure_fvi.deployment.certificates import check_certificate, pinned_name, read_certificate
from secure_fvi.deployment.consortium import ConsortiumRoster, Member
from secure_fvi.deployment.names import Role
from secure_fvi.deployment.rotation import Endorsement, pinned_key
from secure_fvi.errors import ProtocolError


@dataclass(frozen=True)
class Admission:
    """The rules of one moment: the signed roster, the authority, what it revoked, which TLS keys were changed since."""

    roster: ConsortiumRoster
    authority: x509.Certificate
    revocations: x509.CertificateRevocationList
    endorsements: Sequence[Endorsement] = ()

    def member(self, certificate: bytes, now: datetime.datetime, *roles: Role) -> Member:
        """The member whose certificate (PEM, as TLS accepted it) this is; of one of `roles`, where any are given.

        Raises ProtocolError naming the reason.
        """
        self.roster.check_time(now)
        read = read_certificate(certificate, "what the other side presented")
        subject = check_certificate(read, self.authority, self.revocations, now)
        if subject.consortium != self.roster.consortium:
            raise ProtocolError(f"the certificate is of consortium '{subject.consortium}'")
        member = self.roster.member(subject.id)
        if subject.role != member.role:
            raise ProtocolError(f"'{member.id}' is a {member.role} in the roster, its certificate says {subject.role}")
        if roles and member.role not in roles:
            expected = " or ".join(roles)
            raise ProtocolError(f"'{member.id}' is a {member.role} in the roster; here a {expected} is expected")
        if subject.tls_key != pinned_key(self.roster, member, self.endorsements):
            raise ProtocolError(
                f"the certificate of '{member.id}' is for another TLS key than roster {self.roster.serial} names: "
                "the key was replaced, or the authority issued it to somebody else"
            )
        return member

    def tls_name(self, member: str) -> str:
        """What to ask TLS for when dialing `member` (gRPC: `grpc.ssl_target_name_override`): only its key has it."""
        return pinned_name(pinned_key(self.roster, self.roster.member(member), self.endorsements))
