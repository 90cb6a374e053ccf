"""Parties killed at bad moments: the job goes on, and its result is right."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from consortium_run import Job, Sites
from deployment_world import World

from secure_fvi.cli.bench_kills import campaign
from secure_fvi.deployment.holding import DurableSilo
from secure_fvi.deployment.trail_verify import compare, verify
from secure_fvi.driving import Progress
from secure_fvi.errors import ProtocolError
from secure_fvi.messages import ROUND, decode_broadcast
from secure_fvi.privacy.ledger_verify import verify as verify_ledger

_DP = {"unit": "record", "epsilon": 3.0, "delta": 1e-6, "noise": "distributed", "data_set": "data"}


class Stopped(Exception):
    """The end of the server's process, between two rounds."""


class Killed(BaseException):
    """The end of a silo's process; in a thread of a test it passes all that catches errors."""


@pytest.mark.slow
def test_a_silo_killed_between_charge_and_answer(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its noise is gone: it makes its answer anew at another index and pays for both; the others' are masked anew."""
    algorithm = {"name": "sfvi", "iterations": 6, "sampling_rate": 0.5, "family": "diagonal"}
    job, killed = Job(world, tmp_path, algorithm=algorithm, privacy=_DP), threading.Event()
    handle, run = DurableSilo.handle, Sites._run

    def dying(self: DurableSilo, message: bytes) -> bytes:
        north = self.silo.name == "north" and message[:1] == ROUND and not killed.is_set()
        if north and decode_broadcast(message[1:]).sum_index == 3:
            killed.set()
            self.silo.handle(message)
            raise Killed
        return handle(self, message)

    def started_again(self: Sites, silo: str) -> None:
        try:
            run(self, silo)
        except Killed:
            run(self, silo)

    monkeypatch.setattr(DurableSilo, "handle", dying)
    monkeypatch.setattr(Sites, "_run", started_again)
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
def test_a_ledger_from_a_backup_is_noticed(world: World, tmp_path: Path) -> None:
    """One of the middle of the job, which no other member has countersigned; with the newest one the job goes on."""
    algorithm = {"name": "sfvi", "iterations": 8, "sampling_rate": 0.5, "family": "diagonal"}
    job, ledger = Job(world, tmp_path, algorithm=algorithm, privacy=_DP), world.homes["north"].ledger_file

    def stop_at(round_: int) -> None:
        def watch(progress: Progress) -> None:
            if progress.round == round_:
                raise Stopped

        with pytest.raises(Stopped):
            job.run(on_round=watch)

    stop_at(3)
    old = ledger.read_bytes()
    stop_at(6)
    new = ledger.read_bytes()
    ledger.write_bytes(old)
    with pytest.raises(ProtocolError, match="the ledger of 'north' is older than its state of this job"):
        job.run()
    ledger.write_bytes(new)
    assert job.run()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("on_loss", "kind", "kills"),
    [("wait", "homomorphic SFVI-Avg", 8), ("wait", "private SFVI", 6), ("drop", "masked SFVI", 6)],
)
def test_killed_at_random_moments_jobs_find_what_they_should(
    tmp_path: Path, on_loss: str, kind: str, kills: int
) -> None:
    """Twenty of the kills of `secure-fvi bench kills`, with a fixed seed."""
    told: list[str] = []
    found = campaign(tmp_path, kills, on_loss, 4, (kind,), told.append)
    assert found["faults"] == [], told
    assert sum(row["kills"] for row in found["kills"]) == kills
    assert all(row["kills"] for row in found["kills"])
