"""Real processes, three silos and a server, over TLS on loopback; some of them killed with SIGKILL."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from consortium_run import SILOS, Job
from deployment_world import World

import secure_fvi
from secure_fvi import wire
from secure_fvi.checkpoints import latest_round
from secure_fvi.deployment.model_hash import manifest, package_digest

_CODE = "from secure_fvi.cli import main; main()"
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}


class Processes:
    """The parties of a job, each in a process of its own, started again as often as asked."""

    def __init__(self, job: Job, out: str = "remote") -> None:
        self._job, self.out = job, job.folder / out
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, package: Path | None = None) -> None:
        """package: the folder of another secure_fvi than this one."""
        home, role = str(self._job.world.homes[name].path), self._job.world.homes[name].role
        if role == "server":
            arguments = ["server", "start", str(self._job.path), "--home", home, "--out", str(self.out)]
            arguments += ["--listen", self._address]
        else:
            arguments = [role, "start", "--home", home, "--server", self._address, "--once"]
            arguments += ["--repeatable"] if role == "silo" else []
        with (self._job.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-c", _CODE, *arguments]
            other = {} if package is None else {"PYTHONPATH": str(package), "PYTHONSAFEPATH": "1"}
            self._running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=_ENVIRONMENT | other)

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


@pytest.mark.slow
def test_sites_are_upgraded_one_at_a_time(world: World, tmp_path: Path) -> None:
    """To a secure_fvi that speaks one version of the protocol more, in the middle of a job; then the server, for the
    next, while one site is still to come. The control: sites that take the server's very package alone refuse."""
    newer = tmp_path / "newer"
    ours = Path(secure_fvi.__file__).parent
    shutil.copytree(ours, newer / "secure_fvi", ignore=shutil.ignore_patterns("__pycache__"))
    said = (newer / "secure_fvi" / "wire.py").read_text()
    spoken = f"PROTOCOLS = {wire.PROTOCOLS!r}"
    assert spoken in said
    after = (*wire.PROTOCOLS, wire.PROTOCOLS[-1] + 1)
    (newer / "secure_fvi" / "wire.py").write_text(said.replace(spoken, f"PROTOCOLS = {after!r}"))
    digests = [package_digest(), package_digest(newer / "secure_fvi")]
    assert digests[0] != digests[1]
    job = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 400})
    expected = job.local()

    def run(out: str, server: Path | None, first: dict[str, Path | None], *upgraded: str) -> tuple[int | None, bytes]:
        processes, done = Processes(job, out), 0
        try:
            processes.start("hub", server)
            for name in SILOS:
                processes.start(name, first.get(name))
            for name in upgraded:
                done = processes.wait_for_round(done + 20)
                assert processes.kill(name), "it had left already"
                processes.start(name, newer)
            return 0, processes.finish()
        except AssertionError:
            return processes._running["hub"].poll(), b""
        finally:
            processes.stop()

    job.allow("north", package="same")
    code, _ = run("refused", None, {"north": newer})
    assert code not in (None, 0)
    both = [digest.hex()[:16] for digest in digests]
    assert f"has digest {both[0]}..., the one installed here {both[1]}" in Processes(job).log("hub")
    hashes = [{"hash": manifest(job.config, None, digest).hash.hex()} for digest in digests]
    for name in SILOS:
        job.allow(name, package=[digest.hex() for digest in digests], model=hashes)
    assert run("sites", None, {}, *SILOS) == (0, expected)
    assert run("server", newer, dict.fromkeys(SILOS[1:], newer)) == (0, expected)
