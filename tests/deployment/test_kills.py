"""Parties killed at bad moments: the job goes on, and its result is right."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from consortium_run import Job, Sites
from deployment_world import World

from secure_fvi.deployment.holding import DurableSilo
from secure_fvi.deployment.trail_verify import compare, verify
from secure_fvi.messages import ROUND, decode_broadcast
from secure_fvi.privacy.ledger_verify import verify as verify_ledger

_DP = {"unit": "record", "epsilon": 3.0, "delta": 1e-6, "noise": "distributed", "data_set": "data"}


class Killed(BaseException):
    """The end of a silo's process; in a thread of a test it passes all that catches errors."""


@pytest.mark.slow
def test_a_silo_killed_between_charge_and_answer(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its noise is gone: the sum is made anew at another index, and both are paid for."""
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
    for silo, releases in (("east", 7), ("north", 7), ("south", 7)):
        home = world.homes[silo]
        verify(home.log_file)
        compare(home.log_file, hub.log_file)
        (chain,) = verify_ledger(home.ledger_file, silo)
        (record,) = chain.jobs.values()
        assert record.released == {"round": releases}
