"""PVI and SFVI on six cities over a slow network that loses packets: three silo processes behind a relay."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from secure_fvi.errors import ProtocolError
from secure_fvi.runs.directory import read_json
from secure_fvi_lab.bench.relay import Network, Relay
from secure_fvi_lab.bench.replay import posterior
from secure_fvi_lab.bench.world import HUB, Parties
from secure_fvi_lab.machine import machine

_SILOS = ("east", "north", "south")
_PATIENCE = 500.0
#: Rounds of SFVI that are run, and to which their time and bytes are carried on.
_RUN, _WHOLE = 200, 5000
_ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "pvi": {"name": "pvi", "rounds": 8},
    "sfvi": {"name": "sfvi", "iterations": _RUN},
}


def command(as_json: bool, latency_ms: float, loss: float) -> None:
    """Measure and print."""
    found = measure(Network(latency_ms / 1e3, loss))
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for row in found["rows"]:
        click.echo(
            f"{row['algorithm']:5} {row['rounds']:5} rounds  {row['exchanges']:5} exchanges  {row['seconds']:8.1f} s  "
            f"{row['kB_up']:9.1f} kB up and {row['kB_down']:9.1f} kB down a silo" + ("" if row["run"] else "  (scaled)")
        )
    click.echo(f"{found['packets']} packets, {found['lost']} of them lost")


def measure(network: Network) -> dict[str, Any]:
    """Seconds and bytes of both; SFVI's of a whole run follow from those of its first rounds."""
    rows, packets, lost = [], 0, 0
    for name, algorithm in _ALGORITHMS.items():
        row, relay = _job(algorithm, network)
        rows.append({"algorithm": name, "run": True, **row})
        packets, lost = packets + relay.packets, lost + relay.lost
    factor = _WHOLE / rows[-1]["rounds"]
    whole = {k: v * factor for k, v in rows[-1].items() if k in ("seconds", "kB_up", "kB_down")}
    rows.append({**rows[-1], **whole, "rounds": _WHOLE, "exchanges": int(rows[-1]["exchanges"] * factor), "run": False})
    return {
        "machine": machine(),
        "round_trip_ms": network.round_trip * 1e3,
        "loss": network.loss,
        "rows": rows,
        "packets": packets,
        "lost": lost,
    }


def _job(algorithm: Mapping[str, Any], network: Network) -> tuple[dict[str, Any], Relay]:
    """One job, compared with the same in one process."""
    table = {
        "seed": 3,
        "model": {"program": "six-cities"},
        "partition": {"ids": list(_SILOS), "sizes": [200, 180, 157]},
        "algorithm": dict(algorithm),
        "run": {"compile": False, "threads": 1},
    }
    with tempfile.TemporaryDirectory() as folder:
        parties = Parties(Path(folder) / "job", table, _SILOS)
        relay = Relay(parties.port, network, seed=1)
        parties.dialled = relay.port
        try:
            for party in parties.homes:
                parties.start(party)
            parties.wait_for_rounds(1, _PATIENCE)
            began = time.monotonic()
            if parties.wait(HUB, _PATIENCE) != 0:
                raise ProtocolError(f"the job did not end in {_PATIENCE:.0f} s: {parties.log(HUB)[-300:]}")
            seconds = time.monotonic() - began
        finally:
            parties.stop()
            relay.close()
        if (parties.out / "posterior.safetensors").read_bytes() != posterior(parties.config):
            raise ProtocolError("the posterior is not that of one process")
        result = read_json(parties.out / "result.json")
    sums = result["aggregation"]
    row = {
        "rounds": result["rounds"],
        "exchanges": sums["exchanges"],
        "seconds": seconds,
        "kB_up": sums["bytes_up_per_silo"] / 1e3,
        "kB_down": sums["bytes_down_per_silo"] / 1e3,
    }
    return row, relay
