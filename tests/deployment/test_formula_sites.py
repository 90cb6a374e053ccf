"""A formula between institutions: approved as text, its dictionary compared, each site's table coded at the site, and
the posterior of three processes that of one; and what a hostile offer of a formula comes to."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from consortium_run import SILOS, Job, met
from deployment_world import NOW, World
from fuzzing import opened_job
from test_processes import Processes

from secure_fvi.aggregation.base import carry
from secure_fvi.cli import cli
from secure_fvi.deployment import fence, policy_check, site_job
from secure_fvi.deployment.job import JobOffer, make_offer, read_offer, sign_offer
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.policy import read_policy, rule_of
from secure_fvi.deployment.policy_check import check
from secure_fvi.deployment.session_messages import CODEC, JOIN, Joined, unpack_schema
from secure_fvi.deployment.site import Site
from secure_fvi.deployment.site_job import Local, SiteJob
from secure_fvi.dictionary import dictionary_of
from secure_fvi.errors import AggregationError, DataError, InputError, PolicyError, ProtocolError
from secure_fvi.messages import ROUND, SUM, encode_broadcast
from secure_fvi.models.base import program
from secure_fvi.privacy.report import read_report
from secure_fvi.runs import records, wording
from secure_fvi.runs.config import Config, Model, Privacy
from secure_fvi.runs.records import model_of, settled
from secure_fvi.silo import UNANSWERABLE, Silo

FORMULA = "wheeze ~ smoke * age + (1 | child)"
DICTIONARY = """format = 1

[columns.wheeze]
kind = "boolean"

[columns.smoke]
kind = "category"
levels = ["no", "yes", "gave up"]
missing = ["?"]

[columns.age]
kind = "integer"
unit = "years"
low = 7
high = 10

[columns.child]
kind = "id"
"""
_QUICK = {"name": "sfvi", "iterations": 4}


class Study:
    """Three sites, each with a table of its own of some of the six cities children, a row a visit, and the job."""

    def __init__(
        self, world: World, folder: Path, children: int = 30, algorithm: Any = _QUICK, privacy: Any = None, **model: Any
    ) -> None:
        self.world, self.folder, self.children = world, folder, children
        (folder / "dictionary.toml").write_text(DICTIONARY)
        self.tables = {site: folder / f"{site}.csv" for site in SILOS}
        for at, site in enumerate(SILOS):
            self.write(site, self.rows(at))
        said = {"formula": FORMULA, "family": "bernoulli", "dictionary": "dictionary.toml"}
        said["options"] = {"most": {"rows": 4}, "priors": {"age": [0.0, 0.5]}}
        silos = [{"id": site, "data": f"{site}.csv"} for site in SILOS]
        tables = {"model": said | model, "partition": None, "silo": silos, "algorithm": algorithm}
        tables |= {} if privacy is None else {"privacy": privacy}
        self.job = Job(world, folder, allow=False, **tables)
        self.config: Config = settled(self.job.config)
        for site in SILOS:
            self.allow(site)

    def rows(self, at: int) -> list[str]:
        """No site has a child who gave up smoking; the first has none that is 10 years old."""
        held, out = program("six-cities").load().records, ["child,visit,age,smoke,wheeze"]
        for k in range(at, 537, 3)[:: 179 // self.children][: self.children]:  # the file is sorted by answers
            smoke = ["no", "yes"][int(held["smoke"][k])]
            out += [f"c{k},{t},{7 + t},{smoke},{int(held['wheeze'][k][t])}" for t in range(3 if at == 0 else 4)]
        return out

    def write(self, site: str, rows: list[str]) -> None:
        self.tables[site].write_text("\n".join(rows) + "\n")

    def allow(self, site: str, **changes: Any) -> None:
        """Policy and dictionary of a site, which allow this formula alone unless `changes` say otherwise."""
        home = self.world.homes[site]
        (home.path / "own.toml").write_text(changes.pop("dictionary", DICTIONARY))
        data = {"id": "data", "path": str(self.tables[site]), "dictionary": "own.toml", **changes.pop("data", {})}
        wanted = {
            "algorithms": [self.config.algorithm.name],
            "model": [rule_of(self.config.model)],
            "data": [data],
            **changes,
        }
        self.job.allow(site, **wanted)

    def offer(self, **model: Any) -> JobOffer:
        """What the server would offer, with `model` in place of what it says; its hash is right for that."""
        found = self.config.model_copy(update={"model": self.config.model.model_copy(update=model)})
        return make_offer(found, self.world.homes["hub"].roster(NOW), "hub", manifest(found).hash, NOW, "one")

    def join(self, offer: JobOffer | None = None, site: str = "east") -> Joined:
        """A site's answer to an offer that the server signed."""
        made = self.offer() if offer is None else offer
        at = Site(self.world.homes[site], Local(repeatable=True))
        try:
            met(self.world.homes["hub"], at)
            return CODEC.unpack(
                at.handle(made.job, JOIN + sign_offer(made, self.world.homes["hub"].identity())), Joined
            )
        finally:
            at.close()

    def log(self, site: str = "east") -> str:
        held = [path.read_bytes() for path in self.world.homes[site].path.rglob("audit-log.sqlite*")]
        return b"".join(held).decode("latin-1")


