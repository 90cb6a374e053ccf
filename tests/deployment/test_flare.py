"""FLARE's real programs: a server and three sites in processes of their own, provisioned kits, mutual TLS, on loopback.

The control beside each refusal is the job that runs with the same kits.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from columns_run import AT_SILO, MATCHED, PEOPLE, VERTICAL, ColumnsJob, census, in_order, owned, shuffled
from consortium_run import HOLDER, SILOS, Job
from deployment_world import World, new_world
from safetensors.torch import load
from test_network_faults import Relay

pytest.importorskip("nvflare")

from secure_fvi.checkpoints import latest_round
from secure_fvi.engines import flare_kits
from secure_fvi.errors import SecureFVIError, SecureFVIWarning
from secure_fvi.runs import wording
from secure_fvi.runs.config import parse
from secure_fvi_lab.bench.engine import whole_job
from secure_fvi_lab.bench.flare import (
    ADMIN,
    HUB,
    JOB_AT_SERVER,
    JOB_AT_SITE,
    MAIN,
    SERVER,
    SITE,
    Flare,
    campaign,
    times,
)
from secure_fvi_lab.bench.kills import different
from secure_fvi_lab.bench.world import allow, consortium, posterior

pytestmark = pytest.mark.slow
FLARE = {"kind": "flare"}


class Processes(Flare):
    """FLARE's processes of one consortium, each with a log in `folder`."""

    def __init__(self, world: World, folder: Path) -> None:
        super().__init__(world.homes, folder)
        self.world = world

    def run(self, job: Job) -> list[str]:
        return self.launch(job.path, job.folder / "remote")


@pytest.fixture(scope="module")
def flare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("flare")
    with Processes(new_world(folder / "world", holder=True), folder) as found:
        found.start(HUB, *SILOS, HOLDER)
        yield found


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
    """`pytest -s` prints the median of a round."""
    job = Job(flare.world, tmp_path, engine=FLARE, **tables)
    flare.run(job)
    name = json.loads((tmp_path / "remote" / "run.json").read_text())["job"]
    seconds, _ = times(flare.homes[HUB].log_file, name)
    print(f"{tables['algorithm']['name']} under FLARE: {1000 * median(seconds or [0]):.0f} ms a round")
    assert _posterior(job) == _local(job)


@pytest.mark.parametrize("response", ["private", "shared"])
def test_flare_carries_columns_too(flare: Processes, tmp_path: Path, response: str) -> None:
    """A vertical job, the response at the server or told to all: posterior, and each silo's own, are those of one
    process, byte for byte. The control: another response's posterior is another."""
    job = ColumnsJob(flare.world, tmp_path, engine=FLARE, algorithm={**VERTICAL, "response": response})
    flare.run(job)
    assert _posterior(job) == _local(job)
    owned(job, flare.world)
    answers = job.files["response"].read_text().splitlines()
    job.files["response"].write_text("\n".join([*answers[:-1], f"{answers[-1][:-1]}{1 - int(answers[-1][-1])}"]) + "\n")
    assert job.local("another") != _posterior(job)


def test_flare_carries_the_census(tmp_path: Path) -> None:
    """30,000 people, columns at five silos and the outcome at the server, six members each with FLARE's processes: the
    posterior of one process, byte for byte. The control: another seed's posterior is another."""
    job = {**census(tmp_path, rounds=5, batch_size=512), "engine": FLARE}
    config = parse(job, "job")
    homes = consortium(tmp_path / "world", [silo["id"] for silo in job["silo"]])
    for silo in job["silo"]:
        allow(homes[silo["id"]], config, disclosures=["person_rows", "sampled_records"])
    (tmp_path / "job.toml").write_text(wording.dumps(job))
    with Flare(homes, tmp_path) as flare:
        flare.start(*homes)
        flare.launch(tmp_path / "job.toml", tmp_path / "remote")
    found = (tmp_path / "remote" / "posterior.safetensors").read_bytes()
    assert found == posterior(config)
    assert posterior(parse({**job, "seed": 4}, "another")) != found


def test_people_are_matched_over_flare(flare: Processes, tmp_path: Path) -> None:
    """The outcome at a silo, whose seals FLARE carries too. In which order people were matched no party tells: one
    process over the same people in another order finds the same but for the order of its sums."""
    job = ColumnsJob(flare.world, tmp_path, engine=FLARE, alignment=MATCHED, **AT_SILO)
    shuffled(job)
    flare.run(job)
    result = json.loads((tmp_path / "remote" / "result.json").read_text())
    assert result["metrics"]["records"] == PEOPLE - 3
    found, alone = load(_posterior(job)), load(in_order(job))
    assert found.keys() == alone.keys()
    assert all(torch.allclose(found[n], alone[n], rtol=1e-6, atol=1e-8) for n in found)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("east", JOB_AT_SITE),
        ("north", SITE),
        (HUB, JOB_AT_SERVER),
        (HUB, SERVER),
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
    said = flare.run(job)
    killer.join()
    assert killed == [1]
    assert any("goes on after round" in line for line in said), said
    assert _posterior(job) == _local(job)


