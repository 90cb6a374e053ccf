"""Flower's real programs over a consortium in folders: a SuperLink, SuperNodes, runs; all on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from consortium_run import SILOS, Job
from deployment_world import World

from secure_fvi.deployment.home import Home
from secure_fvi.engines.flower_setup import environment, node_key, program

_CODE = "from secure_fvi.cli import main; main()"
#: Root may write everywhere; without its capabilities it is a user like others, and Flower's guard holds.
PLAIN_USER = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []


class ReachableWorld(World):
    """The server's certificate names loopback, as Flower's nodes ask for it by its address."""

    def new_home(self, name: str, role: str) -> Home:
        if role != "server":
            return super().new_home(name, role)
        return Home.create(self.root / name, name, "server", ("127.0.0.1",))


def reachable_world(root: Path) -> World:
    """As `new_world` makes it."""
    world = ReachableWorld(root)
    for home in world.homes.values():
        world.certify(home)
    world.distribute(world.write())
    return world


def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        number: int = free.getsockname()[1]
    return number


class Flower:
    """A SuperLink and SuperNodes of a world; each process with a log in `folder`."""

    def __init__(self, world: World, folder: Path) -> None:
        self.folder, self.homes = folder, world.homes
        self.nodes, self.stream = f"127.0.0.1:{port()}", f"127.0.0.1:{port()}"
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Flower:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.kill(name)

    def start(self, name: str, *arguments: str) -> None:
        """`secure-fvi ARGUMENTS` as process `name`, the head of a process group of its own."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*PLAIN_USER, sys.executable, "-c", _CODE, *arguments],
                stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
            )  # fmt: skip

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def wait(self, name: str, text: str, seconds: float = 180, since: int = 0) -> None:
        """Until process `name` has written `text`, `since` so many characters of its log."""
        until = time.monotonic() + seconds
        while text not in self.log(name)[since:]:
            assert time.monotonic() < until, f"no '{text}': {self.log(name)[-3000:]}"
            time.sleep(0.2)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """The process and all that it started."""
        process = self.running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        process.wait(30)

    def superlink(self) -> None:
        since = len(self.log("superlink"))
        self.start("superlink", "flower", "superlink", "--home", str(self.homes["hub"].path), "--listen", self.nodes)
        self.wait("superlink", "Uvicorn running on https", since=since)

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Flower's own command at the server."""
        command = [program("flwr"), *arguments]
        hub = environment(self.homes["hub"].path)
        return subprocess.run(command, env=hub, check=False, capture_output=True, text=True)

    def register(self, silo: str) -> None:
        done = self.flwr("supernode", "register", str(node_key(self.homes[silo].path)), "local")
        assert done.returncode == 0, done.stdout + done.stderr

    def supernode(self, silo: str, *extra: str) -> None:
        since, home = len(self.log(silo)), str(self.homes[silo].path)
        self.start(silo, "flower", "supernode", "--home", home, "--superlink", self.nodes, "--repeatable", *extra)
        self.wait(silo, "Starting Flower SuperNode", since=since)

    def everything(self) -> None:
        """SuperLink and registered SuperNodes of all silos."""
        self.superlink()
        for silo in SILOS:
            self.register(silo)
            self.supernode(silo)
        for silo in SILOS:
            self.wait(silo, "SuperNode ID")

    def run(self, job: Job, name: str) -> None:
        """Results in the job's folder `remote`, the log of process `name`."""
        hub, out = str(self.homes["hub"].path), str(job.folder / "remote")
        self.start(name, "flower", "run", str(job.path), "--home", hub, "--out", out, "--listen", self.stream)

    def posterior(self, job: Job, name: str, seconds: float = 500) -> bytes:
        """Once the run has ended with success."""
        assert self.running.pop(name).wait(seconds) == 0, self.log(name)[-3000:]
        return (job.folder / "remote" / "posterior.safetensors").read_bytes()