@pytest.fixture
def study(world: World, tmp_path: Path) -> Study:
    return Study(world, tmp_path)


@pytest.fixture(scope="module")
def of_all(first_world: World, tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("study")
    return Study(first_world.copy(folder / "world"), folder)


@pytest.fixture
def paper(of_all: Study) -> Study:
    """For tests that change nothing but east's policy and dictionary."""
    of_all.allow("east")
    return of_all


@pytest.mark.slow
def test_three_processes_fit_six_cities_by_formula_as_one_does(world: World, tmp_path: Path) -> None:
    """All 537 children, whose effects are integrated out at their site, by partitioned VI; four processes. The control:
    a child less at one site."""
    study = Study(world, tmp_path, 179, algorithm={"name": "pvi", "rounds": 3, "local_steps": 25})
    processes = Processes(study.job)
    try:
        for name in ("hub", *SILOS):
            processes.start(name)
        found = processes.finish(900)
    finally:
        processes.stop()
    assert found == study.job.local()
    assert "odds ratio" in processes.log("hub")
    study.write("east", study.rows(0)[:-3])
    assert study.job.local("fewer") != found


@pytest.mark.later
def test_a_job_by_formula_is_the_local_engines_to_the_last_bit(study: Study) -> None:
    """In threads over TLS. What makes it differ is the control of the test above."""
    assert study.job.run() == study.job.local()


def test_parts_of_sites_under_record_privacy_are_explained_run_and_charged(world: World, tmp_path: Path) -> None:
    """PVI of which each site deals its children to parts, over several rounds with noise in shares. The control is one
    part, which is refused there."""
    dp = {"unit": "record", "epsilon": 3.0, "delta": 1e-6, "noise": "distributed", "data_set": "data"}
    algorithm = {"name": "pvi", "rounds": 3, "virtual_clients": 4, "local_steps": 2}
    model = {"formula": "wheeze ~ smoke + age", "options": {}}
    study = Study(world, tmp_path, algorithm=algorithm, privacy=dp, **model)
    study.job.run()
    result = json.loads((tmp_path / "remote" / "result.json").read_text())
    assert result["rounds"] == 3
    assert 2.9 < result["privacy"]["epsilon"] <= 3.0
    assert all(world.homes[silo].ledger_file.exists() for silo in SILOS)
    explained = CliRunner().invoke(cli, ["policy", "explain", str(study.job.path)], catch_exceptions=False).output
    assert "the change of its sites of 4 parts, added up" in " ".join(explained.split())
    (tmp_path / "one").mkdir()
    with pytest.raises(InputError, match="a silo's state follows what it released"):
        Study(world, tmp_path / "one", algorithm=algorithm | {"virtual_clients": 1}, privacy=dp, **model).job.run()


def test_noised_steps_at_sites_are_explained_run_and_charged(world: World, tmp_path: Path) -> None:
    """PVI with the noise in the steps of each site's own fit: the ledgers of all are charged for each step. The control
    leaves the noise to a sum of shares, which no fit has."""
    dp = {"unit": "record", "epsilon": 3.0, "delta": 1e-6, "noise": "silo", "retries": 1, "data_set": "data"}
    algorithm = {
        "name": "pvi",
        "rounds": 2,
        "private": "steps",
        "local_steps": 3,
        "sampling_rate": 0.5,
        "scale_rate": 0.2,
    }
    model = {"formula": "wheeze ~ smoke + age", "options": {}}
    study = Study(world, tmp_path, algorithm=algorithm, privacy=dp, **model)
    study.job.run()
    result = json.loads((tmp_path / "remote" / "result.json").read_text())
    assert (result["rounds"], result["privacy"]["sds"]["count_noise"]) == (2, False)
    for silo in SILOS:
        (job,) = read_report(world.homes[silo].ledger_file, silo).jobs
        assert (job.terms[0]["count"], job.terms[0]["event"]["count"]) == (3, 3)
        assert job.epsilon == pytest.approx(result["privacy"]["epsilon"], rel=1e-6)
    explained = CliRunner().invoke(cli, ["policy", "explain", str(study.job.path)], catch_exceptions=False).output
    assert "follows from 3 sums over records that the silo noises in full" in " ".join(explained.split())
    (tmp_path / "one").mkdir()
    shares = dp | {"noise": "distributed"}
    with pytest.raises(InputError, match="use noise = 'silo'"):
        Study(world, tmp_path / "one", algorithm=algorithm | {"rounds": 1}, privacy=shares, **model).job.run()


@pytest.mark.later
def test_tables_of_sites_are_checked_by_one_sum_more(world: World, tmp_path: Path) -> None:
    """The observed numbers are those of all three tables together; the control, one silo's alone, are others."""
    study = Study(world, tmp_path, algorithm={"name": "pvi", "rounds": 1, "local_steps": 5, "replicates": 20})
    study.job.run()
    told = json.loads((tmp_path / "remote" / "result.json").read_text())["check"]
    assert told["replicates"] == 20
    observed = {row["name"]: row["observed"] for row in told["rows"]}
    wheezed = [[float(row.rsplit(",", 1)[1]) for row in study.rows(at)[1:]] for at in range(3)]
    assert observed["share of 1"] == pytest.approx(np.mean(np.concatenate(wheezed)), abs=1e-4)
    assert abs(observed["share of 1"] - np.mean(wheezed[0])) > 1e-3
    assert "Predictive check" in (tmp_path / "remote" / "report.html").read_text()
    explained = CliRunner().invoke(cli, ["policy", "explain", str(study.job.path)], catch_exceptions=False).output
    assert "replicates that the model makes at points that the server names" in " ".join(explained.split())


# ---- what a site agrees to ----


def test_a_site_agrees_to_a_formula_in_the_words_of_explain(study: Study) -> None:
    said = CliRunner().invoke(cli, ["policy", "explain", str(study.job.path)], catch_exceptions=False).output
    for words in (
        f"{FORMULA}  (family bernoulli)",
        "columns that it reads: age, child, smoke, wheeze",
        "by which sums and differential privacy count: all rows of a child",
        "prior of age: normal(0, 0.5)",
        "sfvi, masked sums, 3 silos, at most 4 rounds",
    ):
        assert words in said
    (rule,) = wording.loads(said[said.index("[[model]]") : said.index("\n\n")])["model"]
    study.allow("east", model=[rule])
    joined = study.join()
    assert joined.nonce
    for name, shape, kind in unpack_schema(joined.schema).fields:  # as `explain` says, and no number of records
        assert name.isprintable()
        assert kind.is_floating_point or str(kind).startswith("torch.int")
        assert study.children not in shape
    assert "names, types and shapes of what the model reads of a record" in said
    assert "cohort" in study.log()


@pytest.mark.parametrize(
    ("rule", "offered"),
    [
        ({"formula": "wheeze ~ smoke + age + (1 | child)"}, {}),
        ({"formula": ["wheeze ~ 1", "wheeze ~ smoke"]}, {}),
        ({"family": "gaussian"}, {}),
        ({"record": "child"}, {}),
        ({"most": {"rows": 5}}, {}),
        ({"most": {}}, {}),
        ({"priors": {}}, {}),
        ({"priors": {"age": [0.0, 0.6]}}, {}),
        ({}, {"options": {"most": {"rows": 4}, "priors": {"age": [0.0, 0.5], "(Intercept)": [900.0, 1.0]}}}),
        ({}, {"options": {"most": {"rows": 4, "child": 900}}}),
        ({}, {"formula": FORMULA + " + (1 | smoke)"}),
        ({}, {"family": "poisson"}),
        ({}, {"options": {"most": {"rows": 4}, "record": "child"}}),
        ({"formula": "wheeze ~ smoke  *  age + (1 | child)"}, None),
        ({"formula": ["wheeze ~ 1", FORMULA], "family": ["poisson", "bernoulli"]}, None),
        ({"formula": "any", "family": "any", "record": "any", "most": "any", "priors": "any"}, None),
    ],
)
def test_what_a_site_did_not_agree_to_is_refused(paper: Study, rule: Any, offered: Any) -> None:
    """The last three, without `offered`, are the control: the same job, agreed to in other words."""
    paper.allow("east", model=[rule_of(paper.config.model) | rule])
    policy = read_policy(paper.world.homes["east"].policy_file)
    if offered is None:
        assert check(paper.offer(), policy) is not None
        return
    with pytest.raises(PolicyError, match=r"formula '.*', family .* is not accepted"):
        check(paper.offer(**offered), policy)


def test_a_formulas_hash_is_over_all_that_it_follows_from(paper: Study) -> None:
    """A site may agree to the hash as well; whatever changes the model changes it, and what does not does not."""
    paper.allow("east", model=[{"hash": paper.offer().model.hex()}])
    policy = read_policy(paper.world.homes["east"].policy_file)
    assert check(paper.offer(), policy) is not None
    model = paper.config.model
    assert isinstance(model.dictionary, dict)
    wider = dictionary_of(wording.loads(DICTIONARY.replace("high = 10", "high = 11")), "d").to_table()
    changes: list[dict[str, Any]] = [
        {"formula": FORMULA + " "}, {"family": "poisson"}, {"dictionary": wider},
        {"options": {**model.options, "priors": {"age": [0.0, 0.6]}}},
        {"options": {**model.options, "record": "child"}},
    ]  # fmt: skip
    hashes = {paper.offer(**change).model for change in changes}
    assert len(hashes | {paper.offer().model}) == 1 + len(changes)
    columns = dict(reversed(model.dictionary["columns"].items()))
    again = {"format": 1, "columns": columns | {"age": columns["age"] | {"description": "at the visit"}}}
    assert paper.offer(dictionary=again).model == paper.offer().model


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ('kind = "integer"', 'kind = "number"', "'age' differs in kind"),
        ('"gave up"', '"stopped"', "'smoke' differs in levels"),
        ('["no", "yes", "gave up"]', '["yes", "no", "gave up"]', "'smoke' differs in levels"),
        ('unit = "years"', 'unit = "months"', "'age' differs in unit"),
        ("high = 10", "high = 12", "'age' differs in high"),
        ('missing = ["?"]', "", "'smoke' differs in missing"),
        ('kind = "id"', 'kind = "id"\nshared = true', "'child' differs in shared"),
        ("[columns.child]", "[columns.kid]", "'child' is not there"),
        ("[columns.child]", '[columns.height]\nkind = "number"\n[columns.child]', None),
        ('missing = ["?"]', 'missing = ["?", "-9"]\ndescription = "as asked"', None),
    ],
)
def test_a_job_whose_dictionary_is_not_the_sites_is_refused(
    paper: Study, mine: str, theirs: str, said: str | None
) -> None:
    """Its column is named, to the server too, and nothing else of the site's. The last two are the control."""
    assert DICTIONARY.count(mine) == 1
    paper.allow("east", dictionary=DICTIONARY.replace(mine, theirs))
    policy = read_policy(paper.world.homes["east"].policy_file)
    if said is None:
        assert check(paper.offer(), policy) is not None
        return
    with pytest.raises(PolicyError) as caught:
        check(paper.offer(), policy)
    assert f"its dictionary is not this site's: {said}" in str(caught.value)
    for secret in ("stopped", "months", "12", "kid", "own.toml"):
        assert secret not in str(caught.value)


