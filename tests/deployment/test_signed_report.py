"""The report of a job between institutions is signed by its server: whatever is altered in it, or made up, is found."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from consortium_run import Job
from deployment_world import NOW, World

from secure_fvi.cli import main
from secure_fvi.deployment import evidence as evidences
from secure_fvi.deployment.countersigning import open_trail
from secure_fvi.deployment.deciding import stated_policy
from secure_fvi.deployment.evidence import Evidence, check_report, sign_report, write_evidence
from secure_fvi.deployment.serving import RemoteFederation
from secure_fvi.deployment.trail import Exchange, JobEntry
from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.runs.directory import RunDirectory

POLICY = bytes([5]) * 32
PAGE = "<p>Converged.</p>\n<p>Epsilon 0.5.</p>\n"


@pytest.fixture
def report(world: World, tmp_path: Path) -> Path:
    """A page that the hub has signed, with north's log as it was when the job ended, and a row since."""
    north, hub = world.homes["north"], world.homes["hub"]
    roster = hub.roster(NOW)
    trail = open_trail(north)
    entry = JobEntry("one", bytes([1]) * 32, roster.hash, bytes([2]) * 32, POLICY, True)
    trail.job(entry)
    trail.exchanges("one", [Exchange("hub", "broadcast", b"asked", b"sent")])
    head = {"rows": trail.chain.length, "head": trail.chain.head.hex()}
    trail.close_job("one", "finished")
    trail.close()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "report.html").write_text(PAGE)
    (folder / "result.json").write_text("{}")
    stated = {
        "format": 1, "job": "one", "offer": entry.offer.hex(), "server": "hub", "model": entry.model.hex(),
        "roster": {"number": 1, "hash": roster.hash.hex(),
                   "signed_by": {m.id: m.identity for m in roster.members.values()}},
        "versions": {"secure_fvi": "0.2.0", "package": "07" * 32, "protocol": 7},
        "policies": {"north": stated_policy(north, "one", POLICY).hex()}, "logs": {"north": head}, "ledgers": {},
    }  # fmt: skip
    write_evidence(folder, Evidence.model_validate(stated))
    sign_report(folder, roster, "hub", hub.identity())
    return folder / "report.html"


