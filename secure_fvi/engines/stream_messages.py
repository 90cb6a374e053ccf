"""What travels on a stream: a greeting each way, then letters in numbered parts. MessagePack of a fixed schema.

silo                            server
Hello(roster, connection, protocols) ->
                       <-       Welcome(roster, job, protocol)
                       <-       Part(exchange, 0, 2, MESSAGE, ...), Part(exchange, 1, 2, MESSAGE, ...)
Part(exchange, 0, 1, MESSAGE | REFUSAL | RESTART, ...)  ->

Greetings are TLS's word alone; what is asked and answered after them is in `letters`, which an identity signs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from secure_fvi import wire
from secure_fvi.aggregation.messages import MAX_MESSAGE_BYTES, PROTOCOL, PROTOCOL_LIST, Codec
from secure_fvi.errors import InputError, ProtocolError

#: The one method of the service, bytes both ways.
SERVICE, METHOD = "secure_fvi.Stream", "Exchange"
CHUNK_BYTES = 4 << 20
#: Until the receiver knows its job, and at least for the records that sites countersign, a message may be so long.
LONGEST = 64 << 20
#: Seconds after which it is looked again whether the other end's certificate still counts.
RECHECK = 60.0
#: A greeting of either end.
GREETING = wire.Limit(1024)
#: What a part's `status` says of the whole message. RESTART: the silo needs the session to be opened anew.
MESSAGE, REFUSAL, RESTART = 0, 1, 2
_LONGEST_REASON = 4000
_count, STATUS = wire.whole(), wire.one_of(MESSAGE, REFUSAL, RESTART)

#: The same at both ends. A part with its frame is somewhat longer than a chunk.
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", CHUNK_BYTES + (64 << 10)),
    ("grpc.max_receive_message_length", CHUNK_BYTES + (64 << 10)),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.enable_retries", 0),
)


class Hello(NamedTuple):
    """Silo to server: the hash of the roster that it goes by; connection: 32 fresh bytes, which every letter on this
    stream names (none before protocol 5); protocols: the versions that it speaks."""

    roster: bytes
    connection: bytes = b""
    protocols: Sequence[int] = wire.PROTOCOLS


class Welcome(NamedTuple):
    """Server to silo: the same roster, the job that the stream is for, and the highest protocol that both speak."""

    roster: bytes
    job: str
    protocol: int = wire.PROTOCOLS[-1]


class Part(NamedTuple):
    """One of the `pieces` of the message of an exchange; both ways."""

    exchange: int
    number: int
    pieces: int
    status: int
    body: bytes


#: Of greetings, whatever is spoken after them: a later release has to read an older one's, to say that it is older.
GREETING_FORM = 3
GREETINGS = Codec(
    {
        Hello: (1, (wire.binary(32), wire.binary(0, 32), PROTOCOL_LIST)),
        Welcome: (2, (wire.binary(32), wire.text(200, 1, printable=True), PROTOCOL)),
    },
    GREETING_FORM,
)
CODEC = Codec({Part: (3, (_count, _count, _count, STATUS, wire.binary(most=CHUNK_BYTES)))})


def parts(exchange: int, message: bytes, status: int = MESSAGE, chunk: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The frames that carry `message`."""
    count = max(1, -(-len(message) // chunk))
    view = memoryview(message)
    for number in range(count):
        body = bytes(view[number * chunk : (number + 1) * chunk])
        yield CODEC.pack(Part(exchange, number, count, status, body))


def reason(text: str) -> bytes:
    """A refusal's reason as it travels."""
    return text.encode()[:_LONGEST_REASON]


class Whole(NamedTuple):
    """A message put together."""

    exchange: int
    status: int
    message: bytes


class Assembler:
    """Puts the parts of one direction together again. They come in order, since a stream keeps it."""

    def __init__(self, longest: Callable[[], int] = lambda: MAX_MESSAGE_BYTES, chunk: int = CHUNK_BYTES) -> None:
        """longest: bytes of the longest message that is expected by now. chunk: of each part but the last."""
        self._longest, self._chunk = longest, chunk
        self._head: tuple[int, int, int] | None = None  # exchange, pieces, status
        self._bodies: list[bytes] = []
        self._length = 0

    def add(self, frame: bytes) -> Whole | None:
        """The message that `frame` completes, if it does. Raises ProtocolError for a frame out of place."""
        part = CODEC.unpack(frame, Part)
        head = (part.exchange, part.pieces, part.status)
        if self._head is None or part.number == 0:  # a sender that was cut off begins a message anew
            self._head, self._bodies, self._length = head, [], 0
        if head != self._head or part.number != len(self._bodies) or part.number >= part.pieces:
            raise ProtocolError("a part of a message out of place")
        if part.number + 1 < part.pieces and len(part.body) != self._chunk:  # a body of two bytes takes fifty to keep
            raise ProtocolError("a part of a message that is no whole chunk, and not its last")
        longest = min(self._longest(), MAX_MESSAGE_BYTES)
        self._length += len(part.body)
        if max(self._length, (part.pieces - 1) * self._chunk) > longest:
            raise ProtocolError(f"a message of more than the {longest} bytes that are expected at most")
        self._bodies.append(part.body)
        if part.number + 1 < part.pieces:
            return None
        message = part.body if part.pieces == 1 else b"".join(self._bodies)
        self._head, self._bodies = None, []
        return Whole(part.exchange, part.status, message)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port". Raises InputError."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) >= 1 << 16:
        raise InputError(f"'{address}' must look like hub.example.org:8443, without a scheme")
    return host.strip("[]"), int(port)