def test_a_site_without_a_dictionary_takes_no_formula(paper: Study) -> None:
    for data, said in (
        ({"id": "data", "path": "own.csv"}, "has no dictionary"),
        ({"id": "data", "path": "own.csv", "dictionary": "other.toml"}, "cannot be read; see this site's log"),
    ):
        paper.job.allow("east", algorithms=["sfvi"], model=[rule_of(paper.config.model)], data=[data])
        with pytest.raises(PolicyError, match=said) as caught:
            check(paper.offer(), read_policy(paper.world.homes["east"].policy_file))
        assert "other.toml" not in str(caught.value)


# ---- tables ----


@pytest.mark.later
@pytest.mark.parametrize(
    ("row", "rule", "said"),
    [
        ("c3,0,8,stopped,1", {}, r"column 'smoke': a level that the dictionary lacks in 1 row \(91\)"),
        ("c3,0,11,no,1", {}, "column 'age': a value outside its range in 1 row"),
        ("c3,0,,no,1", {}, "column 'age': a gap in 1 row"),
        ("c3,0,8,?,1", {}, "column 'smoke': a gap in 1 row"),
        ("c15,0,8,no,1", {}, "1 of 30 records have more rows than the 4 that were agreed on"),
        ("c3,0,,no,1", {"missing": "drop"}, None),
        ("c3,x,8,no,1", {"query": "SELECT * FROM data WHERE visit <> 'x'"}, None),
    ],
)
def test_what_does_not_fit_is_refused_before_any_round_and_told_to_nobody(
    study: Study, row: str, rule: dict[str, str], said: str | None
) -> None:
    """The last two, which the site's policy leaves out, are the control: the rows that are used are those without."""
    assert study.join().nonce
    cohort = study.log().split("cohort ")[1][:64]
    study.write("east", [*study.rows(0), *([row] if "more rows" not in str(said) else [row, row])])
    study.allow("east", data=rule)
    again = dataclasses.replace(study.offer(), job="two")
    if said is None:
        assert study.join(again).nonce
        assert f"cohort {cohort}, as in job 'one'" in study.log()
    else:
        with pytest.raises(DataError, match=said):
            study.join(again)
        assert "its data do not fit the model" in study.log()
    for secret in ("stopped", "column", "smoke", "more rows", ".csv", "left out"):
        assert secret not in study.log().replace(FORMULA, "")


