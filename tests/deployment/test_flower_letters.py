"""What needs no Flower: letters, fresh bytes, the table [engine], job names, keys of SuperNodes."""

from __future__ import annotations

import stat
import threading
from importlib import metadata
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from deployment_world import NOW, World

from secure_fvi.deployment.certificates import pem_of
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.site import client_of
from secure_fvi.deployment.site_job import FreshBytes
from secure_fvi.engines import flower_setup
from secure_fvi.engines.flower_letters import Letter, read_letter, write_letter
from secure_fvi.engines.stream_client import StreamClient
from secure_fvi.engines.stream_messages import CHUNK_BYTES
from secure_fvi.engines.stream_server import StreamServer
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.runs.config import Engine


def _letter(home: Home, body: bytes = b"what is asked", signer: Home | None = None) -> dict[str, bytes]:
    letter = Letter(pem_of(home.certificate()), "job", "north", bytes(32), 0, body)
    return write_letter(letter, (signer or home).identity())[0]


def test_a_letter_arrives_and_names_its_sender(world: World) -> None:
    body = bytes(range(256)) * (2 * CHUNK_BYTES // 256) + b"end"
    pieces = _letter(world.homes["hub"], body)
    assert len(pieces) == 3
    received = read_letter(dict(reversed(pieces.items())), world.homes["north"], ["server"])
    assert received.sender == "hub"
    assert received.letter.body == body
    assert len(received.digest) == 32


def test_a_letter_signed_by_another_member_is_refused(world: World) -> None:
    """A registered node that sends the server's certificate, which is public, over a signature of its own."""
    forged = _letter(world.homes["hub"], signer=world.homes["east"])
    with pytest.raises(ProtocolError, match="not signed by the identity of 'hub'"):
        read_letter(forged, world.homes["north"], ["server"])


def test_a_silo_cannot_give_orders(world: World) -> None:
    with pytest.raises(ProtocolError, match="here a server is expected"):
        read_letter(_letter(world.homes["east"]), world.homes["north"], ["server"])


@pytest.mark.parametrize("at", [-1, -80, 40, 700])
def test_an_altered_byte_is_refused(world: World, at: int) -> None:
    pieces = _letter(world.homes["hub"])
    whole = bytearray(pieces["0000"])
    whole[at] ^= 1
    with pytest.raises((ProtocolError, InputError)):
        read_letter({"0000": bytes(whole)}, world.homes["north"], ["server"])


@pytest.mark.parametrize("names", [[], ["0001"], ["0000", "0002"], ["0"]])
def test_missing_pieces_are_refused(world: World, names: list[str]) -> None:
    with pytest.raises(ProtocolError, match="pieces missing"):
        read_letter(dict.fromkeys(names, b"x"), world.homes["north"], ["server"])


def test_a_sender_whose_certificate_was_taken_back_is_refused(world: World) -> None:
    pieces, north = _letter(world.homes["east"]), world.homes["north"]
    read_letter(pieces, north, ["silo"])
    world.without("east")
    world.put_in_force(north)
    with pytest.raises(ProtocolError, match="'east' is for another TLS key than roster 2 names"):
        read_letter(pieces, north, ["silo"])


def test_fresh_bytes_open_one_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = FreshBytes(tmp_path / "fresh").draw()
    again = FreshBytes(tmp_path / "fresh")  # as a process started later
    assert not again.take(bytes(32))
    assert not again.take(b"")
    assert again.take(drawn)
    assert not again.take(drawn)
    drawn = again.draw()
    monkeypatch.setattr("secure_fvi.deployment.site_job.boot_id", lambda: b"another")
    assert not again.take(drawn)


def test_messages_need_flower() -> None:
    Engine(kind="flower", carrier="messages")
    with pytest.raises(ValueError, match="needs kind"):
        Engine(carrier="messages")


@pytest.mark.parametrize(("version", "what"), [(None, "needs Flower"), ("1.42.0", "flwr 1.42.0 is installed")])
def test_another_flower_is_refused(version: str | None, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(flower_setup.metadata, "version", found)
    with pytest.raises(InputError, match=what):
        flower_setup.check_flower()


def test_the_key_of_a_supernode(tmp_path: Path) -> None:
    public = flower_setup.node_key(tmp_path)
    private = public.with_suffix(".key")
    key = load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(key, EllipticCurvePrivateKey)
    assert isinstance(key.curve, SECP384R1)
    assert load_ssh_public_key(public.read_bytes()) == key.public_key()
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert flower_setup.node_key(tmp_path) == public
    assert load_ssh_public_key(public.read_bytes()) == key.public_key()


def test_nothing_is_looked_up_outside(tmp_path: Path) -> None:
    found = flower_setup.environment(tmp_path)
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == found["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert found["FLWR_HOME"] == str(tmp_path / "flower")
    assert "127.0.0.1" in found["NO_PROXY"]


def test_a_silo_of_another_run_is_turned_away_and_a_lonely_one_gives_up(world: World) -> None:
    """Its certificate is right. With the token of this run the same silo is let in; when the server goes, it leaves."""
    hub, east, token = world.homes["hub"], world.homes["east"], bytes(range(32))

    def check(site: str, shown: bytes) -> None:
        if shown != token:
            raise ProtocolError(f"this run did not start '{site}'")

    tls, roster = hub.credentials(hub.roster(NOW).of_role("silo")), hub.roster(NOW).hash
    server = StreamServer(["east"], "127.0.0.1:0", tls, lambda pem: "east", roster, "job-1", check_token=check)

    def client() -> StreamClient:
        return client_of(east, f"127.0.0.1:{server.port}", "hub", lambda job, message: b"here")

    for wrong in (b"", bytes(32)):
        stranger = client()
        stranger.token = wrong
        with pytest.raises(ProtocolError, match="this run did not start 'east'"):
            stranger.run()
    own = client()
    own.token, own.give_up = token, 0.5
    ended: list[str] = []

    def stay() -> None:
        try:
            own.run()
        except ProtocolError as error:
            ended.append(str(error))

    thread = threading.Thread(target=stay)
    thread.start()
    assert server.exchange({"east": b"x"}) == {"east": b"here"}
    server.close()
    thread.join(20)
    assert len(ended) == 1
    assert "no connection" in ended[0]
