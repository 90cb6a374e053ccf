"""A full disk and a wrong clock: a clear failure, nothing lost, and the job goes on once that is put right."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from consortium_run import Job
from deployment_world import DAY, NOW, World
from fuzzing import opened_job

import secure_fvi as sf
from secure_fvi.aggregation import store
from secure_fvi.aggregation.base import carry
from secure_fvi.deployment import serving, site
from secure_fvi.deployment.serving import remote_federation
from secure_fvi.deployment.trail import NOTE, Trail
from secure_fvi.deployment.trail_verify import compare, rows, verify
from secure_fvi.engines.remote import Line, Patience
from secure_fvi.engines.stream_client import Doubtful, peer_certificate
from secure_fvi.engines.stream_server import StreamServer
from secure_fvi.errors import AggregationError, InputError, ProtocolError, RecordError
from secure_fvi.fitting import build_parties
from secure_fvi.messages import ROUND
from secure_fvi.privacy import chain_file
from secure_fvi.privacy.gate import Gate
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.silo import UNANSWERABLE
from secure_fvi_lab.bench.world import HUB, Parties, posterior

_SILOS = ["east", "north", "south"]
_JOB = {
    "seed": 3,
    "model": {"program": "six-cities"},
    "partition": {"ids": _SILOS, "sizes": [200, 180, 157]},
    "algorithm": {"name": "sfvi", "iterations": 250, "family": "diagonal"},
    "run": {"compile": False, "threads": 1},
}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MB, where this user may mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)], check=False).returncode:
        pytest.skip("only root may mount a small file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _fill(path: Path) -> None:
    """To the last byte."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["north", HUB])
def test_a_job_goes_on_once_there_is_space_again(tmp_path: Path, small_disk: Path, victim: str) -> None:
    parties = Parties(tmp_path / "job", _JOB, _SILOS)
    home = parties.homes[victim].path
    shutil.move(home, small_disk / victim)
    home.symlink_to(small_disk / victim)
    ballast = small_disk / "ballast"
    try:
        for name in parties.homes:
            parties.start(name)
        assert parties.wait_for_rounds(10, 180)
        _fill(ballast)
        assert parties.wait(HUB, 180) == 1
        told = parties.log(HUB) + parties.log(victim)
        assert "disk is full" in told or "disk I/O error" in told or "No space left" in told, told[-3000:]
        ballast.unlink()
        parties.start(HUB)
        assert parties.wait(HUB, 240) == 0, parties.log(HUB)[-2000:]
        found = (parties.out / "posterior.safetensors").read_bytes()
    finally:
        parties.stop()
    assert found == posterior(parties.config)
    for silo in _SILOS:
        verify(parties.homes[silo].log_file)
        compare(parties.homes[silo].log_file, parties.homes[HUB].log_file)


@pytest.mark.parametrize(("days", "words"), [(400, "roster 1 of 'study' expired"), (-30, "which is yet to come")])
def test_a_site_whose_clock_is_wrong_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch, days: int, words: str
) -> None:
    north = world.homes["north"]
    with monkeypatch.context() as clock:
        clock.setattr(site, "now", lambda: NOW + days * DAY)
        with pytest.raises(ProtocolError, match=words):
            site.run_site(north, "127.0.0.1:9")
    for hours in (-23, 0, 23):  # as far apart as sites may be
        monkeypatch.setattr(site, "now", lambda hours=hours: NOW + hours * DAY / 24)
        assert site.server_of(north).id == "hub"


@pytest.mark.parametrize("hours", [-3, 800 * 24, 0])
def test_a_server_whose_clock_keeps_others_out_says_so(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hours: int
) -> None:
    """TLS turned away whose certificate was not for its day, without a line in its log. The control: a right one."""
    world.distribute(world.write(world.roster, days=1000))
    job = Job(world, tmp_path)
    folder = RunDirectory(tmp_path / "out")
    federation = remote_federation(job.config, world.homes["hub"], folder, "127.0.0.1:0")
    folder.begin(job.config, "digest", {})
    monkeypatch.setattr(serving, "now", lambda: NOW + hours * DAY / 24)
    serving.Hub(federation, None).close()
    said = [r.getMessage() for r in caplog.records if "compare it with the others'" in r.getMessage()]
    assert len(said) == (4 if hours else 0)
    assert all(f"certificate of silo '{silo}'" in " ".join(said) for silo in _SILOS) or not hours


