"""Under differential privacy no refusal tells of a site's records: a job that they do not fit is joined, charged and
answered to its end, and the site's own people are told. The server is a lying one: it sees all that leaves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from consortium_run import SILOS, Job, met
from deployment_world import NOW, World
from fuzzing import Opened, opened_job
from safetensors.torch import save

from secure_fvi import tables
from secure_fvi.aggregation.base import carry
from secure_fvi.cli import cli
from secure_fvi.deployment import site as site_of
from secure_fvi.deployment import site_job
from secure_fvi.deployment.going import Unfit
from secure_fvi.deployment.job import make_offer, sign_offer
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.session_messages import CODEC, END, JOIN, End
from secure_fvi.deployment.site import Site
from secure_fvi.deployment.site_job import Local, SiteJob
from secure_fvi.disclosure import DISCLOSURES
from secure_fvi.errors import DataError, PolicyError
from secure_fvi.models.base import program
from secure_fvi.privacy import gate
from secure_fvi.privacy.ledger import read_ledger

DICTIONARY = 'format = 1\n[columns.smoke]\nkind = "boolean"\nlevels = ["no", "yes"]\n' + "".join(
    f'[columns."wheeze[{k}]"]\nkind = "boolean"\n' for k in range(4)
)
_NOISE = {"epsilon": 3.0, "delta": 1e-6, "noise": "distributed", "data_set": "data"}
PRIVACY = {unit: {"unit": unit, **_NOISE} for unit in ("record", "silo")}
SFVI = {"name": "sfvi", "iterations": 3, "family": "diagonal"}
MASKED = {"aggregation": {"kind": "masked"}}
FLOORS = {
    "dp": "optional", "max_epsilon": 10.0, "max_delta": 1e-4, "min_noise_multiplier": 0.001,
    "units": ["record", "silo"], "noise": ["distributed", "silo", "server"],
}  # fmt: skip


class Study:
    """Three sites, each with a table of 20 children; east's may be spoilt."""

    def __init__(
        self, world: World, folder: Path, privacy: Any, algorithm: Any = SFVI, tables: Any = MASKED,
        silos: Sequence[str] = SILOS, **rule: Any,
    ) -> None:  # fmt: skip
        """tables: more of the job's."""
        folder.mkdir()
        self.world, self.home = world, world.homes["east"]
        self.job = Job(
            world, folder, allow=False, partition=None, silo=[{"id": name, "data": "own.csv"} for name in silos],
            algorithm=algorithm, privacy=privacy, **{**MASKED, **tables},
        )  # fmt: skip
        records = program("six-cities").load().records
        for at, name in enumerate(silos):
            rows = [
                ["no", "yes"][int(records["smoke"][i])] + "," + ",".join(str(int(v)) for v in records["wheeze"][i])
                for i in range(at, 537, 27)
            ]
            lines = ["smoke," + ",".join(f"wheeze[{k}]" for k in range(4)), *rows]
            self.allow(name, path="own.csv", dictionary="d.toml", **rule)
            (world.homes[name].path / "d.toml").write_text(DICTIONARY)
            (world.homes[name].path / "own.csv").write_text("\n".join(lines) + "\n")
        self.table = self.home.path / "own.csv"

    def allow(self, name: str, **rule: Any) -> None:
        listed = [name for name in DISCLOSURES if name != "exact_counts"]
        lacking = {"max_missing": 1, "max_differences": 9}
        self.job.allow(name, data=[{"id": "data", **rule}], privacy=FLOORS, disclosures=listed, **lacking)

    def join(self) -> None:
        """East alone is offered the job."""
        hub, config = self.world.homes["hub"], self.job.config
        offer = make_offer(config, hub.roster(NOW), "hub", manifest(config).hash, NOW)
        with closing(Site(self.home, Local())) as site:
            met(hub, site)
            site.handle(offer.job, JOIN + sign_offer(offer, hub.identity()))

    def spoil(self, line: str, at: int = -1) -> None:
        """One child's line; the last one's, so that the others keep their places, by which they draw."""
        lines = self.table.read_text().splitlines()
        lines[at] = line
        self.table.write_text("\n".join(lines) + "\n")


