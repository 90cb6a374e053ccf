"""A site's own file that is empty or damaged stops its job by name, with what to do, and is nobody's data's fault."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from consortium_run import Job
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from deployment_world import NOW, World
from fuzzing import opened_job, reopened
from test_unfit_data import PRIVACY, Study

from secure_fvi.aggregation.base import carry
from secure_fvi.aggregation.store import Sealer
from secure_fvi.deployment import columns_job, columns_server, deciding, going, holding, serving, site_job, status
from secure_fvi.deployment import home as home_module
from secure_fvi.deployment import site as site_module
from secure_fvi.deployment.columns_server import ServerColumns
from secure_fvi.deployment.going import Unfit
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.job import make_offer, sign_offer
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.site import Site
from secure_fvi.deployment.site_job import Local
from secure_fvi.driving import Progress
from secure_fvi.errors import ProtocolError, RecordError, SecureFVIError
from secure_fvi.silo import UNANSWERABLE


@contextlib.contextmanager
def _as_it_comes(path: Path | None = None, remedy: str = "") -> Iterator[None]:
    """`own_file` of a site that says nothing of its files."""
    yield


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_a_file_of_a_job_that_was_emptied_is_named_and_counts_against_no_data(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: bool
) -> None:
    """Once it is put back the job goes on. The control counts it as a job that the site's records could not answer, of
    which three close the data set."""
    if not rule:
        for module in (going, site_job):
            monkeypatch.setattr(module, "own_file", _as_it_comes)
    privacy = {"unit": "record", "epsilon": 3.0, "delta": 1e-6, "data_set": "data"}
    made = Job(world, tmp_path, algorithm={"name": "sfvi", "iterations": 3, "family": "diagonal"}, privacy=privacy)
    found, home = opened_job(made, None), world.homes["east"]
    folder = site_job.job_folder(home, found.job)
    carry(found.server.round(), found.exchange)
    before = found.server.state
    found.sites["east"].close()
    Unfit(folder, "east").tell("a line")
    counted, files = 0, [home.state_folder / "cohorts.json", home.ledger_file] if rule else []
    for path in (*files, *(folder / name for name in ("unfit", "secret", "session", *(["cohort"] if rule else [])))):
        kept = path.read_bytes()
        path.write_bytes(b"none" * 9999 if path == home.ledger_file else b"")
        found.sites["east"] = Site(home, Local())
        words = rf"{path.name}' is (no ledger|not what was written there: .*put its newest copy back)" if rule else "."
        found.server.state = before._replace(last_index=found.server.state.last_index)
        with pytest.raises(RecordError if rule else Exception, match=words):
            carry(found.server.round(), found.exchange)
        counted = found.sites["east"]._trail.chain.jobs[found.job].omissions.get(UNANSWERABLE, 0)
        found.sites["east"].close()
        path.write_bytes(kept)
    assert counted == (not rule)
    found.sites["east"] = Site(home, Local())
    found.server.state = before._replace(last_index=found.server.state.last_index)
    carry(found.server.round(), found.exchange)
    (folder / "sessions").write_bytes(b"")
    with pytest.raises(RecordError if rule else ValueError, match=r"sessions' is not" if rule else "invalid"):
        reopened(found, made)
    for site in found.sites.values():
        site.close()


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_what_a_site_kept_of_earlier_rows_makes_no_job_one_of_no_records(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: bool
) -> None:
    """The control says for good that none of the job's records are used, whatever is mended."""
    if not rule:
        monkeypatch.setattr(site_job, "own_file", _as_it_comes)
    study = Study(world, tmp_path / "job", PRIVACY["record"])
    study.home.state_folder.mkdir(exist_ok=True)
    (study.home.state_folder / "cohorts.json").write_bytes(b"")
    with pytest.raises(RecordError if rule else ValueError, match=r"cohorts.json' is not" if rule else "Expecting"):
        study.join()
    told = [path.read_text() for path in (study.home.state_folder / "jobs").glob("*/unfit")]
    assert ['"whole": true' in text for text in told] == ([] if rule else [True])


