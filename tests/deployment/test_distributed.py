"""Silos elsewhere, over TLS: the same posterior as with all parties in one process, byte for byte; refusals; losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from consortium_run import SILOS, Job, Sites
from deployment_world import World
from safetensors.torch import load_file

from secure_fvi.checkpoints import Checkpoints
from secure_fvi.deployment import holding, serving, site_job
from secure_fvi.deployment.session_messages import Joined, pack_schema, schema_digest, unpack_schema
from secure_fvi.deployment.site_job import Local
from secure_fvi.deployment.trail_verify import compare
from secure_fvi.driving import Progress
from secure_fvi.errors import InputError, ProtocolError, SecureFVIError
from secure_fvi.federated_model import Schema
from secure_fvi.runs import records

SHORT = {"name": "sfvi", "iterations": 12, "family": "diagonal"}
ALGORITHMS: list[dict[str, Any]] = [
    {"name": "sfvi", "iterations": 30},
    {"name": "sfvi-avg", "rounds": 2, "local_steps": 10},
    {"name": "pvi", "rounds": 2, "local_steps": 5},
]


class Stopped(Exception):
    """The server's process ends here, as if it had been killed between two rounds."""


def stop_at(round_: int) -> Any:
    def watch(progress: Progress) -> None:
        if progress.round == round_:
            raise Stopped

    return watch


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(a, id=a["name"], marks=[pytest.mark.slow] * (a["name"] == "sfvi-avg")) for a in ALGORITHMS],
)
@pytest.mark.later("pvi")
def test_the_posterior_is_that_of_one_process(world: World, tmp_path: Path, algorithm: dict[str, Any]) -> None:
    job = Job(world, tmp_path, algorithm=algorithm)
    assert job.run() == job.local()
    ours, theirs = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("remote", "local"))
    run, page = (tmp_path / "remote" / "run.json").read_text(), (tmp_path / "remote" / "report.html").read_text()
    known = json.loads(run)
    assert all(known[key] in page for key in ("job", "began", "version", "server", "roster", "model"))
    assert "All parties ran in one process" not in page
    assert "mutual-TLS streams" in page
    for key in ("algorithm", "elbo", "metrics", "posterior", "rounds", "seed", "silos", "theta"):
        assert ours[key] == theirs[key]
    for silo in SILOS:
        found = compare(world.homes[silo].log_file, world.homes["hub"].log_file)
        assert (found.lost_answers, found.unanswered) == (0, 0)
        assert found.agreed > ours["rounds"]  # an exchange a round, and those of its beginning and end
        (kept,) = (world.homes[silo].path / "results").glob("*.safetensors")
        own = load_file(kept)
        assert own["mean/b"].shape == ({"east": 200, "north": 180, "south": 157}[silo],)
        assert float(own["sd/b"].min()) > 0
        (folder,) = (world.homes[silo].state_folder / "jobs").iterdir()
        assert sorted(p.name for p in folder.iterdir()) == [
            "cohort", "ended", "offer", "session", "sessions",  # no secret is left
        ]  # fmt: skip


@pytest.mark.later
def test_a_silo_that_opened_another_session_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys would be for sums that nobody else takes part in. The control is every other test here."""
    opens = site_job.SiteJob.open

    def opened(self: Any, message: Any) -> bytes:
        session: bytes = opens(self, message)
        return bytes(32) if self.home.id == "north" else session

    monkeypatch.setattr(site_job.SiteJob, "open", opened)
    with pytest.raises(ProtocolError, match="'north' opened another session"):
        Job(world, tmp_path, algorithm=SHORT).run()


@pytest.mark.slow
def test_a_silos_draws_are_its_own_unless_it_says_otherwise(world: World, tmp_path: Path) -> None:
    job = Job(world, tmp_path, algorithm=SHORT)
    assert job.run(local=Local()) != job.local()


@pytest.mark.slow
def test_a_server_that_was_stopped_goes_on(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same session; in a new one, where its machine was restarted; and with silos whose machines were."""
    job = Job(world, tmp_path, algorithm=SHORT)
    with pytest.raises(Stopped):
        job.run(on_round=stop_at(4))
    session = (tmp_path / "remote" / "checkpoint" / "session").read_bytes()
    with pytest.raises(Stopped):
        job.run(on_round=stop_at(7))
    assert (tmp_path / "remote" / "checkpoint" / "session").read_bytes() == session
    for module in (holding, serving):
        monkeypatch.setattr(module, "boot_id", lambda: b"another start of the machine")
    rounds: list[int] = []
    assert job.run(on_round=lambda p: rounds.append(p.round)) == job.local()
    assert rounds[0] == 8
    assert (tmp_path / "remote" / "checkpoint" / "session").read_bytes() != session


