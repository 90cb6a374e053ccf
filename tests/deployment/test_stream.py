"""The stream between server and silos: what it carries arrives, whoever is not admitted is told why."""

from __future__ import annotations

import contextlib
import datetime
import logging
import random
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from deployment_world import NOW, World

from secure_fvi import wire
from secure_fvi.aggregation.roster import Identity
from secure_fvi.deployment.consortium import ConsortiumRoster
from secure_fvi.deployment.home import Home
from secure_fvi.engines import letters, stream_client, stream_server
from secure_fvi.engines.remote import Line, Patience
from secure_fvi.engines.stream_client import StreamClient
from secure_fvi.engines.stream_messages import CHUNK_BYTES, MESSAGE, Assembler, Hello, Welcome, Whole, parts
from secure_fvi.engines.stream_server import StreamServer
from secure_fvi.errors import AggregationError, HomeError, InputError, ProtocolError, SessionLost
from secure_fvi.key_files import TlsFiles, create_key

SILOS = ("east", "north", "south")
Handle = Callable[[str, bytes], bytes]


def tls_of(home: Home) -> TlsFiles:
    """As the deployed parties ask for it: silos and holders take the server alone, and it takes them."""
    roster = home.roster(NOW)
    dialing = [*roster.of_role("silo"), *roster.of_role("holder")]
    return home.credentials(dialing if home.role == "server" else roster.of_role("server"))


@contextmanager
def serving(
    world: World,
    patience: Patience = Patience(),  # noqa: B008
    names: tuple[str, ...] = SILOS,
    listen: str = "127.0.0.1:0",
    home: Home | None = None,
) -> Iterator[StreamServer]:
    hub = home or world.homes["hub"]
    roster = hub.roster(NOW).hash

    def admit(certificate: bytes) -> str:
        return hub.roster(NOW).whose(certificate, NOW, "silo").id

    server = StreamServer(Line(names, "job-1", hub, patience), listen, tls_of(hub), admit, roster)
    try:
        yield server
    finally:
        server.close()


class Dialer:
    """A silo that dials the server from a thread, and the error with which it ended."""

    def __init__(self, world: World, server: StreamServer, name: str, handle: Handle, home: Home | None = None) -> None:
        site = home or world.homes[name]

        def check(certificate: bytes) -> None:
            site.roster(NOW).whose(certificate, NOW, "server")

        self.client = StreamClient(
            f"127.0.0.1:{server.port}", lambda: tls_of(site), lambda: site.roster(NOW).tls_name("hub"),
            check, lambda: site.roster(NOW).hash, handle, site, "hub",
        )  # fmt: skip
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.client.run()
        except Exception as error:
            self.error = error

    def refused(self, *words: str) -> None:
        self.thread.join(20)
        assert isinstance(self.error, ProtocolError), self.error
        for word in words:
            assert word in str(self.error)

    def stop(self) -> None:
        self.client.stop()
        self.client.hang_up()
        self.thread.join(20)
        assert not self.thread.is_alive()


def echo(job: str, message: bytes) -> bytes:
    assert job == "job-1"
    return b"answer to " + message


@contextmanager
def dialed(
    world: World, server: StreamServer, handle: Handle, names: tuple[str, ...] = SILOS
) -> Iterator[list[Dialer]]:
    dialers = [Dialer(world, server, name, handle) for name in names]
    try:
        assert server.wait_for(names, 20)
        yield dialers
    finally:
        for dialer in dialers:
            dialer.stop()


def _put_together(frames: list[bytes]) -> None:
    assembler = Assembler(chunk=10)
    for frame in frames:
        assembler.add(frame)


