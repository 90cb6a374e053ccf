"""FLARE's real programs: a server and three sites in processes of their own, provisioned kits, mutual TLS, on loopback.

The control beside each refusal is the job that runs with the same kits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from consortium_run import HOLDER, SILOS, Job
from deployment_world import World, new_world

pytest.importorskip("nvflare")

from secure_fvi.checkpoints import latest_round
from secure_fvi.engines import flare_kits
from secure_fvi.errors import SecureFVIError, SecureFVIWarning

pytestmark = pytest.mark.slow
ADMIN = "admin@example.org"
FLARE = {"kind": "flare"}


class Processes:
    """FLARE's processes of one consortium, each with a log in `folder`."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        assert world.roster is not None
        (folder / "project.yml").write_text(flare_kits.project(world.roster, "localhost", port, ADMIN))
        provision = [str(Path(sys.executable).with_name("nvflare")), "provision", "-p", str(folder / "project.yml")]
        subprocess.run([*provision, "-w", str(folder / "kits"), "--force"], check=True, stdout=subprocess.DEVNULL)
        self.kits = next((folder / "kits").glob("*/prod_00"))
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        main = [sys.executable, "-c", "from secure_fvi.cli import main; main()"]
        command = [
            *main,
            "flare",
            "start",
            str(self.kits / name),
            "--home",
            str(self.world.homes[name].path),
            "--repeatable",
        ]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=variables, cwd=self.folder)

    def pids(self, name: str, module: str) -> list[int]:
        """The processes of one member that run FLARE's `module`, such as client.worker_process."""
        found = subprocess.run(
            ["pgrep", "-f", f"{module} -m {flare_kits.workspace_of(self.world.homes[name])} "],
            capture_output=True,
            text=True,
            check=False,
        )
        pids = [int(n) for n in found.stdout.split()]
        return [n for n in pids if "python" in Path(f"/proc/{n}/exe").readlink().name]  # not the fence

    def kill(self, name: str, module: str) -> int:
        """How many of them there were."""
        found = self.pids(name, module)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)

    def launch(self, job: Job, out: str = "remote") -> list[str]:
        """The job to its end: what the launcher said."""
        said: list[str] = []
        flare_kits.launch(self.world.homes["hub"], job.path, job.folder / out, self.kits / ADMIN, say=said.append)
        return said

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        found = subprocess.run(["pgrep", "-f", str(self.world.root)], capture_output=True, text=True, check=False)
        for pid in found.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@pytest.fixture(scope="module")
def flare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("flare")
    found = Processes(new_world(folder / "world", holder=True), folder)
    try:
        for name in ("hub", *SILOS, HOLDER):
            found.start(name)
        yield found
    finally:
        found.close()


def _posterior(job: Job) -> bytes:
    return (job.folder / "remote" / "posterior.safetensors").read_bytes()


def _local(job: Job) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureFVIWarning)
        return job.local()


@pytest.mark.parametrize(
    "tables",
    [
        {"algorithm": {"name": "sfvi", "iterations": 150}},
        {"algorithm": {"name": "sfvi-avg", "rounds": 2, "local_steps": 50}},
        {"algorithm": {"name": "pvi", "rounds": 2, "local_steps": 50}},
        {
            "algorithm": {"name": "sfvi", "iterations": 10},
            "aggregation": {"kind": "homomorphic"},
        },
    ],
    ids=["sfvi", "sfvi-avg", "pvi", "bfv"],
)
def test_flare_gives_the_posterior_of_one_process(flare: Processes, tmp_path: Path, tables: Any) -> None:
    """`pytest -s` prints what a round of three exchanges takes once all are at work."""
    job = Job(flare.world, tmp_path, engine=FLARE, **tables)
    flare.launch(job)
    rounds = [json.loads(line) for line in (tmp_path / "remote" / "metrics.jsonl").read_text().splitlines()]
    if len(rounds) > 1:
        first, last = rounds[0], rounds[-1]
        ms = 1000 * (last["seconds"] - first["seconds"]) / (last["round"] - first["round"])
        print(f"{tables['algorithm']['name']} under FLARE: {ms:.0f} ms a round")
    assert _posterior(job) == _local(job)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("east", "client.worker_process"),
        ("north", "client.client_train"),
        ("hub", "server.runner_process"),
        ("hub", "server.server_train"),
    ],
)
def test_killed_processes_come_back_by_themselves(flare: Processes, tmp_path: Path, name: str, module: str) -> None:
    """kill -9 of a site's process of the job, of its parent, and of the same two at the server: the same bytes, and
    nobody's hand."""
    job = Job(flare.world, tmp_path, algorithm={"name": "sfvi", "iterations": 400}, engine=FLARE)
    killed: list[int] = []

    def kill() -> None:
        until = time.monotonic() + 300
        while (latest_round(tmp_path / "remote" / "checkpoint") or 0) < 20 and time.monotonic() < until:
            time.sleep(0.1)
        killed.append(flare.kill(name, module))

    killer = threading.Thread(target=kill)
    killer.start()
    said = flare.launch(job)
    killer.join()
    assert killed == [1]
    assert any("goes on after round" in line for line in said), said
    assert _posterior(job) == _local(job)


def _foreign(flare: Processes, tmp_path: Path, at_site: dict[str, Any], code: str = "") -> str:
    """What FLARE says of a job that is not ours."""
    definition = flare_kits.job_folder(tmp_path, "foreign", SILOS)
    config = definition / "app" / "config" / "config_fed_client.json"
    config.write_text(json.dumps({"format_version": 2, "executors": [{"tasks": ["x"], "executor": at_site}]}))
    if code:
        (definition / "app" / "custom").mkdir()
        (definition / "app" / "custom" / "evil.py").write_text(code)
    with flare_kits._Session(flare.kits / ADMIN) as session:
        session.submit(definition)
        return session.wait()


def test_code_in_a_job_does_not_run_at_a_site(flare: Processes, tmp_path: Path) -> None:
    """Brought along, or any class that is installed there and not ours."""
    marker = tmp_path / "ran"
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\nclass Evil: pass\n"
    with contextlib.suppress(SecureFVIError):
        assert _foreign(flare, tmp_path / "a", {"path": "evil.Evil", "args": {}}, code) != "FINISHED:COMPLETED"
    assert not marker.exists()
    touch = {"path": "subprocess.Popen", "args": {"args": ["touch", str(marker)]}}
    with contextlib.suppress(SecureFVIError):
        assert _foreign(flare, tmp_path / "b", touch) != "FINISHED:COMPLETED"
    assert not marker.exists()


def test_no_log_of_a_site_reaches_the_server(flare: Processes) -> None:
    """FLARE would stream it there by default."""
    assert not list(flare_kits.workspace_of(flare.world.homes["hub"]).rglob("*error_log*east*"))
    assert "Saved live log" not in (flare.folder / "hub.log").read_text()