def test_status_says_which_file_is_empty(world: World, tmp_path: Path) -> None:
    study = Study(world, tmp_path / "job", PRIVACY["record"])
    study.join()
    (folder,) = (study.home.state_folder / "jobs").glob("*")
    (folder / "unfit").touch()
    assert any("unfit' is not what" in line for line in status.read_status(study.home, NOW).problems)


#: What a site keeps besides its jobs, and what it keeps of one, below its folder; and what its line says.
_OF_THE_SITE = {
    "accepted.json": "accepted.json' is damaged; restore it",
    "rosters/1.toml": "1.toml': 'format' is missing",
    "rosters/1.sig/north.sig": "north.sig': 'format' is missing",
    "state.key": "state.key' is no private key in PEM form",
}
_OF_A_JOB = {
    "offer": "offer' is not what was written there: it is empty or damaged; .* start the server again",
    "*.sqlite": "sqlite' is not what was written there: it is empty or damaged; put its newest copy back",
    "questions.signed": "questions.signed' is not what was written there: it is empty or damaged",
}
_EXACT = {"name": "sfvi", "iterations": 4, "family": "diagonal"}


class _Begun:
    """A job of which one round was answered, and east's folder, whose process ends before each question."""

    def __init__(self, world: World, folder: Path) -> None:
        self.made = Job(world, folder, algorithm=_EXACT)
        self.found, self.home = opened_job(self.made, None), world.homes["east"]
        carry(self.found.server.round(), self.found.exchange)
        self.folder, self.before = site_job.job_folder(self.home, self.found.job), self.found.server.state

    def asked(self) -> None:
        """The next question, again under another index."""
        self.found.sites["east"].close()
        self.found.sites["east"] = Site(self.home, Local())
        self.found.server.state = self.before._replace(last_index=self.found.server.state.last_index)
        carry(self.found.server.round(), self.found.exchange)

    @property
    def counted(self) -> int:
        return self.found.sites["east"]._trail.chain.jobs[self.found.job].omissions.get(UNANSWERABLE, 0)

    def close(self) -> None:
        for site in self.found.sites.values():
            site.close()


def _emptied(path: Path) -> bytes:
    kept = path.read_bytes()
    path.write_bytes(b"")
    for beside in path.parent.glob(f"{path.name}-*"):
        beside.unlink()
    return kept


@pytest.mark.parametrize("name", _OF_THE_SITE)
@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_an_emptied_roster_or_key_counts_against_no_data(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: bool, name: str
) -> None:
    """A server heard that the site's data do not fit. The control counts the job, of which three close the data set."""
    if not rule:
        for module in (deciding, home_module, site_module):
            monkeypatch.setattr(module, "own_files", _as_it_comes)
    begun = _Begun(world, tmp_path)
    begun.found.sites["east"].close()
    kept = _emptied(begun.home.path / name)
    with pytest.raises(RecordError if rule else Exception, match=_OF_THE_SITE[name]):
        begun.asked()
    assert begun.counted == (not rule)
    (begun.home.path / name).write_bytes(kept)
    if rule:
        begun.asked()
    begun.close()


