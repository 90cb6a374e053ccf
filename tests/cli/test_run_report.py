"""report.html says of a run what is true of its secure sum, its engine and its privacy, and nothing else."""

from __future__ import annotations

import csv
import html
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import command_line
import pytest

from secure_fvi.runs.config import parse
from secure_fvi.runs.directory import RunDirectory
from secure_fvi.runs.report import _kept_words, _methods, _privacy_words, what_left, write_report
from secure_fvi.runs.watching import snapshot

CONFIG = """
[model]
program = "six-cities"
[partition]
count = 3
ids = ["a", "b", "c"]
[algorithm]
name = "sfvi"
iterations = 2
[aggregation]
kind = "masked"
"""
ONE, APART = "one process", "mutual-TLS streams"
NOTHING_BEYOND = "nothing beyond what totals tell"
IN_ONE = "All parties ran in one process here"
SEES_EACH = "the server sees each silo's own"
#: Of each secure sum: its options, what the page has to say, and what would be false of it.
SUMS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "plain": ({"kind": "plain"}, (SEES_EACH,), (NOTHING_BEYOND, "masked before", "once the parties are on machines")),
    "masked": ({}, (NOTHING_BEYOND, "whichever other silos", "fewer than 3 silos"), (SEES_EACH, "was off")),
    "masked-unchecked": ({"consistency_check": False}, (NOTHING_BEYOND, "was off"), ("in league.",)),
    "two": ({"min_cohort": 2}, ("subtract its own term", "fewer than 2 silos"), ()),
    "homomorphic": (
        {"kind": "homomorphic"}, ("noise to it", "no more than 1 of the 3 silos"), ("totals in clear", "trusted to add")
    ),
    "homomorphic-unmasked": (
        {"kind": "homomorphic", "masks": False}, ("totals in clear", "trusted to add"), ("noise to it",)
    ),
    "ckks": ({"kind": "homomorphic", "scheme": "ckks"}, ("totals in clear", "trusted to add"), ("noise to it",)),
}  # fmt: skip
PRIVACY = {
    "unit": "record", "epsilon": 1.0, "delta": 1e-5, "accountant": "rdp", "adjacency": "add or remove one",
    "noise": "distributed", "mechanism": "skellam", "noise_multiplier": 4.0, "clipping_norm": 1.0, "releases": 3,
    "public": ["number of silos"], "rng": "operating system",
}  # fmt: skip

