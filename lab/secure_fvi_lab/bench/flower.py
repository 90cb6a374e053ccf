"""What an exchange costs by carrier: plain streams, streams that Flower started, Flower's messages. In one run.

SFVI on six cities with plain sums, one exchange a round, three silo processes; of the streams the rounds after the
first, in which functions are traced.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from secure_fvi.cli.flower_processes import FlowerProcesses
from secure_fvi.deployment.home import Home
from secure_fvi.engines.flower_setup import check_flower
from secure_fvi.runs import wording
from secure_fvi.runs.config import parse
from secure_fvi.runs.report import INTERVAL, read_metrics
from secure_fvi_lab.bench.world import allow, consortium
from secure_fvi_lab.machine import machine

SILOS = ("east", "north", "south")
_LIMIT = 1800.0


def command(as_json: bool, rounds: int, exchanges: int) -> None:
    """Measure and print."""
    check_flower()
    found = measure(rounds, exchanges)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for carrier, ms in found["ms"].items():
        click.echo(f"{carrier:18} {ms:10.2f} ms")


def measure(rounds: int, exchanges: int) -> dict[str, Any]:
    """ms a round of each carrier: the mean over `rounds` on streams, the median of `exchanges` of messages."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        homes = consortium(folder, SILOS)
        with FlowerProcesses(homes, folder) as processes:
            found = {"direct stream": _direct(processes, _job(homes, folder, "direct", "stream", rounds))}
            processes.everything()
            found["stream by Flower"] = _launched(processes, _job(homes, folder, "flower", "stream", rounds))
            _launched(processes, _job(homes, folder, "flower", "messages", exchanges))
            times = re.findall(r"exchange took ([0-9.]+) s", processes.log("messages"))
            found["Flower's messages"] = 1e3 * statistics.median(map(float, times[-exchanges - 1 : -1]))
    return {"machine": machine(), "silos": len(SILOS), "rounds": rounds, "exchanges": exchanges, "ms": found}


def _job(homes: Mapping[str, Home], folder: Path, kind: str, carrier: str, rounds: int) -> Path:
    """The configuration of a job that the silos' policies allow; its results go to a folder of its name."""
    table = {
        "seed": 1,
        "model": {"program": "six-cities"},
        "partition": {"ids": list(SILOS), "sizes": [179, 179, 179]},
        "algorithm": {"name": "sfvi", "iterations": rounds + (INTERVAL if carrier == "stream" else 0)},
        "aggregation": {"kind": "plain"},
        "run": {"compile": False, "threads": 1},
        "engine": {"kind": kind, "carrier": carrier},
    }
    for silo in SILOS:
        allow(homes[silo], parse(table, "bench flower"))
    path = folder / f"{kind}-{carrier}.toml"
    path.write_text(wording.dumps(table))
    return path


def _direct(processes: FlowerProcesses, job: Path) -> float:
    out, hub = job.with_suffix(""), str(processes.hub)
    arguments = ["server", "start", str(job), "--home", hub, "--out", str(out), "--listen", processes.stream]
    processes.start("direct", *arguments, "--quiet")
    for silo in SILOS:
        home = str(processes.homes[silo].path)
        processes.start(f"direct-{silo}", "silo", "start", "--home", home, "--server", processes.stream, "--once")
    processes.end("direct", _LIMIT)
    return _mean(out)


def _launched(processes: FlowerProcesses, job: Path) -> float:
    carrier = job.stem.partition("-")[2]
    processes.run(job, job.with_suffix(""), carrier)
    processes.end(carrier, _LIMIT)
    return _mean(job.with_suffix("")) if carrier == "stream" else 0.0


def _mean(out: Path) -> float:
    """ms a round after those in which everything is used for the first time."""
    first, *_, last = read_metrics(out / "metrics.jsonl")
    mean: float = 1e3 * (last["seconds"] - first["seconds"]) / (last["round"] - first["round"])
    return mean