@pytest.mark.parametrize("name", _OF_A_JOB)
@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
def test_an_emptied_file_of_a_job_is_named_before_it_is_used(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: bool, name: str
) -> None:
    """An empty store is a new one to SQLite: of what was answered, and signed, it has nothing. The control says that a
    message is malformed, that a copy was restored, or answers as if no survivors had been signed."""
    begun = _Begun(world, tmp_path)
    begun.found.sites["east"].close()
    (path,) = begun.folder.glob(name)
    kept = _emptied(path)
    if not rule:
        for module in (site_module, holding):
            monkeypatch.setattr(module, "own_file", _as_it_comes)
        inner = holding.open_held
        monkeypatch.setattr(site_job, "open_held", lambda *a, begun=False, **more: inner(*a, **more))
    if rule or name != "questions.signed":
        with pytest.raises(RecordError if rule else ProtocolError, match=_OF_A_JOB[name] if rule else "well-|gone"):
            begun.asked()
    else:
        begun.asked()
    assert not begun.counted
    if rule:
        begun.found.sites["east"].close()
        path.write_bytes(kept)
        begun.asked()
        if name == "offer":
            begun.found.sites["east"].close()
            path.write_bytes(b"")
            begun.found.sites["east"] = Site(begun.home, Local())
            reopened(begun.found, begun.made)
            assert path.read_bytes() == kept
    begun.close()


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
@pytest.mark.parametrize("slot", ["party/boot", "roster", "setup", "question/"])
def test_a_value_of_a_store_that_was_altered_counts_against_no_data(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slot: str, rule: bool
) -> None:
    """SQLite notices no bit that a disk has lost; the seal does. The control takes it for a fault of the data."""
    begun = _Begun(world, tmp_path)
    if not rule:
        for module in (holding, site_job):
            monkeypatch.setattr(module, "own_file", _as_it_comes)
    begun.found.sites["east"].close()
    (path,) = begun.folder.glob("questions.signed" if slot == "question/" else "*.sqlite")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        file.execute("UPDATE slots SET value = zeroblob(length(value)) WHERE slot LIKE ?", (f"{slot}%",))
    with pytest.raises(RecordError if rule else Exception, match="was not sealed by this party"):
        begun.asked()
    assert begun.counted == (not rule)
    begun.close()


@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
@pytest.mark.parametrize("lost", [["secret", "session"], ["*.sqlite"]], ids=str)
def test_a_silo_without_its_state_answers_no_question_anew(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: list[str], rule: bool
) -> None:
    """Without differential privacy no ledger has that it answered, and its log does. In the control a server that
    begins anew is answered its first question a second time, by other draws where the secret is gone as well."""
    if not rule:
        monkeypatch.setattr(site_job.SiteJob, "_check_newest", lambda *_: None)
    begun = _Begun(world, tmp_path)
    begun.found.sites["east"].close()
    for name in lost:
        for path in begun.folder.glob(f"{name}*" if "*" in name else name):
            path.unlink()
    begun.found.sites["east"] = Site(begun.home, Local())
    if rule:
        with pytest.raises(
            ProtocolError, match="the state of this job at 'east' is gone, of whose answers its log has 1"
        ):
            reopened(begun.found, begun.made)
    else:
        again = reopened(begun.found, begun.made)
        carry(again.server.round(), again.exchange)  # a second total of one question
        assert again.server.rounds == 1
    begun.close()


def test_another_jobs_offer_in_place_of_the_kept_one_is_named(world: World, tmp_path: Path) -> None:
    """It is rightly signed, and the log has the hash of the one that was accepted. Once that is put back the job goes
    on."""
    begun, hub = _Begun(world, tmp_path), world.homes["hub"]
    begun.found.sites["east"].close()
    path, config = begun.folder / "offer", begun.made.config
    kept = path.read_bytes()
    other = make_offer(config, hub.roster(NOW), "hub", manifest(config).hash, NOW)
    path.write_bytes(sign_offer(other, hub.identity()))
    with pytest.raises(RecordError, match=r"offer' is not what was written there: .* start the server again"):
        begun.asked()
    path.write_bytes(kept)
    begun.asked()
    begun.close()