def _during(job: Job, what: Callable[[], None]) -> threading.Thread:
    """Does it once a job has had 20 rounds."""

    def wait() -> None:
        until = time.monotonic() + 300
        while (latest_round(job.folder / "remote" / "checkpoint") or 0) < 20 and time.monotonic() < until:
            time.sleep(0.1)
        what()

    found = threading.Thread(target=wait)
    found.start()
    return found


#: Seconds, three times what a server waits for a site of a job that has begun.
_CUT = 150.0


@pytest.mark.parametrize("how", ["silent", "refused"])
def test_a_network_that_is_cut_for_minutes(tmp_path: Path, how: str) -> None:
    """Between the server and all sites, longer than FLARE waits for any of them: nothing passes, as where a router has
    failed, or all connections break and none is taken. The same bytes, and nobody's hand."""
    with Processes(new_world(tmp_path / "world"), tmp_path) as flare:
        relay = Relay(flare.port)
        for name in SILOS:
            kit = flare.kits / name / "startup" / "fed_client.json"
            kit.write_text(kit.read_text().replace(f":{flare.port}", f":{relay.port}"))
        flare.start(HUB, *SILOS)
        job = Job(flare.world, tmp_path, algorithm={"name": "sfvi", "iterations": 400}, engine=FLARE)
        passed: list[int] = []

        def cut() -> None:
            passed.append(latest_round(job.folder / "remote" / "checkpoint") or 0)
            if how == "silent":
                relay.stall(_CUT)
                time.sleep(_CUT)
            else:
                relay.target = 1  # where nobody listens
                relay.cut()
                time.sleep(_CUT)
                relay.target = flare.port
            passed.append(latest_round(job.folder / "remote" / "checkpoint") or 0)

        cutting = _during(job, cut)
        flare.run(job)
        cutting.join()
        relay.close()
        assert passed[1] <= passed[0] + 1  # it was a cut
        assert _posterior(job) == _local(job)


def test_a_site_whose_machine_is_started_again(tmp_path: Path) -> None:
    """All of its processes end, and the name of its boot is another: what it claimed in between was not on the disk, so
    that it opens a new session. The same bytes, and nobody's hand but that of what starts services."""
    boot = tmp_path / "boot"
    boot.write_text("the first")
    main = "from pathlib import Path; import secure_fvi.deployment.holding as holding; "
    main += f"holding._BOOT_ID = Path({str(boot)!r}); {MAIN}"
    with Processes(new_world(tmp_path / "world"), tmp_path) as flare:
        flare.start(HUB, *SILOS, main=main)
        job = Job(flare.world, tmp_path, algorithm={"name": "sfvi", "iterations": 400}, engine=FLARE)

        def reboot() -> None:
            flare.running["east"].kill()
            flare.running["east"].wait()
            while flare.kill("east", SITE) + flare.kill("east", JOB_AT_SITE):  # what the fence has left of them
                time.sleep(0.1)
            boot.write_text("the second")
            flare.start("east", main=main)

        booting = _during(job, reboot)
        flare.run(job)
        booting.join()
        assert different(flare.world.homes["east"].log_file, "open") >= 2
        assert _posterior(job) == _local(job)


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Two of each process: `secure-fvi bench kills --engine flare --kills 20` does more."""
    found = campaign(tmp_path / "kills", 2, seed=1)
    assert not found["faults"]
    assert [row["kills"] for row in found["kills"]] == [2, 2, 2, 2]


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


def test_a_round_takes_at_most_twice_the_streams_time() -> None:
    """Both in one run, masked; `secure-fvi bench engine --unattended 10000` is the whole job."""
    stream, carried = whole_job(500, compile=False)["rows"]
    assert (stream["carrier"], carried["carrier"]) == ("stream", "FLARE")
    assert carried["ms_median"] <= 2 * stream["ms_median"]


#: Of a machine of 24 GiB that has to hold fifty sites, less what the server, the system and all together take.
_ROOM = 20 * 2**30


@pytest.mark.parametrize(
    "under_flare",
    [
        False,  # the control: the process that a site has under the stream too, alone
        pytest.param(
            True,
            marks=pytest.mark.xfail(
                strict=True,
                reason="a site has three processes, of which FLARE's two take some 190 MB that nothing shares beside "
                "our 310: why our stream stays the default",
            ),
        ),
    ],
)
def test_fifty_sites_fit_into_one_machine(flare: Processes, tmp_path: Path, under_flare: bool) -> None:
    """By the memory of one site that no other process shares, in the middle of a job."""
    job, seen = Job(flare.world, tmp_path, engine=FLARE, algorithm={"name": "sfvi", "iterations": 150}), []

    def look() -> None:
        while not seen:
            theirs = [pid for module in (JOB_AT_SITE, SITE) for pid in flare.pids("east", module)]
            if latest_round(tmp_path / "remote" / "checkpoint") and len(theirs) == 2:
                ours = flare.running["east"].pid
                seen.append(sum(map(_unshared, [ours, *(theirs if under_flare else ())])))
            time.sleep(0.2)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    flare.run(job)
    looking.join(5)
    print(f"{seen[0] / 2**20:.0f} MiB a site")
    assert 50 * seen[0] <= _ROOM


def _unshared(pid: int) -> int:
    """Bytes of a process's memory that no other has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))


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