class Seen(NamedTuple):
    """What a server sees of east, what is charged there, and what nobody sees."""

    forms: list[tuple[str, int, int]]  # of each message its kind and length, and the length of its answer
    released: dict[str, int]  # by phase, as the ledger has it
    trail: int  # rows of its log, whose number a server countersigns
    sums: list[torch.Tensor]  # clipped, before noise


def ran(study: Study, between: Callable[[Opened], None] = lambda _: None) -> Seen:
    """A job of two rounds to its end. between: after the first."""
    forms, sums, made, say = list[Any](), list[torch.Tensor](), gate.noisy_clipped_sum, Opened.say

    def summed(chunks: Any, sizes: Any, norms: Any, noise: Any) -> Any:
        return made(chunks, sizes, norms, lambda total: (sums.append(total.clone()), noise(total))[1])

    def heard(self: Opened, site: str, message: bytes) -> bytes:
        before = len(sums)
        reply = say(self, site, message)
        if site == "east":
            forms.append((message[:1].decode(), len(message), len(reply)))
        else:
            del sums[before:]
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SiteJob, "_secret", lambda self, wanted: bytes(32))
        patch.setattr(gate, "noisy_clipped_sum", summed)
        patch.setattr(Opened, "say", heard)
        opened = opened_job(study.job, None)
        carry(opened.server.round(), opened.exchange)
        between(opened)
        carry(opened.server.round(), opened.exchange)
        job = opened.sites["north"]._open_job(opened.job)
        assert isinstance(job, SiteJob)
        q = job._family.posterior(job._family.init())
        tensors = {f"{part}/{k}": v.contiguous() for part in ("eta", "theta") for k, v in getattr(q, part).items()}
        end = End("finished, converged", opened.server.state.accepted["east"], save(tensors))
        opened.exchange(dict.fromkeys(SILOS, END + CODEC.pack(end)))
        length = opened.sites["east"]._trail.chain.length
        for site in opened.sites.values():
            site.close()
    (record,) = read_ledger(study.home.ledger_file, "east")["east"].jobs.values()
    return Seen(forms, dict(record.released), length, sums)


def told(study: Study) -> tuple[int, str]:
    """What `secure-fvi status` says at east."""
    found = CliRunner().invoke(cli, ["status", "--home", str(study.home.path)])
    return found.exit_code, found.output


