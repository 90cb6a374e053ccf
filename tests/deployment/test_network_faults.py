"""A bad network between silos and server: what arrives is right, and what TLS refuses is sent again."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from deployment_world import World
from test_stream import Dialer, echo, serving

from secure_fvi.engines.stream_server import StreamServer
from secure_fvi_lab.bench.network import Network, Relay
from secure_fvi_lab.bench.world import HUB, Parties, posterior


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
