"""Parties killed at bad moments: the job goes on, and its result is right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from consortium_run import Job, Sites
from deployment_world import World

import secure_fvi as sf
from secure_fvi.checkpoints import Checkpoints
from secure_fvi.deployment import trail_verify
from secure_fvi.deployment.holding import DurableSilo, open_held
from secure_fvi.deployment.site_job import SiteJob
from secure_fvi.deployment.trail import Trail
from secure_fvi.deployment.trail_verify import compare, verify
from secure_fvi.engines.stream_server import StreamServer
from secure_fvi.errors import ProtocolError
from secure_fvi.fitting import build_parties
from secure_fvi.messages import ROUND, decode_broadcast
from secure_fvi.privacy.ledger_account import verify as verify_ledger
from secure_fvi.runs.config import parse
from secure_fvi_lab.bench.kills import KINDS, campaign, table
from secure_fvi_lab.bench.world import HUB, Elsewhere, Parties, _replays, posterior

_DP = {"unit": "record", "epsilon": 3.0, "delta": 1e-6, "noise": "distributed", "data_set": "data"}


class Stopped(Exception):
    """The end of the server's process, between two rounds."""


class Killed(BaseException):
    """The end of a silo's process; in a thread of a test it passes all that catches errors."""


def _started_again(self: Sites, silo: str, run: Callable[[Sites, str], None] = Sites._run) -> None:
    try:
        run(self, silo)
    except Killed:
        run(self, silo)