@pytest.mark.slow
def test_a_state_from_a_backup_is_noticed(world: World, tmp_path: Path) -> None:
    """A silo's; and the server's, against silos that know better."""
    job = Job(world, tmp_path, algorithm=SHORT)
    with pytest.raises(Stopped):
        job.run(on_round=stop_at(4))
    (north,) = (world.homes["north"].state_folder / "jobs").iterdir()
    (silo,) = north.glob("*.sqlite")
    server = tmp_path / "remote" / "checkpoint" / "state.sqlite"
    old = {path: path.read_bytes() for path in (silo, server)}
    with pytest.raises(Stopped):
        job.run(on_round=stop_at(8))
    new = {path: path.read_bytes() for path in (silo, server)}
    silo.write_bytes(old[silo])
    with pytest.raises(ProtocolError, match="silo 'north' refused: this silo's state is older than the other's: the"):
        job.run()
    silo.write_bytes(new[silo])
    server.write_bytes(old[server])
    with pytest.raises(ProtocolError, match=r"refused: the server's checkpoint is older than the other's"):
        job.run()
    server.write_bytes(new[server])
    assert job.run() == job.local()


@pytest.mark.slow
def test_without_a_silo_that_has_gone_the_others_go_on(world: World, tmp_path: Path) -> None:
    """Under `drop`. The records that remain stand for all, so the posterior stays near that of all three silos."""
    algorithm = {"name": "sfvi", "iterations": 600, "family": "diagonal"}
    engine = {"on_loss": "drop", "deadline": 15.0}  # waited out once, and a busy machine is given time
    job = Job(world, tmp_path, algorithm=algorithm, aggregation={"kind": "plain"}, engine=engine)
    taken: dict[int, int] = {}

    def watch(progress: Progress, sites: Sites) -> None:
        taken[progress.round] = progress.bytes_up
        if progress.round == 100:
            sites.leave("south")

    job.run(on_sites=watch)
    job.local()
    assert taken[600] - taken[500] == pytest.approx((taken[100] - taken[0 + 1]) * 100 / 99 * 2 / 3, rel=0.02)
    ours, theirs = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("remote", "local"))
    assert ours["rounds"] == 600
    for mean, other, sd in zip(
        ours["posterior"]["beta"]["mean"],
        theirs["posterior"]["beta"]["mean"],
        theirs["posterior"]["beta"]["sd"],
        strict=True,
    ):
        assert abs(mean - other) < 3 * sd


@pytest.mark.later
def test_a_job_outside_a_policy_is_refused_by_name(world: World, tmp_path: Path) -> None:
    job = Job(world, tmp_path, algorithm=SHORT)
    job.allow("south", algorithms=["pvi"])
    with pytest.raises(ProtocolError, match=r"silo 'south' refused: .*algorithm 'sfvi' is not accepted"):
        job.run()
    job.allow("south")
    assert job.run()  # the same job, the same silos


