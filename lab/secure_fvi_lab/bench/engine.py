"""A round of SFVI by what carries it: all parties in one process, three silo processes behind mutual TLS, or NVIDIA
FLARE where it is installed.

Beside it, in the same run, bare gRPC and bare FLARE: round trips to three processes that send back as many bytes as the
silos did, without our framing, logs or state. Each carrier's steady state counts, without the rounds in which functions
are traced. What the processes use of the processors is told beside the time, which other work on the machine lengthens.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import torch

from secure_fvi.checkpoints import latest_round
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.serving import Hub, remote_federation
from secure_fvi.driving import Progress
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.fitting import build_parties
from secure_fvi.runs import wording
from secure_fvi.runs.config import Config, parse
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.federation import Federation, federate
from secure_fvi.runs.running import execute_federation
from secure_fvi_lab.bench.world import HUB, allow, consortium
from secure_fvi_lab.machine import machine

if TYPE_CHECKING:
    from secure_fvi_lab.bench.flare import Flare

SILOS = ("east", "north", "south")
_WARM_UP = 50


def lines(found: dict[str, Any]) -> Iterator[str]:
    for row in found["rows"]:
        yield (
            f"{row['carrier']:10} {row['aggregation']:18} {row['exchanges']:.0f} exchanges a round   "
            f"median {row['ms_median']:7.2f} ms   p99 {row['ms_p99']:7.2f} ms   "
            + (f"processors {row['ms_processors']:7.2f} ms" if row["ms_processors"] is not None else "")
            + (f"   first 30 rounds {row['first_30']:.1f} s" if row["first_30"] is not None else "")
        )
    for carrier, seconds in found.get("seconds", {}).items():
        yield f"{carrier:10} {found['rounds']} rounds in {seconds:.0f} s, start and end of the job included"


def measure(rounds: int = 1000, compile: bool = True) -> dict[str, Any]:
    """Median and 99th percentile, in ms, of `rounds` rounds of each carrier and secure sum."""
    torch.set_num_threads(1)
    rows, sizes = [], dict[str, Sequence[tuple[int, int]]]()
    with tempfile.TemporaryDirectory() as folder:
        homes = consortium(Path(folder), SILOS)
        for name, options in _SUMS.items():
            config = _config(options, rounds, compile)
            rows.append(_row("local", name, _local(config, rounds)))
            found = _stream(homes, config, Path(folder) / name)
            rows.append(_row("stream", name, found))
            rows.append(_row("bare gRPC", name, _bare(homes, found.sizes, rounds)))
            sizes[name] = found.sizes
        if find_spec("nvflare"):
            rows += _flare_rows(homes, Path(folder), rounds, compile, sizes)
    return _told(rounds, compile, rows)


def _flare_rows(
    homes: Mapping[str, Home], folder: Path, rounds: int, compile: bool, sizes: Mapping[str, Sequence[tuple[int, int]]]
) -> Iterator[dict[str, Any]]:
    """Our jobs under FLARE, then FLARE alone with as many bytes."""
    from secure_fvi_lab.bench.flare import Flare

    with _flare(homes, folder / "flare") as flare:
        for at, (name, options) in enumerate(_SUMS.items()):
            found = _under_flare(flare, _config(options, rounds, compile, flare=True), folder / f"flare-{at}")
            yield _row("FLARE", name, found)
    (folder / "bare").mkdir()
    with Flare(homes, folder / "bare") as flare:
        flare.start_bare(HUB, *SILOS)
        for name, of in sizes.items():
            times = flare.bare(of, _WARM_UP + rounds)
            yield _row("bare FLARE", name, _Steady(times[_WARM_UP:], len(of), None, first=times[:30]))


def whole_job(rounds: int, compile: bool) -> dict[str, Any]:
    """One masked job, unattended: seconds from the first process to the end of the last, under FLARE from its being
    submitted to its end, and its rounds as above."""
    torch.set_num_threads(1)
    options, seconds = {"kind": "masked"}, dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        homes = consortium(Path(folder), SILOS)
        began = time.perf_counter()
        rows = [
            _row("stream", "masked", _stream(homes, _config(options, rounds - _WARM_UP, compile), Path(folder) / "a"))
        ]
        seconds["stream"] = time.perf_counter() - began
        if find_spec("nvflare"):
            with _flare(homes, Path(folder) / "flare") as flare:
                began = time.perf_counter()
                config = _config(options, rounds - _WARM_UP, compile, flare=True)
                rows.append(_row("FLARE", "masked", _under_flare(flare, config, Path(folder) / "b")))
                seconds["FLARE"] = time.perf_counter() - began
    return {**_told(rounds, compile, rows), "seconds": seconds}


def _told(rounds: int, compile: bool, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"machine": machine(), "silos": len(SILOS), "rounds": rounds, "compiled": compile, "rows": rows}


class _Steady(NamedTuple):
    """A job's steady rounds. sizes: of the last round's messages (down, up), by exchange; none in one process. first:
    seconds of its first rounds, where all parties had begun before."""

    times: list[float]  # seconds a round
    exchanges: float  # a round
    processors: float | None  # seconds of processor a round, over all processes
    sizes: Sequence[tuple[int, int]] = ()
    first: Sequence[float] = ()


#: Kinds of sums, by their names in the table.
_SUMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"kind": "plain"},
    "masked, recovers": {"kind": "masked", "max_missing": 1, "max_differences": 10**6},
    "masked": {"kind": "masked"},
}


def _config(aggregation: Mapping[str, Any], rounds: int, compile: bool = False, flare: bool = False) -> Config:
    table = {
        "seed": 1,
        "model": {"program": "six-cities"},
        "partition": {"ids": list(SILOS), "sizes": [179, 179, 179]},
        "algorithm": {"name": "sfvi", "iterations": rounds + _WARM_UP},
        "aggregation": dict(aggregation),
        "run": {"compile": compile, "threads": 1},
        **({"engine": {"kind": "flare"}} if flare else {}),
    }
    return parse(table, "bench engine")


def _row(carrier: str, aggregation: str, found: _Steady) -> dict[str, Any]:
    ordered = sorted(found.times)
    return {
        "carrier": carrier,
        "aggregation": aggregation,
        "exchanges": found.exchanges,
        "ms_median": statistics.median(ordered) * 1e3,
        "ms_p99": ordered[int(0.99 * (len(ordered) - 1))] * 1e3,
        "ms_processors": None if found.processors is None else found.processors * 1e3,
        "first_30": sum(found.first) if found.first else None,
        "seconds": sum(ordered),
    }


def _local(config: Config, rounds: int) -> _Steady:
    federation = federate(config)
    assert isinstance(federation, Federation)
    server, engine, _ = build_parties(
        federation.model, federation.silos, federation.algorithm, federation.aggregation, config.seed,
        silo_ids=federation.silo_ids, record_ids=federation.record_ids, compile=config.run.compile,
    )  # fmt: skip
    times = []
    for at in range(_WARM_UP + rounds):
        if at == _WARM_UP:
            used = time.process_time()
        before, began = engine.exchanges, time.perf_counter()
        engine.run(server.round())
        if at >= _WARM_UP:
            times.append(time.perf_counter() - began)
    return _Steady(times, engine.exchanges - before, (time.process_time() - used) / rounds)


def _stream(homes: Mapping[str, Home], config: Config, out: Path) -> _Steady:
    """Run the job with its silos in processes of their own."""
    for silo in SILOS:
        allow(homes[silo], config)
    stamps: list[float] = []
    sizes: list[list[tuple[int, int]]] = [[]]

    used: list[float] = []

    def note(progress: Progress) -> None:
        stamps.append(time.perf_counter())
        sizes.append([])
        if len(stamps) in (_WARM_UP, config.algorithm.options["iterations"]):
            used.append(_processor_seconds([os.getpid(), *(p.pid for p in processes)]))

    processes: list[subprocess.Popen[bytes]] = []

    def listening(made: Hub) -> None:
        inner = made.engine.watch

        def watch(messages: Mapping[str, bytes], replies: Mapping[str, bytes]) -> None:
            assert inner is not None
            inner(messages, replies)
            sizes[-1].append((len(next(iter(messages.values()))), len(next(iter(replies.values())))))

        made.engine.watch = watch
        for silo in SILOS:
            arguments = ["silo", "start", "--home", str(homes[silo].path), "--server",
                         f"127.0.0.1:{made.engine.port}", "--once", "--quiet"]  # fmt: skip
            processes.append(
                _python(f"from secure_fvi.cli import main; main({arguments!r})", homes[silo].path / "cache")
            )

    folder = RunDirectory(out)
    federation = remote_federation(config, homes[HUB], folder, "127.0.0.1:0", listening)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecureFVIWarning)
            execute_federation(federation, folder, True, note)
    finally:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
    times = [b - a for a, b in itertools.pairwise(stamps[_WARM_UP - 1 :])]
    exchanges = statistics.mean(len(s) for s in sizes[_WARM_UP : len(stamps)])
    return _Steady(times, exchanges, (used[1] - used[0]) / len(times), sizes[len(stamps) - 1])


@contextlib.contextmanager
def _flare(homes: Mapping[str, Home], folder: Path) -> Iterator[Flare]:
    """FLARE's processes of the consortium, at work."""
    from secure_fvi_lab.bench.flare import Flare

    folder.mkdir()
    with Flare(homes, folder) as flare:
        flare.start(HUB, *SILOS)
        yield flare