@pytest.mark.parametrize("former", [False, True])
def test_where_rows_are_pinned_one_record_decides_on_no_others(
    study: Study, monkeypatch: pytest.MonkeyPatch, former: bool
) -> None:
    """Of two jobs the second takes fewer rows of a record than one has. It is over all records but that one, and the
    log, in which whoever reads it has no noise, says that the rows are the same. The control, the former rule, held the
    rows that the job's own limit left against the pin: then one record took all 30 out of the sum."""
    made = site_job.formula_part
    if former:

        def left(config: Config, silo: str, model: Any, spoilt: list[str]) -> Any:
            rows, found = made(config, silo, model, spoilt)
            return rows, model.those_that_fit(found, silo, [])

        monkeypatch.setattr(site_job, "formula_part", left)
    noise = {"unit": "record", "epsilon": 0.3, "delta": 1e-6, "noise": "distributed", "data_set": "data"}
    study.config = study.config.model_copy(update={"privacy": Privacy(**noise)})
    allowed = {"dp": "optional", "max_epsilon": 1.0, "max_delta": 1e-5, "min_noise_multiplier": 0.1}
    allowed |= {"units": ["record"], "noise": ["distributed"]}
    study.write("east", [*study.rows(0), "c15,0,8,no,1", "c15,0,9,no,1"])  # five visits
    used = []
    for job, most in (("one", 5), ("two", 4)):
        options = {**study.config.model.options, "most": {"rows": most}}
        rule = rule_of(study.config.model.model_copy(update={"options": options}))
        data = {"cohort": "pinned", "epsilon": 3.0, "delta": 1e-5}
        study.allow("east", model=[rule], privacy=allowed, data=data)
        offer = dataclasses.replace(study.offer(options=options), job=job)
        with contextlib.closing(Site(study.world.homes["east"], Local())) as site:
            met(study.world.homes["hub"], site)
            site.handle(job, JOIN + sign_offer(offer, study.world.homes["hub"].identity()))
            assert isinstance(site._job, SiteJob)
            used.append(site._job.view.size)
    assert used == [30, 0 if former else 29]
    assert ("as in job 'one'" in study.log()) is not former


