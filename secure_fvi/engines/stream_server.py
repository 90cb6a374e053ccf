"""The server's end of the streams: silos dial in over mutual TLS 1.3, one stream each, for the length of a job."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import grpc

from secure_fvi.engines.letters import OVERHEAD, Letter, check_letter, read_letter, write_letter
from secure_fvi.engines.remote import Line, Remote, shown
from secure_fvi.engines.stream_messages import (
    GREETING,
    GREETINGS,
    MESSAGE,
    METHOD,
    OPTIONS,
    RECHECK,
    SERVICE,
    Assembler,
    Hello,
    Welcome,
    Whole,
    parts,
    split_address,
)
from secure_fvi.errors import HomeError, InputError, ProtocolError, SecureFVIError, told
from secure_fvi.key_files import TlsFiles
from secure_fvi.wire import PROTOCOLS, agreed

_log = logging.getLogger(__name__)

#: Seconds for the handshakes of a connection, and again for the greeting of a stream.
LOGIN = 10.0
#: Streams that a member may open at once; after that so many a second. A silo that dials again waits longer.
_LOGINS, _LOGINS_A_SECOND = 30.0, 2.0


class _Link:
    """One silo's live stream: the certificate (PEM) with which it was opened, the 32 bytes that the silo drew for it,
    and the digest of the newest letter on it."""

    def __init__(self, certificate: bytes, connection: bytes, context: Any) -> None:
        self.certificate, self.connection, self._context = certificate, connection, context
        self.outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.closed, self.asked = False, b""

    def send(self, exchange: int, message: bytes) -> None:
        """In place of what waits here still: it is of an exchange that is over, and for a silo that reads nothing one
        message after the other would be kept."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.outgoing.get_nowait()
        for frame in parts(exchange, message):
            self.outgoing.put(frame)
        if self.closed:
            self.outgoing.put(None)

    def close(self) -> None:
        """Let what is on its way arrive, and end."""
        self.closed = True
        self.outgoing.put(None)

    def cut(self) -> None:
        """End at once, whether the silo reads what it is sent or not."""
        self.close()
        self._context.cancel()


class _Hasty(Exception):
    """Streams are opened in too quick a succession."""


