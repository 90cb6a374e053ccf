"""NVIDIA FLARE's real programs on one machine: a consortium's jobs over them, kills of its processes, and its own cost.

A bare job is FLARE alone: a controller that sends so many bytes in auxiliary messages, and executors that send as many
back, under FLARE's own kits, with nothing of ours: its processes load this file, so what is ours is imported where
it is used.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

if TYPE_CHECKING:
    from secure_fvi.deployment.home import Home
    from secure_fvi.engines.flare_kits import Scheme

ADMIN, HUB = "admin@example.org", "hub"
#: FLARE's processes of a member: of one job, and the parent that starts them.
JOB_AT_SITE, SITE, JOB_AT_SERVER, SERVER = (
    "client.worker_process", "client.client_train", "server.runner_process", "server.server_train",
)  # fmt: skip
MAIN = "from secure_fvi.cli import main; main()"
_TOPIC, _REPLY = "bare", 15.0


class Flare:
    """FLARE's processes of one consortium, each with a log in `folder`, which are killed when it is left."""

    def __init__(self, homes: Mapping[str, Home], folder: Path, scheme: Scheme = "tcp") -> None:
        from secure_fvi.deployment.names import now
        from secure_fvi.engines import flare_kits

        self.homes, self.folder = homes, folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        roster = homes[HUB].roster(now())
        (folder / "project.yml").write_text(flare_kits.project(roster, "localhost", self.port, ADMIN, scheme))
        provision = [str(Path(sys.executable).with_name("nvflare")), "provision", "-p", str(folder / "project.yml")]
        subprocess.run([*provision, "-w", str(folder / "kits"), "--force"], check=True, stdout=subprocess.DEVNULL)
        self.kits = next((folder / "kits").glob("*/prod_00"))
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Flare:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start(self, *names: str, main: str = MAIN) -> None:
        for name in names:
            arguments = ["flare", "start", str(self.kits / name), "--home", str(self.homes[name].path), "--repeatable"]
            self._run(name, ["-c", main, *arguments])

    def start_bare(self, *names: str) -> None:
        """FLARE alone, as its kit says."""
        for name in names:
            module, at = (SERVER, "fed_server.json") if name == HUB else (SITE, "fed_client.json")
            own = ["secure_train=true", f"uid={name}", "org=consortium", "config_folder=config"]
            local = self.kits / name / "local"
            resources = json.loads((local / "resources.json.default").read_text())
            resources["class_allow_list"] += [f"{__name__}.BareController", f"{__name__}.BareExecutor"]
            (local / "resources.json").write_text(json.dumps(resources))
            where = ["-m", str(self.kits / name), "-s", at, "--set", *own]
            self._run(name, ["-u", "-m", f"nvflare.private.fed.app.{module}", *where])

    def _run(self, name: str, arguments: Sequence[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, *arguments], stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd=self.folder,
            )  # fmt: skip

    def processes(self) -> list[int]:
        """All that were started with something in this consortium's folders."""
        found = [_pids(f"{self.folder}/"), *(_pids(f"{home.path}/") for home in self.homes.values())]
        return sorted({pid for pids in found for pid in pids} - {os.getpid()})

    def pids(self, name: str, module: str) -> list[int]:
        """The processes of one member that run FLARE's `module`."""
        from secure_fvi.engines.flare_kits import workspace_of

        found = _pids(f"{module} -m {workspace_of(self.homes[name])} ")
        pids = []
        for pid in found:
            with contextlib.suppress(OSError):
                pids += [pid] if "python" in Path(f"/proc/{pid}/exe").readlink().name else []  # not the fence
        return pids

    def kill(self, name: str, module: str) -> int:
        """How many of them there were."""
        found = self.pids(name, module)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)

    def launch(self, job: Path, out: Path, say: Callable[[str], None] | None = None) -> list[str]:
        """The job to its end: what the launcher said."""
        from secure_fvi.engines import flare_kits

        said: list[str] = []

        def tell(text: str) -> None:
            said.append(text)
            if say is not None:
                say(text)

        flare_kits.launch(self.homes[HUB], job, out, self.kits / ADMIN, say=tell)
        return said

    def bare(self, sizes: Sequence[tuple[int, int]], rounds: int) -> list[float]:
        """Seconds of each of `rounds` rounds of exchanges of so many bytes (down, up) with all sites."""
        from secure_fvi.engines import flare_kits

        sites = [name for name in self.running if name != HUB]
        place = Path(tempfile.mkdtemp(prefix="bare-", dir=self.folder))
        definition, found = flare_kits.job_folder(place, "bare", sites), place / "seconds.json"
        config = definition / "app" / "config"
        args = {"sizes": [list(s) for s in sizes], "rounds": rounds, "out": str(found)}
        workflow = {"id": "bare", "path": f"{__name__}.BareController", "args": args}
        executor = {"tasks": ["none"], "executor": {"path": f"{__name__}.BareExecutor", "args": {}}}
        (config / "config_fed_server.json").write_text(json.dumps({"format_version": 2, "workflows": [workflow]}))
        (config / "config_fed_client.json").write_text(json.dumps({"format_version": 2, "executors": [executor]}))
        with flare_kits._Session(self.kits / ADMIN) as session:
            session.submit(definition)
            status = session.wait()
        if not found.exists():
            raise RuntimeError(f"FLARE's bare job came to nothing: {status}")
        return list(map(float, json.loads(found.read_text())))


