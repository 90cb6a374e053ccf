"""A bad network between silos and server: what arrives is right, and what TLS refuses is sent again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from deployment_world import World
from test_stream import Dialer, echo, serving

from secure_fvi.engines.stream_server import StreamServer
from secure_fvi_lab.bench.world import HUB, Parties, posterior

# ---- A relay between silos and server that behaves as a bad network does ----
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


# ---- What it does to a stream, and to a job ----


def corrupted(data: bytes) -> bytes:
    """One bit is another."""
    return data[:-1] + bytes([data[-1] ^ 1])


def duplicated(data: bytes) -> bytes:
    """It comes twice."""
    return data + data


def reordered(data: bytes) -> bytes:
    """Its halves change places."""
    return data[len(data) // 2 :] + data[: len(data) // 2]


@contextmanager
def relayed(world: World, network: Network | None = None) -> Iterator[tuple[StreamServer, Relay]]:
    """A server, and a silo that dials it through a relay."""
    with serving(world, names=("north",)) as server:
        relay = Relay(server.port, network)
        dialer = Dialer(world, SimpleNamespace(port=relay.port), "north", echo)  # type: ignore[arg-type]
        try:
            assert server.wait_for(["north"], 20)
            yield server, relay
        finally:
            dialer.stop()
            relay.close()


@pytest.mark.later
def test_spoiled_bytes_are_refused_and_sent_again(world: World) -> None:
    with relayed(world) as (server, relay):
        assert server.exchange({"north": b"before"}) == {"north": b"answer to before"}
        for how in (corrupted, duplicated, reordered):
            for upwards in (True, False):
                before = relay.connections
                relay.spoil(how, upwards)
                message = f"{how.__name__} {upwards}".encode() * 50
                assert server.exchange({"north": message}) == {"north": b"answer to " + message}
                assert relay.connections > before, "TLS took what was spoiled"


def test_a_connection_that_is_cut_or_stalls_goes_on(world: World) -> None:
    with relayed(world) as (server, relay):
        before = relay.connections
        relay.stall(0.3)
        assert server.exchange({"north": b"held"}) == {"north": b"answer to held"}
        assert relay.connections == before
        relay.cut()
        assert server.exchange({"north": b"cut"}) == {"north": b"answer to cut"}


@pytest.mark.slow
def test_a_silo_waits_for_a_server_behind_something_that_takes_and_drops_connections(world: World) -> None:
    """As a proxy does whose server is away; only a server that closes after the handshake has refused."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = taken.getsockname()[1]
    relay = Relay(nobody)
    dialer = Dialer(world, SimpleNamespace(port=relay.port), "north", echo)  # type: ignore[arg-type]
    try:
        while relay.turned_away < 6:
            assert dialer.thread.is_alive(), dialer.error
            time.sleep(0.05)
        with serving(world, names=("north",)) as server:
            relay.target = server.port
            assert server.wait_for(["north"], 20)
            assert server.exchange({"north": b"late"}) == {"north": b"answer to late"}
            dialer.stop()
    finally:
        relay.close()


def test_a_packet_is_late_by_half_a_round_trip_and_a_lost_one_by_timeouts() -> None:
    rng, network = random.Random(1), Network(0.1, 0.5)
    delays = [network.delay(rng) for _ in range(4000)]
    assert {round(d, 6) for d in delays} >= {0.05, 0.35, 0.95}  # 0.05 + 0.3, and 0.6 more
    assert abs(sum(d > 0.05 for d in delays) / len(delays) - 0.5) < 0.04  # five standard deviations
    assert {Network(0.1).delay(rng) for _ in range(100)} == {0.05}


@pytest.mark.slow
def test_a_job_over_a_bad_network_finds_the_same_posterior(tmp_path: Path) -> None:
    """Thirty faults at moments drawn with a fixed seed, and one packet in a hundred lost."""
    silos = ["east", "north", "south"]
    job = {
        "seed": 3,
        "model": {"program": "six-cities"},
        "partition": {"ids": silos, "sizes": [200, 180, 157]},
        "algorithm": {"name": "sfvi", "iterations": 150, "family": "diagonal"},
        "run": {"compile": False, "threads": 1},
    }
    rng, parties = random.Random(9), Parties(tmp_path / "job", job, silos)
    relay = Relay(parties.port, Network(0.02, 0.01), seed=2)
    parties.dialled = relay.port
    try:
        for name in parties.homes:
            parties.start(name)
        assert parties.wait_for_rounds(1, 120)
        for _ in range(30):
            time.sleep(rng.uniform(0.0, 0.5))
            fault = rng.randrange(5)
            if fault == 0:
                relay.cut()
            elif fault == 1:
                relay.stall(rng.uniform(0.0, 1.0))
            else:
                relay.spoil((corrupted, duplicated, reordered)[fault - 2], rng.random() < 0.5)
        assert parties.rounds() < 150
        assert parties.wait(HUB, 240) == 0, parties.log(HUB)[-2000:]
        found = (parties.out / "posterior.safetensors").read_bytes()
    finally:
        parties.stop()
        relay.close()
    assert found == posterior(parties.config)
    assert relay.lost > 0