@pytest.mark.parametrize("former", [False, True])
def test_a_log_says_no_more_of_rows_that_are_not_used_than_of_others(
    study: Study, monkeypatch: pytest.MonkeyPatch, former: bool
) -> None:
    """Of jobs under privacy of silos on a table that changed after the first: once where it fits, once where it cannot
    be used. The control, the former digest, is one for all of a site: jobs on other columns, of which each digest of
    rows is another, show by it that neither uses any."""
    if former:
        made = site_job.Cohort.__init__

        def said_once(self: Any, *rest: Any) -> None:
            made(self, *rest)
            self.digest = bytes(32) if self._none else self.digest

        monkeypatch.setattr(site_job.Cohort, "__init__", said_once)
    noise = {"unit": "silo", "epsilon": 0.3, "delta": 1e-6, "noise": "distributed", "data_set": "data"}
    study.config = study.config.model_copy(update={"privacy": Privacy(**noise)})
    allowed = {"dp": "optional", "max_epsilon": 1.0, "max_delta": 1e-5, "min_noise_multiplier": 0.1}
    allowed |= {"units": ["silo"], "noise": ["distributed"]}
    data = {"epsilon": 3.0, "delta": 1e-5, "unit": "silo"}
    shorter = study.config.model.model_copy(update={"formula": "wheeze ~ age + (1 | child)"})
    study.allow("east", model=[rule_of(study.config.model), rule_of(shorter)], privacy=allowed, data=data)
    used = []
    for row, jobs in (("", ("one",)), ("c15,0,8,no,1", ("two",)), ("c15,0,11,no,1", ("four", "five", "six"))):
        study.write("east", [*study.rows(0), *([row] if row else [])])
        for job in jobs:
            offer = dataclasses.replace(study.offer(formula=shorter.formula if job == "six" else FORMULA), job=job)
            with contextlib.closing(Site(study.world.homes["east"], Local())) as site:
                met(study.world.homes["hub"], site)
                site.handle(job, JOIN + sign_offer(offer, study.world.homes["hub"].identity()))
                assert isinstance(site._job, SiteJob)
                used.append(not site._job.unfit.whole)
    assert used == [True, True, False, False, False]
    for before, job in (("other rows than in", "one"), ("other rows than in", "two"), ("as in", "four")):
        assert f"{before} job '{job}'" in study.log()
    assert ("other rows than in job 'five'" in study.log()) is not former


@pytest.mark.parametrize("former", [False, True])
def test_where_rows_are_pinned_a_gap_in_another_formulas_column_decides_on_no_others(
    study: Study, monkeypatch: pytest.MonkeyPatch, former: bool
) -> None:
    """Where the server adds the noise, rows with a gap in a column of any formula of the policy are left out; in a job
    whose sites add it they are not. Of one formula's two jobs the second is over all children but one's visit, and says
    that the rows are the same. The control, the former rule, held the rows without that gap against the pin: one record
    took all 30 out of a sum that the server sees."""
    if former:
        part = functools.partial(records.formula_part, spoilt=[])
        monkeypatch.setattr(site_job, "formula_rows_alone", lambda *named: part(*named)[1])
    second = "wheeze ~ 1 + (1 | child)"
    rows = study.rows(0)
    study.write("east", [*rows[:-1], rows[-1].replace(",no,", ",,").replace(",yes,", ",,")])
    allowed = {"dp": "optional", "max_epsilon": 1.0, "max_delta": 1e-5, "min_noise_multiplier": 0.1}
    allowed |= {"units": ["record"], "noise": ["server", "silo"]}
    rule = {"formula": [FORMULA, second], "family": "bernoulli", "priors": "any", "most": {"rows": 4}}
    data = {"cohort": "pinned", "epsilon": 3.0, "delta": 1e-5}
    visits = []
    for job, noise in (("one", "silo"), ("two", "server")):
        said = {"unit": "record", "epsilon": 0.3, "delta": 1e-6, "noise": noise, "data_set": "data"}
        study.config = study.config.model_copy(update={"privacy": Privacy.model_validate(said)})
        study.allow("east", model=[rule], privacy=allowed, data=data)
        offer = dataclasses.replace(study.offer(formula=second, options={"most": {"rows": 4}}), job=job)
        with contextlib.closing(Site(study.world.homes["east"], Local())) as site:
            met(study.world.homes["hub"], site)
            site.handle(job, JOIN + sign_offer(offer, study.world.homes["hub"].identity()))
            assert isinstance(site._job, SiteJob)
            visits.append(int(site._job.view.rows["present"][: site._job.view.size].sum()))
    assert visits == [90, 0 if former else 89]
    assert ("as in job 'one'" in study.log()) is not former
    for formulas in ([FORMULA, second], second):  # a job goes on under what left rows out when it began, or with none
        study.allow("east", model=[rule | {"formula": formulas}], privacy=allowed, data=data)
        with contextlib.closing(Site(study.world.homes["east"], Local())) as site:
            met(study.world.homes["hub"], site)
            site.handle("two", JOIN + sign_offer(offer, study.world.homes["hub"].identity()))
            assert isinstance(site._job, SiteJob)
            assert site._job.unfit.whole is (former or formulas == second)


