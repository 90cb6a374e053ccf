"""Real processes, three silos and a server, over TLS on loopback; some of them killed with SIGKILL."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from consortium_run import SILOS, Job
from deployment_world import World

from secure_fvi.checkpoints import latest_round

_CODE = "from secure_fvi.cli import main; main()"
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}


class Processes:
    """The parties of a job, each in a process of its own, started again as often as asked."""

    def __init__(self, job: Job, out: str = "remote") -> None:
        self._job, self.out = job, job.folder / out
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        home, role = str(self._job.world.homes[name].path), self._job.world.homes[name].role
        if role == "server":
            arguments = ["server", "start", str(self._job.path), "--home", home, "--out", str(self.out)]
            arguments += ["--listen", self._address]
        else:
            arguments = [role, "start", "--home", home, "--server", self._address, "--once"]
            arguments += ["--repeatable"] if role == "silo" else []
        with (self._job.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-c", _CODE, *arguments]
            self._running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=_ENVIRONMENT)

    def kill(self, name: str) -> bool:
        """Whether it was still at work."""
        process = self._running[name]
        process.send_signal(signal.SIGKILL)
        return process.wait() == -signal.SIGKILL

    def finish(self, seconds: float = 240) -> bytes:
        """The posterior, once the server has left with success."""
        until = time.monotonic() + seconds
        while self._running["hub"].poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert self._running["hub"].poll() == 0, (self._job.folder / "hub.log").read_text()[-2000:]
        return (self.out / "posterior.safetensors").read_bytes()

    def stop(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def log(self, name: str) -> str:
        return (self._job.folder / f"{name}.log").read_text()

    def wait_for_round(self, round_: int, seconds: float = 120) -> int:
        """Until the server's checkpoint is of this round or a later one: of which."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._running["hub"].poll() is None:
            found = latest_round(self.out / "checkpoint")
            if found is not None and found >= round_:
                return found
            time.sleep(0.05)
        raise AssertionError(f"no round {round_}: {self.log('hub')[-2000:]}")


@pytest.mark.slow
def test_three_processes_give_the_posterior_of_one(world: World, tmp_path: Path) -> None:
    """SFVI, 1,000 rounds."""
    job = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 1000})
    processes = Processes(job)
    try:
        for name in ("hub", *SILOS):
            processes.start(name)
        found = processes.finish()
    finally:
        processes.stop()
    assert found == job.local()


@pytest.mark.slow
def test_killed_parties_rejoin_and_the_posterior_is_the_same(world: World, tmp_path: Path) -> None:
    """Eight kills at moments drawn with a fixed seed, of the server and of silos, each started again at once."""
    job = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 400})
    processes, rng = Processes(job), random.Random(5)
    killed, done = [], 0
    try:
        for name in ("hub", *SILOS):
            processes.start(name)
        for name in ("north", "hub", "east", "hub", "south", "north", "hub", "east"):
            done = processes.wait_for_round(done + 1)
            time.sleep(rng.uniform(0.0, 0.3))
            assert processes.kill(name), "it had left already"
            killed.append(name)
            processes.start(name)
        found = processes.finish()
    finally:
        processes.stop()
    assert len(killed) == 8
    assert found == job.local()
