"""The gate before the SuperLink: whoever is no node gets an answer to its headers, and nothing of its body is read."""

from __future__ import annotations

import base64
import datetime
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP384R1, generate_private_key

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
starlette = pytest.importorskip("starlette")

from starlette.applications import Starlette  # noqa: E402
from starlette.requests import Request  # noqa: E402
from starlette.responses import PlainTextResponse, Response  # noqa: E402
from starlette.routing import Route  # noqa: E402

from secure_fvi.engines import flower_gate  # noqa: E402
from secure_fvi.engines.flower_superlink import _inner_certificate  # noqa: E402

KEY = generate_private_key(SECP384R1())
ENDPOINTS = ("activate-node", "pull-messages", "push-messages", "push-object", "get-fab", "register-node")


def public(key: Any = KEY) -> bytes:
    pem: bytes = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem


def login(key: Any = KEY, age: float = 0.0) -> dict[str, str]:
    """What a SuperNode puts into the headers of a request."""
    stamp = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)).isoformat()
    signature = key.sign(stamp.encode(), ECDSA(hashes.SHA256()))
    return {
        "flwr-public-key": base64.b64encode(public(key)).decode(),
        "flwr-timestamp": stamp,
        "flwr-signature": base64.b64encode(signature).decode(),
    }


@contextmanager
def served(app: Any, **options: Any) -> Iterator[int]:
    config = uvicorn.Config(app, "127.0.0.1", 0, log_level="critical", access_log=False, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[int]:
    """The port of a gate before a SuperLink that answers with the length of what it got."""

    async def answer(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    key, certificate = _inner_certificate(tmp_path)
    inner = Starlette(routes=[Route("/v1/fleet/{rest}", answer, methods=["POST"])])
    database = tmp_path / "superlink.sqlite"
    with sqlite3.connect(database) as made:
        made.execute("CREATE TABLE node (node_id INTEGER, public_key BLOB)")
        made.execute("INSERT INTO node VALUES (1, ?)", (public(),))
    made.close()
    with served(inner, ssl_keyfile=str(key), ssl_certfile=str(certificate)) as port:
        outer = flower_gate.gate(f"127.0.0.1:{port}", str(certificate), flower_gate.known_to(database))
        with served(outer, http=flower_gate.Timed) as port:
            yield port


def begun(port: int, path: str, headers: dict[str, str], length: int) -> socket.socket:
    """A request whose headers promise `length` bytes of which none has been sent."""
    link = socket.create_connection(("127.0.0.1", port), 5)
    lines = [f"POST /v1/fleet/{path} HTTP/1.1", "Host: x", f"Content-Length: {length}"]
    lines += [f"{k}: {v}" for k, v in headers.items()]
    link.sendall("\r\n".join([*lines, "", ""]).encode())
    return link


def status(link: socket.socket, seconds: float = 5.0) -> str:
    """The status of the answer; empty where none comes in time, or the connection is closed."""
    link.settimeout(seconds)
    try:
        return link.recv(4096).decode().partition(" ")[2][:3]
    except OSError:
        return ""


@pytest.mark.parametrize("path", ENDPOINTS)
def test_who_is_no_node_is_answered_before_its_body(gate: int, path: str) -> None:
    other = generate_private_key(SECP384R1())
    forged = {**login(), "flwr-signature": login(other)["flwr-signature"]}
    for headers in ({}, login(other), forged, login(age=1000), {**login(), "flwr-public-key": "%"}):
        with begun(gate, path, headers, 400 << 20) as link:
            assert status(link) == "401"
            link.settimeout(5)
            assert link.recv(4096) == b""  # and the connection is over


def test_a_gate_that_reads_first_waits_for_the_body() -> None:
    """The control: the body of whoever comes."""

    async def read(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())), 401)

    app = Starlette(routes=[Route("/v1/fleet/{rest}", read, methods=["POST"])])
    with served(app) as port, begun(port, "pull-messages", {}, 400 << 20) as link:
        assert status(link, 0.7) == ""


def test_a_node_gets_through_up_to_what_a_path_has_use_for(gate: int) -> None:
    address = f"http://127.0.0.1:{gate}/v1/fleet/"
    with httpx.Client(trust_env=False) as client:
        for path, length in (("pull-messages", 1 << 20), ("push-object", 8 << 20), ("activate-node", 0)):
            found = client.post(address + path, content=bytes(length), headers=login())
            assert (found.status_code, found.text) == (200, str(length))
        assert client.post(address + "pull-messages", content=bytes((1 << 20) + 1), headers=login()).status_code == 413
        pieces = (bytes(1 << 16) for _ in range(20))  # of a length that no header says
        assert client.post(address + "pull-messages", content=pieces, headers=login()).status_code == 413
        assert client.post(f"http://127.0.0.1:{gate}/v1/control/x", headers=login()).status_code == 404
    with begun(gate, "push-object", login(), 400 << 20) as link:
        assert status(link) == "413"


def test_slow_senders_are_let_go(gate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of headers, whoever they are, and of a body."""
    with begun(gate, "pull-messages", login(), 1000) as link:  # the control: it is waited for
        link.sendall(b"x")
        assert status(link, 0.5) == ""
    monkeypatch.setattr(flower_gate, "_HEADERS", 0.3)
    monkeypatch.setattr(flower_gate, "_PIECE", 0.3)
    with socket.create_connection(("127.0.0.1", gate), 5) as link:
        link.sendall(b"POST /v1/fl")
        link.settimeout(5)
        assert link.recv(10) == b""
    with begun(gate, "pull-messages", login(), 1000) as link:
        link.sendall(b"x")
        assert status(link) == "408"