@pytest.mark.slow
def test_a_silo_killed_between_charge_and_answer(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its noise is gone: it makes its answer anew at another index and pays for both; the others' are masked anew."""
    algorithm = {"name": "sfvi", "iterations": 6, "sampling_rate": 0.5, "family": "diagonal"}
    job, killed = Job(world, tmp_path, algorithm=algorithm, privacy=_DP), threading.Event()
    handle = DurableSilo.handle

    def dying(self: DurableSilo, message: bytes) -> bytes:
        north = self.silo.name == "north" and message[:1] == ROUND and not killed.is_set()
        if north and decode_broadcast(message[1:]).sum_index == 3:
            killed.set()
            self.silo.handle(message)
            raise Killed
        return handle(self, message)

    monkeypatch.setattr(DurableSilo, "handle", dying)
    monkeypatch.setattr(Sites, "_run", _started_again)
    job.run()
    assert killed.is_set()
    hub = world.homes["hub"]
    for silo, releases in (("east", 6), ("north", 7), ("south", 6)):
        home = world.homes[silo]
        verify(home.log_file)
        compare(home.log_file, hub.log_file)
        (chain,) = verify_ledger(home.ledger_file, silo)
        (record,) = chain.jobs.values()
        assert record.released == {"round": releases}


@pytest.mark.slow
def test_a_server_killed_before_the_first_round_of_a_session_asks_under_the_same_index(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silo lost its answer to sum 3, whose noise was charged, and all opened a session in which that is sum 4; the
    server is killed with their answers to it, and nothing of it written down. Started again it asks for sum 4, not for
    sum 3, which they would answer no more; what they have answered is charged once."""
    algorithm = {"name": "sfvi", "iterations": 6, "sampling_rate": 0.5, "family": "diagonal"}
    job, killed, stopped = Job(world, tmp_path, algorithm=algorithm, privacy=_DP), threading.Event(), threading.Event()
    handle, save, asked = DurableSilo.handle, Checkpoints.save, list[int]()

    def dying(self: DurableSilo, message: bytes) -> bytes:
        if self.silo.name == "north" and message[:1] == ROUND:
            asked.append(decode_broadcast(message[1:]).sum_index)
            if asked[-1] == 3 and not killed.is_set():
                killed.set()
                self.silo.handle(message)
                raise Killed
        return handle(self, message)

    def stopping(self: Checkpoints, *args: Any) -> None:
        if killed.is_set() and not stopped.is_set():
            stopped.set()
            raise Stopped
        save(self, *args)

    monkeypatch.setattr(DurableSilo, "handle", dying)
    monkeypatch.setattr(Checkpoints, "save", stopping)
    monkeypatch.setattr(Sites, "_run", _started_again)
    with pytest.raises(Stopped):
        job.run()
    job.run()
    assert asked == [1, 2, 3, 4, 4, 5, 6, 7]
    for silo, releases in (("east", 6), ("north", 7), ("south", 6)):
        (chain,) = verify_ledger(world.homes[silo].ledger_file, silo)
        (record,) = chain.jobs.values()
        assert record.released == {"round": releases}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_loss", "kind", "kills"),
    [
        ("wait", "homomorphic SFVI-Avg", 8),
        ("wait", "private SFVI", 6),
        ("drop", "masked SFVI", 6),
        ("wait", "vertical", 6),
        ("wait", "private vertical", 6),
    ],
)
def test_killed_at_random_moments_jobs_find_what_they_should(
    tmp_path: Path, on_loss: str, kind: str, kills: int
) -> None:
    """Some of the kills of `secure-fvi bench kills`, with a fixed seed."""
    told: list[str] = []
    found = campaign(tmp_path, kills, on_loss, 4, (kind,), told.append)
    assert found["faults"] == [], told
    assert sum(row["kills"] for row in found["kills"]) == kills
    assert all(row["kills"] for row in found["kills"])


@pytest.mark.slow
def test_a_server_killed_once_the_silos_have_ended_the_job_ends_it_too(tmp_path: Path) -> None:
    """As by the last kill of a campaign: it asks the silos again, and they are there. With silos that leave with the
    job, as `--once` says, it waited for them without end."""
    kind = KINDS["masked PVI"]._replace(algorithm={"name": "pvi", "rounds": 3, "local_steps": 5})
    parties, until = Parties(tmp_path / "job", table(kind, "wait", 1.0), ["east", "north", "south"]), 0.0
    try:
        for name in parties.homes:
            parties.start(name)
        until = time.monotonic() + 240
        while not all(any((parties.homes[s].path / "results").glob("*.safetensors")) for s in parties.silos):
            assert time.monotonic() < until, parties.log(HUB)[-2000:]
            time.sleep(0.02)
        assert parties.kill(HUB), "it had left already"
        parties.start(HUB)
        assert parties.wait(HUB, 120) == 0, parties.log(HUB)[-2000:]
    finally:
        parties.stop()
    assert (parties.out / "posterior.safetensors").read_bytes() == posterior(parse(table(kind, "wait", 1.0), "here"))


@pytest.mark.slow
def test_a_server_killed_while_it_asks_has_said_so(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sites have written down a question of which the server has no answer yet, and their logs accuse nobody. The
    control: without the rows that it wrote before it asked, they do."""
    job = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 2, "family": "diagonal"})
    deliver = StreamServer._deliver

    def dying(self: StreamServer, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = deliver(self, messages)
        if next(iter(messages.values()))[:1] == ROUND:
            raise Killed
        return replies

    monkeypatch.setattr(StreamServer, "_deliver", dying)
    with pytest.raises(Killed):
        job.run()
    north, hub = world.homes["north"].log_file, world.homes["hub"].log_file
    found = compare(north, hub)
    assert found.lost_answers == 1
    assert verify(hub).jobs[found.jobs[0]].exchanges == 3 * (found.agreed + 1)
    held = trail_verify._exchanges

    def after(path: Any) -> Any:
        party, seen, jobs = held(path)
        return party, {job: [e for e in of if e.received is not None] for job, of in seen.items()}, jobs

    monkeypatch.setattr(trail_verify, "_exchanges", after)
    with pytest.raises(ProtocolError, match="which 'hub' does not say it sent"):
        compare(north, hub)


@pytest.mark.parametrize("at", ["before the secrets go", "before the log is closed"])
def test_a_silo_killed_while_a_job_ends_ends_it_after_all(
    at: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has said that the job is over, in the file `ended`, and not yet let go of its secrets or closed its log: the
    server says it again, and it does both. The control is the state at the kill."""
    job, left = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 2, "family": "diagonal"}), list[bool]()
    home = world.homes["north"]
    secret = home.state_folder / "jobs"
    owner, name = (SiteJob, "close") if at == "before the secrets go" else (Trail, "close_job")
    inner = getattr(owner, name)

    def dying(self: Any, *args: Any) -> None:
        mine = getattr(self, "home", None) is home or str(home.path) in repr(self)
        if mine and args and not left:
            left.append(any(secret.glob("*/secret")))
            raise Killed
        inner(self, *args)

    monkeypatch.setattr(owner, name, dying)
    monkeypatch.setattr(Sites, "_run", _started_again)
    job.run()
    assert left == [at == "before the secrets go"]
    (record,) = verify(home.log_file).jobs.values()
    assert str(record.outcome).startswith("finished")
    assert not list(secret.glob("*/secret")) + list(secret.glob("*/*.sqlite*"))


def test_what_a_silo_answers_and_what_it_draws_for_is_on_the_disk_first(tmp_path: Path) -> None:
    """By SQLite's own account of each transaction: a silo's claim on a question before it draws, and its state and
    answer before they leave, are synced. The control is a claim of the secure sum, which need not outlive the machine,
    and a store whose puts do not either."""
    held = open_held(tmp_path / "session.sqlite", bytes(32))
    store, levels = held.inner._inner, list[tuple[str, int]]()  # type: ignore[attr-defined]

    def seen(statement: str) -> None:
        if statement.startswith(("INSERT", "PRAGMA synchronous")):
            levels.append((statement[:6], 2 if "FULL" in statement else 1 if "NORMAL" in statement else 0))

    def synced(act: Callable[[], object]) -> list[bool]:
        levels.clear()
        before = store._connection.execute("PRAGMA synchronous").fetchone()[0]
        store._connection.set_trace_callback(seen)
        act()
        store._connection.set_trace_callback(None)
        found = list[bool]()
        for kind, level in levels:
            before = level if kind == "PRAGMA" else before
            found += [before == 2] if kind == "INSERT" else []
        return found

    server, engine, _ = build_parties(*six_rows(), sf.SFVI(iterations=4), sf.Plain(), compile=False)
    silo = DurableSilo(engine.silos["silo-1"], held)
    message = next(server.round())["silo-1"]
    answered = synced(lambda: silo.handle(message))
    assert len(answered) == 3  # the claim; state and answer
    assert all(answered)
    assert synced(lambda: held.claim("used/1", b"x")) == [False]
    assert synced(lambda: held.put({"a": b"x"})) == [True]
    store._synchronous = lambda full: None
    store._connection.execute("PRAGMA synchronous = NORMAL")
    assert synced(lambda: held.put({"a": b"y"})) == [False]


def six_rows() -> tuple[sf.FederatedModel, list[dict[str, torch.Tensor]]]:
    def program(y: torch.Tensor) -> None:
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        with pyro.plate("row", len(y)):
            pyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    return sf.FederatedModel(program, "row"), [{"y": torch.arange(3.0) + j} for j in range(2)]


def test_a_replay_finds_out_who_had_claimed_a_question_before_it_was_killed() -> None:
    """A campaign that drops silos blamed the job for it, where machines are slow. The control: a course that none of
    them explains is still a fault."""
    tried: list[Any] = []

    def run(claimed: Mapping[bytes, Any], asked: Any) -> bytes:
        tried.append(dict(claimed))
        if claimed.get(b"at") != asked:
            raise Elsewhere((b"at", ("east", "west")))
        return b"found"

    assert _replays(lambda claimed: run(claimed, ("east", "west"))) == b"found"
    assert tried == [{}, {b"at": ("east",)}, {b"at": ("west",)}, {b"at": ("east", "west")}]
    with pytest.raises(ProtocolError, match="took another course"):
        _replays(lambda claimed: run(claimed, ("north",)))
