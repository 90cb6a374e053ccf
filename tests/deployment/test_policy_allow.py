"""`secure-fvi policy allow`: what it shows, asks and writes, and that a failure or a no leaves everything as it was."""

from __future__ import annotations

import copy
import functools
import importlib
import json
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from deployment_world import NOW, World
from test_formula_sites import DICTIONARY, FORMULA, Study

from secure_fvi import cli as cli_module
from secure_fvi.cli import cli
from secure_fvi.deployment.countersigning import open_ledger, open_trail
from secure_fvi.deployment.deciding import Decision, stated_policy
from secure_fvi.deployment.home import Home
from secure_fvi.deployment.keeping import TEMPLATE
from secure_fvi.deployment.model_hash import manifest
from secure_fvi.deployment.policy import read_policy, rule_of
from secure_fvi.deployment.policy_check import check
from secure_fvi.deployment.trail import JobEntry
from secure_fvi.deployment.trail_verify import verify
from secure_fvi.dictionary import dictionary_of
from secure_fvi.errors import PolicyError
from secure_fvi.privacy.ledger_terms import Budget
from secure_fvi.runs import records, wording
from secure_fvi.runs.config import Privacy
from secure_fvi.runs.reading import read
from secure_fvi.runs.records import formula_model, formula_part
from secure_fvi.silo import UNANSWERABLE

_FLOORS = ("min_cohort", "sandbox", "package", "privacy")


class Door:
    """East's folder with a new policy, and the command in it."""

    def __init__(self, world: World, folder: Path) -> None:
        self.study = Study(world, folder, algorithm={"name": "pvi"})
        self.home = world.homes["east"].path
        (self.home / "own.toml").unlink()
        self.policy = world.homes["east"].policy_file
        self.policy.write_text(TEMPLATE)
        self.policy.chmod(0o600)
        self.before = self.held()

    def held(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.home.iterdir() if path.is_file()}

    def allow(self, *more: str, said: str | None = None) -> Result:
        words = ["policy", "allow", str(self.study.job.path), "--home", str(self.home)]
        return CliRunner().invoke(cli, [*words, "--data", str(self.study.tables["east"]), *more], input=said)


@pytest.fixture
def door(world: World, tmp_path: Path) -> Door:
    return Door(world, tmp_path)


@pytest.mark.parametrize("known", ["ledger", "log", ""])
def test_what_log_and_ledger_have_against_a_job_is_said_beforehand(door: Door, known: str) -> None:
    """The command said that the site would take part, and the site refused. In the control neither has anything."""
    assert door.allow("--without-dp", "--yes").exit_code == 0
    home, policy = Home(door.home), read_policy(door.policy)
    data = next(iter(policy.data))
    if known == "ledger":
        with closing(open_ledger(home)) as ledger:
            ledger.set_budget(Budget(data, 1.0, 1e-6))
    elif known == "log":
        with closing(open_trail(home)) as trail:
            for i in range(policy.max_unanswered):
                entry = JobEntry(f"before-{i}", *[bytes(32)] * 4, accepted=True, data_set=data)
                trail.job(entry)
                trail.omission(entry.job, UNANSWERABLE, "its records")
    held = door.held()
    words = [str(door.study.job.path), "--home", str(door.home)]
    for command in (["policy", "check", *words], ["policy", "allow", *words, "--without-dp", "--yes"]):
        said = CliRunner().invoke(cli, command)
        if known:
            assert isinstance(said.exception, PolicyError)
            words_of = {"ledger": "exact totals do not keep to", "log": "could not answer"}
            assert words_of[known] in str(said.exception)
            assert door.held()["policy.toml"] == held["policy.toml"]
        else:
            assert "this site would take part" in said.output


