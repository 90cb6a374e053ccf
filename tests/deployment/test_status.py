"""`secure-fvi status`: what a site's folder tells."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from consortium_run import Job, Sites
from deployment_world import DAY, NOW, World

from secure_fvi.cli import main
from secure_fvi.deployment.countersigning import open_ledger, open_trail
from secure_fvi.deployment.going import Going, Stand, Teller, read_going
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.keeping import write_template
from secure_fvi.deployment.names import now
from secure_fvi.deployment.policy import read_policy
from secure_fvi.deployment.status import read_status
from secure_fvi.deployment.trail import Exchange, JobEntry
from secure_fvi.driving import Progress
from secure_fvi.errors import InputError, ProtocolError

text_of = importlib.import_module("secure_fvi.cli.status")._text  # the name in its package is the command's


def entry(job: str, accepted: bool = True, reason: str = "") -> JobEntry:
    zero = bytes(32)
    return JobEntry(job, zero, zero, zero, zero, accepted, reason, "cohort", 0.5, 1e-6)


@pytest.fixture
def busy(world: World) -> World:
    """North with an open job of two messages, a finished and a refused one, and a budget."""
    trail = open_trail(world.homes["north"])
    for job in ("one", "two"):
        trail.job(entry(job))
        trail.exchanges(job, [Exchange("hub", "broadcast", b"asked", b"sent!!"), Exchange("hub", "end", b"a", b"b")])
    trail.close_job("one", "finished")
    trail.job(entry("three", False, "the policy says no"))
    trail.close()
    policy = world.homes["north"].policy_file
    write_template(policy)
    policy.write_text(policy.read_text() + '[[data]]\nid = "cohort"\nepsilon = 3.0\ndelta = 1e-6\n')
    open_ledger(world.homes["north"], read_policy(policy)).close()
    return world


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["status", *arguments])
    return int(stopped.value.code or 0)


@pytest.mark.parametrize("minutes", [30 * 24 * 60, 4])
def test_rows_of_a_clock_that_was_ahead_are_a_problem(busy: World, minutes: int) -> None:
    """For as long the site answers nothing, and a monitor read that all was well, quiet for less than no time. The
    control: a clock that is behind by a step of NTP, which is waited out."""
    home = busy.homes["north"]
    found = read_status(home, now() - minutes * DAY / 24 / 60)
    ahead = [line for line in found.problems if "which is yet to come, so that nothing is answered" in line]
    assert [line.split(" is of ")[0] for line in ahead] == (
        ["the newest row of the audit-log", "the newest row of the ledger"] if minutes > 5 else []
    )
    assert found.quiet(now() - minutes * DAY / 24 / 60) >= 0


def test_a_busy_site(busy: World, capsys: pytest.CaptureFixture[str]) -> None:
    home = str(busy.homes["north"].path)
    assert run("--home", home, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    states = {
        job["job"]: (job["state"], job["exchanges"], job["bytes_received"], job["bytes_sent"]) for job in told["jobs"]
    }
    assert states == {"one": ("finished", 2, 6, 7), "two": ("open", 2, 6, 7), "three": ("refused", 0, 0, 0)}
    assert told["budgets"] == [{"data_set": "cohort", "epsilon": 3.0, "remaining": pytest.approx(3.0, rel=0.01)}]
    assert (told["id"], told["role"], told["roster"], told["problems"]) == ("north", "silo", 1, [])
    assert 0 <= told["quiet"] < 600, "since the newest row, with a job open"
    assert run("--home", home) == 0
    text = capsys.readouterr().out
    assert "job three: refused: the policy says no" in text
    assert "of 'cohort'" in text


def test_a_site_without_jobs(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--home", str(world.homes["hub"].path)) == 0
    assert "'hub', server, roster 1" in capsys.readouterr().out


def test_what_is_wrong_is_told_and_the_rest_too(busy: World, capsys: pytest.CaptureFixture[str]) -> None:
    home = busy.homes["north"]
    with sqlite3.connect(home.log_file) as connection:
        assert connection.execute("UPDATE rows SET body = x'80' WHERE seq = 3").rowcount == 1
    connection.close()
    assert run("--home", str(home.path)) == 1
    text = capsys.readouterr().out
    assert "row 3" in text
    assert "of 'cohort'" in text
    home.roster_file(1).unlink()
    assert "roster none" in (run("--home", str(home.path)), capsys.readouterr().out)[1]


def test_it_needs_no_passphrase(busy: World) -> None:
    """The control: what the site's own processes read needs one. Another identity than the roster's is told all the
    same."""
    path = busy.homes["north"].path
    Home(path, "a long passphrase").seal()
    with pytest.raises(InputError, match="is encrypted"):
        Home(path).roster(now())
    found = read_status(Home(path), now())
    assert (found.roster, found.problems, found.expiring) == (1, (), ())
    shutil.copy(busy.homes["south"].path / "identity.pub", path / "identity.pub")
    (told,) = read_status(Home(path), now()).problems
    assert "another role or identity for 'north'" in told


def test_quiet_and_expiry(busy: World) -> None:
    soon = read_status(busy.homes["north"], now() + 340 * DAY)
    assert soon.quiet(now() + 340 * DAY) > 300 * 86400
    assert any("roster" in line for line in soon.expiring)


def test_a_policy_that_cannot_be_read_is_ill_health_before_a_job_finds_it(busy: World) -> None:
    home = busy.homes["north"]
    assert not read_status(home, now()).problems
    home.policy_file.write_text(home.policy_file.read_text().replace("min_cohort", "min_cohrt"))
    assert "unknown key 'min_cohrt'; did you mean 'min_cohort'?" in read_status(home, now()).problems[0]


def test_an_identity_that_is_gone_is_not_called_another(busy: World) -> None:
    home = busy.homes["north"]
    (home.path / "identity.pem").rename(home.path / "away.pem")
    with pytest.raises(ProtocolError, match=r"has no identity\.pem"):
        home.identity_in(home.roster_by_public_keys(now()))


def test_a_job_that_was_given_up_for_a_newer_one_is_no_ill_health(busy: World) -> None:
    """Nor is it called open. But the newest one is both, and one that a process goes on with."""
    found = read_status(busy.homes["north"], now())
    later, (done, left) = now() + DAY, [j for j in found.jobs if j.accepted]
    assert (done.outcome, left.outcome) == ("finished", None)
    assert found._replace(jobs=(done, left)).quiet(later) > 3600
    assert found._replace(jobs=(left, done)).quiet(later) == 0
    going = Going(left.job, "", "", 1, 2, (), "", os.getpid())
    assert found._replace(jobs=(left, done), going=going).quiet(later) > 3600
    assert [found._replace(jobs=j).state(left) for j in ((done, left), (left, done))] == ["open", "unfinished"]
    assert found._replace(jobs=(left, done), going=going).state(left) == "open"
    assert found.state(done) == "finished"


@pytest.mark.slow
def test_each_tells_the_round_and_for_whom_it_waits_since_when(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untraced: None
) -> None:
    """East dials in late: the hub says so until it does, and north that it waits for the hub. The control is what both
    say once the job has ended."""
    monkeypatch.setattr("secure_fvi.deployment.going._SECONDS", 0.02)
    homes = {who: world.homes[who] for who in ("hub", "north")}
    said: dict[str, list[str]] = {who: [] for who in homes}
    inner = Sites._run

    def until(who: str, words: str) -> None:
        last = time.monotonic() + 30
        while time.monotonic() < last and not (said[who] and words in said[who][-1]):
            time.sleep(0.1)
            said[who].append(text_of(read_status(homes[who], now())))

    def late(self: Sites, silo: str) -> None:
        if silo == "east":
            until("hub", "joining; waits for east since 20")
            until("north", "no job; waits for hub since 20")
        inner(self, silo)

    def over(progress: Progress) -> None:
        until("hub", f"round {progress.round} of at most 2 (")
        until("north", f"round {progress.round} of at most 2 (rounds); waits for hub since 20")

    monkeypatch.setattr(Sites, "_run", late)
    job = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 2, "family": "diagonal"})
    job.run(on_round=over)
    told = {who: "\n".join(lines) for who, lines in said.items()}
    assert "now 'remote: " in told["hub"]
    assert "joining; waits for east since 20" in told["hub"]
    assert "now no job; waits for hub since 20" in told["north"]
    assert all(f"round {k} of at most 2 (" in lines for k in (1, 2) for lines in told.values())
    assert "at work since 20" in said["hub"][-1]
    for home in homes.values():
        assert ("now" in text_of(read_status(home, now())), read_going(home.path)) == (False, None)


def test_a_site_tells_how_its_process_stands(busy: World, capsys: pytest.CaptureFixture[str]) -> None:
    """On the terminal and as JSON; what others wrote moves no cursor. The control has no process."""
    home = busy.homes["north"]
    assert run("--home", str(home.path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["going"] is None
    stand = Stand("two", "y ~ x\x1b[2J", "rounds", 3, 50, 7, ("hub",))
    teller = Teller(home.path, lambda: stand)
    try:
        while read_going(home.path) is None:
            time.sleep(0.01)
        assert run("--home", str(home.path)) == 0
        text = capsys.readouterr().out
        assert "now 'y ~ x?[2J', job two: round 3 of at most 50 (rounds); waits for hub since 20" in text
    finally:
        teller.close()


def test_since_when_is_told_of_each_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is open for long, the time at which it was asked."""
    monkeypatch.setattr("secure_fvi.deployment.going._SECONDS", 0.01)
    times = iter(NOW + k * DAY for k in range(1000))
    monkeypatch.setattr("secure_fvi.deployment.going.now", lambda: next(times))
    stands = [Stand("one", asked=1, waiting=("east", "north"))]
    teller = Teller(tmp_path, lambda: stands[-1])

    def told(stand: Stand) -> Going:
        stands.append(stand)
        while (found := read_going(tmp_path)) is None or (found.waiting, found.round) != (stand.waiting, stand.round):
            time.sleep(0.005)
        return found

    first = told(stands[0])
    assert told(Stand("one", asked=1, waiting=("east",))).since == first.since
    work = told(Stand("one", asked=1))
    assert work.since > first.since
    assert told(Stand("one", round=1, asked=2, waiting=("east",))).since > work.since
    teller.close()


def test_what_a_process_that_has_ended_left_is_not_said(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    teller = Teller(tmp_path, lambda: Stand("one", "run", asked=1, waiting=("east",)))
    while (found := read_going(tmp_path)) is None:
        time.sleep(0.01)
    assert (found.job, found.waiting, found.process) == ("one", ("east",), os.getpid())
    held = json.loads((tmp_path / "going.json").read_text())
    (tmp_path / "going.json").write_text(json.dumps(held | {"process": gone.pid}))
    assert read_going(tmp_path) is None
    for damaged in ("", "[]", "{}", json.dumps(held | {"more": 1})):
        (tmp_path / "going.json").write_text(damaged)
        assert read_going(tmp_path) is None
    teller.close()
    assert not (tmp_path / "going.json").exists()