ASKED = {"unit": "record", "epsilon": 1.0, "delta": 1e-5, "clipping_norm": 1.0, "noise": "silo"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return command_line.ran(tmp_path_factory.mktemp("report"), CONFIG)


def page_of(
    ran: Path,
    out: Path,
    engine: str,
    aggregation: dict[str, Any],
    privacy: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    **result: Any,
) -> str:
    """The report of a run that differs from `ran` in what is given."""
    shutil.copytree(ran, out)
    config = RunDirectory(out).read_config()
    options = {"kind": "masked", **aggregation}
    other = type(config.aggregation)(**options)
    (out / "config.toml").write_text(config.model_copy(update={"aggregation": other}).to_toml())
    for name, change in (("run", {"engine": engine}), ("result", {"privacy": privacy, **result})):
        content = json.loads((out / f"{name}.json").read_text()) | change
        if name == "result":
            content["aggregation"]["kind"] = options["kind"]
        (out / f"{name}.json").write_text(json.dumps(content))
    if algorithm:  # by this private job, not by the one that ran
        told = {**tomllib.loads(CONFIG), "algorithm": algorithm, "privacy": ASKED}
        (out / "config.toml").write_text(parse(told, "job.toml").to_toml())
    write_report(out)
    return html.unescape((out / "report.html").read_text()).split("<details>")[0]


@pytest.mark.parametrize("engine", [ONE, APART])
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.later("plain-one process")
def test_it_says_what_the_sum_shows(ran: Path, tmp_path: Path, name: str, engine: str) -> None:
    options, true, false = SUMS[name]
    page = page_of(ran, tmp_path / "out", engine, options)
    assert all(text in page for text in true)
    assert not any(text in page for text in false)
    assert (IN_ONE in page) == (engine == ONE)
    assert ("carried by mutual-TLS streams" in page) == (engine == APART)
    assert ("in the checkpoint folder" in page) == (engine == ONE)
    assert ("in that silo's own folder and not here" in page) == (engine == APART)
    assert ("the totals of 2 rounds, taken together" in page) == (name != "plain")


@pytest.mark.parametrize("adjacency", ["add or remove one", "replace one"])
@pytest.mark.parametrize("noise", ["distributed", "silo", "server"])
def test_it_says_what_privacy_covers(ran: Path, tmp_path: Path, noise: str, adjacency: str) -> None:
    page = page_of(ran, tmp_path / "out", ONE, {}, {**PRIVACY, "noise": noise, "adjacency": adjacency})
    assert "No differential privacy" not in page
    assert ("saw totals without it" in page) == (noise == "server")
    assert ("for adding or removing one record" in page) == (adjacency == "add or remove one")
    assert ("for replacing what one silo holds of one person" in page) == (adjacency == "replace one")
    assert "by group privacy" not in page  # of runs before 0.2 nothing is known of it
    whole = {"whose": "a person's columns at all 3 silos", "records": 3, "epsilon": 3.0, "delta": 1.11e-4}
    told = {**PRIVACY, "noise": noise, "adjacency": adjacency, "linked": whole, "colluders": 2}
    page = page_of(ran, tmp_path / "linked", ONE, {}, told)
    assert "for a person's columns at all 3 silos: (3, 0.0001), by group privacy" in page
    assert "It holds against whoever sees all releases" in page
    assert ("with up to 2 other silos in league" in page) == (noise == "distributed")
    assert "but for the server" in page or noise != "server"
    assert ("The number of records is not released." in page) == (adjacency == "add or remove one")
    assert ("number of people" in page) == (adjacency == "replace one")  # whose rows are aligned: all know how many


@pytest.mark.parametrize(
    ("private", "engine", "said"),
    [(False, ONE, "no differential privacy"), (True, APART, "at its own site"), (True, ONE, "charged yet")],
)
def test_the_watch_page_says_why_it_shows_no_budget(
    ran: Path, tmp_path: Path, private: bool, engine: str, said: str
) -> None:
    """A deployed private run has its ledgers at its sites, and is no run without privacy."""
    shutil.copytree(ran, tmp_path / "out")
    if private:
        with (tmp_path / "out" / "config.toml").open("a") as file:
            file.write('\n[privacy]\nunit = "record"\nepsilon = 1.0\ndelta = 1e-5\nclipping_norm = 1.0\n')
    run = json.loads((tmp_path / "out" / "run.json").read_text()) | {"engine": engine}
    (tmp_path / "out" / "run.json").write_text(json.dumps(run))
    state = snapshot(tmp_path / "out")
    assert state["budgets"] == []
    assert said in state["no_budgets"]


@pytest.mark.parametrize("schedule", ["asynchronous", "synchronous"])
def test_a_run_whose_totals_tell_of_single_silos_says_so(schedule: str) -> None:
    """The control: the same by a schedule whose totals do not."""
    asks = {"reveal_changes": True, "buffer": 3} if schedule == "asynchronous" else {}
    table = {**tomllib.loads(CONFIG), "partition": {"count": 5}}
    table["algorithm"] = {"name": "pvi", "rounds": 4, "schedule": schedule, **asks}
    said = " ".join(note.text for note in what_left(parse(table, "job.toml"), 5))
    assert ("equations that the server can solve" in said) == (schedule == "asynchronous")


@pytest.mark.parametrize(
    ("silos", "options", "said"),
    [
        (5, {}, "whichever other silos are in league"),
        (64, {}, "no more than 6 of the 64 silos are in league"),
        (7, {"max_missing": 2, "max_differences": 1}, "no more than 2 of the 7 silos are in league"),
        (64, {"max_missing": 25, "max_differences": 1}, "no more than 6 of the 64 silos are in league"),
    ],
)
def test_it_names_as_many_colluders_as_the_sums_withstand(silos: int, options: dict[str, int], said: str) -> None:
    """That a third opens single terms of 64 silos is `test_a_third_in_league_isolates_silos_of_a_large_roster`."""
    table = {**tomllib.loads(CONFIG), "partition": {"count": silos}, "aggregation": {"kind": "masked", **options}}
    assert said in " ".join(note.text for note in what_left(parse(table, "job.toml"), silos))


def test_it_says_what_lengths_of_gradients_tell_of_the_number_of_records(ran: Path, tmp_path: Path) -> None:
    """That it is not released at all is said of the controls alone, whose records say no lengths."""
    whole, steps = (
        "The number of records is not released.",
        {"name": "pvi", "rounds": 2, "private": "steps", "scale_rate": 0.2},
    )
    sfvi = {"name": "sfvi", "iterations": 2}
    told = {**PRIVACY, "clipped": {"share": 0.1, "error": 0.01, "records": 512.34}}
    counted, *hidden = [
        page_of(ran, tmp_path / f"told-{k}", ONE, {}, privacy, algorithm)
        for k, (privacy, algorithm) in enumerate(((told, sfvi), (PRIVACY, sfvi), (PRIVACY, steps)))
    ]
    assert "not released but with noise, by how many records' gradients are how long: about 512. " in counted
    assert all("but with noise, by how many records' gradients are how long. " in page for page in hidden)
    assert not any(whole in page for page in (counted, *hidden))
    silent = ({**sfvi, "lengths_share": 0.0}, {"name": "pvi", "rounds": 2})
    assert all(whole in page_of(ran, tmp_path / str(k), ONE, {}, PRIVACY, one) for k, one in enumerate(silent))


def test_of_a_point_it_says_nothing_of_sds(ran: Path, tmp_path: Path) -> None:
    """The control: the same of a run whose posterior has sds."""
    spoken = "intervals are too short"
    assert spoken in page_of(ran, tmp_path / "spread", ONE, {}, PRIVACY)
    posterior = json.loads((ran / "result.json").read_text())["posterior"]
    point = {site: moments | {"sd": _zeros(moments["sd"])} for site, moments in posterior.items()}
    page = page_of(ran, tmp_path / "point", ONE, {}, PRIVACY, posterior=point)
    assert spoken not in page
    assert "moved the point is not known" in page.lower()
    assert "<th>sd</th>" not in page
    assert "<th>sd</th>" in page_of(ran, tmp_path / "sds", ONE, {}, PRIVACY)


def test_no_lengths_are_said_to_tell_how_many_records_there_are_where_a_server_would_see_them(
    ran: Path, tmp_path: Path
) -> None:
    """The control is the same by shares of noise."""
    lengths = "by how many records' gradients are how long"
    sfvi = {"name": "sfvi", "iterations": 2}
    for noise in ("distributed", "server"):
        asked = {**tomllib.loads(CONFIG), "algorithm": sfvi, "privacy": {**ASKED, "noise": noise}}
        page_of(ran, tmp_path / noise, ONE, {}, {**PRIVACY, "noise": noise})
        (tmp_path / noise / "config.toml").write_text(parse(asked, "job.toml").to_toml())
        write_report(tmp_path / noise)
        assert (lengths in html.unescape((tmp_path / noise / "report.html").read_text())) == (noise == "distributed")


def _zeros(of: Any) -> Any:
    return [_zeros(one) for one in of] if isinstance(of, list) else 0.0


def test_methods_say_of_which_posterior_estimates_are() -> None:
    """Of a private formula's run: q's is the control."""
    config = parse(tomllib.loads(CONFIG), "job.toml")
    for counts, words in (
        (True, "of a normal that counts the noise of privacy"),
        (False, "of the approximation itself"),
    ):
        sds = {"count_noise": counts, "because": "none"}
        result = {
            "formula": {}, "saved": {"model": {"formula": "y ~ x", "family": "gaussian"}}, "silos": ["a", "b", "c"],
            "privacy": {**PRIVACY, "sds": sds}, "aggregation": {"kind": "masked"}, "metrics": {}, "algorithm": "sfvi",
            "rounds": 2, "converged": None, "convergence": {"reason": "none"},
        }  # fmt: skip
        assert f"central 95% intervals, {words}. " in _methods(result, config, {})


def test_it_says_where_noise_is_that_is_in_steps(ran: Path, tmp_path: Path) -> None:
    """The control: the same of sums that are noised themselves."""
    every = "every total that was released carries"
    page = page_of(ran, tmp_path / "steps", ONE, {}, {**PRIVACY, "noise": "silo", "steps": 40})
    assert every not in page
    assert "one for each of 40 steps of a silo's own fit, carries" in page
    assert "has no noise of its own. 3 releases of 40 such sums each were charged" in page
    assert every in page_of(ran, tmp_path / "sums", ONE, {}, {**PRIVACY, "noise": "silo"})


def test_it_says_that_a_norm_adapts(ran: Path, tmp_path: Path) -> None:
    """The control: one that is fixed."""
    words = "a norm that follows from the totals before"
    assert words in page_of(ran, tmp_path / "adaptive", ONE, {}, {**PRIVACY, "clipping": "adaptive"})
    assert words not in page_of(ran, tmp_path / "fixed", ONE, {}, {**PRIVACY, "clipping": "fixed"})


@pytest.mark.parametrize("quoted", [True, False])
@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@now", "\ta", "\n=1", "＝1", "beta", "a=b", "a;=1+1", 'a";=1'])
def test_no_name_in_the_table_is_a_formula_of_a_spreadsheet(
    ran: Path, tmp_path: Path, name: str, quoted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are of whoever wrote the model, and lists are written with semicolons where decimals have commas. Controls:
    names that are none stand as they are, and without quotes around texts a semicolon begins a cell."""
    if not quoted:
        monkeypatch.setattr(csv, "QUOTE_NONNUMERIC", csv.QUOTE_MINIMAL)
    shutil.copytree(ran, tmp_path / "out")
    content = json.loads((tmp_path / "out" / "result.json").read_text())
    content["posterior"] = {name: {"mean": 1.5, "sd": 0.5}}
    content.pop("parameters", None)
    (tmp_path / "out" / "result.json").write_text(json.dumps(content))
    write_report(tmp_path / "out")
    text = (tmp_path / "out" / "table.csv").read_text()
    row = list(csv.DictReader(text.splitlines(keepends=True)))
    as_it_is = not name.startswith(tuple("=+-@\t\n＝"))
    assert row == [{"site": name if as_it_is else f"'{name}", "mean": "1.5", "sd": "0.5"}]
    cells = [cell for line in csv.reader(text.splitlines(keepends=True), delimiter=";") for cell in line]
    assert any(cell.startswith("=") for cell in cells) is (not quoted and name == "a;=1+1")


@pytest.mark.parametrize("program", ["vertical-logistic", "six-cities"])
def test_it_says_where_silos_of_columns_keep_their_own(program: str) -> None:
    """Of a program of theirs too, whose coefficients lie in a folder; the control has silos of records."""
    columns = program.startswith("vertical")
    table: dict[str, Any] = {"model": {"program": program}, "aggregation": {"kind": "plain"}}
    table |= {"algorithm": {"name": "vertical"}} if columns else {"partition": {"count": 3}}
    config = parse(table, "job.toml")
    assert ("Each silo's own coefficients are in the silos folder" in _kept_words(config, {})) == columns


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("kind", ["plain", "masked"])
def test_it_says_what_rows_of_people_give_away(kind: str, private: bool) -> None:
    """As `policy explain` does; it said that totals tell something about a single record. Not under privacy, and the
    control is a run over records."""
    dp = {"unit": "record", "epsilon": 1.0, "delta": 1e-6, "clipping_norm": 1.0, "noise": "silo"}
    for columns in (True, False):
        table: dict[str, Any] = {"model": {"program": "vertical-logistic" if columns else "six-cities"}}
        table |= {"algorithm": {"name": "vertical"}} if columns else {"partition": {"count": 3}}
        table |= {"aggregation": {"kind": kind}, **({"privacy": dp} if private else {})}
        said = " ".join(note.text for note in what_left(parse(table, "job.toml"), 3) if note.warns)
        assert ("columns of yes and no exactly for each person" in said) == (columns and not private)
        assert ("The response: the server has it and tells it to every silo" in said) == (columns and not private)
        result = {"privacy": None, "aggregation": {"kind": "masked"}, "metrics": {}, "rounds": 8}
        words = _privacy_words({**result, "algorithm": "vertical" if columns else "sfvi"})
        assert ("something about a single record" in words) != columns
