"""A round of SFVI by what carries it: all parties in one process, or three silo processes behind mutual TLS.

Beside it, in the same run, a bare gRPC round trip: streams to three processes that send back as many bytes as the silos
did, without our framing, logs or state. Each carrier's steady state counts, without the rounds in which functions are
traced. What the processes use of the processors is told beside the time, which other work on the machine lengthens.
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
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import torch

from secure_fvi.deployment.home import Home
from secure_fvi.deployment.serving import Hub, remote_federation
from secure_fvi.driving import Progress
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.fitting import build_parties
from secure_fvi.runs.config import Config, parse
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.federation import Federation, federate
from secure_fvi.runs.running import execute_federation
from secure_fvi_lab.bench.world import HUB, allow, consortium
from secure_fvi_lab.machine import machine

SILOS = ("east", "north", "south")
_WARM_UP = 50


def lines(found: dict[str, Any]) -> Iterator[str]:
    for row in found["rows"]:
        yield (
            f"{row['carrier']:10} {row['aggregation']:18} {row['exchanges']:.0f} exchanges a round   "
            f"median {row['ms_median']:7.2f} ms   p99 {row['ms_p99']:7.2f} ms   "
            f"processors {row['ms_processors']:7.2f} ms"
        )
    if "seconds" in found:
        yield f"{found['rounds']} rounds in {found['seconds']:.0f} s, start and end of the processes included"


def measure(rounds: int = 1000, compile: bool = True) -> dict[str, Any]:
    """Median and 99th percentile, in ms, of `rounds` rounds of each carrier and secure sum."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        homes = consortium(Path(folder), SILOS)
        for name, options in (
            ("plain", {"kind": "plain"}),
            ("masked, recovers", {"kind": "masked", "max_missing": 1, "max_differences": 10**6}),
            ("masked", {"kind": "masked"}),
        ):
            config = _config(options, rounds, compile)
            rows.append(_row("local", name, _local(config, rounds)))
            found = _stream(homes, config, Path(folder) / name)
            rows.append(_row("stream", name, found))
            rows.append(_row("bare gRPC", name, _bare(homes, found.sizes, rounds)))
    return _told(rounds, compile, rows)


def whole_job(rounds: int, compile: bool) -> dict[str, Any]:
    """One masked job, unattended: seconds from the first process to the end of the last, and its rounds as above."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        homes = consortium(Path(folder), SILOS)
        began = time.perf_counter()
        found = _stream(homes, _config({"kind": "masked"}, rounds - _WARM_UP, compile), Path(folder) / "out")
        seconds = time.perf_counter() - began
    return {**_told(rounds, compile, [_row("stream", "masked", found)]), "seconds": seconds}


def _told(rounds: int, compile: bool, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"machine": machine(), "silos": len(SILOS), "rounds": rounds, "compiled": compile, "rows": rows}


class _Steady(NamedTuple):
    """A job's steady rounds. sizes: of the last round's messages (down, up), by exchange; none in one process."""

    times: list[float]  # seconds a round
    exchanges: float  # a round
    processors: float  # seconds of processor a round, over all processes
    sizes: Sequence[tuple[int, int]] = ()


def _config(aggregation: Mapping[str, Any], rounds: int, compile: bool = False) -> Config:
    table = {
        "seed": 1,
        "model": {"program": "six-cities"},
        "partition": {"ids": list(SILOS), "sizes": [179, 179, 179]},
        "algorithm": {"name": "sfvi", "iterations": rounds + _WARM_UP},
        "aggregation": dict(aggregation),
        "run": {"compile": compile, "threads": 1},
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
        "ms_processors": found.processors * 1e3,
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


def _processor_seconds(processes: list[int]) -> float:
    """What they have used so far, in all threads."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
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
