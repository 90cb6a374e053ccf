"""A site's request to join: its identity and the certificate of its TLS key, signed by both keys.

It goes to whoever writes the roster. It holds no secret.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgpack
from pydantic import ValidationError

from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment.consortium import Member
from secure_fvi.deployment.names import Hex32, Hex64, Id, Role, Table, parse_table
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.chain import signed
from secure_fvi.runs import wording

LABEL_REQUEST = b"secure-fvi/request/2/"


class _File(Table):
    format: Literal[2]
    id: Id
    role: Role
    identity: Hex32
    certificate: str
    signature: Hex64


def make_request(name: str, role: Role, identity: Identity, certificate: str) -> str:
    """The text of a request file. certificate: DER in base64."""
    public = identity.public_key.hex()
    signature = identity.sign(LABEL_REQUEST + _statement(name, role, public, certificate)).hex()
    said = {"id": name, "role": role, "identity": public, "certificate": certificate}
    return wording.dumps({"format": 2, **said, "signature": signature})


def read_request(content: bytes, source: str) -> Member:
    """Who asks, as a roster would name it. Raises InputError for no request, ProtocolError where its signature does not
    hold."""
    if content.startswith(b"format = 1\n"):
        raise InputError(f"{source}: a request to an authority, of format 1; make one anew (`keys rotate tls`)")
    file = parse_table(content, _File, source)
    if not signed(
        bytes.fromhex(file.identity),
        LABEL_REQUEST,
        _statement(file.id, file.role, file.identity, file.certificate),
        bytes.fromhex(file.signature),
    ):
        raise ProtocolError(f"{source}: the request is not signed by the identity that it names; it was altered")
    try:
        return Member(id=file.id, role=file.role, identity=file.identity, certificate=file.certificate)
    except ValidationError as error:
        raise InputError(f"{source}: {error.errors()[0]['ctx']['error']}") from None


def _statement(name: str, role: str, identity: str, certificate: str) -> bytes:
    return hashlib.sha256(msgpack.packb([name, role, bytes.fromhex(identity), certificate])).digest()
