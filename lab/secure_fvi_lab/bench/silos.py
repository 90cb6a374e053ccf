"""Many silo processes on one machine: masked sums of a long vector, some silos killed in the middle of a round.

The silos are `secure-fvi silo start`, with a model of as many parameters as a sum has values, gradients in a draw of
them. Half of those that leave are killed before they contribute, the others between that and the exchange in
which masks are taken off.
"""

from __future__ import annotations

import itertools
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.serving import Hub, remote_federation
from secure_fvi.driving import Progress
from secure_fvi.errors import ProtocolError, SecureFVIWarning
from secure_fvi.messages import ROUND
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.running import execute_federation
from secure_fvi_lab.bench.world import HUB, Parties, allow, answered, posterior
from secure_fvi_lab.machine import machine

_MODEL = """import pyro
import pyro.distributions as dist
import torch


def model(at, y):
    theta = pyro.sample("theta", dist.Normal(torch.zeros({size}, dtype=y.dtype), 1.0).to_event(1))
    with pyro.plate("records", len(y)):
        pyro.sample("y", dist.Normal(theta[at], 1.0), obs=y)
"""
_RECORDS = 20  # of each silo
_ROUNDS, _LOSING = 4, 3


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{found['silos']} silos, sums of {found['length']} values, {found['left_before']} left before they "
        f"contributed and {found['left_after']} after: the posterior is that of those who answered, byte for byte"
    )
    yield "seconds a round: " + ", ".join(f"{s:.1f}" for s in found["round_seconds"])
    for what in ("rss", "pss", "peak"):
        yield f"{what:4} a silo: {found[what + '_mb'][0]:7.1f} MB median, {found[what + '_mb'][1]:7.1f} MB most"


def measure(silos: int, length: int, leave: float, deadline: float) -> dict[str, Any]:
    """One job of four rounds, checked against the same job in one process. Raises ProtocolError where they differ."""
    names = [f"silo-{i:03d}" for i in range(silos)]
    rng = random.Random(1)
    leaving = rng.sample(names, round(leave * silos))
    early, late = leaving[: (len(leaving) + 1) // 2], leaving[(len(leaving) + 1) // 2 :]
    with tempfile.TemporaryDirectory() as folder:
        parties = _parties(Path(folder), names, length, deadline)
        memory: list[tuple[float, float, float]] = []
        stamps: list[float] = []

        def note(progress: Progress) -> None:
            stamps.append(time.monotonic())
            if progress.round == _LOSING - 1:
                memory.extend(_memory(parties.pid(name)) for name in names)

        def listening(hub: Hub) -> None:
            parties.dialled = hub.engine.port
            _kill_in_round(hub, parties, early, late)
            for name in names:
                parties.start(name)

        federation = remote_federation(
            parties.config, parties.homes[HUB], RunDirectory(parties.out), "127.0.0.1:0", listening, "off"
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SecureFVIWarning)
                execute_federation(federation, RunDirectory(parties.out), True, note)
        finally:
            parties.stop()
        answers = answered(parties.homes[HUB].log_file)
        if (parties.out / "posterior.safetensors").read_bytes() != posterior(parties.config, answers):
            raise ProtocolError("the posterior is not that of the silos that answered")
    by = [[sample[i] for sample in memory] for i in range(3)]
    return {
        "machine": machine(),
        "silos": silos,
        "length": length,
        "left_before": len(early),
        "left_after": len(late),
        "round_seconds": [b - a for a, b in itertools.pairwise(stamps)],
        **{f"{what}_mb": [statistics.median(v), max(v)] for what, v in zip(("rss", "pss", "peak"), by, strict=True)},
    }


def _parties(root: Path, names: list[str], length: int, deadline: float) -> Parties:
    """Silos with a few numbers each, and policies that name their files."""
    model = root / "model.py"
    model.write_text(_MODEL.format(size=length))
    generator = np.random.default_rng(1)
    silos = []
    for number, name in enumerate(names):
        at = generator.integers(0, length, _RECORDS)
        ids = np.arange(_RECORDS) + number * _RECORDS
        np.savez(root / f"{name}.npz", at=at, y=generator.normal(size=_RECORDS), record_id=ids)
        silos.append({"id": name, "data": str(root / f"{name}.npz")})
    table = {
        "seed": 1,
        "model": {"function": f"{model}:model", "record_plate": "records"},
        "silo": silos,
        "algorithm": {"name": "sfvi", "iterations": _ROUNDS, "family": "diagonal"},
        "aggregation": {"kind": "masked", "max_missing": len(names) // 3, "max_differences": _ROUNDS},
        "run": {"compile": False, "threads": 1},
        "engine": {"on_loss": "drop", "deadline": deadline},
    }
    parties = Parties(root / "job", table, names)
    rule = [{"hash": manifest(parties.config).hash.hex(), "function": f"{model}:model"}]
    for name in names:
        data = [{"id": "data", "path": str(root / f"{name}.npz")}]
        allow(parties.homes[name], parties.config, model=rule, data=data, sandbox="off")
    return parties


def _kill_in_round(hub: Hub, parties: Parties, early: list[str], late: list[str]) -> None:
    """Kill `early` as the broadcast of round `_LOSING` goes out, `late` once the others have answered it."""
    deliver, broadcasts = hub.engine._deliver, 0

    def killing(messages: Mapping[str, bytes]) -> dict[str, bytes]:
        nonlocal broadcasts
        kind = next(iter(messages.values()))[:1]
        if kind == ROUND:
            broadcasts += 1
        if broadcasts == _LOSING:
            for name in early if kind == ROUND else late:
                parties.kill(name)
        return deliver(messages)

    hub.engine._deliver = killing


def _memory(pid: int) -> tuple[float, float, float]:
    """Resident, proportional and peak resident size of a process, MB of 2^20 bytes."""
    found: dict[str, float] = {}
    for name in ("smaps_rollup", "status"):
        for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
            key, _, value = line.partition(":")
            if value.endswith("kB"):
                found.setdefault(key, float(value.split()[0]) / 1024)
    return found["Rss"], found["Pss"], found["VmHWM"]