@pytest.mark.later
def test_it_shows_asks_and_writes_what_the_job_needs_and_no_more(door: Door) -> None:
    answer = door.allow("--without-dp", said="y\n")
    assert answer.exit_code == 0, answer.output
    shown, _, after = answer.output.partition("Is this site to take part in such jobs?")
    for words in (f"{FORMULA}  (family bernoulli)", "a policy has to list 'final_likelihood'", "who learns a total"):
        assert words in shown
    assert "90 rows, 0 of them left out" in after
    assert "fewer than 10 records here have 'smoke' = yes (6), 'wheeze' = true (7)." in " ".join(after.split())
    assert (door.home / "data.dictionary.toml").is_file()
    found, before = wording.loads(door.policy.read_text()), wording.loads(TEMPLATE)
    before["privacy"]["dp"] = "optional"
    assert {key: found[key] for key in _FLOORS} == {key: before[key] for key in _FLOORS}
    assert (found["algorithms"], found["disclosures"]) == (["pvi"], ["final_likelihood"])
    assert "max_missing" not in found
    assert "max_differences" not in found
    once = door.policy.read_bytes()
    again = ["policy", "allow", str(door.study.job.path), "--home", str(door.home), "--yes"]
    assert CliRunner().invoke(cli, again).exit_code == 0  # again: nothing is added
    assert door.policy.read_bytes() == once


def test_a_check_sees_that_a_table_is_gone(door: Door) -> None:
    """The control: while it was there this site would take part."""
    assert door.allow("--without-dp", "--yes").exit_code == 0
    words = ["policy", "check", str(door.study.job.path), "--home", str(door.home)]
    assert "this site would take part" in CliRunner().invoke(cli, words).output
    door.study.tables["east"].unlink()
    answer = CliRunner().invoke(cli, words)
    assert (answer.exit_code, "would take part" in answer.output) == (1, False)
    assert f"no file '{door.study.tables['east']}' that can be read" in str(answer.exception)


def test_sums_that_may_lack_silos_are_let_in_as_far_as_the_job_says(door: Door) -> None:
    sums = ("--set", "aggregation.max_missing=1", "--set", "aggregation.max_differences=2")
    least = ("--set", "aggregation.min_cohort=2")
    refused = door.allow("--without-dp", "--yes", *sums, *least)
    assert refused.exit_code != 0
    assert door.held() == door.before  # min_cohort is a floor
    door.policy.write_text(TEMPLATE.replace("min_cohort = 3", "min_cohort = 2"))
    answer = door.allow("--without-dp", "--yes", *sums, *least)
    assert answer.exit_code == 0, answer.output
    found = wording.loads(door.policy.read_text())
    assert (found["max_missing"], found["max_differences"]) == (1, 2)


def test_sums_whose_shares_are_dealt_are_let_in_though_no_total_lacks_a_silo(door: Door) -> None:
    """The command wrote nothing of it, and its own check then refused the job."""
    answer = door.allow("--without-dp", "--yes", "--set", "aggregation.max_missing=1")
    assert answer.exit_code == 0, answer.output
    found = wording.loads(door.policy.read_text())
    assert (found["max_missing"], found.get("max_differences", 0)) == (1, 0)


def test_a_no_or_a_failure_leaves_all_as_it_was(door: Door) -> None:
    assert door.allow("--without-dp", said="n\n").exit_code != 0
    assert door.held() == door.before
    for more in ((), ("--without-dp", "--set", "aggregation.kind=plain", "--set", "model.family=gauss")):
        assert door.allow("--yes", *more).exit_code != 0  # dp is required; no such family
        assert door.held() == door.before
    door.study.write("east", [*door.study.rows(0), "c15,0,11,no,1"])
    answer = door.allow("--without-dp", "--yes")
    assert "a value outside its range" in str(answer.exception)
    assert door.held() == door.before
    door.study.write("east", door.study.rows(0))
    assert door.allow("--without-dp", "--yes").exit_code == 0  # the control
    assert door.held() != door.before


def test_it_warns_of_what_few_records_of_this_site_have(door: Door) -> None:
    """Where totals are exact: two children gave up smoking. The control is above: no child here did."""
    rows = door.study.rows(0)
    door.study.write("east", [rows[0], *(row.replace(",no,", ",gave up,") for row in rows[1:7]), *rows[7:]])
    answer = door.allow("--without-dp", "--yes")
    assert answer.exit_code == 0, answer.output
    assert "'smoke' = gave up (2)" in answer.output


