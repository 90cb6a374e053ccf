"""A site's SuperNode: ended so that the SuperLink knows, and started again while it takes the last one for alive.

The SuperLink refuses the key of a node that is online: until that has signed off, as Flower does on SIGTERM, or for two
heartbeats of 30 s after its last one. Killed, a SuperNode does not sign off. A key that is not registered gets the same
answer. What tells them apart is HOME/flower/alive, a file that is touched while a SuperNode is online: a refusal is
waited out as long as a heartbeat of that time may count, and is an error else.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from secure_fvi.deployment.certificates import pem_of
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.site import server_of
from secure_fvi.engines.flower_setup import environment, flower_folder, free_port, locked, prepare, program
from secure_fvi.errors import InputError
from secure_fvi.files import write_atomically

_TOUCH = 5.0  # seconds
_PAUSE = 10.0
_FAREWELL = 15.0  # Flower's own patience with itself is 5
#: Seconds after the last touch until the SuperLink has forgotten a node: its last heartbeat, and some for its answer.
_COUNTS = 2 * 30.0 + _TOUCH + 10.0
_REFUSED = b"[code: 2004]"  # Flower's FLEET_NODE_ACTIVATION_FAILED
_ONLINE = b"SuperNode ID:"
_LEAVING = b"SuperNode terminated"


def run_supernode(
    home: Home, superlink: str, settings: Sequence[str], any_app: bool, say: Callable[[str], None]
) -> int:
    """Serve until a signal comes: the SuperNode's exit status. superlink: "host:port"; settings: of its --node-config.

    Of the SuperLink, TLS takes the certificate that the roster names, and no other.
    Raises InputError where the SuperLink refuses the site's key, or another SuperNode of this folder runs.
    """
    prepare(home.path, any_app)
    folder = flower_folder(home.path)
    lock = locked(folder / "supernode.lock", "SuperNode")
    server = folder / "server.crt"
    write_atomically(server, pem_of(server_of(home).x509))
    alive = folder / "alive"
    until = min(alive.stat().st_mtime, time.time()) + _COUNTS if alive.exists() else 0.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        command = [program("flower-supernode"), "--superlink", superlink, "--port", str(free_port())]
        command += ["--root-certificates", str(server), "--node-config", " ".join(settings)]
        command += ["--auth-supernode-private-key", str(folder / "node.key")]
        node = _SuperNode(command, environment(home.path, home.passphrase), lock, alive)
        status = node.run()
        if not node.refused.is_set():
            return status
        left = until - time.time()
        if left <= 0:
            raise InputError(
                "the SuperLink refuses this site's key: it is not registered there (`flower register`), or another "
                "SuperNode uses it"
            )
        say(f"the site's last SuperNode has not signed off: its key may be refused for {left:.0f} s more; trying again")
        time.sleep(min(_PAUSE, left))


class _SuperNode:
    """Flower's program once, whose output is passed on as it comes."""

    def __init__(self, command: list[str], variables: dict[str, str], lock: int, alive: Path) -> None:
        """lock: inherited, since the program may outlive this process. alive: touched while it is online."""
        self._alive = alive
        self._online, self._leaving, self.refused = threading.Event(), threading.Event(), threading.Event()
        self._process = subprocess.Popen(
            command, env=variables, pass_fds=[lock], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._reader = threading.Thread(target=self._pass_on, daemon=True)
        self._reader.start()

    def run(self) -> int:
        """Until it ends: its exit status. Ended by a signal, this process ends it too, and leaves after it."""
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = self._process.wait(_TOUCH)
                    # What it started may hold its output open a little longer; the reason of its end is written.
                    self._reader.join(2.0)
                    return status
                if self._online.is_set():
                    self._alive.touch()
        finally:
            # A signal to the whole group has reached it already, and a second one would cut its farewell short.
            if self._process.poll() is None:
                if not self._leaving.wait(1.0):
                    self._process.terminate()
                try:
                    self._process.wait(_FAREWELL)
                except subprocess.TimeoutExpired:
                    self._process.kill()

    def _pass_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if _ONLINE in line:
                self._alive.touch()
                self._online.set()
            elif _LEAVING in line:
                self._leaving.set()
            elif _REFUSED in line and not self._online.is_set():
                self.refused.set()
            with contextlib.suppress(OSError, ValueError):  # nobody reads it; the SuperNode must not wait for that
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
