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
        home = str(self._job.world.homes[name].path)
        if name == "hub":
            arguments = ["server", "start", str(self._job.path), "--home", home, "--out", str(self.out)]
            arguments += ["--listen", self._address]
        else:
            arguments = ["silo", "start", "--home", home, "--server", self._address, "--repeatable", "--once"]
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

    def wait_for_round(self, round_: int, seconds: float = 120) -> None:
        """Until the server has begun and done about so many rounds, by its file of metrics (one line every 50)."""
        until = time.monotonic() + seconds
        path = self.out / "metrics.jsonl"
        while time.monotonic() < until and self._running["hub"].poll() is None:
            if path.exists() and len(path.read_text().splitlines()) * 50 >= round_:
                return
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
    job = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 1500})
    processes, rng = Processes(job), random.Random(5)
    killed = []
    try:
        for name in ("hub", *SILOS):
            processes.start(name)
        processes.wait_for_round(50)
        for name in ("north", "hub", "east", "hub", "south", "north", "hub", "east"):
            time.sleep(rng.uniform(0.2, 0.8))
            if not processes.kill(name):
                break
            killed.append(name)
            processes.start(name)
            time.sleep(5.0)  # as long as a process takes to start, so that some rounds are done in between
        found = processes.finish()
    finally:
        processes.stop()
    assert len(killed) >= 4
    assert {"hub", "north"} <= set(killed)
    assert found == job.local()
