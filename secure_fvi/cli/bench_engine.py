"""A round of SFVI by what carries it: all parties in one process, or three silo processes behind mutual TLS.

Beside it, in the same run, a bare gRPC round trip: streams to three processes that send back as many bytes as the silos
did, without our framing, logs or state. Each carrier's steady state counts, without the rounds in which functions are
traced.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import click
import grpc
import torch

from secure_fvi.cli.bench_step import machine
from secure_fvi.deployment.authority import Authority, authority_hash
from secure_fvi.deployment.consortium import Member, write_roster
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.keeping import accept, install, request_text, sign
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.requests import read_request
from secure_fvi.deployment.serving import Hub, remote_federation
from secure_fvi.driving import Progress
from secure_fvi.errors import SecureFVIWarning
from secure_fvi.fitting import build_parties
from secure_fvi.runs import toml
from secure_fvi.runs.config import Config, parse
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.federation import Federation, federate
from secure_fvi.runs.running import execute_federation

SILOS = ("east", "north", "south")
_WARM_UP = 50


def command(as_json: bool, rounds: int, compile: bool) -> None:
    """Measure and print."""
    found = measure(rounds, compile)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for row in found["rows"]:
        click.echo(
            f"{row['carrier']:10} {row['aggregation']:18} {row['exchanges']:.0f} exchanges a round   "
            f"median {row['ms_median']:7.2f} ms   p99 {row['ms_p99']:7.2f} ms"
        )


def measure(rounds: int = 1000, compile: bool = True) -> dict[str, Any]:
    """Median and 99th percentile, in ms, of `rounds` rounds of each carrier and secure sum."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        homes = consortium(Path(folder))
        for name, options in (
            ("plain", {"kind": "plain"}),
            ("masked, unchecked", {"kind": "masked", "consistency_check": False}),
            ("masked", {"kind": "masked"}),
        ):
            if name == "masked, unchecked":  # the roster of a consortium asks for the check
                rows.append(_row("local", name, *_local(_config(options, rounds, compile), rounds)))
                continue
            config = _config(options, rounds, compile)
            rows.append(_row("local", name, *_local(config, rounds)))
            times, exchanges, seen = _stream(homes, config, Path(folder) / name, rounds)
            rows.append(_row("stream", name, times, exchanges))
            rows.append(_row("bare gRPC", name, _bare(homes, seen, rounds), exchanges))
    return {"machine": machine(), "silos": len(SILOS), "rounds": rounds, "compiled": compile, "rows": rows}


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


def _row(carrier: str, aggregation: str, times: list[float], exchanges: float) -> dict[str, Any]:
    ordered = sorted(times)
    return {
        "carrier": carrier,
        "aggregation": aggregation,
        "exchanges": exchanges,
        "ms_median": statistics.median(ordered) * 1e3,
        "ms_p99": ordered[int(0.99 * (len(ordered) - 1))] * 1e3,
        "seconds": sum(ordered),
    }


def _local(config: Config, rounds: int) -> tuple[list[float], float]:
    federation = federate(config)
    assert isinstance(federation, Federation)
    server, engine, _ = build_parties(
        federation.model, federation.silos, federation.algorithm, federation.aggregation, config.seed,
        federation.silo_ids, federation.record_ids, compile=config.run.compile,
    )  # fmt: skip
    times = []
    for at in range(_WARM_UP + rounds):
        before, began = engine.exchanges, time.perf_counter()
        engine.run(server.round())
        if at >= _WARM_UP:
            times.append(time.perf_counter() - began)
    return times, engine.exchanges - before


def _stream(
    homes: Mapping[str, Home], config: Config, out: Path, rounds: int
) -> tuple[list[float], float, list[tuple[int, int]]]:
    """Times of rounds, exchanges a round, and the sizes of the last round's messages (down, up), by exchange."""
    for silo in SILOS:
        _allow(homes[silo], config)
    stamps: list[float] = []
    sizes: list[list[tuple[int, int]]] = [[]]

    def note(progress: Progress) -> None:
        stamps.append(time.perf_counter())
        sizes.append([])

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
    federation = remote_federation(config, homes["hub"], folder, "127.0.0.1:0", listening)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecureFVIWarning)
            execute_federation(federation, folder, True, note)
    finally:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
    steady = stamps[_WARM_UP - 1 :]
    times = [b - a for a, b in itertools.pairwise(steady)]
    last = sizes[len(stamps) - 1]
    return times[:rounds], statistics.mean(len(s) for s in sizes[_WARM_UP : len(stamps)]), last


