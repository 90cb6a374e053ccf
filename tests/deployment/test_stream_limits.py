"""Streams opened to keep others out, or to fill the server's memory: bounded for each member, in time and bytes."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from deployment_world import NOW, World
from test_stream import Dialer, dialed, echo, serving, tls_of

from secure_fvi.engines import stream_server
from secure_fvi.engines.remote import Patience
from secure_fvi.engines.stream_client import _chain_file
from secure_fvi.engines.stream_messages import (
    CHUNK_BYTES,
    CODEC,
    GREETINGS,
    METHOD,
    OPTIONS,
    SERVICE,
    Assembler,
    Hello,
    Part,
    parts,
)
from secure_fvi.engines.stream_server import StreamServer
from secure_fvi.errors import ProtocolError

OTHERS = ("east", "north")
_ONE = threading.Lock()  # to read and to write one TLS connection in two threads at once breaks its records


@contextmanager
def opened(world: World, server: StreamServer, frames: list[bytes], count: int, shared: bool = False) -> Iterator[list]:
    """`count` streams of 'south' that send `frames` and then nothing; shared: on one connection."""
    tls, stop = tls_of(world.homes["south"]), threading.Event()
    credentials = grpc.ssl_channel_credentials(tls.trusted, tls.private_key, tls.certificate)
    name = world.homes["south"].roster(NOW).tls_name("hub")
    channels, calls = [], []

    def sent() -> Iterator[bytes]:
        yield from frames
        stop.wait()

    for at in range(count):
        if not shared or not at:
            options = (*OPTIONS, ("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1))
            channels.append(grpc.secure_channel(f"127.0.0.1:{server.port}", credentials, options))
        calls.append(channels[-1].stream_stream(f"/{SERVICE}/{METHOD}")(sent()))
    try:
        yield calls
    finally:
        stop.set()
        for channel in channels:
            channel.close()


def others_connect(world: World, server: StreamServer, seconds: float) -> bool:
    dialers = [Dialer(world, server, name, echo) for name in OTHERS]
    try:
        return server.wait_for(OTHERS, seconds)
    finally:
        for dialer in dialers:
            dialer.stop()


def test_silent_streams_of_one_member_keep_nobody_out(world: World) -> None:
    """More than the server has threads; of each silo the newest is listened to, the others are ended."""
    with serving(world) as server:
        for shared in (True, False):
            with opened(world, server, [], 20, shared) as calls:
                time.sleep(0.5)
                assert others_connect(world, server, 8)
                if not shared:
                    assert sum(not call.is_active() for call in calls) >= 18


def test_without_the_rule_silent_streams_lock_the_others_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a server that listens to whatever stream was opened."""
    monkeypatch.setattr(StreamServer, "_first", lambda self, silo, requests, context: next(requests, b""))
    monkeypatch.setattr(StreamServer, "_options", staticmethod(lambda: ()))
    with serving(world) as server, opened(world, server, [], 20, True):
        time.sleep(0.5)
        assert not others_connect(world, server, 1.5)


def test_a_stream_that_says_nothing_is_ended(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_server, "LOGIN", 0.5)
    with serving(world) as server, opened(world, server, [], 1) as (call,):
        with pytest.raises(grpc.RpcError):
            next(call)
        assert call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.PERMISSION_DENIED)
        for _ in range(100):  # the server's thread forgets it a moment later
            if not server._greeting:
                break
            time.sleep(0.02)
        assert server._greeting == {}


def test_a_silos_newest_stream_is_the_one_that_counts(world: World) -> None:
    with serving(world, names=("north",)) as server, dialed(world, server, echo, ("north",)) as (first,):
        link = server._links["north"]
        first.client._stop.set()  # it does not dial again
        with dialed(world, server, echo, ("north",)):
            for _ in range(100):
                if server._links.get("north") is not link:
                    break
                time.sleep(0.02)
            assert link.closed
            assert server.exchange({"north": b"x"}) == {"north": b"answer to x"}


def test_a_greeting_is_short(world: World) -> None:
    """The control, the same length in an answer, is `test_bytes_arrive_and_are_counted`."""
    with serving(world) as server, opened(world, server, [bytes(CHUNK_BYTES)], 1) as (call,):
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert "where at most 1024 are expected" in caught.value.details()


def test_a_member_that_opens_stream_after_stream_is_slowed_down(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_server, "_LOGINS", 3.0)
    with serving(world) as server:
        codes = []
        for _ in range(8):
            with opened(world, server, [b"x"], 1) as (call,), pytest.raises(grpc.RpcError):
                next(call)
            codes.append(call.code())
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
        assert codes[0] == grpc.StatusCode.PERMISSION_DENIED
        assert others_connect(world, server, 8)


def test_an_answer_is_no_longer_than_the_job_has_use_for() -> None:
    frames = list(parts(1, bytes(3 * CHUNK_BYTES)))
    whole = Assembler(lambda: 3 * CHUNK_BYTES)
    assert [whole.add(frame) for frame in frames][-1] is not None
    short = Assembler(lambda: 2 * CHUNK_BYTES - 1)
    with pytest.raises(ProtocolError, match="more than the"):  # at its first part, which says how many there will be
        short.add(frames[0])