def test_messages_of_any_length_are_put_together_again() -> None:
    rng = random.Random(1)
    for length in (0, 1, 9, 10, 11, 57):
        message, frames = rng.randbytes(length), []
        frames = list(parts(3, message, 1, chunk=10))
        assert len(frames) == max(1, -(-length // 10))
        assembler = Assembler(chunk=10)
        assert [assembler.add(f) for f in frames[:-1]] == [None] * (len(frames) - 1)
        assert assembler.add(frames[-1]) == Whole(3, 1, message)
    frames = list(parts(3, b"x" * 25, chunk=10))
    for wrong in ([0, 2], [1], [0, 1, 1], [0, 1, 0, 2]):
        with pytest.raises(ProtocolError, match="out of place"):
            _put_together([frames[at] for at in wrong])
    assembler = Assembler(chunk=10)  # a sender that was cut off begins anew
    assert [assembler.add(frames[at]) for at in (0, 1, 0, 1)] == [None] * 4
    assert assembler.add(frames[2]) == Whole(3, 0, b"x" * 25)


@pytest.mark.later
def test_bytes_arrive_and_are_counted(world: World) -> None:
    big = random.Random(2).randbytes(2 * CHUNK_BYTES + 12_345)
    with serving(world) as server, dialed(world, server, echo):
        assert server.exchange(dict.fromkeys(SILOS, b"one")) == dict.fromkeys(SILOS, b"answer to one")
        found = server.exchange({"north": big, "south": b""})
        assert found == {"north": b"answer to " + big, "south": b"answer to "}
        assert server.exchanges == 2
        assert server.bytes_down == {"east": 3, "north": 3 + len(big), "south": 3}
        assert server.bytes_up == {"east": 13, "north": 23 + len(big), "south": 23}
        times = []
        for at in range(200):
            began = time.perf_counter()
            server.exchange({silo: str(at).encode() for silo in SILOS})
            times.append(time.perf_counter() - began)
        logging.getLogger(__name__).info("%.2f ms an exchange", sorted(times)[100] * 1e3)


def test_a_broken_connection_gets_the_stored_answer(world: World) -> None:
    """The stream breaks after the silo has worked out its answer and before it is sent."""
    worked: list[bytes] = []
    with serving(world, names=("north",)) as server:
        box: list[Dialer] = []

        def work(job: str, message: bytes) -> bytes:
            worked.append(message)
            if len(worked) == 2:
                box[0].client.hang_up()
            return b"answer %d" % len(worked)

        with dialed(world, server, work, ("north",)) as dialers:
            box.extend(dialers)
            assert server.exchange({"north": b"a"}) == {"north": b"answer 1"}
            assert server.exchange({"north": b"b"}) == {"north": b"answer 2"}
            assert server.exchange({"north": b"c"}) == {"north": b"answer 3"}
    assert worked == [b"a", b"b", b"c"]


@pytest.mark.later
def test_waiting_and_dropping(world: World) -> None:
    patience = Patience("drop", 1.0, least=2)
    silent = threading.Event()

    def slow(job: str, message: bytes) -> bytes:
        if message == b"hard":
            silent.wait(20)
        return b"done"

    with serving(world, patience) as server, dialed(world, server, echo, ("east", "south")):
        with dialed(world, server, slow, ("north",)):
            assert set(server.exchange(dict.fromkeys(SILOS, b"hard"))) == {"east", "south"}
            began = time.monotonic()
            assert set(server.exchange(dict.fromkeys(SILOS, b"more"))) == {"east", "south"}
            assert time.monotonic() - began < 0.9  # who missed a deadline is not waited for again
            silent.set()
            for _ in range(100):
                if len(server.exchange(dict.fromkeys(SILOS, b"easy"))) == 3:
                    break
                time.sleep(0.05)
            else:
                raise AssertionError("it was not taken back")
        server.patience = Patience("wait")
        late = threading.Timer(0.5, lambda: box.append(Dialer(world, server, "north", echo)))
        box: list[Dialer] = []
        late.start()
        assert set(server.exchange(dict.fromkeys(SILOS, b"x"))) == set(SILOS)
        box[0].stop()


def test_a_refusal_names_its_reason_and_no_data(world: World) -> None:
    def refuse(job: str, message: bytes) -> bytes:
        if message == b"session":
            raise SessionLost("gone")
        if message == b"data":
            raise AggregationError("the value 42.5 exceeds its bound")
        raise ProtocolError("not today")

    with serving(world, names=("north",)) as server, dialed(world, server, refuse, ("north",)):
        with pytest.raises(ProtocolError, match="silo 'north' refused: not today"):
            server.exchange({"north": b"x"})
        with pytest.raises(ProtocolError, match="its data do not fit the model, or computing on them failed") as caught:
            server.exchange({"north": b"data"})
        assert "42" not in str(caught.value)
        with pytest.raises(SessionLost, match="north"):
            server.exchange({"north": b"session"})
        server.patience = Patience("drop", 5.0)
        assert server.exchange({"north": b"x"}) == {}


def doubted(caplog: pytest.LogCaptureFixture, what: str) -> None:
    """Waits for the line of the log that says so."""
    until = time.monotonic() + 20
    while what not in caplog.text:
        assert time.monotonic() < until, caplog.text
        time.sleep(0.02)


def test_who_is_not_admitted_is_told_why_and_the_others_go_on(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("east", "north")
    with serving(world, names=names) as server, dialed(world, server, echo, ("east",)):
        Dialer(world, server, "south", echo).refused("'south' takes no part in this job")

        stranger = Home(world.homes["north"].path)  # its roster's hash has one other byte
        changed = bytes([stranger.roster(NOW).hash[0] ^ 1]) + stranger.roster(NOW).hash[1:]
        dialer = Dialer.__new__(Dialer)
        dialer.client = StreamClient(
            f"127.0.0.1:{server.port}", lambda: tls_of(stranger), lambda: stranger.roster(NOW).tls_name("hub"),
            lambda certificate: None, lambda: changed, echo, stranger, "hub",
        )  # fmt: skip
        dialer.error = None
        dialer.thread = threading.Thread(target=dialer._run, daemon=True)
        dialer.thread.start()
        dialer.refused("goes by roster", changed.hex()[:16])

        # A key of his own, in a member's name.
        mallory = Home.create(tmp_path / "mallory", "north", "silo", unsealed=True)
        forged = mallory.credentials(stranger.roster(NOW).of_role("server"))
        dialer.client = StreamClient(
            f"127.0.0.1:{server.port}", lambda: forged,
            lambda: stranger.roster(NOW).tls_name("hub"), lambda certificate: None, lambda: changed, echo,
            stranger, "hub",
        )  # fmt: skip
        dialer.error = None
        dialer.thread = threading.Thread(target=dialer._run, daemon=True)
        dialer.thread.start()
        doubted(caplog, "does not take this silo's certificate")  # nobody has signed that: it is tried again
        assert dialer.thread.is_alive()
        dialer.stop()

        world.without("north")
        world.put_in_force(world.homes["hub"])
        Dialer(world, server, "north", echo).refused("the server refused this silo", "'north' is for another TLS key")
        assert any("another TLS key than roster 2 names" in text for text in server.refused)
        assert server.exchange({"east": b"still here"}) == {"east": b"answer to still here"}


def test_a_refusal_tells_nobody_where_the_servers_files_lie(world: World) -> None:
    """Its own roster lacks a signature, in the middle of a change, say. The control: its own log names the file."""
    home = world.homes["hub"]
    with serving(world) as server:
        next(home.roster_file(1).with_suffix(".sig").glob("*.sig")).unlink()
        dialer = Dialer(world, server, "north", echo)
        dialer.refused("the server refused this silo", HomeError.TOLD)
        assert str(home.path) not in str(dialer.error)
        assert any(str(home.path) in text for text in server.refused)


def test_a_stream_ends_with_its_certificate(world: World) -> None:
    with serving(world, names=("east", "north")) as server, dialed(world, server, echo, ("east", "north")) as dialers:
        server.check_links()
        assert server.exchange({"north": b"before"}) == {"north": b"answer to before"}
        world.without("north")
        server.check_links()  # the next roster is not in force here yet
        assert server.exchange({"north": b"still"}) == {"north": b"answer to still"}
        world.put_in_force(world.homes["hub"])
        server.check_links()
        dialers[1].refused("the server refused this silo", "'north' is for another TLS key than roster 2 names")
        assert server.exchange({"east": b"the others"}) == {"east": b"answer to the others"}


@pytest.mark.later
def test_a_silo_leaves_a_server_whose_certificate_was_taken_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_client, "RECHECK", 0.0)
    with serving(world, names=("north",)) as server:
        dialer = Dialer(world, server, "north", echo)
        assert server.exchange({"north": b"before"}) == {"north": b"answer to before"}
        world.without("hub")
        world.put_in_force(world.homes["north"])
        server.patience = Patience("drop", 1.0, 0)
        assert server.exchange({"north": b"after"}) == {}
        dialer.refused("'hub' is for another TLS key than roster 2 names")


def imposter(port: int, folder: Path, kind: str) -> tuple[socket.socket, list[int]]:
    """Somebody at the server's address: with a certificate of its own that signs itself, in plaintext, or closing. The
    second is how often it was dialled."""
    mallory, calls = Home.create(folder / kind, "hub", "server", ("127.0.0.1",), unsealed=True), [0]
    files = mallory.credentials([])
    (folder / "chain.pem").write_bytes(files.private_key + files.certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "chain.pem")
    listening = socket.create_server(("127.0.0.1", port))

    def answer() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                calls[0] += 1
                with connection, contextlib.suppress(OSError):
                    if kind == "forged":
                        context.wrap_socket(connection, server_side=True).recv(1)
                    elif kind == "plaintext":
                        connection.recv(1000)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    return listening, calls


@pytest.mark.later
@pytest.mark.parametrize(("kind", "says"), [
    ("forged", "is not the one in the roster"), ("plaintext", "speaks no TLS 1.3"), ("closing", "no connection yet"),
])  # fmt: skip
def test_who_is_not_the_server_ends_no_silo(
    world: World, tmp_path: Path, kind: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One forged certificate ended a silo's process for good, as did four spoilt handshakes. It is said in the log, and
    dialled again until the server itself is there: the control."""
    caplog.set_level(logging.INFO)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    listening, calls = imposter(port, tmp_path, kind)
    dialer = Dialer(world, SimpleNamespace(port=port), "north", echo)  # type: ignore[arg-type]
    doubted(caplog, says)
    while calls[0] < 4:
        assert dialer.thread.is_alive(), dialer.error
        time.sleep(0.02)
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    with serving(world, names=("north",), listen=f"127.0.0.1:{port}") as server:
        assert server.exchange({"north": b"x"}) == {"north": b"answer to x"}
        dialer.stop()
    assert caplog.text.count(says) <= 2


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["", "control"])
def test_a_silo_looks_at_a_server_by_tls_1_3_alone(world: World, tmp_path: Path, version: ssl.TLSVersion) -> None:
    """One that has the server's own key, and speaks as first thing."""
    files, north = tls_of(world.homes["hub"]), world.homes["north"]
    (tmp_path / "chain.pem").write_bytes(files.private_key + files.certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "chain.pem")
    context.maximum_version = version

    def speak(listening: socket.socket) -> None:
        with contextlib.suppress(OSError), listening.accept()[0] as plain:
            context.wrap_socket(plain, server_side=True).sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=speak, args=(listening,), daemon=True).start()
        older = version is ssl.TLSVersion.TLSv1_2
        with pytest.raises(stream_client.Doubtful, match=r"no TLS 1\.3") if older else contextlib.nullcontext():
            seen = stream_client.peer_certificate(
                "127.0.0.1", listening.getsockname()[1], tls_of(north), north.roster(NOW).tls_name("hub")
            )
            assert seen == files.certificate


def test_a_silo_waits_for_a_server_that_its_roster_names(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A server whose certificate was taken back proves itself to nobody who has the next roster."""
    north = world.homes["north"]
    with serving(world, names=("north",)) as server:
        world.without("hub")
        world.put_in_force(north)
        dialer = Dialer(world, server, "north", echo)
        doubted(caplog, "is not the one in the roster")
        assert dialer.error is None
        assert not server.wait_for(["north"], 0.0)
        dialer.stop()


@pytest.mark.parametrize("where", ["greeting", "frame", "part"])
def test_what_is_no_message_ends_no_silo(
    world: World, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server itself, through TLS, sends what is none: one line, the silo's state as it was, and another stream. The
    control ends, as every silo did."""
    greet, sent = (
        stream_client.GREETINGS.pack,
        {"greeting": b"\x93\x01", "frame": b"none", "part": list(parts(9, b"x" * 9, chunk=5))[1]},
    )

    def spoilt(message: object) -> bytes:
        return sent[where] if isinstance(message, Welcome) else greet(message)  # type: ignore[arg-type]

    def spoil(server: StreamServer) -> None:
        if where != "greeting":
            assert server.wait_for(["north"], 20)
            server._links["north"].outgoing.put(sent[where])

    for control in (False, True):
        caplog.clear()
        with monkeypatch.context() as patched, serving(world, names=("north",)) as server:
            if control:
                patched.setattr(stream_client, "_malformed", lambda what: contextlib.nullcontext())
            if where == "greeting":
                patched.setattr(stream_client.GREETINGS, "pack", spoilt)
            dialer = Dialer(world, server, "north", echo)
            spoil(server)
            if control:
                dialer.refused("message" if where != "greeting" else "")
                continue
            doubted(caplog, f"the server sent a {'greeting' if where == 'greeting' else 'frame'} that is none")
            patched.setattr(stream_client.GREETINGS, "pack", greet)
            assert server.exchange({"north": b"x"}) == {"north": b"answer to x"}
            assert caplog.text.count("that is none") == 1
            dialer.stop()


def test_plaintext_and_older_tls_get_nowhere(world: World) -> None:
    """The others go on."""
    north = world.homes["north"]
    with serving(world, names=("north",)) as server, dialed(world, server, echo, ("north",)):
        assert server.exchange({"north": b"x"}) == {"north": b"answer to x"}
        channel = grpc.insecure_channel(f"127.0.0.1:{server.port}")
        call = channel.stream_stream("/secure_fvi.Stream/Exchange")(iter([b"x"]), timeout=5)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        older = {"ssl_tls_version": [b"TLSv1.2"], "x509_pem_cert": [tls_of(north).certificate]}
        context = SimpleNamespace(auth_context=lambda: older)
        with pytest.raises(ProtocolError, match=r"TLS 1\.3 is needed, not TLSv1\.2"):
            server._greet(iter([]), context)
        assert server.exchange({"north": b"y"}) == {"north": b"answer to y"}


def test_an_address_that_is_taken_is_named(world: World) -> None:
    tls, roster = tls_of(world.homes["hub"]), world.homes["hub"].roster(NOW).hash
    line = Line(SILOS, "job", world.homes["hub"])
    with serving(world) as server, pytest.raises(InputError, match=f"cannot listen at '127.0.0.1:{server.port}'"):
        StreamServer(line, f"127.0.0.1:{server.port}", tls, lambda certificate: "", roster)


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:", ":8443", "127.0.0.1:65536", "127.0.0.1:84430", "https://hub:8443"]
)
def test_an_address_is_a_host_and_a_port_that_there_is(world: World, address: str) -> None:
    """gRPC, asked itself, listens at port 443, or at the number modulo 65536."""
    tls, roster = tls_of(world.homes["hub"]), world.homes["hub"].roster(NOW).hash
    with pytest.raises(InputError, match=r"must look like hub\.example\.org:8443"):
        StreamServer(Line(SILOS, "job", world.homes["hub"]), address, tls, lambda certificate: "", roster)


def test_the_highest_common_protocol_is_chosen_and_a_refusal_names_both(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silo and a server of several releases; the control speaks as this one does."""
    assert wire.agreed({"a": [1, 2, 3], "b": [2, 3, 4], "c": [2, 3]}) == 3
    newest, seen = wire.PROTOCOLS[-1], []
    pack = stream_client.GREETINGS.pack

    def dial(server: StreamServer, *spoken: int) -> Dialer:
        def packed(message: object) -> bytes:
            if isinstance(message, Hello):
                message = message._replace(protocols=list(spoken))
            else:
                seen.append(message.protocol)  # type: ignore[attr-defined]
            return pack(message)  # type: ignore[arg-type]

        monkeypatch.setattr(stream_client.GREETINGS, "pack", packed)
        return Dialer(world, server, "north", echo)

    with serving(world, names=("north",)) as server:
        dial(server, newest + 1, newest + 2).refused(
            "no version of the protocol that all speak", f"'north' {newest + 1} or {newest + 2}", f"server {newest}"
        )
        good = dial(server, 1, newest, newest + 1)
        assert server.exchange({"north": b"x"}) == {"north": b"answer to x"}
        good.stop()
        assert seen == [newest]
    with serving(world, names=("north",)) as server:  # a server that answers in a version that was not asked for

        def answered(message: object) -> bytes:
            return pack(message._replace(protocol=99) if isinstance(message, Welcome) else message)  # type: ignore[arg-type]

        monkeypatch.setattr(stream_client.GREETINGS, "pack", answered)
        Dialer(world, server, "north", echo).refused("the server 99", f"this silo {newest}")


def test_a_message_of_another_version_is_refused_by_both_numbers() -> None:
    frame = bytearray(next(parts(1, b"x")))
    frame[1] += 1
    with pytest.raises(ProtocolError, match=f"version {wire.PROTOCOLS[-1] + 1}; this side speaks version"):
        Assembler().add(bytes(frame))


class Thief(Home):
    """A member's folder without its identity: his own in its place, as who has the TLS key, the certificate and the
    files that are nobody's secret."""

    def __init__(self, folder: Path, of: Home) -> None:
        shutil.copytree(of.path, folder)
        for name in ("identity.pem", "identity.pub"):
            (folder / name).unlink()
        create_key(folder / "identity.pem", None, True)
        super().__init__(folder)
        self._of = of

    def roster(self, now: datetime.datetime) -> ConsortiumRoster:
        return self._of.roster(now)

    def identity_in(self, roster: ConsortiumRoster) -> Identity:
        return self.identity()


def _believe(patched: pytest.MonkeyPatch) -> None:
    """Letters count whoever signed them: TLS alone says who speaks, as it did."""
    patched.setattr(letters, "signed", lambda *_: True)


@pytest.mark.parametrize("stolen", ["hub", "north"])
def test_a_tls_key_speaks_for_nobody(
    world: World, tmp_path: Path, stolen: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its thief connects as the member. What he asks as the server no silo looks into, what he answers as a silo the
    server does not take. In the control both are believed."""
    thief, asked = Thief(tmp_path / "thief", world.homes[stolen]), list[bytes]()

    def answer(job: str, message: bytes) -> bytes:
        asked.append(message)
        return b"an answer"

    homes = {"hub": world.homes["hub"], "north": world.homes["north"], stolen: thief}
    for control in (False, True):
        caplog.clear()
        with monkeypatch.context() as patched, serving(world, names=("north",), home=homes["hub"]) as server:
            if control:
                _believe(patched)
            dialer = Dialer(world, server, "north", answer, homes["north"])
            assert server.wait_for(["north"], 20)
            server.patience = Patience("drop", 30.0 if control else 0.7, 0)
            assert server.exchange({"north": b"x"}) == ({"north": b"an answer"} if control else {})
            if not control:
                doubted(caplog, f"not signed by the identity of '{stolen}'")
            dialer.stop()
        assert bool(asked) == (control or stolen == "north")


def test_what_was_said_on_one_connection_says_nothing_on_another(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's own letter, sent again on a silo's next stream: not answered, and in the control it is. On one
    stream the server asks again what it likes, and gets the same bytes."""
    asked: list[bytes] = []

    def answer(job: str, message: bytes) -> bytes:
        asked.append(message)
        return b"an answer"

    write = stream_server.write_letter
    for control in (False, True):
        kept: list[tuple[bytes, bytes]] = []
        caplog.clear()
        with monkeypatch.context() as patched, serving(world, names=("north",)) as server:

            def again(*given: Any, kept: list[tuple[bytes, bytes]] = kept) -> tuple[bytes, bytes]:
                kept.append(kept[0] if kept else write(*given))
                return kept[0]

            patched.setattr(stream_server, "write_letter", again)
            with dialed(world, server, answer, ("north",)):
                assert server.exchange({"north": b"x"}) == {"north": b"an answer"}
            asked.clear()
            if control:
                for module in (stream_client, stream_server):
                    patched.setattr(module, "check_letter", lambda *_: None)
            with dialed(world, server, answer, ("north",)):
                server.patience = Patience("drop", 30.0 if control else 0.7, 0)
                assert bool(server.exchange({"north": b"x"})) == control
        if not control:
            doubted(caplog, "about another job, or of another connection")
        assert asked == ([b"x"] if control else [])


@pytest.mark.parametrize("stream", ["overtaken", "newest", "newest, as it was"])
def test_an_answer_counts_on_the_newest_stream_and_to_what_was_asked_on_it(
    world: World, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """On a stream that was asked nothing yet: a letter of the silo, of an earlier connection of the same name. The
    control is a check that lets an answer name any letter where none was asked."""
    east, hub, other = world.homes["east"], world.homes["hub"], bytes([7]) * 32

    def checked(letter: letters.Letter, sender: str, job: str, connection: bytes, number: bytes | None = None) -> None:
        letters.check_letter(letter, sender, job, connection, number or None)

    def written(number: bytes, connection: bytes, body: bytes) -> Whole:
        letter = letters.Letter("east", "hub", "job-1", number, MESSAGE, body, connection)
        return Whole(server._number, MESSAGE, letters.write_letter(letter, east)[0])

    if stream == "newest, as it was":
        monkeypatch.setattr(stream_server, "check_letter", checked)
    with serving(world, home=hub) as server:
        old, new = (stream_server._Link(b"", name, SimpleNamespace(cancel=lambda: None)) for name in (other, bytes(32)))
        with server._changed:
            server._links["east"] = new
        found: dict[str, bytes] = {}
        asking = threading.Thread(target=lambda: found.update(server.exchange({"east": b"asked"})), daemon=True)
        asking.start()
        with server._changed:
            assert server._changed.wait_for(lambda: new.asked, 20)
            server._links["east"] = new if stream == "overtaken" else old
        replayed = written(bytes([9]) * 32, other, b"replayed")
        with raises_refusal() if stream == "newest" else contextlib.nullcontext():
            server._take("east", old, replayed)
        with server._changed:
            server._links["east"] = new
        server._take("east", new, written(new.asked, bytes(32), b"its answer"))
        asking.join(20)
        assert found == {"east": b"replayed" if stream == "newest, as it was" else b"its answer"}
        server._links.clear()


def raises_refusal() -> Any:
    return pytest.raises(ProtocolError, match="an answer to another letter")
