"""PVI and SFVI on six cities over a slow network that loses packets: three silo processes behind a relay."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secure_fvi.errors import ProtocolError
from secure_fvi.runs.directory import read_json
from secure_fvi_lab.bench.world import HUB, Parties, posterior
from secure_fvi_lab.machine import machine

_SILOS = ("east", "north", "south")
_PATIENCE = 500.0
#: Rounds of SFVI that are run, and to which their time and bytes are carried on.
_RUN, _WHOLE = 200, 5000
_ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
    "pvi": {"name": "pvi", "rounds": 8},
    "sfvi": {"name": "sfvi", "iterations": _RUN},
}


def lines(found: dict[str, Any]) -> Iterator[str]:
    for row in found["rows"]:
        yield (
            f"{row['algorithm']:5} {row['rounds']:5} rounds  {row['exchanges']:5} exchanges  {row['seconds']:8.1f} s  "
            f"{row['kB_up']:9.1f} kB up and {row['kB_down']:9.1f} kB down a silo" + ("" if row["run"] else "  (scaled)")
        )
    yield f"{found['packets']} packets, {found['lost']} of them lost"


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


# ---- A relay between silos and server that behaves as a bad network does; for measurements and tests ----
#
# It stands in for `tc netem` where the kernel has none. TCP hides loss from a program: what it sees of a lost packet is
# that this packet and all after it come later, by the time until it is sent again. So the relay cuts a stream into
# packets of the usual size, delays each by half a round trip, and each lost one by a retransmission timeout more, twice
# that if it is lost again. Real TCP is quicker where enough packets follow (fast retransmit) and slower where its
# window is small; neither is modelled.

_PACKET = 1448  # bytes of a TCP segment in a frame of 1,500
_LEAST_RTO = 0.2  # seconds; Linux adds it to the round trip


@dataclass(frozen=True)
class Network:
    """round_trip: seconds. loss: chance of a packet to be lost, each way."""

    round_trip: float = 0.0
    loss: float = 0.0

    def delay(self, rng: random.Random) -> float:
        """Seconds that one packet takes."""
        seconds, timeout = self.round_trip / 2, self.round_trip + _LEAST_RTO
        while rng.random() < self.loss:
            seconds, timeout = seconds + timeout, 2 * timeout
        return seconds


#: What is done to the bytes that pass, once.
Spoil = Callable[[bytes], bytes]


class Relay:
    """Listens on loopback and passes on to `target`, a port of loopback. Runs in a thread of its own."""

    def __init__(self, target: int, network: Network | None = None, seed: int = 0) -> None:
        self.network = network or Network()
        self.packets = self.lost = self.connections = self.turned_away = 0
        self.target, self._rng = target, random.Random(seed)
        self._open: set[asyncio.StreamWriter] = set()
        self._spoil: dict[bool, Spoil] = {}  # by direction, True: to the server
        self._held = 0.0  # until when nothing passes, in the loop's time
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def cut(self) -> None:
        """Break all connections; new ones are taken."""
        self._loop.call_soon_threadsafe(self._cut)

    def stall(self, seconds: float) -> None:
        """Let nothing pass for a while."""

        def hold() -> None:
            self._held = self._loop.time() + seconds

        self._loop.call_soon_threadsafe(hold)

    def spoil(self, how: Spoil, upwards: bool = True) -> None:
        """Change the next bytes that pass, on their way to the server or to a silo."""
        self._loop.call_soon_threadsafe(self._spoil.__setitem__, upwards, how)

    async def _serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port: int = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopped.wait()
        server.close()
        self._cut()

    def _cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            self.turned_away += 1
            writer.transport.abort()
            return
        self.connections += 1
        pair = {writer, far_writer}
        self._open |= pair
        await asyncio.gather(self._pass(reader, far_writer, True), self._pass(far_reader, writer, False))
        self._open -= pair

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, upwards: bool) -> None:
        """One direction of one connection, until either end has gone."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send(waiting, writer))
        due = 0.0
        with contextlib.suppress(OSError):
            while data := await reader.read(_PACKET):
                delay = self.network.delay(self._rng)
                self.packets += 1
                self.lost += delay > self.network.round_trip / 2
                due = max(due, self._loop.time() + delay)  # a stream keeps its order
                how = self._spoil.pop(upwards, None)
                waiting.put_nowait((due, data if how is None else how(data)))
        waiting.put_nowait((due, b""))
        await sending

    async def _send(self, waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = await waiting.get()
                while (left := max(due, self._held) - self._loop.time()) > 0:
                    await asyncio.sleep(left)
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        writer.close()
