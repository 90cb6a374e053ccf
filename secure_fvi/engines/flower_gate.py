"""A filter before the SuperLink: the outside reaches the nodes' paths and nothing else.

One port of a SuperLink serves nodes, apps and control, and control has no login: whoever reaches it registers nodes
and starts runs. So the SuperLink listens on loopback, and this passes `/v1/fleet/...` on to it.
"""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

_PATH = re.compile(r"/v1/fleet/[a-z-]+")
#: Between two hops only, or made anew by the next one.
_HOP = {"host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "content-length"}
_SECONDS = 120.0


def gate(superlink: str, authority: str) -> Starlette:
    """The filter before `superlink` ("127.0.0.1:port"), whose certificate is checked against the file `authority`."""
    client = httpx.AsyncClient(
        base_url=f"https://{superlink}", verify=authority, timeout=_SECONDS, trust_env=False, limits=httpx.Limits()
    )

    async def forward(request: Request) -> Response:
        if request.method != "POST" or not _PATH.fullmatch(request.scope["raw_path"].decode("ascii", "replace")):
            return PlainTextResponse("not here", 404)
        headers = [(k, v) for k, v in request.headers.raw if k.decode().lower() not in _HOP]
        passed = client.build_request("POST", request.url.path, headers=headers, content=await request.body())
        try:
            reply = await client.send(passed, stream=True)
        except httpx.HTTPError:
            return PlainTextResponse("the SuperLink does not answer", 503)
        back = {k: v for k, v in reply.headers.items() if k.lower() not in _HOP}
        return StreamingResponse(reply.aiter_raw(), reply.status_code, back, background=BackgroundTask(reply.aclose))

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST", "PUT", "DELETE", "PATCH"])])


def run_gate(
    listen: tuple[str, int], superlink: str, authority: Path, key: Path, certificate: Path, passphrase: str | None
) -> None:
    """Serve until a signal comes. key, certificate: the server's, by the consortium's authority."""
    uvicorn.run(
        gate(superlink, str(authority)),
        host=listen[0],
        port=listen[1],
        ssl_keyfile=str(key),
        ssl_certfile=str(certificate),
        ssl_keyfile_password=passphrase,
        log_level="warning",
        access_log=False,
    )