def test_a_key_that_is_gone_under_a_job_is_not_made_anew(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under another key the site would take its own rows for another's. The control makes one, and does."""
    begun = _Begun(world, tmp_path)
    begun.found.sites["east"].close()
    path = begun.home.path / "state.key"
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(RecordError, match=r"state.key' is gone, with which what is kept of job '.*put its newest copy"):
        begun.asked()
    assert not path.exists()
    path.write_bytes(kept)
    path.chmod(0o600)
    begun.asked()
    begun.found.sites["east"].close()
    path.unlink()
    monkeypatch.setattr(home_module.Home, "_check_nothing_sealed", lambda *_: None)
    with pytest.raises(Exception, match=r"put them back|was not sealed by this party"):
        begun.asked()
    begun.close()


def _opened_by(folder: Path) -> X25519PrivateKey:
    job = SimpleNamespace(folder=folder, _sealer=Sealer(bytes(32), b"shared-response"), _key_slot="job/response.key")
    return columns_job.ColumnsJob._opener(cast(columns_job.ColumnsJob, job))


#: Of which a reader of its own notices that they are not what was written.
_UNREAD = {"ended", "response.key", "response.noise"}
#: Files of a site or a server that hold a word or two, and what reads each of a folder.
_READERS: dict[str, Callable[[Path, Home], Any]] = {
    "ended": lambda folder, home: site_module._said_at_the_end(folder / "ended"),
    "charged": lambda folder, home: serving.Hub._believed(cast(serving.Hub, SimpleNamespace(_kept=folder))),
    "people": lambda folder, home: ServerColumns._carried(cast(Any, None), cast(Any, None), home, folder, cast(Any, 0)),
    "told": lambda folder, home: ServerColumns._passed_on(
        cast(ServerColumns, SimpleNamespace(holder="east")), {}, folder, cast(Any, None)
    ),
    "response.key": lambda folder, home: _opened_by(folder),
    "response.noise": lambda folder, home: columns_server._kept_secret(folder / "response.noise", home, "job", True),
}


@pytest.mark.parametrize("content", [b"", b"\xc1" * 7, b"\xc1" * 99], ids=len)
@pytest.mark.parametrize("name", _READERS)
def test_a_short_file_of_ones_own_that_is_damaged_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    """The control fails at a number, or without a word of which file it was, or goes on with what is there."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RecordError, match=rf"{name}' is not what was written there: .*; put its newest copy back"):
        _READERS[name](tmp_path, world.homes["hub"])
    for module in (site_module, columns_job, columns_server):
        monkeypatch.setattr(module, "own_file", _as_it_comes, raising=False)
    for module in (columns_server, serving):
        monkeypatch.setattr(module, "own_bytes", lambda path, length: path.read_bytes())
    if name not in _UNREAD:
        assert _READERS[name](tmp_path, world.homes["hub"]) is not None
        return
    with pytest.raises((SecureFVIError, ValueError)) as found:
        _READERS[name](tmp_path, world.homes["hub"])
    assert "put its newest copy back" not in str(found.value)


class _Stopped(Exception):
    """The end of a server's process, between two rounds."""


@pytest.mark.later
@pytest.mark.parametrize("rule", [True, False], ids=["", "control"])
@pytest.mark.parametrize("name", ["session", "offer", "gone"])
def test_a_servers_own_file_that_was_emptied_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rule: bool
) -> None:
    """Once it is put back the job ends. The control says that a message is malformed, or that a site
    opened another session."""
    made = Job(world, tmp_path, algorithm=_EXACT)

    def stop(progress: Progress) -> None:
        if progress.round == 2:
            raise _Stopped

    with pytest.raises(_Stopped):
        made.run(on_round=stop)
    path = tmp_path / "remote" / "checkpoint" / ("offer" if name == "gone" else name)
    kept = _emptied(path)
    if name == "gone":
        path.unlink()
    words = "offer' is gone" if name == "gone" else f"{name}' is not what was written there: it is empty or damaged"
    with monkeypatch.context() as patched:
        if not rule:
            patched.setattr(serving, "own_file", _as_it_comes)
            patched.setattr(serving.Hub, "_check_not_offered", lambda *_: None)
        with pytest.raises(RecordError if rule else ProtocolError, match=words if rule else "well-formed|another"):
            made.run()
    path.write_bytes(kept)
    assert made.run() == made.local()