@pytest.mark.parametrize("held", [True, False])
def test_two_formulas_leave_out_the_same_rows(door: Door, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One child has a gap in the second formula's column alone: rows of jobs by either formula differ by it, in totals
    at one point too. A site that has agreed to both leaves it out of both; one that has run the first refuses to agree
    to the second. The control leaves out each formula's own."""
    if not held:
        monkeypatch.setattr(Decision, "_complete", ())
    study, second = door.study, "wheeze ~ 1 + (1 | child)"
    rows = study.rows(0)
    study.write("east", [*rows[:-1], rows[-1].replace(",no,", ",,").replace(",yes,", ",,")])
    drop = ("--missing", "drop", "--without-dp", "--yes")
    priors = ("--set", "model.options.priors={}")

    def used(*, by: str, noise: str | None = None) -> int:
        """Rows of a job without differential privacy, or, `noise`, under it: of the server exact totals are seen."""
        offer = study.offer(formula=by, options={"most": {"rows": 4}})
        privacy = (
            Privacy.model_validate({"unit": "record", "epsilon": 1.0, "delta": 1e-5, "noise": noise}) if noise else None
        )
        offer = replace(offer, config=offer.config.model_copy(update={"privacy": privacy}))
        policy = read_policy(door.policy)
        config = Decision(offer, study.world.homes["east"].roster(NOW), policy, policy.data["data"]).local_config(
            "east"
        )
        return len(formula_part(config, "east", formula_model(config.model))[1].columns["wheeze"])

    assert door.allow("--set", f"model.formula={second}", *priors, *drop).exit_code == 0
    alone, first = used(by=second), door.policy.read_bytes()
    assert alone == 90
    door.policy.write_bytes(first + b'\n[[model]]\nhash = "' + b"0" * 64 + b'"\n')
    assert used(by=second) == (89 if held else 90)  # beside a program, which reads all columns
    door.policy.write_bytes(first)
    again = ["policy", "allow", str(study.job.path), "--home", str(door.home), "--without-dp", "--yes"]
    assert CliRunner().invoke(cli, again).exit_code == 0  # no job was run yet
    both = (89, 89) if held else (90, 89)
    assert (used(by=second), used(by=FORMULA)) == both
    assert tuple(used(by=formula, noise="server") for formula in (second, FORMULA)) == both
    assert tuple(used(by=formula, noise="distributed") for formula in (second, FORMULA)) == (90, 89)  # noise hides it
    door.policy.write_bytes(first)
    offer, east = study.offer(formula=second, options={"most": {"rows": 4}}), study.world.homes["east"]
    said = study.join(offer).policy  # in a server's report, which the site checks by what its log has
    assert said == stated_policy(east, offer.job, verify(east.log_file).jobs[offer.job].fields["policy"])
    answer = CliRunner().invoke(cli, again)
    assert "left out 0 of the 90 rows of data set 'data'" in str(answer.exception)
    assert door.policy.read_bytes() == first


@pytest.mark.parametrize("held", [True, False])
def test_where_the_server_adds_the_noise_no_job_leaves_one_record_out(
    world: World, tmp_path: Path, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees totals exactly, and under record privacy rows with a gap are left out whatever `missing` says: of all
    formulas that are agreed to, as without privacy; and by `most` those that the policy says, not the job, there and
    where the number of records is public. The control leaves out each formula's own: totals differ by one row."""
    if not held:
        monkeypatch.setattr(Decision, "_complete", ())
        monkeypatch.setattr(Decision, "_fitting", ())
    study, second = Study(world, tmp_path), "wheeze ~ 1 + (1 | child)"
    rows = study.rows(0)
    study.write("east", [*rows[:-1], rows[-1].replace(",no,", ",,").replace(",yes,", ",,")])
    rule = {"formula": [FORMULA, second], "family": "bernoulli", "priors": "any"}
    rules = {"dp": "required", "max_epsilon": 1.0, "max_delta": 1e-4, "min_noise_multiplier": 0.1}
    rules |= {"noise": ["server", "silo"]}
    seen = []
    for formula in (second, FORMULA):
        for more in ({"noise": "silo", "public_counts": True}, {"noise": "server"}):
            privacy = Privacy.model_validate({"unit": "record", "epsilon": 1.0, "delta": 1e-5, **more})
            study.config = study.config.model_copy(update={"privacy": privacy})
            offer = study.offer(formula=formula, options={"most": {"rows": 4}})
            for most in ("any", {"rows": 4}):
                study.allow("east", model=[{**rule, "most": most}], privacy=rules, disclosures=["exact_counts"])
                policy = read_policy(study.world.homes["east"].policy_file)
                with pytest.raises(PolicyError, match="has to be numbers") if most == "any" else nullcontext():
                    check(offer, policy)
        decision = Decision(offer, study.world.homes["east"].roster(NOW), policy, policy.data["data"])
        model = formula_model(offer.config.model)
        seen.append(int(formula_part(decision.local_config("east"), "east", model, [])[0]["present"].sum()))
    assert seen == ([89, 89] if held else [90, 89])


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("by", ["family", "most", "dtype"])
def test_where_the_server_adds_the_noise_a_record_fits_all_formulas_or_none(
    world: World, tmp_path: Path, by: str, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two jobs that a policy lets in one does not take the last child: a count below 0, a visit more than `most`, a
    number past 32 bits. Neither does the other, whose exact total would differ by that child's. The control is the
    former rule, by which a record had to fit the job's own formula alone, in the job's own type."""
    if not held:
        monkeypatch.setattr(Decision, "_fitting", ())
        monkeypatch.setattr(records, "_fitted_as", lambda config: config.run.torch_dtype)
    study = Study(world, tmp_path)
    head, *rows = study.rows(0)
    rows = [f"{row},2,1.0" for row in rows]
    rows[-1] = rows[-1].replace(",2,1.0", {"family": ",-1,1.0", "most": ",2,1.0", "dtype": ",2,1e39"}[by])
    rows += [rows[-1].replace(",9,", ",10,").replace(",2,", ",3,", 1)] if by == "most" else []
    study.write("east", [f"{head},colds,dose", *rows])
    told = DICTIONARY + "".join(
        f'[columns.{name}]\nkind = "{kind}"\ncentre = 1.0\nscale = 1.0\n'
        for name, kind in (("colds", "integer"), ("dose", "number"))
    )
    coded = {"dictionary": dictionary_of(wording.loads(told), "d").to_table(), "options": {"most": {"rows": 4}}}
    jobs: list[dict[str, Any]] = [{**coded, "formula": "colds ~ dose + (1 | child)", "family": "gaussian"}] * 2
    jobs[1] = jobs[0] | {"family": {"family": "poisson"}, "most": {"options": {"most": {"rows": 3}}}}.get(by, {})
    rules = [rule_of(study.config.model.model_copy(update=job)) for job in jobs]
    if by == "family":  # in one rule
        rules = [rules[0] | {"family": "any"}]
    privacy = Privacy.model_validate({"unit": "record", "epsilon": 1.0, "delta": 1e-5, "noise": "server"})
    floor = {"max_epsilon": 1.0, "max_delta": 1e-4, "min_noise_multiplier": 0.1, "noise": ["server"]}
    seen = []
    for job, dtype in zip(jobs, ("float64", "float32" if by == "dtype" else "float64"), strict=True):
        run = study.config.run.model_copy(update={"dtype": dtype})
        study.config = study.config.model_copy(update={"privacy": privacy, "run": run})
        study.allow("east", dictionary=told, model=rules, privacy=floor)
        offer, policy = study.offer(**job), read_policy(world.homes["east"].policy_file)
        check(offer, policy)
        config = Decision(offer, world.homes["east"].roster(NOW), policy, policy.data["data"]).local_config("east")
        left_out: list[str] = []
        seen.append(len(formula_part(config, "east", formula_model(offer.config.model), left_out)[0]["y"]))
        assert bool(left_out) is (seen[-1] < 30)
    assert seen == ([29, 29] if held else [30, 29])


def test_rows_that_other_formulas_leave_out_are_left_out_of_formulas_alone(door: Door) -> None:
    """A program reads all columns, and where gaps are dropped those of all columns are. The control is a formula."""
    study = door.study
    assert door.allow("--missing", "drop", "--without-dp", "--yes").exit_code == 0
    door.policy.write_bytes(door.policy.read_bytes() + b'\n[[model]]\nhash = "' + b"0" * 64 + b'"\n')
    policy, roster = read_policy(door.policy), study.world.homes["east"].roster(NOW)
    offer = study.offer(formula=FORMULA, options={"most": {"rows": 4}})
    program = offer.config.model.model_copy(update={"formula": None, "program": "six-cities"})
    for model, complete in ((offer.config.model, True), (program, False)):
        of = replace(offer, config=offer.config.model_copy(update={"model": model}))
        local = Decision(of, roster, policy, policy.data["data"]).local_config("east")
        assert [bool(silo.complete) for silo in local.silo if silo.id == "east"] == [complete]


def test_a_job_writes_no_file_where_it_likes(door: Door) -> None:
    """Who sends a job names its data set, and the dictionary was written under that name. The controls: a plain name,
    and a dictionary that the site names itself."""
    private = ("--set", "privacy.unit=record", "--set", "privacy.epsilon=1.0", "--set", "privacy.delta=1e-7")
    private += ("--set", "privacy.noise=silo")
    outside = door.home.parent / "outside"
    for name in ("../outside", str(outside), "rosters/1", "a\\u001b[2K"):
        answer = door.allow("--yes", *private, "--set", f'privacy.data_set="{name}"')
        assert "name the dictionary's file: --dictionary FILE" in str(answer.exception)
        assert door.held() == door.before
    assert not list(door.home.parent.rglob("*.dictionary.toml"))
    own = door.study.folder / "dictionary.toml"
    assert door.allow("--yes", *private, "--set", "privacy.data_set=a/b", "--dictionary", str(own)).exit_code == 0
    assert not list(door.home.parent.rglob("*.dictionary.toml"))
    door.policy.write_bytes(door.before["policy.toml"])  # no file stands under two names
    assert door.allow("--yes", *private, "--set", "privacy.data_set=plain").exit_code == 0
    assert [p.name for p in door.home.parent.rglob("*.dictionary.toml")] == ["plain.dictionary.toml"]


def test_what_is_shown_before_the_question_hides_nothing(
    door: Door, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job's words could move the terminal's cursor, and write over what it discloses. The control: click's echo."""
    policy = importlib.import_module("secure_fvi.cli.policy")  # the name in its package is the command's
    hiding = "a line\x1b[2K\x1b[1A\u202e\r"
    policy._say([hiding, "next"])
    assert capsys.readouterr().out == "a line?[2K?[1A??\nnext\n"
    click.echo(hiding)
    assert capsys.readouterr().out == "a line\u202e\r\n"  # click drops colours where nobody looks
    monkeypatch.setattr(policy, "_formula_lines", lambda job: [hiding])
    answer = door.allow("--without-dp", said="n\n")
    assert "a line?[2K?[1A??\n" in answer.output


def test_a_jobs_words_move_no_cursor_in_a_policy_that_is_checked(world: World, tmp_path: Path) -> None:
    """A data set's name with terminal codes and lines of its own. The control: its letters are there."""
    door, own = Door(world, tmp_path), tmp_path / "own.toml"
    own.write_text(DICTIONARY)
    name = json.dumps("data\x1b[1A\x1b[2K\r  disclosures: none\n  differential privacy required")
    asked = (
        "--set", "algorithm={name='sfvi',iterations=3}",
        "--set", f'privacy={{unit="record",epsilon=1.0,delta=1e-6,clipping_norm=1.0,data_set={name}}}',
    )  # fmt: skip
    door.allow("--yes", "--without-dp", "--dictionary", str(own), *asked)
    said = CliRunner().invoke(cli, ["policy", "check", "--home", str(door.home)], color=True).output
    assert "data?[1A" in said
    assert "\x1b" not in said
    assert sum(line.startswith("  disclosures:") for line in said.splitlines()) == 1


@pytest.mark.parametrize("command", ["hash-model", "explain"])
def test_no_words_of_a_job_move_the_cursor_of_who_looks_at_it(door: Door, command: str) -> None:
    """Whichever of its texts they stand in. The control: click's echo of what the hash is over."""
    evil = "\x1b[2K\r\u202e\x9b2J"
    table = wording.loads(door.study.job.path.read_text())
    table["model"] |= {"dictionary": wording.loads(DICTIONARY)}
    words = [("model", "formula"), ("model", "family"), ("algorithm", "name"), ("silo", 0, "id"), ("silo", 0, "data")]
    words += [
        ("model", "dictionary", "columns", "smoke", "levels", 0),
        ("model", "dictionary", "columns", "age", "unit"),
    ]
    for *path, last in words:
        job = copy.deepcopy(table)
        functools.reduce(lambda at, key: at[key], path, job)[last] += evil
        door.study.job.path.write_text(wording.dumps(job))
        said = CliRunner().invoke(cli, ["policy", command, str(door.study.job.path)], color=True)
        shown = said.output if said.exception is None else cli_module._one_line(str(said.exception))
        assert all(line.isprintable() for line in shown.split("\n")), (path, shown)
    table["model"]["formula"] += evil
    door.study.job.path.write_text(wording.dumps(table))
    assert evil in str(manifest(read(door.study.job.path)).settings["formula"])
