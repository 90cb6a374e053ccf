"""The ServerApp: one job of the server, under Flower.

Flower hands a run's configuration to every node, so it holds a job's name and nothing else. What the name means, the
configuration, the folder for results and the address, is written in the server's own folder.
"""

from __future__ import annotations

import dataclasses
import functools
import hmac
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from pydantic import Field

from secure_fvi.deployment.home import HOME_VARIABLE, Home
from secure_fvi.deployment.names import Table, parse_table, read_bytes
from secure_fvi.deployment.serving import Hub, remote_federation
from secure_fvi.driving import Progress
from secure_fvi.engines.flower_messages import FlowerMessages
from secure_fvi.engines.flower_setup import flower_folder
from secure_fvi.engines.remote import shown
from secure_fvi.engines.stream_server import StreamServer
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.files import write_atomically
from secure_fvi.logs import start_log
from secure_fvi.runs import wording
from secure_fvi.runs.config import Engine, read
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.running import execute_federation

_log = logging.getLogger(__name__)

_LOOK = 2.0  # seconds between two looks at nodes and replies, which cost the SuperLink some ms each
#: Seconds for which a node without a stream is left alone before it is asked again.
_AGAIN = 90.0
_AFTER_FAILURE = 5.0
_LIVES = 30 * 24 * 3600.0
_FAREWELL = 15.0
_SAY = 60.0

app = ServerApp()


class FlowerJob(Table):
    """What a job's name stands for at the server. listen: where the stream's port is opened; address: what silos
    dial. Both "host:port", the same port. sandbox: as of `secure-fvi server start`."""

    config: str
    out: str
    listen: str
    address: str
    overrides: tuple[str, ...] = Field(default=())
    sandbox: Literal["required", "off"] = "required"


def job_file(home: Path, name: str) -> Path:
    """Where a job is written down. `name` may come from whoever reaches Flower: only what an id may hold is taken."""
    if not name or not all(c.isalnum() or c in "-_" for c in name):
        raise InputError("a job's name must be letters, digits, dashes and underscores")
    return flower_folder(home) / "jobs" / f"{name}.toml"


def write_job(home: Path, name: str, job: FlowerJob) -> None:
    path = job_file(home, name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, wording.dumps(job.model_dump(mode="json")).encode())


def read_job(home: Path, name: str) -> FlowerJob:
    """Raises InputError where there is no such job."""
    path = job_file(home, name)
    return parse_table(read_bytes(path, f"what job '{name}' is"), FlowerJob, f"'{path}'")


class Sessions(threading.Thread):
    """Keeps every node's ClientApp at the stream: asks it to dial, and again when it has come away from it.

    The roster's certificate admits a silo. The token says for which run a ClientApp dials: one that a dead run left
    behind is turned away, so that its SuperNode becomes free for this run's.
    """

    def __init__(self, grid: Grid, address: str) -> None:
        super().__init__(daemon=True)
        self._grid, self._address = grid, address
        self._tokens: dict[int, bytes] = {}  # by node
        self._sites: dict[int, str] = {}
        self._asked: dict[str, int] = {}  # node, by message
        self._next: dict[int, float] = {}  # by node: when to ask it, unless it has a stream by then
        self._over = threading.Event()
        self.connected: Callable[[], set[str]] = set

    def check(self, site: str, token: bytes) -> None:
        """Raises ProtocolError for a token that is no node's."""
        for node, own in list(self._tokens.items()):
            if hmac.compare_digest(own, token):
                self._sites[node] = site
                return
        raise ProtocolError("this run did not start this silo's ClientApp")

    def run(self) -> None:
        while not self._over.wait(_LOOK):
            try:
                self._look()
            except Exception:
                # Flower's client raises what it likes while the SuperLink is away; the streams go on without it.
                _log.debug("Flower does not answer", exc_info=True)

    def finish(self) -> None:
        """Let the ClientApps leave, so that Flower's log shows their ends."""
        until = time.monotonic() + _FAREWELL
        while self._asked and time.monotonic() < until and self.is_alive():
            time.sleep(_LOOK)
        self._over.set()
        self.join()

    def _look(self) -> None:
        clock = time.monotonic()
        for reply in self._grid.pull_messages(list(self._asked)) if self._asked else ():
            node = self._asked.pop(reply.metadata.reply_to_message_id, None)
            why = str(reply.error.reason) if reply.has_error() else str(reply.content["session"]["ended"])
            if node is not None:
                self._next[node] = clock + (_AFTER_FAILURE if why else _AGAIN)
            if why:
                _log.warning("node %s has left: %s", node, shown(why.encode()))
        here = self.connected()
        for node in self._grid.get_node_ids():
            if self._sites.get(node) in here:
                self._next[node] = clock + _AGAIN
            elif clock >= self._next.get(node, 0.0):
                self._next[node] = clock + _AGAIN
                self._ask(node)

    def _ask(self, node: int) -> None:
        self._tokens[node] = secrets.token_bytes(32)
        self._sites.pop(node, None)
        content = RecordDict({"session": ConfigRecord({"address": self._address, "token": self._tokens[node]})})
        message = Message(content, dst_node_id=node, message_type="query.session", ttl=_LIVES)
        for key in self._grid.push_messages([message]):
            if key:
                self._asked[key] = node


def serve(grid: Grid, name: str) -> None:
    """Run the job `name` to its end. Raises what `execute_federation` raises; started again, it goes on."""
    home = Home(Path(os.environ.get(HOME_VARIABLE, "")))
    job = read_job(home.path, name)
    config = read(Path(job.config), job.overrides)
    engine = config.engine or Engine()
    if engine.kind != "flower":
        raise InputError(f"'{job.config}': [engine] kind must be \"flower\" for a job under Flower")
    folder = RunDirectory(Path(job.out))
    federation = remote_federation(config, home, folder, job.listen, sandbox=job.sandbox)
    if engine.carrier == "messages":
        _log.warning("carrier 'messages': Flower takes some seconds for each exchange; 'stream' takes milliseconds")
        by_letters = functools.partial(FlowerMessages, grid=grid, home=home)
        execute_federation(dataclasses.replace(federation, carrier=by_letters), folder, True, _said())
        return
    sessions = Sessions(grid, job.address)

    def begin(hub: Hub) -> None:
        stream: StreamServer = hub.engine
        sessions.connected = lambda: stream.connected
        sessions.start()

    by_stream = functools.partial(StreamServer, check_token=sessions.check)
    federation = dataclasses.replace(federation, carrier=by_stream, on_listening=begin)
    try:
        execute_federation(federation, folder, True, _said())
    finally:
        if sessions.is_alive():
            sessions.finish()


def _said() -> Callable[[Progress], None]:
    """A line in the log every minute."""
    last = time.monotonic()

    def note(progress: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= _SAY or progress.round == 1:
            last = time.monotonic()
            _log.info("round %d of at most %d", progress.round, progress.max_rounds)

    return note


def _main(grid: Grid, context: Context) -> None:
    start_log(False, "text")
    name: Any = context.run_config.get("job", "")
    serve(grid, str(name))
    _log.info("the job is finished")


app.main()(_main)