@pytest.mark.slow  # what reads the table is of the first tier, in test_table_files.py
def test_a_visit_that_stands_twice_is_refused_by_an_id_that_the_formula_does_not_name(study: Study) -> None:
    """The control: the same table under a dictionary that does not call the id unique."""
    head, *rows = study.rows(0)
    once = [f"{head},stay_no", *(f"{row},s{k}" for k, row in enumerate(rows))]
    by = DICTIONARY + '[columns.stay_no]\nkind = "id"\n'
    study.write("east", [*once[:-3], *(row.replace(",s8", ",s1") for row in once[-3:])])
    study.allow("east", dictionary=by)
    assert study.join().nonce
    study.allow("east", dictionary=by + "unique = true\n")
    with pytest.raises(DataError, match=r"column 'stay_no': an id of an earlier row in 3 rows \(88, 89, 90\)"):
        study.join(dataclasses.replace(study.offer(), job="two"))
    assert "its data do not fit the model" in study.log()
    assert "stay_no" not in study.log()


# ---- hostile offers ----

_RUN = "().__class__.__base__.__subclasses__()[0].__init__.__globals__['__builtins__']['open']('FILE', 'w')"
HOSTILE = [
    f"wheeze ~ {{{_RUN}}}",
    "wheeze ~ {open('FILE', 'w')}",
    "wheeze ~ {__import__('os').system('touch FILE')}",
    "wheeze ~ I(__import__('pathlib').Path('FILE').touch())",
    "wheeze ~ C(smoke, open('FILE', 'w'))",
    "wheeze ~ C(smoke, contr.treatment(open('FILE', 'w')))",
    "wheeze ~ C(smoke, contr.__class__)",
    "wheeze ~ {contr.treatment.__globals__}",
    "wheeze ~ {[open(f, 'w') for f in ['FILE']]}",
    "wheeze ~ {(lambda: open('FILE', 'w'))()}",
    "wheeze ~ {age if open('FILE', 'w') else age}",
    "wheeze ~ {age + (x := open('FILE', 'w'))}",
    "wheeze ~ {f'{open(chr(70), chr(119))}'}",
    "wheeze ~ poly(age, open('FILE', 'w'))",
    "wheeze ~ bs(age, df=__import__('os').system('touch FILE'))",
    "wheeze ~ `age` + {exec(\"open('FILE', 'w')\")}",
    "wheeze | weights(open('FILE', 'w')) ~ age",
    "wheeze ~ age + offset(open('FILE', 'w'))",
    "wheeze ~ (1 + {open('FILE', 'w')} | child)",
    "wheeze ~ (1 | open('FILE', 'w'))",
    "{open('FILE', 'w')} ~ age",
    "wheeze ~ {age.to_csv('FILE')}",
    "wheeze ~ {age * 9 ** 9 ** 9}",
    "wheeze ~ age ** 99999999",
    f"wheeze ~ ({'+'.join(['smoke', 'age'] * 20)})**10",
    "wheeze ~ " + "*".join(f"I(age + {k})" for k in range(30)),
    "wheeze ~ bs(age, df=100000000)",
    "wheeze ~ poly(age, 900)",
    "wheeze ~ {" + "-" * 3900 + "age}",
    "wheeze ~ " + "age + " * 3000 + "age",
    "wheeze ~ " + " + ".join(f"(0 + I(age + {k}) | child)" for k in range(60)),
    "wheeze ~ smoke\x1b[2K + age",
    "wheeze ~ smoke \u202e+ age",
]


def test_a_hostile_formula_reaches_no_python_and_ends_soon(paper: Study, tmp_path: Path) -> None:
    """At a site that agreed to any formula, by offers that the server signed."""
    paper.allow("east", model=[{"formula": "any", "family": "any", "record": "any", "most": "any", "priors": "any"}])
    policy, made = read_policy(paper.world.homes["east"].policy_file), tmp_path / "made"
    assert check(paper.offer(), policy) is not None  # the control
    for text in HOSTILE:
        began = time.process_time()
        with pytest.raises(PolicyError, match="it cannot be read here") as caught:
            check(paper.offer(formula=text.replace("FILE", str(made))), policy)
        assert not made.exists(), text
        assert str(caught.value).isprintable()
        assert time.process_time() - began < 5, text


def test_the_control_formulaic_alone_runs_it(tmp_path: Path) -> None:
    import pandas as pd
    from formulaic import Formula

    made = tmp_path / "made"
    with contextlib.suppress(Exception):
        Formula(HOSTILE[2].partition("~")[2].replace("FILE", str(made))).get_model_matrix(pd.DataFrame({"age": [1.0]}))
    assert made.exists()


