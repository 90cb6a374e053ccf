"""A filter before the SuperLink: the outside reaches the nodes' paths and nothing else, and says who it is first.

One port of a SuperLink serves nodes, apps and control, and control has no login: whoever reaches it registers nodes
and starts runs. So the SuperLink listens on loopback, and this passes `/v1/fleet/...` on to it. A SuperLink reads a
whole request before it looks at who sent it. Here the node's signature, which is in the headers, is checked first, and
that the SuperLink knows its key; then the body is passed on as it comes, up to what its path has use for.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

_PATH = re.compile(r"/v1/fleet/[a-z-]+")
#: Between two hops only, or made anew by the next one.
_HOP = {"host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "content-length"}
_SECONDS = 120.0
#: For the headers of a request, and for each piece of its body.
_HEADERS, _PIECE = 20.0, 20.0
#: Bytes of a body, by path: a letter travels in pieces of 4 MiB, each an object of its own.
_MOST, _MOST_OF = 1 << 20, {"/v1/fleet/push-object": 64 << 20, "/v1/fleet/push-messages": 64 << 20}
#: Connections at a time, of which each holds little until its node is known.
_CONNECTIONS = 2000
#: By how much a node's clock may be off, as at the SuperLink (seconds).
_AGE = 305.0

Known = Callable[[bytes], bool]


def known_to(database: Path) -> Known:
    """Whether a key (PEM) is a node's, by the SuperLink's own database, which is only read."""

    def known(key: bytes) -> bool:
        try:
            with contextlib.closing(sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)) as opened:
                return opened.execute("SELECT 1 FROM node WHERE public_key = ?", (key,)).fetchone() is not None
        except sqlite3.Error:  # not there yet, or busy
            return False

    return known


def logged_in(headers: Mapping[str, str], known: Known) -> bool:
    """Whether a node that the SuperLink knows has signed the time in `headers`, as its requests do."""
    try:
        key, signature = (base64.b64decode(headers[f"flwr-{n}"], validate=True) for n in ("public-key", "signature"))
        stamp = headers["flwr-timestamp"]
        age = (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(stamp)).total_seconds()
        if len(key) > 1000 or abs(age) > _AGE or not known(key):
            return False
        public = load_pem_public_key(key)
        if not isinstance(public, EllipticCurvePublicKey):
            return False
        public.verify(signature, stamp.encode("ascii"), ECDSA(hashes.SHA256()))
    except (KeyError, ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


class _TooLong(Exception):
    """A body is longer than its path has use for."""


async def _body(request: Request, most: int) -> AsyncIterator[bytes]:
    """The body as it comes. Raises _TooLong, and TimeoutError where it comes too slowly."""
    length, pieces = 0, request.stream()
    while True:
        try:
            async with asyncio.timeout(_PIECE):
                piece = await anext(pieces)
        except StopAsyncIteration:
            return
        length += len(piece)
        if length > most:
            raise _TooLong
        yield piece


def gate(superlink: str, inner: str, known: Known = lambda key: False) -> Starlette:
    """The filter before `superlink` ("127.0.0.1:port"), whose certificate is the file `inner`.
    known: whether a public key (PEM) is that of a node."""
    client = httpx.AsyncClient(
        base_url=f"https://{superlink}", verify=inner, timeout=_SECONDS, trust_env=False, limits=httpx.Limits()
    )

    async def forward(request: Request) -> Response:
        if request.method != "POST" or not _PATH.fullmatch(request.scope["raw_path"].decode("ascii", "replace")):
            return _refused("not here", 404)
        if not await asyncio.to_thread(logged_in, request.headers, known):
            return _refused("no node that is known here has signed this request", 401)
        most, said = _MOST_OF.get(request.url.path, _MOST), request.headers.get("content-length", "0")
        if not said.isascii() or not said.isdecimal() or int(said[:20]) > most:
            return _refused("too long", 413)
        headers = [(k, v) for k, v in request.headers.raw if k.decode().lower() not in _HOP]
        passed = client.build_request("POST", request.url.path, headers=headers, content=_body(request, most))
        try:
            async with asyncio.timeout(_SECONDS):
                reply = await client.send(passed, stream=True)
        except _TooLong:
            return _refused("too long", 413)
        except (TimeoutError, ClientDisconnect):
            return _refused("too slow", 408)
        except httpx.HTTPError:
            return _refused("the SuperLink does not answer", 503)
        back = {k: v for k, v in reply.headers.items() if k.lower() not in _HOP}
        return StreamingResponse(reply.aiter_raw(), reply.status_code, back, background=BackgroundTask(reply.aclose))

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST", "PUT", "DELETE", "PATCH"])])


def _refused(why: str, status: int) -> Response:
    """No more of this connection is read."""
    return PlainTextResponse(why, status, {"connection": "close"})


class Timed(H11Protocol):  # type: ignore[misc]
    """Uvicorn's, which waits for a request's headers for ever: here for some seconds."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._awaited: asyncio.TimerHandle | None = None
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        self._await_headers()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._awaited is not None:
            self._awaited.cancel()
        super().connection_lost(exc)

    @property
    def _idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_headers(self) -> None:
        if self._awaited is None and self._idle:
            self._awaited = self.loop.call_later(_HEADERS, self._late)

    def _late(self) -> None:
        self._awaited = None
        if self._idle:
            self.transport.close()


def run_gate(
    listen: tuple[str, int],
    superlink: str,
    inner: Path,
    key: Path,
    certificate: Path,
    passphrase: str | None,
    database: Path,
) -> None:
    """Serve until a signal comes. key, certificate: the server's, which the roster names. database: the
    SuperLink's."""
    uvicorn.run(
        gate(superlink, str(inner), known_to(database)),
        host=listen[0],
        port=listen[1],
        ssl_keyfile=str(key),
        ssl_certfile=str(certificate),
        ssl_keyfile_password=passphrase,
        http=Timed,
        ws="none",
        limit_concurrency=_CONNECTIONS,
        log_level="warning",
        access_log=False,
    )
