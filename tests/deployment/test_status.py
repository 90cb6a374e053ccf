"""`secure-fvi status`: what a site's folder tells, to people, to Prometheus and to a health check."""

from __future__ import annotations

import http.client
import importlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from consortium_run import Job, Sites
from deployment_world import DAY, NOW, World
from prometheus_client.parser import text_string_to_metric_families

from secure_fvi.cli import main
from secure_fvi.deployment.countersigning import open_ledger, open_trail
from secure_fvi.deployment.going import Teller, read_going
from secure_fvi.deployment.names import now
from secure_fvi.deployment.policy import read_policy, write_template
from secure_fvi.deployment.status import Monitor, Reader
from secure_fvi.deployment.trail import Exchange, JobEntry
from secure_fvi.errors import InputError


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


def test_only_new_rows_are_read_again(busy: World) -> None:
    reader = Reader(busy.homes["north"])
    assert reader.read(NOW).jobs[1].exchanges == 2
    trail = open_trail(busy.homes["north"])
    trail.exchanges("two", [Exchange("hub", "broadcast", b"asked", b"sent!!")])
    trail.close()
    assert reader.read(NOW).jobs[1].exchanges == 3


def get(server: Monitor, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_metrics_and_health(busy: World) -> None:
    with Monitor(busy.homes["north"], ("127.0.0.1", 0)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status, text = get(server, "/metrics")
        assert status == 200
        found = {(s.name, *s.labels.values()): s.value for f in text_string_to_metric_families(text) for s in f.samples}
        assert found["secure_fvi_bytes_sent_total", "two"] == 7
        assert found["secure_fvi_job_state", "one", "finished"] == 1
        assert found["secure_fvi_budget_remaining_epsilon", "cohort"] == pytest.approx(3.0, rel=0.01)
        assert found["secure_fvi_problems",] == 0
        assert get(server, "/health") == (200, "ok\n")
        assert get(server, "/identity.pem")[0] == 404
        server.patience = -1.0
        status, why = get(server, "/health")
        assert status == 503
        assert "quiet" in why
        server.shutdown()


def test_quiet_and_expiry(busy: World) -> None:
    soon = Reader(busy.homes["north"]).read(NOW + 340 * DAY)
    assert soon.quiet(NOW + 340 * DAY) > 300 * 86400
    assert any("roster" in line for line in soon.expiring)


def test_bad_input(busy: World, capsys: pytest.CaptureFixture[str]) -> None:
    home = str(busy.homes["north"].path)
    for address in ("9464", "127.0.0.1:", "127.0.0.1:99999"):
        assert run("--home", home, "--serve", address) == 2
        assert "write HOST:PORT" in capsys.readouterr().err
    with pytest.raises(InputError, match="cannot listen"):
        Monitor(busy.homes["north"], ("192.0.2.1", 1))


@pytest.mark.slow
def test_the_servers_tells_the_round_and_for_whom_it_waits_since_when(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untraced: None
) -> None:
    """East dials in late: its name is there until it does. The control is what is said once the job has ended."""
    monkeypatch.setattr("secure_fvi.deployment.going._SECONDS", 0.02)
    command = importlib.import_module("secure_fvi.cli.status")  # the name in its package is the command's
    reader, said, inner = Reader(world.homes["hub"]), list[str](), Sites._run

    def until(words: str) -> None:
        last = time.monotonic() + 30
        while time.monotonic() < last and not (said and words in said[-1]):
            time.sleep(0.1)
            said.append(command._text(reader.read(now())))

    def late(self: Sites, silo: str) -> None:
        if silo == "east":
            until("joining; waits for east since 20")
        inner(self, silo)

    monkeypatch.setattr(Sites, "_run", late)
    job = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 2, "family": "diagonal"})
    job.run(on_round=lambda progress: until(f"round {progress.round} of at most 2 ("))
    told = "\n".join(said)
    assert "now 'remote: " in told
    assert "joining; waits for east since 20" in told
    assert all(f"round {k} of at most 2 (" in told for k in (1, 2))
    assert "at work since 20" in said[-1]
    assert ("now '" in command._text(reader.read(now())), read_going(reader.home.path)) == (False, None)


def test_what_a_process_that_has_ended_left_is_not_said(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    teller = Teller(tmp_path, "one", "run", lambda: (1, ["east"]))
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