def test_a_formula_that_is_altered_on_its_way_is_refused(paper: Study) -> None:
    offer, hub, roster = paper.offer(), paper.world.homes["hub"], paper.world.homes["east"].roster(NOW)
    sent = sign_offer(offer, hub.identity())
    assert read_offer(sent, roster, "east", NOW) == offer  # the control
    for a, b in ((b"smoke * age", b"smoke + age"), (b'"gave up"', b'"gave UP"'), (b"bernoulli", b"bernoully")):
        assert a in sent
        with pytest.raises(ProtocolError, match="not signed by the identity of 'hub'"):
            read_offer(sent.replace(a, b), roster, "east", NOW)
    # Signed by the server itself, under the hash of what the site agreed to.
    policy = read_policy(paper.world.homes["east"].policy_file)
    paper.allow("east", model=[rule_of(paper.config.model) | {"priors": "any"}])
    policy = read_policy(paper.world.homes["east"].policy_file)
    other = paper.offer(options={"most": {"rows": 4}, "priors": {"age": [0.0, 1e-9]}})
    with pytest.raises(PolicyError, match="the model here hashes to"):
        check(dataclasses.replace(other, model=offer.model), policy)


@pytest.mark.parametrize("name", ["/etc/passwd", "own.toml"])
def test_a_server_names_no_dictionary_of_the_site(paper: Study, name: str) -> None:
    offer = paper.offer()
    model = offer.config.model.model_copy(update={"dictionary": name})
    forged = dataclasses.replace(offer, config=offer.config.model_copy(update={"model": model}))
    sent = sign_offer(forged, paper.world.homes["hub"].identity())
    with pytest.raises(ProtocolError, match="names files"):
        read_offer(sent, paper.world.homes["east"].roster(NOW), "east", NOW)


@pytest.mark.parametrize(
    "model",
    [
        {"options": {"most": {"rows": 10**12}}}, {"options": {"most": {"rows": -1}}}, {"options": {"most": {}}},
        {"options": {"most": {"rows": 4}, "priors": {"age": [0.0, float("inf")]}}},
        {"options": {"most": {"rows": 4}, "priors": {"age": "__import__"}}},
        {"options": {"most": {"rows": 4}, "fn": "os.system"}}, {"options": {"most": {"rows": 4}, "shared": "child"}},
        {"options": {"most": {"rows": 4}, "missing": "guess"}}, {"family": "__class__"},
        {"dictionary": {"format": 1, "columns": {"wheeze": {"kind": "boolean", "code": "x"}}}},
        {"dictionary": {"format": 2, "columns": {}}}, {"dictionary": {"columns": 7}},
    ],
)  # fmt: skip
def test_a_hostile_option_or_dictionary_is_refused(paper: Study, model: dict[str, Any]) -> None:
    paper.allow("east", model=[{"formula": "any", "family": "any", "record": "any", "most": "any", "priors": "any"}])
    found = paper.config.model_copy(update={"model": paper.config.model.model_copy(update=model)})
    offer = dataclasses.replace(paper.offer(), config=found)
    with contextlib.suppress(InputError):  # under its own hash, where it has one
        offer = dataclasses.replace(offer, model=manifest(found).hash)
    with pytest.raises(PolicyError, match=r"it cannot be read here"):
        check(offer, read_policy(paper.world.homes["east"].policy_file))


def test_a_giant_dictionary_is_refused_soon(paper: Study) -> None:
    """As many levels as an offer can hold, at a site that agrees to any formula."""
    paper.allow("east", model=[{"formula": "any", "family": "any", "most": "any", "priors": "any"}])
    policy, table = read_policy(paper.world.homes["east"].policy_file), paper.config.model.dictionary
    assert isinstance(table, dict)
    columns = table["columns"] | {"smoke": {"kind": "category", "levels": [f"l{k}" for k in range(90_000)]}}
    sent = sign_offer(paper.offer(dictionary=table | {"columns": columns}), paper.world.homes["hub"].identity())
    began = time.process_time()
    found = read_offer(sent, paper.world.homes["east"].roster(NOW), "east", NOW)
    with pytest.raises(PolicyError, match="'smoke' differs in levels"):
        check(found, policy)
    assert time.process_time() - began < 10
    # The same levels at the site: the design that would follow is refused before it is made.
    own = dictionary_of(wording.loads(DICTIONARY), "d").to_table()
    own["columns"]["smoke"] = {"kind": "category", "levels": [f"l{k}" for k in range(60_000)]}
    paper.allow(
        "east",
        model=[{"formula": "any", "family": "any", "most": "any", "priors": "any"}],
        dictionary=wording.dumps(own),
    )
    policy = read_policy(paper.world.homes["east"].policy_file)
    with pytest.raises(PolicyError, match="columns, of 1000 at most"):
        check(paper.offer(dictionary=own), policy)


