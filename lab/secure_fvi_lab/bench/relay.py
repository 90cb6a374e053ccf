"""A relay between silos and server that behaves as a bad network does; for measurements and tests.

It stands in for `tc netem` where the kernel has none. TCP hides loss from a program: what it sees of a lost packet is
that this packet and all after it come later, by the time until it is sent again. So the relay cuts a stream into
packets of the usual size, delays each by half a round trip, and each lost one by a retransmission timeout more, twice
that if it is lost again. Real TCP is quicker where enough packets follow (fast retransmit) and slower where its window
is small; neither is modelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

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


def corrupted(data: bytes) -> bytes:
    """One bit is another."""
    return data[:-1] + bytes([data[-1] ^ 1])


def duplicated(data: bytes) -> bytes:
    """It comes twice."""
    return data + data


def reordered(data: bytes) -> bytes:
    """Its halves change places."""
    return data[len(data) // 2 :] + data[: len(data) // 2]


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
        """Break all connections and stop listening."""
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