def test_a_silo_whose_clock_takes_no_certificate_blames_no_server(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its log said that the server was not the one in the roster. The control is one that is not."""
    made = World(tmp_path / "later")
    made.certify(made.homes["hub"], NOW + DAY / 8)
    made.distribute(made.write())
    server, files = made.homes["hub"], made.homes["hub"].credentials([made.request(made.homes["north"])])
    with closing(
        StreamServer(Line(["north"], "job", server, Patience("wait", 1.0, 1)), "127.0.0.1:0", files, str, b"")
    ) as at:
        for home, says in (
            (made.homes["north"], "not for today.*compare the clocks"),
            (world.homes["north"], "is not the one"),
        ):
            tls = home.credentials([home.roster(NOW).member("hub")])
            with pytest.raises(Doubtful, match=says):
                peer_certificate("127.0.0.1", at.port, tls, made.homes["north"].roster(NOW).tls_name("hub"))


def test_a_clock_that_is_set_back_is_named_and_nothing_is_lost(world: World) -> None:
    north, clock = world.homes["north"], [2e9]
    log = Trail.open(north.log_file, "north", north.identity(), create=True, clock=lambda: clock[0])
    log.note("", "before")
    clock[0] -= 500.0
    with pytest.raises(RecordError, match=r"the clock runs backwards: it reads .* set the clock right"):
        log.note("", "not written")
    clock[0] += 501.0
    log.note("", "after")
    log.close()
    notes = [row.fields()["what"] for row in rows(north.log_file)[1] if row.kind == NOTE]
    assert notes[-2:] == ["before", "after"]
    verify(north.log_file)


def _line(x: torch.Tensor, y: torch.Tensor) -> None:
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("row", len(y)):
        pyro.sample("y", dist.Normal(x * slope, 1.0), obs=y)


def _charge_as_it_is(gate: Any, phase: str, index: int) -> None:
    gate._charge(phase, index)
    gate.paid += 1


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
@pytest.mark.parametrize(
    "options",
    [{"local_optimizer": "closed_form"}, {"private": "steps", "local_steps": 2, "scale_rate": 0.5}],
    ids=["", "steps"],
)
def test_a_clock_that_is_set_back_is_named_by_a_silo_that_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, rule: bool
) -> None:
    """It answers once the clock is right. The control hands on the ledger's own error, an InputError: a silo took that
    for one of its data, said something else, and of a fit by noised steps answered nothing any more."""
    rows = [{"x": torch.ones(4), "y": torch.ones(4)} for _ in range(3)]
    privacy, books = (
        sf.RecordDP(noise_multiplier=2.0, noise="silo", retries=0),
        sf.Books(tmp_path / "l", "cohort", "job"),
    )
    server, engine, _ = build_parties(
        sf.FederatedModel(_line, "row"), rows, sf.PVI(rounds=1, **options), sf.Plain(), privacy=privacy, books=books,
        compile=False,
    )  # fmt: skip
    if not rule:
        monkeypatch.setattr(Gate, "_pay", _charge_as_it_is)
        monkeypatch.setattr(chain_file, "RecordError", InputError)
    silo: Any = engine.silos["silo-1"]
    with monkeypatch.context() as clock:
        clock.setattr(chain_file, "TOLERANCE_SECONDS", -DAY.total_seconds())
        with pytest.raises((RecordError, AggregationError, ProtocolError)) as caught:
            engine.run(server.round())
    assert (bool(re.match("the clock runs backwards.* set the clock right", str(caught.value)))) == rule
    assert silo.past.failed == ("private" in options and not rule)
    if rule:
        assert engine.run(server.round()).finished
        assert silo.gate.paid == 1


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
@pytest.mark.parametrize("steps", [False, True])
def test_a_file_that_may_not_be_opened_is_no_fault_of_the_data_that_are_charged(
    monkeypatch: pytest.MonkeyPatch, steps: bool, rule: bool
) -> None:
    """As `seen.sqlite`, which somebody else owns since it was copied. The control hands the system's error on: the silo
    said something else, and of a fit by noised steps answered nothing any more."""
    rows = [{"x": torch.ones(4), "y": torch.ones(4)} for _ in range(3)]
    options: Any = {"private": "steps", "local_steps": 2, "scale_rate": 0.5} if steps else {}
    server, engine, _ = build_parties(
        sf.FederatedModel(_line, "row"), rows, sf.PVI(rounds=1, **options), sf.Plain(), compile=False,
        privacy=sf.RecordDP(noise_multiplier=2.0, noise="silo", retries=0),
    )  # fmt: skip
    silo = engine.silos["silo-2"]
    if not rule:
        monkeypatch.setattr(Gate, "_pay", _charge_as_it_is)
    with monkeypatch.context() as patched:
        patched.setattr(silo.gate, "_charge", lambda *_: Path("/proc/version/seen.sqlite").touch())
        with pytest.raises((RecordError, AggregationError, ProtocolError)) as caught:
            engine.run(server.round())
    assert ("seen.sqlite" in str(caught.value)) == rule
    assert silo.past.failed == (steps and not rule)
    if rule:
        assert engine.run(server.round()).finished


@pytest.mark.parametrize("slot", ["question/", "party/state"])
@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_a_disk_that_was_full_for_one_write_is_no_fault_of_the_data(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slot: str, rule: bool
) -> None:
    """The silo answers once there is space, and its site counts no job that asked what its data could not answer. The
    control lets SQLite's error through as it is: a silo that could not claim a question then spoils all later totals,
    and tells nobody."""
    full = [False]

    def check(named: str) -> None:
        if full[0] and named.startswith(slot):
            raise sqlite3.OperationalError("database or disk is full")

    class Disk(sqlite3.Connection):
        def execute(self, sql: str, values: Any = (), /) -> Any:
            check(values[0] if sql.startswith("INSERT") else "")
            return super().execute(sql, values)

        def executemany(self, sql: str, rows: Any, /) -> Any:
            check(next((row[0] for row in rows if row[0].startswith(slot)), ""))
            return super().executemany(sql, rows)

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Disk))
    if not rule:
        monkeypatch.setattr(store, "RecordError", sqlite3.OperationalError)
    found = opened_job(Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 4}), None)

    def exchange(asked: Mapping[str, bytes]) -> dict[str, bytes]:
        replies = {}
        for name, message in asked.items():
            full[0] = name == "north" and message[:1] == ROUND
            with contextlib.suppress(RecordError, sqlite3.OperationalError):
                replies[name] = found.say(name, message)
        full[0] = False
        return replies

    with pytest.raises(AggregationError, match="nothing usable of 'north'"):
        carry(found.server.round(), exchange)
    spoilt = not rule and slot == "question/"
    with pytest.raises(AggregationError, match="some silo's data could not answer") if spoilt else nullcontext():
        for _ in range(2):
            carry(found.server.round(), found.exchange)
    log = found.sites["north"]._trail.chain.jobs[found.job]
    assert (UNANSWERABLE in log.omissions) == (not rule)
    for site_ in found.sites.values():
        site_.close()
