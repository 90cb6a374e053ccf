"""What carrier `messages` sends through Flower: letters, signed by the sender's identity in the roster.

Flower's TLS ends at the SuperLink, and its keys admit a node, not a silo. So a letter carries its sender's
certificate, by which the receiver looks the sender up in its own roster; the identity that the
roster names signs the whole letter, and an answer names the letter that it answers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from secure_fvi import wire
from secure_fvi.aggregation.messages import MAX_MESSAGE_BYTES, Codec
from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.names import Role, now
from secure_fvi.engines.stream_messages import _STATUS, CHUNK_BYTES
from secure_fvi.errors import ProtocolError
from secure_fvi.privacy.chain import signed

LABEL = b"secure-fvi/flower-letter/1/"
_MOST_PIECES = MAX_MESSAGE_BYTES // CHUNK_BYTES + 1


class Letter(NamedTuple):
    """receiver: a site's id; none asks whoever gets it for an empty answer, so that its id becomes known. number: 32
    fresh bytes, or in an answer the digest of the letter that it answers."""

    certificate: bytes
    job: str
    receiver: str
    number: bytes
    status: int
    body: bytes


class _Signed(NamedTuple):
    letter: bytes
    signature: bytes


class Received(NamedTuple):
    """A letter that was checked. digest: 32 bytes that an answer has to name."""

    sender: str
    letter: Letter
    digest: bytes


_text = wire.text(200, printable=True)

_CODEC = Codec(
    {
        Letter: (1, (wire.binary(most=1 << 16), _text, _text, wire.binary(32), _STATUS, wire.binary())),
        _Signed: (2, (wire.binary(), wire.binary(64))),
    }
)


def write_letter(letter: Letter, identity: Identity) -> tuple[dict[str, bytes], bytes]:
    """The letter in pieces that Flower takes, by name, and its digest."""
    packed = _CODEC.pack(letter)
    digest = hashlib.sha256(LABEL + packed).digest()
    whole = memoryview(_CODEC.pack(_Signed(packed, identity.sign(LABEL + digest))))
    pieces = range(0, len(whole), CHUNK_BYTES)
    return {f"{n:04d}": bytes(whole[at : at + CHUNK_BYTES]) for n, at in enumerate(pieces)}, digest


def read_letter(pieces: Mapping[str, bytes], home: Home, roles: Sequence[Role]) -> Received:
    """The letter in `pieces`, from a member with one of `roles`. Raises ProtocolError that names the reason."""
    names = [f"{n:04d}" for n in range(len(pieces))]
    if not names or len(names) > _MOST_PIECES or set(names) != set(pieces):
        raise ProtocolError("a letter with pieces missing")
    envelope = _CODEC.unpack(b"".join(pieces[name] for name in names), _Signed)
    letter = _CODEC.unpack(envelope.letter, Letter)
    sender = home.roster(now()).whose(letter.certificate, now(), *roles)
    digest = hashlib.sha256(LABEL + envelope.letter).digest()
    if not signed(sender.identity_key, LABEL, digest, envelope.signature):
        raise ProtocolError(f"a letter that is not signed by the identity of '{sender.id}'")
    return Received(sender.id, letter, digest)