def test_data_that_do_not_fit_are_counted_at_their_site_alone(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One site codes its outcome 1 and 2: its own log says which column and how many rows, the server hears that it is
    refused. No round is run."""

    def miscoded(config: Any, silo: str, data_dir: Path | None = None) -> Any:
        rows, ids, own = records.silo_part(config, silo, data_dir)
        return ({**rows, "wheeze": rows["wheeze"] + 1} if silo == "south" else rows), ids, own

    monkeypatch.setattr(site_job, "silo_part", miscoded)
    job = Job(world, tmp_path, algorithm=SHORT)
    with pytest.raises(ProtocolError) as caught:
        job.run()
    assert str(caught.value) == (
        "silo 'south' refused: its data do not fit the model, or computing on them failed; the site's log says more"
    )
    told = [record.getMessage() for record in caplog.records if "wheeze" in record.getMessage()]
    assert told
    assert all("is refused: silo 'south': 'wheeze' does not fit site 'wheeze' in" in line for line in told)
    assert not any(record.exc_info for record in caplog.records if "wheeze" in record.getMessage())
    seen = [path.read_bytes() for path in (tmp_path / "remote").rglob("*") if path.is_file()]
    seen += [path.read_bytes() for path in world.homes["hub"].path.rglob("*") if path.is_file()]
    assert not any(b"does not fit site" in content for content in seen)


@pytest.mark.later
def test_under_privacy_each_silos_own_ledger_is_charged(world: World, tmp_path: Path) -> None:
    privacy = {"unit": "record", "epsilon": 3.0, "delta": 1e-6, "noise": "distributed", "data_set": "data"}
    algorithm = {"name": "sfvi", "iterations": 6, "sampling_rate": 0.5, "family": "diagonal"}
    job = Job(world, tmp_path, algorithm=algorithm, privacy=privacy)
    with pytest.raises(Stopped):
        job.run(on_round=stop_at(3))
    job.run()
    result = json.loads((tmp_path / "remote" / "result.json").read_text())
    assert result["privacy"]["epsilon"] <= 3.0
    for silo in SILOS:
        assert world.homes[silo].ledger_file.exists()
        assert not (tmp_path / "remote" / "ledger.sqlite").exists()


def _claiming(monkeypatch: pytest.MonkeyPatch, silo: str, index: int) -> None:
    """Let `silo` say that its ledger has charged all sums below `index`."""
    joins = site_job.SiteJob.join

    def join(self: Any) -> Joined:
        found = joins(self)
        return found._replace(last_index=index) if self.home.id == silo else found

    monkeypatch.setattr(site_job.SiteJob, "join", join)


PRIVATE: dict[str, Any] = {
    "privacy": {"unit": "record", "epsilon": 3.0, "delta": 1e-6, "noise": "distributed", "data_set": "data"},
    "algorithm": {"name": "sfvi", "iterations": 3, "sampling_rate": 0.5, "family": "diagonal"},
}


@pytest.mark.later
def test_a_silo_that_says_all_sums_are_used_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(world, tmp_path, **PRIVATE)
    with monkeypatch.context() as patch:
        _claiming(patch, "north", 2**63 - 1)
        with pytest.raises(ProtocolError, match="'north' says that its ledger has charged sum 9223372036854775806"):
            job.run()
    job.run()  # the others' ledgers and the server know nothing of it


@pytest.mark.later
def test_control_believed_it_ends_the_job_and_nobody_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All silos refuse what follows from it; whose refusal comes first is chance."""
    monkeypatch.setattr(serving, "most_sums", lambda *arguments: 2**63)
    _claiming(monkeypatch, "north", 2**63 - 1)
    with pytest.raises(SecureFVIError) as caught:
        Job(world, tmp_path, **PRIVATE).run()
    assert "ledger" not in str(caught.value)


def test_what_ledgers_may_say_they_have_charged() -> None:
    """A liar within the bound moves all sums; honest silos that charged those after it are not to blame."""

    def joined(**last: int) -> dict[str, Joined]:
        return {silo: Joined(b"", bytes(32), b"", index) for silo, index in last.items()}

    assert serving.last_charged(joined(north=0, south=0), 0, 10) == -1
    assert serving.last_charged(joined(north=8, south=5), 0, 10) == 7
    assert serving.last_charged(joined(north=11, south=1), 0, 10) == 10
    assert serving.last_charged(joined(north=11, south=14), 10, 10) == 13
    for known, index in ((0, 12), (10, 22), (0, 2**53), (5, 2**63 - 1)):
        with pytest.raises(
            ProtocolError, match=rf"'south' says that its ledger has charged sum {index - 1} .* at most"
        ):
            serving.last_charged(joined(north=3, south=index), known, 10)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"aggregation": {"kind": "homomorphic"}}, "one member with the role 'holder'; roster 1 has 0"),
        (
            {"algorithm": {"name": "vertical"}, "model": {"program": "vertical-logistic"}, "partition": None},
            "come with",
        ),
    ],
)
def test_what_runs_in_one_process_alone_says_so(
    world: World, tmp_path: Path, tables: dict[str, Any], words: str
) -> None:
    job = Job(world, tmp_path, allow=False, **tables)
    with pytest.raises(InputError, match=words):
        job.run()


def test_schemas_travel_without_a_number_of_records() -> None:
    constants = {"grid": torch.arange(3), "name": "x", "k": 2, "flag": True, "rate": 0.5, "nothing": None}
    schema = Schema((("y", (2,), torch.float64), ("z", (), torch.int64)), constants)
    found = unpack_schema(pack_schema(schema))
    assert found.fields == schema.fields
    assert torch.equal(found.constants["grid"], torch.arange(3))
    assert {k: v for k, v in found.constants.items() if k != "grid"} == {
        k: v for k, v in constants.items() if k != "grid"
    }
    assert schema_digest(found) == schema_digest(schema)
    with pytest.raises(InputError, match="shared value 'f' is a function"):
        pack_schema(Schema(schema.fields, {"f": lambda: 0}))
    packed = pack_schema(schema)
    for cut in range(0, len(packed), 7):
        with pytest.raises(ProtocolError, match="schema"):
            unpack_schema(packed[:cut])


@pytest.mark.slow
def test_an_answer_of_a_session_that_is_over_is_masked_anew(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's machine is restarted after the silos answered, and before it wrote their total down: it asks in the
    same bytes, in a new session."""
    job, save = Job(world, tmp_path, algorithm=SHORT), Checkpoints.save

    def saved(self: Checkpoints, round_: int, parties: Any) -> None:
        if round_ == 5:
            raise Stopped
        save(self, round_, parties)

    monkeypatch.setattr(Checkpoints, "save", saved)
    with pytest.raises(Stopped):
        job.run()
    monkeypatch.setattr(Checkpoints, "save", save)
    for module in (holding, serving):
        monkeypatch.setattr(module, "boot_id", lambda: b"another start of the machine")
    assert job.run() == job.local()