def test_small_parts_of_a_message_are_not_kept() -> None:
    """A member's million parts of two bytes took 26 times their length. The control: where parts of two bytes are whole
    chunks, 10,000 of them are kept."""
    for body in (b"", b"xy", bytes(CHUNK_BYTES - 1)):
        with pytest.raises(ProtocolError, match="no whole chunk"):
            Assembler().add(CODEC.pack(Part(1, 0, 1 << 20, 0, body)))
    control = Assembler(chunk=2)
    for number in range(10_000):
        assert control.add(CODEC.pack(Part(1, number, 1 << 20, 0, b"xy"))) is None
    assert len(control._bodies) == 10_000


def _append(link: stream_server._Link, exchange: int, message: bytes) -> None:
    """As messages were sent: behind those that wait."""
    for frame in parts(exchange, message):
        link.outgoing.put(frame)


def test_who_reads_nothing_is_kept_one_message(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that holds its stream open and reads nothing, in a job that goes on without it. The control keeps all
    that it was ever asked: nine messages of two frames each."""
    greeting = GREETINGS.pack(Hello(world.homes["south"].roster(NOW).hash, bytes(32)))
    for control in (False, True):
        with (
            monkeypatch.context() as patched,
            serving(world, Patience("drop", 0.05, 0), ("south",)) as server,
            opened(world, server, [greeting], 1),
        ):
            if control:
                patched.setattr(stream_server._Link, "send", _append)
            assert server.wait_for(["south"], 20)
            for _ in range(9):
                server._absent.clear()
                assert server.exchange({"south": bytes(CHUNK_BYTES + 1)}) == {}
            kept = server._links["south"].outgoing.qsize()
            assert kept >= 15 if control else kept <= 2


def ended_within(link: socket.socket, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            with _ONE:
                link.settimeout(0.02)
                if not link.recv(4096):
                    return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.later
@pytest.mark.parametrize("slow", ["silent", "a byte at a time"])
def test_half_open_connections_are_ended(world: World, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """60 connections from one address that never finish their handshake, and 10 of a member that go on a byte at a
    time after it; the members connect meanwhile. The control, a longer time for the handshake, keeps them open."""
    monkeypatch.setattr(stream_server, "LOGIN", 2.0)
    with serving(world) as server:
        held = _held(world, server, slow)
        assert others_connect(world, server, 8)
        assert all(ended_within(link, 5) for link in held)
    monkeypatch.setattr(stream_server, "LOGIN", 60.0)
    with serving(world) as server:
        held = _held(world, server, slow, 2)
        assert not any(ended_within(link, 1.5) for link in held)
        for link in held:
            link.close()


def taken_of(port: int, most: int) -> int:
    """How many of `most` bytes of one request, in clear and from nobody in particular, are taken before its end."""
    sent, block = 0, bytes(1 << 20)
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as link:
        link.sendall(f"POST /{SERVICE}/{METHOD} HTTP/1.1\r\nHost: x\r\nContent-Length: {most}\r\n\r\n".encode())
        while sent < most:
            link.sendall(block)
            sent += len(block)
    return sent


def test_no_body_is_read_before_a_login(world: World) -> None:
    """Of an unfinished request no more is taken than sockets hold, and the members connect. The control: whoever reads
    bodies before anybody has shown a certificate takes all of it."""
    most = 64 << 20
    with serving(world) as server:
        assert taken_of(server.port, most) <= 16 << 20
        assert others_connect(world, server, 8)
    with socket.create_server(("127.0.0.1", 0)) as greedy:

        def read() -> None:
            link, _ = greedy.accept()
            with link:
                while link.recv(1 << 20):
                    pass

        reader = threading.Thread(target=read)
        reader.start()
        assert taken_of(greedy.getsockname()[1], most) == most
        reader.join(20)


def _held(world: World, server: StreamServer, slow: str, count: int | None = None) -> list[socket.socket]:
    address = ("127.0.0.1", server.port)
    if slow == "silent":
        return [socket.create_connection(address) for _ in range(count or 60)]
    tls = tls_of(world.homes["south"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=tls.trusted.decode())
    with _chain_file(tls) as path:
        context.load_cert_chain(path)
    name = world.homes["south"].roster(NOW).tls_name("hub")
    held: list[socket.socket] = [
        context.wrap_socket(socket.create_connection(address), server_hostname=name) for _ in range(count or 10)
    ]
    preface: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for byte in b"PRI * HTTP/2.0":
        preface.put(bytes([byte]))

    def drip() -> None:
        while not preface.empty():
            byte = preface.get()
            for link in held:
                try:
                    with _ONE:
                        link.sendall(byte)
                except OSError:
                    return
            time.sleep(0.3)

    threading.Thread(target=drip, daemon=True).start()
    return held
