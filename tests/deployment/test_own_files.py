"""A site's own file that is empty or damaged stops its job by name, with what to do, and is nobody's data's fault."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from consortium_run import Job
from deployment_world import NOW, World
from fuzzing import opened_job, reopened
from test_unfit_data import PRIVACY, Study

from secure_fvi.aggregation.base import carry
from secure_fvi.deployment import going, site_job, status
from secure_fvi.deployment.going import Unfit
from secure_fvi.deployment.site import Site
from secure_fvi.deployment.site_job import Local
from secure_fvi.errors import RecordError
from secure_fvi.silo import UNANSWERABLE


@contextlib.contextmanager
def _as_it_comes(path: Path, remedy: str = "") -> Iterator[None]:
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
