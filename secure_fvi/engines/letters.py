"""Letters: how a member's word reaches another, whoever carries it. Each is signed by its sender's identity, which the
roster names, for one receiver, one job and one connection; an answer names the letter that it answers.

TLS, or FLARE, says at whose machine a connection ends: by a key that lies in clear in a process which listens, and that
a thief has without the identity. What is asked and answered counts by its letter alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from secure_fvi import wire
from secure_fvi.aggregation.messages import Codec
from secure_fvi.deployment.names import Role, now
from secure_fvi.engines.stream_messages import STATUS
from secure_fvi.errors import ProtocolError
from secure_fvi.privacy.chain import signed

if TYPE_CHECKING:
    from secure_fvi.deployment.home import Home

LABEL = b"secure-fvi/letter/1/"
#: What a message of FLARE holds: a letter, or the word of a site that still computes.
LETTER, BUSY = "letter", "busy"
#: Where FLARE's process of a site, which sees nothing else of it, finds the site: a folder with a pipe in and one out,
#: and a file that who uses them has locked. In goes a number and a letter; out come the number, one of these bytes and,
#: behind the first of them, the answer.
DOOR_VARIABLE = "SECURE_FVI_DOOR"
DOORS = ("in", "out", "turn")
NUMBER_BYTES = 16
_SAID_WITHIN = 10.0  # seconds in which a site says at least that it works on it
ANSWERED, WORKING, REFUSED, FAILED = b"A", b"W", b"R", b"F"
#: Bytes of a letter beyond its body, at most.
OVERHEAD = 4096


class Letter(NamedTuple):
    """One message or one answer. number: 32 fresh bytes, or the digest of the letter that is answered. connection: 32
    bytes that the silo drew for the stream on which this travels, so that what was said on one says nothing on another;
    empty where no stream carries it."""

    sender: str
    receiver: str
    job: str
    number: bytes
    status: int
    body: bytes
    connection: bytes = b""


class Envelope(NamedTuple):
    """What travels. head: what is signed, the letter with its body's SHA-256 in the body's place."""

    head: bytes
    body: bytes
    signature: bytes


_name, _32 = wire.text(200, printable=True), wire.binary(32)
CODEC = Codec(
    {
        Letter: (1, (_name, _name, _name, _32, STATUS, _32, wire.binary(0, 32))),
        Envelope: (2, (wire.binary(most=OVERHEAD), wire.binary(), wire.binary(64))),
    }
)


def write_letter(letter: Letter, home: Home, body: bytes | None = None) -> tuple[bytes, bytes]:
    """The letter, signed by the home's identity, and the digest that an answer has to name. body: the SHA-256 of its
    body, where that was worked out before, as for a broadcast."""
    digest = hashlib.sha256(letter.body).digest() if body is None else body
    head = CODEC.pack(letter._replace(body=digest))
    named = hashlib.sha256(LABEL + head).digest()
    identity = home.identity_in(home.roster(now()))
    return CODEC.pack(Envelope(head, letter.body, identity.sign(LABEL + named))), named


def read_letter(content: bytes, home: Home, *roles: Role, most: int) -> tuple[Letter, bytes]:
    """A letter to this home with a body of at most `most` bytes, and its digest. Raises ProtocolError that names the
    reason."""
    if len(content) > most + OVERHEAD:
        raise ProtocolError(f"a letter of more than the {most} bytes that are expected at most")
    envelope = CODEC.unpack(content, Envelope)
    head = CODEC.unpack(envelope.head, Letter)
    roster = home.roster(now())
    sender = roster.member(head.sender)
    if sender.role not in roles:
        raise ProtocolError(f"a letter of '{sender.id}', a {sender.role} in the roster")
    named = hashlib.sha256(LABEL + envelope.head).digest()
    if not signed(sender.identity_key, LABEL, named, envelope.signature):
        raise ProtocolError(f"a letter that is not signed by the identity of '{sender.id}'")
    if hashlib.sha256(envelope.body).digest() != head.body:
        raise ProtocolError(f"a letter of '{sender.id}' with another body than it signed")
    if head.receiver != home.id:
        raise ProtocolError(f"a letter to '{head.receiver}'")
    return head._replace(body=envelope.body), named


def check_letter(letter: Letter, sender: str, job: str, connection: bytes, number: bytes | None = None) -> None:
    """Raises ProtocolError for a letter of somebody else, or about something else; number: of the letter that it has to
    answer, where it is an answer; empty where nothing was asked, which no letter answers."""
    if letter.sender != sender:
        raise ProtocolError(f"a letter of '{letter.sender}', where '{sender}' speaks")
    if letter.job != job or letter.connection != connection:
        raise ProtocolError(f"a letter of '{sender}' about another job, or of another connection")
    if number is not None and letter.number != number:
        raise ProtocolError("an answer to another letter")


class Way:
    """From FLARE's process of a site to its door, in `folder`. Raises OSError where another process is there, or
    nobody waits behind it."""

    def __init__(self, folder: Path) -> None:
        ways = [folder / name for name in DOORS]
        with contextlib.ExitStack() as undo:
            self._turn = undo.enter_context(ways[2].open("rb"))
            fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
            letters = os.open(ways[0], os.O_WRONLY | os.O_NONBLOCK)
            os.set_blocking(letters, True)
            self._letters = undo.enter_context(Connection(letters, readable=False))
            answers = os.open(ways[1], os.O_RDONLY | os.O_NONBLOCK)
            os.set_blocking(answers, True)
            self._answers = undo.enter_context(Connection(answers, writable=False))
            self._undo = undo.pop_all()

    def ask(self, letter: bytes) -> tuple[bytes, bytes]:
        """What kind of answer the site gives, and the answer; one that another process was to have is passed over."""
        number, said = os.urandom(NUMBER_BYTES), b""
        self._letters.send_bytes(number + letter)
        while said[:NUMBER_BYTES] != number:
            if not self._answers.poll(_SAID_WITHIN):
                raise OSError("the site says nothing")
            said = self._answers.recv_bytes()
        return said[NUMBER_BYTES : NUMBER_BYTES + 1], said[NUMBER_BYTES + 1 :]

    def close(self) -> None:
        """Let the site go on to the next."""
        self._undo.close()