def _under_flare(flare: Flare, config: Config, out: Path) -> _Steady:
    """Run the job. Its rounds are timed by the server's log, a round from its first question to the next one's."""
    from secure_fvi_lab.bench.flare import times

    for silo in SILOS:
        allow(flare.homes[silo], config)
    path = out.with_suffix(".toml")
    path.write_text(wording.dumps(config.model_dump(mode="json", exclude_unset=True)))
    over, used = threading.Event(), list[tuple[int, float]]()
    folder = RunDirectory(out)

    def watch() -> None:
        processes: list[int] = []
        while not over.wait(2.0):  # looking for them takes the processors that are measured
            at = latest_round(folder.checkpoints) or 0
            if at >= _WARM_UP:
                processes = processes or flare.processes()
                used.append((at, _processor_seconds(processes)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecureFVIWarning)
            flare.launch(path, out)
    finally:
        over.set()
        watcher.join()
    found, exchanges = times(flare.homes[HUB].log_file, folder.read_run()["job"])
    at_work = [(at, s) for at, s in used if at < config.algorithm.options["iterations"]]
    processors = None
    if at_work and at_work[-1][0] > at_work[0][0]:
        (first, before), (last, after) = at_work[0], at_work[-1]
        processors = (after - before) / (last - first)
    return _Steady(found[_WARM_UP:], exchanges, processors, first=found[:30])


def _processor_seconds(processes: list[int]) -> float:
    """What they have used so far, in all threads."""
    ticks = 0
    for process in processes:
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:  # it has ended
            continue
        ticks += int(fields[11]) + int(fields[12])  # utime and stime, proc(5)
    return ticks / os.sysconf("SC_CLK_TCK")


def _bare(homes: Mapping[str, Home], sizes: Sequence[tuple[int, int]], rounds: int) -> _Steady:
    """The same numbers of bytes down and up, through gRPC's streams alone."""
    now = datetime.datetime.now(datetime.UTC)
    hub = homes[HUB].credentials(homes[HUB].roster(now).of_role("silo"))
    outgoing: list[queue.SimpleQueue[bytes | None]] = []
    answers: queue.SimpleQueue[int] = queue.SimpleQueue()

    def stream(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        own: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        outgoing.append(own)

        def read() -> None:
            with contextlib.suppress(Exception):
                for answer in requests:
                    answers.put(len(answer))

        reader.submit(read)
        while (frame := own.get()) is not None:
            yield frame

    with futures.ThreadPoolExecutor(8) as pool, futures.ThreadPoolExecutor(8) as reader:
        server = grpc.server(pool)
        handler = grpc.method_handlers_generic_handler("bare", {"x": grpc.stream_stream_rpc_method_handler(stream)})
        server.add_generic_rpc_handlers((handler,))
        pair = [(hub.private_key, hub.certificate)]
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair, hub.trusted, True))
        server.start()
        processes = []
        for silo in SILOS:
            arguments = [str(homes[silo].path), f"127.0.0.1:{port}", homes[silo].roster(now).tls_name(HUB)]
            processes.append(_python(f"from secure_fvi_lab.bench.engine import echo; echo(*{arguments!r})"))
        while len(outgoing) < len(SILOS):
            time.sleep(0.01)
        times, everybody = [], [os.getpid(), *(p.pid for p in processes)]
        for at in range(_WARM_UP + rounds):
            if at == _WARM_UP:
                before = _processor_seconds(everybody)
            began = time.perf_counter()
            for down, up in sizes:
                message = up.to_bytes(4, "big") + bytes(max(0, down - 4))
                for own in outgoing:
                    own.put(message)
                for _ in outgoing:
                    answers.get()
            if at >= _WARM_UP:
                times.append(time.perf_counter() - began)
        used = _processor_seconds(everybody) - before
        for own in outgoing:
            own.put(None)
        for process in processes:
            process.wait(20)
        server.stop(1).wait()
    return _Steady(times, len(sizes), used / rounds)


def echo(home: str, address: str, name: str) -> None:
    """A process that answers each message with as many bytes as its first four ask for."""
    own = Home(Path(home))
    tls = own.credentials(own.roster(datetime.datetime.now(datetime.UTC)).of_role("server"))
    credentials = grpc.ssl_channel_credentials(tls.trusted, tls.private_key, tls.certificate)
    answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def frames() -> Iterator[bytes]:
        while (frame := answers.get()) is not None:
            yield frame

    with grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", name)]) as channel:
        for message in channel.stream_stream("/bare/x")(frames()):
            answers.put(bytes(int.from_bytes(message[:4], "big")))
        answers.put(None)


def _python(code: str, cache: Path | None = None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
    if cache is not None:  # processes that compile the same kernels in one cache at once disturb each other
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    return subprocess.Popen([sys.executable, "-c", code], env=environment)