def test_a_formula_needs_no_sandbox_and_imports_no_file(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy's sandbox is "required", and there is none here. The control: a function of a file would need both."""
    reached: list[str] = []

    def reach(name: str) -> Any:
        return lambda *_: reached.append(name) or print

    for module, name in ((fence, "_tool"), (policy_check, "check_fence"), (records, "python_function")):
        monkeypatch.setattr(module, name, reach(name))
    assert study.join().nonce
    assert not reached
    path = study.folder / "model.py"
    path.write_text("def model(y):\n    pass\n")
    told = {"model": Model(function=f"{path}:model")}
    found = study.config.model_copy(update=told)
    study.allow("north", model=[{"hash": manifest(found).hash.hex(), "function": f"{path}:model"}])
    offer = make_offer(found, study.world.homes["hub"].roster(NOW), "hub", manifest(found).hash, NOW, "one")
    check(offer, read_policy(study.world.homes["north"].policy_file))
    records.model_of(found)
    assert reached == ["check_fence", "python_function"]


# ---- a server that asks round after round where one site's values pass a bound ----

COUNTS = """format = 1
[columns.y]
kind = "integer"
low = 0
high = 20
[columns.x]
kind = "number"
low = 0
high = 1000
"""
#: What the sums' bound is, as a power of e.
_BOUND = 30 * math.log(2)


class Counts(Study):
    """Poisson counts, and one record of the first site that is far above all others of any site."""

    LARGEST = 83.4719

    def rows(self, at: int) -> list[str]:
        rng = np.random.default_rng(at)
        x, y = rng.uniform(20, 40, 40).round(4), rng.integers(0, 9, 40)
        x[20] = self.LARGEST if at == 0 else 44.0
        return ["y,x", *(f"{a},{b}" for a, b in zip(y, x, strict=True))]


def _walked(study: Counts, steps: list[float]) -> tuple[list[int], list[str], str]:
    """What east says, alone, in round after round, each at a Z_G at which a record with x above one of `steps` makes
    its term pass the bound: lengths of its answers, up to a refusal; its site's log, and what its own people are told.

    No other site is asked, and no sum is made: the server only says that the last one was used."""
    found = opened_job(study.job, None)
    try:
        program: Any = found.server.program
        density, first = program.problem.density, program.broadcast(program.init(), 1, {})
        n = first.tensors["z_global"].numel()
        model: Any = model_of(study.config)[0]

        def readable(z: torch.Tensor) -> list[float]:
            values = {name: value[None] for name, value in density.constrain(z, {})[0].items()}
            told = model.readable(values)
            return [float(told[name].reshape(-1)[0]) for name in sorted(told, key=lambda name: name.endswith("x"))]

        base = readable(torch.zeros(n).double())
        moves = [np.subtract(readable(unit), base) for unit in torch.eye(n).double()]
        carry(found.server.secure_sum.prepare(1), lambda asked: found.exchange({s: SUM + m for s, m in asked.items()}))
        lengths, slope = list[int](), 600.0 / steps[0]
        for r, step in enumerate(steps):
            # |x - 500| / 250 exp(a + slope x) is the largest element of a record's term.
            wanted = _BOUND - slope * step - math.log(max(1.0, abs(step - 500) / 250)), slope
            z = torch.tensor(np.linalg.solve(np.transpose(moves), np.subtract(wanted, base)))
            tensors = {"z_global": z, "shift": torch.zeros(n).double()}
            used, sums = dict.fromkeys(first.cohort, r), ((r, r - 1, "round", 0),) if r else ()
            message = first._replace(round=r, sum_index=r + 1, accepted=used, tensors=tensors, sums=sums)
            try:
                lengths.append(len(found.say("east", ROUND + encode_broadcast(message))))
            except AggregationError:
                break
        trail = found.sites["east"]._trail
        assert trail is not None
        job = found.sites["east"]._open_job(found.job)
        assert isinstance(job, SiteJob)
        return lengths, list(trail.chain.jobs[found.job].omissions), job.unfit.said
    finally:
        for site in found.sites.values():
            site.close()


@pytest.mark.later
@pytest.mark.parametrize("kept", [True, False])
def test_rounds_asked_of_one_site_do_not_say_where_its_values_pass_a_bound(
    first_world: World, tmp_path: Path, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site with default limits, masked sums: all rounds are answered alike, its log has no word more than where
    nothing passes a bound, and its own people are told. The control, in which the site says it to the server: the round
    in which it does so is where its largest x lies, among 24 places."""
    monkeypatch.setattr(sys.modules[__name__], "DICTIONARY", COUNTS)
    if not kept:
        monkeypatch.setattr(Silo, "keeps_to_itself", False)
    steps = np.linspace(200.0, 50.0, 24).tolist()
    said = {}
    for largest in (Counts.LARGEST, 15.0):
        monkeypatch.setattr(Counts, "LARGEST", largest)
        folder = tmp_path / str(largest)
        folder.mkdir()
        options = {"formula": "y ~ x", "family": "poisson", "options": {"most": {"rows": 1}}}
        study = Counts(first_world.copy(folder / "world"), folder, algorithm=_QUICK | {"iterations": 24}, **options)
        study.job.config = study.config
        for site in SILOS:
            study.allow(site, max_rounds=24, disclosures=[])
        said[largest] = _walked(study, steps)
    (lengths, log, told), alone = said.values()
    if kept:
        assert (lengths, log) == alone[:2] == ([lengths[0]] * 24, log)
        assert "its part of" in told or "cannot be computed" in told
        return
    assert abs(steps[len(lengths)] - 83.4719) <= steps[0] - steps[1]
    assert len(alone[0]) == 24
    assert UNANSWERABLE in log