def _pids(pattern: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", "--", pattern], capture_output=True, text=True, check=False)
    return [int(n) for n in found.stdout.split()]


# ---- FLARE alone ----


class BareController(Controller):  # type: ignore[misc]
    """Sends bytes to all sites and waits for theirs. out: where it writes the seconds of each round."""

    def __init__(self, sizes: list[list[int]], rounds: int, out: str) -> None:
        super().__init__()
        self.sizes, self.rounds, self.out = sizes, rounds, out

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing: all is in `control_flow`."""

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing is held."""

    def process_result_of_unknown_task(self, *_: Any) -> None:
        """There are no tasks."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        engine, times = fl_ctx.get_engine(), list[float]()
        sites = [client.name for client in engine.get_clients()]
        until = time.monotonic() + 120
        while len(times) < self.rounds and not abort_signal.triggered and time.monotonic() < until:
            began = time.perf_counter()
            heard = 0
            for down, up in self.sizes:
                request = Shareable({"up": up, "bytes": bytes(down)})
                found = engine.send_aux_request(sites, _TOPIC, request, _REPLY, fl_ctx, optional=True) or {}
                heard += sum(len(reply.get("bytes", b"")) == up for reply in found.values())
            if heard == len(self.sizes) * len(sites):
                times.append(time.perf_counter() - began)
                until = time.monotonic() + 120
            else:
                time.sleep(0.2)  # not all are there yet
        Path(self.out).write_text(json.dumps(times))


class BareExecutor(Executor):  # type: ignore[misc]
    """Sends as many bytes back as it was asked for."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == EventType.START_RUN:
            fl_ctx.get_engine().register_aux_message_handler(_TOPIC, self._answer)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        return make_reply(ReturnCode.TASK_UNKNOWN)

    def _answer(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        reply = make_reply(ReturnCode.OK)
        reply["bytes"] = bytes(request["up"])
        return reply


# ---- What a job took, by the server's log ----


def times(log: Path, job: str) -> tuple[list[float], float]:
    """Seconds from each broadcast to the next, by the times of the rows that a server writes before it asks, and the
    exchanges a round after the first half of them."""
    from secure_fvi.deployment.trail import EXCHANGE, read_exchange
    from secure_fvi.deployment.trail_verify import rows

    asked: dict[bytes, int] = {}
    exchanges: dict[str, list[int]] = {}
    for row in rows(log)[1]:
        if row.kind == EXCHANGE:
            seen = read_exchange(row.fields())
            if seen.job == job and seen.received is None and seen.sent is not None:
                exchanges.setdefault(seen.peer, []).append(row.time)
                if seen.step == "broadcast":
                    asked.setdefault(seen.sent.digest, row.time)
    stamps = sorted(asked.values())
    half = stamps[len(stamps) // 2 :]
    late = max(sum(half[0] <= at < half[-1] for at in of) for of in exchanges.values())
    return [(b - a) / 1e6 for a, b in itertools.pairwise(stamps)], late / max(1, len(half) - 1)


# ---- Kills ----


class Victim(NamedTuple):
    what: str
    at: str  # "silo" for any of them
    module: str


VICTIMS = (
    Victim("site, job", "silo", JOB_AT_SITE),
    Victim("site, parent", "silo", SITE),
    Victim("server, job", HUB, JOB_AT_SERVER),
    Victim("server, parent", HUB, SERVER),
)
#: Of a job; rounds of each; the longest time in which one has to go on after a kill, in seconds.
_PER_JOB, _ROUNDS, _PATIENCE = 20, 900, 300.0


def campaign(root: Path, kills: int, seed: int, tell: Callable[[str], None] = print) -> dict[str, Any]:
    """SFVI on six cities between FLARE's programs, until `kills` of each kind of process were killed; each job has to
    end by itself with the posterior of one process."""
    from secure_fvi.runs import wording
    from secure_fvi.runs.reading import read
    from secure_fvi_lab.bench.world import allow, consortium, posterior
    from secure_fvi_lab.machine import machine

    rng, silos = random.Random(seed), ("east", "north", "south")
    done, jobs, faults = list[_Killed](), list[dict[str, int]](), list[str]()
    root.mkdir(parents=True, exist_ok=True)
    path = root / "job.toml"
    path.write_text(wording.dumps({
        "seed": 3, "model": {"program": "six-cities"}, "partition": {"ids": list(silos), "sizes": [200, 180, 157]},
        "algorithm": {"name": "sfvi", "iterations": _ROUNDS}, "aggregation": {"kind": "masked"},
        "run": {"compile": False, "threads": 1}, "engine": {"kind": "flare"},
    }))  # fmt: skip
    config = read(path)
    reference = posterior(config)
    homes = consortium(root, silos)
    for silo in silos:
        allow(homes[silo], config)
    with Flare(homes, root) as flare:
        flare.start(HUB, *silos)
        while any(left := _left(done, kills).values()) and len(faults) < 2:
            began, out, before = time.monotonic(), root / f"job-{len(jobs)}", len(done)
            over = threading.Event()
            killer = threading.Thread(
                target=_kill, args=(flare, out, rng, done, min(sum(left), _PER_JOB), kills, over, tell)
            )
            killer.start()
            why = ""
            try:
                said = flare.launch(path, out, tell)
                why = "" if (out / "posterior.safetensors").read_bytes() == reference else "another posterior"
            except Exception as error:
                said, why = [], f"{type(error).__name__}: {error}"
            over.set()
            killer.join()
            here = done[before:]
            faults += [f"job {len(jobs)}: {why}"] if why else []
            jobs.append({"kills": len(here), "submitted": sum("is submitted" in line for line in said)})
            tell(f"job {len(jobs)}: {len(here)} kills, {time.monotonic() - began:.0f} s, {why or 'right'}")
            if not here and not why:
                faults.append("no process was there to be killed")
    return {
        "machine": machine(), "on_loss": "wait", "seed": seed, "faults": faults, "parties": {},
        "kills": [_of(v.what, [k for k in done if k.what == v.what]) for v in VICTIMS],
        "jobs": [{"kind": "masked SFVI, FLARE", "jobs": len(jobs), "kills": len(done),
                  "right": len(jobs) - len(faults), "submitted": sum(j["submitted"] for j in jobs)}],
    }  # fmt: skip


class _Killed(NamedTuple):
    what: str
    seconds: float | None = None  # until there was a round more; None where another kill or the end came first


def _left(done: Sequence[_Killed], kills: int) -> dict[str, int]:
    killed = Counter(k.what for k in done)
    return {v.what: max(0, kills - killed[v.what]) for v in VICTIMS}


def _kill(
    flare: Flare, out: Path, rng: random.Random, done: list[_Killed], most: int, kills: int, over: threading.Event,
    tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Kill processes, mostly once the job goes on after the last kill, now and then before it does."""
    from secure_fvi.checkpoints import latest_round
    from secure_fvi.runs.directory import RunDirectory

    at, unsettled = 0.0, 0
    reached = 0

    def round_now() -> int:
        return latest_round(RunDirectory(out).checkpoints) or 0

    for number in range(most):
        settled = number == 0 or unsettled >= 2 or rng.random() < 0.7
        unsettled = 0 if settled else unsettled + 1
        if settled:
            until = time.monotonic() + _PATIENCE
            while round_now() <= reached and not over.is_set() and time.monotonic() < until:
                time.sleep(0.1)
            if number and not over.is_set() and round_now() > reached:
                done[-1] = done[-1]._replace(seconds=time.monotonic() - at)
            time.sleep(rng.uniform(0.0, 3.0))
        else:
            over.wait(rng.uniform(0.0, 25.0))
        wanted = [v for v in VICTIMS for _ in range(_left(done, kills)[v.what])]
        if over.is_set() or not wanted:
            return
        victim = rng.choice(wanted)
        name = rng.choice(sorted(flare.homes.keys() - {HUB})) if victim.at == "silo" else victim.at
        reached = round_now()
        until = time.monotonic() + 60
        while not flare.kill(name, victim.module):  # that of a job may not be there yet
            if over.wait(0.05) or time.monotonic() >= until:
                break
        else:
            at = time.monotonic()
            done.append(_Killed(victim.what))
            tell(f"killed: {victim.what}, of {name}, after round {reached}")


def _of(what: str, kills: Sequence[_Killed]) -> dict[str, Any]:
    found = [k.seconds for k in kills if k.seconds is not None]
    median = statistics.median(found) if found else None
    return {
        "role": what,
        "kills": len(kills),
        "timed": len(found),
        "median": median,
        "longest": max(found, default=None),
    }