@pytest.fixture(scope="module")
def right(first_world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """The jobs of data that fit, by the unit of their privacy."""
    found = {}
    for unit, privacy in PRIVACY.items():
        root = tmp_path_factory.mktemp(unit)
        study = Study(first_world.copy(root / "world"), root / "job", privacy)
        found[unit] = ran(study)
        assert told(study) == (0, told(study)[1])
    return found


def same(right: Seen, wrong: Seen) -> bool:
    """Whether a server can tell the two by what it sees, noise aside."""
    return right[:3] == wrong[:3]


@pytest.mark.parametrize("same", [True, False])
def test_records_of_another_schema_than_is_known_without_them_are_nobodys(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """The site's schema would tell of its records, without noise; it is told alone. The control has the one known."""
    study, count = Study(world, tmp_path / "job", PRIVACY["record"]), itertools.count()
    if not same:
        monkeypatch.setattr(site_job, "schema_digest", lambda _: next(count))
    study.join()
    told = [path.read_text() for path in (study.home.state_folder / "jobs").glob("*/unfit")]
    assert ["its records say another schema" in text for text in told] == ([] if same else [True])


@pytest.mark.parametrize(
    ("line", "kind", "norms", "why"),
    [
        ("no,0,1,0,0,1", "boolean", 1, "own.csv': lines that cannot be read, 21"),
        ("no,0,7,0,0", "number", 2, "'wheeze' does not fit site 'wheeze' in 1 of 20 rows"),
    ],
    ids=["cannot be read", "does not fit the model"],
)
def test_of_one_record_that_does_not_fit_a_server_is_told_as_of_any(
    world: World, tmp_path: Path, right: dict[str, Seen], caplog: Any, line: str, kind: str, norms: int, why: str
) -> None:
    """Two worlds that differ in one record. Each message, its length, the ledger and the number of rows of the log are
    the same, and the sums to which noise is added differ by at most the clipping norm, 1, where the record is left out;
    by two, where it counts as it stands. The control: noise alone in place of the whole site's sum lies further off."""
    study = Study(world, tmp_path / "job", PRIVACY["record"])
    (study.home.path / "d.toml").write_text(DICTIONARY.replace(']"]\nkind = "boolean"', f']"]\nkind = "{kind}"'))
    study.spoil(line)
    wrong = ran(study)
    assert same(right["record"], wrong)
    one, other = right["record"].sums[0], wrong.sums[0]
    assert 0 < float((one - other).norm()) <= norms + 1e-9
    assert float(one.norm()) > 2.5
    status, said = told(study)
    assert status == 1
    assert why in said
    assert "the job goes on without the records that cannot be read" in said
    assert why in caplog.text
    assert line not in said + caplog.text


@pytest.mark.parametrize("tried", [True, False])
def test_a_cell_of_which_a_query_makes_no_row_is_one_record_less(
    world: World, tmp_path: Path, right: dict[str, Seen], monkeypatch: pytest.MonkeyPatch, tried: bool
) -> None:
    """A cast where a function stands in place of a table. The control leaves that as it is written, as it once was: the
    sum before noise is over no records, which is 2.5 clipping norms and more from that of all but one."""
    query = 'SELECT data.* FROM data, unnest([CAST("wheeze[0]" AS INTEGER)]) u(seen) WHERE seen >= 0'
    study = Study(world, tmp_path / "job", PRIVACY["record"], query=query)
    study.spoil("no,x,0,0,0")
    if not tried:
        monkeypatch.setattr(tables, "_tabled", lambda part, function, may: part)
    one, other = right["record"].sums[0], ran(study).sums[0]
    assert (0 < float((one - other).norm()) <= 1 + 1e-9) is tried
    assert bool(other.any()) is tried
    assert float(one.norm()) > 2.5


def test_of_data_that_cannot_be_used_there_is_noise(world: World, tmp_path: Path, right: dict[str, Seen]) -> None:
    """As above, of a silo that is private as a whole: the sums before noise are zero. The control: without privacy the
    site refuses, which is one bit without noise, three times and no more."""
    unit, line, why = "silo", "maybe,0,1,0,0", "'smoke': neither of its two values"
    other = world.copy(tmp_path / "other")  # the ledger of this one will have a budget, which exact jobs keep off
    study = Study(world, tmp_path / "job", PRIVACY[unit])
    study.spoil(line)
    wrong = ran(study)
    assert same(right[unit], wrong)
    assert not any(bool(total.any()) for total in wrong.sums)
    assert any(bool(total.any()) for total in right[unit].sums)
    status, said = told(study)
    assert status == 1
    assert why in said
    assert "what leaves is noise" in said
    plain = Study(other, tmp_path / "plain", None)
    plain.spoil(line)
    with pytest.raises(DataError, match=why):
        plain.join()


#: Files of a site's folder that lie in clear, each by a word of the page; those sealed; and the site's own table.
CLEAR = {
    "policy.toml": "policy", "accepted.json": "rosters", "site.toml": "rosters", "identity.pub": "rosters",
    "tls.crt": "rosters", "rosters": "rosters", "audit-log.sqlite": "paper trail", "ledger.sqlite": "ledger",
    "seen.sqlite": "seen of others", "offer": "offer", "ended": "sessions", "session": "sessions",
    "sessions": "sessions", "fresh": "sessions", "cohort": "keyed digests", "cohorts.json": "`cohorts.json`",
    "unfit": "`unfit`", "results": "`results/`", "lock": "", "going.json": "",
}  # fmt: skip
SEALED = {"identity.pem", "tls.key", "state.key", "questions.signed", "SESSION.sqlite", "secret"}


def test_what_lies_in_clear_is_on_the_page(world: World, tmp_path: Path) -> None:
    """Of a job with a record that cannot be read, after a round and at its end. The control is a page without a word
    of it; and no file in clear has a line of the table, which itself does."""
    page = (Path(__file__).parents[2] / "docs" / "threat-model-deployment.md").read_text()
    said = " ".join(page.partition("\n## At rest\n")[2].partition("\n## ")[0].split())
    study, found = Study(world, tmp_path / "job", PRIVACY["record"]), dict[str, bytes]()
    study.spoil("no,0,1,0,0,1")

    def look(*_: object) -> None:
        for path in study.home.path.rglob("*"):
            at = path.relative_to(study.home.path).parts
            name = at[0] if at[0] in ("rosters", "results") else at[-1].removesuffix("-wal").removesuffix("-shm")
            name = "SESSION.sqlite" if len(name) == 71 else name
            if path.is_file() and name not in ("own.csv", "d.toml"):
                found[name] = found.get(name, b"") + path.read_bytes()

    ran(study, look)
    look()
    assert found.keys() - SEALED <= CLEAR.keys()
    assert {"unfit", "cohorts.json", "results", "SESSION.sqlite", "questions.signed"} <= found.keys()
    assert all(word in said for word in CLEAR.values())
    assert not all(word in said.replace("unfit", "") for word in CLEAR.values())
    assert b"lines that cannot be read, 21" in found["unfit"]
    assert b"no,0,1,0,0" in study.table.read_bytes()
    assert not any(b"no,0,1,0,0" in content for content in found.values())


def test_of_records_that_take_more_memory_than_there_is_there_is_noise(
    world: World, tmp_path: Path, right: dict[str, Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many there are decides on it, so no refusal tells."""
    made = site_job.silo_view

    def view(silo: str, problem: Any, records: Any, *rest: Any) -> Any:
        if silo == "east" and records.size:
            raise MemoryError
        return made(silo, problem, records, *rest)

    monkeypatch.setattr(site_job, "silo_view", view)
    study = Study(world, tmp_path / "job", PRIVACY["record"])
    wrong = ran(study)
    assert same(right["record"], wrong)
    assert not any(bool(total.any()) for total in wrong.sums)
    assert "MemoryError" in told(study)[1]


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "changes": ({"name": "pvi", "rounds": 2, "local_steps": 3}, {"unit": "record", "noise": "silo"}),
    "pvi of silos": ({"name": "pvi", "rounds": 2, "local_steps": 3}, {"unit": "silo", "noise": "silo"}),
    "sfvi-avg": (
        {"name": "sfvi-avg", "rounds": 2, "local_steps": 3, "family": "diagonal", "weights": "equal"}
        | {"total_records": 60},
        {"unit": "silo"},
    ),
    "server": (SFVI, {"unit": "record", "noise": "server"}),
    "server, of silos": (SFVI, {"unit": "silo", "noise": "server"}),
    "samples and the bound": (SFVI | {"sampling_rate": 0.5}, {"unit": "record", "objective_share": 0.2}),
    "a norm that adapts": (SFVI, {"unit": "silo", "target_quantile": 0.5}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_so_it_is_of_other_algorithms_and_options(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Of silos' privacy a cell that no dictionary knows, of records' more than there is memory for. The control, that
    none of it is used: the site's own people are told."""
    algorithm, privacy = OTHERS[case]
    made = site_job.silo_view

    def view(silo: str, problem: Any, records: Any, *rest: Any) -> Any:
        if silo == "east" and records.size:
            raise MemoryError
        return made(silo, problem, records, *rest)

    seen = []
    for fits in (True, False):
        where = world.copy(tmp_path / f"world{fits}")
        study = Study(where, tmp_path / f"job{fits}", {**_NOISE, **privacy}, algorithm)
        if not fits and privacy["unit"] == "silo":
            study.spoil("maybe,0,1,0,0")
        elif not fits:
            monkeypatch.setattr(site_job, "silo_view", view)
        seen.append(ran(study))
        assert told(study)[0] == int(not fits)
    assert same(*seen)


@pytest.mark.slow
def test_a_job_that_was_begun_with_data_goes_on_without(world: World, tmp_path: Path) -> None:
    """The process is killed after a round, twice, and the file changed meanwhile, by a record, and mended: the server
    sees what it does where the file stays as it is, and there is noise alone from then on."""
    seen, left = list[Seen](), list[str]()
    for more in ("", "no,1,1,1,1\n"):
        study = Study(world.copy(tmp_path / f"world{len(more)}"), tmp_path / f"job{len(more)}", PRIVACY["record"])
        whole = study.table.read_text()

        def killed(opened: Opened, study: Study = study, whole: str = whole, more: str = more) -> None:
            site = opened.sites["east"]
            for content in (whole + more, whole):
                site._let_go()  # what a kill leaves is in the folder
                study.table.write_text(content)
                job = site._open_job(opened.job)
                assert isinstance(job, SiteJob)
                left.append(job.unfit.said)

        seen.append(ran(study, killed))
    assert same(*seen)
    assert ["not those that the job began with" in said for said in left] == [False, False, True, True]
    assert [bool(total.any()) for seen_ in seen for total in seen_.sums] == [True, True, True, False]


@pytest.mark.parametrize("held", [True, False])
def test_rows_in_another_order_than_a_job_began_with_are_not_used(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """What a silo keeps of each record is found by its place. The process ends after a round, the table is written
    anew in another order, and in one of two worlds it lacks a record; what is released is the same in both. The control
    takes the rows all the same: the sums of the next round differ by more than the clipping norm, 1."""
    made, sums = gate.noisy_clipped_sum, list[list[torch.Tensor]]()

    def unseen(chunks: Any, sizes: Any, norms: Any, noise: Any) -> Any:
        return made(chunks, sizes, norms, lambda total: (noise(total), torch.zeros_like(total))[1])

    def turned(opened: Opened) -> None:
        opened.sites["east"]._let_go()  # what a kill leaves is in the folder
        head, *rows = study.table.read_text().splitlines()
        study.table.write_text("\n".join([head, *reversed(rows)]) + "\n")

    monkeypatch.setattr(gate, "noisy_clipped_sum", unseen)
    if not held:
        monkeypatch.setattr(site_job, "order_digest", lambda rows: "")
    for name in ("whole", "lacking"):
        algorithm = {**SFVI, "local_learning_rate": 1.0}
        study = Study(world.copy(tmp_path / name), tmp_path / f"job-{name}", PRIVACY["record"], algorithm)
        if name == "lacking":
            study.spoil("no,0,1,0,0,1")
        sums.append(ran(study, turned).sums)
        assert ("in another order" in told(study)[1]) == held
    first, second = (float((a - b).norm()) for a, b in zip(*sums, strict=True))
    assert 0.5 < first <= 1 + 1e-9
    assert second == 0 if held else second > 1.2


def test_what_records_have_no_say_in_is_refused(world: World, tmp_path: Path) -> None:
    """A dictionary or a file that is not there is so whatever the records are. So is a job whose schema records alone
    say, of arrays for one: that is refused as without privacy, and three times at most."""
    study = Study(world, tmp_path / "job", PRIVACY["record"])
    dictionary = (study.home.path / "d.toml").read_text()

    def refused(words: str) -> None:
        with pytest.raises(DataError, match=words):
            study.join()

    (study.home.path / "d.toml").unlink()
    refused("cannot read dictionary")
    (study.home.path / "d.toml").write_text(dictionary)
    study.table.rename(study.home.path / "away.csv")
    refused("no file")
    (study.home.path / "own.npz").write_bytes(b"PK")
    study.allow("east", path="own.npz")
    refused("own.npz")
    with pytest.raises(PolicyError, match="max_unanswered = 3"):
        study.join()
    assert not study.home.ledger_file.exists()


def test_a_single_job_that_data_did_not_fit_ends_in_an_error_of_its_own(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`silo start --once` exits 2 where the site's own people have something to do; the control is a job that fits."""
    home = world.homes["east"]
    for name, says in (("one", ""), ("two", "smoke: a level")):
        folder = site_job.job_folder(home, name)
        folder.mkdir(parents=True)
        if says:
            Unfit(folder, "east").tell(says)

        class Client:
            def __init__(self, of: Any, name: str = name) -> None:
                self.run = lambda: of._on_end(name, None)
                self.stop = lambda: None

        monkeypatch.setattr(site_of, "client_of", lambda home, address, server, handle: Client(handle.__self__))
        with pytest.raises(DataError, match=says) if says else nullcontext():
            site_of.run_site(home, "127.0.0.1:1", once=True)