def altered(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1
    path.write_text(text.replace(before, after))


def verify(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["report", "verify", *map(str, arguments)])
    return int(stopped.value.code or 0)


def test_a_site_checks_it_by_its_own_log_and_policy(
    world: World, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others by the roster, and by a log that they are given. Renaming the page or handing three files over is fine."""
    assert verify(report, "--home", world.homes["north"].path) == 0
    told = capsys.readouterr().out
    for words in (
        "signed by 'hub'",
        "report.html, evidence.json, result.json",
        "07" * 32,
        "row 3; policy " + "05" * 32,
    ):
        assert words in told
    assert "this site's policy is the report's" in told
    (report.parent / "result.json").unlink()
    report = report.rename(report.with_name("of-the-hub.html"))
    roster = world.homes["south"].roster_file(1)
    assert verify(report, "--roster", roster, "--log", world.homes["north"].log_file) == 0
    told = capsys.readouterr().out
    assert "signed, and not here: result.json" in told
    assert "this site's policy" not in told
    assert verify(report) == 2
    assert "--roster" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "before", "after", "said"),
    [
        ("report.html", "Converged.", "converged.", "not the report.html"),
        ("report.html", "0.5", "0.1", "not the report.html"),
        ("evidence.json", '"0.2.0"', '"0.2.1"', "not the evidence.json"),
        ("result.json", "{}", "[]", "not the result.json"),
        ("report.sig", 'job = "one"', 'job = "two"', "not by the identity of 'hub'"),
        ("report.sig", 'member = "hub"', 'member = "north"', "no server"),
    ],
)
def test_a_forged_line_is_found(
    world: World, report: Path, monkeypatch: pytest.MonkeyPatch, name: str, before: str, after: str, said: str
) -> None:
    """The control: the same forgery, with its digest in the list, passes where nobody looks at the signature."""
    roster = world.homes["south"].roster(NOW)
    assert check_report(report, roster).member == "hub"
    path = report.parent / name
    was = evidences._digest(path)
    altered(path, before, after)
    with pytest.raises(ProtocolError, match=re.escape(said)):
        check_report(report, roster)
    if name != "report.sig":
        altered(report.parent / "report.sig", was, evidences._digest(path))
        with pytest.raises(ProtocolError, match="not by the identity of 'hub'"):
            check_report(report, roster)
    monkeypatch.setattr(evidences, "signed", lambda *_: True)
    if "north" not in after and "two" not in after:
        assert check_report(report, roster).member == "hub"


def test_who_is_not_the_server_signs_nothing(world: World, report: Path) -> None:
    """A member with a key of the roster, a stranger, and the server under another roster. Control: the server again."""
    north, hub = world.homes["north"], world.homes["hub"]
    roster = hub.roster(NOW)
    sign_report(report.parent, roster, "north", north.identity())
    with pytest.raises(ProtocolError, match="no server"):
        check_report(report, roster)
    with pytest.raises(InputError, match="another identity for 'hub'"):
        sign_report(report.parent, roster, "hub", north.identity())
    sign_report(report.parent, roster, "north", north.identity())
    altered(report.parent / "report.sig", 'member = "north"', 'member = "hub"')
    with pytest.raises(ProtocolError, match="not by the identity of 'hub'"):
        check_report(report, roster)
    sign_report(report.parent, roster, "hub", hub.identity())
    altered(report.parent / "report.sig", roster.hash.hex(), "00" * 32)
    with pytest.raises(ProtocolError, match="signed under roster 0000"):
        check_report(report, roster)
    sign_report(report.parent, roster, "hub", hub.identity())
    assert check_report(report, roster).files == ("report.html", "evidence.json", "result.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda e: e["logs"]["north"].update(head="00" * 32), "not the one of the report"),
        (lambda e: e["logs"]["north"].update(rows=99), "not the one of the report"),
        (lambda e: e["logs"].clear(), "names no log of 'north'"),
        (lambda e: e.update(model="00" * 32), "another model"),
        (lambda e: e.update(job="two"), "the log of 'north' has not accepted job 'two'"),
        (lambda e: e["policies"].update(north="00" * 32), "another policy of 'north'"),
        (lambda e: e["roster"]["signed_by"].popitem(), "of another roster"),
        (lambda e: None, ""),  # the control
    ],
)
def test_what_a_server_states_wrongly_its_signature_does_not_make_right(
    world: World, report: Path, change: Callable[[Any], Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = world.homes["hub"]
    path = report.parent / "evidence.json"
    stated = json.loads(path.read_text())
    change(stated)
    path.write_text(json.dumps(stated))
    sign_report(report.parent, hub.roster(NOW), "hub", hub.identity())
    assert verify(report, "--home", world.homes["north"].path) == (1 if said else 0)
    told = capsys.readouterr()
    assert said in told.err if said else "verified" in told.out


@pytest.mark.parametrize("checked", [True, False])
def test_a_log_that_was_altered_vouches_for_nothing(
    world: World, report: Path, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """Another policy in a row before the one that the report names. The control reads rows and checks none."""
    log, other = world.homes["north"].log_file, bytes([6]) * 32
    with closing(sqlite3.connect(log)) as file, file:
        for seq, body in file.execute("SELECT seq, body FROM rows").fetchall():
            file.execute("UPDATE rows SET body = ? WHERE seq = ?", (body.replace(POLICY, other), seq))
    if not checked:
        monkeypatch.setattr(evidences, "verify", lambda _: None)
    with pytest.raises(ProtocolError, match="row") if checked else nullcontext():
        assert evidences.check_log(evidences._evidence(report.parent), log) == ("north", [other])


def test_a_list_of_other_files_is_none(world: World, report: Path) -> None:
    """It names nothing outside of the folder, and page and evidence are in it."""
    hub, signature = world.homes["hub"], report.parent / "report.sig"
    altered(signature, '"result.json"', '"../secret"')
    with pytest.raises(InputError, match="no file of a run"):
        check_report(report, hub.roster(NOW))


@pytest.mark.parametrize("gone", ["report.html", "evidence.json"])
def test_a_signature_covers_page_and_evidence(
    world: World, report: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """Else what is read is not what was signed. The control: a signature that lacks another file."""
    hub = world.homes["hub"]
    for left_out in (gone, "result.json"):
        with monkeypatch.context() as patched:
            patched.setattr(evidences, "REPORT", "result.json" if left_out == "report.html" else "report.html")
            patched.setattr(evidences, "_FILES", tuple(f for f in evidences._FILES if f != left_out))
            sign_report(report.parent, hub.roster(NOW), "hub", hub.identity())
        with nullcontext() if left_out != gone else pytest.raises(ProtocolError, match=f"does not cover {gone}"):
            check_report(report, hub.roster(NOW))


def test_what_is_not_there_or_is_no_statement_is_not_signed(world: World, report: Path) -> None:
    hub = world.homes["hub"]
    page, stated = report.read_bytes(), (report.parent / "evidence.json").read_text()
    report.unlink()
    with pytest.raises(InputError, match=r"cannot read '.*report.html'"):
        sign_report(report.parent, hub.roster(NOW), "hub", hub.identity())
    report.write_bytes(page)
    (report.parent / "evidence.json").write_text("{}")
    with pytest.raises(InputError, match="is not what a server states of a job that has ended"):
        sign_report(report.parent, hub.roster(NOW), "hub", hub.identity())
    (report.parent / "evidence.json").write_text(stated)
    sign_report(report.parent, hub.roster(NOW), "hub", hub.identity())


def test_under_a_roster_that_was_never_in_force_nothing_is_signed(world: World, report: Path) -> None:
    """As in a folder that was brought from another server. The control is the roster of the job."""
    hub = world.homes["hub"]
    (report.parent / "report.sig").unlink()
    for roster in ("00" * 32, hub.roster(NOW).hash.hex()):
        folder = SimpleNamespace(path=report.parent, read_run=lambda roster=roster: {"roster": roster})
        refused = pytest.raises(InputError, match=r"under which the job in .* ran, was in force here no more")
        with refused if roster == "00" * 32 else nullcontext():
            RemoteFederation.seal(SimpleNamespace(home=hub), folder)  # type: ignore[arg-type]
        assert (report.parent / "report.sig").exists() == (roster != "00" * 32)


@pytest.mark.slow
def test_a_job_between_institutions_ends_with_one(
    world: World, tmp_path: Path, untraced: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each site's own log and policy are in it; a process that ended before the signature makes up for it, and what is
    written later leaves the signed page alone."""
    job = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 2, "family": "diagonal"})
    job.run()
    page = tmp_path / "remote" / "report.html"
    for site in ("north", "south", "east"):
        assert verify(page, "--home", world.homes[site].path) == 0
        told = capsys.readouterr().out
        assert "this site's policy is the report's" in told
        assert f"the log of '{site}' goes through" in told
        assert "signed, and not here" not in told
    hub = world.homes["hub"]
    assert verify(page, "--home", hub.path, "--log", world.homes["north"].log_file) == 0
    assert "the log of 'hub' goes through" in capsys.readouterr().out
    stated = json.loads((page.parent / "evidence.json").read_text())
    assert {"north", "south", "east"} == stated["policies"].keys()
    assert {"north", "south", "east", "hub"} == stated["logs"].keys() == stated["roster"]["signed_by"].keys()
    text = page.read_text()
    assert "What hub has signed" in text
    assert all(head["head"][:16] in text for head in stated["logs"].values())
    for gone in ("report.sig", "report.html"):
        (page.parent / gone).unlink()
    job.run()  # a server that was killed before it had signed
    assert verify(page, "--home", hub.path) == 0
    assert RunDirectory(page.parent).state == "finished"