def _bare(homes: Mapping[str, Home], sizes: list[tuple[int, int]], rounds: int) -> list[float]:
    """The same numbers of bytes down and up, through gRPC's streams alone."""
    hub = homes["hub"].credentials()
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
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair, hub.authority, True))
        server.start()
        now = datetime.datetime.now(datetime.UTC)
        processes = []
        for silo in SILOS:
            arguments = [str(homes[silo].path), f"127.0.0.1:{port}", homes[silo].admission(now).tls_name("hub")]
            processes.append(_python(f"from secure_fvi.cli.bench_engine import echo; echo(*{arguments!r})"))
        while len(outgoing) < len(SILOS):
            time.sleep(0.01)
        times = []
        for at in range(_WARM_UP + rounds):
            began = time.perf_counter()
            for down, up in sizes:
                message = up.to_bytes(4, "big") + bytes(max(0, down - 4))
                for own in outgoing:
                    own.put(message)
                for _ in outgoing:
                    answers.get()
            if at >= _WARM_UP:
                times.append(time.perf_counter() - began)
        for own in outgoing:
            own.put(None)
        for process in processes:
            process.wait(20)
        server.stop(1).wait()
    return times


def echo(home: str, address: str, name: str) -> None:
    """A process that answers each message with as many bytes as its first four ask for."""
    tls = Home(Path(home)).credentials()
    credentials = grpc.ssl_channel_credentials(tls.authority, tls.private_key, tls.certificate)
    answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def frames() -> Iterator[bytes]:
        while (frame := answers.get()) is not None:
            yield frame

    with grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", name)]) as channel:
        for message in channel.stream_stream("/bare/x")(frames()):
            answers.put(bytes(int.from_bytes(message[:4], "big")))
        answers.put(None)


def consortium(root: Path) -> dict[str, Home]:
    """Three silos and a server with certificates and a roster that all have signed, by id."""
    now = datetime.datetime.now(datetime.UTC)
    authority = Authority.create(root / "authority", "bench", now)
    homes = {silo: Home.create(root / silo, silo, "silo") for silo in SILOS}
    homes["hub"] = Home.create(root / "hub", "hub", "server")
    members = []
    for name, home in homes.items():
        request = read_request(request_text(home).encode(), "request")
        certificate = root / f"{name}.crt"
        certificate.write_bytes(authority.issue(request, now, 30))
        for path in (root / "authority" / "ca.crt", root / "authority" / "ca.crl", certificate):
            install(home, path, now)
        keys = {"identity": request.identity.hex(), "tls_key": request.tls_key.hex()}
        members.append(Member(id=request.id, role=request.role, **keys))
    roster = root / "roster.toml"
    roster.write_bytes(write_roster("bench", members, authority_hash(authority.certificate), now).content)
    for home in homes.values():
        install(home, roster, now)
    signatures = {name: sign(home, now)[1] for name, home in homes.items()}
    for name, home in homes.items():
        for other, path in signatures.items():
            if other != name:
                install(home, path, now)
        accept(home, now)
    return homes


def _allow(home: Home, config: Config) -> None:
    """A policy that allows this job."""
    roster = home.roster(datetime.datetime.now(datetime.UTC))
    policy = {
        "format": 1,
        "rosters": [roster.hash.hex()],
        "algorithms": ["sfvi"],
        "aggregations": ["masked", "plain"],
        "min_cohort": 3,
        "max_rounds": 10**6,
        "privacy": {"dp": "optional", "max_epsilon": 1.0, "max_delta": 1e-6, "min_noise_multiplier": 0.3},
        "model": [{"hash": manifest(config).hash.hex()}],
        "data": [{"id": "data"}],
    }
    home.policy_file.write_text(toml.dumps(policy))
    home.policy_file.chmod(0o600)


def _python(code: str, cache: Path | None = None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "ERROR"}
    if cache is not None:  # processes that compile the same kernels in one cache at once disturb each other
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    return subprocess.Popen([sys.executable, "-c", code], env=environment)
