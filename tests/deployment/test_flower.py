"""Flower's real programs: a SuperLink, three SuperNodes and runs, over TLS with registered keys, on loopback."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from consortium_run import SILOS, Job
from deployment_world import World
from flower_world import reachable_world

pytest.importorskip("flwr")

from secure_fvi.checkpoints import latest_round
from secure_fvi.cli.flower_processes import FlowerProcesses, plain_user
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.site import run_site
from secure_fvi.engines.flower_setup import environment, free_port, program
from secure_fvi.errors import ProtocolError, SecureFVIError

httpx = pytest.importorskip("httpx")
pytestmark = pytest.mark.slow

SFVI = {"name": "sfvi", "iterations": 300}
STREAM = {"kind": "flower"}
EVIL_CLIENT = """
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
Path({marker!r}).touch()
app = ClientApp()
app.query()(lambda message, context: Message(RecordDict(), reply_to=message))
"""
EVIL_SERVER = """
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
Path({marker!r}).touch()
app = ServerApp()
def main(grid, context):
    messages = [Message(RecordDict(), dst_node_id=n, message_type="query") for n in grid.get_node_ids()]
    for reply in grid.send_and_receive(messages, timeout=120):
        print("REPLY", reply.error.reason if reply.has_error() else "done")
app.main()(main)
"""


@pytest.fixture(scope="module")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> World:
    return reachable_world(tmp_path_factory.mktemp("flower") / "world")


@pytest.fixture(scope="module")
def flower(consortium: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerProcesses]:
    with FlowerProcesses(consortium.homes, tmp_path_factory.mktemp("logs")) as processes:
        processes.everything()
        yield processes


def _posterior(flower: FlowerProcesses, job: Job, name: str) -> bytes:
    flower.run(job.path, job.folder / "remote", name)
    flower.end(name, 1500)
    return (job.folder / "remote" / "posterior.safetensors").read_bytes()


def _wait_for_round(job: Job, round_: int) -> None:
    until = time.monotonic() + 900
    while (latest_round(job.folder / "remote" / "checkpoint") or 0) < round_:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_stream_gives_the_posterior_of_one_process(flower: FlowerProcesses, consortium: World, tmp_path: Path) -> None:
    job = Job(consortium, tmp_path, algorithm=SFVI, engine=STREAM)
    assert _posterior(flower, job, "stream") == job.local()
    name = json.loads((tmp_path / "remote" / "run.json").read_text())["job"]
    for silo in SILOS:
        assert (consortium.homes[silo].path / "results" / f"{name}.safetensors").exists()


def test_messages_give_the_posterior_of_one_process(flower: FlowerProcesses, consortium: World, tmp_path: Path) -> None:
    algorithm = {"name": "sfvi-avg", "rounds": 2, "local_steps": 50}
    job = Job(consortium, tmp_path, algorithm=algorithm, engine={"kind": "flower", "carrier": "messages"})
    assert _posterior(flower, job, "messages") == job.local()
    assert "Flower takes some seconds for each exchange" in flower.log("messages")


def test_killed_parties_come_back(flower: FlowerProcesses, consortium: World, tmp_path: Path) -> None:
    """A ClientApp, then the SuperLink with the ServerApp, are killed during a job; the run is started again."""
    job = Job(consortium, tmp_path, algorithm={"name": "sfvi", "iterations": 1200}, engine=STREAM)
    flower.run(job.path, tmp_path / "remote", "killed")
    _wait_for_round(job, 1)
    found = subprocess.run(
        ["pgrep", "-g", str(flower.running["east"].pid), "-f", "flwr-clientapp"],
        capture_output=True,
        text=True,
        check=True,
    )
    before = len(flower.log("killed"))
    for number in found.stdout.split():
        subprocess.run(["kill", "-9", number], check=True)
    flower.wait("killed", "silo 'east' has connected", 240, before)
    flower.kill("superlink")
    assert flower.running["killed"].wait(120) != 0
    assert not (tmp_path / "remote" / "result.json").exists()
    flower.superlink()
    assert _posterior(flower, job, "again") == job.local()


def test_a_silo_that_this_run_did_not_start_is_turned_away(
    flower: FlowerProcesses, consortium: World, tmp_path: Path
) -> None:
    """Its certificate is right, its token is none: a ClientApp that another run left behind. Its own goes on."""
    job = Job(consortium, tmp_path, algorithm={"name": "sfvi", "iterations": 600}, engine=STREAM)
    flower.run(job.path, tmp_path / "remote", "token")
    _wait_for_round(job, 1)
    with pytest.raises(ProtocolError, match="this run did not start this silo's ClientApp"):
        run_site(consortium.homes["east"], flower.stream)
    flower.end("token", 500)
    assert (tmp_path / "remote" / "posterior.safetensors").read_bytes() == job.local()


def test_an_unknown_node_and_plaintext_are_refused(flower: FlowerProcesses, tmp_path: Path) -> None:
    """Each ends with an error; a node with a registered key is let in by the same command, as in the fixture."""
    authority = flower.homes["east"].path / "flower" / "server.crt"
    stranger = Home(shutil.copytree(flower.homes["east"].path, tmp_path / "stranger"))
    shutil.rmtree(stranger.path / "flower")  # its node's key is another, which nobody registered
    flower.start("stranger", "flower", "supernode", "--home", str(stranger.path), "--superlink", flower.nodes)
    with pytest.raises(SecureFVIError, match="refuses this site's key: it is not registered there"):
        flower.end("stranger", 120)
    assert "trying again" not in flower.log("stranger")

    def supernode(*extra: str) -> str:
        command = [program("flower-supernode"), "--superlink", flower.nodes, "--port", str(free_port())]
        command += ["--max-retries", "1", *extra]
        # A file, since what it has started holds a pipe open until it is waited for.
        with (tmp_path / "node.log").open("w+") as log:
            subprocess.run(command, env=environment(stranger.path), check=False, timeout=120, stdout=log, stderr=log)
            log.seek(0)
            return log.read()

    for extra in (["--insecure"], ["--root-certificates", str(authority)]):
        log = supernode(*extra)
        assert "Starting Flower SuperNode" in log
        assert "Exit Code: 305" in log
        assert "SuperNode ID" not in log


def test_a_supernode_comes_back(flower: FlowerProcesses) -> None:
    """At once after SIGTERM, to it alone or to all its processes; killed, when its last heartbeat counts no more."""
    home = str(flower.homes["south"].path)
    flower.start("second", "flower", "supernode", "--home", home, "--superlink", flower.nodes)
    with pytest.raises(SecureFVIError, match=r"a SuperNode of '.*' is running; end it first"):
        flower.end("second", 120)

    def waits(kill: Callable[[], None]) -> bool:
        before = len(flower.log("south"))
        kill()
        flower.supernode("south")
        return "has not signed off" in flower.log("south")[before:]

    def terminate_alone() -> None:
        process = flower.running.pop("south")
        process.terminate()
        assert process.wait(30) == 0

    assert not waits(terminate_alone)
    assert not waits(lambda: flower.kill("south", signal.SIGTERM))
    assert waits(lambda: flower.kill("south"))


def test_control_is_not_reached_from_outside(flower: FlowerProcesses, tmp_path: Path) -> None:
    """The filter passes what nodes ask and nothing else; on loopback the same question is answered."""
    authority = str(flower.homes["east"].path / "flower" / "server.crt")
    with httpx.Client(base_url=f"https://{flower.nodes}", verify=authority, trust_env=False) as outside:
        for path in ("control/list-runs", "runtime/get-nodes", "fleet/../control/list-runs", "fleet/%2e%2e/control/x"):
            assert outside.post(f"/v1/{path}").status_code == 404
        assert outside.get("/docs").status_code == 404
        assert outside.post("/v1/fleet/activate-node").status_code not in (404, 503)
    inner = re.search(r'address = "(.*)"', (flower.hub / "flower" / "config.toml").read_text())
    assert inner is not None
    certificate = str(flower.hub / "flower" / "inner.crt")
    with httpx.Client(base_url=f"https://{inner[1]}", verify=certificate, trust_env=False) as inside:
        assert inside.get("/docs").status_code == 200


@pytest.mark.skipif(not plain_user(), reason="as root alone is setpriv needed, and only with it is this told apart")
def test_another_app_does_not_run_at_a_site(flower: FlowerProcesses, tmp_path: Path) -> None:
    """An app that a run ships is code. It runs at neither end, except where --any-app lets it."""
    folder, at_site, at_server = tmp_path / "evil-app", tmp_path / "site", tmp_path / "server"
    folder.mkdir()
    (folder / "evil_client.py").write_text(EVIL_CLIENT.format(marker=str(at_site)))
    (folder / "evil_server.py").write_text(EVIL_SERVER.format(marker=str(at_server)))
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "evil-app"\nversion = "1.0.0"\n[tool.flwr.app]\npublisher = "x"\n'
        '[tool.flwr.app.components]\nserverapp = "evil_server:app"\nclientapp = "evil_client:app"\n'
    )
    done = flower.flwr("run", str(folder), "local", "--stream")
    assert "Permission denied" in done.stdout + done.stderr
    assert not at_server.exists()

    flower.kill("superlink")
    flower.superlink("--any-app")
    for silo in ("north", "south"):
        flower.kill(silo, signal.SIGTERM)  # they sign off, and the run has one node
    done = flower.flwr("run", str(folder), "local", "--stream")
    assert at_server.exists()
    assert "Permission denied" in done.stdout + done.stderr
    assert not at_site.exists()

    flower.kill("east", signal.SIGTERM)
    flower.supernode("east", "--any-app")
    flower.flwr("run", str(folder), "local", "--stream")
    assert at_site.exists()
