"""A silo's end of the stream: it dials out, answers, and dials again when the connection breaks."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from secure_fvi.engines.letters import OVERHEAD, Letter, check_letter, read_letter, write_letter
from secure_fvi.engines.stream_messages import (
    GREETING,
    GREETINGS,
    LONGEST,
    MESSAGE,
    METHOD,
    OPTIONS,
    RECHECK,
    REFUSAL,
    RESTART,
    SERVICE,
    Assembler,
    Hello,
    Welcome,
    parts,
    reason,
    split_address,
)
from secure_fvi.errors import BudgetError, DataError, JobError, PolicyError, ProtocolError, SessionLost, told
from secure_fvi.key_files import TlsFiles
from secure_fvi.wire import PROTOCOLS, agreed

if TYPE_CHECKING:
    from secure_fvi.deployment.home import Home

_log = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_PROBE_SECONDS = 10.0


#: OpenSSL's codes of a certificate that is not valid yet, or has expired.
_OUT_OF_TIME = (9, 10)


class Doubtful(ConnectionError):
    """A handshake failed in a way that tells of a wrong server, or of somebody on the way to the right one, or of a
    server that was just being stopped. Says what it would tell: nobody has signed it, so it ends nothing."""


class Malformed(ConnectionError):
    """What the server sent is no message, which says nothing of a silo or its job: the stream is cut, nothing has
    changed, and the next one begins anew."""


#: Job and message in, answer out; raises SecureFVIError to refuse, SessionLost where its session cannot go on.
Handler = Callable[[str, bytes], bytes]


class StreamClient:
    """One silo's way to one server."""

    def __init__(
        self,
        address: str,
        tls: Callable[[], TlsFiles],
        tls_name: Callable[[], str],
        check_server: Callable[[bytes], None],
        roster: Callable[[], bytes],
        handle: Handler,
        home: Home,
        server: str,
    ) -> None:
        """`address`: "host:port". What follows is asked for at each connection, since files may be renewed: keys, the
        name that the server's certificate must have, a check of that certificate (PEM; ProtocolError refuses it), the
        hash of the roster. `handle` makes the answers. `home`: whose letters they are, to and from the member `server`.
        """
        self._host, self._port = split_address(address)
        self._address = address
        self._tls, self._tls_name, self._check_server, self._roster = tls, tls_name, check_server, roster
        self._handle, self._home, self._server = handle, home, server
        self._last: tuple[str, bytes, int, bytes] | None = None  # job, message, status, answer
        self._stop = threading.Event()
        self._call: Any = None
        self._certificate, self._checked = b"", 0.0  # the server's, and when it was looked at
        #: Bytes of the longest message that the server may send by now.
        self.longest: Callable[[], int] = lambda: LONGEST

    def stop(self) -> None:
        """Make `run` return; for another thread, or for `handle` after its last answer."""
        self._stop.set()

    def hang_up(self) -> None:
        """Break the connection that is open; `run` dials again unless it was stopped."""
        call = self._call
        if call is not None:
            call.cancel()

    def run(self) -> None:
        """Answer until stopped. Raises ProtocolError, naming the reason, where either end refuses the other: this one
        by its own files, the server through TLS. Who is anybody's guess is waited out, and stands in the log."""
        pause, said = _FIRST_PAUSE, ""
        while not self._stop.is_set():
            try:
                self._check_peer()
                began = time.monotonic()
                self._connected()
                pause = _FIRST_PAUSE if time.monotonic() - began > 1 else pause
                said = ""
            except (OSError, grpc.RpcError) as error:
                if isinstance(error, grpc.RpcError) and error.code() == grpc.StatusCode.PERMISSION_DENIED:
                    raise ProtocolError(f"the server refused this silo: {error.details()}") from None
                wrong = isinstance(error, Doubtful | Malformed)
                what = f"the server {error}" if wrong else "no connection yet"
                if what != said:
                    _log.log(logging.WARNING if wrong else logging.INFO, "%s: %s; trying again", self._address, what)
                    said = what
            # Half of the pause is random, so that silos do not come back all at once.
            self._stop.wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _check_peer(self) -> None:
        """Look at the server's certificate first: gRPC's client verifies it against the roster's, but shows none,
        and one that has expired by this site's clock would go unnoticed."""
        self._certificate = peer_certificate(self._host, self._port, self._tls(), self._tls_name())
        self._check_server(self._certificate)
        self._checked = time.monotonic()

    def _check_again(self) -> None:
        """Whether the server's certificate still counts, every so often. Raises ProtocolError where it does not."""
        if time.monotonic() - self._checked >= RECHECK:
            self._check_server(self._certificate)
            self._checked = time.monotonic()

    def _connected(self) -> None:
        """One connection, from dialing to its end."""
        tls = self._tls()
        credentials = grpc.ssl_channel_credentials(tls.trusted, tls.private_key, tls.certificate)
        options = (*OPTIONS, ("grpc.ssl_target_name_override", self._tls_name()), ("grpc.use_local_subchannel_pool", 1))
        outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        roster, connection = self._roster(), os.urandom(32)
        outgoing.put(GREETINGS.pack(Hello(roster, connection)))
        with grpc.secure_channel(self._address, credentials, options) as channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(_until_none(outgoing))
            self._call = call
            try:
                if not self._stop.is_set():  # it may have been set while there was no call to break
                    self._converse(call, outgoing, roster, connection)
            finally:
                self._call = None
                outgoing.put(None)

    def _converse(
        self, frames: Iterator[bytes], outgoing: queue.SimpleQueue[bytes | None], roster: bytes, connection: bytes
    ) -> None:
        greeting = next(frames, None)
        if greeting is None:  # a server that was just being stopped
            raise ConnectionError("the stream ended before its greeting")
        with _malformed("greeting"):
            welcome = GREETINGS.unpack(greeting, Welcome, GREETING)
        if welcome.roster != roster:
            raise ProtocolError(f"the server goes by roster {welcome.roster.hex()[:16]}..., not by this silo's")
        agreed({"the server": [welcome.protocol], "this silo": PROTOCOLS})
        _log.info("connected to %s, protocol %d", self._address, welcome.protocol)
        assembler = Assembler(lambda: self.longest() + OVERHEAD)
        for frame in frames:
            with _malformed("frame"):
                whole = assembler.add(frame)
            if whole is None:
                continue
            self._check_again()
            with _malformed("letter"):
                letter, question = read_letter(whole.message, self._home, "server", most=self.longest())
                check_letter(letter, self._server, welcome.job, connection)
            status, answer = self._answer(letter.job, letter.body)
            reply = Letter(self._home.id, self._server, letter.job, question, status, answer, connection)
            for out in parts(whole.exchange, write_letter(reply, self._home)[0], status):
                outgoing.put(out)
            if self._stop.is_set():
                break
        outgoing.put(None)
        for _ in frames:  # the server ends the stream once it has read ours to its end
            pass

    def _answer(self, job: str, message: bytes) -> tuple[int, bytes]:
        """The answer; the same bytes again for a message that comes again."""
        if self._last is not None and self._last[:2] == (job, message):
            return self._last[2:]
        status, answer = answered(self._handle, job, message)
        if status == RESTART:
            return status, answer
        self._last = (job, message, status, answer)
        return status, answer