class StreamServer(Remote):
    """Silos elsewhere, each behind its own stream. Opens its port at once; silos may come and go."""

    def __init__(self, line: Line, listen: str, tls: TlsFiles, admit: Callable[[bytes], str], roster: bytes) -> None:
        """`line`: whose silos and others are let in. `listen`: "host:port", port 0 for any. `admit`: the id of the silo
        whose certificate (PEM) it is given, or ProtocolError with the reason. `roster`: the hash (32 bytes) that a silo
        has to name. Raises InputError where the address cannot be had.
        """
        split_address(listen)  # gRPC takes port 443 where there is none, and one above 65535 modulo 65536
        super().__init__(line)
        self._admit, self._roster = admit, roster
        self._changed = threading.Condition()
        self._links: dict[str, _Link] = {}
        self._greeting: dict[str, Any] = {}  # by silo, the stream whose greeting is awaited
        self._logins: dict[bytes, tuple[float, float]] = {}  # by certificate: streams it may open, and since when
        self._number = 0
        self._digests: dict[int, bytes] = {}  # SHA-256 of the exchange's messages, by object
        self._closing = threading.Event()
        self.refused: deque[str] = deque(maxlen=1000)  # why connections were turned away, newest last
        self._grpc = grpc.server(
            futures.ThreadPoolExecutor((len(line.names) + len(line.others)) * 2 + 8),
            options=(*OPTIONS, *self._options()),
        )
        handler = grpc.stream_stream_rpc_method_handler(self._stream)
        self._grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        credentials = grpc.ssl_server_credentials([(tls.private_key, tls.certificate)], tls.trusted, True)
        try:
            self.port = self._grpc.add_secure_port(listen, credentials)
        except RuntimeError:
            raise InputError(f"cannot listen at '{listen}': the address is taken, or is not this machine's") from None
        self._grpc.start()
        threading.Thread(target=self._keep_checking, daemon=True).start()

    @staticmethod
    def _options() -> tuple[tuple[str, int], ...]:
        """One stream a connection; no connection without one, and none that takes its time before it has one."""
        return (
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", 1),
            ("grpc.server_handshake_timeout_ms", int(1000 * LOGIN)),
            ("grpc.max_connection_idle_ms", int(3000 * LOGIN)),
        )

    def wait_for(self, silos: Sequence[str], seconds: float | None = None) -> bool:
        """Whether all `silos` have connected, within `seconds` where given."""
        with self._changed:
            return self._changed.wait_for(lambda: set(silos) <= self._links.keys(), seconds)

    def close(self) -> None:
        """End all streams and give the port back."""
        self._closing.set()
        with self._changed:
            for link in self._links.values():
                link.close()
        self._grpc.stop(2.0).wait()

    def check_links(self) -> None:
        """Cut the streams of those who would not be let in any more: the roster in force names another certificate for
        them or none, or theirs has expired. Dialing again, they are told why."""
        with self._changed:
            links = dict(self._links)
        for silo, link in links.items():
            try:
                self._admit(link.certificate)
            except SecureFVIError as error:
                _log.warning("the stream of %s is cut: %s", self._named(silo), error)
                link.cut()

    def _keep_checking(self) -> None:
        while not self._closing.wait(RECHECK):
            try:
                self.check_links()
            except OSError as error:  # a file that was just being replaced: whether certificates count is looked at on
                _log.warning("certificates were not looked at again (%s)", error.strerror)

    # ---- an exchange ----

    def _deliver(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        with self._changed:
            self._number += 1
            self._asked, self._answers, self._digests = dict(messages), {}, {}
            for silo in messages:
                link = self._links.get(silo)
                if link is not None:
                    self._send(silo, link)
            began = time.monotonic()
            while not self._settled(began):
                left = self.patience.deadline - (time.monotonic() - began)
                self._changed.wait(max(left, 0.05) if self.patience.on_loss == "drop" else None)
            answers, self._asked = self._answers, {}
            self._absent |= messages.keys() - answers.keys()
        return {silo: answers[silo].message for silo in messages if self._usable(silo, answers.get(silo))}

    def _send(self, silo: str, link: _Link) -> None:
        """The question of the present exchange, in a letter of its own for this stream."""
        body = self._asked[silo]
        if id(body) not in self._digests:  # a broadcast is one object for all silos
            self._digests[id(body)] = hashlib.sha256(body).digest()
        letter = Letter(self._home.id, silo, self._job, secrets.token_bytes(32), MESSAGE, body, link.connection)
        content, link.asked = write_letter(letter, self._home, self._digests[id(body)])
        link.send(self._number, content)

    # ---- streams ----

    def _stream(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """One silo's stream, from its greeting on. Runs in a thread of gRPC's."""
        try:
            silo, certificate, connection, protocol = self._greet(requests, context)
        except SecureFVIError as error:
            text = shown(str(error).encode())
            self.refused.append(text)
            _log.warning("a connection from %s was refused: %s", context.peer(), text)
            hears = shown(told(error).encode()) if isinstance(error, ProtocolError) else HomeError.TOLD
            context.abort(grpc.StatusCode.PERMISSION_DENIED, hears)
        except _Hasty:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams of this silo in too short a time")
        link = _Link(certificate, connection, context)
        context.add_callback(link.close)
        yield GREETINGS.pack(Welcome(self._roster, self._job, protocol))
        with self._changed:
            old = self._links.pop(silo, None)
            if old is not None:  # a silo's newest stream is the one that counts
                old.cut()
            self._links[silo] = link
            self._absent.discard(silo)
            if silo in self._asked and silo not in self._answers:
                self._send(silo, link)
            self._changed.notify_all()
        _log.info("%s has connected", self._named(silo))
        threading.Thread(target=self._read, args=(silo, link, requests), daemon=True).start()
        while (frame := link.outgoing.get()) is not None:
            yield frame
        self._drop(silo, link)

    def _greet(self, requests: Iterator[bytes], context: Any) -> tuple[str, bytes, bytes, int]:
        """Which silo it is, its certificate, what it calls the connection, and the protocol that both speak; raises
        ProtocolError with the reason why it is not let in."""
        seen = context.auth_context()
        version = seen.get("ssl_tls_version", [b""])[0].decode()
        certificate = seen.get("x509_pem_cert", [b""])[0]
        if version != "TLSv1.3":
            raise ProtocolError(f"TLS 1.3 is needed, not {version or 'plaintext'}")
        self._check_pace(certificate)
        silo = self._admit(certificate)
        if silo not in self.bytes_up and silo not in self._others:
            raise ProtocolError(f"'{silo}' takes no part in this job")
        hello = GREETINGS.unpack(self._first(silo, requests, context), Hello, GREETING)
        if hello.roster != self._roster:
            raise ProtocolError(
                f"'{silo}' goes by roster {hello.roster.hex()[:16]}..., this server by {self._roster.hex()[:16]}..."
            )
        protocol = agreed({f"'{silo}'": hello.protocols, "this server": PROTOCOLS})
        if len(hello.connection) != 32:
            raise ProtocolError(f"'{silo}' has drawn no name for its connection")
        return silo, certificate, hello.connection, protocol

    def _check_pace(self, certificate: bytes) -> None:
        """Raises _Hasty for a certificate with which streams are opened in too quick a succession."""
        now = time.monotonic()
        with self._changed:
            left, since = self._logins.get(certificate, (_LOGINS, now))
            left = min(left + (now - since) * _LOGINS_A_SECOND, _LOGINS)
            self._logins[certificate] = (max(left - 1, 0), now)
        if left < 1:
            raise _Hasty

    def _first(self, silo: str, requests: Iterator[bytes], context: Any) -> bytes:
        """The first message of a stream of `silo`. Of one silo one stream is listened to, the newest; raises
        ProtocolError for one that is overtaken, or says nothing in time: it keeps no thread from the others."""
        with self._changed:
            before, self._greeting[silo] = self._greeting.get(silo), context
        if before is not None:
            before.cancel()
        timer = threading.Timer(LOGIN, context.cancel)
        timer.start()
        try:
            return next(requests, b"")
        except Exception:  # gRPC raises what it likes when a stream ends
            raise ProtocolError(f"{self._named(silo)} opened a stream and did not say in time what for") from None
        finally:
            timer.cancel()
            with self._changed:
                if self._greeting.get(silo) is context:
                    del self._greeting[silo]

    def _read(self, silo: str, link: _Link, requests: Iterator[bytes]) -> None:
        """Take in what the silo answers until its stream ends."""
        assembler = Assembler(lambda: self.longest + OVERHEAD)
        try:
            for frame in requests:
                whole = assembler.add(frame)
                if whole is not None:
                    self._take(silo, link, whole)
        except SecureFVIError as error:
            _log.warning("the stream of silo '%s' is cut: %s", silo, error)
        except Exception:
            # gRPC raises what it likes when a peer goes; a stream that ends is no error here.
            _log.debug("the stream of silo '%s' ended", silo, exc_info=True)
        link.close()
        self._drop(silo, link)

    def _take(self, silo: str, link: _Link, whole: Whole) -> None:
        """Raises ProtocolError for what is no answer of the silo's to what it was asked on this stream."""
        with self._changed:
            question = link.asked
            if self._links.get(silo) is not link:  # overtaken: it is asked on its newest stream again
                return
            if whole.exchange != self._number:  # too late
                self._absent.discard(silo)
                return
        letter, _ = read_letter(whole.message, self._home, "silo", "holder", most=self.longest)
        check_letter(letter, silo, self._job, link.connection, question)
        with self._changed:
            if self._links.get(silo) is not link:
                return
            self._absent.discard(silo)
            if whole.exchange != self._number or silo not in self._asked or silo in self._answers:
                return  # too late, or a second time
            self._answers[silo] = Whole(whole.exchange, letter.status, letter.body)
            if letter.status or len(self._answers) == len(self._asked) or self.patience.on_loss == "drop":
                self._changed.notify_all()

    def _drop(self, silo: str, link: _Link) -> None:
        with self._changed:
            if self._links.get(silo) is link:
                del self._links[silo]
                _log.info("%s has gone", self._named(silo))
                self._changed.notify_all()
