"""Flower's programs as processes on loopback, for measurements and tests: a SuperLink, SuperNodes, runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from secure_fvi.deployment.home import Home
from secure_fvi.engines.flower_setup import environment, node_key, program
from secure_fvi.errors import SecureFVIError

_CODE = "from secure_fvi.cli import main; main()"


def plain_user() -> list[str]:
    """What to put before a command so that it may not write everywhere, as root may."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 and setpriv else []


class FlowerProcesses:
    """A SuperLink, and SuperNodes of a consortium's silos; each process writes a log in `folder`."""

    def __init__(self, homes: Mapping[str, Home], folder: Path, server: str = "hub") -> None:
        self.folder, self.homes, self.hub = folder, homes, homes[server].path
        self.nodes, self.stream = _free_address(), _free_address()
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> FlowerProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.kill(name)

    def start(self, name: str, *arguments: str) -> None:
        """`secure-fvi ARGUMENTS` as process `name`, the head of a process group of its own."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*plain_user(), sys.executable, "-c", _CODE, *arguments],
                stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def wait(self, name: str, text: str, seconds: float = 180, since: int = 0) -> None:
        """Until process `name` has written `text`, `since` so many characters of its log. Raises SecureFVIError."""
        until = time.monotonic() + seconds
        while text not in self.log(name)[since:]:
            if time.monotonic() >= until:
                raise SecureFVIError(f"'{name}' did not write '{text}': {self.log(name)[-3000:]}")
            time.sleep(0.2)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """The process and all that it started."""
        process = self.running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        process.wait(30)

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Flower's own command at the server."""
        command = [program("flwr"), *arguments]
        return subprocess.run(command, env=environment(self.hub), check=False, capture_output=True, text=True)

    def superlink(self, *extra: str) -> None:
        since, home = len(self.log("superlink")), str(self.hub)
        self.start("superlink", "flower", "superlink", "--home", home, "--listen", self.nodes, *extra)
        self.wait("superlink", "Uvicorn running on https", since=since)

    def register(self, silo: str) -> None:
        """Raises SecureFVIError where the SuperLink does not take the silo's node."""
        done = self.flwr("supernode", "register", str(node_key(self.homes[silo].path)), "local")
        if done.returncode:
            raise SecureFVIError(done.stdout + done.stderr)

    def supernode(self, silo: str, *extra: str) -> None:
        since, home = len(self.log(silo)), str(self.homes[silo].path)
        self.start(silo, "flower", "supernode", "--home", home, "--superlink", self.nodes, "--repeatable", *extra)
        self.wait(silo, "SuperNode ID", since=since)

    def everything(self) -> None:
        """A SuperLink, and registered SuperNodes of all silos."""
        silos = [name for name, home in self.homes.items() if home.role == "silo"]
        self.superlink()
        for silo in silos:
            self.register(silo)
            self.supernode(silo)

    def run(self, config: Path, out: Path, name: str) -> None:
        """A job; its log is that of process `name`."""
        arguments = ["flower", "run", str(config), "--home", str(self.hub), "--out", str(out)]
        self.start(name, *arguments, "--listen", self.stream)

    def end(self, name: str, seconds: float) -> None:
        """Until the job is finished. Raises SecureFVIError where it fails."""
        if self.running.pop(name).wait(seconds):
            raise SecureFVIError(self.log(name)[-3000:])


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"