#: What a server hears, whatever of a silo's data was the reason.
_AS_DATA = f"{DataError.TOLD}, or computing on them failed; the site's log says more"


def answered(handle: Handler, job: str, message: bytes) -> tuple[int, bytes]:
    """Status and answer; nothing of an unforeseen error but its kind, and of what names this site's files nothing."""
    try:
        return MESSAGE, handle(job, message)
    except SessionLost as error:
        _log.warning("%s", error)
        return RESTART, b""
    except (ProtocolError, PolicyError, JobError) as error:
        _log.warning("a message was refused: %s", error)
        return REFUSAL, reason(told(error))
    except DataError as error:  # it counts rows, which is for this site alone
        _log.error("job '%s' is refused: %s", job, error)
        return REFUSAL, reason(_AS_DATA)
    except (BudgetError, OSError) as error:
        _log.exception("a message could not be answered")
        return REFUSAL, reason(f"{type(error).__name__}; the site's log says more")
    except Exception:
        # Whatever else goes wrong may follow from data, and its kind tell of them: it stays at the site.
        _log.exception("a message could not be answered")
        return REFUSAL, reason(_AS_DATA)


def peer_certificate(host: str, port: int, tls: TlsFiles, name: str) -> bytes:
    """The certificate (PEM) with which the server proves itself in a TLS 1.3 handshake.

    Raises OSError where nobody is there, of which Doubtful where the certificate is not a trusted one or not of the key
    `name`, or the other end speaks no TLS 1.3, or closes: whoever is on the way can do all of that.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=tls.trusted.decode())
    with _chain_file(tls) as path:
        context.load_cert_chain(path)
    try:
        with (
            socket.create_connection((host, port), _PROBE_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=name) as secured,
        ):
            seen = secured.getpeercert(binary_form=True)
            _await_word(secured)
    except ssl.SSLCertVerificationError as error:
        by_clock = error.verify_code in _OUT_OF_TIME
        what = "shows a certificate that is not for today" if by_clock else "is not the one in the roster"
        raise Doubtful(f"{what}: {error.verify_message}{'; compare the clocks' if by_clock else ''}") from None
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION"):
            raise Doubtful(f"speaks no TLS 1.3 ({error.reason})") from None
        raise
    assert seen is not None
    return ssl.DER_cert_to_PEM_cert(seen).encode()


def _await_word(secured: ssl.SSLSocket) -> None:
    """Under TLS 1.3 the server judges the silo's certificate after the silo's handshake; gRPC speaks first.

    Raises Doubtful. What closes before is no judgement: a proxy, say, whose server is away.
    """
    try:
        if secured.recv(1):
            return
    except (ConnectionResetError, ssl.SSLEOFError):
        pass
    raise Doubtful(
        "closes after the handshake: it does not take this silo's certificate, or is no server of secure-fvi"
    )


@contextlib.contextmanager
def _chain_file(tls: TlsFiles) -> Iterator[Path]:
    """Python's ssl reads keys from files alone: one in memory where the system has such, readable by this user only."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("tls", os.MFD_CLOEXEC)
        try:
            os.write(handle, tls.private_key + tls.certificate)
            yield Path(f"/proc/self/fd/{handle}")
        finally:
            os.close(handle)
        return
    with tempfile.NamedTemporaryFile() as file:
        file.write(tls.private_key + tls.certificate)
        file.flush()
        yield Path(file.name)


@contextlib.contextmanager
def _malformed(what: str) -> Iterator[None]:
    try:
        yield
    except ProtocolError as error:
        raise Malformed(f"sent a {what} that is none: {error}") from None


def _until_none(frames: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
    while (frame := frames.get()) is not None:
        yield frame
